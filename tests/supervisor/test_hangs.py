"""Hang detection by tables: observations and a clock in, verdicts out."""

from __future__ import annotations

import pytest

from pipeline.config.schema import Config, DaemonConfig, RolloutConfig
from pipeline.supervisor.hangs import Observation, PauseWatch, RunWatch, hung
from pipeline.telemetry.metrics import Progress


def limits_of(*, hang_timeout_s: float = 300, startup_timeout_s: float = 120) -> Config:
    daemon = DaemonConfig(hang_timeout_s=hang_timeout_s, startup_timeout_s=startup_timeout_s)
    return Config(daemon=daemon, rollout=RolloutConfig(ticket_timeout_s=600))


LIMITS = limits_of()
NOW_S = 10_000.0


def process(
    name: str = "rollout-0",
    *,
    silent_s: float = 0.1,
    activity: str = "generate",
    since_s: float = 41.0,
    working_on: int = -1,
    overdue_s: float | None = None,
    in_collective: bool = False,
    ready: bool = True,
    stopped: bool = False,
    starting_s: float | None = None,
    stopped_s: float = 0.0,
    ending: bool = False,
) -> Observation:
    deadline_s = 0.0 if overdue_s is None else NOW_S - overdue_s
    progress = Progress(NOW_S - silent_s, activity, NOW_S - since_s, working_on, deadline_s, in_collective)
    starting_since_s = None if starting_s is None else NOW_S - starting_s
    ready = ready and starting_s is None
    stopped_since_s = NOW_S - stopped_s if stopped or stopped_s else None
    return Observation(name, name.partition("-")[0], 4711, ready, progress, stopped_since_s, starting_since_s, ending)


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        ([process()], []),
        ([process(silent_s=300)], []),
        ([process(silent_s=300.1)], [("rollout-0", "no progress")]),
        ([process(silent_s=300.1, ready=False)], []),
        ([process(silent_s=300.1, stopped=True)], [("rollout-0", "stopped")]),
        ([process(stopped=True)], []),
        # A start has its own time, and one that is stopped in it is stopped.
        ([process(starting_s=120, silent_s=9000)], []),
        ([process(starting_s=120.1)], [("rollout-0", "not ready in time")]),
        ([process("forkserver", starting_s=120.1, silent_s=NOW_S)], [("forkserver", "not ready in time")]),
        ([process(starting_s=20, silent_s=9000, stopped=True)], []),
        ([process(starting_s=120.1, silent_s=9000, stopped=True)], [("rollout-0", "stopped")]),
        # Ranks start together: the last one's time is that of all, and one that is yet to come is waited for.
        ([process("trainer-0", starting_s=130), process("trainer-1", starting_s=120)], []),
        ([process("trainer-0", starting_s=130), process("trainer-1", ready=False)], []),
        ([process("trainer-0", starting_s=130), process("trainer-1", starting_s=121)],
         [("trainer-0", "not ready in time"), ("trainer-1", "not ready in time")]),
        ([process("trainer-0", starting_s=130), process("trainer-1", starting_s=121, stopped_s=90)],
         [("trainer-1", "stopped")]),
        # A ticket's deadline and the grace after it.
        ([process(working_on=17, overdue_s=600)], []),
        ([process(working_on=17, overdue_s=600.1)], [("rollout-0", "ticket overdue")]),
        ([process(working_on=17, overdue_s=-100, since_s=5000)], []),
        ([process(working_on=17, overdue_s=601, silent_s=301)], [("rollout-0", "ticket overdue")]),
        # A rank that waits for another one is as silent as that one.
        ([process("trainer-0", silent_s=301, in_collective=True), process("trainer-1", silent_s=301)],
         [("trainer-1", "no progress")]),
        ([process("trainer-0", silent_s=900, in_collective=True), process("trainer-1", silent_s=301, stopped=True)],
         [("trainer-1", "stopped")]),
        ([process("trainer-0", silent_s=301, in_collective=True),
          process("trainer-1", silent_s=400, in_collective=True, stopped=True)],
         [("trainer-1", "stopped")]),
        # In a pass of shards each layer waits for all ranks.
        ([process("trainer-0", activity="train", silent_s=302),
          process("trainer-1", activity="train", silent_s=301, stopped=True)],
         [("trainer-1", "stopped")]),
        # The other rank has no data yet, or is still loading: no rank hangs.
        ([process("trainer-0", silent_s=9000, in_collective=True), process("trainer-1", activity="wait_data")], []),
        ([process("trainer-0", silent_s=9000, in_collective=True),
          process("trainer-1", silent_s=9000, ready=False)], []),
        # All ranks wait in it: the collective itself hangs, and the first in it is named.
        ([process("trainer-0", silent_s=301, in_collective=True),
          process("trainer-1", silent_s=302, in_collective=True)],
         [("trainer-1", "no progress")]),
        ([process("rollout-0", silent_s=301), process("buffer", silent_s=301), process("rollout-1")],
         [("rollout-0", "no progress"), ("buffer", "no progress")]),
    ],
)  # fmt: skip
def test_who_hangs(processes: list[Observation], expected: list[tuple[str, str]]) -> None:
    verdicts = hung(processes, NOW_S, LIMITS)

    assert [(verdict.name, verdict.reason) for verdict in verdicts] == expected


