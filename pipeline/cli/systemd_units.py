"""The systemd units of this installation: written with its paths, verified by systemd, installed and removed.

rlhfd.service         the one instance, of the configuration that it was installed with
rlhfd@NAME.service    an instance beside it, likewise
"""

from __future__ import annotations

import functools
import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.config import load as config_load
from pipeline.config.load import CONFIG_VARIABLE, FOLDER_KEYS
from pipeline.errors import ConfigError, NotRunningError, RlhfdError
from pipeline.runtime.lock import shm_directory
from pipeline.storage.files import replacing, write_at
from pipeline.supervisor.placement import visible_gpus
from pipeline.supervisor.preflight import problems_of_files

UNIT_DIR = Path("/etc/systemd/system")
SHIPPED = Path(__file__).with_name("rlhfd.service")
"""The unit of the single instance, installed in /opt/rlhfd; every other unit is made from it."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
# The parts of it that hold the name of an instance, and those parts of ``rlhfd@NAME.service``.
_NAMED = {
    "RLHF training\n": "RLHF training (%i)\n",
    "/etc/rlhfd/rlhfd.toml": "/etc/rlhfd/%i.toml",
    **{f"{folder}/rlhfd": f"{folder}/rlhfd-%i" for folder in ("%t", "%S", "%C")},
    **{f"{kind}Directory=rlhfd\n": f"{kind}Directory=rlhfd-%i\n" for kind in ("Runtime", "State", "Cache")},
}
# Settings that hide these folders from a service (it would exit with 203, or find no model), and their relaxed form.
_HIDING = {
    "ProtectHome=yes": ("ProtectHome=read-only", (Path("/home"), Path("/root"), Path("/run/user"))),
    "PrivateTmp=yes": ("PrivateTmp=no\nReadWritePaths=/tmp /var/tmp", (Path("/tmp"), Path("/var/tmp"))),
}
# The sockets and logs of the Ray instance on this machine.
_RAY = Path("/tmp/ray")
_CHECKOUT = Path(__file__).resolve().parents[2] / "bin" / "rlhfd"
_TIMEOUT_S = 60.0
# Time for drain and spool, and the extensions that systemd grants.
_STOP_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Unit:
    """A unit: the single service, or an instance beside it.

    Attributes:
        instance: Name of the instance, None for ``rlhfd.service``.
    """

    instance: str | None = None

    def __post_init__(self) -> None:
        if self.instance is not None and not _NAME.fullmatch(self.instance):
            raise ConfigError(f"--instance: {self.instance!r} must be of letters, digits, _, . and -")

    @property
    def name(self) -> str:
        """Name of the unit and of its file."""
        return "rlhfd.service" if self.instance is None else f"rlhfd@{self.instance}.service"

    @property
    def path(self) -> Path:
        """The unit file."""
        return UNIT_DIR / self.name

    @property
    def folder(self) -> str:
        """Name of the unit's folders in /run, /var/lib and /var/cache."""
        return "rlhfd" if self.instance is None else f"rlhfd-{self.instance}"

    @property
    def runtime_dir(self) -> Path:
        """Runtime directory, by which commands find the instance."""
        return Path("/run") / self.folder

    @property
    def state_dir(self) -> Path:
        """State directory, which an uninstall keeps."""
        return Path("/var/lib") / self.folder

    @property
    def default_config(self) -> Path:
        """Configuration file if no other one is given."""
        return Path("/etc/rlhfd") / f"{self.instance or 'rlhfd'}.toml"

    @classmethod
    def of_runtime_dir(cls, runtime_dir: Path) -> Unit | None:
        """Return the unit of a runtime directory, running or not; None if it belongs to no unit."""
        head, _, name = runtime_dir.name.partition("-")
        if runtime_dir.parent != Path("/run") or head != "rlhfd" or (name and not _NAME.fullmatch(name)):
            return None
        return cls(name or None)


