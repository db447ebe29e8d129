"""A live run as Prometheus sees it: one daemon, scraped by a real Prometheus and by us, a worker killed on the way."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from pipeline.config.schema import Config
from pipeline.telemetry.metrics import INFO, METRICS, NUMBER_LABELS, OWN, REWARD_LABELS, SlotName
from pipeline.telemetry.metrics import Metric as Declared
from tests.support.daemon import (
    PROGRAM,
    SMALL,
    START_TIMEOUT_S,
    Daemon,
    Metrics,
    get,
    status_of,
    telling_reward,
    total,
    wait_until,
)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.needs("prometheus", "promtool"),
    # All of them share one run, which takes a minute and a half and counts for the first.
    pytest.mark.timeout(400),
]

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
SAMPLES = 'rlhfd_tokens_total{kind="response"}[1m]'
RATE = f"rate({SAMPLES})"
RATE_WINDOW_S = 60.0
# The window has to lie wholly within Prometheus' samples; then several moments are compared.
WATCHED_S = RATE_WINDOW_S + 12.0
ROOT = Path(__file__).parents[2]
DASHBOARDS = ROOT / "pipeline/telemetry/dashboards"
# What Grafana would put in the place of its variables, at a scrape each second.
VARIABLES = {"$instance": ".*", "$__rate_interval": "1m"}
# These need a GPU; tests/grafana/test_dashboard.py tries them on made-up series.
EMPTY_WITHOUT_A_GPU = {"GPU memory", "GPU load", "Torch memory"}
COMPARED_S = 5.0
LEAST_COMPARED = 10
# One scrape of each second may be lost in a row: what lies beyond the samples is 6 % of the window at most.
LONGEST_GAP_S = 2.2
PAUSE_S = 0.2
# Reading a scrape costs as much CPU as the watched daemon takes in a tenth of a second.
WATCH_PAUSE_S = 0.6
KILLED = "rollout-0"


@dataclasses.dataclass
class Rates:
    """The rate of response tokens at one moment, as three show it."""

    terminal: float
    status: float
    prometheus: float


@dataclasses.dataclass
class Watched:
    """The observations of one run.

    Attributes:
        scrapes: In order, text and OpenMetrics by turns.
        readiness: What /readyz and /healthz answered, by moment.
        rates: Compared from the moment on when the window is full.
        spans: Time in activities and wall time, by process.
        answers: Series that Prometheus gave for each query of the dashboard, by panel and query.
        rules: What Prometheus says of each recording rule and alert.
        is_up: Prometheus' own verdict on each of its scrapes.
        prometheus_log: Its warnings and errors.
    """

    scrapes: list[Scrape] = dataclasses.field(default_factory=list)
    readiness: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    rates: list[Rates] = dataclasses.field(default_factory=list)
    spans: list[Span] = dataclasses.field(default_factory=list)
    answers: dict[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    rules: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    is_up: list[float] = dataclasses.field(default_factory=list)
    prometheus_log: str = ""
    last_status: dict[str, Any] = dataclasses.field(default_factory=dict)
    exit_code: int | None = None


@dataclasses.dataclass
class Span:
    """A process's time between two moments, or since its start.

    Attributes:
        spent_s: What all its activities add up to.
        wall_s: What passed.
    """

    name: str
    spent_s: float
    wall_s: float


@dataclasses.dataclass
class Scrape:
    """One scrape, as it came and taken apart.

    Attributes:
        values: Every sample.
        growing: Those that may only grow: counters, and a histogram's buckets, counts and sums.
    """

    text: str
    is_openmetrics: bool
    values: Metrics
    growing: Metrics

    @classmethod
    def of(cls, text: str, *, openmetrics: bool) -> Scrape:
        families: list[Metric] = list((parse_openmetrics if openmetrics else parse_text)(text))
        values, growing = {}, {}
        for family in families:
            for sample in family.samples:
                key = (sample.name, frozenset(sample.labels.items()))
                values[key] = sample.value
                if family.type in ("counter", "histogram"):
                    growing[key] = sample.value
        return cls(text, openmetrics, values, growing)


class Prometheus:
    """A Prometheus of our own on loopback that scrapes one target every second."""

    def __init__(self, folder: Path, target: str) -> None:
        self._folder = folder
        self._url = ""
        for name in ("rules.yml", "alerts.yml"):
            shutil.copy(DASHBOARDS / name, folder)
        # Ours as it is, but for the port, which is another in each run here, and for the patience of a test.
        text = (DASHBOARDS / "prometheus.yml").read_text()
        assert text.count(DEFAULT_TARGET) == 1 and text.count(": 10s") == 2
        config = folder / "prometheus.yml"
        config.write_text(text.replace(DEFAULT_TARGET, target).replace(": 10s", ": 1s"))
        self._command = [
            "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'prometheus'}",
            "--log.level=warn",
        ]

    @contextlib.contextmanager
    def running(self) -> Iterator[Prometheus]:
        """Run it for the block."""
        process = self._started() or self._started()
        assert process is not None, self.log
        try:
            yield self
        finally:
            process.terminate()
            process.wait(30)

    def _started(self) -> subprocess.Popen[bytes] | None:
        """Start it at a free port and wait until it answers; None if another program took the port first."""
        self._url = f"127.0.0.1:{free_port()}"
        command = [*self._command, f"--web.listen-address={self._url}"]
        with (self._folder / "prometheus.log").open("w") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_until(lambda: process.poll() is not None or self._is_ready(), START_TIMEOUT_S, "Prometheus is ready")
        if process.poll() is None:
            return process
        assert "address already in use" in self.log, self.log
        return None

    def _is_ready(self) -> bool:
        try:
            return get(f"http://{self._url}/-/ready")[0] == 200
        except OSError:
            return False

    @property
    def log(self) -> str:
        """The warnings and errors of the run so far."""
        return (self._folder / "prometheus.log").read_text()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the result of an instant query, nothing while it does not answer."""
        try:
            code, body = get(f"http://{self._url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
        except OSError:
            return []
        assert code in (200, 503), body
        found: list[dict[str, Any]] = json.loads(body)["data"]["result"] if code == 200 else []
        return found

    def longest_gap_s(self, samples: str) -> float:
        """Return the longest time without a sample in the window of a range query, its two edges included."""
        now = time.time()
        found = self.query(samples)
        times = [float(moment) for moment, _ in found[0]["values"]] if found else []
        edges = [now - RATE_WINDOW_S, *times, now]
        return max(later - earlier for earlier, later in itertools.pairwise(edges))

    def rules(self) -> list[dict[str, Any]]:
        """Return every rule and how its last evaluation went."""
        code, body = get(f"http://{self._url}/api/v1/rules")
        assert code == 200, body
        return [rule for group in json.loads(body)["data"]["groups"] for rule in group["rules"]]

    def value(self, expression: str) -> float | None:
        """Return the value of an expression that gives one series."""
        found = self.query(expression)
        return float(found[0]["value"][1]) if found else None


DEFAULT_TARGET = "127.0.0.1:9477"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def shown_on_terminal(daemon: Daemon) -> float:
    """The tokens_per_s of the newest line of standard output."""
    words = dict(word.split("=", 1) for word in daemon.output.splitlines()[-1].split())
    return float(words["tokens_per_s"])


class Watch:
    """Runs one daemon through start, work, the loss of a worker and the end, and records its metrics."""

    def __init__(self, daemon: Daemon, prometheus: Prometheus) -> None:
        self.seen = Watched()
        self._daemon = daemon
        self._prometheus = prometheus

    def scrape(self) -> Metrics:
        openmetrics = len(self.seen.scrapes) % 2 == 1
        code, text = self._daemon.get("/metrics", OPENMETRICS if openmetrics else "*/*")
        assert code == 200, text
        self.seen.scrapes.append(Scrape.of(text, openmetrics=openmetrics))
        return self.seen.scrapes[-1].values

    def answers(self, moment: str) -> None:
        self.seen.readiness[moment] = self._daemon.get("/healthz")[0], self._daemon.get("/readyz")[0]

    def until_ready(self) -> None:
        def ready() -> bool:
            self.scrape()
            return self._daemon.get("/readyz")[0] == 200

        self._daemon.wait_until(ready, "it is ready")

    def through_a_kill(self) -> None:
        saved = "rlhfd_checkpoints_total"
        self._daemon.wait_until(lambda: total(self.scrape(), saved, result="ok") >= 1, "a checkpoint")
        self._daemon.signal(signal.SIGKILL, KILLED)
        self._daemon.wait_until(
            lambda: total(self.scrape(), "rlhfd_process_exits_total", role="rollout") == 1, "the death is counted"
        )
        self.answers("a worker is dead")
        self.until_ready()

    def until_the_window_is_full(self) -> None:
        first = wait_until(
            lambda: self._prometheus.value("min_over_time(timestamp(up)[5m:1s])"), START_TIMEOUT_S, "it scrapes"
        )
        assert first is not None
        while time.time() < first + WATCHED_S:
            self.scrape()
            time.sleep(WATCH_PAUSE_S)

    def account(self) -> None:
        """Record the sum of each process's activities, since its start and over the last while."""
        started = {name: age_s(pid) for name, pid in self._daemon.pids().items()}
        from_s, before = time.monotonic(), spent_by_process(self.scrape())
        self.until_the_window_is_full()
        lived = {name: age_s(pid) for name, pid in self._daemon.pids().items()}
        until_s, after = time.monotonic(), spent_by_process(self.scrape())
        assert started.keys() == lived.keys() == after.keys()
        self.seen.spans = [Span(name, after[name] - before[name], until_s - from_s) for name in after]
        # One worker has died: the time of the one before it is counted too.
        self.seen.spans += [
            Span(f"{name}, from its start", after[name], lived[name]) for name in after if name != KILLED
        ]

    def ask(self) -> None:
        """Put every query of the dashboard to Prometheus."""
        for panel in json.loads((DASHBOARDS / "rlhfd.json").read_text())["panels"]:
            for target in panel.get("targets", ()):
                expression = target["expr"]
                for name, value in VARIABLES.items():
                    expression = expression.replace(name, value)
                self.seen.answers[panel["title"], target["refId"]] = len(self._prometheus.query(expression))
        self.seen.rules = self._prometheus.rules()

    def compare(self) -> None:
        end = time.monotonic() + COMPARED_S
        deadline = end + 2 * RATE_WINDOW_S
        while time.monotonic() < end or len(self.seen.rates) < LEAST_COMPARED:
            self.scrape()
            rate, gap_s = self._prometheus.value(RATE), self._prometheus.longest_gap_s(SAMPLES)
            assert rate is not None
            status = self._daemon.status()["tokens_per_s"]
            # Prometheus gives the time that its samples do not cover no tokens; a starved machine has such times.
            if gap_s <= LONGEST_GAP_S:
                self.seen.rates.append(Rates(shown_on_terminal(self._daemon), status, rate))
            assert time.monotonic() < deadline, f"Prometheus had no sample for {gap_s:.1f} s of the last minute"
            time.sleep(PAUSE_S)


# The processes that the supervisor writes about.
SLOTS = (SlotName("buffer"), SlotName("trainer"), SlotName("rollout"))


def series_of(prefix: str) -> set[tuple[str, ...]]:
    """Return name and labels of each declared series whose name begins with a prefix."""
    found = (metric for metric in METRICS if metric.name.startswith(prefix))
    return {(metric.name, *labels) for metric in found for labels in metric.series(SLOTS)}


# Series of the catalogue that the watched run cannot have, by the reason.
NEVER_IN_SUCH_A_RUN: dict[str, set[tuple[str, ...]]] = {
    "it runs without a GPU": {("rlhfd_torch_memory_bytes", OWN, OWN, state) for state in ("allocated", "reserved")},
    "GRPO has no critic": {("rlhfd_loss", "value")},
    "trainer.entropy_coef is 0": {("rlhfd_loss", "entropy")},
    "its engine is the trainer's own function": {
        ("rlhfd_behaviour_cut_ratio",),
        *(("rlhfd_behaviour_ratio", stat) for stat in ("mean", "min", "max")),
    },
    "rollout.sleep is false": series_of("rlhfd_engine_sleep"),
    "it has no held-out prompts": series_of("rlhfd_evaluation"),
    "trainer.record is off": series_of("rlhfd_recording"),
    "it has no tracker": series_of("rlhfd_tracker"),
    "it has one reward function": {
        ("rlhfd_reward_function_mean", OWN, OWN, label) for label in [*REWARD_LABELS, *NUMBER_LABELS]
    },
    "no reward model, functions only": {
        (name, "model") for name in ("rlhfd_reward", "rlhfd_reward_mean", "rlhfd_reward_stddev")
    },
    "buffer.limit is 0": {("rlhfd_buffer_capacity_items", "0")},
    "trainer.normalize_values is false": series_of("rlhfd_return"),
    "rollout.reward_scale is none": series_of("rlhfd_reward_running"),
    "its workers compute here": {
        ("rlhfd_weight_sync_bytes_total", "ray"),
        *series_of("rlhfd_cluster"),
        *series_of("rlhfd_weight_sent"),
    }
    - series_of("rlhfd_cluster_actor_info"),
    "it has one rank": series_of("rlhfd_rank_imbalance"),
    "its trainer computes here": series_of("rlhfd_remote_rank"),
}


def is_shown(metric: Declared, labels: tuple[str, ...], shown: set[tuple[str, frozenset[tuple[str, str]]]]) -> bool:
    """Whether some process shows a declared series; labels that name that process may be any."""
    wanted = {pair for pair in zip(metric.labels, labels, strict=True) if not metric.is_own(pair[0])}
    return any(name == metric.name and wanted <= has for name, has in shown)


def spent_by_process(metrics: Metrics) -> dict[str, float]:
    """Return the seconds that each process's activities add up to."""
    spent: dict[str, float] = {}
    for (name, labels), seconds in metrics.items():
        if name == "rlhfd_process_time_seconds_total":
            about = dict(labels)
            process = f"{about['role']}-{about['worker']}"
            spent[process] = spent.get(process, 0.0) + seconds
    return spent


def age_s(pid: int) -> float:
    """Return how long ago the kernel started a process."""
    started_ticks = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, task: Path) -> Watched:
    folder = tmp_path_factory.mktemp("watched")
    # Rewards that differ, so that there is something to learn, and take their time without a core; and checkpoints.
    sets = (*SMALL, *telling_reward(folder, pause_s=0.06), "trainer.save_every=3")
    # Executed: it is not ready yet when it answers.
    with Daemon(folder, *sets, task=task, program=PROGRAM) as daemon:
        daemon.wait_answering()
        # At once: the daemon may be ready before Prometheus is.
        starting = daemon.get("/healthz")[0], daemon.get("/readyz")[0]
        prometheus = Prometheus(folder, daemon.url.removeprefix("http://"))
        with prometheus.running():
            watch = Watch(daemon, prometheus)
            watch.seen.readiness["starting"] = starting
            watch.until_ready()
            watch.answers("ready")
            watch.through_a_kill()
            watch.answers("ready again")
            watch.account()
            watch.compare()
            watch.ask()
            seen = watch.seen
            seen.is_up = [float(value) for _, value in prometheus.query("up[5m]")[0]["values"]]
            seen.prometheus_log = prometheus.log
            seen.last_status = status_of(daemon.ask("status", "--json"))
        daemon.signal(signal.SIGTERM)
        seen.exit_code = daemon.wait()
    return seen


