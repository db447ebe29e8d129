"""A worker's models on another machine: the same rollouts, and the events to count come with the results."""

import contextlib
import dataclasses
import importlib.util
import logging
import os
import pickle
import shutil
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pipeline.config import user_modules
from pipeline.config.identity import run_dir
from pipeline.config.schema import Config
from pipeline.errors import ConfigError, RewardError, RlhfdError, WeightsError, WeightsMismatchError
from pipeline.models.loading import load_actor, load_tokenizer
from pipeline.models.weights.copies import WeightsCopy
from pipeline.models.weights.store import WeightsPublisher, WeightsReader
from pipeline.rollout.loader import load_roller
from pipeline.rollout.remote import CallResult, NodeStatus, NodeTelemetry, RolloutNode, WorkerSpec
from pipeline.runtime import run_inputs
from pipeline.telemetry.metrics import OTHER
from tests.support.daemon import wait_until
from tests.support.told import events_of

CPU = torch.device("cpu")


@pytest.fixture
def node_of(tmp_path, monkeypatch):
    """Make nodes, and undo their changes to this process, which a node has for itself otherwise."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_PROGRESS_BARS", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv(user_modules.FOLDER_VARIABLE, "")
    level, threads, made = logging.getLogger().level, torch.get_num_threads(), []

    def node(settings, **spec):
        given = {"config": settings.model_dump_json(), "working_directory": str(tmp_path), "texts": True}
        made.append(RolloutNode(WorkerSpec(**{**given, "generation": 1, **spec})))
        return made[-1]

    yield node
    for node in made:
        node.close()
    logging.getLogger().setLevel(level)
    torch.set_num_threads(threads)


def config_of(task, rewards=("pipeline.sort_digits:exact_answer",), **rollout):
    return Config.model_validate(
        {
            "model": {"actor": str(task / "model")},
            "prompts": {"path": str(task / "prompts.jsonl")},
            "rollout": {"num_generations": 4, **rollout},
            "rewards": [*rewards],
            "buffer": {"sample_batch_size": 32},
            "daemon": {"hang_timeout_s": 1.0},
        }
    )


def reward(folder, name, body):
    folder.joinpath(f"{name}.py").write_text(f"import time\ndef score(input_ids, attention_mask, **_):\n    {body}\n")
    return {"rewards": [f"{name}:score"], "reward_timeout_s": 0}


def sent(result):
    """Return the copy of a result that arrives at the gateway."""
    return pickle.loads(pickle.dumps(result))


class Rollout:
    """A ticket that a node has rolled out as a gateway has it do: the results of all calls, as they arrive."""

    def __init__(self, node, position, prompts, *, ticket=7):
        self.results = [sent(node.begin(ticket, position, prompts, -1))]
        while not self.results[-1].value:
            self.results.append(sent(node.step(0.05)))
            assert self.results[-1].error is None
        assert self.results[-1].value == [ticket]
        self.results.append(sent(node.finish(ticket)))

    @property
    def rolled(self):
        assert self.results[-1].error is None
        return self.results[-1].value

    @property
    def status(self):
        return self.results[-1].status

    def all_of(self, name):
        return [each for result in self.results for each in events_of(result.events, name)]

    @property
    def records(self):
        return [record for result in self.results for record in result.status.records]


def equal(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, dict):
            equal(value, other[name])
        elif value is None:
            assert other[name] is None, name
        else:
            assert torch.equal(value, other[name]), name


def test_a_node_rolls_out_what_a_worker_would_and_tells_what_is_to_be_counted(task, node_of):
    config = config_of(task)
    node, here = node_of(config), NodeTelemetry()
    local = load_roller(config, load_tokenizer(config.model.actor), here, texts=True, device=CPU)

    loaded = sent(node.load())
    assert loaded.error is None
    here.take()
    theirs, mine = Rollout(node, 8, 3), local.roll(8, 3)

    equal(vars(mine.rows.padded()), vars(theirs.rolled.rows.padded()))
    assert mine.stopped.tolist() == theirs.rolled.stopped.tolist()
    assert list(mine.prompts) == list(theirs.rolled.prompts)
    counted = here.take()
    stages = theirs.all_of("staged")
    assert sorted(name for name, _ in stages) == sorted(name for name, _ in events_of(counted, "staged"))
    assert {"generate", "reward", "ref_logprob"} <= {name for name, _ in stages}
    assert all(seconds > 0 for _, seconds in stages)
    logging.getLogger("pipeline.rollout.roller").warning("on the way")
    assert [record.msg for record in Rollout(node, 8, 1).records] == ["on the way"]
    assert [name for name, _ in Rollout(node, 8, 3).all_of("staged")] == [name for name, _ in stages], "told once"
    local.close()


def test_a_node_keeps_several_tickets_in_its_engine_and_drops_cancelled_ones(tmp_path, task, node_of):
    tmp_path.joinpath("streams.py").write_text(
        "from tests.support.row_stream import RowStream\n"
        "def new_engine(actor, *, directory, device, on_progress):\n"
        "    return RowStream(actor, on_progress, room_rows=8)\n"
    )
    node = node_of(config_of(task, engine="streams:new_engine", num_generations=2, batch_size=2))
    loaded = sent(node.load()).value
    assert (loaded.tickets_ahead, loaded.pid) == (3, os.getpid())
    assert [node.begin(ticket, 2 * ticket, 2, -1).has_room for ticket in range(3)] == [True, False, False]
    load = node.status(logging.INFO, 0.0).load
    assert load.running + load.waiting == 12 and load.room_rows == 8

    assert node.cancel([1]).error is None
    rows = {}
    while len(rows) < 2:
        for ticket in sent(node.step(0.05)).value:
            rows[ticket] = len(node.finish(ticket).value.rows)

    assert rows == {0: 4, 2: 4} and node.step(0.0).value == []
    assert node.cancel([]).has_room


def test_a_step_without_progress_is_no_heartbeat(tmp_path, task, node_of):
    tmp_path.joinpath("stuck.py").write_text(
        "from tests.support.row_stream import RowStream\n"
        "class Stuck(RowStream):\n"
        "    is_stuck = False\n"
        "    def step(self):\n"
        "        return [] if Stuck.is_stuck else super().step()\n"
        "def new_engine(actor, *, directory, device, on_progress):\n"
        "    return Stuck(actor, on_progress, room_rows=8)\n"
    )
    node = node_of(config_of(task, engine="stuck:new_engine"))
    assert node.load().error is None
    assert node.begin(0, 0, 1, -1).error is None
    node.step(0.0)
    sys.modules["stuck"].Stuck.is_stuck = True
    stuck = node.step(0.0).status.beats

    assert node.step(0.1).status.beats == stuck

    sys.modules["stuck"].Stuck.is_stuck = False
    assert node.step(0.1).status.beats > stuck


def test_rows_of_several_turns_are_those_of_a_worker_and_the_environments_work_is_told(tmp_path, task, node_of):
    """The environments are processes of the node, found in the folder of the configuration."""
    tmp_path.joinpath("answering.py").write_text(
        "from pipeline import Turn\n"
        "class Telling:\n"
        "    def reset(self, prompt, answer, columns):\n"
        "        self.turns = 0\n"
        "    def step(self, response):\n"
        "        self.turns += 1\n"
        "        told = sum(map(ord, response))\n"
        "        return Turn(f'{told % 100}>', reward=told % 7 / 7, done=told % 3 == 0, tool_failed=told % 5 == 0)\n"
    )
    turns = {"environment": "answering:Telling", "max_turns": 3, "max_turn_tokens": 5, "max_new_tokens": 20}
    config = config_of(task, (), max_prompt_length=9, **turns)
    node, here = node_of(config, modules=str(tmp_path)), NodeTelemetry()
    assert sent(node.load()).error is None
    local = load_roller(config, load_tokenizer(config.model.actor), here, texts=True, device=CPU)
    here.take()

    theirs, mine = Rollout(node, 8, 3), local.roll(8, 3)

    equal(vars(mine.rows.padded()), vars(theirs.rolled.rows.padded()))
    assert mine.rows.padded().info["turns"].max() > 1
    answers = theirs.all_of("environment_answered")
    assert sorted(answers) == sorted(events_of(here.take(), "environment_answered"))
    assert len(answers) > 12 and "tool_failed" in answers
    assert {"generate", "environment"} <= {name for name, _ in theirs.all_of("staged")}
    local.close()


def test_a_node_computes_with_the_weights_that_were_sent(tmp_path, task, node_of):
    config = config_of(task)
    node = node_of(config)
    assert node.load().error is None
    before = Rollout(node, 0, 2).rolled.rows.padded()
    other = load_actor(config.model.actor, dtype="float32", device=CPU)
    draws = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(torch.randn(weight.shape, generator=draws) * 0.02)
    state = {f"actor.{name}": tensor for name, tensor in other.state_dict().items() if name != "lm_head.weight"}
    publisher = WeightsPublisher(tmp_path / "weights", state)
    published = publisher.publish(3, state)
    reader = WeightsReader(tmp_path / "weights")
    copy = sent(reader.copy())

    fetched = sent(node.fetch(copy))
    assert fetched.value == published and not events_of(fetched.events, "engine_judged")
    later = Rollout(node, 0, 2)
    ((verdict, gaps),) = later.all_of("engine_judged")
    assert verdict == "ok" and len(gaps) == 8 and max(gaps) < 1e-4
    after = later.rolled.rows.padded()

    assert not torch.equal(before.action_log_probs, after.action_log_probs)
    data = copy.data.copy()
    data[100] ^= 1
    damaged = node.fetch(dataclasses.replace(copy, data=data))
    assert isinstance(damaged.error, WeightsError) and "came damaged" in str(damaged.error)
    reader.close()
    publisher.close()


def test_an_engine_that_keeps_its_weights_is_found_when_these_are_sent(tmp_path, task, node_of):
    tmp_path.joinpath("deaf.py").write_text(
        "from tests.support.row_stream import RowStream\n"
        "class Deaf(RowStream):\n"
        "    def update_weights(self, actor, version):\n"
        "        self._version = version\n"
        "def new_engine(actor, *, directory, device, on_progress):\n"
        "    return Deaf(actor, on_progress, room_rows=8)\n"
    )
    config = config_of(task, engine="deaf:new_engine")
    node = node_of(config)
    assert node.load().error is None
    other = load_actor(config.model.actor, dtype="float32", device=CPU)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.1)
    state = {f"actor.{name}": tensor for name, tensor in other.state_dict().items() if name != "lm_head.weight"}
    publisher = WeightsPublisher(tmp_path / "weights", state)
    publisher.publish(3, state)
    reader = WeightsReader(tmp_path / "weights")

    assert node.fetch(reader.copy()).error is None
    assert node.begin(0, 0, 1, -1).error is None
    results = [sent(node.step(0.0))]
    while results[-1].error is None:
        assert results[-1].value == [], "no ticket ends before the engine has answered"
        results.append(sent(node.step(0.0)))

    assert isinstance(results[-1].error, WeightsMismatchError)
    assert "version=3" in str(results[-1].error)
    assert [len(events_of(result.events, "weights_synced")) for result in results[-2:]] == [0, 1]
    verdicts = [verdict for result in results for verdict, _ in events_of(result.events, "engine_judged")]
    assert verdicts == ["gap", "gap"], "it got the weights once more"
    reader.close()
    publisher.close()


def test_a_copy_is_of_the_newest_version_and_may_be_read_only(tmp_path):
    publisher = WeightsPublisher(tmp_path / "weights", {"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.bfloat16)})
    reader = WeightsReader(tmp_path / "weights")
    with pytest.raises(WeightsError, match="no weights were published yet"):
        reader.copy()
    for version in (1, 2):
        publisher.publish(version, {"a": torch.full((3,), float(version)), "b": torch.full((2,), 0.5).bfloat16()})
    copy = reader.copy()
    publisher.publish(3, {"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.bfloat16)})
    data = np.frombuffer(copy.data.tobytes(), np.uint8)
    into = {"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.bfloat16)}

    found = WeightsCopy(copy.version, copy.specs, data).fetch(into)

    assert found.version == 2
    assert into["a"].tolist() == [2.0] * 3 and into["b"].tolist() == [0.5] * 2
    with pytest.raises(WeightsError, match="b: missing"):
        copy.fetch({"a": torch.zeros(3)})
    reader.close()
    publisher.close()


def test_an_error_travels_whole_and_without_its_frames(tmp_path, task, node_of):
    config = config_of(task, **reward(tmp_path, "fails_later", "raise ValueError('no such answer: 0237')"))
    node = node_of(config)

    refused = sent(node.load()).error
    assert isinstance(refused, ConfigError) and "no such answer: 0237" in str(refused)
    assert refused.__traceback__ is None and refused.__cause__ is None

    config = config_of(task)
    node = node_of(config)
    assert node.load().error is None
    node._stream._roller.maker.reward_model = lambda **row: torch.full((len(row["input_ids"]),), torch.nan)
    failed = Rollout(node, 0, 1).results[-1]
    assert isinstance(failed.error, RewardError) and failed.value is None
    assert failed.error.bare == failed.error.told(texts=False)


def test_a_node_of_another_release_is_refused_before_it_reads_what_it_may_not_know(task, node_of):
    error = node_of(config_of(task), release="0.0.7", config='{"a_key": "of tomorrow"}').load().error

    assert isinstance(error, ConfigError) and "on the daemon's machine 0.0.7" in str(error)


def test_a_node_with_another_vllm_than_the_daemons_machine_is_refused(task, node_of, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "far-away")
    monkeypatch.setattr("pipeline.rollout.remote.installed_version", lambda: "0.32.0")

    error = node_of(config_of(task, engine="vllm"), vllm="0.27.1").load().error

    assert isinstance(error, ConfigError)
    assert str(error) == "on far-away: vLLM 0.32.0 is installed, on the daemon's machine 0.27.1"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_a_node_without_vllm_is_refused_with_its_machine(task, node_of, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "far-away")

    error = node_of(config_of(task, engine="vllm")).load().error

    assert isinstance(error, ConfigError)
    assert str(error).startswith("on far-away: rollout.engine: vllm is not installed here: RLHFD_EXTRAS=vllm ")


def test_what_is_missing_there_is_told_with_the_machine(tmp_path, task, node_of, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "far-away")
    config = config_of(task)
    elsewhere = config.model_copy(
        update={"model": config.model.model_copy(update={"actor": str(tmp_path / "nowhere")})}
    )

    error = node_of(elsewhere).load().error

    assert isinstance(error, ConfigError) and str(error).startswith("on far-away: ") and "nowhere" in str(error)


def test_records_can_be_logged_by_another_process_with_their_fields(task, node_of, monkeypatch):
    node = node_of(config_of(task))
    log = logging.getLogger("pipeline.rollout.roller")
    log.warning("prompt set aside: position=%d reason=%s", 7, "too long")
    try:
        raise ValueError("once")
    except ValueError:
        log.exception("failed: what=%s", object)

    first, second = sent(node.status(logging.INFO, 1.0)).records

    assert (first.msg, first.args, first.levelname) == (
        "prompt set aside: position=%d reason=%s",
        (7, "too long"),
        "WARNING",
    )
    assert second.getMessage() == "failed: what=<class 'object'>" and "ValueError: once" in second.stack_info
    assert node.status(logging.INFO, 1.0).records == []

    log.warning(ValueError("no text"))
    monkeypatch.setattr(logging, "raiseExceptions", False)
    log.warning("a=%s b=%s", object)
    for number in range(2000):
        log.info("much: number=%d", number)
    third, *others = node.status(logging.ERROR, 1.0).records
    assert third.getMessage() == "no text"
    assert (others[-1].getMessage(), len(others)) == ("records left out: count=1001", 1000)
    log.warning("not wanted")
    assert node.status(logging.INFO, 1.0).records == []


def test_a_node_tells_of_tokens_while_it_samples_and_of_all_with_the_result(task, node_of):
    node = node_of(config_of(task))
    trial = node.load().status.sampled
    seen, report = [], node._telemetry.progress

    def beat(**numbers):
        report(**numbers)
        status = node.status(logging.INFO, 0.0)
        if "tokens" in numbers:
            seen.append((status.sampled - trial, status.in_hand))

    node._telemetry.progress = beat
    rollout = Rollout(node, 8, 3)
    tokens = sum(rollout.rolled.rows.counts)

    assert rollout.status.sampled == trial + tokens
    assert seen == sorted(seen) and len(set(seen)) > 3
    assert all(in_hand == sampled < tokens for sampled, in_hand in seen)
    assert Rollout(node, 8, 3).status.sampled == trial + 2 * tokens
    assert node.status(logging.INFO, 0.0).in_hand == 0


def test_a_node_that_hangs_says_where(tmp_path, task, node_of):
    config = config_of(task, **reward(tmp_path, "sleepy", "return 1.0"))
    node = node_of(config)
    assert node.load().error is None
    wake = threading.Event()

    def stuck_reward(**row):
        wake.wait(60.0)
        return torch.zeros(len(row["input_ids"]))

    node._stream._roller.maker.reward_model = stuck_reward
    work = threading.Thread(target=lambda: Rollout(node, 0, 1))
    work.start()
    told = wait_until(
        lambda: [r for r in node.status(logging.INFO, 1.0).records if "no heartbeat" in r.msg], 20.0, "it says so"
    )
    assert "stuck_reward" in told[0].stack_info
    assert node.status(logging.INFO, 1.0).activity == "reward"
    assert not any("no heartbeat" in record.msg for record in node.status(logging.INFO, 1.0).records), "once"
    wake.set()
    work.join()
    assert node.status(logging.INFO, 1.0).activity == OTHER


@pytest.mark.parametrize(("lost", "kept"), [(("holder",), "relay"), (("relay",), "holder"), ((), "both")])
def test_of_holder_and_relay_the_lost_one_alone_is_found_anew(monkeypatch, lost, kept):
    """Ray ends an actor with the handle of the process that made it, and with it the version that it has."""
    rays = pytest.importorskip("pipeline.rollout.ray")
    stream, tries = object.__new__(rays.RemoteStream), []
    stream._holder, stream._relay = "holder", "relay"

    def newest(stored_s, transferred_s):
        tries.append((stream._holder, stream._relay))
        if len(tries) == 1:
            raise rays._LostError("it is gone", *lost)
        return "reference"

    for name, value in (
        ("_newest", newest), ("_node_id", lambda: "node"), ("_call", lambda method, reference, patience_s: reference),
    ):  # fmt: skip
        monkeypatch.setattr(stream, name, value, raising=False)
    monkeypatch.setattr(rays, "_RETRY_S", 0.0)

    assert stream.fetch(SimpleNamespace(nbytes=1)) == "reference"

    expected = {"relay": (None, "relay"), "holder": ("holder", None), "both": ("holder", "relay")}[kept]
    assert tries == [("holder", "relay"), expected]


class Answers:
    """In the place of Ray: a reference is a list, which holds the value once it has come."""

    def __init__(self, rays, monkeypatch):
        monkeypatch.setattr(rays.ray, "wait", self.wait)
        monkeypatch.setattr(rays.ray, "get", self.get)
        monkeypatch.setattr(rays.ray, "kill", lambda actor: None)

    def wait(self, references, *, num_returns=1, timeout=0.0):
        come = [one for one in references if one][:num_returns]
        return come, [one for one in references if not any(one is other for other in come)]

    def get(self, reference):
        if isinstance(reference[0], Exception):
            raise reference[0]
        return reference[0]


@pytest.fixture
def answered(monkeypatch):
    """A gateway's stream, with an actor whose calls give these references."""
    rays = pytest.importorskip("pipeline.rollout.ray")
    Answers(rays, monkeypatch)
    heard, context = NodeTelemetry(), SimpleNamespace(reloaded=lambda: None, newest_config=None)
    heard.sampled_remotely = lambda sampled, in_hand: None
    stream = object.__new__(rays.RemoteStream)
    vars(stream).update(
        _context=context, _metrics=heard, _hang_timeout_s=0.0, _beats=None, _status=None, _overtaken=[],
        _machine="gpu-3", _holder="holder", _relay="relay",
    )  # fmt: skip

    def actor(**references):
        calls = {name: SimpleNamespace(remote=lambda *_, given=given: given) for name, given in references.items()}
        stream._actor = SimpleNamespace(**calls)
        return stream

    return actor


