"""The cause of a slow or stopped run: the sentences of `rlhfd why`, and the process at fault for a standstill.

Pure: a view of the run in, text out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from pipeline.config.schema import Config
from pipeline.errors import counted
from pipeline.runtime.messages import is_evaluation
from pipeline.runtime.signals import stopped_text
from pipeline.supervisor.external import ExternalRank
from pipeline.supervisor.hangs import Observation, waits_for_rank
from pipeline.telemetry.engine_view import EngineView
from pipeline.telemetry.metrics import IDLE_STEPS
from pipeline.telemetry.window import Window

_LEAST_SUSPICIOUS_S, _MOST_SUSPICIOUS_S = 10.0, 60.0
_LEAST_SHARE = 0.02
_HELD_UP_SHARE = 0.4
_FULL_CACHE = 0.9
_CARD_WAITS = {
    "trainer": "waiting until the engines on its card sleep (rollout.sleep)",
    "rollout": "waiting for its turn on the card, on which the trainer steps (rollout.sleep)",
}
_WAITS = {
    "wait_ticket_full": "waiting because the buffer is full",
    "wait_ticket_staleness": "waiting for the next version (buffer.max_staleness)",
    "wait_ticket_paused": "waiting for `rlhfd resume`",
    "asleep": "waiting for a ticket, its engine asleep (rollout.sleep)",
}

Shares = Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class ProcessView:
    """One process: the observation of it, its time by activity, and the state of its slot.

    Attributes:
        observed: The process, as hang detection sees it.
        state: The slot's state: starting, ready, backoff, ...
        state_since_s: Monotonic time of its start; in backoff, of its next start.
        shares: Share of the last minute by activity.
        last_line: Error of the process, else the last line that it printed.
        engine: State of a worker's engine; None if it shows none.
        node: Name and address of the node of a cluster on which a worker's actor runs; "" without one.
    """

    observed: Observation
    state: str
    state_since_s: float
    shares: Shares
    last_line: str = ""
    engine: EngineView | None = None
    node: str = ""

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for another process."""
        activity = self.observed.progress.activity
        return activity.startswith("wait_") or activity == "asleep" or self.observed.role == "buffer"

    @property
    def waits_for_card(self) -> bool:
        """Whether it waits for its turn on a card (`rollout.sleep`)."""
        return self.observed.progress.activity == "wait_card"


@dataclasses.dataclass(frozen=True)
class RunView:
    """A run at one moment.

    Attributes:
        now_s: Monotonic time.
        state: starting, ready, paused, stuck or draining.
        config: The configuration in force.
        quiet_s: Time without progress although the run could have made some.
        external_ranks: The ranks of an external trainer.
        evaluation: Done and all prompts of an evaluation under way; 0 and 0 without one.
        idle_steps: Newest steps in a row in which no token was trained.
        lost_checkpoints: Checkpoints that could not be written since the last complete one.
        nodes: Nodes of the cluster on which workers compute; 0 without one.
        nodes_left: Name and address of each node that left the cluster lately, and the seconds since.
    """

    now_s: float
    state: str
    processes: Sequence[ProcessView]
    ready_items: int
    leases_active: int
    config: Config
    quiet_s: float = 0.0
    external_ranks: Sequence[ExternalRank] = ()
    evaluation: tuple[int, int] = (0, 0)
    idle_steps: int = 0
    lost_checkpoints: int = 0
    nodes: int = 0
    nodes_left: Sequence[tuple[str, float]] = ()

    def of(self, role: str) -> list[ProcessView]:
        """Return the processes of a role."""
        return [process for process in self.processes if process.observed.role == role]


class ShareWindow(Window[Mapping[tuple[str, ...], float]]):
    """Time by activity of each process over a window, from the seconds so far by (role, worker, activity)."""

    def shares(self, role: str, worker: str | None = None) -> dict[str, float]:
        """Return the share of each activity, largest first; of one worker, or of all processes of a role together."""
        if len(self.kept) < 2:
            return {}
        (_, first), (_, last) = self.kept[0], self.kept[-1]
        spent: dict[str, float] = {}
        for key, seconds in last.items():
            if key[0] == role and worker in (None, key[1]):
                spent[key[2]] = spent.get(key[2], 0.0) + seconds - first.get(key, 0.0)
        total = sum(spent.values())
        ordered = sorted(spent.items(), key=lambda item: (-item[1], item[0]))
        return {name: seconds / total for name, seconds in ordered if seconds > 0} if total > 0 else {}


