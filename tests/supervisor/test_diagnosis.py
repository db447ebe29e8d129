"""The cause of a slow or stopped run, in the sentences for a user."""

from __future__ import annotations

import dataclasses

import pytest

from pipeline.config.schema import Config, DaemonConfig, TrainerConfig
from pipeline.runtime.messages import EVALUATION_TICKETS
from pipeline.supervisor.diagnosis import (
    ProcessView,
    RunView,
    ShareWindow,
    culprit,
    duration,
    explain,
    waits_for_external_trainer,
)
from pipeline.supervisor.external import ExternalRank
from pipeline.supervisor.hangs import Observation
from pipeline.telemetry.engine_view import EngineView
from pipeline.telemetry.metrics import Progress

NOW_S = 10_000.0


def view(
    name: str,
    activity: str,
    *,
    since_s: float = 0.3,
    silent_s: float = 0.1,
    working_on: int = -1,
    state: str = "ready",
    stopped: bool = False,
    in_collective: bool = False,
    last_line: str = "",
    age_s: float = 60.0,
    engine: EngineView | None = None,
    **shares: float,
) -> ProcessView:
    progress = Progress(NOW_S - silent_s, activity, NOW_S - since_s, working_on, 0.0, in_collective)
    observed = Observation(
        name, name.partition("-")[0], 4711, state == "ready", progress, NOW_S if stopped else None,
        stopped_by="SIGTSTP" if stopped else "",
    )  # fmt: skip
    return ProcessView(observed, state, NOW_S - age_s, shares, last_line, engine)


def run(
    *processes: ProcessView, state: str = "ready", ready: int = 128, leases: int = 0, external: bool = False
) -> RunView:
    config = Config(trainer=TrainerConfig(kind="external" if external else "builtin"))
    return RunView(NOW_S, state, processes, ready, leases, config)


BUFFER = view("buffer", "wait_data")
GENERATING = view("rollout-0", "generate", since_s=41, working_on=17)
TRAINING = view("trainer-0", "train", since_s=2, working_on=9)
CARDLESS = view("trainer-0", "wait_card", since_s=5)
STARVED = view("trainer-0", "wait_data", wait_data=0.82, train=0.18)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (run(BUFFER, STARVED, GENERATING),
         "trainer-0 waits for data (82 % of the last minute): 128 of 256 rows are ready; "
         "rollout-0 (pid 4711) has been in generate on ticket 17 for 41 s."),
        (run(BUFFER, TRAINING, view("rollout-0", "wait_ticket_staleness")),
         "The workers wait for the trainer: trainer-0 (pid 4711) has been in train on lease 9 for 2.0 s; "
         "rollout-0 (pid 4711) is waiting for the next version (buffer.max_staleness)."),
        (run(BUFFER, CARDLESS, view("rollout-0", "generate", since_s=3, working_on=17)),
         "trainer-0 waits until the engines on the card sleep: "
         "rollout-0 (pid 4711) has been in generate on ticket 17 for 3.0 s."),
        (run(BUFFER, CARDLESS, view("rollout-0", "asleep"), view("rollout-1", "wait_data")),
         "trainer-0 waits until the engines on the card sleep: rollout-1 (pid 4711) is waiting for a ticket."),
        (run(BUFFER, TRAINING, view("rollout-0", "asleep"), view("rollout-1", "wait_card")),
         "The workers wait for the trainer: trainer-0 (pid 4711) has been in train on lease 9 for 2.0 s; rollout-0 "
         "(pid 4711) is waiting for a ticket, its engine asleep (rollout.sleep), rollout-1 (pid 4711) is waiting for "
         "its turn on the card, on which the trainer steps (rollout.sleep)."),
        (run(BUFFER, TRAINING, view("rollout-0", "wait_card", state="starting"), state="starting"),
         "rollout-0 (pid 4711) waits for its turn on the card before it loads its engine (rollout.sleep)."),
        (run(BUFFER, view("trainer-0", "wait_card", state="starting"), GENERATING, state="starting"),
         "trainer-0 (pid 4711) waits for its turn on the card before it tries compiled layers (rollout.sleep)."),
        (run(BUFFER, TRAINING, view("rollout-0", "wait_card", state="backoff", age_s=-3, last_line="OSError: gone")),
         "rollout-0 ended and restarts in 3.0 s: OSError: gone"),
        (run(BUFFER, TRAINING, GENERATING),
         "No process waits: rollout-0 (pid 4711) has been in generate on ticket 17 for 41 s, "
         "trainer-0 (pid 4711) has been in train on lease 9 for 2.0 s; 128 of 256 rows are ready."),
        (run(BUFFER, STARVED, view("rollout-0", "generate", since_s=41, silent_s=41, working_on=17)),
         "rollout-0 (pid 4711) hangs or is very slow: it has made no progress for 41 s in generate on ticket 17; "
         "after 5 min 00 s it is killed and restarted."),
        (run(BUFFER, STARVED, view("rollout-0", "reward", silent_s=12, stopped=True)),
         "rollout-0 (pid 4711) is stopped (SIGTSTP), kill -CONT 4711: it has made no progress for 12 s in reward; "
         "after 5 min 00 s it is killed and restarted."),
        (run(BUFFER, STARVED, view("rollout-0", "", state="starting", last_line="loading weights"), state="starting"),
         "rollout-0 (pid 4711) has been starting for 1 min 00 s; its last line: loading weights."),
        (run(BUFFER, view("rollout-0", "generate", state="starting", stopped=True), state="starting"),
         "rollout-0 (pid 4711) has been starting for 1 min 00 s, and is stopped (SIGTSTP), kill -CONT 4711."),
        (run(BUFFER, STARVED, view("rollout-0", "", state="backoff", age_s=-3, last_line="OSError: gone")),
         "rollout-0 ended and restarts in 3.0 s: OSError: gone"),
        (run(BUFFER, dataclasses.replace(TRAINING, observed=dataclasses.replace(TRAINING.observed, is_ready=False)),
             GENERATING),
         "No trainer is ready; rollout-0 (pid 4711) has been in generate on ticket 17 for 41 s; "
         "128 of 256 rows are ready."),
        (run(BUFFER, GENERATING, external=True),
         "The external trainer waits for data: 128 of 256 rows are ready; "
         "rollout-0 (pid 4711) has been in generate on ticket 17 for 41 s."),
        (run(BUFFER, view("rollout-0", "wait_ticket_full"), ready=512, external=True),
         "The run waits for an external trainer to connect and take a batch; 512 of 256 rows are ready."),
        (run(BUFFER, view("rollout-0", "wait_ticket_full"), leases=2, external=True),
         "The run waits for the external trainer, which holds 2 batches; 128 of 256 rows are ready."),
        (run(BUFFER, view("rollout-0", "wait_ticket_full"), leases=1, external=True),
         "The run waits for the external trainer, which holds 1 batch; 128 of 256 rows are ready."),
        (run(BUFFER, view("rollout-0", "generate", state="draining", since_s=4), state="draining"),
         "The run drains: rollout-0 (pid 4711) has been in generate for 4.0 s."),
    ],
)  # fmt: skip
def test_what_holds_it_back_is_said_first(seen: RunView, expected: str) -> None:
    assert explain(seen, {})[0] == expected


