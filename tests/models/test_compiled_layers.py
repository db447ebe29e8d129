"""Compiled decoder layers: one graph for all, and the numbers of the model as it is, also where it does not compile."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional

from pipeline.config.schema import ModelConfig
from pipeline.models.card_attention import attend_by
from pipeline.models.compiled_layers import Uses, compile_layers
from pipeline.models.critic import Critic
from pipeline.models.flat_rows import FlatRows
from pipeline.models.layer_code import LayerCode
from pipeline.models.layer_streaming import decoder_layers
from pipeline.models.log_probs import action_log_probs, action_values
from pipeline.models.lora import adapt, without_adapters
from pipeline.models.packing import PackedRows, log_probs_of_rows, prepare_packing
from pipeline.models.recomputation import checkpoint_activations
from pipeline.models.shared_prefix import prepare_shared_prefix
from tests.support import tiny

# Each test has its own filters, and the code of a process sets its own once. The other one is of Inductor's imports.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]

CPU = torch.device("cpu")
TRAINED = Uses(trained=True, scored=False)
LOGGERS = ("pipeline.models.compiled_layers", "pipeline.models.layer_code")


class Graphs(CompileCounterWithBackend):
    """A backend that counts graphs, and computes them as torch does, or times a factor.

    With `aot` it derives backward graphs and plain operators, as Inductor does, which takes most of its time. With a
    bound it chooses by the tokens of a pass, as Inductor does: a graph serves those on one side of it. With a clock its
    code takes a second longer by it.
    """

    def __init__(
        self, factor: float | None = None, *, aot: bool = False, bound: int | None = None, slow: Clock | None = None
    ) -> None:
        super().__init__("aot_eager" if aot else "eager")
        self._factor = factor
        self._slow = slow
        self._bound = bound

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        run: Callable[..., Any] = super().__call__(graph, inputs)
        if self._bound is not None:
            for size in inputs:
                if isinstance(size, torch.SymInt):
                    # A condition of the graph.
                    bool(size <= self._bound)
        if (clock := self._slow) is not None:

            def late(*given: Any) -> Any:
                clock.now_s += 1.0
                return run(*given)

            return late
        factor = self._factor
        return run if factor is None else lambda *given: [output * factor for output in run(*given)]


def flat(*lengths: int, device: torch.device = CPU) -> FlatRows:
    """Rows of some lengths, all tokens after the first two of which are actions."""
    draws = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, tiny.VOCABULARY_SIZE, (sum(lengths),), generator=draws).to(device)
    ends = np.cumsum(lengths)
    action = np.concatenate([np.arange(end - length + 2, end) for end, length in zip(ends, lengths, strict=True)])
    return FlatRows.of(tokens, np.array(lengths), action, np.repeat(np.arange(len(lengths)), np.array(lengths) - 2))


def block(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Rows of different lengths, left-padded, and their mask."""
    sequences = torch.randint(2, tiny.VOCABULARY_SIZE, (rows, columns), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(columns) >= torch.arange(rows).unsqueeze(1)).long()
    return sequences * mask, mask


def by_mask(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, _longest: int, scaling: float | None, window: int | None
) -> Tensor:
    """The attention of a card's kernel for packed rows, from the same arguments, by a mask of T x T."""
    place = torch.arange(len(query))
    row = torch.bucketize(place, starts, right=True)
    age = place.unsqueeze(1) - place
    mask = (row.unsqueeze(1) == row) & (age >= 0) & (age < (window or len(query)))
    heads = (one.transpose(0, 1).unsqueeze(0) for one in (query, key, value))
    return functional.scaled_dot_product_attention(*heads, mask, scale=scaling, enable_gqa=True)[0].transpose(0, 1)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed rows have a kernel, as on a card."""
    for module in ("packing", "varlen_attention"):
        monkeypatch.setattr(f"pipeline.models.{module}.kernel_of", lambda *_: "torch varlen")
    for module in ("compiled_layers", "varlen_attention"):
        monkeypatch.setattr(f"pipeline.models.{module}.attend_by", lambda _: by_mask)


@pytest.fixture(scope="module", autouse=True)
def _first_compile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile once: the first one of a process imports modules while it traces, and its backend may be called twice."""
    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patched.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        compile_layers({new_model(): Uses()}, CPU, backend=Graphs())
        yield