def explain(run: RunView, role_shares: Mapping[str, Shares]) -> list[str]:
    """Return the cause of a slow or stopped run, at most five sentences, the most important first."""
    sentences = [_absent(run, process) for process in run.processes if process.state in ("starting", "backoff")]
    sentences += [_failed(process) for process in run.processes if process.state == "failed"]
    sentences += [_suspect(run, process) for process in suspects(run)]
    if run.state == "paused":
        sentences.insert(0, "The run is paused: no tickets are issued until `rlhfd resume`.")
    if run.nodes_left:
        sentences.append(_left_nodes(run))
    if run.lost_checkpoints:
        last = "checkpoint" if run.lost_checkpoints == 1 else f"{run.lost_checkpoints:,} checkpoints"
        sentences.append(
            f"The last {last} could not be written, the log has the reason: a crash of the machine would lose all "
            "steps since the newest that was (docs/runbook.md#rlhfdcheckpointfailed)."
        )
    if run.idle_steps >= IDLE_STEPS:
        sentences.append(
            f"Nothing to learn: the last {run.idle_steps:,} steps trained no token and moved no weight; in GRPO all "
            "rewards of each group are equal, or with trainer.mask_cut_responses all responses are cut "
            "(docs/runbook.md#rlhfdnothingtolearn)."
        )
    if run.evaluation[1]:
        done, prompts = run.evaluation
        sentences.append(f"An evaluation has {done:,} of {prompts:,} held-out prompts; the next step follows it.")
    sentences += [_gone(run, rank) for rank in run.external_ranks if rank.state == "left"]
    if run.state == "draining":
        busy = [process for process in run.processes if process.state == "draining"]
        sentences.append(f"The run drains: {_all_at(run, busy) if busy else 'the buffer finishes'}.")
    elif run.state != "starting" and any(process.observed.is_ready for process in run.processes):
        sentences.append(_bottleneck(run))
        sentences += _held_up_engine(run)
    summaries = [f"{role} {_shown(shares, role)}" for role, shares in role_shares.items() if shares]
    if summaries:
        sentences = [*sentences[:4], f"The last minute: {'; '.join(summaries)}."]
    return sentences[:5]


def suspects(run: RunView) -> list[ProcessView]:
    """Return the ready processes without a heartbeat, or stopped; not those that only wait for another rank."""
    observed = [process.observed for process in run.processes]
    found = [
        process
        for process in run.processes
        if process.observed.is_ready
        and (process.observed.is_stopped or run.now_s - process.observed.progress.beat_s > _suspicious_s(run))
        and not waits_for_rank(process.observed, observed)
    ]
    return sorted(found, key=lambda process: process.observed.progress.beat_s)


def culprit(run: RunView) -> ProcessView | None:
    """Return the process at fault for a standstill: without a heartbeat, else the longest busy one, else the buffer.

    If every process waits for another one, a message was lost; a new buffer connects to all peers and requests again.
    If one waits for its turn on a card, a process of the other role holds it.
    """
    ready = [process for process in run.processes if process.observed.is_ready]
    busy = sorted((p for p in ready if not p.is_waiting), key=lambda p: p.observed.progress.since_s)
    buffers = [process for process in ready if process.observed.role == "buffer"]
    return next(iter([*suspects(run), *busy, *_card_holders(ready), *buffers]), None)


def _card_holders(ready: Sequence[ProcessView]) -> list[ProcessView]:
    """Return the processes that can hold the turn for which others wait: a rank, or a worker, one awake first."""
    waiting = {process.observed.role for process in ready if process.waits_for_card}
    holders = [p for p in ready if p.observed.role in ("trainer", "rollout") and not p.waits_for_card]
    found = [p for p in holders if waiting - {p.observed.role}]
    return sorted(found, key=lambda p: (p.observed.progress.activity == "asleep", p.observed.progress.since_s))


def waits_for_external_trainer(run: RunView) -> bool:
    """Return whether the run waits for an external trainer: it holds batches, or takes none although rows are ready."""
    workers = run.of("rollout")
    held_up = all(process.observed.progress.activity.startswith("wait_ticket") for process in workers)
    is_there = run.leases_active > 0 or run.ready_items >= run.config.sample_batch_size
    return run.config.trainer.kind == "external" and (is_there or held_up)


