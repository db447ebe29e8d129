"""The interface of an engine: a second one runs the maker, a worker and a daemon, with no change outside its file."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pipeline.config.lengths import Lengths
from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.experience.codec import ExtentReader, gather_padded
from pipeline.models.weights.store import WeightsPublisher, flatten
from pipeline.progress import Telemetry
from pipeline.prompts.source import PromptSource
from pipeline.rollout.generation.blocking import BlockingEngine
from pipeline.rollout.generation.engines import load_engine
from pipeline.rollout.generation.hf_generate import ActorGenerator
from pipeline.rollout.generation.interface import Sampling
from pipeline.rollout.generation.transformers import TransformersGenerator
from pipeline.rollout.generation.weights import ModelWeights
from pipeline.rollout.maker import NaiveExperienceMaker
from pipeline.rollout.metrics import RolloutMetrics
from pipeline.rollout.roller import LocalRoller
from pipeline.rollout.shaping import Shaping
from pipeline.rollout.ticket_stream import EngineStream
from pipeline.rollout.worker import RolloutWorker
from pipeline.runtime.messages import Sealed, Ticket, Welcome
from pipeline.storage.arena import Arena
from pipeline.storage.weights_header import WeightsVersion
from pipeline.telemetry.metrics import SlotName
from pipeline.telemetry.slab import MetricsSlab
from tests.rollout.test_worker import Sent
from tests.support import tiny, whole_rows
from tests.support.daemon import SMALL, Daemon, telling_reward
from tests.support.tiny import Letters
from tests.support.whole_rows import WholeRows

PROMPTS = torch.tensor([[0, 0, 5, 9], [7, 3, 11, 2], [0, 6, 6, 4]])
MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])
TOKENIZER = SimpleNamespace(pad_token_id=tiny.PAD, eos_token_id=tiny.EOS)
SAMPLING = Sampling(max_length=12, pad_token_id=tiny.PAD, eos_token_ids=(tiny.EOS,))


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def lengths_as_scores(*, response_start, response_end, **_row):
    return (response_end - response_start).float()


def maker(actor, engine):
    return NaiveExperienceMaker(
        actor, None, lengths_as_scores, tiny.llama(), TOKENIZER, use_grpo=True, num_generation=4, generator=engine,
        shaping=Shaping(marks_cut=True),
    )  # fmt: skip


def test_another_engine_makes_the_same_experience():
    actor = tiny.llama()

    its = maker(actor, WholeRows(actor)).make_experience(PROMPTS, MASK, max_length=14, seed=5)
    lean = maker(actor, TransformersGenerator(actor)).make_experience(PROMPTS, MASK, max_length=14, seed=5)

    assert torch.equal(its.sequences, lean.sequences)
    assert torch.equal(its.action_mask, lean.action_mask)
    assert torch.equal(its.action_log_probs, lean.action_log_probs)
    assert torch.equal(its.advantages, lean.advantages)


WRAPPERS = """
from tests.support.whole_rows import WholeRows

def any_keyword(actor, **keywords):
    assert sorted(keywords) == ["device", "directory", "on_progress"]
    return WholeRows(actor)

def by_name(actor, *, directory, device, on_progress, config):
    assert config.daemon.name == "of-the-test"
    return WholeRows(actor)
"""


@pytest.mark.parametrize("factory", ["any_keyword", "by_name"])
def test_a_factory_gets_the_configuration_only_if_it_names_it(tmp_path, monkeypatch, factory):
    (tmp_path / "wrappers_of_engines.py").write_text(WRAPPERS)
    monkeypatch.syspath_prepend(str(tmp_path))

    made = engine_named(f"wrappers_of_engines:{factory}", tiny.llama(), daemon={"name": "of-the-test"})

    assert isinstance(made, WholeRows)


def test_a_worker_pauses_its_engine_hands_it_the_weights_and_rolls_out_with_them(tmp_path):
    """The published weights are another model's, so that stale ones would sample other tokens."""
    actor, published = tiny.llama(), tiny.llama(seed=9)
    engine = WholeRows(actor)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "AB"}) + "\n" + json.dumps({"prompt": "CDEF"}) + "\n")
    Arena.create(tmp_path / "arena", payload_bytes=1 << 16, ledger_bytes=4096, layout=1)
    arena = Arena(tmp_path / "arena")
    slab = MetricsSlab.create(tmp_path / "metrics", [SlotName("supervisor"), SlotName("rollout", 0)])
    slab.begin("rollout", 0)
    source, sent = PromptSource(tmp_path / "prompts.jsonl", 0), Sent()
    tensors = flatten(actor=actor.state_dict())
    roller = LocalRoller(
        maker(actor, engine), source, Letters(), ModelWeights(tensors, BlockingEngine(engine)), seed=7,
        lengths=Lengths(12, 11, None), template="none",
        sampling=SAMPLING, vocabulary=tiny.VOCABULARY_SIZE,
    )  # fmt: skip
    publisher = WeightsPublisher(tmp_path / "weights", tensors)
    publisher.publish(1, flatten(actor=published.state_dict()))
    metrics = RolloutMetrics(slab.writer("rollout", 0), reward_source="function")
    worker = RolloutWorker(
        EngineStream(roller, metrics, 2), arena, tmp_path / "weights", sent, metrics,
        index=0, clock=lambda: 0.0, group_size=4,
    )  # fmt: skip
    worker.handle(Welcome(1))

    worker.handle(Ticket(sent[0].incarnation, 0, 0, 2, 1, 0, 1 << 15, 1, 100.0))
    worker.step()

    (sealed,) = sent.of(Sealed)
    assert (engine.updates, engine.paused, sealed.policy_version) == (1, False, 1)
    experience = gather_padded([(ExtentReader(arena.extent(0, sealed.nbytes)), list(range(8)))])
    fresh = LocalRoller(
        maker(published, None), source, Letters(),
        ModelWeights({}, BlockingEngine(TransformersGenerator(published))), seed=7,
        lengths=Lengths(12, 11, None),
        template="none", sampling=SAMPLING, vocabulary=tiny.VOCABULARY_SIZE,
    ).roll(0, 2)  # fmt: skip
    assert fresh.rows is not None
    assert experience.action_mask.sum(dim=1).tolist() == fresh.rows.counts
    responses = [
        row[mask] for row, mask in zip(experience.sequences[:, -8:], experience.action_mask[:, -8:], strict=True)
    ]
    expected = [fresh.rows.columns_of("sequences", row)[-count:] for row, count in enumerate(fresh.rows.counts)]
    assert all(mine.tolist() == its.tolist() for mine, its in zip(responses, expected, strict=True))
    worker.close()
    publisher.close()
    source.close()
    slab.close()
    arena.close()


