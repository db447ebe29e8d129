from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.activity import ActivityClock
from pipeline.errors import FieldError
from pipeline.metrics import SlotName
from pipeline.metrics_writer import MetricWriter, SlotLayout
from tests.slabs import SLOTS

SECOND_NS = 1_000_000_000


class FakeClock:
    def __init__(self) -> None:
        self.now_ns = 5 * SECOND_NS

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, seconds: float) -> None:
        self.now_ns += round(seconds * SECOND_NS)


class FakeSlot:
    """A slot in plain memory."""

    def __init__(self) -> None:
        self._layout = SlotLayout("rollout", SLOTS)
        self._words = memoryview(bytearray(8 * self._layout.words)).cast("d")
        self.writer = MetricWriter(SlotName("rollout"), self._layout, self._words, 0)

    def spent_s(self) -> dict[str, float]:
        """What was booked to each activity that took time."""
        times = [cell for cell in self._layout.cells if cell.metric.name == "rlhfd_process_time_seconds_total"]
        return {cell.labels[2]: self._words[cell.start] for cell in times if self._words[cell.start]}


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
    clock.tick()

    assert slot.spent_s() == {"generate": 30, "reward": 100, "other": 3}


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


def test_long_activity_shows_before_its_end(slot: FakeSlot) -> None:
    now = FakeClock()
    clock = ActivityClock(slot.writer, ["generate"], clock_ns=now)

    with clock.during("generate"):
        now.advance(4)
        clock.tick()

        assert slot.spent_s() == {"generate": 4}


def test_time_before_the_clock_began_counts_as_other(slot: FakeSlot) -> None:
    now = FakeClock()

    ActivityClock(slot.writer, ["generate"], since_ns=now() - 3 * SECOND_NS, clock_ns=now).tick()

    assert slot.spent_s() == {"other": 3}


def test_activity_nobody_declared_is_refused(slot: FakeSlot) -> None:
    with pytest.raises(FieldError, match="declares no series"):
        ActivityClock(slot.writer, ["sleep"])
    with pytest.raises(FieldError, match="activity train is none of generate, other"):
        ActivityClock(slot.writer, ["generate"]).enter("train")


@given(st.lists(st.tuples(st.sampled_from(["generate", "reward", "other", "tick"]), st.integers(0, 10**15))))
def test_activities_add_up_to_the_wall_time(steps: list[tuple[str, int]]) -> None:
    now, slot = FakeClock(), FakeSlot()
    clock = ActivityClock(slot.writer, ["generate", "reward"], clock_ns=now)

    for activity, duration_ns in steps:
        now.now_ns += duration_ns
        if activity == "tick":
            clock.tick()
        else:
            clock.enter(activity)

    wall_ns = sum(duration_ns for _, duration_ns in steps)
    booked_ns = math.fsum(slot.spent_s().values()) * SECOND_NS
    assert booked_ns == pytest.approx(wall_ns, rel=1e-15)
