"""A run's history: every sum in it is exact however coarse it has become, and it is there after a restart."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import msgspec
import pytest

from pipeline.telemetry.history import SPAN_S, History, HistoryRecorder, Point
from pipeline.telemetry.metrics import SlotName
from pipeline.telemetry.reader import MetricsReader
from pipeline.telemetry.slab import MetricsSlab


def point(number: int) -> Point:
    return Point(
        2.0 * number, 2.0 * number + 2.0, 2.0, number, 1.0, number % 7, (number % 7) ** 2 + 1.0, 5.0, 2.0 * number,
        1.0, 3.0, {"rollout": {"generate": 1.5, "reward": 0.5}}, {"loss": (number % 7, 1.0)},
    )  # fmt: skip


def test_a_history_is_bounded_and_nothing_in_its_sums_is_lost(tmp_path: Path) -> None:
    history = History(tmp_path / "history", "run")

    for number in range(43_200):
        history.add(point(number))

    points = history.points()
    assert len(points) < 1200, "a day"
    assert sum(one.rewards for one in points) == 43_200
    assert sum(one.reward_sum for one in points) == sum(number % 7 for number in range(43_200))
    assert sum(one.ready_item_seconds for one in points) == sum(2.0 * number for number in range(43_200))
    assert sum(one.spent_s["rollout"]["generate"] for one in points) == 1.5 * 43_200
    assert [one.start_s for one in points] == [0.0, *(one.end_s for one in points[:-1])]
    assert points[-1] == point(43_199)
    spans = [one.end_s - one.start_s for one in points]
    assert spans == sorted(spans, reverse=True), "the older the coarser"


def test_means_rates_and_shares_are_those_of_all_that_was_added() -> None:
    both = point(3).plus(point(4)).shown()

    # Rewards 3 and 4 with a variance of 1 each: mean 3.5, variance 1 within and 0.25 between.
    assert both == {
        "start_s": 6.0, "end_s": 10.0, "seconds": 4.0, "step": 4, "reward": 3.5, "reward_spread": round(1.25**0.5, 5),
        "tokens_per_s": 2.5, "ready_items": 3.5, "staleness": pytest.approx(1 / 3, abs=1e-4),
        "shares": {"rollout": {"generate": 0.75, "reward": 0.25}}, "loss": 3.5,
    }  # fmt: skip
    assert Point(0.0, 2.0, 2.0).plus(point(4)).shown()["loss"] == 4.0


def test_what_is_not_known_is_left_out() -> None:
    assert Point(0.0, 2.0, 2.0).shown().keys() == {
        "start_s", "end_s", "seconds", "step", "tokens_per_s", "ready_items", "shares"
    }  # fmt: skip


def test_a_history_goes_on_after_a_restart_and_not_with_another_run(tmp_path: Path) -> None:
    history = History(tmp_path / "deep" / "history", "run")
    for number in range(300):
        history.add(point(number))
    history.save()

    again, other = (History(tmp_path / "deep" / "history", name) for name in ("run", "another"))
    again.add(point(300))

    assert again.points() == [*history.points(), point(300)] or len(again.points()) == len(history.points())
    assert again.points()[-1] == point(300) and again.points()[0] == history.points()[0]
    assert other.points() == []
    assert (tmp_path / "deep" / "history").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["history"]


@pytest.mark.parametrize("text", [b"", b"\xc1", b"\x80", b"[]", b"\x81\xa8identity\xa1\xff"])
def test_a_damaged_history_is_begun_anew(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "history").write_bytes(text)

    assert History(tmp_path / "history", "run").points() == []


@dataclasses.dataclass
class Bench:
    """A slab with a worker and a trainer, and a recorder of it."""

    folder: Path
    now_s: float = 100.0
    is_external: bool = False

    def __post_init__(self) -> None:
        names = [SlotName("supervisor"), SlotName("buffer"), SlotName("trainer", 0), SlotName("rollout", 0)]
        self.slab = MetricsSlab.create(self.folder / "metrics", names)
        for name in names:
            self.slab.begin(name.role, name.worker)
        self.history = History(self.folder / "history", "run")
        self.recorder = HistoryRecorder(self.history, is_external=self.is_external)
        self.reader = MetricsReader(self.slab)
        self.trainer, self.rollout = self.slab.writer("trainer", 0), self.slab.writer("rollout", 0)

    def look(self, after_s: float, ready_items: int = 0) -> None:
        self.now_s += after_s
        self.recorder.add(self.now_s, 1e9 + self.now_s, self.reader.read(), ready_items)


def test_points_hold_what_the_metrics_grew_by(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    tokens = bench.rollout.counter("rlhfd_tokens_total", kind="response")
    stale = bench.trainer.histogram("rlhfd_policy_staleness_versions", point="train")
    steps = bench.trainer.counter("rlhfd_train_steps_total")
    mean = bench.trainer.gauge("rlhfd_reward_mean", source="function")
    spread = bench.trainer.gauge("rlhfd_reward_stddev", source="function")
    # Earlier counts do not belong to this span.
    tokens.inc(1000)
    stale.observe(7)
    steps.inc(5)
    mean.set(0.9)
    bench.look(0.0, ready_items=50)
    bench.look(0.5, ready_items=10)
    for reward in (0.25, 0.75):
        steps.inc()
        mean.set(reward)
        spread.set(0.5)
        bench.look(0.5, ready_items=10)
    tokens.inc(60)
    stale.observe_many([0, 1, 1])
    bench.look(0.5, ready_items=40)

    (one,) = bench.history.points()
    assert one.end_s - one.start_s == one.seconds == one.shown()["seconds"] == SPAN_S
    assert (one.step, one.rewards, one.reward_sum) == (7, 2, 1.0)
    assert one.reward_squares == pytest.approx(2 * 0.25 + 0.0625 + 0.5625)
    assert one.tokens == 60
    assert (one.staleness_sum, one.staleness_rows) == (2, 3)
    assert one.ready_item_seconds == 1.5 * 10 + 0.5 * 40
    bench.slab.close()


def test_with_a_trainer_of_ones_own_rewards_are_those_of_the_rollouts(tmp_path: Path) -> None:
    bench = Bench(tmp_path, is_external=True)
    rewards = bench.rollout.histogram("rlhfd_reward", source="function")
    rewards.observe(9.0)
    bench.look(0.0)
    rewards.observe_many([0.0, 1.0, 0.5])
    bench.look(2.0)

    (one,) = bench.history.points()
    assert one.shown()["reward"] == 0.5
    bench.slab.close()


def test_a_sum_of_rewards_that_a_negative_one_has_ended_is_not_known(tmp_path: Path) -> None:
    bench = Bench(tmp_path, is_external=True)
    rewards = bench.rollout.histogram("rlhfd_reward", source="function")
    rewards.observe(9.0)
    bench.look(0.0)
    for reward in (-1.0, 1.0):
        rewards.observe(reward)
        bench.look(2.0)

    assert ["reward" in point.shown() for point in bench.history.points()] == [False, False]
    bench.slab.close()


def test_totals_that_begin_anew_leave_no_negative_point(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    tokens = bench.rollout.counter("rlhfd_tokens_total", kind="response")
    stale = bench.trainer.histogram("rlhfd_policy_staleness_versions", point="train")
    tokens.inc(1e9)
    stale.observe(7)
    bench.look(0.0)
    bench.slab.survive_truncation()
    os.truncate(tmp_path / "metrics", 0)
    bench.slab.restore(tmp_path / "metrics")
    bench.look(2.0)

    (one,) = bench.history.points()
    assert (one.tokens, one.staleness_sum, one.staleness_rows) == (0, 0, 0)
    bench.slab.close()


def test_a_point_has_the_mean_of_each_value_of_its_steps(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    steps = bench.trainer.counter("rlhfd_train_steps_total")
    gauges = {
        "reward": bench.trainer.gauge("rlhfd_reward_mean", source="function"),
        "loss": bench.trainer.gauge("rlhfd_loss", kind="total"),
        "entropy": bench.trainer.gauge("rlhfd_entropy_nats"),
        "response_length": bench.trainer.gauge("rlhfd_response_length_mean_tokens"),
        "clipped": bench.trainer.gauge("rlhfd_clipped_ratio"),
        "cut": bench.trainer.gauge("rlhfd_cut_ratio"),
        "without_signal": bench.trainer.gauge("rlhfd_groups_without_signal_ratio"),
        "gradient_norm": bench.trainer.gauge("rlhfd_gradient_norm"),
        "pass_at_1": bench.slab.writer("buffer").gauge("rlhfd_evaluation_pass_at_1_ratio", file="all"),
    }
    bench.look(0.0)
    for values in (
        (0.5, 1.0, 2.0, 10.0, 0.0, 0.125, 0.5, 0.25, 0.1),
        (0.75, 3.0, 1.0, 20.0, 0.5, 0.375, 1.0, 0.75, 0.3),
    ):
        steps.inc()
        for gauge, value in zip(gauges.values(), values, strict=True):
            gauge.set(value)
        bench.look(0.5)
    bench.look(SPAN_S)

    (shown,) = (one.shown() for one in bench.history.points())
    assert {name: shown.get(name) for name in (*gauges, "kl")} == {
        "reward": 0.625, "loss": 2.0, "entropy": 1.5, "response_length": 15.0, "clipped": 0.25, "cut": 0.25,
        "without_signal": 0.75, "gradient_norm": 0.5, "pass_at_1": 0.2, "kl": None,
    }  # fmt: skip


def test_the_evaluation_of_the_last_step_is_in_the_history(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    steps = bench.trainer.counter("rlhfd_train_steps_total")
    mean = bench.trainer.gauge("rlhfd_reward_mean", source="function")
    buffer = bench.slab.writer("buffer")
    version = buffer.gauge("rlhfd_evaluation_version")
    right = buffer.gauge("rlhfd_evaluation_pass_at_1_ratio", file="all")
    version.set(0)
    right.set(0.25)
    # That of an earlier start is no new one.
    bench.look(0.0)
    bench.look(SPAN_S)
    steps.inc()
    mean.set(0.5)
    bench.look(SPAN_S)
    version.set(1)
    right.set(0.75)
    bench.look(SPAN_S)
    bench.look(SPAN_S)

    assert [one.shown().get("pass_at_1") for one in bench.history.points()] == [None, 0.25, 0.75, None]


def test_the_first_step_of_a_run_and_of_a_resumed_run_is_in_the_history(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.look(0.0)
    steps = bench.trainer.counter("rlhfd_train_steps_total")
    for already in (0, 539):
        steps.inc(already)
        bench.look(0.25)
        steps.inc()
        mean = bench.trainer.gauge("rlhfd_reward_mean", source="function")
        mean.set(0.5)
        bench.look(SPAN_S)
        mean.clear()
        bench.look(0.25)

    assert [(one.step, one.shown().get("reward")) for one in bench.history.points()] == [(1, 0.5), (541, 0.5)]


def test_a_point_has_the_step_behind_the_weights_also_while_a_rank_is_down(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    steps = bench.trainer.counter("rlhfd_train_steps_total")
    behind = bench.trainer.gauge("rlhfd_train_step")
    steps.inc(6)
    behind.set(4)
    bench.look(0.0)
    bench.look(SPAN_S)
    behind.clear()
    bench.look(SPAN_S)
    behind.set(2)
    bench.look(SPAN_S)

    assert [one.step for one in bench.history.points()] == [4, 4, 2]


def test_the_time_in_which_a_paused_run_rests_has_no_point(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    paused = bench.slab.writer("buffer").gauge("rlhfd_paused")
    tokens = bench.rollout.counter("rlhfd_tokens_total", kind="response")
    spent = {
        name: bench.trainer.counter("rlhfd_process_time_seconds_total", activity=name)
        for name in ("train", "wait_data", "other")
    }
    waits = bench.rollout.counter("rlhfd_process_time_seconds_total", activity="wait_ticket_paused")
    bench.look(0.0)

    def span(*, on: float, **seconds: float) -> int:
        paused.set(on)
        waits.inc(SPAN_S)
        for name, value in seconds.items():
            spent[name].inc(value)
        bench.look(SPAN_S)
        return len(bench.history.points())

    # It waits for data, which is no pause; is paused from within a span on; trains the rows that it has; rests.
    counts = [
        span(on=0.0, wait_data=2.0), span(on=1.0, wait_data=2.0), span(on=1.0, train=1.5, wait_data=0.5),
        span(on=1.0, wait_data=1.9, other=0.1), span(on=1.0, wait_data=2.0),
    ]  # fmt: skip
    tokens.inc(5)
    counts += [span(on=1.0, wait_data=2.0), span(on=0.0, wait_data=2.0)]

    assert counts == [1, 2, 3, 3, 3, 4, 5]
    ends = [(one.start_s, one.end_s) for one in bench.history.points()]
    assert ends[3][0] - ends[2][1] == pytest.approx(2 * SPAN_S), "a gap, as while the daemon is down"
    bench.slab.close()


def test_an_external_trainer_has_the_response_length_of_its_workers_before_and_after_its_connect(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path, is_external=True)
    lengths = bench.rollout.histogram("rlhfd_response_length_tokens")
    lengths.observe(1000)
    bench.look(0.0)
    for length in (10, 20):
        lengths.observe(length)
    bench.look(SPAN_S)
    bench.trainer.counter("rlhfd_train_steps_total").inc()
    lengths.observe(30)
    bench.look(SPAN_S)

    shown = [one.shown() for one in bench.history.points()]
    assert [one["response_length"] for one in shown] == [15.0, 30.0] and "loss" not in shown[1]


def test_rewards_before_an_external_trainers_connect_weigh_as_those_of_a_step(tmp_path: Path) -> None:
    bench = Bench(tmp_path, is_external=True)
    rewards = bench.rollout.histogram("rlhfd_reward", source="function")
    bench.look(0.0)
    rewards.observe(1.0, times=512)
    bench.look(SPAN_S)
    steps = bench.trainer.counter("rlhfd_train_steps_total")
    mean = bench.trainer.gauge("rlhfd_reward_mean", source="function")
    bench.look(SPAN_S)
    for _ in range(3):
        rewards.observe(0.0, times=512)
        mean.set(0.0)
        steps.inc()
        bench.look(SPAN_S)

    first, *later = bench.history.points()
    assert first.shown()["reward"] == 1.0
    for one in later:
        first = first.plus(one)
    assert first.shown()["reward"] == 0.25


def test_before_the_trainer_of_a_new_start_is_up_the_step_is_the_last_one_of_the_start_before(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.history.add(point(7))
    again = HistoryRecorder(bench.history)

    for now_s in (0.0, SPAN_S):
        again.add(now_s, 1e9 + now_s, bench.reader.read(), 0)
    bench.trainer.counter("rlhfd_train_steps_total").inc()
    bench.trainer.gauge("rlhfd_train_step").set(8)
    again.add(2 * SPAN_S, 1e9 + 2 * SPAN_S, bench.reader.read(), 0)

    assert [one.step for one in bench.history.points()] == [7, 7, 8]


def test_points_behind_a_known_one_are_returned_also_after_the_wall_clock_was_set_back(tmp_path: Path) -> None:
    history = History(tmp_path / "history", "run")
    for end_s in (100.04, 102.04, 52.04, 54.04):
        history.add(Point(end_s - 2.0, end_s))
    shown = [one.shown()["end_s"] for one in history.points()]

    behind = [[one.shown()["end_s"] for one in history.points(end_s)] for end_s in shown]
    assert behind == [shown[1:], shown[2:], shown[3:], []]
    assert history.points(0.0) == history.points()
    assert len(history.points(101.0)) == 1, "the point of this time is part of a coarser one by now"


def test_points_of_an_earlier_version_are_read(tmp_path: Path) -> None:
    fields = msgspec.to_builtins(point(1))
    (tmp_path / "history").write_bytes(msgspec.msgpack.encode({"identity": "run", "levels": [[fields[:-1]]]}))

    assert History(tmp_path / "history", "run").points() == [msgspec.structs.replace(point(1), learning={})]
