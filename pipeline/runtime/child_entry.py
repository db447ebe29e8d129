"""Entry of every child process: it ends with the supervisor (PDEATHSIG), then runs the role of its `LaunchSpec`."""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import logging
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, NoReturn

from pipeline.runtime import role_libraries
from pipeline.runtime.lifeline import die_with_parent

if TYPE_CHECKING:
    from pipeline.config.schema import Config
    from pipeline.errors import ExitCode
    from pipeline.runtime.role import RoleContext

_ROLES = {**role_libraries.ROLES, "buffer": "pipeline.buffer.process"}
_GATEWAYS = {"rollout": "pipeline.rollout.ray", "trainer": "pipeline.trainer.ray"}


def main(reports: int, spec_json: str) -> int:
    """Run a role until it ends; return its exit code."""
    # At SIGUSR1, the signal of hang detection, the stacks of all threads are written, also while Python hangs in a C
    # call. The handler below is "ignore", not the default: Python removes its handlers at its exit, and a signal in
    # that second would kill the process. The forkserver has registered a handler already.
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    import msgspec
    import setproctitle

    from pipeline.config import user_modules
    from pipeline.config.schema import Config
    from pipeline.errors import ExitCode, RlhfdError
    from pipeline.runtime.child_process import LaunchSpec
    from pipeline.runtime.role import Report, RoleContext, count_warnings, reporter
    from pipeline.runtime.workspace import Workspace
    from pipeline.telemetry import log
    from pipeline.telemetry.slab import MetricsSlab

    spec = msgspec.json.decode(spec_json, type=LaunchSpec)
    user_modules.extend_path()
    workspace = Workspace.open(spec.folder)
    config = Config.model_validate_json(workspace.config_path.read_bytes())
    log.configure(f"{spec.role}-{spec.index}", level=config.daemon.log_level, json=config.daemon.log_format == "json")
    setproctitle.setproctitle(f"{config.daemon.name}: {spec.role} {spec.index}")

    report = reporter(reports)
    slab = MetricsSlab.attach(workspace.metrics_path)
    writer = slab.writer("supervisor" if spec.role == "setup" else spec.role, spec.index)
    if spec.role != "setup":
        count_warnings(writer)
    keep_to(spec.cpus)
    context = RoleContext(spec.role, spec.index, workspace.folder, writer, report, spec.generation, spec.prompts)
    context.stop_on_sigterm()
    try:
        return int(_run(config, context))
    except RlhfdError as error:
        report(Report(error=error.told(texts=config.daemon.log_texts)))
        code = error.exit_code
    except Exception as error:
        logging.getLogger(__name__).exception("%s failed", context.name)
        report(Report(error=f"{type(error).__name__}: {error}"))
        code = ExitCode.FAILED
    finally:
        # Python is about to remove its handlers: a later SIGTERM would kill the process during its exit.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if context.in_process_group:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return int(code)


def keep_to(cpus: list[int]) -> None:
    """Run on these cores alone; an empty list is all that this process may use."""
    if not cpus:
        return
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        # An administrator, or the container's runtime, has taken them away since the supervisor's start.
        logging.getLogger(__name__).warning("none of the cores of this process may be used any more, it runs on "
                                            "others: cores=%s reason=%s", cpus, error.strerror)  # fmt: skip


def _run(config: Config, context: RoleContext) -> ExitCode:
    """Import the module of this process's role, and run it."""
    is_gateway = config.cluster.engine == "ray" and (
        context.role == "rollout" or (context.role == "trainer" and context.index >= config.ranks_here)
    )
    module = (_GATEWAYS if is_gateway else _ROLES)[context.role]
    if context.role in role_libraries.ROLES:
        # In a fork of the forkserver they are there already.
        role_libraries.load([module], config.model.actor)
    role = importlib.import_module(module)
    code: ExitCode = role.run(config, context)
    return code


def leave(code: int) -> NoReturn:
    """End this process as multiprocessing ends a fork: no module is unloaded, which takes a third of a second.

    Threads of torch that outlive a process group would abort the interpreter's own end. Threads that are no daemons are
    waited for, and functions registered with `atexit` run.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    die_with_parent()
    leave(main(int(sys.argv[1]), sys.argv[2]))
