"""Files in shared memory that are cut off: found by their sizes, and outlived by the supervisor."""

import os
import signal
import subprocess
import sys

import pytest

from pipeline.errors import LedgerError, WeightsError
from pipeline.models.weights.store import WeightsMapping
from pipeline.storage.arena import Arena
from pipeline.storage.truncation import Sizes

CUT = """
import os, sys
from pathlib import Path
from pipeline.telemetry.metrics import SlotName
from pipeline.telemetry.reader import MetricsReader
from pipeline.telemetry.slab import MetricsSlab
path = Path(sys.argv[1])
slab = MetricsSlab.create(path, [SlotName("supervisor"), SlotName("buffer")])
slab.begin("supervisor")
writer, reader = slab.writer("supervisor"), MetricsReader(slab)
if sys.argv[2] == "survives":
    slab.survive_truncation()
writer.beat()
reader.read()
os.truncate(path, 0)
reader.read()
writer.beat()
writer.gauge("rlhfd_ready").set(1.0)
slab.begin("buffer")
if sys.argv[2] == "survives":
    slab.restore(path)
    slab.begin("buffer")
    slab.writer("buffer").gauge("rlhfd_paused").set(1.0)
    other = MetricsSlab.attach(path)
    print(MetricsReader(other).read().value("rlhfd_paused"), reader.read().value("rlhfd_paused"))
    other.close()
slab.close()
print("lives")
"""


@pytest.mark.parametrize(("how", "code"), [("survives", 0), ("dies", -signal.SIGBUS)])
def test_a_process_outlives_the_truncation_of_the_slab_only_if_it_asks_for_it(tmp_path, how, code):
    found = subprocess.run(
        [sys.executable, "-c", CUT, str(tmp_path / "metrics"), how], capture_output=True, text=True, timeout=60
    )

    assert (found.returncode, found.stdout) == (code, "1.0 1.0\nlives\n" if not code else ""), found.stderr


def test_a_fault_in_another_file_still_ends_the_process(tmp_path):
    program = CUT.replace(
        "os.truncate(path, 0)",
        """
import mmap
other = open(str(path) + "-other", "w+b")
other.truncate(8192)
mapped = mmap.mmap(other.fileno(), 8192)
other.truncate(0)
mapped[5000]""",
    )
    found = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "metrics"), "survives"], capture_output=True, timeout=60
    )

    assert found.returncode == -signal.SIGBUS


def test_a_file_is_cut_if_it_is_smaller_at_the_same_place_and_not_if_it_is_another_or_not_there(tmp_path):
    one, later = tmp_path / "one", tmp_path / "later"
    one.write_bytes(bytes(100))
    sizes = Sizes([one, later])
    assert sizes.cut() is None
    later.write_bytes(bytes(50))
    assert sizes.cut() is None

    (tmp_path / "new").write_bytes(bytes(10))
    os.rename(tmp_path / "new", one)
    assert sizes.cut() is None, "another file"
    os.truncate(later, 49)

    assert sizes.cut() == (
        later, f"shared memory was truncated by another program: {later} holds 49 B of 50 B"
    )  # fmt: skip


@pytest.mark.parametrize("nbytes", [0, 10, 4096, 5000])
def test_cut_weights_and_arenas_are_named_when_they_are_opened(tmp_path, nbytes):
    import torch

    from pipeline.models.weights.store import WeightsPublisher

    weights = WeightsPublisher(tmp_path / "weights", {"actor.w": torch.ones(5000)})
    weights.close()
    Arena.create(tmp_path / "arena", payload_bytes=1 << 16, ledger_bytes=4096, layout=1)
    for name in ("weights", "arena"):
        os.truncate(tmp_path / name, nbytes)

    with pytest.raises(WeightsError, match=f"truncated by another program: {tmp_path}/weights holds {nbytes:,} B of"):
        WeightsMapping(tmp_path / "weights")
    with pytest.raises(LedgerError, match=str(tmp_path / "arena")):
        Arena(tmp_path / "arena")
