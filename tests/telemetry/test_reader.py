from __future__ import annotations

import importlib.util
import json
import math
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from pipeline.supervisor.gpus import Gpu, gpu_series
from pipeline.telemetry.exposition import Exposition
from pipeline.telemetry.metrics import METRICS, SlotName
from pipeline.telemetry.reader import MetricsReader
from pipeline.telemetry.slab import MetricsSlab
from tests.support.slabs import BLOCK, ROOT, begun

INFO = {
    "rlhfd_build_info": {"version": "0.1.0", "commit": "c0ffee", "python": "3.11.7", "torch": "2.13.0+cpu", "cuda": ""},
    "rlhfd_run_info": {"run_id": "1", "algorithm": "grpo", "model": 'a "b"\\c\nd'},
}
GPUS = gpu_series([Gpu(0, "GPU-aaaa", 1 << 30, 80 << 30, 0.5), Gpu(1, "GPU-bbbb", 0, 80 << 30, 0.0)])


def write_everything(slab: MetricsSlab) -> None:
    """Give a value to every series that the catalogue allows."""
    rng = random.Random(1)
    for slot in slab.layout.slots:
        writer = begun(slab, *slot)
        writer.beat()
        for metric, values, _ in slab.layout.of_role[slot.role].cells:
            pairs = zip(metric.labels, values, strict=True)
            labels = {label: value for label, value in pairs if not metric.is_own(label)}
            if metric.kind == "counter":
                writer.counter(metric.name, **labels).inc(rng.random() * 1e9)
            elif metric.kind == "gauge":
                writer.gauge(metric.name, **labels).set(rng.random())
            else:
                writer.histogram(metric.name, **labels).observe_many([rng.random(), 7])
        if slot.role == "buffer":
            writer.publish_group(BLOCK)


def test_text_shows_each_bound_series_and_nothing_else(slab: MetricsSlab) -> None:
    writer = begun(slab, "rollout", 1)
    writer.counter("rlhfd_tokens_total", kind="prompt").inc(3)
    writer.gauge("rlhfd_rollouts_in_flight").set(2)

    assert Exposition(MetricsReader(slab)).text().decode() == (
        "# HELP rlhfd_tokens_total Tokens by kind (prompt, response, trained); responses count as they are sampled, "
        "of lost rollouts and of evaluations too.\n"
        "# TYPE rlhfd_tokens_total counter\n"
        'rlhfd_tokens_total{kind="prompt"} 3.0\n'
        "# HELP rlhfd_rollouts_in_flight Rollouts in flight.\n"
        "# TYPE rlhfd_rollouts_in_flight gauge\n"
        'rlhfd_rollouts_in_flight{worker="1"} 2.0\n'
    )


def test_openmetrics_names_family_and_unit_and_ends_with_eof(slab: MetricsSlab) -> None:
    begun(slab, "supervisor").counter("rlhfd_process_cpu_seconds_total", role="trainer").inc(1.5)

    assert Exposition(MetricsReader(slab)).openmetrics().decode() == (
        "# HELP rlhfd_process_cpu_seconds CPU time used by child processes, dead ones included.\n"
        "# TYPE rlhfd_process_cpu_seconds counter\n"
        "# UNIT rlhfd_process_cpu_seconds seconds\n"
        'rlhfd_process_cpu_seconds_total{role="trainer"} 1.5\n'
        "# EOF\n"
    )


def test_histogram_buckets_are_cumulative(slab: MetricsSlab) -> None:
    begun(slab, "buffer").histogram("rlhfd_policy_staleness_versions", point="push").observe_many([0, 1, 1, 40])

    lines = Exposition(MetricsReader(slab)).text().decode().splitlines()

    assert 'rlhfd_policy_staleness_versions_bucket{le="0.0",point="push"} 1.0' in lines
    assert 'rlhfd_policy_staleness_versions_bucket{le="1.0",point="push"} 3.0' in lines
    assert 'rlhfd_policy_staleness_versions_bucket{le="32.0",point="push"} 3.0' in lines
    assert lines[-3:] == [
        'rlhfd_policy_staleness_versions_bucket{le="+Inf",point="push"} 4.0',
        'rlhfd_policy_staleness_versions_count{point="push"} 4.0',
        'rlhfd_policy_staleness_versions_sum{point="push"} 42.0',
    ]


