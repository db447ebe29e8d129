from __future__ import annotations

import dataclasses
import errno
import itertools
import math
import os
import random
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.errors import ConfigError, FieldError, LedgerError
from pipeline.telemetry.activity import ActivityClock
from pipeline.telemetry.metrics import Progress, SlotName
from pipeline.telemetry.reader import HistogramReading, MetricsReader
from pipeline.telemetry.slab import MetricsSlab
from tests.support.slabs import BLOCK, PROMPTS, SLOTS, STEPS, begun, value


def test_slab_is_ours_alone_and_allocated_whole(path: Path, slab: MetricsSlab) -> None:
    status = path.stat()

    assert status.st_mode & 0o777 == 0o600
    assert status.st_blocks * 512 >= status.st_size == slab.layout.nbytes


def test_slab_that_does_not_fit_is_an_error_that_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)

    with pytest.raises(ConfigError, match=r"metrics slab of [\d,]+ B does not fit"):
        MetricsSlab.create(path, SLOTS)

    assert [*path.parent.iterdir()] == []


def test_counter_adds_up(slab: MetricsSlab) -> None:
    tokens = begun(slab, "rollout").counter("rlhfd_tokens_total", kind="response")

    tokens.inc()
    tokens.inc(41.5)

    assert value(slab, "rlhfd_tokens_total", kind="response") == 42.5


def test_counter_of_several_workers_is_their_sum(slab: MetricsSlab) -> None:
    for worker in (0, 1):
        begun(slab, "rollout", worker).counter(PROMPTS).inc(worker + 1)

    assert value(slab, PROMPTS) == 3


@pytest.mark.parametrize("amount", [-1, math.nan, math.inf])
def test_counter_refuses_what_is_no_increment(slab: MetricsSlab, amount: float) -> None:
    steps = begun(slab, "trainer").counter(STEPS)

    with pytest.raises(FieldError, match="cannot go up by"):
        steps.inc(amount)

    assert value(slab, STEPS) == 0


def test_total_counted_elsewhere_never_falls(slab: MetricsSlab) -> None:
    seconds = begun(slab, "supervisor").counter("rlhfd_process_cpu_seconds_total", role="rollout")
    seconds.set_total(5)

    with pytest.raises(FieldError, match=r"from 5\.0 to 4"):
        seconds.set_total(4)

    assert value(slab, "rlhfd_process_cpu_seconds_total", role="rollout") == 5


def test_histogram_counts_by_upper_bound(slab: MetricsSlab) -> None:
    staleness = begun(slab, "buffer").histogram("rlhfd_policy_staleness_versions", point="push")

    staleness.observe_many([0, 1, 1, 5, 33])

    assert MetricsReader(slab).read().families["rlhfd_policy_staleness_versions"][("push",)] == HistogramReading(
        (1, 2, 0, 0, 0, 1, 0, 0, 0, 0, 1), 40
    )


def test_negative_observation_ends_the_sum_and_stays_counted(slab: MetricsSlab) -> None:
    reward = begun(slab, "rollout").histogram("rlhfd_reward", source="model")

    reward.observe_many([0.5, -3.0, 0.5])
    slab.fold("rollout")

    read = MetricsReader(slab).read().families["rlhfd_reward"][("model",)]
    assert isinstance(read, HistogramReading)
    assert (read.count, read.buckets[0], read.total) == (3, 1, None)


@pytest.mark.parametrize("observed", [math.nan, math.inf, -math.inf])
def test_value_that_is_not_finite_is_no_observation(slab: MetricsSlab, observed: float) -> None:
    kl = begun(slab, "trainer").histogram("rlhfd_kl_nats")

    with pytest.raises(FieldError, match="no observation"):
        kl.observe(observed)

    read = MetricsReader(slab).read().families["rlhfd_kl_nats"][()]
    assert isinstance(read, HistogramReading) and (read.count, read.total) == (0, 0)


def test_what_nobody_bound_or_set_is_absent(slab: MetricsSlab) -> None:
    writer = begun(slab, "trainer")
    writer.gauge("rlhfd_learning_rate")
    cleared = writer.gauge("rlhfd_entropy_nats")
    cleared.set(1.0)
    cleared.clear()

    assert [name for name, series in MetricsReader(slab).read().families.items() if series] == []

    writer.counter(STEPS)

    assert value(slab, STEPS) == 0