def test_health_is_200_all_along_and_readiness_503_while_a_role_is_missing(watched: Watched) -> None:
    assert watched.readiness == {
        "starting": (200, 503),
        "ready": (200, 200),
        "a worker is dead": (200, 503),
        "ready again": (200, 200),
    }
    assert watched.exit_code == 0


def test_books_balance_at_every_scrape(watched: Watched) -> None:
    scrapes = [scrape.values for scrape in watched.scrapes]
    with_books = [values for values in scrapes if ("rlhfd_items_sealed_total", frozenset()) in values]

    assert len(with_books) >= 100
    assert with_books == scrapes[-len(with_books) :], "once there, the books are in every scrape"
    for values in with_books:
        trained, dropped = total(values, "rlhfd_items_trained_total"), total(values, "rlhfd_items_dropped_total")
        ready, leased = (total(values, "rlhfd_buffer_items", state=state) for state in ("ready", "leased"))
        assert total(values, "rlhfd_items_sealed_total") == trained + dropped + ready + leased
        assert values["rlhfd_items_unaccounted", frozenset()] == 0
    assert total(with_books[-1], "rlhfd_items_trained_total") > 300


def test_counters_never_go_backwards_though_a_worker_dies(watched: Watched) -> None:
    scrapes = watched.scrapes

    assert total(scrapes[-1].values, "rlhfd_process_exits_total", role="rollout", reason="signal") == 1
    assert total(scrapes[-1].values, "rlhfd_process_starts_total", role="rollout") == 2
    before: Metrics = {}
    for scrape in scrapes:
        gone = before.keys() - scrape.growing.keys()
        assert not gone
        fallen = {key: (value, scrape.growing[key]) for key, value in before.items() if scrape.growing[key] < value}
        assert not fallen
        before = scrape.growing