@pytest.mark.parametrize(
    ("hang_timeout_s", "silent_s", "is_named"),
    [(300, 8, False), (300, 29, False), (300, 31, True), (0, 59, False), (0, 61, True), (20, 9, False), (20, 11, True),
     (4, 1.9, False), (4, 2.1, True)],
)  # fmt: skip
def test_a_long_forward_pass_is_no_hang(hang_timeout_s: float, silent_s: float, is_named: bool) -> None:
    training = view("trainer-0", "train", since_s=silent_s, silent_s=silent_s, working_on=4)
    config = Config(daemon=DaemonConfig(hang_timeout_s=hang_timeout_s))
    seen = dataclasses.replace(run(BUFFER, training, GENERATING), config=config)

    sentence = explain(seen, {})[0]

    assert ("hangs or is very slow" in sentence) == is_named
    assert is_named or f"trainer-0 (pid 4711) has been in train on lease 4 for {duration(silent_s)}" in sentence


@pytest.mark.parametrize(
    ("states", "sentence"),
    [
        (["left"], "The external trainer (pid 815) has left, 41 s ago."),
        (["connected", "left"], "Rank 1 of the external trainer (pid 815) has left, 41 s ago."),
        (["connected"], "The run waits for the external trainer (pid 815) to take a batch; 512 of 256 rows are ready."),
        (["absent"], "The run waits for an external trainer to connect and take a batch; 512 of 256 rows are ready."),
    ],
)
def test_an_external_trainer_that_has_left_is_named(states: list[str], sentence: str) -> None:
    idle = Progress(0.0, "", 0.0, -1, 0.0, False)
    ranks = [ExternalRank(rank, 815, state, NOW_S - 41, idle) for rank, state in enumerate(states)]  # type: ignore[arg-type]
    seen = run(BUFFER, view("rollout-0", "wait_ticket_full"), ready=512, external=True)

    assert explain(dataclasses.replace(seen, external_ranks=ranks), {})[0] == sentence


