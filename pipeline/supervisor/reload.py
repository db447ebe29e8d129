"""`rlhfd reload` and SIGHUP: the configuration is read again while the instance runs.

All or nothing: the file, the environment and ``--set`` of the start are checked as a start checks them, and what the
HTTP server's keys name is read. Only then is anything changed, and what is changed then cannot fail. Keys whose field
says so (`pipeline.config.schema.LIVE`) are in force from there on; the others are named and wait for a restart. Processes
learn of it from config.json in the instance's folder, which they look at between two pieces of work
(`RoleContext.reloaded`); one that starts reads it anyway.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import time
from collections.abc import Callable
from typing import Any, Literal

from pipeline.config import load as config_load
from pipeline.config.changes import Change, compare, with_live
from pipeline.config.load import LoadedConfig
from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.runtime.workspace import Workspace
from pipeline.supervisor.preflight import problems_of_files
from pipeline.supervisor.web.server import HttpServer
from pipeline.telemetry.slab import SlotWriter

log = logging.getLogger(__name__)


class Reload:
    """Reads the configuration again; one at a time.

    Attributes:
        pending: Keys whose value in the file, as it was last read, needs a restart.
    """

    def __init__(
        self,
        loaded: LoadedConfig,
        config: Config,
        workspace: Workspace,
        http: HttpServer | None,
        writer: SlotWriter,
        *,
        on_taken: Callable[[Config], None],
    ) -> None:
        """Reload for one instance.

        Args:
            loaded: As it was started.
            config: What it made of that, paths and numbers filled in.
            workspace: Where the processes read it.
            http: Whose token, certificate and key are read again.
            writer: The supervisor's metrics.
            on_taken: Called with a configuration that is in force from now on; must not fail.
        """
        self.pending: list[str] = []
        # Errors name the file to whoever asks, from wherever that is.
        self._loaded = dataclasses.replace(loaded, path=loaded.path and loaded.path.absolute())
        self._running = loaded.config
        self._config = config
        self._workspace = workspace
        self._http = http
        self._on_taken = on_taken
        self._tasks: set[asyncio.Task[dict[str, Any]]] = set()
        self._lock = asyncio.Lock()
        self._successful = writer.gauge("rlhfd_config_last_reload_successful")
        self._success_unix_s = writer.gauge("rlhfd_config_last_reload_success_timestamp_seconds")
        self._successful.set(1.0)
        self._success_unix_s.set(time.time())

    def soon(self) -> None:
        """Do it for a caller that cannot wait; what came of it is logged."""
        task = asyncio.get_running_loop().create_task(self.run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def run(self) -> dict[str, Any]:
        """Read it again and put it in force, or change nothing; return what `rlhfd reload` shows."""
        async with self._lock:
            try:
                # In a thread: the prompts may be a large file.
                wanted = await asyncio.to_thread(config_load.load_again, self._loaded, problems_of_files)
                changes = compare(self._running, wanted.config)
                running = with_live(self._running, wanted.config)
                config = with_live(self._config, wanted.config)
                self._put_in_force(config)
            except (ConfigError, OSError) as error:
                return self._refuse(str(error).splitlines())
            self._running, self._config = running, config
            self.pending[:] = [change.key for change in changes.restart]
            self._successful.set(1.0)
            self._success_unix_s.set(time.time())
            for change in changes.live:
                log.info("configuration reloaded: key=%s before=%s after=%s", *change)
            if self.pending:
                log.warning("configuration reloaded, these need a restart: %s", ", ".join(self.pending))
            elif not changes.live:
                log.info("configuration reloaded: nothing has changed")
            return {
                "ok": True,
                "config": str(wanted.path or ""),
                "in_force": [_shown(change) for change in changes.live],
                "needs_restart": [_shown(change) for change in changes.restart],
            }

    def _put_in_force(self, config: Config) -> None:
        staged = self._workspace.stage_config(config)
        if self._http is not None:
            self._http.renew(config.metrics)
        # From here on nothing fails.
        staged.replace(self._workspace.config_path)
        logging.getLogger().setLevel(config.daemon.log_level.upper())
        self._on_taken(config)

    def _refuse(self, errors: list[str]) -> dict[str, Any]:
        self._successful.set(0.0)
        for line in errors:
            log.error("configuration not reloaded, what was in force stays: %s", line)
        return {"ok": False, "config": str(self._loaded.path or ""), "errors": errors}


def _shown(change: Change) -> dict[str, Any]:
    return {"key": change.key, "before": change.before, "after": change.after}


class Hangup:
    """What SIGHUP asks for: whoever closes the terminal of a run ends it, anybody else wants a reload.

    To be made at the start, which sees whether there is a terminal, and whether nohup keeps its closing from the run.
    """

    def __init__(self) -> None:
        self._had_terminal = _has_terminal()
        self._is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN

    def meaning(self) -> Literal["reload", "stop", "nothing"]:
        """Return what a SIGHUP that came just now asks for."""
        if not self._had_terminal or _has_terminal():
            return "reload"
        return "nothing" if self._is_ignored else "stop"


def _has_terminal() -> bool:
    """Whether there is a controlling terminal; the kernel takes it away before it tells of its closing."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