def test_text_and_openmetrics_show_the_same_counters_and_histograms(watched: Watched) -> None:
    one, other = watched.scrapes[-2:]

    assert one.is_openmetrics != other.is_openmetrics
    assert one.growing.keys() == other.growing.keys()
    assert len(one.growing) > 200


@pytest.mark.parametrize("moment", [0.0, 0.5, 1.0], ids=["starting", "running", "at the end"])
def test_promtool_finds_nothing_to_complain_about(watched: Watched, moment: float) -> None:
    texts = [scrape.text for scrape in watched.scrapes if not scrape.is_openmetrics]
    text = texts[round(moment * (len(texts) - 1))]

    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=30, check=False
    )

    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_activities_of_each_process_add_up_to_its_wall_time(watched: Watched) -> None:
    assert len(watched.spans) == 5
    for span in watched.spans:
        assert span.wall_s > RATE_WINDOW_S / 2
        assert math.isclose(span.spent_s, span.wall_s, rel_tol=0.01), span


def test_every_query_of_the_dashboard_has_an_answer_in_a_live_run(watched: Watched) -> None:
    empty = {panel for (panel, _), series in watched.answers.items() if not series}
    has_gpu = any(key[0] == "rlhfd_gpu_memory_used_bytes" for key in watched.scrapes[-1].values)

    assert len(watched.answers) > 60
    assert empty == (set() if has_gpu else EMPTY_WITHOUT_A_GPU)