def _absent(run: RunView, process: ProcessView) -> str:
    name = process.observed.name
    if process.state == "backoff":
        return f"{name} ended and restarts in {duration(max(0.0, process.state_since_s - run.now_s))}: " + (
            process.last_line or "it printed nothing."
        )
    if process.waits_for_card:
        then = "tries compiled layers" if process.observed.role == "trainer" else "loads its engine"
        return f"{_named(process)} waits for its turn on the card before it {then} (rollout.sleep)."
    last_line = f"; its last line: {process.last_line}" if process.last_line else ""
    stopped = f", and is {_stopped(process)}" if process.observed.is_stopped else ""
    return f"{_named(process)} has been starting for {duration(run.now_s - process.state_since_s)}{stopped}{last_line}."


def _failed(process: ProcessView) -> str:
    return f"{process.observed.name} has failed and is not started again: {process.last_line or 'it printed nothing.'}"


def _suspect(run: RunView, process: ProcessView) -> str:
    silent_s = run.now_s - process.observed.progress.beat_s
    how = f"is {_stopped(process)}: it" if process.observed.is_stopped else "hangs or is very slow: it"
    limit_s = run.config.daemon.hang_timeout_s
    then = f"; after {duration(limit_s)} it is killed and restarted" if limit_s else ""
    return f"{_named(process)} {how} has made no progress for {duration(silent_s)} in {_task(process)}{then}."


def _gone(run: RunView, rank: ExternalRank) -> str:
    name = "The external trainer" if len(run.external_ranks) == 1 else f"Rank {rank.rank} of the external trainer"
    return f"{name} (pid {rank.pid}) has left, {duration(run.now_s - rank.since_s)} ago."


def _left_nodes(run: RunView) -> str:
    (name, ago_s), *others = run.nodes_left
    more = f" and {len(others)} more nodes" if len(others) > 1 else f" and {others[0][0]}" if others else ""
    rest = counted(run.nodes, "node remains", "nodes remain")
    return f"Node {name}{more} left the cluster, the last one {duration(ago_s)} ago; {rest}."


def _suspicious_s(run: RunView) -> float:
    """Return the time without a heartbeat after which a process is named.

    An idle process beats four times a second, but a forward pass of a large model on a CPU takes many seconds.
    """
    limit_s = run.config.daemon.hang_timeout_s
    if not limit_s:
        return _MOST_SUSPICIOUS_S
    return min(max(limit_s / 10, min(_LEAST_SUSPICIOUS_S, limit_s / 2)), _MOST_SUSPICIOUS_S)


def _stopped(process: ProcessView) -> str:
    return stopped_text(process.observed.pid, process.observed.stopped_by)


def _bottleneck(run: RunView) -> str:
    trainers, workers = ([p for p in run.of(role) if p.observed.is_ready] for role in ("trainer", "rollout"))
    rows = f"{run.ready_items:,} of {run.config.sample_batch_size:,} rows are ready"
    working = [process for process in workers if not process.is_waiting]
    if run.config.trainer.kind == "external":
        if not waits_for_external_trainer(run):
            return f"The external trainer waits for data: {rows}; {_all_at(run, working or workers)}."
        if run.leases_active:
            held = counted(run.leases_active, "batch", "batches")
            return f"The run waits for the external trainer, which holds {held}; {rows}."
        if connected := [rank for rank in run.external_ranks if rank.state == "connected"]:
            return f"The run waits for the external trainer (pid {connected[0].pid}) to take a batch; {rows}."
        return f"The run waits for an external trainer to connect and take a batch; {rows}."
    if not trainers:
        return f"No trainer is ready; {_all_at(run, working or workers)}; {rows}."
    waiting = [process for process in trainers if process.is_waiting]
    if len(waiting) == len(trainers):
        names = " and ".join(process.observed.name for process in waiting)
        verb = "waits" if len(waiting) == 1 else "wait"
        if any(process.waits_for_card for process in waiting):
            awake = [process for process in workers if process.observed.progress.activity != "asleep"]
            return f"{names} {verb} until the engines on the card sleep: {_all_at(run, working or awake or workers)}."
        share = waiting[0].shares.get("wait_data")
        lately = f" ({share:.0%} of the last minute)".replace("%", " %") if share is not None else ""
        return f"{names} {verb} for data{lately}: {rows}; {_all_at(run, working or workers)}."
    training = [process for process in trainers if not process.is_waiting]
    if workers and not working:
        return f"The workers wait for the trainer: {_all_at(run, training)}; {_all_at(run, workers)}."
    return f"No process waits: {_all_at(run, [*training, *working])}; {rows}."