@pytest.fixture(autouse=True)
def _no_code_of_another_test() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return the lines about compiled layers."""
    for logger in LOGGERS:
        caplog.set_level(logging.INFO, logger=logger)
    return lambda: [record.getMessage() for record in caplog.records if record.name in LOGGERS]


def small_llama(seed: int = 0) -> nn.Module:
    """Heads of 32, a size that rows often have."""
    return tiny.llama(seed, hidden_size=64, num_key_value_heads=1)


def new_model(*, lora: bool = False, packed: bool = False, checkpointed: bool = False) -> nn.Module:
    model = small_llama()
    if lora:
        adapt(model, ModelConfig(lora_rank=2), seed=0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(len(name)))
    if packed:
        assert prepare_packing([model], CPU, True)
    if checkpointed:
        assert checkpoint_activations([model], CPU, True)
    return model


def code_of(model: nn.Module) -> LayerCode:
    (code,) = {vars(layer)["rlhfd_code"] for layer in decoder_layers(model)}
    assert isinstance(code, LayerCode)
    return code


def log_probs(model: nn.Module, rows: int = 5, *, packed: bool = False) -> Tensor:
    if packed:
        return log_probs_of_rows(model, flat(*range(6, 6 + rows)))[0]
    return action_log_probs(model, *block(rows, 12 + rows), 7)


def gradients(model: nn.Module, *, packed: bool = False) -> list[Tensor]:
    log_probs(model, packed=packed).square().mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_one_graph_serves_all_layers_and_all_lengths(packed: bool, lines: Callable[[], list[str]]) -> None:
    model, graphs = new_model(packed=packed), Graphs()

    assert compile_layers({model: Uses(packed, trained=True)}, CPU, backend=graphs) == 2

    # With gradients, and without.
    assert graphs.frame_count == 2
    code = code_of(model)
    code.passes = 0
    for rows in (2, 3, 7, 4):
        log_probs(model, rows, packed=packed).sum().backward()
        with torch.no_grad():
            log_probs(model, rows, packed=packed)
    assert (code.passes, code.missed, graphs.frame_count) == (4 * 2 * 2, 0, 2)
    (line,) = lines()
    assert line.startswith("layers are compiled: model=LlamaForCausalLM layers=2 graphs=2 seconds=")


@pytest.mark.usefixtures("kernel")
def test_the_trial_has_passes_on_both_sides_of_a_bound_by_which_kernels_are_chosen(
    lines: Callable[[], list[str]],
) -> None:
    model, graphs = new_model(packed=True), Graphs(bound=900)

    assert compile_layers({model: replace(TRAINED, packed=True, tokens=1500)}, CPU, backend=graphs) == 2

    for rows in (5, 40):
        log_probs_of_rows(model, flat(*[36] * rows))[0].sum().backward()
    assert (code_of(model).missed, graphs.frame_count) == (0, 2)
    assert "graphs=2" in lines()[0]


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(
    ("packed", "settings"),
    [(False, {}), (True, {"lora": True, "checkpointed": True})],
    ids=["padded", "packed-lora-checkpointed"],
)
def test_log_probs_and_gradients_are_those_of_the_model_as_it_is(packed: bool, settings: dict[str, bool]) -> None:
    plain, model = (new_model(packed=packed, **settings) for _ in range(2))
    uses = Uses(packed, trained=True, scored=False, without_adapters=settings.get("lora", False))

    assert compile_layers({model: uses}, CPU, backend=Graphs(aot=packed))

    assert torch.allclose(log_probs(model, packed=packed), log_probs(plain, packed=packed), rtol=0, atol=1e-5)
    expected, found = gradients(plain, packed=packed), gradients(model, packed=packed)
    assert len(found) == len(expected) > 10
    for mine, its in zip(found, expected, strict=True):
        assert torch.allclose(mine, its, rtol=1e-4, atol=1e-6)
    if uses.without_adapters:
        with torch.no_grad(), without_adapters(model), without_adapters(plain):
            assert torch.allclose(log_probs(model, packed=packed), log_probs(plain, packed=packed), rtol=0, atol=1e-5)
    assert not code_of(model).missed, "a pass was not one of the trial's"


def test_a_critic_is_compiled() -> None:
    critics = [Critic.from_actor(tiny.llama()).eval() for _ in range(2)]
    for critic in critics:
        with torch.no_grad():
            critic.value_head.weight.fill_(0.1)
    graphs = Graphs()

    assert compile_layers({critics[0]: TRAINED}, CPU, backend=graphs) == 2

    found, expected = (action_values(critic, *block(3, 10), 4) for critic in critics)
    assert expected.std() > 0.01
    assert torch.allclose(found, expected, rtol=0, atol=1e-5)
    assert (graphs.frame_count, code_of(critics[0]).missed) == (1, 0)


def test_weights_that_are_copied_in_place_count() -> None:
    model, other = new_model(), small_llama(1)
    before = log_probs(model).detach()
    assert compile_layers({model: TRAINED}, CPU, backend=Graphs())
    with torch.no_grad():
        for mine, its in zip(model.parameters(), other.parameters(), strict=True):
            mine.copy_(its)

    found, expected = log_probs(model), log_probs(other)

    assert not torch.allclose(found, before, atol=0.1)
    assert torch.allclose(found, expected, rtol=0, atol=1e-5)
    assert not code_of(model).missed


def test_decoding_shared_prompts_and_rows_without_padding_are_computed_as_the_model_does() -> None:
    plain, model = new_model(), new_model()
    assert compile_layers({model: Uses()}, CPU, backend=Graphs())
    for one in (plain, model):
        prepare_shared_prefix([one], CPU, True, key="trainer.shared_prefix")
    prompts = torch.tensor([[5, 6, 7], [7, 8, 9]])
    settings: Any = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": tiny.PAD}
    same = flat(6, 6)
    same.tokens[6:8] = same.tokens[0:2]
    code_of(model).passes = 0

    with torch.no_grad():
        tokens = [one.generate(prompts, attention_mask=torch.ones_like(prompts), **settings) for one in (plain, model)]
        shared = [log_probs_of_rows(one, same, shared=True)[0] for one in (plain, model)]
        whole = [action_log_probs(one, prompts, torch.ones_like(prompts), 2) for one in (plain, model)]

    for pair in (tokens, shared, whole):
        assert torch.equal(*pair)
    assert code_of(model).passes == 0


def test_a_pass_that_no_start_computes_compiles_nothing_and_is_told_once(lines: Callable[[], list[str]]) -> None:
    """With gradients here, which a model that is only scored has never; then checkpointing computes it again."""
    plain, model, graphs = new_model(checkpointed=True), new_model(checkpointed=True), Graphs()
    assert compile_layers({model: Uses()}, CPU, backend=graphs)

    found = gradients(model)
    log_probs(model)

    assert lines()[1:] == ["some passes are not compiled: layer=LlamaDecoderLayer reason=no start computes such a pass"]
    assert graphs.frame_count == 1
    for mine, its in zip(found, gradients(plain), strict=True):
        assert torch.equal(mine, its)


def break_graph(model: nn.Module) -> None:
    """Have the second layer read a number of its input, which no graph can."""
    mlp = decoder_layers(model)[1].mlp
    forward = mlp.forward

    def read(states: Tensor) -> Tensor:
        return forward(states) if float(states.detach().sum()) > -1e30 else states

    mlp.forward = read


def test_a_model_that_does_not_compile_is_computed_as_it_is(lines: Callable[[], list[str]]) -> None:
    plain, model, other = new_model(checkpointed=True), new_model(checkpointed=True), new_model()
    for one in (plain, model):
        break_graph(one)

    assert compile_layers({model: TRAINED, other: TRAINED}, CPU, backend=Graphs()) == 2

    failed, compiled = lines()
    assert failed.startswith("layers are not compiled: model=LlamaForCausalLM reason=UserError: ")
    assert "\n" not in failed
    assert compiled.startswith("layers are compiled: ")
    for mine, its in zip(gradients(model), gradients(plain), strict=True):
        assert torch.equal(mine, its)


def test_an_error_while_a_trial_is_timed_leaves_the_model_as_it_is(
    lines: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gain(*_: Any) -> float:
        raise torch.OutOfMemoryError("no memory left\nof the card")

    plain, model = new_model(), new_model()
    monkeypatch.setattr("pipeline.models.compiled_layers._gain", gain)

    assert not compile_layers({model: TRAINED}, CPU, only_if_faster=True, backend=Graphs())

    assert lines()[-1].endswith("reason=OutOfMemoryError: no memory left")
    assert torch.equal(log_probs(model), log_probs(plain))


class Clock:
    """A clock that runs 0.01 s a look, and is put forward by what is slow."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 0.01
        return self.now_s


