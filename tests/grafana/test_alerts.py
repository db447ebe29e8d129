"""Each alert fires when it must and is silent when it must not, by promtool's own evaluation of the rules."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.runtime.signals import stopped_text
from pipeline.telemetry.metrics import BY_NAME, IDLE_STEPS

ROOT = Path(__file__).parents[2]
DASHBOARDS = ROOT / "pipeline/telemetry/dashboards"
STEP_S = 30
TARGET = 'job="rlhfd",instance="a"'
"""The default origin of a test's series."""

Series = dict[str, str]
"""Samples each 30 s, as promtool writes them: ``0+1x40`` is 0, 1, ... 40; ``0x4 2x9`` is five zeros, then ten twos."""


@dataclasses.dataclass(frozen=True)
class Case:
    """An alert in two or more worlds.

    Attributes:
        at: When it is looked at.
        fires: A world in which it must fire.
        silent: Worlds in which it must not.
        labels: Its labels beyond job, instance, severity.
        summary: The summary after the instance's name.
    """

    at: str
    fires: Series
    silent: tuple[Series, ...]
    summary: str
    labels: dict[str, str] = dataclasses.field(default_factory=dict)


def books(*, leased: int) -> Series:
    held = {"ready": 10, "leased": leased, "writing": 8}
    return {
        "rlhfd_items_sealed_total": "100x10",
        "rlhfd_items_trained_total": "60x10",
        'rlhfd_items_dropped_total{reason="stale"}': "5x10",
        **{f'rlhfd_buffer_items{{partition="0",state="{state}"}}': f"{n}x10" for state, n in held.items()},
    }


def spent(role: str, **each_step: int) -> Series:
    name = "rlhfd_process_time_seconds_total"
    return {
        f'{name}{{role="{role}",worker="0",activity="{activity}"}}': f"0+{seconds}x100"
        for activity, seconds in each_step.items()
    }


def died(reason: str, times: str = "0x4 1x20") -> Series:
    return {f'rlhfd_process_exits_total{{role="rollout",reason="{reason}"}}': times}


def outcomes(**each_step: int) -> Series:
    return {f'rlhfd_experiences_total{{outcome="{outcome}"}}': f"0+{n}x60" for outcome, n in each_step.items()}


def groups(**each_step: int) -> Series:
    return {f'rlhfd_groups_total{{signal="{signal}"}}': f"0+{n}x60" for signal, n in each_step.items()}


HEARTBEAT = 'rlhfd_process_last_heartbeat_timestamp_seconds{role="rollout",worker="1"}'
UP = 'rlhfd_process_up{role="rollout",worker="1"}'
GPU = '{gpu="0",uuid="GPU-1"}'
ONCE = "0x4 1x20"

