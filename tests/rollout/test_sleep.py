"""A worker whose engine sleeps while a rank steps on its card; the test plays the buffer and the rank."""

from types import SimpleNamespace

import pytest

from pipeline.config.schema import Config
from pipeline.errors import ExitCode
from pipeline.rollout.process import take_turn
from pipeline.rollout.sleep import EngineSleep
from pipeline.runtime import role
from pipeline.runtime.messages import Sealed
from pipeline.storage.card_turns import TURN_S, EngineTurn, RankTurn
from pipeline.telemetry.reader import MetricsReader
from tests.rollout.test_worker import Bench as WorkerBench
from tests.support.roll_stream import RollStream

LONG_S = 0.5


class SleepingStream(RollStream):
    """Records when its engine sleeps and wakes, and with which weights; works only awake."""

    def __init__(self, roller, rank):
        super().__init__(roller)
        self.rank = rank
        self.events = []
        self.is_asleep = False

    def sleep(self):
        assert self.has_room, "with a ticket in hand"
        assert not self.rank.take(), "the rank steps before the engine sleeps"
        self.is_asleep = True
        self.events.append("sleep")

    def wake(self, held):
        assert not self.rank.take(), "a rank can step while the engine wakes"
        self.is_asleep = False
        self.events.append(("wake", held))

    def fetch(self, source):
        assert not self.is_asleep
        found = super().fetch(source)
        self.events.append(("fetch", found.version))
        return found

    def step(self):
        assert not self.is_asleep
        return super().step()


class Bench(WorkerBench):
    """A worker with a turn, and a rank of its card."""

    def __init__(self, folder):
        super().__init__(folder)
        self.rank = RankTurn(folder, 0)
        self.stream = self.worker._stream = SleepingStream(self.roller, self.rank)
        self.engine_turn = EngineTurn(folder)
        self.worker._hooks = [EngineSleep(self.engine_turn, self.stream, self.metrics)]
        assert self.engine_turn.take(), "an engine is loaded awake"

    def turn(self):
        """As the loop of the process; return the time for which it would wait, 0 after work."""
        if not self.worker.idle and self.worker.may_work():
            self.worker.step()
            return 0.0
        wait_s = self.worker.rest(LONG_S)
        with self.metrics.waiting(for_card=not self.worker.idle):
            self.activity = self.metrics.clock.activity
        return wait_s

    def asleep(self):
        """Have the engine sleep, and the rank step."""
        assert not self.rank.take()
        self.turn()
        assert self.rank.take()
        self.stream.events.clear()

    def close(self):
        self.rank.close()
        super().close()


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path)
    yield bench
    bench.close()


def test_an_engine_stays_awake_until_a_rank_asks_and_has_no_ticket_in_hand_when_it_sleeps(bench):
    assert (bench.turn(), bench.activity) == (TURN_S, "wait_data"), "it looks again soon"
    bench.ticket()

    assert not bench.rank.take()
    assert bench.turn() == 0.0 and len(bench.sent.of(Sealed)) == 1
    assert bench.stream.events == [("fetch", 0)] and not bench.rank.take()

    assert bench.turn() == TURN_S
    assert bench.stream.events[1:] == ["sleep"] and bench.rank.take()
    assert (bench.turn(), bench.activity) == (LONG_S, "asleep"), "a ticket wakes it"


def test_an_engine_with_a_ticket_wakes_once_the_rank_has_stepped_and_takes_the_newest_weights(bench):
    bench.asleep()
    bench.ticket(version=1)

    assert (bench.turn(), bench.activity) == (TURN_S, "wait_card")
    assert bench.stream.events == [] and not bench.sent.of(Sealed)
    bench.publisher.publish(1, bench.model)
    bench.rank.give_back()
    assert bench.turn() == 0.0

    assert bench.stream.events == [("wake", None), ("fetch", 1)]
    assert [sealed.policy_version for sealed in bench.sent.of(Sealed)] == [1]
    bench.ticket(1, version=1)
    bench.turn()
    assert bench.stream.events[2:] == [], "it is awake, with the weights in hand"


