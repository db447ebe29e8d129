"""The metrics of a rollout worker."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from pipeline.experience.types import Experience
from pipeline.models.device import allocator_bytes
from pipeline.telemetry.activity import ActivityClock
from pipeline.telemetry.slab import SlotWriter

ACTIVITIES = (
    "generate", "logprob", "ref_logprob", "value", "reward", "seal", "fetch_weights",
    "wait_ticket_full", "wait_ticket_staleness", "wait_ticket_paused", "wait_data",
)  # fmt: skip
_STAGES = {
    "generate": "generate",
    "logprob": "logprob",
    "ref_logprob": "ref_logprob",
    "value": "value",
    "reward": "reward",
    "seal": "serialize",
}
_WAITS = {"full": "wait_ticket_full", "staleness": "wait_ticket_staleness", "paused": "wait_ticket_paused"}


class RolloutMetrics:
    """Writes a worker's slot."""

    def __init__(self, writer: SlotWriter, *, reward_source: str, transport: str = "shm") -> None:
        self._writer = writer
        self.clock = ActivityClock(writer, ACTIVITIES)
        self._waiting_for = "wait_data"
        self._stages = {name: writer.histogram("rlhfd_stage_duration_seconds", stage=s) for name, s in _STAGES.items()}
        self._prompts = writer.counter("rlhfd_prompts_total")
        self._accepted = writer.counter("rlhfd_experiences_total", outcome="accepted")
        self._failed = writer.counter("rlhfd_experiences_total", outcome="failed")
        self._errored = writer.counter("rlhfd_experiences_total", outcome="errored")
        self._reward_errors = {
            reason: writer.counter("rlhfd_stage_errors_total", stage="reward", reason=reason)
            for reason in ("timeout", "exception", "invalid")
        }
        self._stopped = writer.counter("rlhfd_responses_total", finish_reason="stop")
        self._truncated = writer.counter("rlhfd_responses_total", finish_reason="length")
        self._tokens_in = writer.counter("rlhfd_tokens_total", kind="prompt")
        self._tokens_out = writer.counter("rlhfd_tokens_total", kind="response")
        self._prompt_length = writer.histogram("rlhfd_prompt_length_tokens")
        self._response_length = writer.histogram("rlhfd_response_length_tokens")
        self._reward = writer.histogram("rlhfd_reward", source=reward_source)
        self._groups = {
            signal: writer.counter("rlhfd_groups_total", signal=signal) for signal in ("mixed", "all_equal")
        }
        self._ticket_tokens = writer.gauge("rlhfd_ticket_tokens")
        self._ticket_rows = {state: writer.gauge("rlhfd_ticket_rows", state=state) for state in ("done", "all")}
        self._out_of_memory = {
            during: writer.counter("rlhfd_out_of_memory_total", during=during) for during in ("pass", "generate")
        }
        self._in_flight = writer.gauge("rlhfd_rollouts_in_flight")
        self._version = writer.gauge("rlhfd_policy_version")
        self._sync_s = writer.histogram("rlhfd_weight_sync_duration_seconds", phase="load")
        self._sync_bytes = writer.counter("rlhfd_weight_sync_bytes_total", transport=transport)
        self._mismatches = writer.counter("rlhfd_weight_syncs_total", result="mismatch")
        self._syncs = writer.counter("rlhfd_weight_syncs_total", result="ok")
        self._sync_time = writer.gauge("rlhfd_weight_sync_last_success_timestamp_seconds")
        self._push_wait = writer.histogram("rlhfd_buffer_push_wait_seconds")

    @contextlib.contextmanager
    def activity(self, name: str) -> Iterator[None]:
        """Count the time of the block for an activity, and its duration for the stage of that name."""
        started_s = time.monotonic()
        self._show_rows(0, 0)
        with self.clock.during(name):
            yield
        self.staged(name, time.monotonic() - started_s)

    def staged(self, name: str, seconds: float) -> None:
        """Count the duration of an ended activity for the stage of its name."""
        if name in self._stages:
            self._stages[name].observe(seconds)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the block as a wait for a ticket, for the last reason from the buffer."""
        with self.clock.during(self._waiting_for):
            yield

    def wait_for(self, reason: str) -> None:
        """Set the reason of the wait for a ticket; any reason other than a bound counts as a lack of data."""
        self._waiting_for = _WAITS.get(reason, "wait_data")
        if self.clock.activity.startswith("wait_"):
            self.clock.enter(self._waiting_for)

    def ticket_came(self, waited_s: float) -> None:
        """Count the wait that a ticket ended."""
        self._waiting_for = "wait_data"
        self._push_wait.observe(max(0.0, waited_s))

    def rolled(
        self, experience: Experience, *, prompts: int, prompts_failed: int, group_size: int, stopped: torch.Tensor
    ) -> None:
        """Count a sealed rollout.

        Args:
            experience: Its rows, the G responses of a prompt contiguous.
            prompts: Prompts of the ticket.
            prompts_failed: Prompts of the ticket that were set aside.
            group_size: Responses of a prompt (G).
            stopped: ``(B,)`` bool, whether the response ended by itself.
        """
        assert experience.attention_mask is not None
        assert experience.action_mask is not None
        assert experience.info is not None
        responses = experience.action_mask.sum(dim=1)
        lengths = experience.attention_mask.sum(dim=1) - responses
        self._prompts.inc(prompts)
        self._failed.inc(prompts_failed * group_size)
        self._accepted.inc(len(responses))
        self._errored.inc((prompts - prompts_failed) * group_size - len(responses))
        self._stopped.inc(int(stopped.sum()))
        self._truncated.inc(int((~stopped).sum()))
        self._tokens_in.inc(int(lengths[::group_size].sum()))
        self._tokens_out.inc(int(responses.sum()))
        self._prompt_length.observe_many(lengths[::group_size].tolist())
        self._response_length.observe_many(responses.tolist())
        self._reward.observe_many(experience.info["score"].tolist())
        if "group_mixed" in experience.info:
            mixed = int(experience.info["group_mixed"][::group_size].sum())
            self._groups["mixed"].inc(mixed)
            self._groups["all_equal"].inc(len(responses) // group_size - mixed)

    def beat(self, *, rows_done: int = 0, rows: int = 0, tokens: int | None = None) -> None:
        """Write a heartbeat, and show the progress of the stage if `rows` is above 0."""
        if rows:
            self._show_rows(rows_done, rows)
        if tokens is not None:
            self._ticket_tokens.set(tokens)
        self._writer.beat()

    def out_of_memory(self, during: str) -> None:
        """Count a call that ran out of the device's memory: "pass" or "generate"."""
        self._out_of_memory[during].inc()

    def reward_errored(self, reason: str) -> None:
        """Count a row without a reward."""
        self._reward_errors[reason].inc()

    def failed(self, *, prompts: int, group_size: int, retried: bool) -> None:
        """Count a ticket without experience."""
        if not retried:
            self._prompts.inc(prompts)
            self._failed.inc(prompts * group_size)

    def fetched(self, version: int, nbytes: int, duration_s: float) -> None:
        """Count a weight sync."""
        self._version.set(version)
        self._sync_s.observe(duration_s)
        self._sync_bytes.inc(nbytes)
        self._syncs.inc()
        self._sync_time.set(time.time())

    def weights_mismatch(self) -> None:
        """Count a weight sync after which the model did not compute with its weights."""
        self._mismatches.inc()

    def in_flight(self, rollouts: int) -> None:
        """Show the number of tickets in hand."""
        self._in_flight.set(rollouts)
        for state, nbytes in allocator_bytes().items():
            self._writer.gauge("rlhfd_torch_memory_bytes", state=state).set(nbytes)

    def work_on(self, ticket: int = -1, deadline_s: float = 0.0) -> None:
        """Show the ticket being worked on, -1 for none."""
        self._show_rows(0, 0)
        self._ticket_tokens.set(0)
        self._writer.work_on(ticket, deadline_s)

    def _show_rows(self, done: int, rows: int) -> None:
        self._ticket_rows["done"].set(done)
        self._ticket_rows["all"].set(rows)
