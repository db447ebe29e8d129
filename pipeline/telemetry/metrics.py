"""The catalogue: every metric of rlhfd, declared once, with its help, its labels and the role that writes it.

A metric is exported only if a process has bound it; a declaration alone exports nothing. The declarations fix the
layout of the shared-memory slab (`pipeline.telemetry.slab`), hence label values are enumerated. Two markers stand for
values that only the running instance knows:

    OWN     the writer's own role or worker: each process writes for itself
    EACH    any role or worker of the instance: the supervisor writes about its children
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
    "generate", "environment", "logprob", "ref_logprob", "value", "reward", "seal", "train", "publish", "fetch_weights",
    "wait_ticket_full", "wait_ticket_staleness", "wait_ticket_paused", "wait_data", "wait_card", "asleep", START, OTHER,
)  # fmt: skip
PARTITION: Final = "0"
# Reward functions by their number in the configuration; the reader puts their names there.
REWARD_LABELS: Final = tuple(f"function-{number}" for number in range(1, 18))
MOST_NUMBERS: Final = 16
# Further numbers of reward functions by their place (`pipeline.telemetry.number_names`).
NUMBER_LABELS: Final = tuple(f"number-{number}" for number in range(1, MOST_NUMBERS + 1))
# Files of held-out prompts by their number in the configuration, and all of them; the reader puts their names there.
EVALUATION_LABELS: Final = tuple(f"file-{number}" for number in range(1, 9))
IDLE_STEPS: Final = 20
"""Steps in a row without a trained token, from which on the log, `rlhfd why` and an alert say: nothing to learn."""
UNITS: Final = ("seconds", "bytes", "versions", "nats", "ratio", "tokens")

DURATION_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
AGE_S: Final = (0.01, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
VERSIONS: Final = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)
REWARD: Final = (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 2, 5, 10)
KL_NATS: Final = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 100)
GAP_NATS: Final = (1e-7, 1e-6, 1e-5, 1e-4, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3)
RATIO: Final = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 1, 1.01, 1.02, 1.05, 1.1, 1.2, 1.3, 1.5, 2, 4)
TURNS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128)
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
        """Return whether this label names the process that wrote the sample."""
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


_EVALUATED: Final = " ".join(("all", *EVALUATION_LABELS))
_TRACKERS: Final = "tensorboard wandb trackio mlflow"

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
    counter("rlhfd_prompts_cut_total", ROLLOUT,
            "Prompts that lost their first tokens, because they were too long (rollout.long_prompts)."),
    counter("rlhfd_experiences_total", ROLLOUT,
            "Experiences finished by rollout workers by outcome (accepted, failed, errored).",
            outcome="accepted failed errored"),
    counter("rlhfd_responses_total", ROLLOUT, "Responses generated by finish reason (stop, length).",
            finish_reason="stop length"),
    counter("rlhfd_tokens_total", "rollout trainer",
            "Tokens by kind (prompt, response, trained); responses count as they are sampled, of lost rollouts "
            "and of evaluations too.",
            kind="prompt response trained"),
    counter("rlhfd_train_steps_total", TRAINER, "Optimizer steps taken, those that a rollback undid included."),
    counter("rlhfd_train_idle_steps_total", TRAINER,
            "Optimizer steps in which no token was trained, as where all rewards of every group are equal."),
    gauge("rlhfd_train_steps_since_signal", TRAINER,
          "Newest optimizer steps in a row in which no token was trained; 0 after a step that trained some."),
    gauge("rlhfd_train_step", TRAINER,
          "Optimizer steps behind the trainer's weights; falls at a rollback. Absent with an external trainer."),
    gauge("rlhfd_last_step", TRAINER,
          "Optimizer steps after which the run ends by trainer.max_steps or trainer.max_epochs; 0: no end."),
    counter("rlhfd_train_experiences_total", TRAINER, "Experiences used in optimizer steps, repeats included."),
    gauge("rlhfd_rollouts_in_flight", ROLLOUT, "Rollouts in flight.", worker=OWN),
    gauge("rlhfd_ticket_rows", ROLLOUT,
          "Rows of the current stage of the ticket in hand by state (done, all); 0 where the stage does not tell.",
          worker=OWN, state="done all"),
    gauge("rlhfd_ticket_tokens", ROLLOUT, "Response tokens sampled so far for the tickets in hand.", worker=OWN),
    gauge("rlhfd_engine_responses", ROLLOUT,
          "Responses in a worker's engine by state: advancing with each step (running), not advancing yet (waiting); "
          "room is the largest number that could run at a time, 0 for no limit.",
          role=OWN, worker=OWN, state="running waiting room"),
    gauge("rlhfd_engine_cache_ratio", ROLLOUT,
          "Used share of the key-value cache of a worker's engine; 0 for an engine without one of fixed size.",
          role=OWN, worker=OWN),
    histogram("rlhfd_engine_sleep_duration_seconds", ROLLOUT, DURATION_S,
              "Time of an engine by phase: falling asleep (sleep), waking without weights (wake); with rollout.sleep.",
              phase="sleep wake"),
    counter("rlhfd_engine_preemptions_total", ROLLOUT,
            "Responses that lost their place in the key-value cache to others, and were computed again.",
            role=OWN, worker=OWN),
    counter("rlhfd_engine_tokens_total", ROLLOUT,
            "Tokens of an engine by direction: of prompts taken over (in), sampled (out), cancelled ones included.",
            role=OWN, worker=OWN, direction="in out"),
    counter("rlhfd_engine_prefix_tokens_total", ROLLOUT,
            "Prompt tokens of ended responses by whether the prefix cache of the engine held them (hit, miss).",
            role=OWN, worker=OWN, result="hit miss"),
    histogram("rlhfd_stage_duration_seconds", ROLLOUT, DURATION_S,
              "Time per rollout stage (generate, environment, logprob, ref_logprob, value, reward, serialize); "
              "environment is the time in which a ticket waited for its environments alone.",
              stage="generate environment logprob ref_logprob value reward serialize"),
    histogram("rlhfd_train_phase_duration_seconds", TRAINER, DURATION_S,
              "Time per training phase (fetch, forward, backward, reduce, optimizer, publish: the wait for one).",
              phase="fetch forward backward reduce optimizer publish"),
    counter("rlhfd_stage_errors_total", ROLLOUT,
            "Rows without a result of a stage, by reason (timeout, exception, invalid).",
            stage="reward environment", reason="timeout exception invalid"),
    counter("rlhfd_environment_steps_total", ROLLOUT,
            "Responses that an environment answered, by result: their tool failed (tool_failed) or not (ok).",
            result="ok tool_failed"),
    histogram("rlhfd_turns", ROLLOUT, TURNS, "Responses of a row in an environment."),
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
            "Items set aside by reason: damaged in the arena, or without a field of the trainer's present settings "
            "(checksum), in a batch at which a trainer died twice (killed_trainer); refused before they were sealed, "
            "because of unknown weights (fingerprint), weights that were rolled back (rolled_back), an impossible size "
            "(invalid), fields whose lengths disagree (lengths), a mask that is not the mask of the sampled tokens "
            "(mask), a token that is not in the vocabulary (vocabulary), a number that is NaN or infinite "
            "(not_finite), any other error in a field (malformed).",
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

    # Evaluations on held-out prompts.
    counter("rlhfd_evaluations_total", BUFFER,
            "Evaluations by result (complete, abandoned: the weights were superseded or rolled back meanwhile).",
            result="complete abandoned"),
    counter("rlhfd_evaluation_prompts_total", BUFFER,
            "Held-out prompts by whether their evaluation gave a result (evaluated, failed).",
            result="evaluated failed"),
    gauge("rlhfd_evaluation_under_way_prompts", BUFFER, "Prompts of the evaluation under way (done, all); else 0.",
          state="done all"),
    gauge("rlhfd_evaluation_version", BUFFER, "Policy version of the last complete evaluation."),
    gauge("rlhfd_evaluation_pass_at_1_ratio", BUFFER,
          "Share of right responses in the last evaluation, by file and of all files.", file=_EVALUATED),
    gauge("rlhfd_evaluation_pass_at_k_ratio", BUFFER,
          "Probability that one of evaluation.pass_k responses is right in the last evaluation.", file=_EVALUATED),
    gauge("rlhfd_evaluation_reward_mean", BUFFER, "Mean reward in the last evaluation.", file=_EVALUATED),
    gauge("rlhfd_evaluation_response_length_mean_tokens", BUFFER, "Mean response length in the last evaluation.",
          file=_EVALUATED),
    gauge("rlhfd_evaluation_cut_ratio", BUFFER,
          "Share of responses of the last evaluation that were cut at their maximum length.", file=_EVALUATED),

    # Policy versions and weights.
    gauge("rlhfd_policy_version", "trainer rollout",
          "Policy version that the process holds; the trainer's is the newest.", role=OWN, worker=OWN),
    histogram("rlhfd_policy_staleness_versions", "buffer trainer", VERSIONS,
              "Versions between the policy that wrote an experience and the newest policy, at push and at train.",
              point="push train"),
    histogram("rlhfd_weight_sync_duration_seconds", "trainer rollout", DURATION_S,
              "Weight sync time by phase: publish, in a thread beside training if it is large, state, its part for the "
              "training state, load.", phase="publish state load"),
    counter("rlhfd_weight_sync_bytes_total", "trainer rollout", "Weight bytes moved (shm, ray).",
            transport="shm ray"),
    counter("rlhfd_remote_rank_bytes_total", TRAINER,
            "Bytes between a rank on another machine and the daemon's: rows of its batches; shards published and "
            "restored.", data="rows_received shards_sent shards_received"),
    counter("rlhfd_weight_sent_bytes_total", ROLLOUT,
            "Weight bytes sent to the other machines of a cluster, once to each, by kind: the whole version (whole), "
            "or its changes since the version that the machine held (difference).", kind="whole difference"),
    counter("rlhfd_weight_syncs_total", "trainer rollout",
            "Weight syncs by result (ok, mismatch, and refused: changes that did not lead to the published bytes, "
            "after which the whole version was sent).", result="ok mismatch refused"),
    event_time("rlhfd_weight_sync_last_success_timestamp_seconds", "trainer rollout",
               "Unix time of the last complete weight sync."),

    # Reward and learning; the gauges are rank 0's.
    histogram("rlhfd_reward", ROLLOUT, REWARD, "Reward of an experience.", source="function model"),
    counter("rlhfd_rewards_clipped_total", ROLLOUT, "Rows whose score, or a turn's, is beyond rollout.reward_clip."),
    gauge("rlhfd_reward_mean", TRAINER, "Mean reward of the last training batch.", source="function model"),
    gauge("rlhfd_reward_stddev", TRAINER, "Standard deviation of reward in the last training batch.",
          source="function model"),
    gauge("rlhfd_reward_function_mean", "trainer rollout",
          "Mean score of each of several reward functions and models, in a worker's last ticket and in "
          "the trainer's last batch, before its weight; with an environment also of one. Mean of "
          "each further number that a function returns, as FUNCTION.NUMBER.",
          role=OWN, worker=OWN, function=" ".join([*REWARD_LABELS, *NUMBER_LABELS])),
    counter("rlhfd_reward_numbers_left_out_total", ROLLOUT,
            "Further numbers of reward functions that are left out: no finite number, or beyond the number of names.",
            reason="invalid name"),
    counter("rlhfd_groups_total", ROLLOUT, "Prompt groups by whether their rewards differ (mixed, all_equal).",
            signal="mixed all_equal"),
    histogram("rlhfd_kl_nats", TRAINER, KL_NATS,
              "Estimated KL from the reference policy per experience, k3 estimator."),
    gauge("rlhfd_kl_mean_nats", TRAINER,
          "Estimated KL from the reference policy, mean over the tokens of the last batch, k3 estimator."),
    gauge("rlhfd_response_length_mean_tokens", TRAINER, "Mean response length in the last training batch."),
    gauge("rlhfd_entropy_nats", TRAINER, "Mean policy entropy of the last batch."),
    histogram("rlhfd_importance_ratio", TRAINER, RATIO,
              "Mean ratio of new to behaviour probability per experience."),
    gauge("rlhfd_padding_ratio", TRAINER, "Share of padding in the tokens of the last step's passes."),
    gauge("rlhfd_rank_imbalance_ratio", TRAINER,
          "Largest sum of squared row lengths of a rank in the last step as a multiple of the mean: of the rows leased "
          "to each rank, and of those that it trained; absent with one rank or several mini-batches.",
          rows="leased trained"),
    gauge("rlhfd_behaviour_ratio", TRAINER,
          "Ratio of the trainer's to the engine's probability of a token, over the last step (mean, min, max): for the "
          "same weights, or with rollout.log_probs = trainer for the present ones and those that sampled; absent where "
          "rows carry no log-probs of the engine.", stat="mean min max"),
    histogram("rlhfd_engine_gap_nats", "trainer rollout", GAP_NATS,
              "Difference of the engine's and the trainer's log-probs for the same weights, in nats a token: of each "
              "token of the probe of each version, of their mean where the engine alone holds the actor, and the mean "
              "of each row that is trained, with rollout.log_probs = trainer for the weights of rlhfd_behaviour_ratio.",
              point="probe train"),
    gauge("rlhfd_engine_gap_mean_nats", ROLLOUT, "Mean of these differences in the probe of a worker's version.",
          role=OWN, worker=OWN),
    counter("rlhfd_engine_probes_total", ROLLOUT,
            "Probes of an engine, one a version, by verdict: equal (ok), differs by more than rollout.engine_gap_nats "
            "(gap), unchanged since a version whose weights were others (stale).", verdict="ok gap stale"),
    gauge("rlhfd_behaviour_cut_ratio", TRAINER,
          "Share of these ratios that trainer.importance_correction truncated or masked in the last step."),
    gauge("rlhfd_clipped_ratio", TRAINER, "Share of trained tokens whose ratio was clipped in the last step."),
    gauge("rlhfd_cut_ratio", TRAINER,
          "Share of responses of the last training batch that were cut at their maximum length."),
    gauge("rlhfd_groups_without_signal_ratio", TRAINER,
          "Share of groups of the last training batch whose scores are equal; absent without groups."),
    gauge("rlhfd_step_updates", TRAINER,
          "Optimizer updates taken in the last step; fewer than trainer.epochs times trainer.mini_batches after a stop "
          "by trainer.target_kl, 0 in a step with nothing to train."),
    gauge("rlhfd_policy_kl_nats", TRAINER,
          "Estimated KL of the policy that sampled to the trained one, mean over the tokens of the last pass before "
          "its update, k3 estimator; trainer.target_kl bounds it."),
    gauge("rlhfd_kl_coef", TRAINER, "Weight of the KL to the reference in the loss of the last step."),
    gauge("rlhfd_reward_running_mean", TRAINER,
          "Running mean of scores over the steps; absent unless rollout.reward_scale is running."),
    gauge("rlhfd_reward_running_stddev", TRAINER,
          "Running deviation of scores, which divides those of the next version; absent unless rollout.reward_scale is "
          "running."),
    gauge("rlhfd_return_mean", TRAINER,
          "Running mean of returns over the tokens of the steps; absent without trainer.normalize_values."),
    gauge("rlhfd_return_stddev", TRAINER,
          "Running deviation of returns, the unit of the value loss; absent without trainer.normalize_values."),
    gauge("rlhfd_loss", TRAINER, "Loss of the last step (policy, value, kl, entropy, total).",
          kind="policy value kl entropy total"),
    gauge("rlhfd_gradient_norm", TRAINER, "Gradient norm of the last step before clipping."),
    gauge("rlhfd_learning_rate", TRAINER, "Learning rate of the last step."),
    counter("rlhfd_nonfinite_total", TRAINER, "Optimizer steps skipped because of NaN or infinity (loss, gradient).",
            where="loss gradient"),
    counter("rlhfd_checkpoints_total", TRAINER, "Checkpoints by result (ok, error).", result="ok error"),
    gauge("rlhfd_checkpoint_failures_since_success", TRAINER,
          "Checkpoints that could not be written since the last complete one."),
    histogram("rlhfd_checkpoint_duration_seconds", TRAINER, DURATION_S, "Time to write a checkpoint."),
    counter("rlhfd_checkpoint_wait_seconds_total", TRAINER,
            "Seconds that training waited for the write of a checkpoint: before a publish that would overwrite the "
            "version being written, and before the next checkpoint."),
    event_time("rlhfd_checkpoint_last_success_timestamp_seconds", TRAINER,
               "Unix time of the last complete checkpoint."),
    counter("rlhfd_recordings_total", TRAINER,
            "Results for the rows of recorded steps (trainer.record): kept, removed for newer ones or on a full disk, "
            "not kept as they exceed 4 GiB (too_large) or could not be written (failed).",
            result="kept removed too_large failed"),
    gauge("rlhfd_recording_bytes", TRAINER, "Bytes of the recorded rows on disk."),

    gauge("rlhfd_cluster_nodes", SUPERVISOR,
          "Nodes of the Ray cluster that belong to it (alive), or left it since the start (left); absent without one.",
          state="alive left"),
    gauge("rlhfd_cluster_actors", SUPERVISOR,
          "Actors of workers that run on a node (placed) or wait for one (pending); absent without a cluster.",
          state="pending placed"),
    gauge("rlhfd_cluster_actor_info", INFO,
          "Always 1, for each worker whose actor runs on a node of the cluster; node is its host name.",
          worker="", node="", address=""),
    gauge("rlhfd_tracker_up", SUPERVISOR, "Whether the process of a tracker runs.", tracker=_TRACKERS),
    counter("rlhfd_tracker_starts_total", SUPERVISOR, "Starts of the process of a tracker.", tracker=_TRACKERS),

    # Memory and messages. A channel is named after its receiver.
    gauge("rlhfd_shm_bytes", SUPERVISOR, "Shared memory mapped by kind (buffer, weights, metrics).",
          kind="buffer weights metrics"),
    gauge("rlhfd_shm_available_bytes", SUPERVISOR, "Free bytes on the shared memory file system."),
    gauge("rlhfd_torch_memory_bytes", "trainer rollout",
          "Torch allocator memory of a process on a GPU (allocated, reserved).",
          role=OWN, worker=OWN, state="allocated reserved"),
    counter("rlhfd_out_of_memory_total", "trainer rollout",
            "Calls on a GPU that ran out of its memory and were repeated with half the rows or tokens (train, pass, "
            "generate).", role=OWN, worker=OWN, during="train pass generate"),
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