def test_a_value_observed_several_times_at_once_counts_as_often(slab: MetricsSlab) -> None:
    one_by_one = begun(slab, "buffer").histogram("rlhfd_policy_staleness_versions", point="push")
    one_by_one.observe_many([0, 1, 1, 1])
    before = slab.floats.tolist()

    one_by_one.observe(1, 3)
    at_once = slab.floats.tolist()
    one_by_one.observe_many([1, 1, 1])

    gained = [
        (b - a, c - b) for a, b, c in zip(before, at_once, slab.floats.tolist(), strict=True) if b != a and a == a
    ]
    assert gained == [(3.0, 3.0), (3.0, 3.0)], "one bucket and the sum"


def test_histogram_with_a_negative_observation_has_neither_sum_nor_count(slab: MetricsSlab) -> None:
    begun(slab, "rollout").histogram("rlhfd_reward", source="model").observe_many([1, -1])

    lines = Exposition(MetricsReader(slab)).text().decode().splitlines()

    assert lines[-1] == 'rlhfd_reward_bucket{le="+Inf",source="model"} 2.0'


def test_gauge_of_several_trainers_is_the_first_ones(path: Path) -> None:
    slab = MetricsSlab.create(path, [SlotName("trainer", 0), SlotName("trainer", 1)])
    for worker in (1, 0):
        begun(slab, "trainer", worker).gauge("rlhfd_reward_mean", source="function").set(worker)

    assert MetricsReader(slab).read().value("rlhfd_reward_mean") == 0
    slab.close()


def test_value_sums_over_the_labels_that_are_not_named(slab: MetricsSlab) -> None:
    writer = begun(slab, "rollout")
    for amount, kind in enumerate(("prompt", "response"), start=1):
        writer.counter("rlhfd_tokens_total", kind=kind).inc(amount)

    reading = MetricsReader(slab).read()

    assert reading.value("rlhfd_tokens_total") == 3
    assert reading.value("rlhfd_tokens_total", kind="response") == 2
    assert reading.value("rlhfd_tokens_total", kind="trained") is None


def test_mean_of_a_histogram_is_over_all_that_was_observed(slab: MetricsSlab) -> None:
    name = "rlhfd_policy_staleness_versions"
    begun(slab, "buffer").histogram(name, point="push").observe_many([0, 1])
    begun(slab, "trainer").histogram(name, point="train").observe_many([1, 4])
    begun(slab, "rollout").histogram("rlhfd_reward", source="model").observe(-1)

    reading = MetricsReader(slab).read()

    assert reading.histogram_mean(name, point="train") == 2.5
    assert reading.histogram_mean(name) == 1.5
    assert reading.histogram_mean("rlhfd_kl_nats") is None
    assert reading.histogram_mean("rlhfd_reward") is None


def test_both_parsers_read_every_series(slab: MetricsSlab) -> None:
    write_everything(slab)
    reader = MetricsReader(slab, INFO)
    actors = {("0", "node-1", "10.0.0.1"): 1.0}
    reader.external.update(
        GPUS, rlhfd_device_info={("trainer", "0", "NVIDIA H200"): 1.0}, rlhfd_cluster_actor_info=actors
    )

    text = {family.name: family for family in parse_text(Exposition(reader).text().decode())}
    openmetrics = {family.name: family for family in parse_openmetrics(Exposition(reader).openmetrics().decode())}

    expected = {metric.name.removesuffix("_total") for metric in METRICS}
    assert text.keys() == openmetrics.keys() == expected
    assert {name: family.type for name, family in text.items()} == {
        metric.name.removesuffix("_total"): metric.kind for metric in METRICS
    }
    assert [*map(len, (family.samples for family in text.values()))] == [
        *map(len, (family.samples for family in openmetrics.values()))
    ]


