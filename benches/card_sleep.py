"""The memory of a run whose engine sleeps while the trainer steps (`rollout.sleep`), by phase, read from outside."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from benches.card_row import Row
from benches.measure import watching
from pipeline.errors import RlhfdError
from pipeline.runtime import lock
from pipeline.supervisor.capacity.budgets import AWAKE_PHASE, STEP_PHASE
from pipeline.telemetry.slab import MetricsSlab

ASLEEP = "asleep, between steps"
_LOOK_S = 0.02
_LARGEST_TERMS = 5


def phase_of(worker: str, trainer: str) -> str | None:
    """Return the phase in which a worker and a trainer have these activities; None for a moment between phases.

    A worker is "asleep" while its engine falls asleep and wakes, too: a step is sure that it sleeps.
    """
    if worker == "asleep":
        return STEP_PHASE if trainer == "train" else ASLEEP
    return AWAKE_PHASE if worker == "generate" else None


class PhaseMemory:
    """Reads the memory of a run again and again, in a thread of its own, while it is `watched`.

    Args:
        runtime_dir: Runtime directory of the run.
        read_bytes: Returns the memory in use, of the pid of worker 0.

    Attributes:
        readings: The readings by phase, of moments at whose end the phase was the same as at their beginning.
    """

    def __init__(self, runtime_dir: Path, read_bytes: Callable[[int], int]) -> None:
        self.readings: dict[str, list[int]] = defaultdict(list)
        self._runtime_dir = runtime_dir
        self._read_bytes = read_bytes

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Read meanwhile."""
        with contextlib.ExitStack() as slabs:
            slab: MetricsSlab | None = None

            def look() -> None:
                nonlocal slab
                with contextlib.suppress(RlhfdError, OSError):
                    if slab is None:
                        path = Path(lock.find(self._runtime_dir).shm_dir) / "metrics"
                        slab = slabs.enter_context(contextlib.closing(MetricsSlab.attach(path)))
                    self.look(slab)

            with watching(look, _LOOK_S):
                yield

    def look(self, slab: MetricsSlab) -> None:
        """Read once."""
        before = self._phase(slab)
        if before is None or not (pid := slab.pid("rollout")):
            return
        used = self._read_bytes(pid)
        if self._phase(slab) == before:
            self.readings[before].append(used)

    def _phase(self, slab: MetricsSlab) -> str | None:
        return phase_of(slab.progress("rollout").activity, slab.progress("trainer").activity)


def rows_of(
    readings: Mapping[str, Sequence[int]], planned: Mapping[str, Mapping[str, int]], *, before_bytes: int, freed: int
) -> Iterator[Row]:
    """Return the rows of the readings of a run.

    Args:
        readings: Bytes in use by phase.
        planned: The terms of `rlhfd plan` by phase; none on a CPU, whose plan knows no phases.
        before_bytes: Bytes in use before the run; every other row is what the run has in use beside it.
        freed: Bytes that the engine frees while it sleeps, by the plan.
    """
    yield Row("memory before the run", _gb(before_bytes))
    missing = [phase for phase in (ASLEEP, STEP_PHASE, AWAKE_PHASE) if not readings.get(phase)]
    if missing:
        yield Row("memory by phase", failed=f"no reading of: {', '.join(missing)}")
        return
    least, awake = min(readings[ASLEEP]), max(readings[AWAKE_PHASE])
    kept = f"the engine kept its memory: {_gb(awake - least)} less than awake" if awake - least < freed / 2 else ""
    yield Row(f"memory {ASLEEP}", _gb(least - before_bytes), f"the engine frees {_gb(freed)}", failed=kept)
    for phase in (STEP_PHASE, AWAKE_PHASE):
        used, terms = max(readings[phase]) - before_bytes, planned.get(phase, {})
        total = sum(terms.values())
        over = f"{used / total:.0%} of the plan" if total and used > total else ""
        yield Row(f"memory {phase}", _gb(used), _plan(terms), failed=over)


def _plan(terms: Mapping[str, int]) -> str:
    if not terms:
        return ""
    largest = sorted(terms.items(), key=lambda term: -term[1])[:_LARGEST_TERMS]
    named = ", ".join(f"{name} {_gb(nbytes)}" for name, nbytes in largest)
    return f"planned {_gb(sum(terms.values()))}, of it {named}"


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"
