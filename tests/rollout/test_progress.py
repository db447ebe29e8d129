"""Work writes a heartbeat after each unit; hang detection relies on these calls."""

from __future__ import annotations

import dataclasses
import types

import torch

from pipeline.rollout.generation.hf_generate import ActorGenerator
from pipeline.rollout.generation.interface import Sampling
from pipeline.rollout.generation.transformers import TransformersGenerator
from pipeline.rollout.maker import NaiveExperienceMaker
from pipeline.rollout.metrics import RolloutMetrics
from pipeline.rollout.remote import NodeTelemetry
from pipeline.rollout.reward.functions import FunctionReward
from pipeline.telemetry.reader import MetricsReader
from tests.rollout.test_worker import Bench
from tests.rollout.test_worker import bench as bench
from tests.support import tiny
from tests.support.told import Told
from tests.trainer.test_learner import TRAINER, experience_for, new_learner

IDS, MASK = torch.tensor([[5, 6], [7, 8]]), torch.ones(2, 2, dtype=torch.int64)
SAMPLING = Sampling(max_length=8, pad_token_id=0, seed=3)


def test_generation_tells_of_every_token() -> None:
    told = Told()

    TransformersGenerator(tiny.llama(), told).generate(IDS, MASK, SAMPLING, batch_rows=1)

    assert len(told.beats) == 2 * 6


def test_generation_tells_how_many_rows_and_tokens_are_done() -> None:
    told = Told()

    responses = TransformersGenerator(tiny.llama(), told).generate(
        IDS, MASK, dataclasses.replace(SAMPLING, eos_token_ids=tuple(range(1, 10))), group_size=4, batch_rows=4
    )

    done, rows, tokens = (list(column) for column in zip(*told.beats, strict=True))
    assert set(rows) == {8} and told.beats[0] == (0, 8, 0)
    assert done == sorted(done) and tokens == sorted(tokens)
    first = responses.lengths[:4]
    assert (4, int(first.sum())) in list(zip(done, tokens, strict=True)), "at the start of the second mini-batch"
    ended_before = [int((first <= step).sum()) for step in range(int(first.max()))]
    assert done[: len(ended_before)] == ended_before


def test_a_worker_shows_rows_and_tokens_of_its_ticket_until_it_is_done(bench: Bench) -> None:
    make, shown = bench.maker.finish, []

    def value(name: str, **labels: str) -> float | None:
        return MetricsReader(bench.slab).read().value(name, **labels)

    def look(*words: object, **keywords: object) -> object:
        bench.metrics.progress(rows_done=3, rows=8, tokens=41)
        shown.append([value("rlhfd_ticket_rows", state=state) for state in ("done", "all")])
        shown.append([value("rlhfd_ticket_tokens")])
        return make(*words, **keywords)

    bench.maker.finish = look
    bench.ticket(1, prompts=1)
    bench.worker.step()

    assert shown == [[3, 8], [41]]
    assert value("rlhfd_ticket_rows", state="all") == value("rlhfd_ticket_tokens") == 0


def counted(*reports: int | tuple[int]) -> list[int]:
    """Return the tokens counted after each report of an engine, and after each end, which is a tuple."""
    heard, totals = NodeTelemetry(), [0]
    for report in reports:
        heard.sampled(*report) if isinstance(report, tuple) else heard.progress(tokens=report)
        status = heard.status([])
        assert status.in_hand >= 0 and status.sampled >= totals[-1]
        totals.append(status.sampled)
    return totals[1:]


def test_tokens_count_as_they_are_reported_and_the_rest_at_the_end_of_their_request() -> None:
    assert counted(0, 4, 8, (10,)) == [0, 4, 8, 10]
    assert counted(0, 4, (10,), 0, 3, (5,)) == [0, 4, 10, 10, 13, 15], "a call after the other"
    assert counted((10,), (7,)) == [10, 17], "an engine without reports"
    assert counted(0, 6, 0, 5, (9,)) == [0, 6, 6, 11, 15], "a call that failed, and its repetition"


