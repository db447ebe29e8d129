"""The supervisor's readings of its children."""

from types import SimpleNamespace

import pytest

from pipeline.supervisor import status as module
from pipeline.supervisor.status import InstanceStatus


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
