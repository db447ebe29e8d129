"""Seconds by phase of a step, with a device that computes after the call."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from pipeline.trainer.step_stats import Clock, Stopwatch
from tests.support.told import Told
from tests.trainer.test_learner import TRAINER, disturbed, experience_for, new_learner


class Device:
    """A queue of work, of a host that issues it; marks are the times at which the device reaches them."""

    host_s = device_s = 0.0

    def issue(self, seconds):
        self.host_s += 0.25
        self.device_s = max(self.device_s, self.host_s) + seconds

    def mark(self):
        return max(self.device_s, self.host_s)

    def between(self, first, last):
        self.host_s = max(self.host_s, last)
        return last - first

    def wait(self):
        self.host_s = max(self.host_s, self.device_s)


def test_a_phase_lasts_until_the_device_has_computed_it_and_the_host_runs_ahead():
    device, told = Device(), Told()
    watch = Stopwatch(told, device)

    for _ in range(3):
        for phase, seconds in (("forward", 2.0), ("backward", 4.0)):
            with watch.during(phase):
                device.issue(seconds)
    assert device.host_s == 6 * 0.25
    device.wait()
    with watch.during("optimizer"):
        device.issue(1.0)

    # The host issues the first pass, and the optimizer's, while the device has nothing to do.
    assert watch.seconds() == {"forward": 6.25, "backward": 12.0, "reduce": 0.0, "optimizer": 1.25}
    assert device.host_s == device.device_s
    assert told.phases == [*["forward", "backward"] * 3, "optimizer"]


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_step_of_any_number_of_micro_batches_waits_once_for_its_device(algorithm, monkeypatch):
    calls, told = [], Told()

    class Watched(Clock):
        def between(self, first, last):
            calls.append("read")
            return super().between(first, last)

        def wait(self):
            # In "reduce" a rank waits for the others: one that waited for its own card there would be taken for them.
            calls.append(f"wait in {told.phases[-1]}")

    backward = torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, "backward", lambda *each, **named: (calls.append("backward"), backward(*each)))
    for rows in (8, 2):
        learner = new_learner(algorithm, TRAINER.model_copy(update={"micro_batch_size": rows}), telemetry=told)
        learner._clock = Watched()
        calls.clear()

        learner.update([disturbed(experience_for(learner, algorithm))])

        passes = calls.count("backward")
        assert passes >= 8 // rows
        assert calls[: passes + 1] == [*["backward"] * passes, "wait in backward"]
        assert set(calls[passes + 1 :]) == {"read"}


def test_a_packed_micro_batch_more_reads_no_value_more():
    """A value that is read is a wait on a card, as an index of true elements is, whose number is read."""
    counts = {}
    for rows in (8, 2):
        settings = TRAINER.model_copy(update={"micro_batch_size": rows, "packing": True, "shared_prefix": False})
        learner = new_learner("grpo", settings)
        experience = disturbed(experience_for(learner, "grpo"))
        # The first step tests the model's head.
        learner.update([experience])
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
            learner.update([experience])
        names = [event.name for event in profiler.events()]
        counts[names.count("autograd::engine::evaluate_function: EmbeddingBackward0")] = [
            names.count(name) for name in ("aten::_local_scalar_dense", "aten::nonzero")
        ]

    one, several = sorted(counts)
    assert (one, several > 1) == (1, True)
    assert counts[one] == counts[several]
