"""Work writes a heartbeat after each unit; hang detection relies on these calls."""

from __future__ import annotations

import dataclasses
import types

import torch

from pipeline.rollout.generation.hf_generate import ActorGenerator
from pipeline.rollout.generation.interface import Sampling
from pipeline.rollout.generation.transformers import TransformersGenerator
from pipeline.rollout.maker import NaiveExperienceMaker
from pipeline.rollout.reward.functions import FunctionReward
from pipeline.telemetry.reader import MetricsReader
from tests.rollout.test_worker import Bench
from tests.rollout.test_worker import bench as bench
from tests.support import tiny
from tests.trainer.test_learner import TRAINER, experience_for, new_learner

IDS, MASK = torch.tensor([[5, 6], [7, 8]]), torch.ones(2, 2, dtype=torch.int64)
SAMPLING = Sampling(max_length=8, pad_token_id=0, seed=3)


class Count:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1


def test_generation_tells_of_every_token() -> None:
    told = Count()

    TransformersGenerator(tiny.llama(), told).generate(IDS, MASK, SAMPLING, batch_rows=1)

    assert told.calls == 2 * 6


def test_generation_tells_how_many_rows_and_tokens_are_done() -> None:
    told: list[tuple[int, int, int | None]] = []

    def beat(*, rows_done: int, rows: int, tokens: int | None) -> None:
        told.append((rows_done, rows, tokens))

    responses = TransformersGenerator(tiny.llama(), beat).generate(
        IDS, MASK, dataclasses.replace(SAMPLING, eos_token_ids=tuple(range(1, 10))), group_size=4, batch_rows=4
    )

    done, rows, tokens = (list(column) for column in zip(*told, strict=True))
    assert set(rows) == {8} and told[0] == (0, 8, 0)
    assert done == sorted(done) and tokens == sorted(tokens)
    first = responses.lengths[:4]
    assert (4, int(first.sum())) in list(zip(done, tokens, strict=True)), "at the start of the second mini-batch"
    ended_before = [int((first <= step).sum()) for step in range(int(first.max()))]
    assert done[: len(ended_before)] == ended_before


def test_a_worker_shows_rows_and_tokens_of_its_ticket_until_it_is_done(bench: Bench) -> None:
    make, shown = bench.maker.make_experience, []

    def value(name: str, **labels: str) -> float | None:
        return MetricsReader(bench.slab).read().value(name, **labels)

    def look(*words: object, **keywords: object) -> object:
        bench.metrics.beat(rows_done=3, rows=8, tokens=41)
        shown.append([value("rlhfd_ticket_rows", state=state) for state in ("done", "all")])
        shown.append([value("rlhfd_ticket_tokens")])
        return make(*words, **keywords)

    bench.maker.make_experience = look
    bench.ticket(1, prompts=1)
    bench.worker.step()

    assert shown == [[3, 8], [41]]
    assert value("rlhfd_ticket_rows", state="all") == value("rlhfd_ticket_tokens") == 0


def test_a_foreign_actor_tells_of_every_mini_batch() -> None:
    told = Count()

    ActorGenerator(tiny.llama(), on_progress=told).generate(IDS, MASK, SAMPLING, batch_rows=1)

    assert told.calls == 2


def test_reward_functions_tell_of_every_row_and_a_row_that_hangs_of_none() -> None:
    told, seen = Count(), []

    def look(ids: torch.Tensor, mask: torch.Tensor, **_: object) -> float:
        seen.append(told.calls)
        return 1.0

    ends = torch.tensor([2, 2])
    FunctionReward([look], None, told)(IDS, MASK, torch.tensor([1, 1]), ends, [None, None])

    assert seen == [0, 1]
    assert told.calls == 2


def test_the_maker_hands_it_on_and_tells_of_every_forward_pass() -> None:
    told = Count()
    actor, scores = tiny.llama(), FunctionReward([lambda *_, **__: 1.0], None)
    maker = NaiveExperienceMaker(
        actor,
        None,
        scores,
        actor,
        types.SimpleNamespace(pad_token_id=0, eos_token_id=1),
        use_grpo=True,
        num_generation=2,
        logits_forward_batch_size=2,
        on_progress=told,
    )

    maker.make_experience(IDS, MASK, max_length=8, eos_token_id=None, seed=1)

    # Six tokens, one score of all rows, and for actor and reference two passes of two rows each.
    assert told.calls == 6 + 1 + 2 + 2


def test_a_step_tells_of_every_pass_and_of_each_time_it_waits_for_other_ranks() -> None:
    phases: list[str] = []
    learner = new_learner("grpo", TRAINER.model_copy(update={"micro_batch_size": 4}), on_phase=phases.append)

    learner.update([experience_for(learner, "grpo")])

    assert phases == ["reduce", "forward", "backward", "forward", "backward", "reduce", "optimizer"]


def test_a_worker_shows_the_ticket_it_works_on(bench: Bench) -> None:
    shown = []
    make = bench.maker.make_experience

    def look(*words: object, **keywords: object) -> object:
        shown.append(bench.slab.progress("rollout"))
        return make(*words, **keywords)

    bench.maker.make_experience = look
    bench.ticket(1, prompts=1, deadline_s=77.0)
    bench.worker.step()

    assert [(progress.working_on, progress.deadline_s) for progress in shown] == [(1, 77.0)]
    assert bench.slab.progress("rollout").working_on == -1
