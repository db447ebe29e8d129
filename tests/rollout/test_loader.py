"""The reference model of a roller: not loaded where no KL weight needs it, and with LoRA the actor's own base."""

import functools
import json
import math
from types import SimpleNamespace

import pytest
import torch

from pipeline.config.schema import Config
from pipeline.config.user_modules import FOLDER_VARIABLE
from pipeline.errors import ConfigError, WeightsMismatchError
from pipeline.models.loading import load_actor, load_tokenizer, shell
from pipeline.models.log_probs import action_log_probs
from pipeline.models.lora import adapter_of
from pipeline.rollout import loader
from pipeline.rollout.generation.blocking import BlockingEngine
from pipeline.rollout.generation.transformers import TransformersGenerator
from pipeline.rollout.generation.weights import ModelWeights
from pipeline.rollout.loader import load_roller
from pipeline.rollout.remote import NodeTelemetry
from pipeline.storage.weights_header import Probe, WeightsVersion
from pipeline.trainer import setup
from tests.support import tiny_vision
from tests.support.proving import prove
from tests.support.told import events_of

CPU = torch.device("cpu")
CHOOSY = """
from pipeline import Turn

class Choosy:
    rows = 0
    def reset(self, prompt, answer, columns):
        Choosy.rows += 1
    def step(self, response):
        if Choosy.rows <= 4: raise ValueError("not yet")
        return Turn(done=True)

def score(*row, **others):
    raise KeyError("no column")
"""


@pytest.fixture
def rollers(task, monkeypatch):
    """Load a roller; the paths of the models that it loaded, and its telemetry, come with it."""
    made = []

    def load(*, model=None, rollout=None, trainer=None, prompts=None, buffer=None, rewards=None):
        paths, telemetry = [], NodeTelemetry()

        def counted(path, **options):
            paths.append(path)
            return load_actor(path, **options)

        monkeypatch.setattr(loader, "load_actor", counted)
        config = Config.model_validate(
            {
                "model": {"actor": str(task / "model"), **(model or {})},
                "prompts": {"path": str(task / "prompts.jsonl"), **(prompts or {})},
                "rollout": {"num_generations": 4, "max_length": 24, **(rollout or {})},
                "trainer": trainer or {},
                "buffer": buffer or {},
                **({} if rewards is None else {"rewards": rewards}),
            }
        )
        roller = load_roller(config, load_tokenizer(config.model.actor), telemetry, texts=True, device=CPU)
        telemetry.take()
        made.append(roller)
        return roller, paths, telemetry

    yield load
    for roller in made:
        roller.close()


def stages(telemetry):
    return [name for name, _ in events_of(telemetry.take(), "staged")]


def test_with_no_kl_weight_above_0_the_reference_is_neither_loaded_nor_run(rollers):
    plain, one, quiet = rollers(trainer={"kl_coef": 0.0})
    compared, two, loud = rollers(trainer={"kl_coef": 0.01})

    without, with_reference = plain.roll(0, 2).rows.padded(), compared.roll(0, 2).rows.padded()

    assert (len(one), len(two)) == (1, 2)
    assert "ref_logprob" not in stages(quiet)
    assert "ref_logprob" in stages(loud)
    assert without.base_action_log_probs is None
    assert with_reference.base_action_log_probs is not None
    for name in ("sequences", "action_log_probs", "advantages", "reward", "values", "kl"):
        assert torch.equal(getattr(without, name), getattr(with_reference, name)), name


