"""The process that makes the embedded model before anything else can load it; it ends when that is done."""

from __future__ import annotations

from pipeline import sort_digits
from pipeline.config import Config
from pipeline.errors import ExitCode
from pipeline.role import Report, RoleContext


def run(config: Config, context: RoleContext) -> ExitCode:
    """Make the embedded task under the state directory."""
    directory = sort_digits.directory_of(config.daemon.state_dir)
    sort_digits.prepare(directory, progress=lambda line: context.report(Report(progress=line)))
    return ExitCode.OK
