"""The catalogue: every metric of rlhfd, declared once, with its help, its labels and the role that writes it.

A declaration fixes the layout of the shared-memory slab (`pipeline.telemetry.slab`), hence label values are enumerated.
Two markers stand for values that only the running instance knows:

    OWN     the writer's own role or worker: each process writes for itself
    EACH    any role or worker of the instance: the supervisor writes about its children

A metric is exported only if a process has bound it; a declaration alone exports nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from pipeline.storage.records import DROP_REASONS

Kind = Literal["counter", "gauge", "histogram"]
SampleKey = tuple[str, tuple[str, ...]]

OWN: Final = "@own"
EACH: Final = "@each"

SUPERVISOR: Final = "supervisor"
BUFFER: Final = "buffer"
TRAINER: Final = "trainer"
ROLLOUT: Final = "rollout"
EVERY_ROLE: Final = "supervisor buffer trainer rollout"
# Owners that are no role: the buffer's consistent block, and the supervisor's facts on the run and the machine.
CONSERVATION: Final = "@conservation"
INFO: Final = "@info"

START: Final = "start"
OTHER: Final = "other"
ACTIVITIES: Final = (
    "generate", "logprob", "ref_logprob", "value", "reward", "seal", "train", "publish", "fetch_weights",
    "wait_ticket_full", "wait_ticket_staleness", "wait_ticket_paused", "wait_data", START, OTHER,
)  # fmt: skip
PARTITION: Final = "0"
UNITS: Final = ("seconds", "bytes", "versions", "nats", "ratio", "tokens")

DURATION_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
AGE_S: Final = (0.01, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
VERSIONS: Final = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)
REWARD: Final = (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 2, 5, 10)
KL_NATS: Final = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 100)
RATIO: Final = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 1, 1.01, 1.02, 1.05, 1.1, 1.2, 1.3, 1.5, 2, 4)
TOKENS: Final = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class SlotName(NamedTuple):
    """One process of an instance: the values of the labels role and worker."""

    role: str
    worker: int = 0


@dataclasses.dataclass(frozen=True)
class Metric:
    """One metric family.

    Attributes:
        name: Full name, a counter's ``_total`` included.
        owners: The roles that write it, or `CONSERVATION`, or `INFO`.
        labels: Label names in order, each with its values, or `OWN`, or `EACH`.
        buckets: Upper bounds of a histogram, ascending, none negative, +Inf left out.
        outlives_writer: Whether a gauge's newest value stays when its writer dies: the time of an event. Every other
            gauge is removed with its process, because the last value of a dead process is no longer valid.
    """

    kind: Kind
    name: str
    help: str
    owners: tuple[str, ...]
    labels: Mapping[str, tuple[str, ...]]
    buckets: tuple[float, ...] = ()
    outlives_writer: bool = False

    @property
    def unit(self) -> str:
        """The unit at the end of the name; empty if there is none."""
        stem = self.name.removesuffix("_total")
        return next((unit for unit in UNITS if stem.endswith("_" + unit)), "")

    @property
    def words(self) -> int:
        """Number of float64 words of one series: 1, or a histogram's buckets, +Inf and sum."""
        return len(self.buckets) + 2 if self.kind == "histogram" else 1

    def is_own(self, label: str) -> bool:
        """Whether this label names the process that wrote the sample."""
        return self.labels.get(label) == (OWN,)

    def series(self, slots: tuple[SlotName, ...]) -> Iterator[tuple[str, ...]]:
        """Yield the label values of every series that an instance with these slots can have; `OWN` stays a marker."""
        each = [label for label, values in self.labels.items() if values == (EACH,)]
        about = [{"role": slot.role, "worker": str(slot.worker)} for slot in slots]
        subjects = dict.fromkeys(tuple(subject[label] for label in each) for subject in about)
        enumerated = [values for values in self.labels.values() if values != (EACH,)]
        for subject, chosen in itertools.product(subjects, itertools.product(*enumerated)):
            of_each, of_enumerated = iter(subject), iter(chosen)
            yield tuple(next(of_each if values == (EACH,) else of_enumerated) for values in self.labels.values())


def counter(name: str, owners: str, help: str, /, **labels: str) -> Metric:
    """Declare a counter."""
    return Metric("counter", name, help, tuple(owners.split()), _enumerate(labels))


def gauge(name: str, owners: str, help: str, /, **labels: str) -> Metric:
    """Declare a gauge that is removed with its writer."""
    return Metric("gauge", name, help, tuple(owners.split()), _enumerate(labels))


