"""Commands for the operation of a service: `rlhfd systemd unit`, `install` and `uninstall`, `rlhfd logs`."""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from pipeline.cli.options import finding, load, runtime_dir_of
from pipeline.errors import NotRunningError, RlhfdError, UnreachableError

if TYPE_CHECKING:
    from pipeline.cli.systemd_units import Plan

_instance = click.option(
    "--instance",
    "name",
    metavar="NAME",
    help="The unit rlhfd@NAME with a configuration of its own; without it: the unit rlhfd.",
)

_Command = TypeVar("_Command", bound=Callable[..., None])


def _service(command: _Command) -> _Command:
    """Give a command the options of a service."""
    config = click.option(
        "--config",
        "path",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Configuration file; else RLHFD_CONFIG's or, with --instance, /etc/rlhfd/NAME.toml.",
    )
    user = click.option(
        "--user", metavar="USER", help="User of the service; else the user who called sudo, else the calling one."
    )
    return _instance(config(user(command)))


_SYSTEMD = Path("/run/systemd/system")
"""A folder of each machine that systemd runs (sd_booted)."""
_ROLES = ("supervisor", "buffer", "rollout", "trainer", "setup", "forkserver", "engines", "serial")


@click.group()
def systemd() -> None:
    """Install rlhfd as a systemd service, or remove it.

    \b
    Examples:
      rlhfd systemd unit --config grpo.toml
      sudo rlhfd systemd install --config grpo.toml
      sudo rlhfd systemd install --instance b --config b.toml
      sudo rlhfd systemd uninstall --instance b
    """


def _planned(name: str | None, path: Path | None, user: str | None) -> Plan:
    """Return the plan of these options, its notes printed."""
    from pipeline.cli import systemd_units

    planned = systemd_units.plan(systemd_units.Unit(name), path, user, os.environ)
    for note in planned.notes:
        click.echo(f"note: {note}", err=True)
    return planned


@systemd.command(short_help="Print the unit of this installation.")
@_service
def unit(name: str | None, path: Path | None, user: str | None) -> None:
    """Print the unit that `rlhfd systemd install` would write, and install nothing.

    The configuration is checked first. systemd verifies the unit where it is installed.

    \b
    Examples:
      rlhfd systemd unit --config grpo.toml
      rlhfd systemd unit --instance b --config b.toml --user trainer
    """
    import shutil

    from pipeline.cli import systemd_units

    planned = _planned(name, path, user)
    click.echo(f"# {planned.unit.path}\n{planned.text}", nl=False)
    if shutil.which("systemd-analyze"):
        systemd_units.verify(planned)


@systemd.command(short_help="Write the unit of this installation, and verify it.")
@_service
def install(name: str | None, path: Path | None, user: str | None) -> None:
    """Write the unit of this installation, verify it, and print the commands that start it.

    Nothing is started. The configuration is checked first. Run it again if the environment or checkout has moved.
    `rlhfd systemd unit` prints the unit and writes nothing.

    \b
    Examples:
      sudo rlhfd systemd install --config grpo.toml
      sudo rlhfd systemd install --config grpo.toml --user trainer
      sudo rlhfd systemd install --instance b --config b.toml
    """
    from pipeline.cli import systemd_units

    planned = _planned(name, path, user)
    unit = planned.unit
    systemd_units.install(planned)
    click.echo(f"wrote {unit.path}")
    service = unit.name.removesuffix(".service")
    click.echo(
        f"{service} runs {planned.config} as {planned.user}. Next:\n"
        f"  systemctl enable --now {service}    start it, now and at each boot\n"
        f"  systemctl status {service}          its state in one line\n"
        f"  rlhfd status --runtime-dir {unit.runtime_dir}\n"
        f"  rlhfd logs --runtime-dir {unit.runtime_dir} --follow\n"
        f"  systemctl reload {service}          after a change of {planned.config}"
    )