def test_an_engine_that_wakes_has_its_weights_handed_over_though_their_version_is_the_one_in_hand(bench):
    bench.ticket()
    bench.turn()
    bench.asleep()
    bench.rank.give_back()
    bench.ticket(1)

    bench.turn()

    assert bench.stream.events == [("wake", None), ("fetch", 0)]


def test_weights_that_were_never_published_are_handed_over_as_they_were_loaded(bench, tmp_path):
    bench.asleep()
    bench.rank.give_back()
    bench.worker._weights_path = tmp_path / "none"
    bench.ticket(version=-1)

    bench.turn()

    assert bench.stream.events == [("wake", -1)]


def test_a_worker_whose_memory_is_its_own_asks_for_no_turn(bench):
    bench.engine_turn.close()
    bench.worker._hooks = []
    bench.rank.take()
    bench.ticket()

    assert bench.turn() == 0.0 and bench.sent.of(Sealed)
    assert bench.turn() == LONG_S and bench.stream.events == [("fetch", 0)]


def test_time_asleep_and_time_until_the_turn_are_activities_of_their_own(bench):
    with bench.metrics.changing_sleep("sleep"):
        assert bench.metrics.clock.activity == "asleep"
    with bench.metrics.waiting():
        assert bench.metrics.clock.activity == "asleep"
    with bench.metrics.changing_sleep("wake"):
        pass
    with bench.metrics.waiting():
        assert bench.metrics.clock.activity == "wait_data"

    for phase in ("sleep", "wake"):
        assert MetricsReader(bench.slab).read().histogram_mean("rlhfd_engine_sleep_duration_seconds", phase=phase) > 0


# The start.


class Context(SimpleNamespace):
    """A role's context, whose reports and heartbeats are counted."""

    def __init__(self, folder):
        super().__init__(folder=folder, stopping=False, turn=None, reports=[], beats=0)
        self.metrics = SimpleNamespace(beat=self._beat)
        self.on_beat = lambda: None

    def _beat(self):
        self.beats += 1
        assert self.beats < 100_000, "it waits for ever"
        self.on_beat()

    def report(self, report):
        self.reports.append(report.state)


SLEEPS = Config.model_validate(
    {"rollout": {"sleep": True, "engine": "mine:new_engine"}, "buffer": {"max_staleness": 0}}
)


def test_a_worker_that_starts_during_a_step_waits_for_its_end_which_is_no_part_of_its_start(
    bench, tmp_path, monkeypatch
):
    monkeypatch.setattr(role, "_WAITS_S", 0.01)
    context, seen = Context(tmp_path), []
    bench.engine_turn.give_back()
    bench.rank.take()

    def on_beat():
        seen.append(bench.metrics.clock.activity)
        if context.reports == ["placed"] * 3:
            bench.rank.give_back()

    context.on_beat = on_beat
    monkeypatch.setattr(role.time, "sleep", lambda seconds: seen.append(bench.metrics.clock.activity))
    before = bench.metrics.clock.activity
    take_turn(SLEEPS, context, bench.metrics)

    assert context.turn.is_awake and not bench.rank.take()
    assert context.reports[:3] == ["placed"] * 3, "the time limit of the start begins anew, again and again"
    assert "wait_card" in seen and bench.metrics.clock.activity == before
    context.turn.close()


def test_a_worker_that_waits_for_its_first_turn_ends_at_a_shutdown(bench, tmp_path):
    context = Context(tmp_path)
    bench.engine_turn.give_back()
    bench.rank.take()
    context.on_beat = lambda: setattr(context, "stopping", context.beats == 3)

    with pytest.raises(SystemExit) as ended:
        take_turn(SLEEPS, context, bench.metrics)

    assert ended.value.code == ExitCode.OK and not context.turn.is_awake
    context.turn.close()


def test_a_worker_that_need_not_wait_says_nothing_and_one_without_sleep_takes_no_turn(bench, tmp_path):
    context = Context(tmp_path)

    take_turn(Config(), context, bench.metrics)
    assert context.turn is None
    take_turn(SLEEPS, context, bench.metrics)

    assert context.turn.is_awake and context.reports == [] and context.beats == 0
    context.turn.close()
