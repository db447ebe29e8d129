"""`bin/bench [--quick] [NAME ...]`: measures, prints, and writes `benches/RESULTS.md`."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import traceback
from collections.abc import Sequence

from benches.report import RESULTS, ROOT, Section, merge, update_page

# Pages with tables of rows from RESULTS.md.
PAGES = (ROOT / "README.md", ROOT / "docs" / "measured.md")
# In the order of the sections.
BENCHES = (
    "transport", "tickets", "latency", "cpu", "gather", "flat", "ledger", "journal", "rollout", "rollout-124m",
    "weights", "publishing", "packing", "pinned", "maker-memory", "engines", "run", "sharding", "learning", "kills",
)  # fmt: skip
# Measured only if it is named: all others take less than 15 minutes together. Some take longer, or 10 GB of memory.
_BY_NAME_ONLY = ("rollout", "rollout-124m", "packing", "engines", "run", "sharding", "learning", "kills")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks that are named, all by default; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="bin/bench",
        description="Measure rlhfd and write benches/RESULTS.md.",
        epilog="examples:\n  bin/bench --quick transport    a glance, nothing is written\n  bin/bench rollout weights",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"one of {', '.join(BENCHES)}; all but {', '.join(_BY_NAME_ONLY)} by default",
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds, less work; prints and writes nothing")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in BENCHES]:
        parser.error(f"no benchmark {unknown[0]!r}, only {', '.join(BENCHES)}")
    import torch

    failed, measured = [], []
    for name in options.names or [name for name in BENCHES if name not in _BY_NAME_ONLY]:
        command = f"bin/bench {'--quick ' if options.quick else ''}{name}"
        print(f"==> {command}", file=sys.stderr, flush=True)
        began_s = time.monotonic()
        # With more, the processes of a way would compete for the cores, and on a busy machine all figures are random.
        torch.set_num_threads(1)
        try:
            sections: Sequence[Section] = importlib.import_module(f"benches.{name.replace('-', '_')}").run(
                quick=options.quick
            )
        except Exception:  # noqa: BLE001 - a failure must not cost the figures of the other benchmarks
            traceback.print_exc()
            failed.append(name)
            continue
        took_s = time.monotonic() - began_s
        for section in sections:
            measured.append((section.heading, section.markdown(took_s=took_s, command=command)))
            print(measured[-1][1], flush=True)
            if not options.quick:
                _write(measured)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _write(measured: Sequence[tuple[str, str]]) -> None:
    before = RESULTS.read_text() if RESULTS.exists() else ""
    results = merge(before, measured, BENCHES)
    RESULTS.write_text(results)
    for page in PAGES:
        page.write_text(update_page(page.read_text(), results))


if __name__ == "__main__":
    sys.exit(main())
