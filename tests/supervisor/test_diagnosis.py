"""The cause of a slow or stopped run, in the sentences for a user."""

from __future__ import annotations

import dataclasses

import pytest

from pipeline.supervisor.diagnosis import (
    ProcessView,
    RunView,
    ShareWindow,
    culprit,
    duration,
    explain,
    waits_for_external_trainer,
)
from pipeline.supervisor.hangs import HangLimits, Observation
from pipeline.telemetry.metrics import Progress

NOW_S = 10_000.0
LIMITS = HangLimits(300, 120, 600, 1800)


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
    **shares: float,
) -> ProcessView:
    progress = Progress(NOW_S - silent_s, activity, NOW_S - since_s, working_on, 0.0, in_collective)
    observed = Observation(
        name, name.partition("-")[0], 4711, state == "ready", progress, NOW_S if stopped else None,
        stopped_by="SIGTSTP" if stopped else "",
    )  # fmt: skip
    return ProcessView(observed, state, NOW_S - age_s, shares, last_line)


def run(
    *processes: ProcessView, state: str = "ready", ready: int = 128, leases: int = 0, external: bool = False
) -> RunView:
    return RunView(NOW_S, state, processes, ready, leases, 256, external, LIMITS)


BUFFER = view("buffer", "wait_data")
GENERATING = view("rollout-0", "generate", since_s=41, working_on=17)
TRAINING = view("trainer-0", "train", since_s=2, working_on=9)
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
    seen = dataclasses.replace(
        run(BUFFER, training, GENERATING), limits=dataclasses.replace(LIMITS, hang_timeout_s=hang_timeout_s)
    )

    sentence = explain(seen, {})[0]

    assert ("hangs or is very slow" in sentence) == is_named
    assert is_named or f"trainer-0 (pid 4711) has been in train on lease 4 for {duration(silent_s)}" in sentence


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
