"""The children of one instance: one slot each, started, watched, restarted with backoff."""

from __future__ import annotations

import dataclasses
import logging
import random
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from pipeline.config.schema import Config
from pipeline.errors import ExitCode, GaveUpError
from pipeline.prompts.source import prompts_at_most
from pipeline.runtime.child_process import LaunchSpec, LocalChild, Starter, cache_variables, child_environment, executed
from pipeline.runtime.forkserver import Forkserver, forkserver_environment
from pipeline.runtime.forkserver_refusal import ForkserverRefusal, conditions_of
from pipeline.runtime.lock import engines_socket
from pipeline.runtime.role import ClusterNode, Report
from pipeline.runtime.vllm_variables import vllm_environment
from pipeline.sort_digits import PROMPT_COUNT
from pipeline.storage.control_groups import memory_groups
from pipeline.supervisor.cluster_nodes import ClusterNodes
from pipeline.supervisor.placement import Devices
from pipeline.supervisor.restarts import RestartPolicy
from pipeline.telemetry import log_lines
from pipeline.telemetry.metrics import BY_NAME, START
from pipeline.telemetry.slab import MetricsSlab

SlotState = Literal["idle", "waiting", "starting", "ready", "draining", "backoff", "failed", "ended"]

_ENGINE_FORKSERVER = "pipeline.runtime.engine_forkserver"

_FORKED = ("trainer", "rollout", "setup")
"""Roles that load torch: they are forked from the forkserver, which has loaded it."""

FORKSERVERS = ("forkserver", "engines")
"""The forkserver of roles, and that of vLLM's engines (`pipeline.runtime.engine_forkserver`)."""

_LATE_STARTS = 2
"""Late starts in a row after which the slot has failed: a single one may have been bad luck."""

_OOM_KILL_S = 60.0
"""Longest time from the kernel's count of a kill to the end of the process."""

log = logging.getLogger(__name__)


@dataclasses.dataclass
class Slot:
    """The slot of one child: its present child, and the history of the earlier ones.

    Attributes:
        error: The error that the child reported, one line.
        finished: Whether the child reported that its work is complete.
        unusable: Whether a child reported that its output is of no use; the slot is not started again.
        last_exit: Exit code of the last child, or minus its signal; None before the first exit.
        due_s: Monotonic time of the next start, in backoff.
        lines: Lines that the child has printed.
        ended_by: Cause of the kill, if known: ``"watchdog"``, ``"group"`` (another rank died), ``"oom"``.
        from_outside: Whether the last child, or a process of its own, was killed or stopped by another program.
        working_on: Ticket or lease of the last child when it died, -1 for none.
        last_pid: The last child's pid.
        is_late: Whether the watchdog kills the child because it was not ready in time.
        late_starts: Children in a row that were killed for that reason.
        ready_s: Monotonic time since which the child has been ready, None before.
        is_pending: Whether the child's Ray actor waits for resources, or a trainer rank for those of other machines: it
            is not late, and a worker is not required for readiness.
        device: Name of the device that the child computes on; empty before it is ready, or if it computes nothing.
        node: Node of a Ray cluster on which the child's actor runs; None before it is placed, or without a cluster.
        lived_s: Time from ready to the last progress of the last child; the hang at its end does not count.
    """

    role: str
    index: int
    devices: Devices
    policy: RestartPolicy
    state: SlotState = "idle"
    child: LocalChild | None = None
    generation: int = 0
    restarts: int = 0
    started_s: float = 0.0
    due_s: float = 0.0
    last_exit: int | None = None
    error: str = ""
    last_line: str = ""
    finished: bool = False
    unusable: bool = False
    lines: int = 0
    ended_by: str = ""
    from_outside: bool = False
    working_on: int = -1
    last_pid: int = 0
    is_late: bool = False
    late_starts: int = 0
    ready_s: float | None = None
    is_pending: bool = False
    device: str = ""
    node: ClusterNode | None = None
    lived_s: float = 0.0

    @property
    def name(self) -> str:
        """Name of the slot in logs."""
        return self.role if self.role in ("buffer", "setup", *FORKSERVERS) else f"{self.role}-{self.index}"

    @property
    def cause(self) -> str:
        """Cause of the child's end as far as the child said it: its error, else its last line.

        A line of its log below a warning tells what it did before, and is no cause.
        """
        line = log_lines.parse(self.last_line, f"{self.role}-{self.index}")
        is_cause = not line.logger or log_lines.LEVELS[line.level] <= log_lines.LEVELS["warning"]
        return self.error or (self.last_line if is_cause else "") or "it reported no error"

    @property
    def works(self) -> bool:
        """Whether its role takes part in the run itself, and so has a slot in the metrics."""
        return self.role not in ("setup", *FORKSERVERS)

    @property
    def shown_state(self) -> str:
        """The state for display: a slot that waits for the forkserver is starting."""
        return "starting" if self.state == "waiting" else self.state

    @property
    def alive(self) -> bool:
        """Whether a child runs in the slot."""
        return self.child is not None


