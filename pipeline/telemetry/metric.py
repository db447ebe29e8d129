"""The declaration of a metric: its kind, its labels with all their values, and the role that writes it.

A declaration fixes the layout of the shared-memory slab (`pipeline.telemetry.slab`), hence label values are enumerated.
Two markers stand for values that only the running instance knows:

    OWN     the writer's own role or worker: each process writes for itself
    EACH    any role or worker of the instance: the supervisor writes about its children
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Final, Literal, NamedTuple

Kind = Literal["counter", "gauge", "histogram"]
SampleKey = tuple[str, tuple[str, ...]]

OWN: Final = "@own"
EACH: Final = "@each"

SUPERVISOR: Final = "supervisor"
BUFFER: Final = "buffer"
TRAINER: Final = "trainer"
ROLLOUT: Final = "rollout"
EVERY_ROLE: Final = "supervisor buffer trainer rollout"
# Owners that are no role: the buffer's consistent block, and the supervisor's facts on the run and the machine.
CONSERVATION: Final = "@conservation"
INFO: Final = "@info"

START: Final = "start"
OTHER: Final = "other"
ACTIVITIES: Final = (
    "generate", "environment", "logprob", "ref_logprob", "value", "reward", "seal", "train", "publish", "fetch_weights",
    "wait_ticket_full", "wait_ticket_staleness", "wait_ticket_paused", "wait_data", "wait_card", "asleep", START, OTHER,
)  # fmt: skip
PARTITION: Final = "0"
# Reward functions by their number in the configuration; the reader puts their names there.
REWARD_LABELS: Final = tuple(f"function-{number}" for number in range(1, 18))
MOST_NUMBERS: Final = 16
# Further numbers of reward functions by their place (`pipeline.telemetry.number_names`).
NUMBER_LABELS: Final = tuple(f"number-{number}" for number in range(1, MOST_NUMBERS + 1))
# Files of held-out prompts by their number in the configuration, and all of them; the reader puts their names there.
EVALUATION_LABELS: Final = tuple(f"file-{number}" for number in range(1, 9))
UNITS: Final = ("seconds", "bytes", "versions", "nats", "ratio", "tokens")

DURATION_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
AGE_S: Final = (0.01, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
VERSIONS: Final = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)
REWARD: Final = (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 2, 5, 10)
KL_NATS: Final = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 100)
GAP_NATS: Final = (1e-7, 1e-6, 1e-5, 1e-4, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3)
RATIO: Final = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 1, 1.01, 1.02, 1.05, 1.1, 1.2, 1.3, 1.5, 2, 4)
TURNS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128)
TOKENS: Final = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class SlotName(NamedTuple):
    """One process of an instance: the values of the labels role and worker."""

    role: str
    worker: int = 0


@dataclasses.dataclass(frozen=True)
class Metric:
    """One metric family.

    Attributes:
        name: Full name, a counter's ``_total`` included.
        owners: The roles that write it, or `CONSERVATION`, or `INFO`.
        labels: Label names in order, each with its values, or `OWN`, or `EACH`.
        buckets: Upper bounds of a histogram, ascending, none negative, +Inf left out.
        outlives_writer: Whether a gauge's newest value stays when its writer dies: the time of an event. Every other
            gauge is removed with its process, because the last value of a dead process is no longer valid.
    """

    kind: Kind
    name: str
    help: str
    owners: tuple[str, ...]
    labels: Mapping[str, tuple[str, ...]]
    buckets: tuple[float, ...] = ()
    outlives_writer: bool = False

    @property
    def unit(self) -> str:
        """The unit at the end of the name; empty if there is none."""
        stem = self.name.removesuffix("_total")
        return next((unit for unit in UNITS if stem.endswith("_" + unit)), "")

    @property
    def words(self) -> int:
        """Number of float64 words of one series: 1, or a histogram's buckets, +Inf and sum."""
        return len(self.buckets) + 2 if self.kind == "histogram" else 1

    def is_own(self, label: str) -> bool:
        """Return whether this label names the process that wrote the sample."""
        return self.labels.get(label) == (OWN,)

    def series(self, slots: tuple[SlotName, ...]) -> Iterator[tuple[str, ...]]:
        """Yield the label values of every series that an instance with these slots can have; `OWN` stays a marker."""
        each = [label for label, values in self.labels.items() if values == (EACH,)]
        about = [{"role": slot.role, "worker": str(slot.worker)} for slot in slots]
        subjects = dict.fromkeys(tuple(subject[label] for label in each) for subject in about)
        enumerated = [values for values in self.labels.values() if values != (EACH,)]
        for subject, chosen in itertools.product(subjects, itertools.product(*enumerated)):
            of_each, of_enumerated = iter(subject), iter(chosen)
            yield tuple(next(of_each if values == (EACH,) else of_enumerated) for values in self.labels.values())


def counter(name: str, owners: str, help: str, /, **labels: str) -> Metric:
    """Declare a counter."""
    return Metric("counter", name, help, tuple(owners.split()), _enumerate(labels))


def gauge(name: str, owners: str, help: str, /, **labels: str) -> Metric:
    """Declare a gauge that is removed with its writer."""
    return Metric("gauge", name, help, tuple(owners.split()), _enumerate(labels))


def event_time(name: str, owners: str, help: str, /, **labels: str) -> Metric:
    """Declare a gauge that holds the Unix time of an event; it outlives its writer, and the newest value counts."""
    return Metric("gauge", name, help, tuple(owners.split()), _enumerate(labels), outlives_writer=True)


def histogram(name: str, owners: str, buckets: tuple[float, ...], help: str, /, **labels: str) -> Metric:
    """Declare a histogram with fixed buckets."""
    bounds = tuple(float(bound) for bound in buckets)
    return Metric("histogram", name, help, tuple(owners.split()), _enumerate(labels), bounds)


def _enumerate(labels: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    return {label: tuple(values.split()) for label, values in labels.items()}