def test_parsed_values_are_those_that_were_read(slab: MetricsSlab) -> None:
    write_everything(slab)
    reader = MetricsReader(slab, INFO)
    reader.external.update(GPUS)

    parsed = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parse_text(Exposition(reader).text().decode())
        for sample in family.samples
    }

    scalars = [
        (metric.name, frozenset(zip(metric.labels, key, strict=True)), value)
        for metric in METRICS
        for key, value in reader.read().families[metric.name].items()
    ]
    assert all(parsed[name, key] == value for name, key, value in scalars if isinstance(value, float))
    assert parsed["rlhfd_items_unaccounted", frozenset()] == BLOCK.unaccounted
    assert ("rlhfd_run_info", frozenset(INFO["rlhfd_run_info"].items())) in parsed


@pytest.mark.needs("promtool")
def test_promtool_finds_nothing_to_complain_of(slab: MetricsSlab) -> None:
    write_everything(slab)

    reader = MetricsReader(slab, INFO)
    reader.external.update(GPUS)
    body = Exposition(reader).text()
    checked = subprocess.run(["promtool", "check", "metrics"], input=body, capture_output=True, timeout=60)

    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


@pytest.mark.parametrize("lives", [1, 2], ids=["of the first life", "that all died once"])
def test_scrape_of_64_workers_is_quick(path: Path, lives: int) -> None:
    slots = [
        SlotName("supervisor"),
        SlotName("buffer"),
        SlotName("trainer"),
        *(SlotName("rollout", i) for i in range(64)),
    ]
    slab = MetricsSlab.create(path, slots)
    for _ in range(lives):
        write_everything(slab)
    exposition = Exposition(MetricsReader(slab, INFO))

    took_s = math.inf
    for _ in range(10):
        started_s = time.thread_time()
        body = exposition.openmetrics()
        took_s = min(took_s, time.thread_time() - started_s)

    assert body.count(b"\n") > 2000
    # Every series there can be, no value round. 30 ms are allowed on a quiet machine; the bound leaves room for others.
    assert took_s < 0.15
    slab.close()


def test_build_info_names_versions_without_importing_torch() -> None:
    code = """
import json, sys
from pipeline.telemetry.reader import build_info
print(json.dumps([build_info(), "torch" in sys.modules]))
"""

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    info, imported = json.loads(done.stdout)

    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    assert f"__version__ = '{info['torch']}" in (Path(found.origin).parent / "version.py").read_text()
    assert not imported
    assert [*info] == ["version", "commit", "python", "torch", "cuda"]
    assert info["python"] == sys.version.split()[0]


@pytest.mark.needs("git")
def test_the_commit_of_a_checkout_and_of_a_further_worktree_of_it_is_known_whoever_owns_them(tmp_path: Path) -> None:
    first, further = tmp_path / "first", tmp_path / "further"
    shutil.copytree(ROOT / "pipeline", first / "pipeline", ignore=shutil.ignore_patterns("__pycache__"))

    def git(*words: str) -> str:
        author = ("-c", "user.name=A", "-c", "user.email=a@example.org")
        return subprocess.run(
            ["git", *author, *words], cwd=first, capture_output=True, text=True, check=True, timeout=60
        ).stdout.strip()

    def told(folder: Path) -> list[str]:
        code = """
from pipeline.cli import collect_env
from pipeline.telemetry.reader import build_info
print(build_info()["commit"], dict(collect_env._version())["commit"])
"""
        return subprocess.check_output([sys.executable, "-c", code], cwd=folder, text=True, timeout=60).split()

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "all")
    git("worktree", "add", "--quiet", str(further))

    commit = git("rev-parse", "HEAD")
    if os.geteuid() == 0:
        os.chown(first, 65534, 65534)
        os.chown(first / ".git", 65534, 65534)
        os.chown(further, 65534, 65534)

    assert told(first) == told(further) == [commit, commit[:12]]
