"""Log-probs and values at action positions, the critic, and loading from directories."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    FNetConfig,
    FNetForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
    T5Config,
    T5ForSequenceClassification,
    XLNetConfig,
    XLNetForSequenceClassification,
)

from pipeline.config.model_files import problem_of_model
from pipeline.config.schema import Config
from pipeline.errors import ConfigError, FieldError, ShapeError
from pipeline.models.critic import Critic
from pipeline.models.inputs import position_ids_from_mask
from pipeline.models.loading import load_actor, load_critic, load_reward_model, load_tokenizer, refuse_large_tokenizer
from pipeline.models.log_probs import action_log_probs, action_log_probs_and_entropies, action_values
from pipeline.models.reward_model import SequenceReward
from pipeline.trainer import process
from pipeline.trainer.setup import _make_tokenizer
from tests.support import tiny


def padded(row: list[int], left: int, right: int) -> tuple[Tensor, Tensor]:
    """One row, (1, S), and its mask."""
    sequences = torch.tensor([[tiny.PAD] * left + row + [tiny.PAD] * right])
    mask = torch.tensor([[0] * left + [1] * len(row) + [0] * right])
    return sequences, mask


ROW = [5, 9, 3, 17, 8, 11, 1]


def slow_log_probs(model: torch.nn.Module, row: list[int], num_actions: int, temperature: float = 1.0) -> list[float]:
    """The definition, one token at a time: log softmax(logits / temperature) given the tokens before it."""
    result = []
    for position in range(len(row) - num_actions, len(row)):
        logits = model(input_ids=torch.tensor([row[:position]])).logits[0, -1].double()
        result.append(torch.log_softmax(logits / temperature, dim=-1)[row[position]].item())
    return result


def test_position_ids_count_real_tokens_only() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 0, 1, 1]])

    assert position_ids_from_mask(mask).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 2, 2], [0, 0, 0, 1, 2]]
    assert position_ids_from_mask(mask.bool()).dtype == torch.int64


@pytest.mark.parametrize("build", [tiny.llama, tiny.gpt2])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@torch.no_grad()
def test_log_probs_equal_one_forward_a_token(build: type[GPT2LMHeadModel], temperature: float) -> None:
    model = build()
    sequences, mask = padded(ROW, 0, 0)

    log_probs = action_log_probs(model, sequences, mask, 4, temperature=temperature)

    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(
        log_probs[0].double(), torch.tensor(slow_log_probs(model, ROW, 4, temperature)).double(), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("build", [tiny.llama, tiny.gpt2])
@torch.no_grad()
def test_left_padding_changes_no_log_prob(build: type[GPT2LMHeadModel]) -> None:
    """Without position ids from the mask GPT-2 is off by whole nats here."""
    model = build()
    expected = action_log_probs(model, *padded(ROW, 0, 0), 4)

    for left, right in ((5, 0), (0, 3), (4, 2)):
        log_probs = action_log_probs(model, *padded(ROW, left, right), 4 + right)[:, :4]

        torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("build", [tiny.llama, tiny.gpt2])
@torch.no_grad()
def test_left_padding_changes_no_value(build: type[GPT2LMHeadModel]) -> None:
    critic = Critic.from_actor(build())
    torch.nn.init.normal_(critic.value_head.weight, generator=torch.Generator().manual_seed(0))
    expected = action_values(critic, *padded(ROW, 0, 0), 4)

    for left, right in ((5, 0), (0, 3), (4, 2)):
        values = action_values(critic, *padded(ROW, left, right), 4 + right)[:, :4]

        torch.testing.assert_close(values, expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_the_value_of_an_action_is_that_of_the_state_before_it() -> None:
    critic = Critic.from_actor(tiny.llama())
    torch.nn.init.normal_(critic.value_head.weight, generator=torch.Generator().manual_seed(0))

    values = action_values(critic, *padded(ROW, 2, 0), 3)

    for action in range(3):
        before = ROW[: len(ROW) - 3 + action]
        alone = critic(input_ids=torch.tensor([before]), attention_mask=torch.ones(1, len(before)))[0, -1]
        torch.testing.assert_close(values[0, action], alone, atol=1e-5, rtol=0)


def test_chunks_change_neither_numbers_nor_gradients() -> None:
    model = tiny.llama()
    sequences, mask = torch.tensor([ROW, ROW[::-1]]), torch.ones(2, 7, dtype=torch.int64)
    results = []
    for chunk_tokens in (None, 3, 1):
        model.zero_grad()
        log_probs, entropy = action_log_probs_and_entropies(
            model, sequences, mask, 5, temperature=0.8, chunk_tokens=chunk_tokens
        )
        (log_probs * torch.arange(10.0).view(2, 5) + entropy**2).sum().backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        results.append([log_probs.detach(), entropy.detach(), *gradients])

    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("chunk_tokens", [2, 100])
def test_gradients_equal_those_of_plain_log_softmax(chunk_tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 6, generator=generator).requires_grad_()
    sequences = torch.randint(0, 6, (2, 5), generator=generator)
    upstream = torch.randn(2, 2, 4, generator=generator)

    def model(input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=logits)

    log_probs, entropy = action_log_probs_and_entropies(
        model, sequences, torch.ones(2, 5), 4, temperature=0.6, chunk_tokens=chunk_tokens
    )
    (gradient,) = torch.autograd.grad((log_probs * upstream[0] + entropy * upstream[1]).sum(), logits)

    plain = torch.log_softmax(logits[:, :-1] / 0.6, dim=-1)
    plain_log_probs = plain.gather(-1, sequences[:, 1:].unsqueeze(-1)).squeeze(-1)
    plain_entropy = -(plain.exp() * plain).sum(-1)
    (expected,) = torch.autograd.grad((plain_log_probs * upstream[0] + plain_entropy * upstream[1]).sum(), logits)
    torch.testing.assert_close(log_probs, plain_log_probs)
    torch.testing.assert_close(entropy, plain_entropy)
    torch.testing.assert_close(gradient, expected)


def test_forbidden_tokens_leave_log_probs_entropy_and_gradients_finite() -> None:
    logits = torch.tensor([[[0.0, 1.0, -torch.inf], [0.0, 0.0, 0.0]]], requires_grad=True)

    log_probs, entropy = action_log_probs_and_entropies(
        lambda input_ids, attention_mask: SimpleNamespace(logits=logits),
        torch.tensor([[0, 1]]),
        torch.ones(1, 2),
        1,
    )
    (log_probs + entropy).sum().backward()

    assert torch.isfinite(log_probs).all()
    assert torch.isfinite(entropy).all()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def test_logits_are_asked_for_at_action_positions_only() -> None:
    asked = []

    def model(input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int) -> SimpleNamespace:
        asked.append(logits_to_keep)
        return SimpleNamespace(logits=torch.zeros(1, logits_to_keep, 4))

    log_probs = action_log_probs(model, torch.zeros(1, 9, dtype=torch.int64), torch.ones(1, 9), 3)

    assert asked == [4]
    torch.testing.assert_close(log_probs, torch.full((1, 3), 0.25).log())


def test_only_one_chunk_of_logits_is_in_float32_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = []
    to_float32 = Tensor.float

    def recorded(tensor: Tensor) -> Tensor:
        largest.append(tensor.numel())
        return to_float32(tensor)

    logits = torch.zeros(4, 9, 50, dtype=torch.bfloat16, requires_grad=True)
    monkeypatch.setattr(Tensor, "float", recorded)
    log_probs = action_log_probs(
        lambda input_ids, attention_mask: SimpleNamespace(logits=logits),
        torch.zeros(4, 9, dtype=torch.int64),
        torch.ones(4, 9),
        8,
        chunk_tokens=5,
    )
    log_probs.sum().backward()

    assert max(largest) == 5 * 50
    assert log_probs.dtype == torch.float32
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


def test_a_critic_is_made_of_a_model_with_a_head_alone() -> None:
    for actor in (tiny.llama().model, Critic.from_actor(tiny.llama())):
        with pytest.raises(FieldError, match=f"a {type(actor).__name__} has no language model head"):
            Critic.from_actor(actor)


def test_shapes_that_disagree_are_refused() -> None:
    model = tiny.llama()
    sequences, mask = padded(ROW, 0, 0)

    with pytest.raises(ShapeError, match=r"\(1, 6\).*\(1, 7\)"):
        action_log_probs(model, sequences, mask[:, 1:], 3)
    with pytest.raises(ShapeError, match="num_actions is 7; it must be from 1 to 6"):
        action_log_probs(model, sequences, mask, 7)
    with pytest.raises(ValueError, match="temperature is 0"):
        action_log_probs(model, sequences, mask, 3, temperature=0.0)
    with pytest.raises(ShapeError, match=r"critic returned values of shape \(1, 7, 1\)"):
        action_values(lambda input_ids, attention_mask: torch.zeros(1, 7, 1), sequences, mask, 3)
    with pytest.raises(ShapeError, match=r"critic returned a CausalLMOutputWithPast for \(1, 7\) tokens"):
        action_values(model, sequences, mask, 3)


def test_a_new_critic_says_zero_and_shares_nothing_with_the_actor() -> None:
    actor = tiny.llama()
    actor.requires_grad_(False)
    critic = Critic.from_actor(actor)

    values = critic(*padded(ROW, 1, 0))

    assert values.tolist() == [[0.0] * 8]
    assert all(parameter.requires_grad for parameter in critic.parameters())
    shared = {parameter.data_ptr() for parameter in actor.parameters()}
    assert not shared & {parameter.data_ptr() for parameter in critic.parameters()}


def test_a_saved_critic_loads_with_its_value_head(tmp_path: Path) -> None:
    critic = Critic.from_actor(tiny.llama())
    torch.nn.init.normal_(critic.value_head.weight, generator=torch.Generator().manual_seed(0))
    critic.save_pretrained(tmp_path)

    loaded = load_critic(tmp_path, dtype="float32", device="cpu")

    torch.testing.assert_close(loaded(*padded(ROW, 1, 0)), critic(*padded(ROW, 1, 0)))


def test_an_actor_directory_makes_a_critic_that_says_zero(tmp_path: Path) -> None:
    actor = tiny.llama()
    actor.save_pretrained(tmp_path)

    critic = load_critic(tmp_path, dtype="float32", device="cpu")

    assert critic(*padded(ROW, 1, 0)).tolist() == [[0.0] * 8]
    torch.testing.assert_close(critic.backbone.embed_tokens.weight, actor.model.embed_tokens.weight)


def test_a_saved_actor_loads_in_the_dtype_asked_for(tmp_path: Path) -> None:
    tiny.llama().save_pretrained(tmp_path)

    actor = load_actor(tmp_path, dtype="bfloat16", device="cpu")

    assert {parameter.dtype for parameter in actor.parameters()} == {torch.bfloat16}
    assert not actor.training


def test_damaged_weights_of_torch_are_named_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.llama()
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.serialization.set_crc32_options(False)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    torch.serialization.set_crc32_options(True)
    load_actor(tmp_path, dtype="float32", device="cpu")
    assert problem_of_model(tmp_path, is_actor=False, is_trained=False) == ""
    (tmp_path / "pytorch_model.bin").write_bytes((tmp_path / "pytorch_model.bin").read_bytes()[:2000])

    with pytest.raises(ConfigError, match=rf"^model\.actor: .* {tmp_path}: a \.bin file of it is damaged; download it"):
        load_actor(tmp_path, dtype="float32", device="cpu")


@pytest.mark.parametrize("load", [load_actor, load_critic, load_reward_model])
def test_a_missing_directory_is_named_with_its_field(load: type[object], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"model\.\w+: no such directory: {tmp_path}/absent"):
        load(tmp_path / "absent", dtype="float32", device="cpu")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"model\.\w+: cannot load a model from"):
        load(tmp_path, dtype="float32", device="cpu")  # type: ignore[call-arg]


def test_a_tokenizer_larger_than_the_model_is_refused_with_both_sizes() -> None:
    tokenizer = _make_tokenizer()
    last = len(tokenizer) - 1

    refuse_large_tokenizer(tokenizer, last + 1, "m")
    with pytest.raises(ConfigError, match=rf"^model\.actor: .* in m is larger .* has the id {last}, .* at {last - 1};"):
        refuse_large_tokenizer(tokenizer, last, "m")


def test_a_trainer_names_a_tokenizer_larger_than_its_model_before_it_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe of version 0 is a prompt: its ids ended in an IndexError, on a card in an assertion of the device."""
    model = tiny.llama()
    model.config.vocab_size = 5
    monkeypatch.setattr(process, "whole_models", lambda config, device: {"actor": model})
    monkeypatch.setattr(process, "load_tokenizer", lambda path: _make_tokenizer())
    monkeypatch.setattr(process, "first_tokens", lambda *_: pytest.fail("the tokenizer is too large"))
    config = Config.model_validate({"model": {"actor": str(tmp_path)}})

    with pytest.raises(ConfigError, match=rf"^model\.actor: the tokenizer in {tmp_path} is larger than the model"):
        process.new_trainer(config, MagicMock(), MagicMock())


