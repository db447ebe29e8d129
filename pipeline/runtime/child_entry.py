"""Entry of every child process: tie its life to the supervisor's, then become the role it was started as."""

from __future__ import annotations

import faulthandler
import importlib
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

from pipeline.runtime.lifeline import die_with_parent

if TYPE_CHECKING:
    from pipeline.config.schema import Config
    from pipeline.errors import ExitCode
    from pipeline.runtime.role import RoleContext

_ROLES = {
    "buffer": "pipeline.buffer.process",
    "rollout": "pipeline.rollout.process",
    "trainer": "pipeline.trainer.process",
    "setup": "pipeline.trainer.setup",
}
_GATEWAY = "pipeline.rollout.ray"


def main(reports: int, spec_json: str) -> int:
    """Run a role until it ends; return its exit code."""
    # The watchdog asks for the stacks of all threads; they are written even where Python itself hangs in a C call.
    # Ignored beneath that, not left to its default: Python takes its handlers back at its end, and who is asked in that
    # second would die of it in place of ending. A template has registered one already.
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    import msgspec
    import setproctitle

    from pipeline.config.schema import Config
    from pipeline.errors import ExitCode, RlhfdError
    from pipeline.runtime.child_process import LaunchSpec
    from pipeline.runtime.role import Report, RoleContext, count_warnings
    from pipeline.runtime.workspace import Workspace
    from pipeline.telemetry import log
    from pipeline.telemetry.slab import MetricsSlab

    spec = msgspec.json.decode(spec_json, type=LaunchSpec)
    # Reward functions of the user's own are found where the daemon was started; last, so that they shadow nothing.
    sys.path.append(os.getcwd())
    if spec.cpus:
        os.sched_setaffinity(0, spec.cpus)
    workspace = Workspace.open(spec.folder)
    config = Config.model_validate_json(workspace.config_path.read_bytes())
    log.configure(f"{spec.role}-{spec.index}", level=config.daemon.log_level, json=config.daemon.log_format == "json")
    setproctitle.setproctitle(f"{config.daemon.name}: {spec.role} {spec.index}")

    def report(message: Report) -> None:
        os.write(reports, msgspec.json.encode(message) + b"\n")

    slab = MetricsSlab.attach(workspace.metrics_path)
    writer = slab.writer("supervisor" if spec.role == "setup" else spec.role, spec.index)
    if spec.role != "setup":
        count_warnings(writer)
    context = RoleContext(
        spec.role,
        spec.index,
        workspace.folder,
        writer,
        report,
        spec.generation,
        spec.prompts,
    )
    context.stop_on_sigterm()
    try:
        return int(_run(config, context))
    except RlhfdError as error:
        report(Report(error=error.told(texts=config.daemon.log_texts)))
        return int(error.exit_code)
    except Exception as error:
        logging.getLogger(__name__).exception("%s failed", context.name)
        report(Report(error=f"{type(error).__name__}: {error}"))
        return int(ExitCode.FAILED)
    finally:
        # Python is about to take its own handlers back: who is told to end now would die of it in place of ending.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _run(config: Config, context: RoleContext) -> ExitCode:
    """Import the one role this process is, and run it."""
    is_gateway = context.role == "rollout" and config.cluster.engine == "ray"
    role = importlib.import_module(_GATEWAY if is_gateway else _ROLES[context.role])
    code: ExitCode = role.run(config, context)
    return code


if __name__ == "__main__":
    die_with_parent()
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
