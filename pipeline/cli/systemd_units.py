"""The systemd units of this checkout: written with its paths, verified by systemd, installed and removed.

rlhfd.service                              the one instance, of the configuration that it was installed with
rlhfd@.service                             rlhfd@NAME.service runs /etc/rlhfd/NAME.toml,
rlhfd@NAME.service.d/configuration.conf    or the file that it was installed with
"""

from __future__ import annotations

import contextlib
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
from pipeline.config.load import CONFIG_VARIABLE, LoadedConfig
from pipeline.config.types import BUILTIN_PREFIX
from pipeline.errors import ConfigError, NotRunningError, RlhfdError
from pipeline.prompts.files import folder_of
from pipeline.runtime import lock
from pipeline.storage.files import replacing
from pipeline.supervisor.preflight import problems_of_files

UNIT_DIR = Path("/etc/systemd/system")
BOOTED = Path("/run/systemd/system")
"""Exists if systemd is PID 1."""
SHIPPED_DIR = Path(__file__).parents[2] / "systemd"
_DROP_IN = "configuration.conf"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
# Settings that hide these folders from a service (it would exit with 203, or find no model), and their relaxed form.
_HIDING = {
    "ProtectHome=yes": ("ProtectHome=read-only", (Path("/home"), Path("/root"), Path("/run/user"))),
    "PrivateTmp=yes": ("PrivateTmp=no\nReadWritePaths=/tmp /var/tmp", (Path("/tmp"), Path("/var/tmp"))),
}
_TIMEOUT_S = 60.0
# Time for drain and spool, and the extensions that systemd grants.
_STOP_TIMEOUT_S = 900.0
_FIRST_LOGIN_UID = 1000


@dataclass(frozen=True)
class Unit:
    """A unit: the single service, or an instance of the template unit.

    Attributes:
        instance: Name of the instance, None for ``rlhfd.service``.
    """

    instance: str | None = None

    def __post_init__(self) -> None:
        if self.instance is not None and not _NAME.fullmatch(self.instance):
            raise ConfigError(f"--instance: {self.instance!r} must be of letters, digits, _, . and -")

    @property
    def name(self) -> str:
        """Name of the unit for systemctl."""
        return "rlhfd.service" if self.instance is None else f"rlhfd@{self.instance}.service"

    @property
    def file(self) -> str:
        """Name of the unit file."""
        return "rlhfd.service" if self.instance is None else "rlhfd@.service"

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
    """The files of an installation.

    Attributes:
        files: Text of each file, by its path below `UNIT_DIR`.
        notes: Notes for the operator, a line each.
    """

    unit: Unit
    user: str
    config: Path
    files: Mapping[str, str]
    notes: tuple[str, ...]