def test_an_adapter_of_the_head_is_float32_with_float32_logits_as_in_the_trainer(rollers):
    lora = {"dtype": "bfloat16", "float32_logits": True, "lora_rank": 2, "lora_targets": ["lm_head"]}
    head = rollers(model=lora)[0].maker.actor.lm_head

    states = torch.ones(1, head.in_features, dtype=torch.bfloat16)
    assert (head(states).dtype, head.lora_B(head.lora_A(states)).dtype) == (torch.float32, torch.float32)


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_reference_that_is_the_trainers_is_neither_loaded_nor_run(rollers, lora_rank):
    theirs, one, quiet = rollers(model={"reference_device": "trainer", "lora_rank": lora_rank})
    own, two, loud = rollers(model={"lora_rank": lora_rank})

    without, with_reference = theirs.roll(0, 2).rows.padded(), own.roll(0, 2).rows.padded()

    assert (len(one), len(two)) == (1, 1 if lora_rank else 2)
    assert theirs.maker.initial_model is None
    assert "ref_logprob" not in stages(quiet) and "ref_logprob" in stages(loud)
    assert without.base_action_log_probs is None and with_reference.base_action_log_probs is not None
    for name in ("sequences", "action_log_probs", "advantages", "reward"):
        assert torch.equal(getattr(without, name), getattr(with_reference, name)), name


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A model with more layers than are streamed at a time."""
    folder = tmp_path_factory.mktemp("deep") / "task"
    setup.prepare(folder, warmup_steps=1)
    return str(folder / "model")


@pytest.mark.parametrize(
    "settings",
    [{}, {"rollout": {"kl_coef": 0.1}}, {"trainer": {"world_size": 2, "sharding": "full"}}],
    ids=["kl in the loss", "kl in the reward", "sharded trainer"],
)
def test_a_reference_in_host_memory_gives_the_experience_of_one_in_the_worker_bit_for_bit(rollers, deep, settings):
    host, one, loud = rollers(model={"actor": deep, "reference_device": "host"}, **settings)
    worker, two, _ = rollers(model={"actor": deep}, **settings)

    streamed, whole = host.roll(0, 2).rows.padded(), worker.roll(0, 2).rows.padded()

    assert len(one) == len(two) == 2
    assert "ref_logprob" in stages(loud)
    layers = host.maker.initial_model.base_model.layers
    assert len({parameter.untyped_storage().data_ptr() for parameter in layers.parameters()}) == 2
    for name in ("sequences", "action_log_probs", "base_action_log_probs", "advantages", "reward", "kl"):
        assert torch.equal(getattr(streamed, name), getattr(whole, name)), name


def test_a_first_prompt_that_the_engine_cannot_be_asked_about_has_the_actor_loaded(rollers, monkeypatch, caplog):
    settings = {"model": {"reference_device": "trainer"}, "rollout": {"engine": "vllm", "log_probs": "trainer"}}
    monkeypatch.setattr(loader, "begin_vllm", lambda config, device: None)
    monkeypatch.setattr(
        loader, "load_engine", lambda config, actor, *others: BlockingEngine(TransformersGenerator(actor))
    )
    monkeypatch.setattr(loader, "first_tokens", lambda *arguments: [])

    roller, paths, _ = rollers(**settings)

    assert len(paths) == 1 and isinstance(roller.weights, ModelWeights)
    assert (
        "the actor is loaded, the engine cannot be asked about the first prompt: tokens=0 row_tokens=24" in caplog.text
    )


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ([], WeightsMismatchError, r"^this model does not compute with the weights that it was given: version=3 "),
        (
            ["prompts /p.jsonl"],
            ConfigError,
            r"^prompts /p.jsonl changed while the run goes on, and trainer and worker ",
        ),
    ],
)
def test_an_answer_that_is_not_the_trainers_names_the_files_that_have_changed(monkeypatch, changed, error, said):
    class Even:
        def __call__(self, input_ids, attention_mask):
            return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 4))

        def parameters(self):
            return iter([torch.zeros(1)])

    monkeypatch.setattr(loader, "changed_since_start", lambda config: changed)
    check = loader.weights_check(None, Even(), [1, 2], CPU)
    check(WeightsVersion(3, probe=Probe(math.log(1 / 4), 2)))

    with pytest.raises(error, match=said):
        check(WeightsVersion(3, probe=Probe(math.log(1 / 8), 2)))


def test_vllms_process_begins_before_the_models_and_ends_with_their_error(rollers, monkeypatch):
    events, begun = [], SimpleNamespace(close=lambda: events.append("closed"))

    def engine(config, actor, device, telemetry, begun):
        events.append(begun)
        return BlockingEngine(TransformersGenerator(actor))

    def broken(*arguments):
        events.append("models")
        raise ConfigError("model.reference: broken")

    monkeypatch.setattr(loader, "begin_vllm", lambda config, device: events.append("begun") or begun)
    monkeypatch.setattr(loader, "load_engine", engine)
    rollers()
    monkeypatch.setattr(loader, "load_reference", broken)
    with pytest.raises(ConfigError, match="broken"):
        rollers()

    assert events == ["begun", begun, "begun", "models", "closed"]


def test_the_outline_of_an_actor_has_its_tensors_without_their_memory(task, tmp_path):
    outline, actor = (
        make(task / "model", dtype="bfloat16") for make in (shell, functools.partial(load_actor, device=CPU))
    )

    described = [{name: (t.shape, t.dtype) for name, t in model.state_dict().items()} for model in (outline, actor)]
    assert described[0] == described[1]
    assert {tensor.device.type for tensor in outline.state_dict().values()} == {"meta"}
    assert not outline.training and outline.config.to_dict() == actor.config.to_dict()
    with pytest.raises(ConfigError, match=r"model\.actor: no such directory"):
        shell(task / "none", dtype="float32")
    with pytest.raises(ConfigError, match=r"model\.actor: cannot load a model from"):
        shell(tmp_path, dtype="float32")


def test_an_environment_is_not_blamed_for_a_reward_function(rollers, monkeypatch, tmp_path):
    """It has no answer for the first prompt alone; the function fails for each."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "choosy.py").write_text(CHOOSY)
    settings = {"environment": "choosy:Choosy", "reward_timeout_s": 0.0}

    with pytest.raises(ConfigError, match=r"rewards: choosy:score raised KeyError"):
        rollers(rollout=settings, rewards=["choosy:score"])


