"""The learner: one optimizer step of PPO or GRPO from batches of experience, on one rank or on several.

Every mean in a loss is taken over all actions of the step: those of all its batches, micro-batches and ranks are
counted first. So the step does not depend, except for rounding, on micro-batches or on the number of ranks.

    PPO   clipped policy and value losses, advantages whitened over the step; critic alone in the first steps
    GRPO  clipped policy loss, one advantage a response, plus kl_coef x k3 KL to the reference; groups with equal scores
          have no gradient and are left out, of the forward pass too

The means weigh actions equally (DAPO, arXiv:2503.14476 eq. 8), not responses (GRPO's paper).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.experience.advantages import k3_kl
from pipeline.experience.types import Experience
from pipeline.models.log_probs import action_log_probs, action_values
from pipeline.trainer.batch import TrainingBatch
from pipeline.trainer.losses import masked_mean, policy_loss, value_loss, whiten
from pipeline.trainer.optimizer import ModelOptimizer, learning_rate_ratio
from pipeline.trainer.step_stats import Counts, Observed, StepStats, Stopwatch, Sums, count, stddev, where_nonfinite

_CPU_MICRO_BATCH_ROWS = 48
"""On a CPU parts of 48 rows are a third faster than the whole batch: less padding, and they stay in the cache."""


class TrainerSettings(Protocol):
    """The fields of `pipeline.config.schema.TrainerConfig` that the learner reads."""

    learning_rate: float
    critic_learning_rate: float
    betas: tuple[float, float]
    weight_decay: float
    warmup_steps: int
    decay_steps: int
    final_learning_rate_ratio: float
    gradient_clip_norm: float
    clip_range: float
    value_clip_range: float
    critic_warmup_steps: int
    whiten_advantages: bool
    micro_batch_size: int | None


class Learner:
    """Trains an actor, and with PPO a critic, in place.

    Both are put into eval mode: with dropout the importance ratio of an unchanged policy would not be 1.

    Attributes:
        step: Updates so far.
    """

    def __init__(
        self,
        trainer: TrainerSettings,
        algorithm: Literal["ppo", "grpo"],
        actor: nn.Module,
        critic: nn.Module | None = None,
        *,
        temperature: float = 1.0,
        kl_coef: float = 0.0,
        step: int = 0,
        process_group: dist.ProcessGroup | None = None,
        on_phase: Callable[[str], None] = lambda phase: None,
    ) -> None:
        """Take over the models; on several ranks, copy the weights from the group's first rank.

        Args:
            trainer: Learning rates, clips and schedule.
            algorithm: "ppo" or "grpo".
            actor: The policy; called by `pipeline.models.log_probs.action_log_probs`.
            critic: The value model of PPO; called by `pipeline.models.log_probs.action_values`.
            temperature: The sampling temperature; log-probs are computed at this temperature.
            kl_coef: Weight of the k3 KL to the reference in the loss.
            step: Updates done before, if training resumes.
            process_group: The ranks that take each step together; None for this process alone.
            on_phase: Called at the start of each "forward", "backward", "reduce" and "optimizer" phase, for each
                micro-batch.

        Raises:
            ValueError: If PPO has no critic, or GRPO has one.
        """
        if (critic is None) == (algorithm == "ppo"):
            raise ValueError(f"{algorithm} {'without' if critic is None else 'with'} a critic: PPO has one, GRPO none")
        self.step = step
        self._trainer = trainer
        self._algorithm = algorithm
        self._actor = actor
        self._critic = critic
        self._temperature = temperature
        self._kl_coef = kl_coef
        self._group = process_group
        self._on_phase = on_phase
        self._device = next(actor.parameters()).device
        self._micro_batch_rows = trainer.micro_batch_size or (
            _CPU_MICRO_BATCH_ROWS if self._device.type == "cpu" else None
        )
        self._models = [actor.eval()] if critic is None else [actor.eval(), critic.eval()]
        self._optimizers = [
            ModelOptimizer(
                model,
                learning_rate=learning_rate,
                betas=trainer.betas,
                weight_decay=trainer.weight_decay,
                clip_norm=trainer.gradient_clip_norm,
                process_group=process_group,
            )
            for model, learning_rate in zip(
                self._models, (trainer.learning_rate, trainer.critic_learning_rate), strict=False
            )
        ]

    def update(self, experiences: Sequence[Experience]) -> StepStats:
        """Take one optimizer step over all rows of all batches; a step with NaN or infinity changes no weight.

        `step` advances in any case, so that the next version is published and nothing waits for it without end.

        Args:
            experiences: Batches, padded on either side, written by the maker of the same algorithm.

        Returns:
            The statistics of the step.

        Raises:
            FieldError: If a field that the algorithm needs is missing, or actions are marked in the padding.
            ShapeError: If fields disagree in shape.
        """
        watch = Stopwatch(self._on_phase, self._synchronize)
        batches = [
            TrainingBatch.of(experience, self._algorithm, self._device, needs_reference=self._kl_coef > 0)
            for experience in experiences
        ]
        observed = [Observed.of(experience) for experience in experiences]
        with watch.during("reduce"):
            counts = Counts(*self._sum_over_ranks(count(batches, observed)))
        own_sums, row_ratios = self._accumulate(batches, counts, watch)
        with watch.during("reduce"):
            sums = Sums(*self._sum_over_ranks(own_sums))
            norms = [optimizer.reduce() for optimizer in self._optimizers]
        nonfinite = where_nonfinite(sums, norms)
        ratios = self._learning_rate_ratios()
        with watch.during("optimizer"):
            for optimizer, ratio in zip(self._optimizers, ratios, strict=True):
                if counts.actions_trained and not nonfinite and ratio:
                    optimizer.step(ratio)
                optimizer.clear()
        self.step += 1
        return StepStats(
            step=self.step,
            loss=sums.policy + sums.kl + sums.value,
            policy_loss=sums.policy,
            value_loss=None if self._critic is None else sums.value,
            kl_loss=sums.kl if self._kl_coef > 0 else None,
            gradient_norm=norms[0],
            critic_gradient_norm=None if self._critic is None else norms[1],
            learning_rate=self._trainer.learning_rate * ratios[0],
            critic_learning_rate=None if self._critic is None else self._trainer.critic_learning_rate * ratios[1],
            clipped_ratio=sums.clipped / max(counts.actions_trained, 1),
            importance_ratio=sums.ratios / max(counts.actions_trained, 1),
            kl_nats=counts.kls / max(counts.actions, 1) if counts.has_reference else None,
            entropy_nats=counts.entropies / max(counts.actions, 1),
            reward_mean=counts.scores / max(counts.rows, 1),
            reward_stddev=stddev(counts.rows, counts.scores, counts.squared_scores),
            rows=int(counts.rows),
            rows_trained=int(counts.rows_trained),
            tokens_trained=int(counts.actions_trained),
            nonfinite=nonfinite,
            row_importance_ratios=tuple(torch.cat(row_ratios).tolist()) if row_ratios else (),
            row_kl_nats=tuple(kl for one in observed for kl in one.row_kls),
            row_rewards=tuple(score for one in observed for score in one.row_scores),
            forward_s=watch.seconds["forward"],
            backward_s=watch.seconds["backward"],
            reduce_s=watch.seconds["reduce"],
            optimizer_s=watch.seconds["optimizer"],
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return the optimizers' tensors by name, live: all that a step changes beside the weights.

        With them, the weights and `step`, another learner of the same models continues from here bit for bit.
        """
        return {
            f"{model}.{name}": tensor
            for model, optimizer in zip(("actor", "critic"), self._optimizers, strict=False)
            for name, tensor in optimizer.tensors().items()
        }

    def _synchronize(self) -> None:
        """Wait until this process's GPU has computed all that was issued to it; nothing on a CPU."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _learning_rate_ratios(self) -> list[float]:
        """Return, for each model, the ratio of the next step's learning rate to the largest; 0 if not trained yet."""
        trainer = self._trainer
        first_steps = [0] if self._critic is None else [trainer.critic_warmup_steps, 0]
        return [
            learning_rate_ratio(
                self.step - first,
                trainer.warmup_steps,
                trainer.decay_steps and max(trainer.decay_steps - first, 1),
                trainer.final_learning_rate_ratio,
            )
            if self.step >= first
            else 0.0
            for first in first_steps
        ]

    def _accumulate(
        self, batches: list[TrainingBatch], counts: Counts, watch: Stopwatch
    ) -> tuple[Tensor, list[Tensor]]:
        """Run every micro-batch forward and backward; return this rank's sums and the importance ratios of its rows."""
        sums = torch.zeros(len(Sums._fields), dtype=torch.float64, device=self._device)
        row_ratios: list[Tensor] = []
        for batch in batches:
            if self._algorithm == "ppo" and self._trainer.whiten_advantages:
                sums_of_advantages = [counts.actions_trained, counts.advantages, counts.squared_advantages]
                moments = torch.tensor(sums_of_advantages, dtype=torch.float64)
                batch = replace(batch, advantages=whiten(batch.advantages, batch.action_mask, moments))
            for part in batch.micro_batches(self._micro_batch_rows):
                sums[:4] += self._actor_pass(part, counts.actions_trained, row_ratios, watch)
                if self._critic is not None:
                    sums[4] += self._critic_pass(part, counts.actions_trained, watch)
        return sums, row_ratios

    def _actor_pass(self, part: TrainingBatch, actions: float, row_ratios: list[Tensor], watch: Stopwatch) -> Tensor:
        """Add the gradients of the policy and KL losses of a micro-batch; return the first sums of `Sums`."""
        mask = part.action_mask
        trains = self._learning_rate_ratios()[0] > 0
        with watch.during("forward"), torch.set_grad_enabled(trains):
            log_probs = action_log_probs(
                self._actor,
                part.sequences,
                part.attention_mask,
                mask.shape[1],
                temperature=self._temperature,
                vision=part.vision,
            )
            policy = policy_loss(
                log_probs, part.log_probs, part.advantages, mask, self._trainer.clip_range, denominator=actions
            )
            kl = torch.zeros_like(policy.loss)
            if part.base_log_probs is not None:
                log_ratios = (log_probs - part.base_log_probs).masked_fill(~mask, 0.0)
                kl = self._kl_coef * masked_mean(k3_kl(log_ratios, mask), mask, actions)
        if trains:
            with watch.during("backward"):
                (policy.loss + kl).backward()
                self._optimizers[0].collect()
        ratios = policy.ratios.masked_fill(~mask, 0.0).sum(dim=1)
        row_ratios.append(ratios / mask.sum(dim=1).clamp(min=1))
        return torch.stack([policy.loss.detach(), kl.detach(), ratios.sum(), policy.clipped.sum()]).double()

    def _critic_pass(self, part: TrainingBatch, actions: float, watch: Stopwatch) -> Tensor:
        assert self._critic is not None and part.values is not None and part.returns is not None
        mask = part.action_mask
        with watch.during("forward"), torch.enable_grad():
            values = action_values(self._critic, part.sequences, part.attention_mask, mask.shape[1], vision=part.vision)
            loss = value_loss(
                values, part.values, part.returns, mask, self._trainer.value_clip_range, denominator=actions
            )
        with watch.during("backward"):
            loss.backward()
            self._optimizers[1].collect()
        return loss.detach().double()

    def _sum_over_ranks(self, sums: Tensor) -> list[float]:
        sums = sums.to(self._device)
        if self._group is not None:
            dist.all_reduce(sums, group=self._group)
        return sums.tolist()