CASES = {
    "RlhfdDown": Case("3m", {"up": "0x10"}, ({"up": "1x10"}, {"up": "1x4 0 1x10"}), "does not answer"),
    "RlhfdNotReady": Case(
        "11m",
        {"rlhfd_ready": "0x40"},
        ({"rlhfd_ready": "0x18 1x20"}, {"rlhfd_ready": "1x40"}),
        "a required process has not been ready for 10 minutes",
    ),
    "RlhfdItemsUnaccounted": Case("2m", books(leased=24), (books(leased=25),), "1 rows are nowhere, or in two places"),
    "RlhfdNothingTrained": Case(
        "25m",
        {"rlhfd_items_trained_total": "100x80", "rlhfd_ready": "1x80"},
        (
            {"rlhfd_items_trained_total": "0+1x80", "rlhfd_ready": "1x80"},
            # A step every four minutes is slow, not nothing.
            {"rlhfd_items_trained_total": "0x7 8x7 16x7 24x7 32x7 40x7 48x7 56x7", "rlhfd_ready": "1x80"},
            # Ready for a moment every eight minutes: a process that is not ready has an alert of its own.
            {"rlhfd_items_trained_total": "100x80", "rlhfd_ready": "0x15 1 0x15 1 0x15 1 0x15 1"},
            {"rlhfd_items_trained_total": "100x80", "rlhfd_ready": "1x80", "rlhfd_paused": "1x80"},
            # A long evaluation, one prompt in five minutes.
            {
                "rlhfd_items_trained_total": "100x80",
                "rlhfd_ready": "1x80",
                'rlhfd_evaluation_under_way_prompts{state="all"}': "40x80",
                'rlhfd_evaluation_under_way_prompts{state="done"}': "0x8 1x8 2x8 3x8 4x8 5x8 6x8 7x8 8x8",
            },
        ),
        "ready, and no row was trained for 15 minutes",
    ),
    "RlhfdProcessSilent": Case(
        "3m",
        {HEARTBEAT: "0x20", UP: "1x20"},
        ({HEARTBEAT: "0+30x20", UP: "1x20"}, {HEARTBEAT: "0x20", UP: "0x20"}),
        "rollout 1 has made no progress for 3m 0s",
        {"role": "rollout", "worker": "1"},
    ),
    "RlhfdProcessHung": Case(
        "5m", died("watchdog"), (died("signal"),), "a rollout process hung and was killed by the watchdog",
        {"role": "rollout"},
    ),
    "RlhfdOutOfMemory": Case(
        "5m", died("oom"), (died("signal"),), "the kernel killed a rollout process because memory ran out",
        {"role": "rollout"},
    ),
    "RlhfdProcessRestarting": Case(
        "5m",
        died("error", "0x2 1 2 3x20"),
        (
            died("error", "0x2 1 2x20"),
            died("clean", "0x2 1 2 3x20"),
            # One of four ranks died, and the others with it.
            {
                'rlhfd_process_exits_total{role="trainer",reason="signal"}': "0x4 4x20",
                **{f'rlhfd_process_up{{role="trainer",worker="{rank}"}}': "1x20" for rank in range(4)},
            },
        ),
        "rollout processes died three times or more in 10 minutes",
        {"role": "rollout"},
    ),
    "RlhfdProcessFailed": Case(
        "1m",
        {'rlhfd_processes{role="rollout",state="failed"}': "1x4"},
        (
            {'rlhfd_processes{role="rollout",state="failed"}': "0x4"},
            {'rlhfd_processes{role="rollout",state="backoff"}': "1x4"},
        ),
        "1 rollout processes are not started again",
        {"role": "rollout", "state": "failed"},
    ),
    "RlhfdTrainerStarving": Case(
        "40m",
        spent("trainer", wait_data=20, train=10),
        (
            spent("trainer", wait_data=10, train=20),
            spent("rollout", wait_data=20, generate=10),
            {**spent("trainer", wait_data=20, train=10), "rlhfd_paused": "1x100"},
        ),
        "the trainer waits for data 66.67% of its time",
        {"role": "trainer", "activity": "wait_data"},
    ),
    "RlhfdWorkersHeldBack": Case(
        "40m",
        spent("rollout", wait_ticket_full=10, wait_ticket_staleness=10, generate=10),
        (
            spent("rollout", wait_ticket_full=5, wait_ticket_staleness=5, generate=20),
            spent("rollout", wait_data=20, generate=10),
        ),
        "workers are held back 66.67% of their time",
    ),
    "RlhfdDroppingStale": Case(
        "25m",
        {'rlhfd_items_dropped_total{reason="stale"}': "0+2x60", "rlhfd_items_sealed_total": "0+10x60"},
        (
            {'rlhfd_items_dropped_total{reason="stale"}': "0+1x60", "rlhfd_items_sealed_total": "0+20x60"},
            {'rlhfd_items_dropped_total{reason="filtered"}': "0+2x60", "rlhfd_items_sealed_total": "0+10x60"},
        ),
        "20% of the rows are dropped as stale",
    ),
    "RlhfdQuarantined": Case(
        "5m",
        {'rlhfd_quarantined_total{reason="checksum"}': ONCE},
        ({'rlhfd_quarantined_total{reason="checksum"}': "7x20"},),
        "rows were set aside (checksum)",
        {"reason": "checksum"},
    ),
    "RlhfdQuarantineNotKept": Case(
        "5m",
        {'rlhfd_quarantine_files_total{result="full"}': ONCE},
        ({'rlhfd_quarantine_files_total{result="kept"}': ONCE},),
        "rows were set aside without a copy (full)",
        {"result": "full"},
    ),
    "RlhfdCheckpointFailed": Case(
        "5m",
        {'rlhfd_checkpoints_total{result="error"}': ONCE},
        ({'rlhfd_checkpoints_total{result="ok"}': ONCE, 'rlhfd_checkpoints_total{result="error"}': "0x20"},),
        "a checkpoint could not be written",
    ),
    "RlhfdJournalFailed": Case(
        "5m",
        {'rlhfd_journal_writes_total{result="error"}': ONCE},
        ({'rlhfd_journal_writes_total{result="ok"}': ONCE, 'rlhfd_journal_writes_total{result="error"}': "0x20"},),
        "the buffer's journal could not be written",
    ),
    "RlhfdNonFinite": Case(
        "5m",
        {'rlhfd_nonfinite_total{where="loss"}': ONCE},
        ({'rlhfd_nonfinite_total{where="loss"}': "3x20"},),
        "NaN or infinity in the loss",
        {"where": "loss"},
    ),
    "RlhfdNoSignal": Case(
        "25m", groups(all_equal=19, mixed=1), (groups(all_equal=8, mixed=2),),
        "in 95% of the groups all rewards are equal",
    ),
    "RlhfdNothingToLearn": Case(
        "5m", {"rlhfd_train_steps_since_signal": "15+1x5 20x20"}, ({"rlhfd_train_steps_since_signal": "19x40"},),
        "the last 20 steps trained no token",
    ),
    "RlhfdRowsWithoutReward": Case(
        "15m",
        outcomes(accepted=18, failed=1, errored=1),
        (outcomes(accepted=98, failed=1, errored=1),),
        "10% of the rows fail",
    ),
    "RlhfdWeightsMismatch": Case(
        "5m",
        {'rlhfd_weight_syncs_total{result="mismatch"}': ONCE},
        ({'rlhfd_weight_syncs_total{result="ok"}': ONCE},),
        "a worker's model does not compute with its weights",
    ),
    "RlhfdEngineGap": Case(
        "5m",
        {'rlhfd_engine_probes_total{verdict="stale"}': ONCE},
        (
            {'rlhfd_engine_probes_total{verdict="ok"}': ONCE},
            {'rlhfd_engine_probes_total{verdict="gap"}': "2x20"},
        ),
        "an engine does not sample with the trainer's weights (stale)",
        {"verdict": "stale"},
    ),
    "RlhfdMessagesRefused": Case(
        "5m",
        {'rlhfd_ipc_drops_total{channel="buffer"}': ONCE},
        ({'rlhfd_ipc_drops_total{channel="buffer"}': "0x20"},),
        "messages to buffer were refused",
        {"channel": "buffer"},
    ),
    "RlhfdErrorsLogged": Case(
        "5m",
        {'rlhfd_log_messages_total{role="rollout",level="error"}': ONCE},
        ({'rlhfd_log_messages_total{role="rollout",level="warning"}': ONCE},),
        "rollout logged errors",
        {"role": "rollout"},
    ),
    "RlhfdReloadFailed": Case(
        "1m",
        {"rlhfd_config_last_reload_successful": "0x4"},
        ({"rlhfd_config_last_reload_successful": "1x4"},),
        "the last reload of the configuration changed nothing",
    ),
    "RlhfdPaused": Case("62m", {"rlhfd_paused": "1x130"}, ({"rlhfd_paused": "1x100 0x30"},), "paused for an hour"),
    "RlhfdGpuMemoryFull": Case(
        "11m",
        {f"rlhfd_gpu_memory_used_bytes{GPU}": "98x40", f"rlhfd_gpu_memory_capacity_bytes{GPU}": "100x40"},
        ({f"rlhfd_gpu_memory_used_bytes{GPU}": "90x40", f"rlhfd_gpu_memory_capacity_bytes{GPU}": "100x40"},),
        "GPU 0 has 98% of its memory in use",
        {"gpu": "0", "uuid": "GPU-1"},
    ),
}  # fmt: skip