@dataclass(frozen=True)
class Plan:
    """An installation.

    Attributes:
        user: User of the service.
        config: Configuration of the service.
        text: The unit file.
        notes: Notes for the operator, a line each.
    """

    unit: Unit
    user: str
    config: Path
    text: str
    notes: tuple[str, ...]


def plan(unit: Unit, config: Path | None, user: str | None, environ: Mapping[str, str]) -> Plan:
    """Return the plan of a service that this installation runs.

    Args:
        unit: The unit to install.
        config: The unit's configuration; None for the one in RLHFD_CONFIG or, with an instance, /etc/rlhfd/NAME.toml.
        user: User of the service; None for the user who called sudo, else the calling user.
        environ: The environment.

    Raises:
        ConfigError: If the configuration cannot be run, or there is no such user, or no such file.
    """
    given = config or (
        Path(environ[CONFIG_VARIABLE]) if unit.instance is None and environ.get(CONFIG_VARIABLE) else None
    )
    path = (given or unit.default_config).absolute()
    notes = [
        f"{name} is set here and not passed to the service: set it in the configuration"
        for name in sorted(environ)
        if name.startswith("RLHFD_") and "__" in name
    ]
    shown = [path]
    if given or path.exists():
        # The unit has folders of its own in place of the configuration's.
        checks = functools.partial(problems_of_files, unused=FOLDER_KEYS)
        loaded = config_load.load(path, (), {}, check_files=checks, on_cards=bool(visible_gpus({})))
        if loaded.config.cluster.engine == "ray":
            shown.append(_RAY)
        notes += [
            f"{loaded.where(key)} is not in force under systemd: {folder} is"
            for key, folder in (("daemon.runtime_dir", unit.runtime_dir), ("daemon.state_dir", unit.state_dir))
            if key in loaded.origins
        ]
    else:
        notes.append(f"{path} does not exist yet: write it before the start")
    name = _user(user, environ)
    program, also = Path(sys.executable).with_name("rlhfd"), ""
    if environ.get("RLHFD_VENV") and _CHECKOUT.exists():
        # A ready environment has no program rlhfd, or that of another checkout.
        program, also = _CHECKOUT, f" RLHFD_VENV={_escaped(Path(sys.prefix))}"
    if not program.exists():
        raise ConfigError(
            f"a unit runs the program of this environment, and there is no {program}: install rlhfd into it"
        )
    text = shipped(unit)
    configured = f"/etc/rlhfd/{'rlhfd' if unit.instance is None else '%i'}.toml"
    for old, new in (
        ("/opt/rlhfd/.venv/bin/rlhfd", _escaped(program)),
        ("User=rlhfd\n", f"User={name}\n"),
        ("WorkingDirectory=/etc/rlhfd\n", f"WorkingDirectory={_escaped(path.parent)}\n"),
        (configured, f"{_escaped(path)}{also}"),
    ):
        text = _replaced(text, old, new)
    shown += [program, Path(sys.prefix), Path(sys.executable), SHIPPED]
    # A link is followed to the end.
    shown = [seen for found in shown for seen in (found, Path(os.path.realpath(found)))]
    for strict, (relaxed, folders) in _HIDING.items():
        if hidden := [str(found) for found in shown if any(found.is_relative_to(folder) for folder in folders)]:
            text = _replaced(text, strict, relaxed)
            notes.append(
                f"{relaxed.splitlines()[0]}, not {strict.partition('=')[2]}: the service could not see {hidden[0]}"
            )
    return Plan(unit, name, path, text, tuple(notes))


def _user(given: str | None, environ: Mapping[str, str]) -> str:
    if given == "":
        # As of a variable that is not set: the service would run as the calling user, such as root.
        raise ConfigError("--user is empty: give the user of the service")
    try:
        name = given or environ.get("SUDO_USER") or pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        raise ConfigError(f"--user: the calling user has the number {os.geteuid()} and no name: give one") from None
    try:
        pwd.getpwnam(name)
    except KeyError:
        raise ConfigError(f"--user: there is no user {name}: `useradd --system {name}`") from None
    return name


