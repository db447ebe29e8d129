"""The supervisor: prepares the instance, starts its processes, keeps them running, and ends them together."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import faulthandler
import importlib.util
import logging
import os
import platform
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline import sort_digits
from pipeline.buffer.sizing import checked_layout
from pipeline.config import user_modules
from pipeline.config.identity import run_name
from pipeline.config.load import LoadedConfig
from pipeline.config.losses import engine_is_forked
from pipeline.config.schema import Config
from pipeline.config.vllm_release import problem_of_vllm
from pipeline.errors import ConfigError, ExitCode, RlhfdError
from pipeline.runtime.child_process import allow_descriptors, remove_older_caches
from pipeline.runtime.control import serve_control
from pipeline.runtime.lifeline import adopt_orphans, end_descendants, reap_orphans
from pipeline.runtime.lock import InstanceLock, InstanceRecord, SharedMemoryLock, StateLock, shm_directory
from pipeline.runtime.pause import Pause
from pipeline.runtime.role import count_warnings
from pipeline.runtime.run_start import begin_run, forgotten_if_refused, open_run
from pipeline.runtime.signals import hold_signals, outlive_user_signals, release_signals
from pipeline.runtime.transport import BUFFER, Outbox
from pipeline.runtime.workspace import Workspace
from pipeline.storage.truncation import Sizes
from pipeline.supervisor import notes, placement
from pipeline.supervisor.capacity.choices import Choices, decided
from pipeline.supervisor.capacity.disk import disk_notes
from pipeline.supervisor.exits import ExitHandler, death_of
from pipeline.supervisor.fleet import FORKSERVERS, Fleet, Slot
from pipeline.supervisor.inputs_watch import InputsWatch
from pipeline.supervisor.live import LiveView
from pipeline.supervisor.page import PageData
from pipeline.supervisor.placement import Devices
from pipeline.supervisor.reload import Hangup, Reload
from pipeline.supervisor.shutdown import Shutdown
from pipeline.supervisor.status import InstanceStatus
from pipeline.supervisor.systemd import ExtendedStart, Notifier, Service
from pipeline.supervisor.watchdog import Watchdog
from pipeline.supervisor.web.access import Access
from pipeline.supervisor.web.server import MOST_CONNECTIONS, HttpServer, instance_routes, page_routes
from pipeline.telemetry import log as logs
from pipeline.telemetry.metrics import SlotName
from pipeline.telemetry.run_log import RunLog
from pipeline.telemetry.slab import MetricsSlab
from pipeline.telemetry.stdio import never_blocking
from pipeline.tracking.launcher import Trackers

_TICK_S = 0.25
# While the run is paused: a tick reads all metrics. The watchdog may take a gap of a second for a stopped machine.
_PAUSED_TICK_S = 0.75
# Of an error that an administrator has to mend.
_LOST_S = 300.0
METRICS, ARENA = "metrics", "arena"

log = logging.getLogger(__name__)


def run(loaded: LoadedConfig, *, back_to: str = "") -> ExitCode:
    """Run an instance in the foreground until it has ended; return its exit code.

    Args:
        loaded: The configuration.
        back_to: A checkpoint of the run to go back to, such as ``step-000070``.

    Raises:
        ConfigError: If the configuration cannot be run on this machine; nothing is left behind then.
    """
    if (machine := platform.machine()) != "x86_64":
        raise ConfigError(
            f"rlhfd runs on x86-64 alone, this machine is {machine}: its processes rely on seeing each other's stores "
            "to shared memory in the order of their making"
        )
    # A process that systemd's watchdog kills writes its stacks to the journal.
    faulthandler.enable()
    notifier = Notifier.from_environ(os.environ)
    user_modules.use_folder_of(loaded.path)
    choices = decided(loaded.config, os.environ)
    config = with_workers(sort_digits.with_paths(choices.config), placement.visible_gpus(os.environ))
    if config.cluster.engine == "ray" and importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "cluster.engine: Ray is not installed here; "
            f"{sys.executable} -m pip install -c constraints.txt -e '.[ray]' in the checkout installs it"
        )
    logs.configure("supervisor", level=config.daemon.log_level, json=config.daemon.log_format == "json")
    for note in [*notes.notes(loaded), *disk_notes(config)]:
        log.warning("%s", note)
    children = 1 + config.rollout.workers + config.trainer.world_size
    allow_descriptors(children, config.rollout.reward_processes, MOST_CONNECTIONS if config.metrics.enabled else 0)
    hold_signals()
    outlive_user_signals()
    # First of all: a reader that does not read the output must not stop the loop.
    runtime_dir, shm_dir = Path(config.daemon.runtime_dir), shm_directory(config.daemon.runtime_dir)
    with (
        never_blocking(),
        InstanceLock(runtime_dir) as lock,
        StateLock(Path(config.daemon.state_dir), runtime_dir, run_name(config)) as state_lock,
        RunLog(config, "supervisor") as run_log,
        SharedMemoryLock(shm_dir) as shm_lock,
        forgotten_if_refused(config) as forget,
    ):
        completed = open_run(
            config,
            shm_dir,
            back_to=back_to,
            dtype_follows_gpus=loaded.dtype_follows_gpus,
            telemetry=ExtendedStart(notifier, time.monotonic),
        )
        if completed:
            # For systemd, a service that ends before it was ready has failed.
            notifier.send(READY=1, STATUS=completed)
            if sys.stdout is not None:
                sys.stdout.write(f"{completed}\n")
            return ExitCode.OK
        # Bound before anything is created: a port in use is the most frequent reason for a failed start.
        web = config.metrics
        http = HttpServer.bind(web.host, web.port, Access.of(web)) if web.enabled else None
        try:
            workspace = begin_run(config, shm_dir, checked_layout(config))
            shm_lock.hold()
        except BaseException:
            if http is not None:
                http.close()
            raise
        supervisor = Supervisor(config, loaded, workspace, lock, state_lock, http, run_log, notifier, choices)
        code = _serve(supervisor, config, workspace)
        if code is ExitCode.BAD_CONFIG:
            forget()
        return code


def _log_choices(loaded: LoadedConfig, choices: Choices) -> None:
    """Log the values that the machine and the plan chose, of a start that goes on."""
    if why := loaded.reasons.get("rollout.engine", ""):
        log.info("engine of the rollouts: engine=%s reason=%s", loaded.config.rollout.engine, why)
    for key, chosen in choices.shown.items():
        log.info("by the plan: %s = %s", key, chosen)
    if choices.config.trainer.keep_state == "disk" and (why := choices.reasons.get("trainer.keep_state", "")):
        log.warning("a killed trainer goes back to its last checkpoint, its state is kept on disk alone: %s", why)


def _serve(supervisor: Supervisor, config: Config, workspace: Workspace) -> ExitCode:
    """Run an instance; remove its shared memory only if its content is on disk, or if no process was started."""
    try:
        code = asyncio.run(supervisor.serve())
    except BaseException:
        if supervisor.has_begun:
            log.error("unexpected error, the run stays in shared memory for the next start: folder=%s",
                      workspace.folder)  # fmt: skip
        else:
            workspace.undo()
        InstanceRecord.remove(Path(config.daemon.runtime_dir))
        raise
    shutdown = supervisor._shutdown
    if not shutdown.is_kept:
        (workspace.undo if shutdown.is_unsaved else workspace.remove)()
    return code


def with_workers(config: Config, gpus: list[str]) -> Config:
    """Return the configuration with the number of workers that follows from these GPUs."""
    workers = placement.worker_count(config, gpus)
    return config.changed("rollout", workers=workers)


@dataclasses.dataclass(eq=False)
class Supervisor:
    """One instance from its first child to its last.

    Attributes:
        config: The configuration in force, with the values that the plan chose.
        loaded: The configuration as it was read.
        workspace: The folder in shared memory.
        lock: The lock of the runtime directory.
        state_lock: The lock of the state directory.
        http: The HTTP server; None without one.
        run_log: The log beside the terminal.
        notifier: The connection to systemd.
        choices: The values that the plan chose, with their reasons.
        has_begun: Whether it has started processes, or has tried to.
    """

    config: Config
    loaded: LoadedConfig
    workspace: Workspace
    lock: InstanceLock
    state_lock: StateLock
    http: HttpServer | None
    run_log: RunLog
    notifier: Notifier
    choices: Choices
    has_begun: bool = dataclasses.field(default=False, init=False)
    _looks_at_s: float = dataclasses.field(default=0.0, init=False)
    # Whether SIGTERM or SIGINT has come.
    _is_asked: bool = dataclasses.field(default=False, init=False)
    _hangup: Hangup = dataclasses.field(default_factory=Hangup, init=False)
    # Set at a change that the next tick has to see soon, while ticks are rare.
    _news: asyncio.Event = dataclasses.field(default_factory=asyncio.Event, init=False)

    async def serve(self) -> ExitCode:
        """Start all processes and watch them until all have ended; the caller removes the folder in shared memory."""
        self._loop = asyncio.get_running_loop()
        adopt_orphans()
        self._prepare()
        self._record = self._write_record()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stop_asked, number)
        self._loop.add_signal_handler(signal.SIGHUP, self._hung_up)
        self._loop.add_signal_handler(signal.SIGUSR1, self._warned)
        control = await serve_control(self.workspace.folder / "control.sock", self._answer)
        if self.http is not None:
            routes = instance_routes(self._status.metrics, self._status.health, self._status.ready)
            await self.http.start([*routes, *([] if self._page is None else page_routes(self._page))])
        self._view.start()
        self._inputs.start()
        try:
            # Signals that came meanwhile are handled once the loop runs; a child would inherit the blocked signals.
            release_signals()
            self.has_begun = True
            self._guarded(self._start_first)
            while not self._shutdown.over:
                self._guarded(self._tick)
                if not self._shutdown.over:
                    await self._until_next_tick()
        finally:
            hold_signals()
            await self._close(control)
        return self._shutdown.exit_code

    async def _until_next_tick(self) -> None:
        if self._status.phase != "paused" or not self._status.is_buffer_paused or not self._fleet.all_ready():
            await asyncio.sleep(_TICK_S)
            return
        self._news.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), _PAUSED_TICK_S)

    def _guarded(self, step: Callable[[], None]) -> None:
        """Run a step; an error of ours ends the instance in order."""
        try:
            step()
        except RlhfdError as error:
            self._abort(error.exit_code, str(error))

    # The start.

    def _prepare(self) -> None:
        config, gpus = self.config, placement.visible_gpus(os.environ)
        devices_of = placement.assign(config, gpus, placement.usable_cpus(), placement.local_cpus(gpus))
        ranks = config.trainer.world_size if config.trainer.kind == "external" else 0
        own = [SlotName("trainer", rank) for rank in range(ranks)]
        slots = [
            SlotName("supervisor"),
            SlotName("buffer"),
            *own,
            *(SlotName(role, index) for role, index in devices_of),
        ]
        self._slab = MetricsSlab.reopen(self.workspace.metrics_path, slots)
        self._slab.survive_truncation()
        folder = self.workspace.folder
        states = ["training", *(f"training-{rank}" for rank in range(1, config.ranks_here))]
        self._sizes = Sizes(folder / name for name in (METRICS, ARENA, "weights", *states))
        self._slab.begin("supervisor")
        writer = self._slab.writer("supervisor")
        count_warnings(writer)
        _log_choices(self.loaded, self.choices)
        if older := remove_older_caches(Path(config.daemon.state_dir)):
            log.info("compiled code of other versions is removed: folders=%s", ",".join(older))
        self._fleet = Fleet(
            str(self.workspace.folder),
            self._slab,
            config,
            clock=time.monotonic,
            on_reaped=lambda: self._status.sample(time.monotonic()),
            on_end=self._child_ended,
            on_change=self._child_changed,
            on_line=self._child_printed,
        )
        none = Devices("", ())
        if not self._is_prepared():
            self._fleet.add("setup", 0, none)
        # A worker refuses vLLM where there is none, or another release.
        if engine_is_forked(config) and not problem_of_vllm():
            self._fleet.add("engines", 0, devices_of[SlotName("rollout", 0)])
        self._fleet.add("buffer", 0, none)
        for (role, index), devices in devices_of.items():
            self._fleet.add(role, index, devices)
        self._watchdog = Watchdog(
            self._fleet,
            state=lambda: self._status.phase,
            gave_up=lambda reason: self._abort(ExitCode.GAVE_UP, reason),
        )
        self._reload = Reload(self.loaded, config, self.workspace, self.http, writer, on_reloaded=self._apply)
        self._inputs = InputsWatch(config)
        self._status = InstanceStatus(
            self.workspace,
            self._fleet,
            self._watchdog,
            metrics_url="" if self.http is None else f"{self.http.url}/metrics",
            # Commands in other folders show it.
            path=self.loaded.path and self.loaded.path.absolute(),
            pending=self._reload.pending,
        )
        self._page = None
        if self.http is not None:
            local = self.http.is_loopback
            self._page = PageData(config, self.workspace, self._status, is_local=local)
        self._trackers = Trackers(config, writer)
        self._view = LiveView()
        self._service = Service(
            self.notifier, status=self._status.numbers, is_buffer_silent=self._watchdog.is_buffer_silent
        )
        self._to_buffer = Outbox(self.workspace.folder, BUFFER)
        taken_over = self.workspace.taken_over
        self._shutdown = Shutdown(self._fleet, self._to_buffer, taken_over=taken_over)
        self._exits = ExitHandler(
            self._fleet,
            self._to_buffer,
            drain=lambda reason: self._drain(reason, complete=True),
            abort=self._abort,
        )
        self._pause = Pause(self.workspace.folder)
        if taken_over:
            log.warning("arena taken over from a supervisor that was killed: run=%s", self.workspace.run.run_id)
        if self._pause.is_on():
            log.warning("paused as it was before: no tickets are issued until `rlhfd resume`")

    def _is_prepared(self) -> bool:
        return not sort_digits.is_used(self.loaded.config) or sort_digits.is_prepared(
            sort_digits.directory_of(self.config.daemon.state_dir)
        )

    def _write_record(self) -> InstanceRecord:
        record = InstanceRecord(
            pid=os.getpid(),
            shm_dir=str(self.workspace.folder),
            url="" if self.http is None else self.http.url,
            log=self.run_log.destination,
        )
        record.write(Path(self.config.daemon.runtime_dir))
        return record

    def _stay_found(self, now_s: float) -> None:
        """Have commands find this instance, and others refused, after somebody has removed one of its two folders."""
        if now_s < self._looks_at_s:
            return
        folder = Path(self.config.daemon.runtime_dir)
        try:
            # The record alone is missing where a cleaner took it, or where it found no room beside the lock.
            has_lost_all = self.lock.retake()
            if has_lost_all or not InstanceRecord.is_there(folder):
                self._record.write(folder)
                log.warning("the %s had been removed, and is made again: path=%s",
                            "runtime directory" if has_lost_all else "record of this instance", folder)  # fmt: skip
        except ConfigError as error:
            self._looks_at_s = now_s + _LOST_S
            log.error("the runtime directory was removed, and commands do not find this instance: reason=%s", error)
        try:
            if self.state_lock.retake():
                log.warning("the lock of the state directory had been removed, and is made again; other files may be "
                            "gone with it: path=%s", self.config.daemon.state_dir)  # fmt: skip
        except ConfigError as error:
            self._looks_at_s = now_s + _LOST_S
            log.error("the lock of the state directory was removed, and other instances may write there: reason=%s",
                      error)  # fmt: skip

    def _start_first(self) -> None:
        first = [*FORKSERVERS, "buffer", "setup"]
        first += [] if any(self._fleet.of("setup")) else ["trainer", "rollout"]
        for slot in self._fleet.of(*first):
            self._fleet.start(slot)

    # While it runs.

    def _tick(self) -> None:
        now_s = time.monotonic()
        own = [slot.child.pid for slot in self._fleet.slots if slot.child is not None]
        reap_orphans([*own, *self._trackers.pids])
        if not self.workspace.folder.exists():
            self._shared_memory_gone()
        if not self._shutdown.under_way:
            self._restart_due()
            self._trackers.tick()
        if cut := self._sizes.cut():
            self._shared_memory_cut(*cut)
        self._stay_found(now_s)
        self._fleet.tick(now_s)
        self._status.sample(now_s)
        if self._page is not None:
            self._page.sample(now_s)
        self._watchdog.tick(now_s, *self._status.steps_and_version())
        self._view.update(self._status.numbers())
        has_failed = self._shutdown.exit_code is not ExitCode.OK
        self._service.tick(now_s, is_ending=self._shutdown.under_way, has_failed=has_failed)
        if self._shutdown.under_way:
            self._shutdown.advance(now_s)

    def _restart_due(self) -> None:
        for slot in list(self._fleet.due()):
            # Ranks start together: one rank alone would wait forever for the others of its generation.
            if slot.role != "trainer" or not self._fleet.alive("trainer") or self._due_together():
                self._fleet.start(slot)

    def _due_together(self) -> bool:
        return all(slot.state in ("backoff", "waiting", "starting") for slot in self._fleet.of("trainer"))

    def _child_changed(self, slot: Slot) -> None:
        self._news.set()
        self._status.changed(slot)
        if slot.role == "buffer" and slot.state == "ready":
            # The buffer before this one may have died without reading that a worker died.
            for dead in self._fleet.of("rollout"):
                if dead.last_pid and not dead.alive:
                    self._to_buffer.send(death_of(dead))

    def _child_printed(self, slot: Slot, line: str) -> None:
        if not self.run_log.keep(f"{slot.role}-{slot.index}", line, slot.child.pid if slot.child else slot.last_pid):
            self._view.log(self._watchdog.labelled(slot, line))

    def _child_ended(self, slot: Slot, code: int) -> None:
        self._child_changed(slot)
        self._shutdown.note_unwritten(slot, code)
        handle = self._shutdown.child_ended if self._shutdown.under_way else self._exits.handle
        # The event loop, which calls this, would only log the error of a start that follows from the exit.
        self._guarded(lambda: handle(slot, code))

    def _apply(self, config: Config) -> None:
        """Apply a reloaded configuration; nothing here fails."""
        self.config = self._trackers.config = config
        self._fleet.reload(config)

    def _shared_memory_cut(self, path: Path, reason: str) -> None:
        """End the run after another program has truncated a file in shared memory.

        Metrics are made anew, so that processes can start, and the run ends in order. Without the arena its rows are
        gone, and trainers write a checkpoint. Without weights or training state a trainer has none to write: the next
        start resumes from the last checkpoint.
        """
        self._shutdown.fail(ExitCode.FAILED, reason)
        if path.name == METRICS:
            self._slab.restore(path)
            self._slab.begin("supervisor")
        else:
            self._shutdown.is_damaged = True
        self._news.set()
        self._status.state = "draining"
        if path.name not in (METRICS, ARENA):
            self._shutdown.kill_all()
        elif not self._shutdown.under_way:
            self._shutdown.begin()
        if path.name == ARENA:
            self._fleet.signal(self._fleet.alive("buffer"), signal.SIGKILL)

    def _shared_memory_gone(self) -> None:
        """End the run after another program has removed its folder: no process can go on, or write a checkpoint."""
        if not self._shutdown.is_damaged:
            self._shutdown.is_damaged = True
            self._shutdown.fail(
                ExitCode.FAILED,
                f"shared memory was removed by another program: {self.workspace.folder} is gone, and the next start "
                "resumes from the last checkpoint; logind removes that of a user at the last logout, unless "
                "`loginctl enable-linger` keeps it",
            )
            self._news.set()
            self._status.state = "draining"
            self._shutdown.kill_all()

    # The shutdown.

    def _hung_up(self) -> None:
        match self._hangup.meaning():
            case "stop":
                # It ends nothing at once: a session that is closed sends SIGTERM and SIGHUP, one after the other.
                if not self._shutdown.under_way:
                    self._drain("SIGHUP received")
            case "reload":
                self._reload.schedule()

    def _warned(self) -> None:
        log.warning("SIGUSR1 received, by which this process ends nothing: SIGTERM, as of Slurm's --signal=B:TERM@600, "
                    "shuts down with a checkpoint; the pid of a role takes SIGUSR1 for its stacks")  # fmt: skip

    def _stop_asked(self, number: signal.Signals) -> None:
        is_second, self._is_asked = self._is_asked, True
        if self._shutdown.under_way and not is_second:
            # A command, a failure or the last step began the drain: a service manager's SIGTERM follows each of them.
            log.info("draining already: %s received, a second one ends at once", signal.Signals(number).name)
        elif self._shutdown.under_way:
            log.info("ending at once: second signal")
            if self._shutdown.has_unsaved():
                log.warning("the steps since the last checkpoint are given up")
            self._shutdown.kill_all()
        else:
            self._drain(f"{signal.Signals(number).name} received")

    def _drain(self, reason: str, *, complete: bool = False) -> None:
        log.info("draining: %s", reason)
        self._news.set()
        self._status.state = "draining"
        self._shutdown.begin(complete=complete)

    def _abort(self, code: ExitCode, reason: str) -> None:
        """End a run that cannot continue; trained weights and undelivered rows go to disk, or stay in shared memory."""
        self._shutdown.fail(code, reason)
        self._news.set()
        if self._shutdown.under_way:
            self._shutdown.give_up()
            return
        self._status.state = "draining"
        self._shutdown.begin_failed()
        for slot in self._fleet.of("buffer"):
            if not slot.alive and code is ExitCode.GAVE_UP:
                slot.state = "backoff"

    async def _close(self, control: asyncio.AbstractServer) -> None:
        self._inputs.stop()
        await asyncio.to_thread(self._trackers.close)
        # Processes that code of the user has started, and whose guards were killed: they were adopted here.
        end_descendants([slot.child.pid for slot in self._fleet.slots if slot.child is not None])
        self._view.update(self._status.numbers())
        self._view.stop()
        for line in self._status.summary():
            log.info("%s", line)
        control.close()
        if self._page is not None:
            self._page.save()
        if self.http is not None:
            await self.http.stop()
        self._to_buffer.close()
        InstanceRecord.remove(Path(self.config.daemon.runtime_dir))
        if self._shutdown.reason:
            # Last: the reader of a terminal or log looks there for the cause.
            log.error("%s", self._shutdown.reason)

    async def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        match request.get("command"):
            case "status":
                return self._status.status(self._watchdog.why())
            case "why":
                return self._watchdog.why()
            case "reload":
                return await self._reload.run()
            case "pause" | "resume" as word:
                if self._shutdown.under_way:
                    return {"error": "the instance is draining"}
                self._news.set()
                return {"in_force": await self._pause.turn(word == "pause", lambda: self._status.is_buffer_paused)}
            case "stop":
                if not self._shutdown.under_way:
                    self._drain("`rlhfd stop` received")
                return {"ok": True}
            case other:
                return {"error": f"unknown command {other!r}"}