def alerts() -> dict[str, dict[str, Any]]:
    rules = yaml.safe_load((DASHBOARDS / "alerts.yml").read_text())["groups"][0]["rules"]
    return {rule["alert"]: rule for rule in rules}


def with_target(series: Series, target: str = TARGET) -> list[dict[str, str]]:
    named = {(name if "{" in name else name + "{}"): values for name, values in series.items()}
    return [{"series": name.replace("{", f"{{{target},", 1), "values": values} for name, values in named.items()]


def expected(name: str, case: Case) -> dict[str, Any]:
    between = " " if name == "RlhfdDown" else ": "
    severity = alerts()[name]["labels"]["severity"]
    return {
        "exp_labels": {"job": "rlhfd", "instance": f"{name}-fires", "severity": severity, **case.labels},
        "exp_annotations": {
            "summary": f"{name}-fires{between}{case.summary}",
            "runbook": f"docs/runbook.md#{name.lower()}",
        },
    }


def all_worlds() -> dict[str, Any]:
    """Every world of every alert as an instance of its own, side by side: an alert fires for one of all, its own."""
    series, checks = [], []
    for name, case in CASES.items():
        for world, of_case in [("fires", case.fires), *((f"silent-{n}", one) for n, one in enumerate(case.silent))]:
            series += with_target(of_case, f'job="rlhfd",instance="{name}-{world}"')
        checks.append({"eval_time": case.at, "alertname": name, "exp_alerts": [expected(name, case)]})
    return {"interval": f"{STEP_S}s", "input_series": series, "alert_rule_test": checks}


def test_every_alert_is_tried_firing_and_silent() -> None:
    assert CASES.keys() == alerts().keys()
    assert all(case.silent for case in CASES.values())