def test_the_last_minute_is_said_last_and_there_are_never_more_than_five_sentences() -> None:
    hanging = [view(f"rollout-{index}", "generate", silent_s=60) for index in range(8)]

    sentences = explain(run(BUFFER, STARVED, *hanging), {"rollout": {"generate": 0.9, "reward": 0.09, "seal": 0.01}})

    assert len(sentences) == 5
    assert sentences[-1] == "The last minute: rollout 90 % generate, 9 % reward."


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        ([BUFFER, STARVED, GENERATING], "rollout-0"),
        ([BUFFER, view("trainer-0", "train", since_s=900), GENERATING], "trainer-0"),
        ([BUFFER, STARVED, view("rollout-0", "wait_ticket_full", silent_s=60), GENERATING], "rollout-0"),
        ([view("buffer", "wait_data", silent_s=60), TRAINING, GENERATING], "buffer"),
        ([BUFFER, STARVED, view("rollout-0", "wait_data")], "buffer"),
        ([BUFFER, view("trainer-0", "train", silent_s=90, in_collective=True), view("trainer-1", "train", silent_s=60)],
         "trainer-1"),
        ([BUFFER, view("trainer-0", "train", silent_s=91), view("trainer-1", "train", silent_s=90, stopped=True)],
         "trainer-1"),
        ([BUFFER, CARDLESS, view("rollout-0", "asleep", since_s=9), view("rollout-1", "wait_data")], "rollout-1"),
        ([BUFFER, CARDLESS, view("rollout-0", "asleep")], "rollout-0"),
        ([BUFFER, STARVED, view("rollout-0", "wait_card")], "trainer-0"),
        ([BUFFER, STARVED, view("rollout-0", "asleep")], "buffer"),
        ([view("buffer", "", state="backoff")], None),
    ],
)  # fmt: skip
def test_the_culprit_is_who_does_not_merely_wait(processes: list[ProcessView], expected: str | None) -> None:
    found = culprit(run(*processes))

    assert (found and found.observed.name) == expected


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (run(BUFFER, STARVED, view("rollout-0", "wait_data"), ready=512), False),
        (run(BUFFER, GENERATING, external=True), False),
        (run(BUFFER, GENERATING, external=True, ready=256), True),
        (run(BUFFER, GENERATING, external=True, leases=1), True),
        (run(BUFFER, view("rollout-0", "wait_ticket_staleness"), external=True), True),
        (run(BUFFER, view("rollout-0", "wait_data"), external=True), False),
    ],
)
def test_only_a_trainer_of_somebody_elses_is_waited_for_without_end(seen: RunView, expected: bool) -> None:
    assert waits_for_external_trainer(seen) == expected


