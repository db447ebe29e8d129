"""The buffer through faults of everyone around it, and its own."""

import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.support.town import WORKERS, Town, plan, results_of

SHAPES = [(1, 1, 8), (1, 2, 8), (2, 1, 8), (2, 2, 8), (2, 1, 3)]


@pytest.mark.parametrize(("world_size", "accumulation", "batch"), SHAPES)
@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_lost_and_the_run_goes_on_whoever_dies(seed, staleness, world_size, accumulation, batch):
    town = Town(staleness=staleness, world_size=world_size, accumulation=accumulation, batch=batch, seed=seed)

    for _ in range(600):
        town.random_event()
    town.goes_on()

    totals = town.ledger.totals
    held = town.ledger.ready + town.ledger.leased
    assert totals.sealed == totals.trained + sum(totals.dropped) + held
    assert town.batches > 20, "the town went on"


@pytest.mark.parametrize(("world_size", "accumulation", "batch"), SHAPES)
@pytest.mark.parametrize(("evaluate_every", "max_refill"), [(0, 0), (2, 0), (0, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_no_engine_is_awake_during_a_step_and_the_run_goes_on_whoever_dies_awake_or_asleep(
    seed, evaluate_every, max_refill, world_size, accumulation, batch, tmp_path
):
    if max_refill and batch % 2:
        pytest.skip("a batch of whole groups, as the configuration demands it")
    shape = {"world_size": world_size, "accumulation": accumulation, "batch": batch}
    extra = {"evaluate_every": evaluate_every, "max_refill": max_refill, "is_flat": lambda position: position % 5 == 1}
    town = Town(seed=seed, card=tmp_path, **shape, **extra)

    for _ in range(600):
        town.random_event()
    town.goes_on()
    town.close()

    assert town.batches > 10, "the town went on"
    assert town.slept > 20, "engines slept"


@pytest.mark.parametrize(("world_size", "accumulation", "batch"), SHAPES)
@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("seed", range(2))
def test_each_version_that_is_due_is_evaluated_whole_before_the_next_one_whoever_dies(
    seed, staleness, world_size, accumulation, batch
):
    shape = {"world_size": world_size, "accumulation": accumulation, "batch": batch}
    town = Town(staleness=staleness, seed=seed, evaluate_every=2, **shape)

    for _ in range(600):
        town.random_event()
    town.goes_on()

    assert town.batches > 20, "the town went on"
    known = [(found.version, found.fingerprint) for found in town.book.found]
    assert len(set(known)) == len(known) > 5, "no evaluation of the same weights twice"
    whole = plan(2).evaluation(0, "", [results_of(Prompts(prompts)) for prompts in plan(2).prompts])
    for found in town.book.found:
        assert found.version % 2 == 0
        assert (found.total, found.files) == (whole.total, whole.files), "every prompt once"


class Prompts(NamedTuple):
    """All prompts of a file, as a ticket."""

    prompts: int
    position: int = 0


class TownMachine(RuleBasedStateMachine):
    """The same events, chosen by hypothesis, which finds the shortest way to a fault; at the end all must go on."""

    INDEX = st.integers(0, 1)

    @initialize(
        shape=st.sampled_from(SHAPES), staleness=st.integers(0, 2), every=st.integers(0, 2), is_shared=st.booleans()
    )
    def begin(self, shape, staleness, every, is_shared):
        world_size, accumulation, batch = shape
        self.card = tempfile.TemporaryDirectory()
        self.town = Town(
            staleness=0 if is_shared else staleness,
            world_size=world_size,
            accumulation=accumulation,
            batch=batch,
            evaluate_every=every,
            card=Path(self.card.name) if is_shared else None,
        )

    @rule(index=INDEX)
    def rest(self, index):
        self.town.rest(index % WORKERS)

    @rule()
    def begin_step(self):
        self.town.deliver()
        self.town.may_step()

    @rule(index=INDEX, lost=st.booleans(), shorter=st.booleans())
    def roll(self, index, lost, shorter):
        self.town.deliver()
        self.town.roll(index % WORKERS, lost=lost, shorter=shorter)
        if lost:
            self.town.buffer_dies()

    @rule(index=INDEX, fault=st.sampled_from(["rows", "fingerprint", "not finite"]))
    def roll_wrong(self, index, fault):
        self.town.deliver()
        self.town.roll(index % WORKERS, fault=fault)

    @rule(versions=st.integers(1, 2))
    def go_on(self, versions):
        self.town.goes_on(versions)

    @rule(lost=st.booleans())
    def train(self, lost):
        self.town.deliver()
        self.town.train(lost=lost)
        if lost:
            self.town.buffer_dies()

    @rule(index=INDEX)
    def worker_dies(self, index):
        self.town.worker_dies(index % WORKERS)

    @rule(rank=INDEX)
    def trainer_dies(self, rank):
        self.town.deliver()
        self.town.trainer_dies(at=rank % self.town.world_size)

    @rule(overtaken=st.booleans())
    def trainer_comes_again(self, overtaken):
        self.town.deliver()
        self.town.trainer_comes_again(overtaken=overtaken)

    @rule(versions=st.integers(1, 3))
    def trainer_rolls_back(self, versions):
        self.town.trainer_rolls_back(versions)

    @rule(rank=INDEX, lost=st.booleans())
    def damage(self, rank, lost):
        self.town.deliver()
        self.town.damage(rank % self.town.world_size, lost=lost)
        if lost:
            self.town.buffer_dies()

    @rule()
    def buffer_dies(self):
        self.town.buffer_dies()

    @invariant()
    def books_balance(self):
        if hasattr(self, "town"):
            self.town.check_books()

    def teardown(self):
        if hasattr(self, "town"):
            try:
                self.town.goes_on()
            finally:
                self.town.close()
                self.card.cleanup()


TestTownMachine = TownMachine.TestCase
TestTownMachine.settings = settings(max_examples=60, stateful_step_count=30)
