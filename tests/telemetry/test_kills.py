"""After a kill of any process at any place: counts stay exact, and a scrape never shows a falling one."""

from __future__ import annotations

import mmap
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest

from pipeline.telemetry.metrics import CONSERVATION_WORDS, Conservation, SlotName
from pipeline.telemetry.reader import HistogramReading, MetricsReader
from pipeline.telemetry.slab import MetricsSlab
from tests.support.slabs import BLOCK, PROMPTS, ROOT, SLOTS, STEPS, begun, value


class KilledError(Exception):
    """Stands for a SIGKILL."""


class DyingWords:
    """Words that can be stored to a few more times; a slice counts, and is torn, word by word."""

    def __init__(self, words: Any, stores_left: list[int]) -> None:
        self._words = words
        self._stores_left = stores_left

    def __getitem__(self, at: Any) -> Any:
        return self._words[at]

    def __setitem__(self, at: Any, stored: Any) -> None:
        pairs = [(at, stored)] if isinstance(at, int) else zip(range(at.start, at.stop), stored, strict=True)
        for index, word in pairs:
            if self._stores_left[0] == 0:
                raise KilledError
            self._stores_left[0] -= 1
            self._words[index] = word

    def release(self) -> None:
        self._words.release()


def killed_after(stores: int, path: Path, act: Callable[[MetricsSlab], object]) -> bool:
    """Let a process that maps the slab at `path` act and die after some stores; whether it died before its end."""
    slab = MetricsSlab.attach(path)
    stores_left = [stores]
    slab.floats = DyingWords(slab.floats, stores_left)  # type: ignore[assignment]
    slab.words = DyingWords(slab.words, stores_left)  # type: ignore[assignment]
    try:
        act(slab)
    except KilledError:
        return True
    finally:
        slab.close()
    return False


def test_fold_killed_at_any_store_counts_everything_once(path: Path, slab: MetricsSlab) -> None:
    stores = 0
    for restart in range(1, 10_000):
        begun(slab, "trainer").counter(STEPS).inc()
        died = killed_after(stores, path, methodcaller("fold", "trainer"))

        assert value(slab, STEPS) == restart
        slab.fold("trainer")
        assert value(slab, STEPS) == restart
        if not died:
            break
        # Words but the last few are alike: one in seven of them, and each of the last.
        stores += 7 if stores < slab.layout.of_role["trainer"].words - 8 else 1
    assert stores > slab.layout.of_role["trainer"].words


def test_begin_killed_at_any_store_counts_everything_once(path: Path, slab: MetricsSlab) -> None:
    begun(slab, "trainer").counter(STEPS).inc(5)
    slab.fold("trainer")
    words = slab.layout.of_role["trainer"].words

    for stores in (0, 1, words // 2, words - 1, words, words + 1, words + 14):
        assert killed_after(stores, path, methodcaller("begin", "trainer"))
        assert value(slab, STEPS) == 5
        assert not slab.is_live("trainer")

    assert not killed_after(words + 15, path, methodcaller("begin", "trainer"))
    assert value(slab, STEPS) == 5
    assert slab.is_live("trainer")


def test_conservation_block_is_whole_wherever_its_writer_is_killed(path: Path, slab: MetricsSlab) -> None:
    begun(slab, "buffer").publish_group(BLOCK)
    newer = Conservation.from_words([word + 1 for word in BLOCK.to_words()])

    for stores in range(CONSERVATION_WORDS + 1):
        # The first store is the writer's own: it notes its pid.
        assert killed_after(1 + stores, path, lambda dying: dying.writer("buffer").publish_group(newer))
        assert slab.conservation() == BLOCK

    assert not killed_after(2 + CONSERVATION_WORDS, path, lambda dying: dying.writer("buffer").publish_group(newer))
    assert slab.conservation() == newer


_WRITE_UNTIL_KILLED = """
import mmap, os, sys
from pathlib import Path
from pipeline.telemetry.slab import MetricsSlab

slab = MetricsSlab.attach(Path(sys.argv[1]))
writer = slab.writer("rollout", int(sys.argv[2]))
prompts = writer.counter("rlhfd_prompts_total")
lengths = writer.histogram("rlhfd_prompt_length_tokens")
descriptor = os.open(sys.argv[3], os.O_RDWR)
side = memoryview(mmap.mmap(descriptor, 16)).cast("Q")
while True:
    side[0] += 1
    prompts.inc()
    side[1] += 1
    lengths.observe(5.0)
"""


class Life:
    """A process that counts until it is killed, and reports begun and finished counts on a side channel."""

    def __init__(self, path: Path, worker: int, side: Path) -> None:
        side.write_bytes(bytes(16))
        with side.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 16)
        self._side = memoryview(self._map).cast("Q")
        command = [sys.executable, "-c", _WRITE_UNTIL_KILLED, str(path), str(worker), str(side)]
        self._process = subprocess.Popen(command, cwd=ROOT)

    @property
    def finished(self) -> int:
        assert self._process.poll() is None
        return self._side[1]

    def kill(self) -> tuple[int, int]:
        """Kill it and return how many increments it finished, and how many it began."""
        self._process.kill()
        assert self._process.wait(timeout=10) == -signal.SIGKILL
        finished, began = self._side[1], self._side[0]
        self._side.release()
        self._map.close()
        return finished, began


@pytest.mark.integration
def test_counts_are_exact_through_sixteen_kills(path: Path, slab: MetricsSlab, tmp_path: Path) -> None:
    rng = random.Random(16)
    reader, deadline_s = MetricsReader(slab), time.monotonic() + 90
    seen = (0.0, 0.0)
    counted: dict[int, float] = {0: 0.0, 1: 0.0}
    began_in_all = finished_in_all = 0

    def scrape() -> None:
        nonlocal seen
        reading = reader.read()
        lengths = reading.families["rlhfd_prompt_length_tokens"].get(())
        now = (reading.value(PROMPTS) or 0.0, lengths.count if isinstance(lengths, HistogramReading) else 0.0)
        assert now[0] >= seen[0] and now[1] >= seen[1]
        seen = now

    def start(worker: int) -> Life:
        slab.begin("rollout", worker)
        return Life(path, worker, tmp_path / f"side-{worker}")

    lives = {0: start(0), 1: start(1)}
    for _ in range(16):
        worker = rng.randrange(2)
        target = rng.randrange(1, 5000)
        while lives[worker].finished < target:
            scrape()
            assert time.monotonic() < deadline_s
        finished, began = lives[worker].kill()
        # The supervisor dies too, somewhere in its fold, and the next one folds again.
        killed_after(rng.randrange(500), path, methodcaller("fold", "rollout", worker))
        scrape()
        slab.fold("rollout", worker)
        total = slab.read(SLOTS.index(SlotName("rollout", worker)))[
            slab.layout.of_role["rollout"].by_series[PROMPTS, ()].start
        ]
        assert finished <= total - counted[worker] <= began <= finished + 1
        counted[worker] = total
        finished_in_all, began_in_all = finished_in_all + finished, began_in_all + began
        scrape()
        lives[worker] = start(worker)
    for worker, life in lives.items():
        finished, began = life.kill()
        slab.fold("rollout", worker)
        finished_in_all, began_in_all = finished_in_all + finished, began_in_all + began
    scrape()

    assert finished_in_all <= seen[0] <= began_in_all
    assert began_in_all - finished_in_all <= 18