def shipped(unit: Unit) -> str:
    """Return a unit file as shipped: for an installation in /opt/rlhfd, user rlhfd, configuration in /etc/rlhfd."""
    text = SHIPPED.read_text()
    for one, instance in () if unit.instance is None else _NAMED.items():
        text = _replaced(text, one, instance)
    return text


def verify(planned: Plan) -> None:
    """Have systemd verify a unit before it is installed.

    Raises:
        ConfigError: If it reports a problem, unknown keys included.
    """
    with tempfile.TemporaryDirectory(prefix="rlhfd-units-") as folder:
        path = Path(folder, planned.unit.name)
        path.write_text(planned.text)
        found = _run("systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(path))
    # An unknown key is reported on standard error, with exit code 0.
    ours = [line for line in found.stderr.splitlines() if "rlhfd" in line]
    if ours or found.returncode:
        raise ConfigError("systemd refuses the unit:\n" + "\n".join(ours or [found.stderr]))


def install(planned: Plan) -> None:
    """Write the unit and reload systemd; nothing is started.

    Raises:
        ConfigError: If systemd refuses the unit.
        RlhfdError: If the unit cannot be written, or systemd does not run this machine.
    """
    verify(planned)
    path = planned.unit.path
    try:
        # At once and whole: systemd may read it at any time.
        with replacing(path, temporary=path.with_name(f".{path.name}.new")) as descriptor:
            write_at(descriptor, planned.text.encode(), 0)
            os.fchmod(descriptor, 0o644)
    except OSError as error:
        raise RlhfdError(f"{path}: {error.strerror}; root installs a unit, `rlhfd systemd unit` prints it") from error
    _systemctl("daemon-reload")


def uninstall(unit: Unit) -> list[str]:
    """Shut the service down and remove its unit.

    Returns:
        The things removed and the things kept, a line each.

    Raises:
        NotRunningError: If the unit is not installed.
        RlhfdError: If systemd refuses, or the unit cannot be removed.
    """
    if not unit.path.exists():
        raise NotRunningError(f"{unit.path} is not installed")
    _systemctl("disable", "--now", unit.name, timeout_s=_STOP_TIMEOUT_S)
    # A failed unit would stay in systemd's memory without a file.
    _run("systemctl", "reset-failed", unit.name)
    unit.path.unlink()
    _systemctl("daemon-reload")
    for folder in (unit.runtime_dir, Path("/var/cache") / unit.folder):
        shutil.rmtree(folder, ignore_errors=True)
    done = [f"{unit.name} is stopped and removed"]
    if unit.state_dir.exists():
        done.append(f"{unit.state_dir} stays: checkpoints and untrained rows")
        left = shm_directory(unit.runtime_dir, unit.state_dir.stat().st_uid)
        if left.exists():
            done.append(f"{left} stays, a killed daemon left it: rm -r {left}")
    return done


def _replaced(text: str, old: str, new: str) -> str:
    assert old in text, old
    return text.replace(old, new)


def _escaped(path: Path) -> str:
    if any(letter in str(path) for letter in " \t\"'\\%$;"):
        raise ConfigError(f"a unit cannot name {path}: move it to a path without blanks and quotes")
    return str(path)


def _systemctl(*words: str, timeout_s: float = _TIMEOUT_S) -> None:
    found = _run("systemctl", *words, timeout_s=timeout_s)
    if found.returncode:
        raise RlhfdError(f"systemctl {' '.join(words)}: {found.stderr.strip() or found.returncode}")


def _run(*command: str, timeout_s: float = _TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s)
    except FileNotFoundError:
        raise RlhfdError(f"{command[0]} is not on this machine") from None
    except subprocess.TimeoutExpired:
        raise RlhfdError(f"{' '.join(command)} has not ended within {timeout_s:g} s") from None
