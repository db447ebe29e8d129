"""`rlhfd reload` and SIGHUP: the configuration is read again while the instance runs.

All or nothing: the file, the environment and ``--set`` of the start are checked as at a start, and the files of the
HTTP server are read. Only then are changes applied, and applying them cannot fail. Keys whose field is marked
`pipeline.config.schema.LIVE` are in force from then on; the others are listed and need a restart. Processes read the
change from config.json in the instance's folder, which they check between two units of work
(`RoleContext.reloaded`); a process that starts reads it in any case.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from pipeline.config import load as config_load
from pipeline.config.changes import Change, compare, with_live
from pipeline.config.identity import differing_settings, identifying_settings
from pipeline.config.load import LoadedConfig
from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.runtime import run_inputs
from pipeline.runtime.workspace import Workspace
from pipeline.supervisor.preflight import problems_of_files
from pipeline.supervisor.web.server import HttpServer
from pipeline.telemetry.slab import SlotWriter

_T = TypeVar("_T")

log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class Reload:
    """Reloads the configuration; one reload at a time.

    Attributes:
        loaded: The configuration of the start.
        config: The same with paths and numbers filled in; later the one in force.
        workspace: The instance's workspace, which holds config.json.
        http: The HTTP server, whose token, certificate and key are read again.
        writer: The supervisor's metrics.
        on_reloaded: Called with the new configuration in force; must not fail.
        pending: Keys whose value in the file, at its last reading, needs a restart.
    """

    loaded: LoadedConfig
    config: Config
    workspace: Workspace
    http: HttpServer | None
    writer: SlotWriter
    _: dataclasses.KW_ONLY
    on_reloaded: Callable[[Config], None]
    pending: list[str] = dataclasses.field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._running = self.loaded.config
        # Errors name the file to callers in other working directories.
        self.loaded = dataclasses.replace(self.loaded, path=self.loaded.path and self.loaded.path.absolute())
        self._tasks: set[asyncio.Task[dict[str, Any]]] = set()
        self._lock = asyncio.Lock()
        self._code = _code_of(self.config)
        self._successful = self.writer.gauge("rlhfd_config_last_reload_successful")
        self._success_unix_s = self.writer.gauge("rlhfd_config_last_reload_success_timestamp_seconds")
        self._successful.set(1.0)
        self._success_unix_s.set(time.time())

    def schedule(self) -> None:
        """Reload in the background; the result is logged."""
        task = asyncio.get_running_loop().create_task(self.run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def run(self) -> dict[str, Any]:
        """Reload the configuration, or change nothing if it has errors; return the answer of `rlhfd reload`."""
        async with self._lock:
            try:
                reloaded, code = await _in_thread(self._read)
                changes = compare(self._running, reloaded.config)
                running = with_live(self._running, reloaded.config)
                config = with_live(self.config, reloaded.config)
                self._put_in_force(config)
            except (ConfigError, OSError) as error:
                return self._refuse(str(error).splitlines())
            self._running, self.config = running, config
            self.pending[:] = [change.key for change in changes.restart]
            self._successful.set(1.0)
            self._success_unix_s.set(time.time())
            for change in changes.live:
                log.info("configuration reloaded: key=%s before=%s after=%s", *change)
            if self.pending:
                log.warning("configuration reloaded, these need a restart: %s", ", ".join(self.pending))
            elif not changes.live:
                log.info("configuration reloaded: nothing has changed")
            if note := "; ".join(filter(None, (self._note_of_code(code), self._note_of_run(reloaded.config)))):
                log.warning("configuration reloaded: %s", note)
            overridden = config_load.overridden(reloaded)
            for key, location in overridden.items():
                log.warning("configuration reloaded: the file's value of %s is not in force, %s stands above it",
                            key, location)  # fmt: skip
            return {
                "ok": True,
                "config": str(reloaded.path or ""),
                "in_force": [_shown(change) for change in changes.live],
                "needs_restart": [_shown(change) for change in changes.restart],
                "overridden": overridden,
                "note": note,
            }

    def _note_of_run(self, wanted: Config) -> str:
        """Return what is to be said of values with which a start would not go on with this run; "" of none."""
        odd = differing_settings(identifying_settings(wanted), identifying_settings(self._running))
        return f"a start with these values is another run, from step 0: {', '.join(odd)}" if odd else ""

    def _read(self) -> tuple[LoadedConfig, dict[str, str]]:
        return config_load.load_again(self.loaded, problems_of_files), _code_of(self.config)

    def _note_of_code(self, now: dict[str, str]) -> str:
        """Return what is to be said of code that has changed since the start; "" if none has."""
        changed = [name for name, before in self._code.items() if now.get(name) != before]
        return f"code is not loaded again, it is in force after a restart: {', '.join(changed)}" if changed else ""

    def _put_in_force(self, config: Config) -> None:
        staged = self.workspace.stage_config(config)
        if self.http is not None:
            self.http.renew(config.metrics)
        # From here on nothing fails.
        staged.replace(self.workspace.config_path)
        logging.getLogger().setLevel(config.daemon.log_level.upper())
        self.on_reloaded(config)

    def _refuse(self, errors: list[str]) -> dict[str, Any]:
        self._successful.set(0.0)
        for line in errors:
            log.error("configuration not reloaded, the previous one stays in force: %s", line)
        return {"ok": False, "config": str(self.loaded.path or ""), "errors": errors}


def _in_thread(read: Callable[[], _T]) -> asyncio.Future[_T]:
    """Return what a function returns in a thread of its own.

    Files may be large, and those of a network's disk may never answer: a daemon thread that hangs keeps no process
    alive, one of `asyncio.to_thread` would hold the end of the instance.
    """
    answer: concurrent.futures.Future[_T] = concurrent.futures.Future()
    answer.set_running_or_notify_cancel()

    def run() -> None:
        try:
            answer.set_result(read())
        except Exception as error:  # noqa: BLE001 - it is raised where the answer is awaited
            answer.set_exception(error)

    threading.Thread(target=run, name="reload", daemon=True).start()
    return asyncio.wrap_future(answer)


def _code_of(config: Config) -> dict[str, str]:
    try:
        return run_inputs.code_of(config)
    except OSError as error:
        log.warning("nothing tells whether code has changed: %s", error)
        return {}


def _shown(change: Change) -> dict[str, Any]:
    return {"key": change.key, "before": change.before, "after": change.after}


class Hangup:
    """The meaning of SIGHUP: the closed terminal of a run stops the run, any other SIGHUP reloads.

    Construct it at the start, when it is known whether there is a terminal and whether nohup ignores SIGHUP.
    """

    def __init__(self) -> None:
        self._had_terminal = _has_terminal()
        self._is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN

    def meaning(self) -> Literal["reload", "stop", "nothing"]:
        """Return the meaning of a SIGHUP that has just come."""
        if not self._had_terminal or _has_terminal():
            return "reload"
        return "nothing" if self._is_ignored else "stop"


def _has_terminal() -> bool:
    """Return whether there is a controlling terminal; the kernel removes it before it sends SIGHUP for its closing."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