def test_the_alert_and_the_sentence_begin_at_the_same_number_of_idle_steps() -> None:
    assert alerts()["RlhfdNothingToLearn"]["expr"] == f"rlhfd_train_steps_since_signal >= {IDLE_STEPS}"


@pytest.mark.needs("promtool")
def test_each_alert_fires_when_it_must_and_only_then(tmp_path: Path) -> None:
    suite = {
        "rule_files": [str(DASHBOARDS / "rules.yml"), str(DASHBOARDS / "alerts.yml")],
        "evaluation_interval": f"{STEP_S}s",
        "tests": [all_worlds()],
    }
    (tmp_path / "alerts.json").write_text(json.dumps(suite))

    tried = subprocess.run(
        ["promtool", "test", "rules", str(tmp_path / "alerts.json")], capture_output=True, text=True, timeout=60
    )

    assert tried.returncode == 0, tried.stdout + tried.stderr


@pytest.mark.needs("promtool")
def test_shares_of_a_roles_time_add_up_to_one(tmp_path: Path) -> None:
    share = "role_activity:rlhfd_process_time:share5m"
    at = {"expr": f'abs(sum by (role) ({share}{{role="rollout"}}) - 1) < bool 1e-12', "eval_time": "20m"}
    suite = {
        "rule_files": [str(DASHBOARDS / "rules.yml")],
        "tests": [
            {
                "interval": f"{STEP_S}s",
                "input_series": with_target(
                    spent("rollout", generate=21, reward=6, other=3) | spent("trainer", train=9)
                ),
                "promql_expr_test": [
                    {**at, "exp_samples": [{"labels": '{role="rollout"}', "value": 1}]},
                    {
                        "expr": f'abs({share}{{activity="generate"}} - 0.7) < bool 1e-12',
                        "eval_time": "20m",
                        "exp_samples": [{"labels": f'{{{TARGET},role="rollout",activity="generate"}}', "value": 1}],
                    },
                ],
            }
        ],
    }
    (tmp_path / "rules.json").write_text(json.dumps(suite))

    tried = subprocess.run(
        ["promtool", "test", "rules", str(tmp_path / "rules.json")], capture_output=True, text=True, timeout=60
    )

    assert tried.returncode == 0, tried.stdout + tried.stderr


@pytest.mark.parametrize("file", ["rules.yml", "alerts.yml"])
def test_rules_name_metrics_and_labels_of_the_catalogue_only(file: str) -> None:
    rules = yaml.safe_load((DASHBOARDS / file).read_text())["groups"][0]["rules"]

    for rule in rules:
        for name, selector in re.findall(r"(?<![\w:])(rlhfd_\w+)(?:\{([^}]*)\})?", rule["expr"]):
            metric = BY_NAME[re.sub(r"_(sum|count|bucket)$", "", name) if name not in BY_NAME else name]
            for label, values in re.findall(r'(\w+)(?:=~|!=|=)"([^"]*)"', selector or ""):
                known = metric.labels[label]
                assert known[0].startswith("@") or set(values.split("|")) <= set(known), (name, label, values)


def test_every_alert_has_a_section_in_the_runbook_to_which_it_leads() -> None:
    runbook = (ROOT / "docs/runbook.md").read_text()
    sections = dict(re.findall(r"^## (\w+)\n\n(.*?)(?=^## |\Z)", runbook, re.MULTILINE | re.DOTALL))

    leads = {name: alert["annotations"]["runbook"] for name, alert in alerts().items() if name in CASES}
    assert leads == {name: f"docs/runbook.md#{name.lower()}" for name in CASES}
    parts = [(name, part) for name in CASES for part in ("Means", "Look", "Do")]
    assert [(name, part) for name, part in parts if f"**{part}**" not in sections[name]] == []


def test_the_runbook_has_no_section_of_an_alert_that_is_gone() -> None:
    named = re.findall(r"^## (Rlhfd\w+)$", (ROOT / "docs/runbook.md").read_text(), re.MULTILINE)

    assert named == [*alerts()], "in the order of alerts.yml"


def test_what_the_runbook_quotes_of_rlhfd_why_is_what_it_says() -> None:
    runbook, source = (ROOT / "docs/runbook.md").read_text(), (ROOT / "pipeline/supervisor/diagnosis.py").read_text()
    quoted = [
        words
        for line in runbook.replace("\n", " ").split("**Look**")
        if "`rlhfd why`" in line
        for words in re.findall(r'"([a-z][^"]*)"', line.split("**Do**")[0])
    ]

    assert len(quoted) >= 5
    of_stopped = stopped_text(1, "SIGTSTP").replace(" 1", " PID")
    assert [words for words in quoted if words not in source and words != of_stopped] == []
