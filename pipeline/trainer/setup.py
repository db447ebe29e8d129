"""The process that makes the embedded model before anything else can load it; it ends when that is done."""

from __future__ import annotations

from pipeline import sort_digits
from pipeline.config.schema import Config
from pipeline.errors import ExitCode
from pipeline.runtime.role import Report, RoleContext

_EVERY = 10


def run(config: Config, context: RoleContext) -> ExitCode:
    """Make the embedded task under the state directory."""
    directory = sort_digits.directory_of(config.daemon.state_dir)

    def say(done: int, steps: int) -> None:
        if done % _EVERY == 0 or done == steps:
            context.report(Report(progress=f"making the embedded model: warm-up step {done} of {steps}"))

    sort_digits.prepare(directory, progress=say)
    return ExitCode.OK