def status_with(line):
    return NodeStatus(records=[logging.getLogger("of_the_actor").makeRecord("of_the_actor", 30, "", 0, line, (), None)])


def result_with(value, line):
    return CallResult(value, None, [], status_with(line), True)


def test_each_log_record_of_an_actor_is_logged_whichever_answer_has_it(answered, caplog):
    """The actor hands a record out once: with a status, which may come after the call that it was asked for in."""
    status, early, late = [], [], []
    stream = answered(status=status, step=[result_with([], "of the call")])

    stream._poll_status(shows=True)
    assert stream.step() == []
    assert caplog.messages == ["of the call"]
    status.append(status_with("of a status that came late"))
    assert stream.step() == []
    stream._actor.status.remote = lambda *_: early
    stream._poll_status(shows=True)
    early.append(status_with("of a status that nobody looked at"))
    assert stream.step() == []
    stream._actor.status.remote = lambda *_: late
    stream._poll_status(shows=True)
    late.append(status_with("the last words"))
    stream.close()

    assert caplog.messages == [
        "of the call", "of a status that came late", "of the call", "of a status that nobody looked at", "of the call",
        "the last words",
    ]  # fmt: skip


def test_a_result_that_the_cluster_has_lost_ends_the_worker_with_the_reason(answered):
    """As where the machine dies while the experience is on its way, or Ray's guard of the memory ends the actor."""
    errors = pytest.importorskip("ray.exceptions")
    lost, killed = errors.ObjectLostError("ab" * 28, None, ""), errors.OutOfMemoryError("the node runs low on memory")
    rays = pytest.importorskip("pipeline.rollout.ray")

    with pytest.raises(RlhfdError, match=r"finish on gpu-3 has no result: .*abab"):
        answered(finish=[lost]).finish(7)
    with pytest.raises(RlhfdError, match="begin on gpu-3 has no result: the node runs low on memory"):
        answered(begin=[killed]).begin(7, 0, 1)
    # Its weights are sent again.
    with pytest.raises(rays._LostError):
        answered(fetch=[lost])._call("fetch", "reference")


