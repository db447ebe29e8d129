"""The dashboard as a file: Grafana's own types, an unambiguous layout, and queries over declared metrics."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pipeline.telemetry.metrics import BY_NAME
from tests.grafana.test_alerts import GPU, STEP_S, TARGET, with_target

ROOT = Path(__file__).parents[2]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "pipeline/telemetry/dashboards/rlhfd.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
QUERIES = [(panel["title"], target["expr"]) for panel in PANELS for target in panel.get("targets", ())]

# Enumerations of Grafana's are string enums, JSON has their values.
PREFACE = """
import type { Dashboard, Panel, RowPanel } from "@grafana/schema";
import type { Options as timeseries, FieldConfig as Custom } from
  "@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen";
import type { Options as stat } from "@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen";
type Plain<T> = T extends string ? `${T}` : T extends number | boolean | null | undefined | Function ? T
  : T extends (infer E)[] ? Plain<E>[] : T extends object ? { [K in keyof T]: Plain<T[K]> } : T;
"""


def typescript(dashboard: dict[str, Any]) -> str:
    """Return the dashboard as literals of Grafana's types, a panel's options as those of its kind."""
    typed = [("Omit<Dashboard, 'panels'>", {key: value for key, value in dashboard.items() if key != "panels"})]
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            typed.append(("RowPanel", panel))
            continue
        typed += [("Panel", panel), (panel["type"], panel["options"])]
        if panel["type"] == "timeseries":
            typed.append(("Custom", panel["fieldConfig"]["defaults"]["custom"]))
    lines = [f"export const v{at}: Plain<{kind}> = {json.dumps(value)};" for at, (kind, value) in enumerate(typed)]
    return "\n".join([PREFACE, *lines, ""])


@pytest.mark.needs("npm", "node")
@pytest.mark.timeout(300)
def test_dashboard_is_of_grafanas_own_types(tmp_path: Path) -> None:
    for name in ("package.json", "package-lock.json"):
        shutil.copy(ROOT / "tests/grafana" / name, tmp_path)
    install = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    installed = subprocess.run(install, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert installed.returncode == 0, installed.stderr
    wrong = json.loads(json.dumps(DASHBOARD))
    next(panel for panel in wrong["panels"] if panel["type"] == "timeseries")["options"]["tooltip"]["mode"] = "multiple"
    (tmp_path / "right.ts").write_text(typescript(DASHBOARD))
    (tmp_path / "wrong.ts").write_text(typescript(wrong))
    options = ["--noEmit", "--strict", "--skipLibCheck", "--module", "esnext", "--moduleResolution", "bundler"]

    checked = subprocess.run(
        ["node_modules/.bin/tsc", *options, "right.ts", "wrong.ts"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip

    errors = checked.stdout.splitlines()
    assert [error.partition("(")[0] for error in errors if ".ts(" in error] == ["wrong.ts"], checked.stdout
    assert "Type '\"multiple\"' is not assignable" in checked.stdout


def test_panels_are_told_apart_and_explained_and_do_not_overlap() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    drawn = [panel for panel in PANELS if panel["type"] != "row"]
    assert all(panel["title"] and panel["description"].endswith((".", "?")) for panel in drawn)
    for one, other in itertools.combinations([panel["gridPos"] for panel in PANELS], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in PANELS)


def test_rows_of_panels_are_full() -> None:
    widths: dict[int, int] = {}
    for panel in PANELS:
        widths[panel["gridPos"]["y"]] = widths.get(panel["gridPos"]["y"], 0) + panel["gridPos"]["w"]

    assert set(widths.values()) == {24}


def test_each_query_asks_for_the_chosen_instances_and_for_what_the_catalogue_declares(
    subtests: pytest.Subtests,
) -> None:
    for title, expression in QUERIES:
        with subtests.test(title, expression=expression):
            selectors = re.findall(r"(rlhfd_\w+)\{([^}]*)\}", expression)
            assert len(selectors) == len(re.findall(r"rlhfd_\w+", expression)) > 0
            for name, selector in selectors:
                metric = BY_NAME[name if name in BY_NAME else re.sub(r"_(sum|count|bucket)$", "", name)]
                assert 'instance=~"$instance"' in selector
                for label, value in re.findall(r'(\w+)(?:=|!=)"([^"]*)"', selector):
                    assert metric.labels[label][0].startswith("@") or value in metric.labels[label]


@pytest.mark.needs("promtool")
def test_queries_that_need_a_gpu_give_what_a_gpu_would_show(tmp_path: Path) -> None:
    torch = 'rlhfd_torch_memory_bytes{role="trainer",worker="0",state="reserved"}'
    of_gpu = f"{{{TARGET},{GPU[1:-1]}}}"
    answers = {
        "GPU memory": [{"labels": of_gpu, "value": 0.25}],
        "GPU load": [{"labels": f"rlhfd_gpu_utilization_ratio{of_gpu}", "value": 0.5}],
        "Torch memory": [{"labels": torch.replace("{", f"{{{TARGET},"), "value": 7}],
    }
    series = {
        f"rlhfd_gpu_memory_used_bytes{GPU}": "20x10",
        f"rlhfd_gpu_memory_capacity_bytes{GPU}": "80x10",
        f"rlhfd_gpu_utilization_ratio{GPU}": "0.5x10",
        torch: "7x10",
    }
    tried = [
        {"expr": expression.replace("$instance", "a"), "eval_time": "2m", "exp_samples": answers[title]}
        for title, expression in QUERIES
        if title in answers
    ]
    suite = {"tests": [{"interval": f"{STEP_S}s", "input_series": with_target(series), "promql_expr_test": tried}]}
    (tmp_path / "gpus.json").write_text(json.dumps(suite))

    checked = subprocess.run(
        ["promtool", "test", "rules", str(tmp_path / "gpus.json")], capture_output=True, text=True, timeout=60
    )

    assert len(tried) == len(answers)
    assert checked.returncode == 0, checked.stdout + checked.stderr
