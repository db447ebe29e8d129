"""Seconds by phase of a step, with a device that computes after the call."""

from pipeline.trainer.step_stats import Stopwatch


class Clock:
    now_s = 0.0

    def pass_s(self, seconds):
        self.now_s += seconds


def test_a_backward_pass_lasts_until_the_device_has_computed_it(monkeypatch):
    clock, phases = Clock(), []
    monkeypatch.setattr("pipeline.trainer.step_stats.time.perf_counter", lambda: clock.now_s)
    # Each call issues its work at once; the device needs 5 s for all of it.
    watch = Stopwatch(phases.append, lambda: clock.pass_s(5.0))

    for phase in ("forward", "backward", "reduce", "optimizer"):
        with watch.during(phase):
            clock.pass_s(0.25)

    assert watch.seconds == {"forward": 0.25, "backward": 5.25, "reduce": 0.25, "optimizer": 0.25}
    assert phases == ["forward", "backward", "reduce", "optimizer"]
