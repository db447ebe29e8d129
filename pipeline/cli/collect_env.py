"""`rlhfd collect-env`: the facts for a bug report, without secrets and without the text of prompts; it never fails.

A part that cannot be collected shows its error in its place; the other parts are not affected.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from pipeline.cli.runs import entries_of
from pipeline.cli.status import render, size
from pipeline.config import load as config_load
from pipeline.errors import NotRunningError, RlhfdError
from pipeline.runtime import control, lock
from pipeline.supervisor import placement
from pipeline.supervisor.preflight import problems_of_files
from pipeline.telemetry import log_file, log_lines

_PACKAGES = (
    "torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic", "msgspec", "pyzmq", "xxhash",
    "setproctitle", "starlette", "uvicorn", "rich", "click", "prometheus-client", "pillow", "ray", "vllm",
)  # fmt: skip
_LIMITS = {
    "open files": resource.RLIMIT_NOFILE,
    "processes": resource.RLIMIT_NPROC,
    "locked memory": resource.RLIMIT_MEMLOCK,
    "address space": resource.RLIMIT_AS,
    "file size": resource.RLIMIT_FSIZE,
    "core": resource.RLIMIT_CORE,
}
_VARIABLES = re.compile(
    r"(RLHFD|CUDA|NCCL|TORCH|PYTORCH|OMP|MKL|HF|TOKENIZERS|GLOO|LD_|PYTHON|VIRTUAL_ENV|TMPDIR|XDG_RUNTIME).*"
)
_SECRET = re.compile(r"TOKEN(?!IZERS)|SECRET|PASSW|KEY|CREDENTIAL|AUTH", re.IGNORECASE)
_TIMEOUT_S = 5.0
_LAST_LINES = 5000
_LAST_ERRORS = 50
_LAST_RUNS = 20
_GRAVE = ("warning", "error", "critical")
_ROOT = Path(__file__).parents[2]


def report(path: Path | None, sets: Sequence[str], environ: Mapping[str, str], runtime_dir: Path | None = None) -> str:
    """Return the report.

    Args:
        path: The configuration file, as for `pipeline.config.load.load`.
        sets: Assignments ``section.key=value``.
        environ: The environment.
        runtime_dir: Runtime directory of the running instance; None for the configured one.
    """
    folder: Callable[[], Path] = lambda: runtime_dir or config_load.find_runtime_dir(path, environ)  # noqa: E731
    parts: dict[str, Callable[[], Iterator[str]]] = {
        "rlhfd": _version,
        "machine": _machine,
        "GPUs": lambda: _gpus(environ),
        "packages": _packages,
        "limits": _limits,
        "shared memory and disks": lambda: _storage(path, sets, environ),
        "runs": lambda: _runs(path, sets, environ),
        "environment": lambda: _environment(environ),
        "configuration": lambda: _configuration(path, sets, environ),
        "instance": lambda: _instance(folder()),
        "last warnings and errors": lambda: _last_errors(path, sets, environ, folder()),
    }
    return "\n".join(line for title, part in parts.items() for line in _part(title, part))


def _part(title: str, part: Callable[[], Iterator[str]]) -> Iterator[str]:
    yield f"## {title}\n"
    try:
        yield from part()
    except RlhfdError as error:
        yield str(error)
    except Exception as error:  # noqa: BLE001 - an unexpected error is part of the report
        yield f"not available: {type(error).__name__}: {error}"
    yield ""


def _version() -> Iterator[str]:
    yield f"version {lock.installed_version()}, Python {sys.version.split()[0]} at {sys.executable}"
    yield f"commit {_output_of('git', '-C', str(_ROOT), 'describe', '--always', '--dirty', '--abbrev=12')}"


def _machine() -> Iterator[str]:
    yield platform.platform()
    name = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    yield f"{os.cpu_count()} CPUs, {len(placement.usable_cpus())} usable: {name[1] if name else platform.machine()}"
    memory = dict(re.findall(r"(MemTotal|MemAvailable|SwapTotal):\s+(\d+) kB", Path("/proc/meminfo").read_text()))
    yield "memory: " + ", ".join(f"{key} {size(int(kib) << 10)}" for key, kib in memory.items())
    cgroup = Path("/sys/fs/cgroup/memory.max")
    yield f"cgroup memory.max: {cgroup.read_text().strip() if cgroup.exists() else 'none'}"
    yield f"load: {' '.join(f'{load:.1f}' for load in os.getloadavg())}"


def _gpus(environ: Mapping[str, str]) -> Iterator[str]:
    yield f"visible to rlhfd: {', '.join(placement.visible_gpus(environ)) or 'none'}"
    fields = "index,name,driver_version,memory.total,memory.used,utilization.gpu,ecc.errors.uncorrected.volatile.total"
    yield _output_of("nvidia-smi", f"--query-gpu={fields}", "--format=csv")


def _packages() -> Iterator[str]:
    for name in _PACKAGES:
        try:
            yield f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            yield f"{name} is not installed"


def _limits() -> Iterator[str]:
    for name, number in _LIMITS.items():
        soft, hard = resource.getrlimit(number)
        yield f"{name}: {_limit(soft)}, at most {_limit(hard)}"


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"


def _storage(path: Path | None, sets: Sequence[str], environ: Mapping[str, str]) -> Iterator[str]:
    yield _used(Path("/dev/shm"))
    for left in sorted(Path("/dev/shm").glob(f"rlhfd-{os.geteuid()}-*")):
        nbytes = sum(file.stat().st_size for file in left.glob("*") if file.is_file())
        yield f"{left}: {size(nbytes)}"
    state = Path(config_load.load(path, sets, environ).config.daemon.state_dir)
    yield _used(next(folder for folder in (state, *state.parents) if folder.exists()))


def _runs(path: Path | None, sets: Sequence[str], environ: Mapping[str, str]) -> Iterator[str]:
    state_dir = Path(config_load.load(path, sets, environ).config.daemon.state_dir)
    for run in entries_of(state_dir)[-_LAST_RUNS:]:
        kept = ", ".join(run["checkpoints"]) or "no checkpoint"
        yield f"{run['name']}: {run['state']}, step {run['step']:,}, {kept}; {run['folder']}"


def _used(folder: Path) -> str:
    usage = shutil.disk_usage(folder)
    return f"{folder}: {size(usage.free)} of {size(usage.total)} free"


def _environment(environ: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(environ):
        if _VARIABLES.fullmatch(name):
            yield f"{name}={'(hidden)' if _SECRET.search(name) else environ[name]}"


def _configuration(path: Path | None, sets: Sequence[str], environ: Mapping[str, str]) -> Iterator[str]:
    try:
        yield config_load.render(config_load.load(path, sets, environ), effective=False, origin=True) or "all defaults"
    finally:
        # With files: a file missing on disk is the cause of many reports.
        try:
            config_load.load(path, sets, environ, check_files=problems_of_files)
        except RlhfdError as error:
            yield str(error)


def _instance(folder: Path) -> Iterator[str]:
    record = lock.find(folder)
    yield render(control.request(record, "status", _TIMEOUT_S))
    yield ""
    yield from control.request(record, "why", _TIMEOUT_S).get("sentences") or []


def _last_errors(path: Path | None, sets: Sequence[str], environ: Mapping[str, str], folder: Path) -> Iterator[str]:
    daemon = config_load.load(path, sets, environ).config.daemon
    try:
        destination = lock.find(folder).log
    except NotRunningError:
        destination = str(log_file.path_in(Path(daemon.state_dir)))
    if daemon.log_texts:
        yield f"left out, for daemon.log_texts is true and lines may quote prompts: {destination}"
    elif destination.startswith("journal:"):
        unit = destination.removeprefix("journal:")
        yield _output_of("journalctl", f"--unit={unit}", "--priority=warning", f"--lines={_LAST_ERRORS}", "--no-pager")
    else:
        lines = next(iter(log_file.read(Path(destination), _LAST_LINES)), [])
        grave = [line for line in lines if log_lines.parse(line, log_lines.process_of(line)).level in _GRAVE]
        yield from grave[-_LAST_ERRORS:] or [f"none in the last {_LAST_LINES:,} lines of {destination}"]


def _output_of(*words: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{words[0]}: {error}"
    return (done.stdout if done.returncode == 0 else f"{words[0]}: {done.stderr or done.stdout}").strip()
