"""A rank that takes turns with the engines of its card."""

import contextlib
import functools

import pytest
import torch

from pipeline.config.schema import Config
from pipeline.storage.card_turns import EngineTurn, RankTurn
from pipeline.trainer import process
from pipeline.trainer.process import turn_of_start
from tests.support import tiny
from tests.trainer.test_trainer import Bench as TrainerBench
from tests.trainer.test_trainer import CountingLearner


class Learner(CountingLearner):
    """Asserts that no engine can wake during a step."""

    def __init__(self, model, folder):
        super().__init__(model)
        self.engine = EngineTurn(folder)

    def update(self, experiences, before_change):
        assert not self.engine.take(), "an engine can wake during a step"
        return super().update(experiences, before_change)


class Bench(TrainerBench):
    """A trainer, and an engine of its card that is awake at first."""

    def __init__(self, folder):
        super().__init__(folder)
        self.folder = folder
        self.learner = Learner(self.model, folder)
        self.engine = self.learner.engine
        assert self.engine.take()
        self.freed, self.agreed = [], []

    def sharing(self, agree=lambda ready: ready, **settings):
        def asked(ready):
            self.agreed.append((ready, self.engine.is_wanted()))
            return agree(ready)

        turn = RankTurn(self.folder, 0, lambda: self.freed.append(self.engine.take()))
        trainer = self.trainer(agree=asked, turn=turn, **settings)
        self.agreed.clear()
        return trainer

    def until_it_asks(self, trainer):
        for _ in range(20):
            if trainer.is_waiting_for_card:
                return
            self.turns(trainer, 1)
        pytest.fail("it has not asked for its turn")

    def activity(self):
        return self.slab.progress("trainer", 0).activity

    def close(self):
        self.engine.close()
        super().close()


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path)
    yield bench
    bench.close()


def test_a_rank_asks_once_all_ranks_have_their_batches_and_steps_once_the_engine_sleeps(bench):
    trainer = bench.sharing(max_steps=2)

    bench.until_it_asks(trainer)
    assert bench.agreed == [(True, False)], "asked before another rank has its batch, it would hold up its engines"
    bench.turns(trainer, 3)
    assert trainer.step == 0 and bench.agreed == [(True, False)], "all ranks agree once on a step"

    bench.engine.give_back()
    bench.turns(trainer, 1)

    assert trainer.step == 1 and bench.agreed == [(True, False), (True, True)]
    assert bench.freed == [False], "the memory of the step is freed before an engine can wake"
    assert bench.engine.take(), "the turn is given back"
    bench.engine.give_back()
    bench.run(trainer)
    assert trainer.step == 2


def test_a_wait_for_the_card_beats_and_is_shown_as_one(bench, monkeypatch):
    trainer, seen = bench.sharing(max_steps=1), []
    bench.until_it_asks(trainer)
    before_s = bench.slab.progress("trainer", 0).beat_s
    receive = trainer._connection.receive
    monkeypatch.setattr(trainer._connection, "receive", lambda timeout_s: (
        seen.append((bench.slab.progress("trainer", 0), timeout_s)), receive(0.0)))  # fmt: skip

    trainer.beat()
    trainer.wait(0.5)

    ((progress, timeout_s),) = seen
    assert (progress.activity, progress.working_on) == ("wait_card", -1), "no batch is the cause of a death now"
    assert timeout_s < 0.1 and progress.beat_s > before_s
    bench.engine.give_back()
    bench.run(trainer)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_rank_takes_no_further_batch_while_it_waits_for_its_turn(bench, accumulation):
    trainer = bench.sharing(max_steps=1, gradient_accumulation_steps=accumulation)
    bench.until_it_asks(trainer)
    bench.turns(trainer, 4)

    bench.engine.give_back()
    bench.run(trainer)

    assert [len(batches) for batches in bench.learner.batches] == [accumulation]


def test_a_rank_that_another_one_has_left_after_it_took_its_turn_steps_no_more(bench):
    """The second agreement: a rank that drains says no while this one has its turn."""
    trainer = bench.sharing(agree=lambda ready: len(bench.agreed) < 2)
    bench.until_it_asks(trainer)
    bench.engine.give_back()

    bench.turns(trainer, 1)

    assert trainer.finished and trainer.step == 0
    trainer.close()
    assert bench.engine.take() and not bench.engine.is_wanted(), "the end gives the turn back"


def test_a_rank_that_drains_while_it_waits_gives_its_batch_and_its_turn_back(bench):
    trainer = bench.sharing()
    bench.until_it_asks(trainer)

    trainer.stop()
    assert trainer.finished
    trainer.close()
    bench.house.turn(work=False)

    assert bench.agreed[-1] == (False, False), "no rank waits for it in a collective, nor engines for its turn"
    assert trainer.step == 0 and not trainer.is_waiting_for_card
    assert not bench.house.ledger.leases and bench.house.counts.ended["nacked"] >= 2


def test_numbers_are_those_of_a_rank_without_turns(bench, tmp_path_factory):
    other = TrainerBench(tmp_path_factory.mktemp("other"))
    alone = other.trainer(max_steps=3)
    other.run(alone)
    bench.engine.give_back()
    trainer = bench.sharing(max_steps=3)
    bench.run(trainer)

    assert trainer.progress == alone.progress
    assert bench.freed == [False] * 3
    other.close()


class Start:
    """The context and the metrics of a rank that starts; each wait ends what is told, then the engine's turn."""

    index = 0

    def __init__(self, folder, engine, *, stopping=False):
        self.folder, self.stopping = folder, stopping
        self.metrics, self.reports, self.waits, self.beats = self, [], 0, 0
        self._engine = engine

    def beat(self):
        self.beats += 1

    def report(self, report):
        self.reports.append(report.state)

    @contextlib.contextmanager
    def waiting_for_card(self):
        self.waits += 1
        assert self._engine.is_wanted(), "an engine that is idle is to sleep"
        if self.waits == 3:
            self._engine.give_back()
        yield


def test_layers_are_tried_in_the_ranks_turn_for_which_engines_fall_asleep(tmp_path, monkeypatch):
    """The passes of a trial are as large as a step's; an engine beside them would find no memory, or they would."""
    engine, tried = EngineTurn(tmp_path), []
    assert engine.take()
    start = Start(tmp_path, engine)
    monkeypatch.setattr(process, "compile_layers", lambda *_, **__: tried.append(engine.take()))
    config = Config.model_validate({"model": {"compile": True}})

    process.compile_passes(
        config, {"actor": tiny.llama()}, None, torch.device("cpu"), packed=False, tokens=64,
        turn=functools.partial(turn_of_start, start, start),
    )  # fmt: skip

    assert tried == [False], "no engine wakes meanwhile"
    assert start.waits == start.beats == 3 and set(start.reports) == {"placed"}, "the wait is no part of the start"
    assert engine.take() and not engine.is_wanted(), "the turn is given back"
    engine.close()


def test_a_shutdown_ends_the_wait_of_a_start_for_its_turn(tmp_path):
    engine = EngineTurn(tmp_path)
    assert engine.take()
    start = Start(tmp_path, engine, stopping=True)

    with pytest.raises(SystemExit), turn_of_start(start, start):
        pytest.fail("an engine is awake")

    assert not engine.is_wanted()
    engine.close()
