"""A real systemd for a test: PID 1 of namespaces of its own, over this machine's files, booted in about a second.

    with SystemdBox(tmp_path) as box:
        box.run("systemctl", "start", "rlhfd")

It sees the files of this machine; its writes to /etc, /var, /run and /dev/shm are discarded at its end. Needs root and
the right to make namespaces, mounts and control groups.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType

import pytest

from tests.support.daemon import wait_until

ROOT = Path(__file__).parents[2]
BOOT_TIMEOUT_S = 30.0
COMMAND_TIMEOUT_S = 60.0

# Outside: a control group of its own, which is removed when the inner systemd has ended.
_OUTER = """
set -eu
mount --make-rprivate /
mkdir -p "$BOX/cgroup"
mount -t cgroup2 none "$BOX/cgroup"
group=$BOX/cgroup/rlhfd-box-$$
mkdir "$group"
sh -c 'echo $$ >"$1/cgroup.procs"; shift; exec "$@"' - "$group" setpriv --pdeathsig KILL \
    unshare --mount --pid --uts --ipc --cgroup --net --fork --kill-child sh -c "$INNER" || true
find "$group" -depth -type d -exec rmdir {} +
"""

_INNER = """
set -eu
mount -t proc proc /proc
mount --bind /proc/sys /proc/sys
mount -o remount,bind,ro /proc/sys
mount -t tmpfs -o mode=755 none /run
mount -t tmpfs -o mode=1777 none /dev/shm
for folder in etc var; do
    mkdir -p /run/box/$folder/upper /run/box/$folder/work
    mount -t overlay -o lowerdir=/$folder,upperdir=/run/box/$folder/upper,workdir=/run/box/$folder/work none /$folder
done
umount --recursive --quiet /sys/fs/cgroup || true
mount -t cgroup2 -o nsdelegate none /sys/fs/cgroup
rm -rf /etc/systemd/system/*
mkdir -p /run/systemd/system /run/systemd/journald.conf.d
printf '[Journal]\\nStorage=volatile\\nReadKMsg=no\\nRateLimitIntervalSec=0\\n' >/run/systemd/journald.conf.d/box.conf
printf '[Unit]\\nRequires=basic.target systemd-journald.service\\nAfter=basic.target\\n' >/run/systemd/system/box.target
# Units of a machine, not of a service.
for unit in $MASKED; do ln -s /dev/null /run/systemd/system/$unit; done
exec env -i PATH="$PATH" container=box /lib/systemd/systemd --system --unit=box.target --log-target=journal
"""

_MASKED = (
    *(f"systemd-{name}.service" for name in (
        "sysctl", "modules-load", "udevd", "udev-trigger", "tmpfiles-setup", "tmpfiles-setup-dev", "sysusers",
        "remount-fs", "random-seed", "update-utmp", "firstboot", "machine-id-commit", "journal-flush", "binfmt",
        "logind", "hwdb-update", "pcrphase", "pcrphase-sysinit", "repart", "timesyncd", "resolved", "networkd",
    )),
    "kmod-static-nodes.service", "systemd-journald-audit.socket", "systemd-udevd-control.socket",
    "systemd-udevd-kernel.socket", "dbus.socket", "sys-kernel-debug.mount", "sys-kernel-tracing.mount",
    "sys-kernel-config.mount", "sys-fs-fuse-connections.mount", "dev-hugepages.mount", "dev-mqueue.mount", "tmp.mount",
    "proc-sys-fs-binfmt_misc.automount",
)  # fmt: skip


def booted_box(folder: Path) -> SystemdBox:
    """Return a box that can be entered; skip, or in CI fail, where this machine does not let systemd boot in one."""
    try:
        with SystemdBox(folder):
            return SystemdBox(folder)
    except RuntimeError as error:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(error))


class SystemdBox:
    """A booted systemd; a context manager that leaves nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._console = folder / "console"

    def __enter__(self) -> SystemdBox:
        """Boot it.

        Raises:
            RuntimeError: If it does not boot on this machine; the message has the console's output.
        """
        environment = {**os.environ, "BOX": str(self._folder), "INNER": _INNER, "MASKED": " ".join(_MASKED)}
        with self._console.open("wb") as console:
            self._outer = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "sh", "-c", _OUTER],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
            )
        try:
            wait_until(lambda: self._is_up() or self._outer.poll() is not None, BOOT_TIMEOUT_S, "it is up", poll_s=0.1)
            if self._outer.poll() is not None:
                raise RuntimeError("it ended")
        except BaseException as error:
            self._end()
            if not isinstance(error, TimeoutError | RuntimeError):
                raise
            raise RuntimeError(f"systemd does not boot in namespaces here ({error}):\n{self.console}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all that runs in it."""
        if error is not None:
            sys.stderr.write(self.console + self.run("journalctl", "--no-pager", "--lines=200").stdout)
        self._end()

    @property
    def console(self) -> str:
        """Output of its console."""
        return self._console.read_text(errors="replace")

    def run(
        self, *command: str, check: bool = True, timeout_s: float = COMMAND_TIMEOUT_S
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in it, with this tree's `pipeline`."""
        words = ["nsenter", f"--target={self._inner()}", "--mount", "--pid", "--uts", "--ipc", "--net", "--cgroup"]
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8"}
        found = subprocess.run(
            [*words, *command], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=timeout_s, check=False,
        )  # fmt: skip
        if check and found.returncode:
            raise AssertionError(f"{' '.join(command)}: {found.returncode}\n{found.stdout}{found.stderr}")
        return found

    def write(self, path: str, text: str) -> None:
        """Write a file in it."""
        self.run("mkdir", "-p", str(Path(path).parent))
        self.run("sh", "-c", 'printf %s "$2" >"$1"', "-", path, text)

    def show(self, unit: str, *properties: str) -> dict[str, str]:
        """Return properties of a unit."""
        found = self.run("systemctl", "show", unit, *(f"--property={name}" for name in properties)).stdout
        return dict(line.split("=", 1) for line in found.splitlines())

    def _inner(self) -> int | None:
        """Return the pid of its systemd as it is known outside."""
        pid = self._outer.pid
        for _ in range(2):
            try:
                found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            except (FileNotFoundError, ProcessLookupError):
                return None
            if not found:
                return None
            pid = int(found[0])
        return pid

    def _is_up(self) -> bool:
        if self._inner() is None:
            return False
        found = self.run("systemctl", "is-system-running", check=False)
        return found.stdout.strip() in ("running", "degraded")

    def _end(self) -> None:
        if (inner := self._inner()) is not None:
            os.kill(inner, signal.SIGKILL)
        try:
            # The outer shell removes the control groups.
            self._outer.wait(COMMAND_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._outer.kill()
            self._outer.wait()
