"""The supervisor's readings of its children."""

from types import SimpleNamespace

import pytest

from pipeline.config.schema import Config
from pipeline.supervisor import status as module
from pipeline.supervisor.pace import RateWindow, Steps
from pipeline.supervisor.status import InstanceStatus
from pipeline.telemetry.metrics import SlotName
from pipeline.telemetry.reader import MetricsReader
from pipeline.telemetry.slab import MetricsSlab


@pytest.fixture
def sampled(monkeypatch):
    """Return a function that samples children with these pids and CPU times, and returns all that was counted."""
    counted = {}

    class Writer:
        def gauge(self, name, **labels):
            return SimpleNamespace(set=lambda value: None)

        def counter(self, name, role):
            return SimpleNamespace(inc=lambda cpu_s: counted.__setitem__(role, counted.get(role, 0.0) + cpu_s))

    status = SimpleNamespace(_writer=Writer(), _cpu_s={})

    def sample(**children):
        monkeypatch.setattr(module, "cpu_seconds", lambda pid: dict(children.values())[pid])
        slots = [SimpleNamespace(role=role, index=0, works=True, child=SimpleNamespace(pid=pid))
                 for role, (pid, _) in children.items()]  # fmt: skip
        status.fleet = SimpleNamespace(slots=slots)
        InstanceStatus._sample_processes(status)
        return counted

    sample.status = status
    return sample


def test_cpu_time_is_counted_once_also_for_a_process_with_the_pid_of_a_dead_one(sampled):
    sampled(trainer=(11, 40.0), rollout=(12, 1.0))
    sampled(trainer=(11, 50.0), rollout=(12, 3.0))
    # It has been reaped: the kernel knows its time no more.
    sampled(trainer=(11, 0.0), rollout=(12, 4.0))
    sampled(rollout=(12, 5.0))

    assert sampled(trainer=(13, 2.0), rollout=(11, 6.0)) == {"trainer": 52.0, "rollout": 11.0}
    assert sampled.status._cpu_s == {13: 2.0, 11: 6.0}


@pytest.fixture
def rated(tmp_path):
    """Return a slab, a status of its rates, and the states of the workers."""
    slots = (SlotName("supervisor"), SlotName("buffer"), SlotName("trainer"), SlotName("rollout"))
    slab = MetricsSlab.create(tmp_path / "metrics", slots)
    for slot in slots:
        slab.begin(*slot)
    status, workers = InstanceStatus.__new__(InstanceStatus), []
    of = lambda role: (SimpleNamespace(state=state) for state in workers)  # noqa: E731
    status.fleet = SimpleNamespace(of=of, config=Config())
    status._steps, status._has_rolled = Steps(8), False
    status._tokens_rate, status._steps_rate = RateWindow(60.0), RateWindow(300.0)
    status._trained = status._evaluated = MetricsReader(slab).read()
    yield slab, status, workers
    slab.close()


def rates_at(at_s, rated, tokens=0.0, step=None):
    """Return tokens and steps a second after a sample with these counts."""
    slab, status, _ = rated
    slab.writer("rollout").counter("rlhfd_tokens_total", kind="response").set_total(tokens)
    if step is not None:
        slab.writer("trainer").counter("rlhfd_train_steps_total").set_total(step)
    status.reading = MetricsReader(slab).read()
    status._sample_rates(at_s)
    return status._tokens_rate.rate(), status._steps_rate.rate()


def test_rates_are_from_the_resume_and_not_from_the_start_of_the_processes(rated):
    # Twenty seconds of start; the trainer then finds that it resumes at step 1,000.
    assert {rates_at(second, rated) for second in range(20)} == {(None, None)}
    rated[-1].append("ready")
    rates = [rates_at(20 + second, rated, 800.0 * second, 1000.0 + 0.5 * second) for second in range(11)]

    assert rates[-1] == (800.0, 0.5)


def test_rates_go_on_while_a_worker_is_replaced(rated):
    rated[-1].append("ready")
    rates_at(0.0, rated, step=0.0)
    rated[-1].clear()

    assert rates_at(10.0, rated, 100.0, 1.0) == (10.0, 0.1)


def test_the_last_values_of_trainer_and_evaluation_outlive_their_processes(rated, tmp_path):
    slab, status, _ = rated
    status._files, status._k, status._run_folder, status._policy_version = ["held.jsonl"], 4, tmp_path, 7
    reader = MetricsReader(slab, names={"file-1": "held.jsonl"})
    trainer, buffer = slab.writer("trainer"), slab.writer("buffer")

    def shown(at_s):
        status.reading = reader.read()
        status._sample_rates(at_s)
        evaluation = status._evaluation()
        means = evaluation["files"]["held.jsonl"]["pass_at_1"], evaluation["pass_at_1"]
        return status._learning(), (evaluation["version"], *means)

    assert shown(0.0) == ({}, (None, None, None))
    trainer.gauge("rlhfd_kl_mean_nats").set(0.25)
    trainer.gauge("rlhfd_loss", kind="total").set(0.5)
    buffer.gauge("rlhfd_evaluation_version").set(7)
    for file, right in (("all", 0.5), ("file-1", 0.75)):
        buffer.gauge("rlhfd_evaluation_pass_at_1_ratio", file=file).set(right)
    buffer.gauge("rlhfd_evaluation_cut_ratio", file="all").set(0.125)
    expected = {"kl": 0.25, "loss": 0.5, "pass_at_1": 0.5}, (7, 0.75, 0.5)
    assert shown(1.0) == expected
    slab.fold("trainer")
    assert shown(2.0) == expected
    slab.fold("buffer")
    assert shown(3.0) == expected
    slab.begin("trainer")
    # A step of a new rank without a reference has no KL.
    slab.writer("trainer").gauge("rlhfd_loss", kind="total").set(0.125)
    assert shown(4.0) == ({"loss": 0.125, "pass_at_1": 0.5}, expected[1])
    assert status._evaluation()["cut_ratio"] == 0.125
    # As of a file system that answers each call with EACCES, EIO or ESTALE.
    status._run_folder = tmp_path / ("n" * 300)
    assert status._evaluation()["best"] == "" and shown(4.0)[-1] == expected[1]


def test_checkpoints_that_could_not_be_written_are_told_of_also_after_their_trainers_death(rated):
    slab, status, _ = rated
    status.state, status._named, status._policy_version = "ready", [], 0
    status.fleet = SimpleNamespace(config=status.fleet.config, slots=[], all_ready=lambda: True, of=lambda role: [])
    status._writer, status._reader = slab.writer("supervisor"), MetricsReader(slab)
    status._gpus, status._number_names = SimpleNamespace(gpus=list), SimpleNamespace(names=[])
    window = SimpleNamespace(add=lambda now_s, values: None)
    status.watchdog = SimpleNamespace(shares=window, engines=window, lost_checkpoints=0)
    for part in ("_sample_processes", "_sample_memory", "_sample_cluster"):
        setattr(status, part, lambda: None)

    def told(at_s):
        status.sample(at_s)
        return status.watchdog.lost_checkpoints

    assert told(0.0) == 0
    slab.writer("trainer").gauge("rlhfd_checkpoint_failures_since_success").set(3.0)
    assert told(1.0) == 3
    slab.fold("trainer")
    slab.begin("trainer")
    assert told(2.0) == 3
    slab.writer("trainer").gauge("rlhfd_checkpoint_failures_since_success").set(0.0)
    assert told(3.0) == 0