@pytest.mark.parametrize(
    ("kind", "name", "labels"),
    [
        ("counter", "rlhfd_nothing_total", {}),
        ("counter", "rlhfd_entropy_nats", {}),
        ("counter", "rlhfd_buffer_pushes_total", {"result": "accepted"}),
        ("counter", "rlhfd_items_sealed_total", {}),
        ("counter", "rlhfd_tokens_total", {}),
        ("counter", "rlhfd_tokens_total", {"kind": "imagined"}),
        ("counter", "rlhfd_tokens_total", {"kind": "trained", "sort": "x"}),
        ("gauge", "rlhfd_policy_version", {"role": "trainer", "worker": "0"}),
        ("gauge", "rlhfd_policy_version", {"role": "@own"}),
    ],
)
def test_undeclared_series_cannot_be_bound(slab: MetricsSlab, kind: str, name: str, labels: dict[str, str]) -> None:
    writer = begun(slab, "trainer")

    with pytest.raises((FieldError, KeyError), match=f"trainer writes no {kind} {name} with the labels|^'{name}'$"):
        getattr(writer, kind)(name, **labels)


def test_own_role_and_worker_come_from_the_slot(slab: MetricsSlab) -> None:
    begun(slab, "rollout", 1).gauge("rlhfd_policy_version").set(7)

    assert MetricsReader(slab).read().families["rlhfd_policy_version"] == {("rollout", "1"): 7}


def test_supervisor_writes_about_each_of_its_children(slab: MetricsSlab) -> None:
    writer = begun(slab, "supervisor")

    writer.gauge("rlhfd_process_up", role="rollout", worker="1").set(1)
    with pytest.raises(FieldError, match="supervisor writes no gauge rlhfd_process_up with"):
        writer.gauge("rlhfd_process_up", role="rollout", worker="2")

    assert MetricsReader(slab).read().families["rlhfd_process_up"] == {("rollout", "1"): 1}


def test_second_handle_of_a_counter_goes_on_where_the_first_is(slab: MetricsSlab) -> None:
    writer = begun(slab, "trainer")
    writer.counter(STEPS).inc(3)

    writer.counter(STEPS).inc(4)

    assert value(slab, STEPS) == 7


def test_slot_cannot_be_written_before_it_has_begun(slab: MetricsSlab) -> None:
    with pytest.raises(LedgerError, match="rollout 1 was not begun"):
        slab.writer("rollout", 1)
    with pytest.raises(FieldError, match="no slot for rollout 2"):
        slab.writer("rollout", 2)


def test_slot_tells_its_pid_incarnation_and_progress(slab: MetricsSlab) -> None:
    assert (slab.begin("rollout"), slab.begin("rollout")) == (1, 2)
    assert (slab.pid("rollout"), slab.progress("rollout")) == (0, Progress(0.0, "", 0.0, -1, 0.0, False))
    before_s = time.monotonic()

    writer = slab.writer("rollout")
    writer.work_on(17, deadline_s=600.0)
    writer.enter("generate", 12_500_000_000, 0)
    writer.set_in_collective(True)

    progress = slab.progress("rollout")
    assert slab.pid("rollout") == os.getpid()
    assert before_s <= progress.beat_s <= time.monotonic()
    assert dataclasses.replace(progress, beat_s=0.0) == Progress(0.0, "generate", 12.5, 17, 600.0, True)
    shown = value(slab, "rlhfd_process_last_heartbeat_timestamp_seconds", role="rollout", worker="0")
    assert shown == pytest.approx(time.time(), abs=5.0)
    writer.work_on()
    assert slab.progress("rollout").working_on == -1


def test_a_rank_in_a_collective_is_as_alive_as_those_that_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The two clocks are read for each rank: a pause between them would be a difference of the ranks.
    clocks = SimpleNamespace(time=lambda: 2000.0, monotonic=lambda: 1000.0)
    monkeypatch.setattr("pipeline.telemetry.reader.time", clocks)
    slab = MetricsSlab.create(tmp_path / "metrics", [SlotName("trainer", rank) for rank in range(2)])
    first, second = begun(slab, "trainer", 0), begun(slab, "trainer", 1)
    name = "rlhfd_process_last_heartbeat_timestamp_seconds"
    first.set_in_collective(True)
    time.sleep(0.05)
    second.beat()

    shown = [value(slab, name, role="trainer", worker=str(rank)) for rank in range(2)]
    assert shown[0] == shown[1]
    second.set_in_collective(True)
    time.sleep(0.05)
    second.beat()
    # All wait in it: each shows its own.
    shown = [value(slab, name, role="trainer", worker=str(rank)) for rank in range(2)]
    assert shown[1] - shown[0] > 0.04
    slab.close()