class Slow(nn.Module):
    """A module that takes a second while it is not compiled."""

    def __init__(self, module: nn.Module, clock: Clock) -> None:
        super().__init__()
        self.module = module
        self._clock = clock

    def forward(self, states: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self._clock.now_s += 1.0
        return self.module(states)


def test_layers_stay_compiled_where_a_trial_is_faster_with_them(lines: Callable[[], list[str]]) -> None:
    model, clock = new_model(), Clock()
    for layer in decoder_layers(model):
        layer.mlp = Slow(layer.mlp, clock)

    assert compile_layers({model: TRAINED}, CPU, only_if_faster=True, backend=Graphs(), clock_s=clock) == 2

    # Two layers of a second each, and one look.
    assert lines()[-1].endswith(" times_as_fast=201.00")
    assert code_of(model).is_used


def test_layers_that_a_trial_computes_no_faster_are_left_as_they_are(
    lines: Callable[[], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    plain, model, clock = new_model(), new_model(), Clock()

    assert not compile_layers({model: TRAINED}, CPU, only_if_faster=True, backend=Graphs(slow=clock), clock_s=clock)

    assert lines()[-1] == ("layers are not compiled: model=LlamaForCausalLM reason=its passes are 0.00 times as fast")
    assert torch.equal(log_probs(model), log_probs(plain))
    assert all("forward" not in vars(layer) for layer in decoder_layers(model))
    assert all(record.levelno < logging.WARNING for record in caplog.records if record.name in LOGGERS)


@pytest.mark.parametrize("faster", [False, True])
def test_code_that_computes_other_numbers_is_not_used(lines: Callable[[], list[str]], faster: bool) -> None:
    plain, model, clock = new_model(), new_model(), Clock()
    for layer in decoder_layers(model) if faster else ():
        layer.mlp = Slow(layer.mlp, clock)

    assert not compile_layers({model: Uses()}, CPU, only_if_faster=faster, backend=Graphs(factor=1.2), clock_s=clock)

    assert "reason=the trial differs: outputs by" in lines()[0]
    assert torch.equal(log_probs(model), log_probs(plain))
    assert all("forward" not in vars(layer) for layer in decoder_layers(model))


def test_packed_rows_without_a_kernel_are_computed_one_by_one(lines: Callable[[], list[str]]) -> None:
    plain, model, graphs = new_model(packed=True), new_model(packed=True), Graphs()

    assert not compile_layers({model: Uses(packed=True, trained=True)}, CPU, backend=graphs)

    assert lines() == [
        "layers are not compiled: model=LlamaForCausalLM reason=this device and dtype have no kernel for packed rows"
    ]
    assert torch.equal(log_probs(model, packed=True), log_probs(plain, packed=True))
    assert graphs.frame_count == 0


@pytest.mark.parametrize("takes_gradients", [True, False])
@pytest.mark.parametrize(("build", "kinds"), [(tiny.llama, 1), (tiny.mistral, 1), (tiny.gemma3, 2)])
def test_the_kernel_of_a_card_is_part_of_the_one_graph_of_each_kind_of_layers(
    build: Callable[[], Any], kinds: int, takes_gradients: bool
) -> None:
    """Without a card on tensors that hold no bytes; each pass has other rows, and another longest row."""
    model, graphs = build(), Graphs()
    prepare_packing([model], CPU)
    model.to("meta", torch.bfloat16)
    code = LayerCode(packed=True, attend=attend_by("torch varlen"), backend=graphs)
    layers = code.attach(model)

    for lengths in ((5, 9), (4, 7, 12), (30, 2)):
        rows = PackedRows.of_flat(flat(*lengths))
        keywords = rows.keywords(model)
        given = {name: one.to("meta") for name, one in keywords.items() if isinstance(one, Tensor)}
        with torch.set_grad_enabled(takes_gradients):
            states = model.base_model(input_ids=rows.input_ids.to("meta"), **{**keywords, **given}).last_hidden_state
        assert states.shape == (1, sum(lengths) - len(lengths), 16)
        if takes_gradients:
            states.sum().backward()

    assert (graphs.frame_count, code.missed, code.passes) == (kinds, 0, 3 * layers)
    for each in graphs.graphs:
        assert sum("_varlen_attn" in str(node.target) for node in each.graph.nodes) == 1


def operators(call: Callable[[], object]) -> Counter[str]:
    """Return the operators of torch that a call runs, by name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        call()
    return Counter(event.name for event in profiler.events() if event.name.startswith("aten::"))


@pytest.mark.variant
def test_inductor_computes_a_pass_with_a_part_of_the_operators_and_repeats_its_bits() -> None:
    plain, model, again = new_model(), new_model(), new_model()
    with torch.no_grad():
        before, expected = operators(lambda: log_probs(plain)), log_probs(plain)
        assert compile_layers({model: Uses()}, CPU) == 2
        after, found = operators(lambda: log_probs(model)), log_probs(model)
        # As a role that starts anew, from the code on disk.
        torch._dynamo.reset()
        assert compile_layers({again: Uses()}, CPU) == 2
        repeated = log_probs(again)

    assert sum(after.values()) < 0.6 * sum(before.values()), (after, before)
    # In double precision eager passes are 1.1e-5 away, and Inductor's, on CPUs with AVX-512, 4.8e-5.
    assert torch.allclose(found, expected, rtol=0, atol=1e-4)
    assert torch.equal(repeated, found)
