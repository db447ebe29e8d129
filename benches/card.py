"""`bin/card`: rlhfd on the card of this machine, in parts, each a process of its own with a deadline.

A part that fails or is late is a row of the table and exit code 1; the others run all the same. A part is ended with
SIGTERM, so that it ends its own processes in order, then with SIGKILL. No process and no shared memory is left.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from benches.__main__ import BENCHES
from benches.card_parts import ALL, KILLS, LONGEST_ROW, MODEL, NEW_TOKENS, PARTS, SLEEP, write_model
from benches.card_row import Place, Row
from benches.measure import descendants
from benches.report import RESULTS, ROOT, Section, Table, merge
from pipeline.runtime.lifeline import adopt_orphans, reap_orphans
from pipeline.runtime.lock import shm_directory
from pipeline.supervisor.placement import visible_gpus

_GRACE_S = 30.0
_ORPHANS_S = 5.0
_MODEL_S = 60.0
_SHM = Path("/dev/shm")
_TEXT = """*tests*: the tests that need a GPU. *embedded*: the embedded task, with SIGKILL of a worker, the trainer, the
buffer and a worker again. *transformers*, *vllm*: a run on a random model of Qwen2.5-0.5B's shape with each engine that
is installed, {new} tokens a response; memory is what the card has in use beside what it had before. *train*: steps on
ragged rows of the same model, up to {longest} tokens, packed and padded, and on long rows; 6 operations a parameter and
token, beside those that a product of matrices reaches; its head and the log-probs alone; one way after the other,
ratios are those of the medians. *publish*: weights through shared memory, against page-locked memory
of the card. All figures of a run are those of its own metrics."""
_KILLS_TEXT = """The embedded task with both roles on the card, undisturbed and with SIGKILL of each role in turns, the
supervisor's command started again at once; with vLLM also of its process; TRL where it is installed, one process, with
a checkpoint each 10 steps. One run each. How each figure is counted: `bin/bench kills`."""
_SLEEP_TEXT = """`rollout.sleep`: the engine of a run on a random model sleeps while the trainer steps on the same card;
Qwen2.5-1.5B's shape trained whole (*colocated*), 7B's with LoRA (*colocated-lora*), vLLM with a cache of 8 GiB. Memory
is that of the card beside what was in use before the run, read again and again, 20 ms after each reading, the largest
of a phase, asleep the least; the terms are those of `rlhfd plan`, the largest five."""


class _Group(NamedTuple):
    """Parts whose rows are a section of the results.

    Attributes:
        option: The option that names them; None for those that run by default.
    """

    name: str
    title: str
    text: str
    parts: Collection[str]
    option: str | None = None

    @property
    def command(self) -> str:
        """The command that runs them."""
        return "bin/card" if self.option is None else f"bin/card {self.option}"


_GROUPS = (
    _Group("card", "rlhfd on a card", _TEXT, PARTS),
    _Group("kills", "What a kill costs on a card", _KILLS_TEXT, KILLS, "--kills"),
    _Group("sleep", "A card that engine and trainer share in turns", _SLEEP_TEXT, SLEEP, "--sleep"),
)

Report = Mapping[str, Sequence[Row]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that are named, all by default; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="bin/card",
        description="Run rlhfd on this machine's card and print a table; all parts together write benches/RESULTS.md.",
        epilog="SMALL=1 bin/card    all of it on a CPU, small; nothing is written",
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME",
        help=f"one of {', '.join(ALL)}; by default {', '.join(PARTS)}",
    )  # fmt: skip
    for group in _GROUPS[1:]:
        parser.add_argument(
            group.option, dest="groups", action="append_const", const=group,
            help=f"the parts {', '.join(group.parts)}, with a section of their own",
        )  # fmt: skip
    parser.add_argument("--part", nargs=2, metavar=("NAME", "PLACE"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.part:
        return _be_part(options.part[0], json.loads(options.part[1]))
    if unknown := [name for name in options.names if name not in ALL]:
        parser.error(f"no part {unknown[0]!r}, only {', '.join(ALL)}")
    # A section is written of the run of all its parts.
    groups: list[_Group] = options.groups or ([] if options.names else [_GROUPS[0]])
    names = list(dict.fromkeys([*options.names, *(name for group in groups for name in group.parts)]))
    small = bool(os.environ.get("SMALL"))
    device = "" if small else _card()
    if not small and not device:
        print("bin/card: PyTorch finds no card here; SMALL=1 bin/card runs all of it on a CPU", file=sys.stderr)
        return 1
    adopt_orphans()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rlhfd-card-") as folder:
        # A SIGTERM ends the parts as an interrupt does.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        try:
            found = _all(names, Path(folder), device, small=small)
        finally:
            left = _end_orphans(os.getpid(), within_s=_ORPHANS_S)
    report = {name: rows for name, rows in found.items() if rows}
    if left:
        report["all parts"] = [Row("processes that were left", str(len(left)), failed=", ".join(left))]
    took_s = time.monotonic() - began_s
    print("\n".join(_table(report).lines()), flush=True)
    if not (small or os.environ.get("CI")):
        for group in groups:
            own = {name: rows for name, rows in report.items() if name in {*group.parts, MODEL, "all parts"}}
            text = " ".join(group.text.format(new=NEW_TOKENS[1], longest=f"{LONGEST_ROW[1]:,}").split())
            section = Section(group.name, group.title, text, [_table(own)], device)
            write(RESULTS, section, took_s=took_s, command=group.command)
    failed = [name for name, rows in report.items() if any(row.failed for row in rows)]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def write(results: Path, section: Section, *, took_s: float, command: str = "bin/card") -> None:
    """Put the section of a card into a results file, in place of an earlier one of the same card."""
    before = results.read_text() if results.exists() else ""
    results.write_text(
        merge(
            before, [(section.heading, section.markdown(took_s=took_s, command=command))], (*BENCHES, "card", "sleep")
        )
    )


def _table(report: Report) -> Table:
    cells = [_cells(name, row) for name, found in report.items() for row in found]
    return Table(("part", "figure", "measured", "against", "failed"), cells)


def _cells(name: str, row: Row) -> tuple[str, ...]:
    words = (name, row.figure, row.measured, row.against, f"FAILED: {row.failed}" if row.failed else "")
    return tuple(" ".join(word.replace("|", "/").split()) for word in words)


def _tell(name: str, row: Row) -> None:
    """Print a row at once: all that was measured is left by a run that is killed."""
    print(" | ".join(filter(None, _cells(name, row))), file=sys.stderr, flush=True)


def _card() -> str:
    """Return the name of the first card, found by another process: this one opens none."""
    program = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    return found.stdout.strip()


def _all(names: Sequence[str], folder: Path, device: str, *, small: bool) -> dict[str, list[Row]]:
    """Run parts, one after the other, but those together that are not timed; return their rows."""
    found: dict[str, list[Row]] = {name: [] for name in (MODEL, *names)}

    def part(name: str) -> None:
        place = Place(folder / name, folder / MODEL, device, small)
        place.folder.mkdir()
        print(f"==> {name}", file=sys.stderr, flush=True)
        began_s = time.monotonic()
        words = json.dumps({**dataclasses.asdict(place), "folder": str(place.folder), "model": str(place.model)})
        command = [sys.executable, "-m", "benches.card", "--part", name, words]
        deadline_s = place.deadline_s(ALL[name].deadline_s if name in ALL else _MODEL_S)
        found[name] = run_part(command, place, deadline_s, tell=functools.partial(_tell, name))
        print(f"==> {name}: {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)

    untimed = [name for name in names if not ALL[name].is_timed]
    with concurrent.futures.ThreadPoolExecutor(max_workers=3) as pool:
        # The model is made beside them, too.
        needs_model = any(ALL[name].needs_model for name in names)
        list(pool.map(part, [*untimed, *([MODEL] if needs_model else [])]))
    for name in names:
        if ALL[name].is_timed:
            part(name)
    return found


def run_part(
    command: Sequence[str],
    place: Place,
    deadline_s: float,
    *,
    grace_s: float = _GRACE_S,
    tell: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Run a part as a process; return its rows, and that of its failure. Nothing that it has started is left.

    Args:
        command: The command of the part, which prints a line of JSON for each row.
        place: Where the part runs; its output is beside that folder.
        deadline_s: Most seconds that it may take.
        grace_s: Seconds between SIGTERM and SIGKILL if it takes longer.
        tell: Called with each of its rows as soon as it is printed, in another thread.
    """
    before = set(_SHM.iterdir())
    log = place.folder.with_suffix(".log")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": _path(), "TRANSFORMERS_VERBOSITY": "error"}
    # A single card, whose memory is compared with the plan.
    # Compiled once for all parts: that of `train` is that of the runs.
    for compiler in ("TORCHINDUCTOR", "TRITON"):
        environment.setdefault(f"{compiler}_CACHE_DIR", str(place.folder.parent / "compiled" / compiler.lower()))
    environment["CUDA_VISIBLE_DEVICES"] = next(iter(visible_gpus(os.environ)), "") if place.device else ""
    late, found = False, list[Row]()

    def read(lines: IO[str]) -> None:
        with lines:
            for line in lines:
                if line.startswith("{"):
                    found.append(Row(**json.loads(line)))
                    tell(found[-1])

    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=output, cwd=ROOT, env=environment,
            start_new_session=True, text=True,
        )  # fmt: skip
        reader = threading.Thread(target=read, args=(process.stdout,), daemon=True)
        reader.start()
        try:
            process.wait(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            _end(process, grace_s)
            # An orphan may have the pipe, too.
            reader.join(_ORPHANS_S)
            _remove_shared_memory(place.folder, before)
    if late:
        found.append(Row("the part itself", failed=f"not done within {deadline_s:g} s; {_last(log)}"))
    elif process.returncode and not any(row.failed for row in found):
        found.append(Row("the part itself", failed=f"exit code {process.returncode}; {_last(log)}"))
    if any(row.failed for row in found):
        sys.stderr.write(f"{place.folder.name}:\n{log.read_text(errors='replace')[-4000:]}\n")
    return found


def _path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def _last(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][-300:] if lines else "it printed nothing"


def _end(process: subprocess.Popen[str], grace_s: float) -> None:
    """End a part, in order if it does so in time, and every process that it has started."""
    family = descendants(process.pid)
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=grace_s)
        family |= descendants(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pid in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _end_orphans(pid: int, *, within_s: float) -> list[str]:
    """Kill the descendants of a process that do not end by themselves in time; return their commands."""
    deadline_s, left = time.monotonic() + within_s, []
    while descendants(pid) and time.monotonic() < deadline_s:
        reap_orphans(())
        time.sleep(0.05)
    for one in descendants(pid):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{one}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            os.kill(one, signal.SIGKILL)
            # A dead process that waits for its parent has no command.
            left += [command[:100]] if command else []
    return left


def _remove_shared_memory(folder: Path, before: set[Path]) -> None:
    """Remove what a killed part has left: the folders of its daemons, and those of benchmarks."""
    own = {shm_directory(path) for path in folder.rglob("run")}
    for path in set(_SHM.iterdir()) - before:
        if path in own or path.name.startswith("rlhfd-bench-"):
            shutil.rmtree(path, ignore_errors=True)


def _be_part(name: str, words: Mapping[str, str]) -> int:
    """Run a part in this process; print a line of JSON for each of its rows."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    place = Place(Path(words["folder"]), Path(words["model"]), str(words["device"]), bool(words["small"]))
    # What a library prints must not be between the rows.
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    failed = False
    try:
        rows: Iterator[Row] = write_model(place) if name == MODEL else ALL[name].rows(place)
        for row in rows:
            failed |= bool(row.failed)
            print(json.dumps(dataclasses.asdict(row)), file=told, flush=True)
    except Exception as error:  # noqa: BLE001 - a part that fails is a row
        traceback.print_exc()
        row = Row("the part itself", failed=f"{type(error).__name__}: {str(error)[-300:]}")
        print(json.dumps(dataclasses.asdict(row)), file=told, flush=True)
        return 1
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