@pytest.mark.parametrize("generation", [1, 2])
@pytest.mark.parametrize("changed", ["prompts", "reference", "nothing", "prompts everywhere"])
def test_a_machine_with_other_files_is_refused_or_told_of_and_one_with_the_files_of_now_is_not(
    tmp_path, task, answered, caplog, generation, changed
):
    """The probe of a version has the first prompt and the actor alone."""
    stream = answered()
    reference, prompts = tmp_path / "reference", tmp_path / "prompts.jsonl"
    shutil.copytree(task / "model", reference)
    shutil.copy(task / "prompts.jsonl", prompts)
    config = Config.model_validate(
        {
            "model": {"actor": str(task / "model"), "reference": str(reference)},
            "prompts": {"path": str(prompts)},
            "daemon": {"state_dir": str(tmp_path / "state"), "run_name": "run"},
            "rewards": ["pipeline.sort_digits:exact_answer"],
        }
    )
    run_dir(config).mkdir(parents=True)
    run_inputs.note(config)
    stream._config, stream._context.generation = config, generation
    there = run_inputs.inputs_of(config)
    if changed == "prompts everywhere":
        prompts.write_text(prompts.read_text()[:-30])
        there = run_inputs.inputs_of(config)
    else:
        there |= {name: "other" for name in there if changed in name}
    is_refused = changed == "reference" or (changed == "prompts" and generation == 1)
    told = f"on gpu-3: other files than on the daemon's machine: {'model.' if changed == 'reference' else ''}{changed}"

    with pytest.raises(RlhfdError, match=told) if is_refused else contextlib.nullcontext() as refused:
        stream._compare(there)

    assert not is_refused or isinstance(refused.value, ConfigError) is (generation == 1)
    assert any(told in line for line in caplog.messages) is (changed == "prompts" and generation == 2)