def test_shares_are_of_the_window_and_add_up() -> None:
    window = ShareWindow(window_s=60, every_s=1)
    generate, wait, other = (("rollout", "0", name) for name in ("generate", "wait_data", "other"))
    assert window.shares("rollout") == {}

    for second in range(200):
        # Generates in the first half of each 20 s, waits in the second; time before the window does not count.
        spent = {generate: 1000.0 + second // 2, wait: float(second - second // 2), other: 500.0}
        window.add(float(second), {**spent, ("rollout", "1", "generate"): float(second)})
        window.add(second + 0.3, {generate: 1e9})

    assert window.shares("rollout", "0") == pytest.approx({"generate": 0.5, "wait_data": 0.5})
    assert window.shares("rollout") == pytest.approx({"generate": 0.75, "wait_data": 0.25})
    assert window.shares("trainer") == {}


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (41.4, "41 s"),
        (60, "1 min 00 s"),
        (3599.7, "1 h 00 min"),
        (7300, "2 h 01 min"),
    ],
)
def test_seconds_are_said_as_people_say_them(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected


def test_a_sentence_per_fact_is_one_line() -> None:
    talkative = dataclasses.replace(GENERATING, state="starting", last_line="x")

    assert all("\n" not in sentence for sentence in explain(run(BUFFER, talkative), {}))


def test_steps_that_train_nothing_are_the_first_sentence_from_the_twentieth_on() -> None:
    seen = run(BUFFER, TRAINING, GENERATING)

    assert not any("Nothing to learn" in said for said in explain(dataclasses.replace(seen, idle_steps=19), {}))
    assert explain(dataclasses.replace(seen, idle_steps=20), {})[0].startswith(
        "Nothing to learn: the last 20 steps trained no token and moved no weight"
    )


@pytest.mark.parametrize(("count", "last"), [(1, "The last checkpoint"), (12, "The last 12 checkpoints")])
def test_checkpoints_that_could_not_be_written_are_told_until_one_is(count: int, last: str) -> None:
    seen = run(BUFFER, TRAINING, GENERATING)

    assert not any("checkpoint" in said for said in explain(seen, {}))
    assert explain(dataclasses.replace(seen, lost_checkpoints=count), {})[0].startswith(f"{last} could not be written")


@pytest.mark.parametrize(
    ("nodes", "left", "sentence"),
    [
        (2, [("gpu-7 (10.0.0.7)", 41.0)],
         "Node gpu-7 (10.0.0.7) left the cluster, the last one 41 s ago; 2 nodes remain."),
        (1, [("gpu-7 (10.0.0.7)", 41.0), ("gpu-8 (10.0.0.8)", 60.0)],
         "Node gpu-7 (10.0.0.7) and gpu-8 (10.0.0.8) left the cluster, the last one 41 s ago; 1 node remains."),
        (1, [("gpu-7 (10.0.0.7)", 41.0), ("gpu-8 (10.0.0.8)", 60.0), ("gpu-9 (10.0.0.9)", 61.0)],
         "Node gpu-7 (10.0.0.7) and 2 more nodes left the cluster, the last one 41 s ago; 1 node remains."),
    ],
)  # fmt: skip
def test_nodes_that_left_the_cluster_are_named(nodes: int, left: list[tuple[str, float]], sentence: str) -> None:
    lost = dataclasses.replace(run(BUFFER, STARVED, GENERATING), nodes=nodes, nodes_left=left)

    assert explain(lost, {})[0] == sentence
    assert not any("cluster" in one for one in explain(run(BUFFER, STARVED, GENERATING), {}))


def test_a_worker_in_a_cluster_is_named_with_the_node_of_its_actor() -> None:
    remote = dataclasses.replace(GENERATING, node="gpu-7 (10.0.0.7)")

    assert (
        "rollout-0 (pid 4711, actor on node gpu-7 (10.0.0.7)) has been in generate"
        in explain(run(BUFFER, STARVED, remote), {})[0]
    )


def test_an_evaluation_under_way_is_named_with_its_prompts_and_not_with_a_number_of_tickets() -> None:
    evaluating = view("rollout-0", "generate", since_s=41, working_on=EVALUATION_TICKETS + 17)

    said = explain(dataclasses.replace(run(BUFFER, STARVED, evaluating), evaluation=(96, 500)), {})

    assert "An evaluation has 96 of 500 held-out prompts; the next step follows it." in said
    assert any(
        "rollout-0 (pid 4711) has been in generate on held-out prompts for 41 s" in sentence for sentence in said
    )


FULL = EngineView(12, 20, room=256, cache_ratio=0.97, preemptions=3)
EMPTY = EngineView(4, 0, room=256, cache_ratio=0.02)
BUSY = EngineView(250, 30, room=256, cache_ratio=0.6)
HOLDS = {
    "a full cache": (
        view("rollout-0", "generate", engine=FULL, generate=0.9, reward=0.1),
        "The cache of the engine of rollout-0 is full (97 %): 12 responses run, 20 wait, 3 lost their place in the "
        "last minute; raise rollout.cache_bytes, or lower rollout.max_length.",
    ),
    "a lack of tickets": (
        view("rollout-0", "generate", engine=EMPTY, generate=0.9, reward=0.1),
        "The engine of rollout-0 lacks tickets: 4 of 256 responses are in hand; raise buffer.max_staleness, "
        "buffer.sample_batch_size or rollout.tickets_ahead, or lower rollout.workers.",
    ),
    "a slow reward": (
        view("rollout-0", "reward", engine=FULL, generate=0.3, reward=0.7),
        "The reward holds the engine of rollout-0 up: it takes 70 % of the worker's time, with 32 responses in the "
        "engine; raise rollout.reward_processes, or make it faster.",
    ),
}


@pytest.mark.parametrize(("worker", "sentence"), HOLDS.values(), ids=HOLDS.keys())
def test_a_full_cache_a_lack_of_tickets_and_a_slow_reward_are_told_apart(worker: ProcessView, sentence: str) -> None:
    sentences = explain(run(BUFFER, STARVED, worker), {})

    assert sentences[1:] == [sentence]
    assert sentences[0].startswith("trainer-0 waits for data")


@pytest.mark.parametrize(
    "worker",
    [
        view("rollout-0", "generate", engine=BUSY, generate=0.9, reward=0.1),
        view("rollout-0", "generate", engine=EngineView(64, 64), generate=0.9),
        view("rollout-0", "ref_logprob", engine=EngineView(0, 0, room=1), generate=0.5),
        view("rollout-0", "wait_ticket_full", engine=EMPTY),
        view("rollout-0", "generate"),
    ],
    ids=["busy", "without a room of its own", "whole tickets", "waiting for a ticket", "without an engine"],
)
def test_an_engine_that_is_not_held_up_has_no_sentence(worker: ProcessView) -> None:
    assert len(explain(run(BUFFER, STARVED, worker), {})) == 1


def test_of_several_engines_the_one_that_is_held_up_most_is_named() -> None:
    less = view("rollout-1", "generate", engine=EngineView(90, 0, room=256))

    sentences = explain(run(BUFFER, STARVED, less, HOLDS["a lack of tickets"][0]), {})

    assert sentences[1:] == [HOLDS["a lack of tickets"][1]]
