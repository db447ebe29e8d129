"""Seconds that a training step waits for a publish: in place, beside the next step, and with fewer training states."""

from __future__ import annotations

import contextlib
import functools
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from benches.measure import Sample, interleaved
from benches.report import Section, Table
from benches.sharding import SMALL, Shape, configured, rows_of, write_model
from pipeline.models.weights.versions import PolicyVersions
from pipeline.storage.weights_header import WeightsVersion
from pipeline.trainer.learner import Learner
from pipeline.trainer.process import whole_models
from pipeline.trainer.saving.publishing import Publishing
from pipeline.trainer.saving.rank_models import RankModels
from pipeline.trainer.state import Progress

_SHAPE = Shape(hidden=512, inner=1408, layers=12, vocabulary=16_384, rows=8, tokens=32)
_CPU = torch.device("cpu")
_TURN = 4
_TEXT = """A random Llama of {parameters:.0f} M parameters in float32 takes steps of GRPO on {tokens} made-up tokens,
on a CPU with one thread, and publishes after each: {weights:.0f} MB of weights and {state:.0f} MB of training state.
The next batch is there at once, as with `buffer.max_staleness` above 0. *Waits*: the share of its time in which the
step's thread did nothing but the publish, or waited for its end. *Seen after*: from the begin of a publish to the turn
of its page. *Told after*: from the begin of a publish to the report to the buffer, from when on workers begin with the
version; by training's thread it is at the end of the passes of the next step. Ways take turns of {turn} steps, {rounds}
each; the mean of a turn, median (range) of the turns."""


class _Turn(NamedTuple):
    step_s: float
    waits: float
    waited_s: float
    seen_s: float
    told_s: float


class _Metrics:
    """Takes the figures that a trainer exports."""

    def __init__(self) -> None:
        self.waited_s, self.written_s = 0.0, 0.0

    def publishing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def published(
        self, version: int, nbytes: int, duration_s: float, *, waited_s: float, state_s: float | None
    ) -> None:
        self.waited_s += waited_s
        self.written_s += duration_s


class _Connection:
    """A connection to no buffer, which notes the time of each report."""

    rank, remote = 0, None

    def __init__(self, folder: Path) -> None:
        self.versions = PolicyVersions(folder / "weights")
        self.is_told_beside = True
        self.told_s = 0.0
        self._began_s: float | None = None

    def begin_version(self) -> int:
        self._began_s = time.perf_counter()
        return 0

    def tell(self, published: WeightsVersion) -> None:
        if self.is_told_beside:
            self.end_version(published)

    def end_version(self, published: WeightsVersion) -> None:
        if self._began_s is not None:
            self.told_s += time.perf_counter() - self._began_s
        self._began_s = None


def run(*, quick: bool) -> Sequence[Section]:
    """Measure the ways in turns."""
    shape, rounds = (SMALL._replace(rows=8), 1) if quick else (_SHAPE, 3)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="rlhfd-bench-") as folder:
        return [measured(Path(folder), shape, rounds)]


def measured(folder: Path, shape: Shape, rounds: int) -> Section:
    """Return the figures of all ways, with a model of a shape below a folder."""
    parameters = write_model(folder / "model", shape)
    config = configured(folder / "model", shape, micro_batch_size=shape.rows // 2)
    models = whole_models(config, _CPU)
    learner = Learner(config.trainer, "grpo", models["actor"], kl_coef=config.trainer_kl_coef)
    connection, metrics = cast(Any, _Connection(folder)), _Metrics()
    rank_models = RankModels(config, models, connection, _CPU)
    publishing: Any = Publishing(config, learner, connection, rank_models, metrics, device=_CPU, probe=None)
    publishing.publish(Progress(), first=WeightsVersion(0))
    nbytes = connection.versions.nbytes

    def turn(beside: bool, keep_state_every: int, is_told_beside: bool = True) -> _Turn:
        publishing.is_beside, connection.is_told_beside = beside, is_told_beside
        publishing._config = config.trainer.model_copy(update={"keep_state_every": keep_state_every})
        metrics.waited_s = metrics.written_s = connection.told_s = 0.0
        began_s = time.perf_counter()
        for step in range(_TURN):
            publishing.publish(Progress(step))
            learner.update([rows_of(shape, seed=step)], before_change=publishing.finish)
        took_s = time.perf_counter() - began_s
        totals = metrics.waited_s, metrics.written_s, connection.told_s
        return _Turn(took_s / _TURN, metrics.waited_s / took_s, *(total / _TURN for total in totals))

    ways = {
        "in place": functools.partial(turn, False, 1),
        "beside the next step": functools.partial(turn, True, 1),
        "the same, told by training's thread": functools.partial(turn, True, 1, False),
        "beside, `trainer.keep_state_every = 4`": functools.partial(turn, True, 4),
    }
    for way in ways.values():
        way()
    rows = []
    for name, turns in interleaved(ways, rounds).items():
        step_s, waits, waited_s, seen_s, told_s = (Sample.of(values) for values in zip(*turns, strict=True))
        rows.append((name, f"{step_s} s", f"{waits.scaled(100)}%", f"{waited_s} s", f"{seen_s} s", f"{told_s} s"))
    publishing.close()
    weights = 4 * parameters
    text = _TEXT.format(
        parameters=parameters / 1e6, tokens=shape.rows * shape.tokens, weights=weights / 1e6,
        state=(nbytes - weights) / 1e6, turn=_TURN, rounds=rounds,
    )  # fmt: skip
    header = ("way", "step", "waits", "waited a step", "seen after", "told after")
    return Section("publishing", "A publish beside training", " ".join(text.split()), [Table(header, rows)], "")
