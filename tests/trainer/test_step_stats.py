"""Seconds by phase of a step, with a device that computes after the call."""

import itertools

import pytest
import torch

from pipeline.trainer.step_stats import Stopwatch
from tests.support.told import Told
from tests.trainer.test_learner import disturbed, experience_for, new_learner


class Clock:
    now_s = 0.0

    def pass_s(self, seconds):
        self.now_s += seconds


def test_a_backward_pass_lasts_until_the_device_has_computed_it(monkeypatch):
    clock, told = Clock(), Told()
    monkeypatch.setattr("pipeline.trainer.step_stats.time.perf_counter", lambda: clock.now_s)
    # Each call issues its work at once; the device needs 5 s for all of it.
    watch = Stopwatch(told, lambda: clock.pass_s(5.0))

    for phase in ("forward", "backward", "reduce", "optimizer"):
        with watch.during(phase):
            clock.pass_s(0.25)

    assert watch.seconds == {"forward": 0.25, "backward": 5.25, "reduce": 0.25, "optimizer": 0.25}
    assert told.phases == ["forward", "backward", "reduce", "optimizer"]


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_each_backward_pass_of_a_learner_waits_for_its_gpu(algorithm, monkeypatch):
    learner = new_learner(algorithm)
    calls = []
    # The passes are those of the CPU; the learner waits for the device that it was given.
    backward = torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, "backward", lambda *each, **named: (calls.append("backward"), backward(*each)))
    monkeypatch.setattr(learner, "_synchronize", lambda: calls.append("wait"))

    learner.update([disturbed(experience_for(learner, algorithm))])

    assert calls.count("backward") >= 1
    assert all(after == "wait" for before, after in itertools.pairwise(calls) if before == "backward")
    assert calls[-1] == "wait"


def test_a_learner_waits_for_a_gpu_alone(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    learner = new_learner("grpo")

    learner._synchronize()
    assert waited == []
    learner._device = torch.device("cuda", 0)
    learner._synchronize()
    assert waited == [torch.device("cuda", 0)]