def test_dead_slot_keeps_its_counts_and_loses_its_gauges(slab: MetricsSlab) -> None:
    writer = begun(slab, "trainer")
    writer.counter(STEPS).inc(3)
    writer.histogram("rlhfd_kl_nats").observe(0.5)
    writer.gauge("rlhfd_entropy_nats").set(1.5)
    writer.beat()

    slab.fold("trainer")

    families = MetricsReader(slab).read().families
    assert families[STEPS] == {(): 3}
    assert families["rlhfd_kl_nats"][()].count == 1  # type: ignore[union-attr]
    assert not families["rlhfd_entropy_nats"]
    assert not families["rlhfd_process_last_heartbeat_timestamp_seconds"]


def test_time_of_an_event_outlives_its_writer_and_the_newest_counts(slab: MetricsSlab) -> None:
    name = "rlhfd_weight_sync_last_success_timestamp_seconds"
    begun(slab, "rollout", 0).gauge(name).set(1_000_000_030)
    begun(slab, "rollout", 1).gauge(name).set(1_000_000_020)

    slab.fold("rollout", 0)

    assert value(slab, name) == 1_000_000_030
    begun(slab, "rollout", 0).gauge(name).set(1_000_000_010)
    assert value(slab, name) == 1_000_000_030


def test_restarted_process_goes_on_from_what_its_predecessors_counted(slab: MetricsSlab) -> None:
    for steps in (1, 10, 100):
        begun(slab, "trainer").counter(STEPS).inc(steps)

    assert value(slab, STEPS) == 111


def test_folding_again_counts_nothing_twice(slab: MetricsSlab) -> None:
    begun(slab, "trainer").counter(STEPS).inc(5)

    for _ in range(3):
        slab.fold("trainer")

    assert value(slab, STEPS) == 5


def test_total_does_not_fall_by_a_bit_when_seconds_are_folded(slab: MetricsSlab) -> None:
    rng = random.Random(5)
    before = 0.0

    for _ in range(200):
        worker = rng.randrange(2)
        begun(slab, "rollout", worker).histogram("rlhfd_stage_duration_seconds", stage="reward").observe(
            rng.random() / 3
        )
        for fold in (False, True):
            if fold:
                slab.fold("rollout", worker)
            read = MetricsReader(slab).read().families["rlhfd_stage_duration_seconds"][("reward",)]
            assert isinstance(read, HistogramReading) and read.total is not None
            assert read.total >= before
            before = read.total


def test_base_that_is_read_many_times_gives_what_it_gives_the_first_time(slab: MetricsSlab) -> None:
    layout, rng = slab.layout.of_role["rollout"], random.Random(2)

    def words(absent: float) -> list[float]:
        return [math.nan if rng.random() < absent else rng.random() * 1e9 for _ in range(layout.words)]

    for base_absent, live_absent in itertools.product((0.0, 0.3, 1.0), repeat=2):
        base, live = words(base_absent), words(live_absent)
        bound_again = [word if old != old or word == word else 1.5 for old, word in zip(base, live, strict=True)]
        merge = layout.merger(base)
        for alive in (live, bound_again, None):
            # By the bits of each word: NaN is like nothing.
            assert list(map(repr, merge(alive))) == list(map(repr, layout.merge(base, alive)))


def test_conservation_block_is_the_buffers(slab: MetricsSlab) -> None:
    with pytest.raises(FieldError, match="is the buffer's, not the trainer's"):
        begun(slab, "trainer").publish_group(BLOCK)

    assert slab.conservation() is None


def test_conservation_block_outlives_the_buffer_and_is_not_added_up(slab: MetricsSlab) -> None:
    begun(slab, "buffer").publish_group(BLOCK)
    slab.fold("buffer")
    assert slab.conservation() == BLOCK

    begun(slab, "buffer").publish_group(BLOCK)

    assert value(slab, "rlhfd_items_sealed_total") == 100
    assert value(slab, "rlhfd_items_unaccounted") == BLOCK.unaccounted


def test_supervisor_that_starts_again_finds_every_count(path: Path, slab: MetricsSlab) -> None:
    begun(slab, "supervisor").counter("rlhfd_process_starts_total", role="rollout").inc(2)
    begun(slab, "trainer").counter(STEPS).inc(7)
    begun(slab, "buffer").publish_group(BLOCK)

    again = MetricsSlab.reopen(path, SLOTS)

    assert not any(again.is_live(*slot) for slot in SLOTS)
    assert value(again, "rlhfd_process_starts_total", role="rollout") == 2
    assert value(again, STEPS) == 7
    assert again.conservation() == BLOCK
    again.close()