def _held_up_engine(run: RunView) -> list[str]:
    """Return what holds up the engine of the worker that is held up most: its reward, its cache, or a lack of tickets.

    Without a sentence for workers that wait: these have one already.
    """
    working = (process for process in run.of("rollout") if process.observed.is_ready and not process.is_waiting)
    found = [hold for process in working if (hold := _hold_up(process)) is not None]
    return [max(found)[1]] if found else []


def _hold_up(process: ProcessView) -> tuple[float, str] | None:
    """Return how much the engine of a working worker is held up, 0 to 1, and by what; None if it is not."""
    name, engine, reward = process.observed.name, process.engine, process.shares.get("reward", 0.0)
    if engine is None:
        return None
    in_hand = engine.running + engine.waiting
    if reward > _HELD_UP_SHARE:
        return reward, (
            f"The reward holds the engine of {name} up: it takes {_percent(reward)} of the worker's time, with "
            f"{in_hand:,} responses in the engine; raise rollout.reward_processes, or make it faster."
        )
    if engine.waiting and (engine.cache_ratio > _FULL_CACHE or engine.preemptions):
        lost = f", {engine.preemptions:,} lost their place in the last minute" if engine.preemptions else ""
        return engine.waiting / in_hand, (
            f"The cache of the engine of {name} is full ({_percent(engine.cache_ratio)}): {engine.running:,} responses "
            f"run, {engine.waiting:,} wait{lost}; raise rollout.cache_bytes, or lower rollout.max_length."
        )
    # An engine of whole tickets has the room of those that it holds, and of one response between two tickets.
    if engine.room > 1 and in_hand < _HELD_UP_SHARE * engine.room:
        return 1 - in_hand / engine.room, (
            f"The engine of {name} lacks tickets: {in_hand:,} of {engine.room:,} responses are in hand; raise "
            "buffer.max_staleness, buffer.sample_batch_size or rollout.tickets_ahead, or lower rollout.workers."
        )
    return None


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def _all_at(run: RunView, processes: Sequence[ProcessView]) -> str:
    """Return the activities of some processes; of many, the two that have been at theirs longest."""
    longest = sorted(processes, key=lambda process: process.observed.progress.since_s)
    more = f" and {len(longest) - 2} more" if len(longest) > 2 else ""
    return ", ".join(_at(run, process) for process in longest[:2]) + more or "no worker is ready"


def _at(run: RunView, process: ProcessView) -> str:
    since_s = process.observed.progress.since_s
    if process.is_waiting:
        return f"{_named(process)} is {_waiting(process.observed.progress.activity, process.observed.role)}"
    return f"{_named(process)} has been in {_task(process)} for {duration(run.now_s - since_s)}"


def _task(process: ProcessView) -> str:
    progress = process.observed.progress
    unit = {"rollout": "ticket", "trainer": "lease"}.get(process.observed.role)
    on = f" on {unit} {progress.working_on:,}" if unit and progress.working_on >= 0 else ""
    on = " on held-out prompts" if is_evaluation(progress.working_on) else on
    return f"{progress.activity or 'other'}{on}"


def _named(process: ProcessView) -> str:
    node = f", actor on node {process.node}" if process.node else ""
    return f"{process.observed.name} (pid {process.observed.pid}{node})"


def _shown(shares: Shares, role: str) -> str:
    named = [f"{share * 100:.0f} % {_waiting(name, role)}" for name, share in shares.items() if share >= _LEAST_SHARE]
    return ", ".join(named)


def _waiting(activity: str, role: str) -> str:
    if activity == "wait_data":
        return {"rollout": "waiting for a ticket", "buffer": "waiting for messages"}.get(role, "waiting for data")
    if activity == "wait_card":
        return _CARD_WAITS.get(role, activity)
    return _WAITS.get(activity, activity)


def duration(seconds: float, *, whole: bool = False) -> str:
    """Return a duration as text: ``8.3 s``, ``41 s``, ``2 min 05 s``, ``3 h 07 min``.

    Args:
        seconds: The duration, 0 or more.
        whole: Cut to whole seconds; else they are rounded, and below 10 s they have one decimal.
    """
    if seconds < 10 and not whole:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds) if whole else round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