@systemd.command(short_help="Stop the service and remove its unit; checkpoints stay.")
@_instance
def uninstall(name: str | None) -> None:
    """Shut the service down and remove its unit; checkpoints stay.

    \b
    Examples:
      sudo rlhfd systemd uninstall
      sudo rlhfd systemd uninstall --instance b
    """
    from pipeline.cli import systemd_units

    for line in systemd_units.uninstall(systemd_units.Unit(name)):
        click.echo(line)


@click.command(short_help="Show the log of all processes, or of one role.")
@click.argument("role", default="")
@click.option("--follow", "-f", is_flag=True, help="Continue with new lines until Ctrl-C.")
@click.option(
    "--lines",
    "-n",
    type=click.IntRange(min=0),
    default=100,
    show_default=True,
    help="Number of existing lines to show.",
)
@finding
def logs(role: str, follow: bool, lines: int, path: Path | None, runtime_dir: Path | None) -> None:
    """Show the log of all processes, or of ROLE: supervisor, buffer, rollout, rollout-0, trainer, trainer-0.

    The source is the systemd journal if systemd runs the instance, else state_dir/log; also after the run has ended.

    \b
    Examples:
      rlhfd logs
      rlhfd logs rollout-0 --follow
      rlhfd logs trainer -n 20 --runtime-dir /run/rlhfd-b
    """
    if role and role.rpartition("-")[0] not in _ROLES[1:] and role not in _ROLES:
        close = difflib.get_close_matches(role, _ROLES, n=1)
        meant = f"did you mean {close[0]}?" if close else f"the roles are {', '.join(_ROLES)}, or one such as rollout-0"
        raise click.UsageError(f"no role {role}, {meant}")
    destination = _destination(path, runtime_dir)
    if not destination:
        raise RlhfdError("no log is kept: the daemon could not make its file, and has said why at its start")
    unit = destination.removeprefix("journal:")
    if unit != destination:
        _show_journal(unit, role, follow, lines)
    _show_file(Path(destination), role, follow, lines)


def _destination(path: Path | None, runtime_dir: Path | None) -> str:
    """Return the destination of the log: a path, or ``journal:`` and a unit."""
    from pipeline.cli.systemd_units import Unit
    from pipeline.runtime import lock
    from pipeline.telemetry import log_file

    folder = runtime_dir_of(runtime_dir, path)
    with contextlib.suppress(NotRunningError, UnreachableError):
        return lock.find(folder).log
    # Another service manager, as that of a container, may have made the same folder: the log is a file there.
    if (unit := Unit.of_runtime_dir(folder.absolute())) and _SYSTEMD.is_dir():
        return f"journal:{unit.name}"
    config = load(path, (), files=False).config
    if folder.absolute() != Path(config.daemon.runtime_dir).absolute():
        raise NotRunningError(f"no instance runs in {folder}: name its configuration by --config to see the last log")
    return str(log_file.path_in(Path(config.daemon.state_dir)))


def _show_journal(unit: str, role: str, follow: bool, lines: int) -> None:
    """Replace this process by journalctl, which handles pagers, colours and permissions."""
    command = ["journalctl", f"--unit={unit}", f"--lines={lines}", "--no-pager", *(["--follow"] if follow else [])]
    if role:
        name, dash, index = role.rpartition("-")
        is_one = bool(dash) and index.isdigit()
        command += [f"RLHFD_ROLE={name}", f"RLHFD_WORKER={index}"] if is_one else [f"RLHFD_ROLE={role}"]
    sys.stdout.flush()
    try:
        os.execvp(command[0], command)
    except FileNotFoundError:
        raise RlhfdError(f"{unit} logs to the journal, and journalctl is not on this machine") from None


def _show_file(path: Path, role: str, follow: bool, lines: int) -> None:
    from pipeline.telemetry import log_file

    try:
        for found in log_file.read(path, lines, role, follow=follow):
            click.echo("\n".join(found))
    except FileNotFoundError:
        raise NotRunningError(f"there is no log yet: {path}") from None
    except KeyboardInterrupt:
        pass