def test_supervisor_that_starts_again_with_other_slots_finds_every_count(tmp_path: Path) -> None:
    path, states = tmp_path / "slab", {"role": "rollout", "worker": "1"}
    many = (*SLOTS[:-1], *(SlotName("rollout", worker) for worker in range(1, 4)))
    before = MetricsSlab.create(path, many)
    supervisor = begun(before, "supervisor")
    supervisor.counter("rlhfd_process_starts_total", role="rollout").inc(2)
    supervisor.gauge("rlhfd_process_up", **states).set(1)
    begun(before, "trainer").counter(STEPS).inc(7)
    for worker in (1, 3):
        writer = begun(before, "rollout", worker)
        writer.counter("rlhfd_tokens_total", kind="response").inc(100 * worker)
        writer.counter("rlhfd_process_time_seconds_total", activity="generate").inc(worker)
        writer.histogram("rlhfd_response_length_tokens").observe(10 * worker)
    before.close()

    for slots in (tuple(slot for slot in many if slot != ("rollout", 3)), many):
        MetricsSlab.reopen(path, slots).close()
        again = MetricsSlab.reopen(path, slots)

        assert again.layout.slots == slots and not any(again.is_live(*slot) for slot in slots)
        assert value(again, STEPS) == 7
        assert value(again, "rlhfd_process_starts_total", role="rollout") == 2
        assert value(again, "rlhfd_process_up", **states) is None
        assert value(again, "rlhfd_tokens_total", kind="response") == 400
        times = MetricsReader(again).read().families["rlhfd_process_time_seconds_total"]
        assert {key: seconds for key, seconds in times.items() if seconds} == {("rollout", "1", "generate"): 1.0}
        (lengths,) = MetricsReader(again).read().families["rlhfd_response_length_tokens"].values()
        assert isinstance(lengths, HistogramReading) and (lengths.count, lengths.total) == (2, 40.0)
        again.close()


@pytest.mark.parametrize("change", ["catalogue", "torn", "foreign", "short"])
def test_slab_that_means_something_else_is_made_anew(
    path: Path, slab: MetricsSlab, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(slab, "trainer").counter(STEPS).inc(7)
    if change == "catalogue":
        monkeypatch.setattr("pipeline.telemetry.writer.METRICS", ())
    content = bytearray(path.read_bytes())
    if change == "torn":
        content[48] = 0xFF
    if change == "foreign":
        content[:16] = b"something else.."
    path.write_bytes(content[:100] if change == "short" else content)

    again = MetricsSlab.reopen(path, SLOTS)

    assert again.layout.slots == SLOTS
    if change != "catalogue":
        assert value(again, STEPS) is None
    again.close()


def test_attach_refuses_a_file_that_is_no_slab(path: Path) -> None:
    path.write_bytes(bytes(8192))

    with pytest.raises(LedgerError, match="no metrics slab of this version"):
        MetricsSlab.attach(path)


def test_handle_of_a_closed_slab_does_not_write(path: Path) -> None:
    slab = MetricsSlab.create(path, SLOTS)
    steps = begun(slab, "trainer").counter(STEPS)

    slab.close()

    with pytest.raises(ValueError, match="released"):
        steps.inc()


def test_a_slot_shows_the_process_of_another_machine_and_no_total_of_it_falls(tmp_path: Path) -> None:
    here, there = (MetricsSlab.create(tmp_path / name, SLOTS) for name in ("here", "there"))
    for slab in (here, there):
        slab.begin("rollout", 0, activity="start")
    gateway, far = (slab.writer("rollout", 0) for slab in (here, there))
    gateway.counter("rlhfd_log_messages_total", level="warning").inc(3)
    tokens = far.counter("rlhfd_tokens_total", kind="response")
    clock = ActivityClock(far, ("generate", "reward", "logprob"))
    read: list[list[float]] = []
    for turn in range(40):
        tokens.inc(7)
        clock.enter(("generate", "reward")[turn % 2])
        time.sleep(0.001)
        # A reading before the next state: the activity has ended over there by then.
        gateway.show(far.state())
        clock.enter("logprob")
        for _ in range(2):
            read.append([*here.read(here.layout.index[SlotName("rollout", 0)])])
            time.sleep(0.0005)

    for before, after in itertools.pairwise(read):
        assert all(not new < old for old, new in zip(before, after, strict=True))
    assert value(here, "rlhfd_tokens_total", kind="response") == 280
    assert value(here, "rlhfd_log_messages_total", level="warning") == 3, "the gateway's own"
    shown, meant = here.progress("rollout", 0), there.progress("rollout", 0)
    assert shown.activity == "reward" and meant.activity == "logprob", "the one of the state"
    far.work_on(5)
    far.set_in_collective(True)
    time.sleep(0.02)
    gateway.show(far.state())
    shown = here.progress("rollout", 0)
    assert (shown.working_on, shown.in_collective) == (5, True)
    assert 0.02 <= time.monotonic() - shown.beat_s < 1.0, "its last heartbeat, not the time of the state"
    for slab in (here, there):
        slab.close()