@dataclasses.dataclass(eq=False)
class Fleet:
    """Starts and watches children; `on_end` decides the consequence of an exit for the instance.

    Attributes:
        folder: The instance's folder in shared memory.
        slab: The instance's metrics.
        config: The configuration in force; `reload` replaces it.
        clock: Monotonic seconds.
        on_reaped: Called when a child has ended, or an external trainer has left, before its gauges are removed.
        on_end: Called with the exit code of a child that has ended.
        on_change: Called at a change of a slot's state.
        on_line: Called with each line of a child.
        prompts: At least the number of prompts in one epoch, counted once; 0 if unknown.
        slots: All slots, in the order of their start.
        nodes: Nodes of the Ray cluster on which workers compute; none without one.
    """

    folder: str
    slab: MetricsSlab
    config: Config
    _: dataclasses.KW_ONLY
    clock: Callable[[], float]
    on_reaped: Callable[[], None]
    on_end: Callable[[Slot, int], None]
    on_change: Callable[[Slot], None]
    on_line: Callable[[Slot, str], None]
    slots: list[Slot] = dataclasses.field(default_factory=list, init=False)
    nodes: ClusterNodes = dataclasses.field(default_factory=ClusterNodes, init=False)

    def __post_init__(self) -> None:
        self._metrics = self.slab.writer("supervisor")
        self._forkserver = Forkserver()
        self._refusal = ForkserverRefusal(Path(self.config.daemon.state_dir))
        # None yet: those of the embedded task, which its setup makes.
        self.prompts = prompts_at_most(self.config.prompts) or PROMPT_COUNT
        self._forkserver_slot = self.add("forkserver", 0, Devices("", ()))
        self._oom_kills = self._newer_oom_kills = kill_count()
        self._oom_kills_s = self.clock()

    def tick(self, now_s: float) -> None:
        """Take the kernel's kills of minutes ago for kills of other processes."""
        if now_s >= self._oom_kills_s + _OOM_KILL_S:
            self._oom_kills, self._newer_oom_kills = self._newer_oom_kills, kill_count()
            self._oom_kills_s = now_s

    def add(self, role: str, index: int, devices: Devices) -> Slot:
        """Add a slot; no child runs in it yet."""
        slot = Slot(role, index, devices, RestartPolicy(self.config.daemon, random.Random()))
        self.slots.append(slot)
        if slot.works:
            # Counters start at 0: Prometheus sees no increase in a counter that appears as 1.
            for reason in BY_NAME["rlhfd_process_exits_total"].labels["reason"]:
                self._metrics.counter("rlhfd_process_exits_total", role=role, reason=reason)
        return slot

    def reload(self, config: Config) -> None:
        """Apply a reloaded configuration from now on: time limits, and the bounds of restarts."""
        self.config = config
        for slot in self.slots:
            slot.policy.limit(config.daemon)

    def of(self, *roles: str) -> Iterator[Slot]:
        """Yield the slots of some roles."""
        return (slot for slot in self.slots if slot.role in roles)

    def start(self, slot: Slot) -> None:
        """Start a child in a slot; a role that is forked waits until the forkserver is ready.

        Raises:
            GaveUpError: If this machine has no free process or file descriptor.
        """
        if slot.role == "forkserver" and (reason := self._refusal.recall(self._conditions())):
            log.warning("the forkserver is not started, roles are started without it, as at an earlier start: %s; "
                        "another attempt after a change of packages or variables, or without %s",
                        reason, self._refusal.path)  # fmt: skip
            slot.state, slot.error = "failed", reason
            self.on_change(slot)
            return
        if not self._can_start(slot):
            slot.state = "waiting"
            self.on_change(slot)
            return
        forked = slot.role in _FORKED and self._forkserver_slot.state == "ready"
        before, slot.generation = slot.generation, self._next_generation(slot)
        if slot.works:
            self.slab.begin(slot.role, slot.index, activity=START)
        try:
            slot.child = self._child(slot, forked=forked)
        except OSError as error:
            if not forked or not isinstance(error, ConnectionError | TimeoutError):
                # No process or descriptor is free: a peer of this child would wait forever.
                raise GaveUpError(f"{slot.name} cannot be started: {error}") from error
            log.warning("the forkserver does not answer and is replaced, %s waits for the next: %s", slot.name, error)
            slot.generation = before
            if slot.works:
                self.slab.fold(slot.role, slot.index)
            slot.state = "waiting"
            self._forkserver_slot.state = "draining"
            self.signal([self._forkserver_slot], signal.SIGKILL)
        else:
            self._started(slot)
        self.on_change(slot)

    def _next_generation(self, slot: Slot) -> int:
        """Return the generation of the next start.

        A rank that joins running ranks reuses theirs; the first one starts a new one.
        """
        if slot.role != "trainer":
            return slot.generation + 1
        running = [rank.generation for rank in self.alive("trainer")]
        return running[0] if running else max(rank.generation for rank in self.of("trainer")) + 1

    def _started(self, slot: Slot) -> None:
        if slot.works:
            self._metrics.counter("rlhfd_process_starts_total", role=slot.role).inc()
        now_s = self.clock()
        slot.policy.started(now_s)
        slot.state, slot.started_s, slot.error, slot.finished = "starting", now_s, "", False
        slot.ended_by, slot.working_on, slot.last_line, slot.is_late = "", -1, "", False
        slot.from_outside = False
        slot.ready_s, slot.is_pending, slot.device, slot.node = None, False, "", None

    def _child(self, slot: Slot, *, forked: bool) -> LocalChild:
        return LocalChild(
            self._starter(slot, forked=forked),
            on_report=lambda report: self._report(slot, report),
            on_line=lambda line: self._line(slot, line),
            on_exit=lambda code: self._ended(slot, code),
        )

    def _environment(self, slot: Slot) -> dict[str, str]:
        config = self.config
        threads = {"trainer": config.trainer.threads, "rollout": config.rollout.threads}.get(slot.role, 1)
        environment = child_environment(gpu=slot.devices.gpu, threads=threads)
        return environment | cache_variables(Path(config.daemon.state_dir), environment)

    def _conditions(self) -> str:
        return conditions_of(self._environment(self._forkserver_slot), self.config.model.actor)

    def _starter(self, slot: Slot, *, forked: bool) -> Starter:
        name, environment = self.config.daemon.name, self._environment(slot)
        if slot.role == "forkserver":
            return self._forkserver.starter(name, self.config.model.actor, environment)
        if slot.role == "engines":
            arguments = [str(engines_socket(Path(self.folder))), name]
            variables = vllm_environment(forkserver_environment(environment), on_cpu=not slot.devices.gpu)
            return executed(_ENGINE_FORKSERVER, arguments, variables)
        spec = LaunchSpec(slot.role, slot.index, self.folder, slot.generation, self.prompts, list(slot.devices.cpus))
        text = msgspec.json.encode(spec).decode()
        if forked:
            return self._forkserver.forked(text, environment)
        return executed("pipeline.runtime.child_entry", [text], environment)

    def retry(self, slot: Slot) -> float | None:
        """Plan the next start of a slot whose child died; return the wait in s, or None if the slot has failed."""
        hopeless = slot.unusable or slot.late_starts >= _LATE_STARTS
        delay_s = None if hopeless else slot.policy.died(self.clock(), slot.lived_s)
        if delay_s is None:
            slot.state = "failed"
        else:
            slot.state, slot.due_s = "backoff", self.clock() + delay_s
            slot.restarts += 1
        self.on_change(slot)
        return delay_s

    def restart_now(self, slot: Slot) -> None:
        """Plan an immediate start of a slot whose child was not at fault."""
        slot.state, slot.due_s = "backoff", self.clock()
        slot.restarts += 1
        self.on_change(slot)

    def due(self) -> Iterator[Slot]:
        """Yield the slots whose next start is due."""
        now_s = self.clock()
        for slot in self.slots:
            if (slot.state == "backoff" and slot.due_s <= now_s) or (slot.state == "waiting" and self._can_start(slot)):
                yield slot

    def _can_start(self, slot: Slot) -> bool:
        """Return whether the forkserver is ready; once it has failed for good, roles are executed as new programs."""
        return slot.role not in _FORKED or self._forkserver_slot.state in ("ready", "failed")

    def close(self) -> None:
        """End the forkservers."""
        self.signal(self.of(*FORKSERVERS), signal.SIGKILL)
        self._forkserver.close()

    def signal(self, slots: Iterable[Slot], number: signal.Signals) -> None:
        """Send a signal to the children in these slots."""
        for slot in slots:
            if slot.child is not None:
                slot.child.signal(number)

    def kill_group(self, slots: Iterable[Slot]) -> None:
        """Kill ranks that cannot continue without another rank."""
        for slot in slots:
            slot.ended_by = slot.ended_by or "group"
            # No longer a starting rank: a rank that joined it now would wait for the dead.
            slot.state = "draining"
            self.signal([slot], signal.SIGKILL)

    def all_ready(self) -> bool:
        """Return whether every role but the setup is ready; a pending or failed rollout slot only degrades a run."""
        required = [
            slot
            for slot in self.slots
            if slot.works and slot.state != "failed" and not (slot.role == "rollout" and slot.is_pending)
        ]
        return all(slot.state == "ready" for slot in required) and any(slot.role == "rollout" for slot in required)

    def alive(self, *roles: str) -> list[Slot]:
        """Return the slots of these roles (all, if none is named) in which a child runs."""
        return [slot for slot in self.slots if slot.alive and (not roles or slot.role in roles)]

    def _report(self, slot: Slot, report: Report) -> None:
        if report.error:
            slot.error = report.error
        if report.progress:
            self.on_line(slot, report.progress)
        if report.state == "finished":
            slot.finished = True
        if report.state == "unusable":
            slot.unusable = True
            if slot.role == "forkserver":
                self._refusal.remember(self._conditions(), report.error)
        slot.from_outside |= report.killed
        if report.node is not None:
            self.nodes.heard(report.node, self.clock())
        if report.placed_on is not None:
            slot.node = report.placed_on
            self.nodes.placed(slot.name, slot.node)
        if report.state in ("pending", "placed"):
            slot.is_pending = report.state == "pending"
            # The time limit of the start runs from here on.
            slot.started_s = self.clock()
        if report.state == "ready":
            slot.state, slot.is_late, slot.ready_s = "ready", False, self.clock()
            slot.device = report.device
            startup_s = slot.ready_s - slot.started_s
            if slot.works:
                self._metrics.histogram("rlhfd_process_startup_seconds", role=slot.role).observe(startup_s)
            pid, device = slot.child.pid if slot.child else 0, [slot.device] if slot.device else []
            event = "ready: process=%s pid=%d startup_s=%.1f" + " device=%s" * len(device)
            log.info(event, slot.name, pid, startup_s, *device)
            self.on_change(slot)

    def _line(self, slot: Slot, line: str) -> None:
        slot.last_line = line
        slot.lines += 1
        self.on_line(slot, line)

    def _ended(self, slot: Slot, code: int) -> None:
        # The fold removes its gauges: read them a last time.
        self.on_reaped()
        booted = slot.state != "starting"
        slot.late_starts = slot.late_starts + 1 if slot.is_late else 0
        slot.last_pid = slot.child.pid if slot.child is not None else 0
        slot.lived_s = self._lived_s(slot)
        slot.child, slot.last_exit, slot.state = None, code, "ended"
        if slot.role in FORKSERVERS and not booted and code > 0:
            # A module that it cannot load, its forks cannot load either: they report the error.
            slot.unusable = True
        if slot.works:
            slot.working_on = self.slab.progress(slot.role, slot.index).working_on
            self.slab.fold(slot.role, slot.index)
            kills, before = kill_count(), self._oom_kills
            # Where the kernel does not count its kills, it may have been this one.
            by_kernel = None if kills is None or before is None else kills > before
            killed = code == -signal.SIGKILL and not slot.ended_by
            self._oom_kills = self._newer_oom_kills = kills
            if killed and by_kernel:
                slot.ended_by = "oom"
                # A kill is of one child; the others may be of those that are reaped next.
                self._oom_kills = (before or 0) + 1
            slot.from_outside = (slot.from_outside or killed) and by_kernel is False
            reason = exit_reason(code, booted=booted, ended_by=slot.ended_by)
            self._metrics.counter("rlhfd_process_exits_total", role=slot.role, reason=reason).inc()
        self.on_end(slot, code)

    def _lived_s(self, slot: Slot) -> float:
        if slot.ready_s is None:
            return 0.0
        moved_s = self.slab.progress(slot.role, slot.index).beat_s if slot.works else self.clock()
        return max(0.0, moved_s - slot.ready_s)


def exit_reason(code: int, *, booted: bool, ended_by: str = "") -> str:
    """Return the label ``reason`` of an exit."""
    if ended_by in ("watchdog", "oom"):
        return ended_by
    if code == ExitCode.OK:
        return "clean"
    if code < 0:
        return "signal"
    return "error" if booted else "boot"


_VMSTAT = Path("/proc/vmstat")


def kill_count() -> int | None:
    """Return the number of processes that the kernel's OOM killer has killed so far; None if it is not known."""
    for path in _counters():
        try:
            fields = dict(line.split() for line in path.read_text().splitlines())
            return int(fields["oom_kill"])
        except (OSError, ValueError, KeyError):
            continue
    return None


def _counters() -> list[Path]:
    """Return the files that may hold the count: of a control group (version 2, version 1), or of the machine."""
    return [*(group / name for group in memory_groups() for name in ("memory.events", "memory.oom_control")), _VMSTAT]