def test_prometheus_evaluates_every_rule_and_a_healthy_run_fires_no_alert(watched: Watched) -> None:
    assert {rule["name"]: (rule["health"], rule.get("lastError")) for rule in watched.rules} == {
        rule["name"]: ("ok", None) for rule in watched.rules
    }
    alerts = {rule["name"]: rule["state"] for rule in watched.rules if rule["type"] == "alerting"}
    assert len(alerts) == 27
    assert [name for name, state in alerts.items() if state == "firing"] == []


def test_prometheus_is_configured_for_the_port_that_is_the_default() -> None:
    metrics = Config().metrics

    assert f"{metrics.host}:{metrics.port}" == DEFAULT_TARGET


def test_every_series_of_the_catalogue_is_shown_by_a_run(watched: Watched) -> None:
    shown = {
        (name.removesuffix("_bucket"), labels)
        for scrape in watched.scrapes
        for name, labels in scrape.values
        if not name.endswith("_bucket") or ("le", "+Inf") in labels
    }

    missing = {
        (metric.name, *labels)
        for metric in METRICS
        for labels in metric.series(SLOTS)
        if metric.owners != (INFO,) and not is_shown(metric, labels, shown)
    }

    assert sorted(missing) == sorted(key for keys in NEVER_IN_SUCH_A_RUN.values() for key in keys)


