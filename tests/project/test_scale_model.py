"""The model of a cluster: its arithmetic against closed forms, its constants against their sources, and its page."""

from __future__ import annotations

import dataclasses
import math

import pytest

from benches import scale_model
from benches.report import RESULTS, ROOT, sections_of
from benches.scale_model import COSTS, MODELS, Flow, Simulation, Station, flow_of, ideal_of, simulate

PAGE = (ROOT / "docs" / "scaling.md").read_text()
WORK = Flow(
    workers=8, ticket_rows=64, step_rows=512, rollout_s=4.0, rollout_cpu_s=0.02, transfer_s=0.05, load_s=0.01,
    receive_s=0.03, gateway_s=0.02, buffer_s=0.01, step_s=0.9, step_cpu_s=0.05, publish_s=0.1, cores=4,
)  # fmt: skip


def test_one_worker_without_staleness_takes_the_sum_of_all_parts() -> None:
    flow = dataclasses.replace(WORK, workers=1, staleness=0, core_share=0.5)
    # Eight tickets a step; the first one of them fetches the version.
    ticket_s = 4.0 + 0.02 / 0.5 + 0.03 + 0.02 / 0.5 + 0.01
    step_s = 8 * ticket_s + 0.05 + 0.01 + 0.9 + 0.05 / 0.5 + 0.1

    assert simulate(flow).rows_s == pytest.approx(512 / step_s)


@pytest.mark.parametrize(
    ("changed", "rows_s", "busiest"),
    [
        # Rows of a ticket or step over the time of the only busy part: the bottleneck law.
        ({"gateway_s": 8.0}, 4 * 64 / (8.0 + 0.02 + 0.05 / 8), "gateways"),
        ({"gateway_s": 8.0, "core_share": 0.5}, 2 * 64 / (8.0 + 0.02 + 0.05 / 8), "gateways"),
        ({"buffer_s": 1.0}, 64 / 1.0, "buffer"),
        ({"receive_s": 1.0}, 64 / 1.0, "rows in"),
        ({"step_s": 9.0}, 512 / (9.0 + 0.05), "trainers"),
        ({"publish_s": 9.0}, 512 / 9.0, "publish"),
    ],
)
def test_a_saturated_part_alone_sets_the_speed(changed: dict[str, float], rows_s: float, busiest: str) -> None:
    # Steps enough for the end of the warm-up to make no difference, and tickets enough in flight.
    flow = dataclasses.replace(WORK, workers=32, staleness=6, **changed)

    outcome = simulate(flow, warm_steps=20, steps=60)

    assert outcome.rows_s == pytest.approx(rows_s, rel=0.03)
    assert next(iter(outcome.shares)) == busiest


def test_versions_go_out_one_machine_after_the_other_and_missed_ones_cost_at_most_a_whole_one() -> None:
    # A ticket of each machine a step, and so a transfer to each.
    assert simulate(dataclasses.replace(WORK, transfer_s=2.0)).rows_s == pytest.approx(512 / (8 * 2.0), rel=0.03)

    # One machine makes a batch in eight tickets, and the versions come faster than its tickets.
    slow = Flow(workers=2, ticket_rows=64, step_rows=64, staleness=3, rollout_s=1.0, transfer_s=5.0, whole_s=6.0)
    assert simulate(slow, steps=40).rows_s >= 64 / 6.0


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("rollouts", [1, 16])
def test_no_run_is_faster_than_its_rollouts_and_trainers_alone(rollouts: int, whole: bool) -> None:
    for model in MODELS:
        flow = flow_of(model, rollouts, 4, 100, whole=whole)
        outcome = simulate(flow, warm_steps=10, steps=40)

        assert outcome.rows_s <= 1.02 * ideal_of(flow)
        assert max(outcome.shares.values()) <= 1.02


def test_cores_are_shared_by_turns_and_work_is_neither_lost_nor_added() -> None:
    clock, ends = Simulation(), dict[str, float]()
    cores = Station(clock, 2, slice_s=0.01)
    for name, work_s in (("a", 1.0), ("b", 1.0), ("c", 1.0), ("d", 0.5)):
        cores.serve(work_s, lambda name=name: ends.setdefault(name, clock.now_s))

    clock.advance(lambda: False)

    # Four share two cores until the short one has had its half second, then three do.
    assert ends["d"] == pytest.approx(1.0, abs=0.03)
    assert [ends[name] for name in "abc"] == pytest.approx([1.75] * 3, abs=0.03)
    assert cores.busy_s == pytest.approx(3.5)


@pytest.mark.parametrize(
    ("name", "section", "row", "value"),
    [
        ("buffer", "cpu", "| buffer's process at 1,000 items/s | 11.0 ", 0.11 / 125),
        ("encoded", "gather", "| encode, medium | 1.35 ", 1 / 1.35),
        ("published", "weights", "| 1 GiB | publish | 12.7 ", 1 / 12.7),
        ("copied", "weights", "| 1 GiB | fetch | 13.4 ", 1 / 13.4),
    ],
)
def test_constants_are_those_of_the_measurements(name: str, section: str, row: str, value: float) -> None:
    assert row in sections_of(RESULTS.read_text())[f"## {section}"], "measured anew: change the constant and the page"
    assert math.isclose(COSTS[name].value, value, rel_tol=0.01)
    assert COSTS[name].source.startswith(f"RESULTS.md, {section}")


def test_the_page_has_the_tables_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    # The largest runs take long.
    monkeypatch.setattr(scale_model, "SIZES", scale_model.SIZES[:4])

    missing = [line for line in scale_model.tables() if line not in PAGE]

    assert not missing, missing