def test_a_missing_tokenizer_is_named_with_its_field(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.actor: no such directory"):
        load_tokenizer(tmp_path / "absent")


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.dtype: 'float33'"):
        load_actor(tmp_path, dtype="float33", device="cpu")


def reward_model(labels: int = 1) -> LlamaForSequenceClassification:
    config = LlamaConfig(
        vocab_size=tiny.VOCABULARY_SIZE,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=labels,
        pad_token_id=tiny.EOS,
        bos_token_id=None,
        eos_token_id=tiny.EOS,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return LlamaForSequenceClassification(config).eval()


@torch.no_grad()
def test_a_reward_model_reads_the_stop_even_where_pad_is_eos() -> None:
    """The model's own logits are read before the last token equal to the pad token, which is the stop here."""
    model = reward_model()
    row = torch.tensor([[5, 9, 3, tiny.EOS, tiny.EOS, tiny.EOS]])
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]])

    (score,) = SequenceReward(model)(input_ids=row, attention_mask=mask, response_start=torch.tensor([1]))

    hidden = model.model(input_ids=row[:, :4]).last_hidden_state[0, -1]
    torch.testing.assert_close(score, model.score(hidden)[0])
    assert not torch.allclose(score, model(input_ids=row, attention_mask=mask).logits[0, 0])