def engine_named(name, actor, **settings):
    """The engine of a name, behind the interface of a stream."""
    config = Config.model_validate({"rollout": {"engine": name}, **settings})
    engine = load_engine(config, actor, torch.device("cpu"), Telemetry.none())
    assert isinstance(engine, BlockingEngine)
    return engine._generator


def test_a_name_leads_to_its_engine():
    actor = tiny.llama()

    assert isinstance(engine_named("transformers", actor), TransformersGenerator)
    assert isinstance(engine_named("transformers", SimpleNamespace(generate=print)), ActorGenerator)
    assert isinstance(engine_named("tests.support.whole_rows:new_engine", actor), WholeRows)


def no_engine(actor, **_):
    return object()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tests.no_such_module:new_engine", "cannot import tests.no_such_module"),
        ("tests.support.whole_rows:old_engine", "tests.support.whole_rows has no function old_engine"),
        (
            "tests.rollout.generation.test_engines:no_engine",
            "the object of tests.rollout.generation.test_engines:no_engine has no method generate",
        ),
    ],
)
def test_a_name_that_leads_to_none_is_refused(name, message):
    with pytest.raises(ConfigError, match=f"rollout.engine: {message}"):
        engine_named(name, tiny.llama())


def test_the_engines_here_compute_with_the_actors_own_tensors():
    """`update_weights` does nothing: the next call reads the new values."""
    actor, other = tiny.llama(), tiny.llama(seed=9)
    greedy = Sampling(max_length=10, pad_token_id=tiny.PAD, do_sample=False)
    for engine in (TransformersGenerator(actor), ActorGenerator(actor)):
        actor.load_state_dict(tiny.llama().state_dict())
        before = engine.generate(PROMPTS, MASK, greedy).sequences
        engine.pause()
        actor.load_state_dict(other.state_dict())
        engine.update_weights(actor.state_dict())
        engine.resume()

        after = engine.generate(PROMPTS, MASK, greedy).sequences

        assert not torch.equal(after, before)
        assert torch.equal(after, TransformersGenerator(other).generate(PROMPTS, MASK, greedy).sequences)


@pytest.mark.integration
@pytest.mark.timeout(200)
def test_a_daemon_runs_with_an_engine_of_ones_own(tmp_path, task):
    shutil.copy(whole_rows.__file__, tmp_path / "my_engine.py")
    settings = (*SMALL, "trainer.max_steps=3", "rollout.engine=my_engine:new_engine", *telling_reward(tmp_path))

    with Daemon(tmp_path, *settings, task=task) as daemon:
        assert daemon.wait(150.0) == 0, daemon.errors

    assert int((tmp_path / "whole_rows.updates").read_text()) >= 2


class Fetching:
    """An engine that fetches some version, whichever it is asked for."""

    def __init__(self, version):
        self.version, self.updates = version, []

    def pause(self):
        pass

    def resume(self):
        pass

    def fetch_weights(self, path, age):
        return self.version

    def update_weights(self, actor, version):
        self.updates.append((list(actor), version))


@pytest.mark.parametrize(("taken", "updates"), [((3, 0), []), ((9, 0), [(["a"], 3)]), ((3, 1), [(["a"], 3)])])
def test_an_engine_that_took_another_version_than_its_worker_gets_the_workers(taken, updates):
    engine, tensors = Fetching(taken), {"actor.a": torch.zeros(1), "critic.b": torch.zeros(1)}

    source = SimpleNamespace(path=Path("weights"), fetch=lambda targets: WeightsVersion(3, 0))
    ModelWeights(tensors, engine).fetch(source)

    assert engine.updates == updates