@pytest.mark.parametrize("settings", [{"rollout": {"kl_coef": 0.1}, "trainer": {"kl_coef": 0.0}}, {}])
def test_one_kl_weight_above_0_loads_it(rollers, settings):
    _, paths, _ = rollers(**settings)

    assert len(paths) == 2


def test_with_lora_the_reference_is_the_actor_without_its_adapters(rollers):
    roller, paths, _ = rollers(model={"lora_rank": 4})
    maker = roller.maker
    draws = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in adapter_of(maker.actor).values():
            tensor.copy_(torch.randn(tensor.shape, generator=draws) * 0.3)

    experience = roller.roll(0, 2).rows.padded()

    assert len(paths) == 1
    base = load_actor(paths[0], dtype="float32", device=CPU)
    mask = experience.action_mask
    expected = action_log_probs(base, experience.sequences, experience.attention_mask, mask.shape[1])
    torch.testing.assert_close(experience.base_action_log_probs[mask], expected[mask], atol=1e-5, rtol=0)
    assert (experience.base_action_log_probs - experience.action_log_probs)[mask].abs().max() > 0.1


@pytest.mark.parametrize("asked", [True, None])
def test_logits_of_actor_and_reference_are_float32_if_the_key_says_so(rollers, asked):
    roller, _, _ = rollers(model={"dtype": "bfloat16", "float32_logits": asked})

    ids = torch.tensor([[3, 4, 5]])
    models = roller.maker.actor, roller.maker.initial_model
    assert [model(input_ids=ids).logits.dtype for model in models] == [torch.float32 if asked else torch.bfloat16] * 2


def test_a_reference_of_its_own_is_loaded_with_lora_too(rollers, task, tmp_path):
    (tmp_path / "other").symlink_to(task / "model")

    _, paths, _ = rollers(model={"lora_rank": 4, "reference": str(tmp_path / "other")})

    assert [str(path).endswith("other") for path in paths] == [False, True]


def test_the_engine_of_a_vision_language_model_is_asked_about_its_versions(rollers, tmp_path):
    tiny_vision.save(tmp_path / "model")
    image = tiny_vision.picture(tmp_path / "image.png", 16, 24)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "a?", "images": [str(image)]}) + "\n")
    roller, _, telemetry = rollers(
        model={"actor": str(tmp_path / "model")}, prompts={"path": str(tmp_path / "prompts.jsonl")},
        rollout={"max_length": 32}, buffer={"row_bytes": 1 << 20},
    )  # fmt: skip

    prove(roller.weights, 0)

    ((verdict, gaps),) = events_of(telemetry.take(), "engine_judged")
    assert verdict == "ok" and max(gaps) < 1e-4


@pytest.mark.parametrize(
    ("wanted", "can", "says"), [(True, False, True), (True, None, True), (True, True, False), (False, False, False)]
)
def test_an_engine_that_cannot_be_deterministic_says_so_where_that_is_wanted(
    wanted, can, says, rollers, monkeypatch, caplog
):
    if can is None:
        # An engine of one's own may lack it.
        monkeypatch.delattr(BlockingEngine, "deterministic")
    else:
        monkeypatch.setattr(BlockingEngine, "deterministic", can)

    rollers(rollout={"deterministic": wanted})

    text = "replays will not repeat bit for bit, the engine cannot be deterministic: engine=transformers device=cpu"
    assert [record.getMessage() for record in caplog.records if "repeat" in record.getMessage()] == [text] * says