def encoder_reward(kind: str, seed: int = 3) -> Any:
    """A sequence-classification model without a head for the last token."""
    sizes = {"vocab_size": tiny.VOCABULARY_SIZE, "num_labels": 1, "pad_token_id": 1}
    layers = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config, model_class = {
        "roberta": (RobertaConfig(**sizes, **layers, max_position_embeddings=30), RobertaForSequenceClassification),
        "bert": (BertConfig(**sizes, **layers, max_position_embeddings=30), BertForSequenceClassification),
        "xlnet": (XLNetConfig(**sizes, d_model=16, n_layer=1, n_head=2, d_inner=24), XLNetForSequenceClassification),
        "fnet": (FNetConfig(**sizes, **layers, max_position_embeddings=30), FNetForSequenceClassification),
        "t5": (
            T5Config(**sizes, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=1),
            T5ForSequenceClassification,
        ),
    }[kind]  # fmt: skip
    return tiny.seeded(model_class, config, seed)


# transformers' own xlnet takes no 16 bits.
@pytest.mark.parametrize(
    ("kind", "dtype", "gap"),
    [(kind, "float32", 1e-5) for kind in ("bert", "roberta", "xlnet")]
    + [(kind, "bfloat16", 0.05) for kind in ("bert", "roberta")],
)
@torch.no_grad()
def test_a_reward_encoder_gives_a_row_the_score_that_it_has_alone(
    tmp_path: Path, kind: str, dtype: str, gap: float
) -> None:
    """Positions of roberta begin behind the number of its padding token, and xlnet reads its last column."""
    model = encoder_reward(kind)
    model.save_pretrained(tmp_path)
    model.to(getattr(torch, dtype))
    short, long = torch.tensor([5, 9, 3, 7]), torch.tensor([6, 2, 8, 8, 4, 5, 9, 7])
    # Padding of another tokenizer on both sides, as of a short prompt and a short response.
    rows = torch.stack([torch.cat([torch.full((1,), 40), short, torch.full((3,), 40)]), long])
    mask = torch.tensor([[0, 1, 1, 1, 1, 0, 0, 0], [1] * 8])

    scores = load_reward_model(tmp_path, dtype=dtype, device="cpu")(input_ids=rows, attention_mask=mask)

    masks = (torch.ones(1, len(row), dtype=torch.int64) for row in (short, long))
    pairs = zip((short, long), masks, strict=True)
    alone = [model(input_ids=row[None], attention_mask=ones).logits[0, 0].float() for row, ones in pairs]
    torch.testing.assert_close(scores, torch.stack(alone), rtol=gap, atol=gap)


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("fnet", "a FNetForSequenceClassification gives a row another score beside a longer row"),
        ("t5", "a T5ForSequenceClassification scores rows that end with its stop token alone"),
    ],
)
def test_a_reward_model_whose_scores_are_not_of_a_row_alone_is_refused(tmp_path: Path, kind: str, problem: str) -> None:
    encoder_reward(kind).save_pretrained(tmp_path)

    with pytest.raises(ConfigError, match=rf"^model\.reward: {tmp_path} cannot be a reward model: {problem}$"):
        load_reward_model(tmp_path, dtype="float32", device="cpu")


def test_a_reward_directory_loads_and_needs_one_label(tmp_path: Path) -> None:
    reward_model().save_pretrained(tmp_path / "one")
    reward_model(labels=2).save_pretrained(tmp_path / "two")

    scores = load_reward_model(tmp_path / "one", dtype="float32", device="cpu")(
        input_ids=torch.tensor([ROW, ROW]), attention_mask=torch.ones(2, 7)
    )

    assert scores.shape == (2,)
    with pytest.raises(ConfigError, match=r"model\.reward: .* has 2 labels"):
        load_reward_model(tmp_path / "two", dtype="float32", device="cpu")
