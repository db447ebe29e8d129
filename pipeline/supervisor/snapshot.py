"""One reading of a running instance."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

from pipeline.telemetry.window import Window


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """One instance at one moment; None means not known yet.

    Attributes:
        state: State of the instance: starting, ready, draining, ...
        max_steps: Steps after which the run ends, 0 for never.
        reward_history: Mean reward of each step so far, or of the latest ones, oldest first.
        tokens_per_s: Response tokens a second over the last minute.
        items_ready: Experiences that wait for a trainer.
        items_capacity: Upper bound of `items_ready`, 0 if only bytes bound it.
        staleness_mean: Versions between the policy that wrote an experience and the one that trains on it.
        learning: Values of the last step by their names in `pipeline.telemetry.history.LEARNING`.
        evaluation: The last evaluation on held-out prompts, and the progress of the next; None without such prompts.
    """

    state: str
    algorithm: str = ""
    model: str = ""
    step: int = 0
    max_steps: int = 0
    reward_mean: float | None = None
    reward_history: tuple[float, ...] = ()
    tokens_per_s: float | None = None
    items_ready: int = 0
    items_capacity: int = 0
    staleness_mean: float | None = None
    policy_version: int | None = None
    workers_ready: int = 0
    workers_total: int = 0
    metrics_url: str = ""
    learning: Mapping[str, float] = dataclasses.field(default_factory=dict)
    evaluation: Mapping[str, Any] | None = None

    @classmethod
    def of_status(cls, status: Mapping[str, Any]) -> Snapshot:
        """Return the reading that the answer of `rlhfd status` holds."""
        buffer = status.get("buffer") or {}
        workers = [process for process in status.get("processes") or [] if process["role"] == "rollout"]
        return cls(
            state=str(status.get("state") or "–"),
            algorithm=str(status.get("algorithm") or ""),
            model=str(status.get("model") or ""),
            step=status.get("step") or 0,
            max_steps=status.get("max_steps") or 0,
            reward_mean=status.get("reward_mean"),
            reward_history=tuple(status.get("reward_history") or ()),
            tokens_per_s=status.get("tokens_per_s"),
            items_ready=buffer.get("ready_items") or 0,
            items_capacity=buffer.get("capacity_items") or 0,
            staleness_mean=status.get("staleness_mean_versions"),
            policy_version=status.get("policy_version"),
            workers_ready=sum(process.get("state") == "ready" for process in workers),
            workers_total=len(workers),
            metrics_url=str(status.get("metrics_url") or ""),
            learning=status.get("learning") or {},
            evaluation=status.get("evaluation"),
        )


class Steps:
    """The step that is shown, and the rewards of the steps of the run.

    A rollback undoes steps, which are taken again: then the step falls, and the rewards of the undone steps go.

    Args:
        most: Steps whose rewards are kept.

    Attributes:
        step: Optimizer steps behind the newest weights.
        rewards: Number and mean reward of each step, the oldest first.
    """

    def __init__(self, most: int) -> None:
        self.step = 0
        self.rewards: collections.deque[tuple[int, float]] = collections.deque(maxlen=most)
        self._taken = 0.0

    def add(self, step: float | None, taken: float | None, reward: float | None) -> None:
        """Add a reading.

        Args:
            step: Optimizer steps behind the weights of the trainer; None while it has none: the last step stays.
            taken: All steps that were taken, undone ones too; it never falls. None before the trainer knows them.
            reward: Mean reward of the last step; None before the trainer's first.
        """
        self.step = self.step if step is None else int(step)
        while self.rewards and self.rewards[-1][0] > self.step:
            self.rewards.pop()
        if taken and taken != self._taken and reward is not None:
            self._taken = taken
            self.rewards.append((self.step, reward))

    def tenths(self) -> tuple[float, float] | None:
        """Return the mean rewards of the first and of the last tenth of the steps; None for fewer than ten steps."""
        rewards = [reward for _, reward in self.rewards]
        if not (tenth := len(rewards) // 10):
            return None
        return sum(rewards[:tenth]) / tenth, sum(rewards[-tenth:]) / tenth


class RateWindow(Window[float]):
    """The rate of a counter that never falls over a window of time: Prometheus' ``rate(counter[window])``.

    The increase between the first and the last sample in the window, divided by the time between them. Prometheus
    extrapolates to the window's edges and divides by the window. Both agree once samples fill the window; before that
    Prometheus divides by time that has not passed yet.
    """

    def rate(self) -> float | None:
        """Return the increase a second at the last sample; None with fewer than two samples in the window."""
        if len(self.kept) < 2:
            return None
        (first_s, first), (last_s, last) = self.kept[0], self.kept[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else None


class Pace:
    """Tokens and steps a second, from the first moment at which a worker is ready.

    The start of the processes does not count as time without tokens. The counter of steps is absent until the trainer
    has found the step from which it resumes, so that steps of earlier starts are no rate of this one.
    """

    def __init__(self) -> None:
        self._tokens = RateWindow(60.0)
        self._steps = RateWindow(300.0)
        self._has_begun = False

    def add(self, now_s: float, tokens: float, steps: float | None, *, can_roll: bool) -> None:
        """Add a sample.

        Args:
            now_s: Monotonic time; ascends.
            tokens: Response tokens so far.
            steps: Optimizer steps so far, those before a resume included; None before the trainer knows them.
            can_roll: Whether a worker is ready.
        """
        self._has_begun |= can_roll
        if self._has_begun:
            self._tokens.add(now_s, tokens)
            if steps is not None:
                self._steps.add(now_s, steps)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second over the last minute."""
        return self._tokens.rate()

    @property
    def steps_per_s(self) -> float | None:
        """Steps a second over the last five minutes."""
        return self._steps.rate()