def plan(unit: Unit, config: Path | None, user: str | None, environ: Mapping[str, str]) -> Plan:
    """Return the plan of an installation from this checkout.

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
    needed: list[Path] = []
    if given or path.exists():
        loaded = config_load.load(path, (), {}, check_files=problems_of_files)
        needed = _named_paths(loaded)
        notes += [
            f"{loaded.where(key)} is not in force under systemd: {folder} is"
            for key, folder in (("daemon.runtime_dir", unit.runtime_dir), ("daemon.state_dir", unit.state_dir))
            if key in loaded.origins
        ]
    else:
        notes.append(f"{path} does not exist yet: write it before the start")
    account = _account(user or environ.get("SUDO_USER") or pwd.getpwuid(os.geteuid()).pw_name)
    program = Path(sys.executable).with_name("rlhfd")
    if not SHIPPED_DIR.is_dir() or not program.exists():
        raise ConfigError(
            f"units are made from a checkout of rlhfd with its environment: no {SHIPPED_DIR} or {program}"
        )
    text = _rendered(unit, program, account.pw_name)
    for strict, (relaxed, folders) in _HIDING.items():
        paths = (program, Path(sys.executable).resolve(), SHIPPED_DIR, path, *needed)
        if hidden := [str(found) for found in paths if any(found.is_relative_to(folder) for folder in folders)]:
            text = _replaced(text, strict, relaxed)
            notes.append(
                f"{relaxed.splitlines()[0]}, not {strict.partition('=')[2]}: the service could not see {hidden[0]}"
            )
    if account.pw_uid >= _FIRST_LOGIN_UID and not Path("/var/lib/systemd/linger", account.pw_name).exists():
        notes.append(
            f"{account.pw_name} is a login user, whose shared memory logind may remove at the last logout: "
            f"`loginctl enable-linger {account.pw_name}`, or a system user by --user"
        )
    files = {unit.file: text}
    if unit.instance is None:
        files[unit.file] = _replaced(text, str(unit.default_config), str(path), str(unit.default_config.parent))
    elif given:
        files[f"{unit.name}.d/{_DROP_IN}"] = (
            f"[Service]\nWorkingDirectory={path.parent}\nEnvironment=RLHFD_CONFIG={path}\n"
        )
    return Plan(unit, account.pw_name, path, files, tuple(notes))


def verify(files: Mapping[str, str], unit: Unit) -> None:
    """Have systemd verify the units before they are installed.

    Raises:
        ConfigError: If it reports a problem, unknown keys included.
    """
    with tempfile.TemporaryDirectory(prefix="rlhfd-units-") as folder:
        _write(files, Path(folder))
        found = _run("systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(Path(folder, unit.name)))
    # An unknown key is reported on standard error, with exit code 0.
    ours = [line for line in found.stderr.splitlines() if "rlhfd" in line]
    if ours or found.returncode:
        raise ConfigError("systemd refuses the unit:\n" + "\n".join(ours or [found.stderr]))


def install(planned: Plan) -> None:
    """Write the units and reload systemd; nothing is started.

    Raises:
        ConfigError: If systemd refuses the unit, or the user cannot run this checkout.
        RlhfdError: If systemd does not run this machine, the caller is not root, or systemd fails.
    """
    _refuse_elsewhere()
    verify(planned.files, planned.unit)
    _try_user(planned)
    _write(planned.files, UNIT_DIR)
    _systemctl("daemon-reload")


def uninstall(unit: Unit) -> list[str]:
    """Shut the service down and remove the files of `install`.

    Returns:
        The things removed and the things kept, a line each.

    Raises:
        NotRunningError: If the unit is not installed.
        RlhfdError: If systemd does not run this machine, the caller is not root, or systemd refuses.
    """
    _refuse_elsewhere()
    if not (UNIT_DIR / unit.file).exists():
        raise NotRunningError(f"{unit.file} is not installed in {UNIT_DIR}")
    _systemctl("disable", "--now", unit.name, timeout_s=_STOP_TIMEOUT_S)
    # A failed unit would stay in systemd's memory without a file.
    _run("systemctl", "reset-failed", unit.name)
    drop_in = UNIT_DIR / f"{unit.name}.d" / _DROP_IN
    drop_in.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # gone, or it holds files of the operator's
        drop_in.parent.rmdir()
    done = [f"{unit.name} is stopped and removed"]
    others = [] if unit.instance is None else _other_instances()
    if others:
        done.append(f"{unit.file} stays for {', '.join(others)}")
    else:
        (UNIT_DIR / unit.file).unlink()
    _systemctl("daemon-reload")
    for uid in {os.geteuid(), *_owners(unit.state_dir)}:
        left = lock.shm_directory(unit.runtime_dir, uid)
        if left.exists() and lock.holder(unit.runtime_dir) is None:
            shutil.rmtree(left)
            done.append(f"{left}, which a killed daemon left, is removed")
    shutil.rmtree(unit.runtime_dir, ignore_errors=True)
    shutil.rmtree(Path("/var/cache") / unit.folder, ignore_errors=True)
    if unit.state_dir.exists():
        done.append(f"{unit.state_dir} stays: checkpoints and untrained rows")
    return done


def _rendered(unit: Unit, program: Path, user: str) -> str:
    text = (SHIPPED_DIR / unit.file).read_text()
    text = _replaced(text, "/opt/rlhfd/.venv/bin/rlhfd", _escaped(program))
    return _replaced(text, "User=rlhfd\n", f"User={user}\n")


def _replaced(text: str, old: str, new: str, folder: str = "") -> str:
    assert old in text, old
    text = text.replace(old, new)
    return text.replace(f"WorkingDirectory={folder}\n", f"WorkingDirectory={Path(new).parent}\n") if folder else text


def _escaped(path: Path) -> str:
    if any(letter in str(path) for letter in " \t\"'\\%$;"):
        raise ConfigError(f"a unit cannot name {path}: move the checkout to a path without blanks and quotes")
    return str(path)


def _named_paths(loaded: LoadedConfig) -> list[Path]:
    """Return the files and folders that the daemon reads with a configuration."""
    model, metrics, reward = loaded.config.model, loaded.config.metrics, loaded.config.reward
    # The sockets and logs of the Ray instance on this machine.
    session = Path("/tmp/ray") if loaded.config.cluster.engine == "ray" else None
    prompts = [folder_of(source) for source in loaded.config.prompts.files]
    named = (model.actor, model.reference, model.critic, model.reward, model.lora_adapter, *prompts,
             loaded.config.prompts.tools_file, *loaded.config.evaluation.files,
             reward.schema_file, reward.judge_template_file, metrics.token_file,
             metrics.tls_cert, metrics.tls_key, session)  # fmt: skip
    return [Path(path).absolute() for path in named if path is not None and not str(path).startswith(BUILTIN_PREFIX)]


def _account(name: str) -> pwd.struct_passwd:
    try:
        return pwd.getpwnam(name)
    except KeyError:
        raise ConfigError(f"--user: there is no user {name}: `useradd --system {name}`") from None


def _owners(path: Path) -> set[int]:
    return {path.stat().st_uid} if path.exists() else set()


def _other_instances() -> list[str]:
    """Return the instances of the template unit that run, or have a configuration of their own."""
    listed = _run("systemctl", "list-units", "--all", "--plain", "--no-legend", "rlhfd@*.service").stdout
    found = {line.split()[0] for line in listed.splitlines() if line.split()}
    return sorted(
        found | {path.parent.name.removesuffix(".d") for path in UNIT_DIR.glob(f"rlhfd@?*.service.d/{_DROP_IN}")}
    )


def _write(files: Mapping[str, str], folder: Path) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        # At once and whole: systemd may read it at any time.
        with (
            replacing(path, temporary=path.with_name(f".{path.name}.new")) as descriptor,
            open(descriptor, "w", closefd=False) as file,
        ):
            file.write(text)
            os.fchmod(descriptor, 0o644)


def _refuse_elsewhere() -> None:
    if not BOOTED.is_dir():
        raise RlhfdError("systemd does not run this machine; --dry-run shows the unit nevertheless")
    if os.geteuid() != 0:
        raise RlhfdError(f"units in {UNIT_DIR} are root's to write: sudo, or --dry-run")


def _try_user(planned: Plan) -> None:
    """Check that the user can import this checkout as the service does: without capabilities, even root obeys modes."""
    user = planned.user
    command = ["setpriv", f"--reuid={user}", f"--regid={pwd.getpwnam(user).pw_gid}", "--init-groups",
               "--inh-caps=-all", "--bounding-set=-all", sys.executable, "-c",
               "import os, sys, pipeline.config.schema; not os.path.exists(sys.argv[1]) or open(sys.argv[1]).close()",
               str(planned.config)]  # fmt: skip
    found = _run(*command)
    if found.returncode:
        reason = (found.stderr.splitlines() or ["no reason given"])[-1]
        raise ConfigError(f"--user: {user} cannot run {sys.executable} with {planned.config}: {reason}")


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