def test_prometheus_scrapes_and_hardly_ever_in_vain(watched: Watched) -> None:
    assert len(watched.is_up) >= WATCHED_S
    # A scrape has a second, and the machine has others to serve.
    assert watched.is_up.count(0.0) <= 2 and set(watched.is_up) <= {0.0, 1.0}
    assert watched.prometheus_log == ""


def test_rate_in_prometheus_is_what_the_terminal_and_the_status_show(watched: Watched) -> None:
    assert len(watched.rates) >= LEAST_COMPARED
    for rates in watched.rates:
        assert rates.prometheus > 10
        assert math.isclose(rates.status, rates.prometheus, rel_tol=0.1), rates
        assert math.isclose(rates.terminal, rates.prometheus, rel_tol=0.1), rates


def test_status_command_shows_the_books_and_the_rate(watched: Watched) -> None:
    status = watched.last_status

    assert status["state"] == "ready"
    assert math.isclose(status["tokens_per_s"], watched.rates[-1].status, rel_tol=0.1)
    books = status["buffer"]
    assert books["unaccounted"] == 0
    assert books["sealed"] == (
        books["trained"] + sum(books["dropped"].values()) + books["ready_items"] + books["leased_items"]
    )
    assert [(process["role"], process["restarts"]) for process in status["processes"]] == [
        ("buffer", 0),
        ("trainer", 0),
        ("rollout", 1),
    ]
