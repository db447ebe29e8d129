from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from pipeline.telemetry.metrics import (
    CONSERVATION,
    CONSERVATION_WORDS,
    EACH,
    EVERY_ROLE,
    INFO,
    METRICS,
    OWN,
    Conservation,
    Metric,
    counter,
    gauge,
)
from tests.support.slabs import BLOCK, ROOT, SLOTS


def test_names_are_unique() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)


CONVENTIONS: dict[str, Callable[[Metric], bool]] = {
    "the name begins with that of the program": lambda metric: metric.name.startswith("rlhfd_"),
    "the names of counters end with total": lambda metric: metric.name.endswith("_total") == (metric.kind == "counter"),
    "the help is a sentence": lambda metric: metric.help.endswith("."),
    "the help needs no escapes": lambda metric: not set(metric.help) & set('\\"\n'),
    "the owners are roles": lambda metric: set(metric.owners) <= {*EVERY_ROLE.split(), CONSERVATION, INFO},
    "the bounds rise": lambda metric: list(metric.buckets) == sorted(set(metric.buckets)),
    "no bound is below 0": lambda metric: all(bound >= 0 for bound in metric.buckets),
    "histograms have buckets": lambda metric: bool(metric.buckets) == (metric.kind == "histogram"),
}


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_every_declaration_keeps_the_convention(convention: str) -> None:
    assert [metric.name for metric in METRICS if not CONVENTIONS[convention](metric)] == []


def test_seconds_and_bytes_stand_at_the_end_of_the_name() -> None:
    named = [metric.name for metric in METRICS if "_seconds" in metric.name or "_bytes" in metric.name]

    assert [name for name in named if not name.removesuffix("_total").endswith(("_seconds", "_bytes"))] == []


def test_series_are_every_combination_of_label_values() -> None:
    metric = counter("rlhfd_example_total", "rollout", "Example.", stage="a b", reason="x y")

    assert [*metric.series(SLOTS)] == [("a", "x"), ("a", "y"), ("b", "x"), ("b", "y")]


def test_each_role_and_worker_stand_for_the_slots_of_the_instance() -> None:
    by_slot = gauge("rlhfd_example", "supervisor", "Example.", role=EACH, worker=EACH)
    by_role = gauge("rlhfd_example", "supervisor", "Example.", role=EACH, state="on off")

    assert [*by_slot.series(SLOTS)] == [
        ("supervisor", "0"),
        ("buffer", "0"),
        ("trainer", "0"),
        ("rollout", "0"),
        ("rollout", "1"),
    ]
    assert [*by_role.series(SLOTS)] == [
        (role, state) for role in ("supervisor", "buffer", "trainer", "rollout") for state in ("on", "off")
    ]


def test_own_labels_stay_open_until_a_slot_fills_them() -> None:
    metric = counter("rlhfd_example_total", "rollout", "Example.", role=OWN, worker=OWN, activity="a b")

    assert [*metric.series(SLOTS)] == [(OWN, OWN, "a"), (OWN, OWN, "b")]


def test_conservation_block_comes_back_from_its_words() -> None:
    words = BLOCK.to_words()

    assert len(words) == CONSERVATION_WORDS
    assert Conservation.from_words(words) == BLOCK


def test_items_that_are_nowhere_are_unaccounted() -> None:
    assert BLOCK.unaccounted == 100 - 60 - (5 + 4 + 3 + 2 + 1) - 10 - 12


def test_conservation_block_holds_every_series_it_owns() -> None:
    owned = {
        (metric.name, labels)
        for metric in METRICS
        if metric.owners == (CONSERVATION,)
        for labels in metric.series(SLOTS)
    }

    assert BLOCK.samples().keys() == owned


def test_catalogue_and_slab_import_neither_torch_nor_numpy() -> None:
    code = """
import sys
import pipeline.telemetry.activity, pipeline.telemetry.reader
print(*sorted({"torch", "numpy", "prometheus_client", "transformers"} & set(sys.modules)))
"""

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )

    assert done.stdout.strip() == ""