def event_time(name: str, owners: str, help: str, /, **labels: str) -> Metric:
    """Declare a gauge that holds the Unix time of an event; it outlives its writer, and the newest value counts."""
    return Metric("gauge", name, help, tuple(owners.split()), _enumerate(labels), outlives_writer=True)


def histogram(name: str, owners: str, buckets: tuple[float, ...], help: str, /, **labels: str) -> Metric:
    """Declare a histogram with fixed buckets."""
    bounds = tuple(float(bound) for bound in buckets)
    return Metric("histogram", name, help, tuple(owners.split()), _enumerate(labels), bounds)


def _enumerate(labels: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    return {label: tuple(values.split()) for label, values in labels.items()}


# fmt: off
METRICS: Final[tuple[Metric, ...]] = (
    # The run and its processes.
    gauge("rlhfd_build_info", INFO, "Always 1; the labels hold the versions that are running.",
          version="", commit="", python="", torch="", cuda=""),
    gauge("rlhfd_run_info", INFO, "Always 1; the labels hold the run's identity.", run_id="", algorithm="", model=""),
    gauge("rlhfd_ready", SUPERVISOR, "1 while every required role is ready, else 0."),
    gauge("rlhfd_start_time_seconds", SUPERVISOR, "Unix time at which the supervisor started."),
    gauge("rlhfd_config_last_reload_successful", SUPERVISOR,
          "Whether the last configuration reload took effect; 1 before the first."),
    gauge("rlhfd_config_last_reload_success_timestamp_seconds", SUPERVISOR,
          "Unix time of the last configuration reload that took effect; of the start before the first."),
    gauge("rlhfd_paused", BUFFER, "1 while no tickets are issued because of `rlhfd pause`, else 0."),
    gauge("rlhfd_processes", SUPERVISOR,
          "Child processes by role and state (starting, ready, draining, backoff, failed).",
          role=EACH, state="starting ready draining backoff failed"),
    gauge("rlhfd_process_up", SUPERVISOR, "Whether the worker in this slot is alive and ready.",
          role=EACH, worker=EACH),
    counter("rlhfd_process_starts_total", SUPERVISOR, "Child processes started.", role=EACH),
    counter("rlhfd_process_exits_total", SUPERVISOR,
            "Child exits by reason (clean, error, signal, oom, watchdog, boot).",
            role=EACH, reason="clean error signal oom watchdog boot"),
    histogram("rlhfd_process_startup_seconds", SUPERVISOR, DURATION_S, "Time from spawn to ready.", role=EACH),
    gauge("rlhfd_process_backoff_seconds", SUPERVISOR, "Wait before the next restart of this slot, 0 if none is due.",
          role=EACH, worker=EACH),
    gauge("rlhfd_process_last_heartbeat_timestamp_seconds", EVERY_ROLE,
          "Unix time of the last progress of the worker in this slot.", role=OWN, worker=OWN),
    gauge("rlhfd_process_resident_memory_bytes", SUPERVISOR, "Resident memory of the worker in this slot.",
          role=EACH, worker=EACH),
    counter("rlhfd_process_cpu_seconds_total", SUPERVISOR, "CPU time used by child processes, dead ones included.",
            role=EACH),
    counter("rlhfd_process_time_seconds_total", "buffer trainer rollout",
            f"Wall time by activity ({', '.join(ACTIVITIES)}); the activities of a process add up to its wall time.",
            role=OWN, worker=OWN, activity=" ".join(ACTIVITIES)),
    counter("rlhfd_log_messages_total", EVERY_ROLE, "Log records at warning or above.",
            role=OWN, level="warning error critical"),

    # Throughput.
    counter("rlhfd_prompts_total", ROLLOUT, "Prompts taken from the prompt source."),
    counter("rlhfd_experiences_total", ROLLOUT,
            "Experiences finished by rollout workers by outcome (accepted, failed, errored).",
            outcome="accepted failed errored"),
    counter("rlhfd_responses_total", ROLLOUT, "Responses generated by finish reason (stop, length).",
            finish_reason="stop length"),
    counter("rlhfd_tokens_total", "rollout trainer", "Tokens by kind (prompt, response, trained).",
            kind="prompt response trained"),
    counter("rlhfd_train_steps_total", TRAINER, "Optimizer steps taken."),
    counter("rlhfd_train_experiences_total", TRAINER, "Experiences used in optimizer steps, repeats included."),
    gauge("rlhfd_rollouts_in_flight", ROLLOUT, "Rollouts in flight.", worker=OWN),
    histogram("rlhfd_stage_duration_seconds", ROLLOUT, DURATION_S,
              "Time per rollout stage (generate, logprob, ref_logprob, value, reward, serialize).",
              stage="generate logprob ref_logprob value reward serialize"),
    histogram("rlhfd_train_phase_duration_seconds", TRAINER, DURATION_S,
              "Time per training phase (fetch, forward, backward, reduce, optimizer, publish).",
              phase="fetch forward backward reduce optimizer publish"),
    counter("rlhfd_stage_errors_total", ROLLOUT,
            "Rows without a result of a stage, by reason (timeout, exception, invalid).",
            stage="reward", reason="timeout exception invalid"),
    histogram("rlhfd_prompt_length_tokens", ROLLOUT, TOKENS, "Prompt length."),
    histogram("rlhfd_response_length_tokens", ROLLOUT, TOKENS, "Response length."),

    # The buffer.
    gauge("rlhfd_buffer_items", CONSERVATION, "Items held by state (ready, leased, writing).",
          partition=PARTITION, state="ready leased writing"),
    gauge("rlhfd_buffer_capacity_items", BUFFER, "Maximum number of items in the buffer.", partition=PARTITION),
    gauge("rlhfd_buffer_bytes", CONSERVATION, "Bytes held by state.",
          partition=PARTITION, state="ready leased writing"),
    gauge("rlhfd_buffer_capacity_bytes", BUFFER, "Maximum bytes in the buffer.", partition=PARTITION),
    counter("rlhfd_buffer_pushes_total", BUFFER, "Pushes by result (accepted, stale, invalid).",
            partition=PARTITION, result="accepted stale invalid"),
    histogram("rlhfd_buffer_push_wait_seconds", ROLLOUT, DURATION_S,
              "Time a producer waited for room (backpressure).", partition=PARTITION),
    histogram("rlhfd_buffer_get_wait_seconds", TRAINER, DURATION_S,
              "Time a consumer waited for a full batch (starvation).", partition=PARTITION),
    histogram("rlhfd_buffer_item_age_seconds", BUFFER, AGE_S, "Age of an item when it was leased to a trainer.",
              partition=PARTITION),
    gauge("rlhfd_buffer_oldest_item_timestamp_seconds", BUFFER, "Unix time at which the oldest ready item was pushed.",
          partition=PARTITION),
    gauge("rlhfd_leases_active", CONSERVATION, "Leases held by trainers.", partition=PARTITION),
    counter("rlhfd_leases_total", BUFFER, "Leases ended by result (acked, nacked, holder_died).",
            result="acked nacked holder_died"),
    histogram("rlhfd_lease_duration_seconds", BUFFER, DURATION_S, "Time from lease to ack."),

    # Conservation.
    counter("rlhfd_items_sealed_total", CONSERVATION, "Items committed to the buffer."),
    counter("rlhfd_items_trained_total", CONSERVATION, "Items acknowledged after an optimizer step."),
    counter("rlhfd_items_dropped_total", CONSERVATION,
            "Items dropped untrained by reason (stale, rolled_back, filtered, quarantined, cleared, spooled).",
            reason=" ".join(DROP_REASONS)),
    gauge("rlhfd_items_unaccounted", CONSERVATION,
          "Items sealed minus items trained, dropped, ready and leased: 0 unless an item is lost or counted twice."),
    gauge("rlhfd_tickets_outstanding", CONSERVATION, "Tickets issued to workers and not yet settled."),
    counter("rlhfd_tickets_total", BUFFER, "Tickets settled by result (sealed, reissued, failed).",
            result="sealed reissued failed"),
    counter("rlhfd_quarantined_total", BUFFER,
            "Items set aside by reason: damaged in the arena (checksum), in a batch at which a trainer died twice "
            "(killed_trainer); refused before they were sealed, because of unknown weights (fingerprint), weights that "
            "were rolled back (rolled_back), an impossible size (invalid), fields whose lengths disagree (lengths), a "
            "mask that is not the mask of the sampled tokens (mask), a token that is not in the vocabulary "
            "(vocabulary), a number that is NaN or infinite (not_finite), any other error in a field (malformed).",
            reason="checksum killed_trainer fingerprint rolled_back invalid "
                   "lengths mask vocabulary not_finite malformed"),
    counter("rlhfd_quarantine_files_total", BUFFER,
            "Copies of quarantined items on disk by result (kept, full, error).", result="kept full error"),
    counter("rlhfd_journal_writes_total", BUFFER, "Periodic snapshots of the buffer by result (ok, error).",
            result="ok error"),
    counter("rlhfd_items_requeued_total", BUFFER, "Leased items made ready again by reason (holder_died, nacked).",
            reason="holder_died nacked"),
    counter("rlhfd_items_duplicate_total", BUFFER,
            "Repeated messages about settled tickets and leases, detected and dropped (push).", point="push"),

    # Policy versions and weights.
    gauge("rlhfd_policy_version", "trainer rollout",
          "Policy version that the process holds; the trainer's is the newest.", role=OWN, worker=OWN),
    histogram("rlhfd_policy_staleness_versions", "buffer trainer", VERSIONS,
              "Versions between the policy that wrote an experience and the newest policy, at push and at train.",
              point="push train"),
    histogram("rlhfd_weight_sync_duration_seconds", "trainer rollout", DURATION_S,
              "Weight sync time by phase (publish, load).", phase="publish load"),
    counter("rlhfd_weight_sync_bytes_total", "trainer rollout", "Weight bytes moved (shm, ray).",
            transport="shm ray"),
    counter("rlhfd_weight_syncs_total", "trainer rollout", "Weight syncs by result (ok, mismatch).",
            result="ok mismatch"),
    event_time("rlhfd_weight_sync_last_success_timestamp_seconds", "trainer rollout",
               "Unix time of the last complete weight sync."),

    # Reward and learning; the gauges are rank 0's.
    histogram("rlhfd_reward", ROLLOUT, REWARD, "Reward of an experience.", source="function model"),
    gauge("rlhfd_reward_mean", TRAINER, "Mean reward of the last training batch.", source="function model"),
    gauge("rlhfd_reward_stddev", TRAINER, "Standard deviation of reward in the last training batch.",
          source="function model"),
    counter("rlhfd_groups_total", ROLLOUT, "Prompt groups by whether their rewards differ (mixed, all_equal).",
            signal="mixed all_equal"),
    histogram("rlhfd_kl_nats", TRAINER, KL_NATS,
              "Estimated KL from the reference policy per experience, k3 estimator."),
    gauge("rlhfd_entropy_nats", TRAINER, "Mean policy entropy of the last batch."),
    histogram("rlhfd_importance_ratio", TRAINER, RATIO,
              "Mean ratio of new to behaviour probability per experience."),
    gauge("rlhfd_clipped_ratio", TRAINER, "Share of tokens clipped in the last step."),
    gauge("rlhfd_loss", TRAINER, "Loss of the last step (policy, value, kl, total).", kind="policy value kl total"),
    gauge("rlhfd_gradient_norm", TRAINER, "Gradient norm of the last step before clipping."),
    gauge("rlhfd_learning_rate", TRAINER, "Learning rate of the last step."),
    counter("rlhfd_nonfinite_total", TRAINER, "Optimizer steps skipped because of NaN or infinity (loss, gradient).",
            where="loss gradient"),
    counter("rlhfd_checkpoints_total", TRAINER, "Checkpoints by result (ok, error).", result="ok error"),
    histogram("rlhfd_checkpoint_duration_seconds", TRAINER, DURATION_S, "Time to write a checkpoint."),
    event_time("rlhfd_checkpoint_last_success_timestamp_seconds", TRAINER,
               "Unix time of the last complete checkpoint."),

    # Memory and messages. A channel is named after its receiver.
    gauge("rlhfd_shm_bytes", SUPERVISOR, "Shared memory mapped by kind (buffer, weights, metrics).",
          kind="buffer weights metrics"),
    gauge("rlhfd_shm_available_bytes", SUPERVISOR, "Free bytes on the shared memory file system."),
    gauge("rlhfd_arena_pinned_bytes", "trainer rollout",
          "Arena bytes page-locked for a process's GPU; 0 without a GPU, or if the limit on locked memory forbids it.",
          role=OWN, worker=OWN),
    gauge("rlhfd_torch_memory_bytes", "trainer rollout",
          "Torch allocator memory of a process on a GPU (allocated, reserved).",
          role=OWN, worker=OWN, state="allocated reserved"),
    gauge("rlhfd_device_info", INFO,
          "Always 1, for each process that computes; device is the name of its GPU in the driver's words, or cpu.",
          role="", worker="", device=""),
    gauge("rlhfd_gpu_memory_used_bytes", INFO, "GPU memory used, from NVML.", gpu="", uuid=""),
    gauge("rlhfd_gpu_memory_capacity_bytes", INFO, "GPU memory size, from NVML.", gpu="", uuid=""),
    gauge("rlhfd_gpu_utilization_ratio", INFO, "Share of the sample period in which a kernel ran, from NVML.",
          gpu="", uuid=""),
    counter("rlhfd_ipc_messages_total", EVERY_ROLE, "ZeroMQ messages.",
            channel="buffer peer", direction="sent received"),
    counter("rlhfd_ipc_bytes_total", EVERY_ROLE, "ZeroMQ payload bytes.",
            channel="buffer peer", direction="sent received"),
    counter("rlhfd_ipc_drops_total", EVERY_ROLE, "Messages refused: not decodable, or with impossible content.",
            channel="buffer peer"),
)
# fmt: on

BY_NAME: Final[Mapping[str, Metric]] = {metric.name: metric for metric in METRICS}


@dataclasses.dataclass(frozen=True)
class Progress:
    """Progress of a process, written by its own main loop and the work inside it; no separate thread keeps it fresh.

    Attributes:
        beat_s: Monotonic time of the last heartbeat, 0 before the first.
        activity: The present one of `ACTIVITIES`; empty before the first.
        since_s: Monotonic time at which the activity began.
        working_on: Number of the ticket or lease in work, -1 for none.
        deadline_s: Monotonic time at which the ticket is due; 0 for never.
        in_collective: Whether the process waits for the other ranks in a collective: the cause of a missing heartbeat
            is then in another rank.
    """

    beat_s: float
    activity: str
    since_s: float
    working_on: int
    deadline_s: float
    in_collective: bool


@dataclasses.dataclass(frozen=True)
class Conservation:
    """The buffer's totals at one instant; published as a whole, so that a scrape never shows half an item's move.

    Each is a total since the arena was made, or a number held now: ``sealed = trained + sum(dropped) + ready + leased``

    Attributes:
        dropped: Items by each of `DROP_REASONS`, in that order.
        writing_items: Rows for which outstanding tickets have reserved room.
    """

    sealed: int
    trained: int
    dropped: tuple[int, ...]
    ready_items: int
    leased_items: int
    writing_items: int
    ready_bytes: int
    leased_bytes: int
    writing_bytes: int
    leases_active: int
    tickets_outstanding: int

    @property
    def unaccounted(self) -> int:
        """Items that are lost (positive) or counted twice (negative)."""
        return self.sealed - self.trained - sum(self.dropped) - self.ready_items - self.leased_items

    def dropped_by_reason(self) -> dict[str, int]:
        """Return the items dropped for each of `DROP_REASONS`."""
        return dict(zip(DROP_REASONS, self.dropped, strict=True))

    def to_words(self) -> list[float]:
        """Return the words of the block in the slab."""
        held = (self.ready_items, self.leased_items, self.writing_items)
        held_bytes = (self.ready_bytes, self.leased_bytes, self.writing_bytes)
        handed_out = (self.leases_active, self.tickets_outstanding)
        return [float(value) for value in (self.sealed, self.trained, *self.dropped, *held, *held_bytes, *handed_out)]

    @classmethod
    def from_words(cls, words: Sequence[float]) -> Conservation:
        """Return the block that `words` hold."""
        sealed, trained, *rest = (int(word) for word in words)
        return cls(sealed, trained, tuple(rest[: len(DROP_REASONS)]), *rest[len(DROP_REASONS) :])

    def samples(self) -> dict[SampleKey, float]:
        """Return the value of every series that `CONSERVATION` owns."""
        partition = (PARTITION,)
        samples: dict[SampleKey, float] = {
            ("rlhfd_items_sealed_total", ()): self.sealed,
            ("rlhfd_items_trained_total", ()): self.trained,
            ("rlhfd_items_unaccounted", ()): self.unaccounted,
            ("rlhfd_leases_active", partition): self.leases_active,
            ("rlhfd_tickets_outstanding", ()): self.tickets_outstanding,
        }
        for reason, items in self.dropped_by_reason().items():
            samples["rlhfd_items_dropped_total", (reason,)] = items
        for state in ("ready", "leased", "writing"):
            samples["rlhfd_buffer_items", (PARTITION, state)] = getattr(self, f"{state}_items")
            samples["rlhfd_buffer_bytes", (PARTITION, state)] = getattr(self, f"{state}_bytes")
        return samples


CONSERVATION_WORDS: Final = len(dataclasses.fields(Conservation)) - 1 + len(DROP_REASONS)