def test_tokens_of_a_stream_count_once_whichever_of_its_requests_ends() -> None:
    assert counted(5, 12, (8,), 20, (9,), 23, (6,)) == [5, 12, 12, 20, 20, 23, 23]


def test_the_tokens_of_a_killed_worker_count_once_and_those_of_its_successor_too(bench: Bench) -> None:
    def sampled() -> float | None:
        return MetricsReader(bench.slab).read().value("rlhfd_tokens_total", kind="response")

    bench.metrics.progress(tokens=7)
    assert not sampled(), "of the trial before the first ticket"
    bench.metrics.work_on(3, 100.0)
    bench.metrics.progress(tokens=0)
    bench.metrics.progress(tokens=41)
    assert sampled() == 41, "before the ticket ends"
    bench.slab.fold("rollout", 0)
    assert sampled() == 41
    bench.slab.begin("rollout", 0)
    successor = RolloutMetrics(bench.slab.writer("rollout", 0), reward_source="function")
    assert sampled() == 41

    successor.work_on(3, 100.0)
    for tokens in (0, 20, 40):
        successor.progress(tokens=tokens)
    successor.sampled(44)
    successor.work_on()

    assert sampled() == 41 + 44


def test_tokens_of_another_process_count_by_its_total(bench: Bench) -> None:
    def sampled() -> float | None:
        return MetricsReader(bench.slab).read().value("rlhfd_tokens_total", kind="response")

    bench.metrics.sampled_remotely(9, 0)
    bench.metrics.work_on(1)
    totals = []
    for tokens, in_hand in ((9, 0), (30, 21), (27, 18), (50, 0), (50, 0)):
        bench.metrics.sampled_remotely(tokens, in_hand)
        totals.append(sampled() or 0)

    assert totals == [0, 21, 21, 41, 41], "a late report takes nothing back; the trial does not count"


def test_a_foreign_actor_tells_of_every_mini_batch() -> None:
    told = Told()

    ActorGenerator(tiny.llama(), telemetry=told).generate(IDS, MASK, SAMPLING, batch_rows=1)

    assert len(told.beats) == 2


def test_reward_functions_tell_of_every_row_and_a_row_that_hangs_of_none() -> None:
    told, seen = Told(), []

    def look(ids: torch.Tensor, mask: torch.Tensor, **_: object) -> float:
        seen.append(len(told.beats))
        return 1.0

    ends = torch.tensor([2, 2])
    FunctionReward([look], None, told)(IDS, MASK, torch.tensor([1, 1]), ends, [None, None])

    assert seen == [0, 1]
    assert len(told.beats) == 2


def test_the_maker_hands_it_on_and_tells_of_every_forward_pass() -> None:
    told = Told()
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
        telemetry=told,
    )

    maker.make_experience(IDS, MASK, max_length=8, eos_token_id=None, seed=1)

    # Six tokens, and for actor and reference two passes of two rows each.
    assert len(told.beats) == 6 + 2 + 2


def test_a_step_tells_of_every_pass_and_of_each_time_it_waits_for_other_ranks() -> None:
    told = Told()
    learner = new_learner("grpo", TRAINER.model_copy(update={"micro_batch_size": 4}), telemetry=told)

    learner.update([experience_for(learner, "grpo")])

    assert told.phases == ["reduce", "forward", "backward", "forward", "backward", "reduce", "optimizer"]


def test_a_worker_shows_the_ticket_it_works_on(bench: Bench) -> None:
    shown = []
    make = bench.maker.finish

    def look(*words: object, **keywords: object) -> object:
        shown.append(bench.slab.progress("rollout"))
        return make(*words, **keywords)

    bench.maker.finish = look
    bench.ticket(1, prompts=1, deadline_s=77.0)
    bench.worker.step()

    assert [(progress.working_on, progress.deadline_s) for progress in shown] == [(1, 77.0)]
    assert bench.slab.progress("rollout").working_on == -1
