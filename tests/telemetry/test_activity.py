from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import FieldError
from pipeline.telemetry.activity import ActivityClock
from pipeline.telemetry.metrics import ACTIVITIES
from pipeline.telemetry.slab import MetricsSlab, SlabLayout
from tests.support.slabs import SLOTS, begun
from tests.telemetry.test_kills import DyingWords, KilledError

SECOND_NS = 1_000_000_000


class FakeClock:
    def __init__(self) -> None:
        self.now_ns = 5 * SECOND_NS

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, seconds: float) -> None:
        self.now_ns += round(seconds * SECOND_NS)


class FakeSlot:
    """A slot of a slab in plain memory, read at a moment of the test's own."""

    def __init__(self) -> None:
        layout = SlabLayout(SLOTS)
        self.slab = MetricsSlab(layout, mmap.mmap(-1, layout.nbytes))
        self.writer = begun(self.slab, "rollout")

    def spent_s(self) -> dict[str, float]:
        """Time counted for each activity that took time."""
        return {name: spent for name, spent in self._words(self.slab.layout.live(3)).items() if spent > 0}

    def shown_s(self, now: FakeClock) -> dict[str, float]:
        """Values that readers see at a given time, the present activity included."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "monotonic_ns", now)
            row = self.slab.read(3)
        return {name: row[at] for name, at in self._cells() if row[at] > 0}

    def _cells(self) -> list[tuple[str, int]]:
        return [*zip(ACTIVITIES, self.slab.layout.of_role["rollout"].activities, strict=True)]

    def _words(self, live: slice) -> dict[str, float]:
        return {name: self.slab.floats[live.start + at] for name, at in self._cells()}


@pytest.fixture
def slot() -> FakeSlot:
    return FakeSlot()


def test_time_belongs_to_the_activity_it_was_spent_on(slot: FakeSlot) -> None:
    now = FakeClock()
    clock = ActivityClock(slot.writer, ["generate", "reward"], clock_ns=now)

    now.advance(1)
    with clock.during("generate"):
        now.advance(10)
        with clock.during("reward"):
            now.advance(100)
        now.advance(20)
    now.advance(2)

    assert slot.shown_s(now) == {"start": 1, "generate": 30, "reward": 100, "other": 2}


def test_block_that_raises_still_ends_its_activity(slot: FakeSlot) -> None:
    now = FakeClock()
    clock = ActivityClock(slot.writer, ["reward"], clock_ns=now)

    def fail() -> None:
        with clock.during("reward"):
            now.advance(3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()

    assert clock.activity == "other"
    assert slot.spent_s() == {"reward": 3}


def test_activity_that_never_ends_shows_while_it_lasts(slot: FakeSlot) -> None:
    now = FakeClock()
    clock = ActivityClock(slot.writer, ["generate", "reward"], clock_ns=now)

    with clock.during("reward"):
        now.advance(2)
    with clock.during("generate"):
        now.advance(1)
    clock.enter("generate")
    for _ in range(3):
        now.advance(4)

    assert slot.spent_s() == {"reward": 2, "generate": 1}
    assert slot.shown_s(now) == {"reward": 2, "generate": 13}
    progress = slot.slab.progress("rollout")
    assert (progress.activity, progress.since_s, progress.beat_s) == ("generate", 8, 8)


def test_dead_process_was_at_its_last_activity_until_it_was_reaped_or_its_supervisor_last_seen(slot: FakeSlot) -> None:
    now = FakeClock()
    ActivityClock(slot.writer, ["generate"], clock_ns=now).enter("generate")

    slot.slab.fold("rollout", until_ns=now() + 7 * SECOND_NS)
    slot.slab.fold("rollout", until_ns=now() + 70 * SECOND_NS)

    now.advance(100)
    assert slot.shown_s(now) == {"generate": 7}


def test_a_start_counts_from_the_moment_its_slot_began_to_the_first_activity(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slot = FakeClock(), FakeSlot()
    monkeypatch.setattr(time, "monotonic_ns", now)

    slot.slab.begin("rollout", activity="start")
    now.advance(3)
    before_it_says_anything = slot.shown_s(now)
    clock = ActivityClock(slot.slab.writer("rollout"), ["generate"], clock_ns=now)
    now.advance(4)
    while_it_loads = slot.shown_s(now)
    with clock.during("generate"):
        now.advance(10)
    now.advance(1)

    assert before_it_says_anything == {"start": 3}
    assert while_it_loads == {"start": 7}
    assert slot.shown_s(now) == {"start": 7, "generate": 10, "other": 1}


def test_activity_nobody_declared_is_refused(slot: FakeSlot) -> None:
    with pytest.raises(FieldError, match="writes no counter rlhfd_process_time_seconds_total with"):
        ActivityClock(slot.writer, ["sleep"])
    with pytest.raises(FieldError, match="activity train is none of generate, start, other"):
        ActivityClock(slot.writer, ["generate"]).enter("train")


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(["generate", "reward", "other", "look"]), st.integers(0, 10**15))))
def test_activities_add_up_to_the_wall_time(steps: list[tuple[str, int]]) -> None:
    now, slot = FakeClock(), FakeSlot()
    clock = ActivityClock(slot.writer, ["generate", "reward"], clock_ns=now)
    seen: dict[str, float] = {}

    for activity, duration_ns in steps:
        now.now_ns += duration_ns
        if activity != "look":
            clock.enter(activity)
        shown = slot.shown_s(now)
        assert all(shown[name] >= before for name, before in seen.items())
        seen = shown

    wall_ns = sum(duration_ns for _, duration_ns in steps)
    assert math.fsum(seen.values()) * SECOND_NS == pytest.approx(wall_ns, rel=1e-12, abs=1)


def test_a_reading_between_a_look_at_the_clock_and_the_stores_after_it_shows_no_time_that_is_then_taken_back(
    slot: FakeSlot,
) -> None:
    now = FakeClock()
    seen: list[dict[str, float]] = []

    def preempted() -> int:
        """Return a time that is two seconds old when the caller gets it, after a scrape."""
        time_ns = now()
        now.advance(2)
        seen.append(slot.shown_s(now))
        return time_ns

    clock = ActivityClock(slot.writer, ["generate"], clock_ns=preempted)
    for activity in ["generate", "other", "generate", "other"]:
        now.advance(1)
        seen.append(slot.shown_s(now))
        clock.enter(activity)
        seen.append(slot.shown_s(now))

    assert seen[-1] == {"start": 3, "generate": 6, "other": 5}
    for before, after in itertools.pairwise(seen):
        assert all(after[name] >= spent_s for name, spent_s in before.items())


def test_a_writer_stopped_at_any_store_shows_each_second_once(slot: FakeSlot) -> None:
    now = FakeClock()
    clock = ActivityClock(slot.writer, ["generate", "reward"], clock_ns=now)
    clock.enter("generate")
    floats, words = slot.slab.floats, slot.slab.words

    for stores in range(8):
        now.advance(1)
        before = slot.shown_s(now)
        left = [stores]
        slot.slab.floats = DyingWords(floats, left)  # type: ignore[assignment]
        slot.slab.words = DyingWords(words, left)  # type: ignore[assignment]
        clock._counters["generate"]._words = slot.slab.floats
        with contextlib.suppress(KilledError):
            clock.enter("reward")
        slot.slab.floats, slot.slab.words = floats, words

        assert slot.shown_s(now) == before
        clock._counters["generate"]._words = floats
        clock = ActivityClock(begun(slot.slab, "rollout"), ["generate", "reward"], clock_ns=now)
        clock.enter("generate")
