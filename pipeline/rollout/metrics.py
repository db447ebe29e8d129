"""The metrics of a rollout worker."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from pipeline.models.device import allocator_bytes
from pipeline.progress import Event
from pipeline.rollout.generation.interface import EngineCounts, EngineLoad
from pipeline.rollout.reward.row_rewards import PREFIX
from pipeline.rollout.roller import Rolled
from pipeline.rollout.worker_progress import WorkerTelemetry
from pipeline.telemetry.activity import ActivityClock
from pipeline.telemetry.metrics import NUMBER_LABELS, REWARD_LABELS
from pipeline.telemetry.number_names import COLUMN, sums_of
from pipeline.telemetry.slab import SlotWriter
from pipeline.telemetry.writer import Counter

ACTIVITIES = (
    "generate", "environment", "logprob", "ref_logprob", "value", "reward", "seal", "fetch_weights",
    "wait_ticket_full", "wait_ticket_staleness", "wait_ticket_paused", "wait_data",
    "wait_card", "asleep",
)  # fmt: skip
_M = TypeVar("_M")

log = logging.getLogger(__name__)

_STAGES = {"seal": "serialize"} | {
    name: name for name in ("generate", "logprob", "ref_logprob", "value", "reward", "environment")
}
_WAITS = {"full": "wait_ticket_full", "staleness": "wait_ticket_staleness", "paused": "wait_ticket_paused"}


class RolloutMetrics(WorkerTelemetry):
    """Writes a worker's slot."""

    def __init__(
        self,
        writer: SlotWriter,
        *,
        reward_source: str,
        transport: str = "shm",
        reward_labels: Sequence[str] = (),
        log_texts: bool = False,
    ) -> None:
        super().__init__(log_texts=log_texts)
        self._writer = writer
        self._functions = {
            f"{PREFIX}{label}": writer.gauge("rlhfd_reward_function_mean", function=function)
            for label, function in zip(reward_labels, REWARD_LABELS, strict=False)
        }
        self._numbers = [writer.gauge("rlhfd_reward_function_mean", function=label) for label in NUMBER_LABELS]
        self.clock = ActivityClock(writer, ACTIVITIES)
        self._waiting_for = "wait_data"
        self._is_asleep = False
        self._stages = {name: writer.histogram("rlhfd_stage_duration_seconds", stage=s) for name, s in _STAGES.items()}
        self._prompts = writer.counter("rlhfd_prompts_total")
        self._prompts_cut = writer.counter("rlhfd_prompts_cut_total")
        self._experiences = _each(writer.counter, "rlhfd_experiences_total", outcome=("accepted", "failed", "errored"))
        counter, reasons = writer.counter, ("timeout", "exception", "invalid")
        of_reward, of_environment = (
            _each(functools.partial(counter, stage=stage), "rlhfd_stage_errors_total", reason=reasons)
            for stage in ("reward", "environment")
        )
        answers = _each(counter, "rlhfd_environment_steps_total", result=("ok", "tool_failed"))
        self._events: dict[Event, dict[str, Counter]] = {
            "reward_errored": of_reward,
            "number_left_out": _each(counter, "rlhfd_reward_numbers_left_out_total", reason=("invalid", "name")),
            "environment_answered": of_environment | answers,
            "out_of_memory": _each(counter, "rlhfd_out_of_memory_total", during=("pass", "generate")),
            "weights_synced": _each(counter, "rlhfd_weight_syncs_total", result=("mismatch", "ok", "refused")),
        }
        self._turns = writer.histogram("rlhfd_turns")
        self._responses = _each(writer.counter, "rlhfd_responses_total", finish_reason=("stop", "length"))
        self._tokens = _each(writer.counter, "rlhfd_tokens_total", kind=("prompt", "response"))
        self._prompt_length = writer.histogram("rlhfd_prompt_length_tokens")
        self._response_length = writer.histogram("rlhfd_response_length_tokens")
        self._reward = writer.histogram("rlhfd_reward", source=reward_source)
        self._clipped = writer.counter("rlhfd_rewards_clipped_total")
        self._rows_clipped, self._next_clipped = 0, 1
        self._groups = _each(writer.counter, "rlhfd_groups_total", signal=("mixed", "all_equal"))
        self._ticket_tokens = writer.gauge("rlhfd_ticket_tokens")
        self._ticket = -1
        self._sampled_remotely = 0
        self._ticket_rows = _each(writer.gauge, "rlhfd_ticket_rows", state=("done", "all"))
        self._probes = _each(writer.counter, "rlhfd_engine_probes_total", verdict=("ok", "gap", "stale"))
        self._gaps = writer.histogram("rlhfd_engine_gap_nats", point="probe")
        self._gap_mean = writer.gauge("rlhfd_engine_gap_mean_nats")
        self._engine: EngineLoad | None = None
        self._in_flight = writer.gauge("rlhfd_rollouts_in_flight")
        self._version = writer.gauge("rlhfd_policy_version")
        self._sync_s = writer.histogram("rlhfd_weight_sync_duration_seconds", phase="load")
        self._sync_bytes = writer.counter("rlhfd_weight_sync_bytes_total", transport=transport)
        sent_kinds = ("whole", "difference") if transport == "ray" else ()
        self._sent_bytes = _each(writer.counter, "rlhfd_weight_sent_bytes_total", kind=sent_kinds)
        self._sync_time = writer.gauge("rlhfd_weight_sync_last_success_timestamp_seconds")
        self._push_wait = writer.histogram("rlhfd_buffer_push_wait_seconds")

    def staged(self, name: str, seconds: float) -> None:
        """Count the duration of an ended activity for the stage of its name."""
        if name in self._stages:
            self._stages[name].observe(seconds)

    @contextlib.contextmanager
    def waiting(self, *, for_card: bool = False) -> Iterator[None]:
        """Count the time of the block as a wait for a ticket, for the last reason from the buffer, or as sleep.

        Args:
            for_card: Whether there is a ticket, and the wait is for the turn on the card.
        """
        with self.clock.during("wait_card" if for_card else "asleep" if self._is_asleep else self._waiting_for):
            yield

    @contextlib.contextmanager
    def waiting_to_load(self) -> Iterator[None]:
        """Count the time of the block, which is before the first ticket, as a wait for the turn on the card."""
        interrupted = self.clock.enter("wait_card")
        yield
        self.clock.enter(interrupted)

    @contextlib.contextmanager
    def changing_sleep(self, phase: str) -> Iterator[None]:
        """Observe the time in which the engine falls asleep ("sleep") or wakes ("wake"); both count as sleep."""
        duration_s = self._writer.histogram("rlhfd_engine_sleep_duration_seconds", phase=phase)
        started_s = time.monotonic()
        with self.clock.during("asleep"):
            yield
        duration_s.observe(time.monotonic() - started_s)
        self._is_asleep = phase == "sleep"

    def wait_for(self, reason: str) -> None:
        """Set the reason of the wait for a ticket; any reason other than a bound counts as a lack of data."""
        self._waiting_for = _WAITS.get(reason, "wait_data")
        if self.clock.activity.startswith("wait_"):
            self.clock.enter(self._waiting_for)

    def ticket_came(self, waited_s: float) -> None:
        """Count the wait that a ticket ended."""
        self._waiting_for = "wait_data"
        self._push_wait.observe(max(0.0, waited_s))

    def rolled(self, rolled: Rolled, *, prompts: int, group_size: int) -> None:
        """Count a sealed rollout.

        Args:
            rolled: The rollout, with its rows, the G responses of a prompt contiguous.
            prompts: Prompts of the ticket.
            group_size: Responses of a prompt (G).
        """
        rows = rolled.rows
        assert rows is not None
        info = {name.removeprefix("info."): values for name, values in rows.columns.items() if name.startswith("info.")}
        responses = rows.actions_of_rows()
        prompt_tokens = [length - count for length, count in zip(rows.lengths, rows.counts, strict=True)][::group_size]
        self._prompts.inc(prompts)
        self._prompts_cut.inc(rolled.prompts_cut)
        self._experiences["failed"].inc(rolled.prompts_failed * group_size)
        self._experiences["accepted"].inc(len(responses))
        self._experiences["errored"].inc((prompts - rolled.prompts_failed) * group_size - len(responses))
        self._responses["stop"].inc(int(rolled.stopped.sum()))
        self._responses["length"].inc(int((~rolled.stopped).sum()))
        self._tokens["prompt"].inc(sum(prompt_tokens))
        self._prompt_length.observe_many(prompt_tokens)
        self._response_length.observe_many(responses)
        self._reward.observe_many(info["score"].tolist())
        for name, gauge in self._functions.items():
            gauge.set(float(info[name].mean()))
        if COLUMN in info:
            for gauge, total, count in zip(self._numbers, *sums_of(info[COLUMN]), strict=True):
                if count:
                    gauge.set(total / count)
        if "reward_clipped" in info:
            self._count_clipped(int(info["reward_clipped"].sum()))
        if "turns" in info:
            self._turns.observe_many(info["turns"].tolist())
        if "group_mixed" in info:
            mixed = int(info["group_mixed"][::group_size].sum())
            self._groups["mixed"].inc(mixed)
            self._groups["all_equal"].inc(len(responses) // group_size - mixed)

    def sampled_remotely(self, tokens: int, in_hand: int) -> None:
        """Count the response tokens of an engine in another process.

        Args:
            tokens: Sampled by it since its start.
            in_hand: Response tokens of requests that have not ended.
        """
        self._count_sampled(max(0, tokens - self._sampled_remotely), in_hand)
        self._sampled_remotely = max(tokens, self._sampled_remotely)

    def count(self, event: Event, kind: str) -> None:
        """Count an event; see `Telemetry.count`."""
        self._events[event][kind].inc()

    def engine_judged(self, verdict: str, gaps: Sequence[float]) -> None:
        """Count a probe of the engine, and observe the differences of its log-probs, in nats a token."""
        self._probes[verdict].inc()
        finite = [gap for gap in gaps if math.isfinite(gap)]
        self._gaps.observe_many(finite)
        if finite:
            self._gap_mean.set(sum(finite) / len(finite))

    def engine(self, load: EngineLoad) -> None:
        """Show the work in hand of the worker's engine, and count its work since the last call."""
        before, self._engine = self._engine, load
        if load == before or load.counts is None:
            return
        writer = self._writer
        if before is None:
            self._engine_responses = _each(writer.gauge, "rlhfd_engine_responses", state=("running", "waiting", "room"))
            self._engine_cache = writer.gauge("rlhfd_engine_cache_ratio")
            self._engine_preemptions = writer.counter("rlhfd_engine_preemptions_total")
            self._engine_tokens = _each(writer.counter, "rlhfd_engine_tokens_total", direction=("in", "out"))
            self._engine_prefix = _each(writer.counter, "rlhfd_engine_prefix_tokens_total", result=("hit", "miss"))
        self._engine_responses["running"].set(load.running)
        self._engine_responses["waiting"].set(load.waiting)
        self._engine_responses["room"].set(load.room_rows or 0)
        self._engine_cache.set(1.0 - load.free_cache)
        now, then = load.counts, (before and before.counts) or EngineCounts()
        hits = now.prefix_hits - then.prefix_hits
        for counter, grown in (
            (self._engine_preemptions, now.preemptions - then.preemptions),
            (self._engine_tokens["in"], now.tokens_in - then.tokens_in),
            (self._engine_tokens["out"], now.tokens_out - then.tokens_out),
            (self._engine_prefix["hit"], hits),
            (self._engine_prefix["miss"], now.prefix_tokens - then.prefix_tokens - hits),
        ):
            counter.inc(max(0, grown))

    def failed(self, *, prompts: int, group_size: int, retried: bool) -> None:
        """Count a ticket without experience."""
        if not retried:
            self._prompts.inc(prompts)
            self._experiences["failed"].inc(prompts * group_size)

    def fetched(self, version: int, nbytes: int, duration_s: float) -> None:
        """Count a weight sync."""
        self._version.set(version)
        self._sync_s.observe(duration_s)
        self._sync_bytes.inc(nbytes)
        self.count("weights_synced", "ok")
        self._sync_time.set(time.time())

    def weights_sent(self, whole_bytes: int, difference_bytes: int) -> None:
        """Count the bytes of weights that were sent to this worker's machine, for all workers there."""
        self._sent_bytes["whole"].inc(whole_bytes)
        self._sent_bytes["difference"].inc(difference_bytes)

    def in_flight(self, rollouts: int) -> None:
        """Show the number of tickets in hand."""
        self._in_flight.set(rollouts)
        for state, nbytes in allocator_bytes().items():
            self._writer.gauge("rlhfd_torch_memory_bytes", state=state).set(nbytes)

    def work_on(self, ticket: int = -1, deadline_s: float = 0.0) -> None:
        """Show the ticket being worked on, -1 for none."""
        self.show_rows(0, 0)
        self._ticket = ticket
        self._ticket_tokens.set(0)
        self._writer.work_on(ticket, deadline_s)

    def show_rows(self, done: int, rows: int) -> None:
        """Show the rows in work and those of them that are done, without a heartbeat."""
        self._ticket_rows["done"].set(done)
        self._ticket_rows["all"].set(rows)

    def _count_clipped(self, rows: int) -> None:
        if not rows:
            return
        self._clipped.inc(rows)
        # At the first one, and each time that there are ten times as many.
        if (self._rows_clipped + rows) >= self._next_clipped:
            log.warning("rewards clipped: rows=%d, by rollout.reward_clip", self._rows_clipped + rows)
            self._next_clipped = 10 ** len(str(self._rows_clipped + rows))
        self._rows_clipped += rows

    def _beat(self) -> None:
        self._writer.beat()

    def _count_sampled(self, tokens: int, in_hand: int) -> None:
        # Without a ticket they are those of the trial before the first one.
        if self._ticket >= 0:
            self._tokens["response"].inc(tokens)
        self._ticket_tokens.set(in_hand)


def _each(metric: Callable[..., _M], name: str, **labels: Sequence[str]) -> dict[str, _M]:
    """Return the metrics of a name by the values of one label."""
    ((label, values),) = labels.items()
    return {value: metric(name, **{label: value}) for value in values}