def test_a_verdict_says_at_what_and_since_when() -> None:
    (verdict,) = hung([process(silent_s=400, activity="reward", working_on=17)], NOW_S, LIMITS)

    assert (verdict.pid, verdict.stage, verdict.working_on, NOW_S - verdict.since_s) == (4711, "reward", 17, 400)


def test_one_that_is_stopped_in_a_long_start_is_found_before_the_start_is_late() -> None:
    limits = limits_of(hang_timeout_s=15, startup_timeout_s=600)
    stopped = process(starting_s=400, silent_s=NOW_S, stopped_s=15.1)

    (verdict,) = hung([stopped, process(starting_s=400, silent_s=NOW_S)], NOW_S, limits)

    assert (verdict.reason, verdict.stage, NOW_S - verdict.since_s) == ("stopped", "start", pytest.approx(15.1))
    briefly = process(starting_s=400, silent_s=NOW_S, stopped_s=0.25)
    assert hung([briefly], NOW_S, limits) == [], "a start may go on as one that works may"


def test_zero_turns_silence_off_and_nothing_else() -> None:
    limits = limits_of(hang_timeout_s=0)

    assert hung([process(silent_s=1e6)], NOW_S, limits) == []
    assert len(hung([process(overdue_s=601)], NOW_S, limits)) == 1


@pytest.mark.parametrize(("hang_timeout_s", "limit_s"), [(300, 60), (0, 60), (15, 15)])
def test_a_buffer_that_ends_is_waited_for_a_minute_after_its_last_word_at_most(
    hang_timeout_s: float, limit_s: float
) -> None:
    limits = limits_of(hang_timeout_s=hang_timeout_s)

    assert hung([process("buffer", silent_s=limit_s, ending=True)], NOW_S, limits) == []
    (verdict,) = hung([process("buffer", silent_s=limit_s + 0.1, ending=True)], NOW_S, limits)
    assert verdict.reason == "no progress"


@pytest.mark.parametrize("name", ["trainer-0", "rollout-0", "buffer"])
def test_others_may_be_silent_in_an_end_for_as_long_as_before(name: str) -> None:
    ending = name != "buffer"
    never = limits_of(hang_timeout_s=0)

    assert hung([process(name, silent_s=299.0, ending=ending)], NOW_S, LIMITS) == []
    assert len(hung([process(name, silent_s=301.0, ending=ending)], NOW_S, LIMITS)) == 1
    assert hung([process(name, silent_s=1e6, ending=ending)], NOW_S, never) == []


def test_silence_while_the_watcher_was_away_is_nobodys_hang() -> None:
    watch = PauseWatch()
    assert watch.look(0.0, 150)
    assert not watch.look(149.0, 150)
    assert watch.since_s == 0.0

    assert watch.look(NOW_S, 150), "stopped for hours"

    assert hung([process(silent_s=5000, overdue_s=5000)], NOW_S, LIMITS, watched_since_s=watch.since_s) == []
    assert not watch.look(NOW_S + 1, 150)
    assert hung([process(starting_s=5000)], NOW_S, LIMITS, watched_since_s=watch.since_s) == []
    later = [process(silent_s=5000)]
    assert len(hung(later, NOW_S + 301, LIMITS, watched_since_s=watch.since_s)) == 1


def test_a_run_that_moves_is_left_alone() -> None:
    watch = RunWatch()

    assert not any(watch.look(float(now_s), (now_s // 1700,), 1800, is_judged=True) for now_s in range(0, 20_000, 100))
    assert watch.strikes == 0


def test_a_run_that_stands_still_strikes_once_each_time_until_something_moves() -> None:
    watch = RunWatch()
    watch.look(0.0, (1,), 1800, is_judged=True)

    struck = [now_s for now_s in range(0, 6000, 100) if watch.look(float(now_s), (1,), 1800, is_judged=True)]

    assert struck == [1900, 3800, 5700]
    assert watch.strikes == 3
    assert not watch.look(6000.0, (2,), 1800, is_judged=True)
    assert watch.strikes == 0


def test_time_in_which_somebody_outside_is_waited_for_does_not_count() -> None:
    watch = RunWatch()
    watch.look(0.0, (1,), 1800, is_judged=True)

    assert not watch.look(1700.0, (1,), 1800, is_judged=True)
    assert not watch.look(9000.0, (1,), 1800, is_judged=False)
    assert not watch.look(10_700.0, (1,), 1800, is_judged=True)
    assert watch.look(10_801.0, (1,), 1800, is_judged=True)


def test_a_restart_in_between_keeps_the_first_strike() -> None:
    watch = RunWatch()
    watch.look(0.0, (1,), 1800, is_judged=True)
    assert watch.look(1801.0, (1,), 1800, is_judged=True)

    assert not watch.look(1810.0, (1,), 1800, is_judged=False)

    assert watch.look(3700.0, (1,), 1800, is_judged=True)
    assert watch.strikes == 2


def test_zero_lets_a_run_stand_still() -> None:
    watch = RunWatch()

    assert not any(watch.look(float(now_s), (), 0, is_judged=True) for now_s in range(0, 100_000, 1000))


def test_another_timeout_holds_at_once() -> None:
    watch = RunWatch()
    watch.look(0.0, (1,), 100.0, is_judged=True)
    assert not watch.look(50.0, (1,), 100.0, is_judged=True)

    assert watch.look(51.0, (1,), 40.0, is_judged=True)
