"""The environments of the peers, each made at its first use in `.venv-peers/`.

Transport has two, because reverb needs a TensorFlow and a numpy of 2023. torch has the version of constraints.txt, so
that the build is the one that rlhfd runs on. If an environment cannot be made, only the rows of its peers are missing,
and the reason is shown.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from benches.report import ROOT

FOLDER = ROOT / ".venv-peers"
_PINNED = ("torch", "numpy", "pyzmq", "msgspec")


@dataclasses.dataclass(frozen=True)
class Environment:
    """Packages that are installed together.

    Attributes:
        name: Name of its folder.
        packages: Requirements with versions.
        pinned: Names of packages in the versions of constraints.txt.
        is_beside: Whether it has the packages of this environment too: the comparison is of the layers above them.
    """

    name: str
    packages: tuple[str, ...]
    pinned: tuple[str, ...] = ()
    is_beside: bool = False

    @property
    def folder(self) -> Path:
        """Its folder, which need not be there."""
        return FOLDER / self.name

    @property
    def requirements(self) -> list[str]:
        """Requirements for pip."""
        lines = (ROOT / "constraints.txt").read_text().splitlines()
        versions = dict(line.split("==") for line in lines if "==" in line)
        return [*(f"{name}=={versions[name]}" for name in self.pinned), *self.packages]


RAY = Environment("ray", ("ray==2.58.0", "torchrl==0.14.1", "TransferQueue==0.1.11"), _PINNED)
REVERB = Environment("reverb", ("dm-reverb[tensorflow]==0.14.0",), ("pyzmq",))
TRL = Environment("trl", ("trl==1.16.0",), is_beside=True)


class NotInstallableError(Exception):
    """A peer's environment cannot be made here; the message has the reason."""


def python_of(environment: Environment) -> str:
    """Return the interpreter of an environment, which is made first if it is missing.

    Raises:
        NotInstallableError: If pip fails.
        OSError: If the environment cannot be written.
    """
    folder = environment.folder
    python, stamp = folder / "bin" / "python", folder / "installed"
    wanted = "\n".join(environment.requirements)
    if stamp.exists() and stamp.read_text() == wanted:
        return str(python)
    print(f"==> installing {', '.join(environment.packages)} into {folder}: minutes", file=sys.stderr, flush=True)
    began_s = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(folder)])
    if environment.is_beside:
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "rlhfd.pth").write_text(sysconfig.get_path("purelib"))
    _run([str(python), "-m", "pip", "install", "--no-input", "--quiet", *environment.requirements])
    stamp.write_text(wanted)
    print(f"==> took {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)
    return str(python)


def python_of_vllm() -> str:
    """Return the interpreter of the environment with vLLM, which is made first if it is missing.

    Raises:
        subprocess.CalledProcessError: If it cannot be made.
    """
    environment = {name: value for name, value in os.environ.items() if name != "RLHFD_VENV"} | {"RLHFD_EXTRAS": "vllm"}
    subprocess.run([ROOT / "bin" / "rlhfd", "--version"], env=environment, check=True, stdout=sys.stderr)
    return str(ROOT / ".venv-vllm" / "bin" / "python")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, cwd=Path("/"), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise NotInstallableError(reasons[0] if reasons else f"exit {done.returncode}")
