"""The learner: one step of PPO or GRPO from batches of experience, on one rank or on several.

A step is one optimizer update, or one for each mini-batch of each epoch (`trainer.epochs`, `trainer.mini_batches`).
Every mean in a loss is taken over all actions of the update: those of all its batches, micro-batches and ranks are
counted first. So the step does not depend, except for rounding, on micro-batches or on the number of ranks.

    PPO   policy and clipped value losses, advantages whitened over the step; critic alone in the first steps;
          the value loss in units of the running deviation of returns (`trainer.normalize_values`)
    GRPO  policy loss, one advantage a response, plus kl_coef x KL to the reference; groups without a signal have no
          gradient and are left out, of the policy's pass too

Policy loss, KL, entropy bonus and aggregation are those of an `Objective` (`pipeline.trainer.loss`). By default the
means weigh actions equally (DAPO, arXiv:2503.14476 eq. 8), not responses (GRPO's paper).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn

from pipeline.config.schema import TrainerConfig
from pipeline.errors import FieldError
from pipeline.experience.advantages import k3_kl
from pipeline.experience.ragged import RaggedRows, ragged_rows
from pipeline.experience.running_moments import SCORES, Moments
from pipeline.experience.types import Experience
from pipeline.models.inputs import inside
from pipeline.models.lora import without_adapters
from pipeline.models.packing import prepare_packing
from pipeline.models.pass_size import training_size, width_multiple
from pipeline.models.recomputation import checkpoint_activations
from pipeline.models.shared_prefix import prepare_shared_prefix
from pipeline.progress import Telemetry
from pipeline.trainer.batch import TrainingBatch, trained_rows
from pipeline.trainer.loss.aggregation import StepTotals
from pipeline.trainer.loss.kl_control import HORIZON_ROWS, KlControl
from pipeline.trainer.loss.losses import value_losses, whitened
from pipeline.trainer.loss.mini_batches import MiniBatches
from pipeline.trainer.loss.objective import Corrected, Objective
from pipeline.trainer.loss.row_sums import row_means
from pipeline.trainer.passes import critic_values, policy_log_probs
from pipeline.trainer.sharding.optimizer import new_optimizer, refuse_retry
from pipeline.trainer.sharding.ranks import in_step
from pipeline.trainer.step_stats import (
    CardClock,
    Clock,
    Counts,
    Observed,
    StepStats,
    Stopwatch,
    Sums,
    Updates,
    count,
    stddev,
)

SCALE_EPS = 1e-4
"""Added to the standard deviation of a step's rewards, as to that of a group's."""

_Result = TypeVar("_Result")

_VALUE_HEAD = ("value_head.weight", "value_head.bias")


class Learner:
    """Trains an actor, and with PPO a critic, in place.

    Both are put into eval mode: with dropout the importance ratio of an unchanged policy would not be 1.

    Attributes:
        step: Steps so far; set by a resume.
        packs_rows: Whether training passes hold rows end to end.
    """

    def __init__(
        self,
        trainer: TrainerConfig,
        algorithm: Literal["ppo", "grpo"],
        actor: nn.Module,
        critic: nn.Module | None = None,
        *,
        temperature: float = 1.0,
        kl_coef: float = 0.0,
        process_group: dist.ProcessGroup | None = None,
        objective: Objective | None = None,
        computes_log_probs: bool = False,
        reference: nn.Module | None = None,
        telemetry: Telemetry = Telemetry.none(),
        width: int | None = None,
        horizon_rows: int = HORIZON_ROWS,
        observes_scores: bool = False,
        run_seed: int = 0,
    ) -> None:
        """Take over the models; on several ranks, copy the weights from the group's first rank.

        Args:
            trainer: Learning rates, clips and schedule.
            algorithm: "ppo" or "grpo".
            actor: The policy; called by `pipeline.models.log_probs.action_log_probs`.
            critic: The value model of PPO; called by `pipeline.models.log_probs.action_values`.
            temperature: The sampling temperature; log-probs are computed at this temperature.
            kl_coef: Weight of the KL to the reference in the loss; of the first step, if `trainer` has a target of it.
            process_group: The ranks that take each step together; None for this process alone.
            objective: The loss; None for that of `trainer`, with PPO whitened if it says so.
            computes_log_probs: Whether the log-probs of the policy that sampled are those of the weights before the
                step, computed here; else those of the rows.
            reference: The reference, whose log-probs are computed here before each step: the actor for itself without
                its adapters; None for the log-probs of the rows.
            telemetry: Told of each phase, and of each micro-batch that does not fit; the update begins anew with half
                the tokens.
            width: Multiple to which the widths of passes are rounded up, in tokens; None: 64 on a GPU, 1 on a CPU.
            horizon_rows: Rows over which `kl_coef` is adapted.
            observes_scores: Whether the learner keeps the moments of scores, for the workers (`published`).
            run_seed: Seed of the numbers that a policy loss of the user's own draws, as the step is.

        Raises:
            ValueError: If PPO has no critic, or GRPO has one.
            ConfigError: If activations cannot be checkpointed, rows not packed or prompts not shared, as configured,
                the policy loss of `trainer` is a function that does not exist, or its optimizer cannot be used.
        """
        if (critic is None) == (algorithm == "ppo"):
            raise ValueError(f"{algorithm} {'without' if critic is None else 'with'} a critic: PPO has one, GRPO none")
        self.step = 0
        self._run_seed = run_seed
        self._trainer = trainer
        self._algorithm = algorithm
        self._actor = actor
        self._critic = critic
        self._temperature = temperature
        self._kl_control = KlControl(kl_coef, trainer.kl_coef_target, horizon_rows)
        self._objective = objective or Objective.of(trainer, whitens=algorithm == "ppo" and trainer.whiten_advantages)
        self._computes_log_probs = computes_log_probs
        self._reference = None if reference is None else reference.eval()
        self._group = process_group
        self._mini_batches = MiniBatches(trainer.epochs, trainer.mini_batches, process_group, self._sum_over_ranks)
        self._telemetry = telemetry
        self._device = next(actor.parameters()).device
        self._clock = CardClock(self._device) if self._device.type == "cuda" else Clock()
        self._models = [actor.eval()] if critic is None else [actor.eval(), critic.eval()]
        checkpointed = checkpoint_activations(self._models, self._device, trainer.activation_checkpointing)
        packed = dict.fromkeys(model for model in (*self._models, reference) if model is not None)
        self.packs_rows = prepare_packing([*packed], self._device, trainer.packing)
        for models in (self._models, [] if reference in (None, actor) else [reference]):
            prepare_shared_prefix(models, self._device, trainer.shared_prefix, key="trainer.shared_prefix")
        self._micro_batch = training_size(
            actor,
            self._device,
            packed=self.packs_rows,
            checkpointed=checkpointed,
            rows=trainer.micro_batch_size,
            tokens=trainer.micro_batch_tokens,
            telemetry=telemetry,
        )
        self._width_multiple = width_multiple(self._device, width)
        self._part_shape = torch.Size((0, 0))
        self._scores = Moments.new_state() if observes_scores else None
        self._returns = Moments.new_state() if trainer.normalize_values and critic is not None else None
        rates = trainer.learning_rate, trainer.critic_learning_rate
        self._optimizers = [
            new_optimizer(
                model,
                learning_rate=rate,
                betas=trainer.betas,
                weight_decay=trainer.weight_decay,
                clip_norm=trainer.gradient_clip_norm,
                process_group=process_group,
                in_units=_VALUE_HEAD if model is critic and trainer.normalize_values else (),
                kind=trainer.optimizer,
            )
            for model, rate in zip(self._models, rates, strict=False)
        ]

    def largest_pass(self, longest: int) -> int:
        """Return the most tokens of a training pass whose rows have some tokens at most."""
        return self._micro_batch.largest(longest)

    def update(
        self, batches: Sequence[RaggedRows | Experience], *, before_change: Callable[[], None] = lambda: None
    ) -> StepStats:
        """Take one step over all rows of all batches; an update with NaN or infinity changes no weight and is the last.

        `step` advances in any case, so that the next version is published and nothing waits for it without end.

        Args:
            batches: Rows written by the maker of the same algorithm, in any form.
            before_change: Called before weights or optimizer state change.

        Returns:
            The statistics of the step.

        Raises:
            FieldError: If a field that the algorithm needs is missing, or actions are marked in the padding.
            ShapeError: If fields disagree in shape.
            DeviceMemoryError: If a micro-batch of one row does not fit into the device's memory.
        """
        watch = Stopwatch(self._telemetry, self._clock)
        # A policy loss of the user's own may draw numbers: a step that is resumed or replayed draws the same.
        torch.manual_seed(xxhash.xxh3_64_intdigest(f"{self._run_seed}:step:{self.step}".encode()) >> 1)
        rows = [ragged_rows(batch) for batch in batches]
        every = [self._scored(self._inputs_of(one), watch) for one in rows]
        observed = [Observed.of(one, batch) for one, batch in zip(rows, every, strict=True)]
        corrected = [self._corrected(one, batch) for one, batch in zip(rows, every, strict=True)]
        trained = [each.batch for each in corrected]
        with watch.during("reduce"):
            counts = Counts(*self._sum_over_ranks(count(trained, observed, corrected)))
            least, largest = self._extremes_over_ranks(corrected) if counts.corrected else (None, None)
        trained = self._scaled(self._whitened(trained, counts), rows, watch)
        returns = _after(self._returns, counts.actions_trained, counts.returns, counts.squared_returns)
        scores = _after(self._scores, counts.rows, counts.scores, counts.squared_scores)
        if returns is not None:
            self._optimizers[1].unit = returns.scale
        updates = self._take_updates(trained, counts, watch, before_change)
        ratios, kl_coef = self._learning_rate_ratios(), self._kl_coef
        before_change()
        self._kl_control.observe(counts.kls / max(counts.actions, 1), counts.rows)
        for moments, state in ((returns, self._returns), (scores, self._scores)):
            if moments is not None and state is not None:
                moments.keep(state)
        self.step += 1
        seconds = watch.seconds()
        policy, kl, value, entropy = (updates.mean(name) for name in ("policy", "kl", "value", "entropy"))
        return StepStats(
            step=self.step,
            loss=policy + kl + value + entropy,
            policy_loss=policy,
            value_loss=None if self._critic is None else value,
            return_mean=None if returns is None else returns.mean,
            return_stddev=None if returns is None else returns.scale,
            entropy_loss=entropy if self._trainer.entropy_coef else None,
            kl_loss=kl if kl_coef > 0 else None,
            gradient_norm=updates.norm(0),
            critic_gradient_norm=None if self._critic is None else updates.norm(1),
            learning_rate=self._trainer.learning_rate * ratios[0],
            critic_learning_rate=None if self._critic is None else self._trainer.critic_learning_rate * ratios[1],
            kl_coef=kl_coef,
            updates=updates.taken,
            policy_kl_nats=updates.policy_kl_nats,
            clipped_ratio=updates.per_action("clipped"),
            importance_ratio=updates.per_action("ratios"),
            behaviour_ratio_mean=counts.corrected_ratios / counts.corrected if counts.corrected else None,
            behaviour_ratio_min=least,
            behaviour_ratio_max=largest,
            behaviour_cut_ratio=counts.corrected_cut / counts.corrected if counts.corrected else None,
            behaviour_gap_nats=counts.corrected_gaps / counts.corrected if counts.corrected else None,
            kl_nats=counts.kls / max(counts.actions, 1) if counts.has_reference else None,
            entropy_nats=counts.entropies / max(counts.actions, 1),
            response_length_mean_tokens=counts.actions / max(counts.rows, 1),
            reward_mean=counts.scores / max(counts.rows, 1),
            reward_stddev=stddev(counts.rows, counts.scores, counts.squared_scores),
            reward_running_mean=None if scores is None else scores.mean,
            reward_running_stddev=None if scores is None else scores.scale,
            padding_ratio=updates.padding_ratio,
            rows=int(counts.rows),
            rows_trained=int(counts.rows_trained),
            tokens_trained=int(counts.actions_trained),
            nonfinite=updates.nonfinite,
            row_importance_ratios=tuple(torch.cat(updates.row_ratios).tolist()) if updates.row_ratios else (),
            row_kl_nats=tuple(kl for one in observed for kl in one.row_kls),
            row_gap_nats=tuple(gap for each in corrected for gap in each.row_gaps.tolist()),
            forward_s=seconds["forward"],
            backward_s=seconds["backward"],
            reduce_s=seconds["reduce"],
            optimizer_s=seconds["optimizer"],
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, live: those of optimizers, KL controller and moments.

        They are all that a step changes beside the weights. With them, the weights and `step`, another learner of the
        same models continues from here bit for bit.
        """
        of_optimizers = {
            f"{model}.{name}": tensor
            for model, optimizer in zip(("actor", "critic"), self._optimizers, strict=False)
            for name, tensor in optimizer.tensors().items()
        }
        moments = {} if self._returns is None else {"return_moments": self._returns}
        return of_optimizers | self._kl_control.tensors() | moments | self.published()

    def published(self) -> dict[str, Tensor]:
        """Return the tensors that are published beside the models, by published name, live; some of `tensors`."""
        return {} if self._scores is None else {SCORES: self._scores}

    @property
    def _kl_coef(self) -> float:
        return self._kl_control.kl_coef

    def _learning_rate_ratios(self) -> list[float]:
        """Return, for each model, the ratio of the next step's learning rate to the largest; 0 if not trained yet."""
        trainer = self._trainer
        first_steps = [0] if self._critic is None else [trainer.critic_warmup_steps, 0]
        return [trainer.decay.ratio(self.step, first=first) if self.step >= first else 0.0 for first in first_steps]

    def _inputs_of(self, rows: RaggedRows) -> TrainingBatch:
        """Return the inputs of the loss from all rows; log-probs that are computed here need not be in them."""
        needs_reference = self._kl_coef > 0 and self._reference is None
        return TrainingBatch.of(
            rows,
            self._algorithm,
            self._device,
            needs_log_probs=not self._computes_log_probs,
            needs_reference=needs_reference,
        )

    def _corrected(self, rows: RaggedRows, batch: TrainingBatch) -> Corrected:
        """Return the rows that are trained, with their importance weights."""
        skip_cut, equal_groups = self._trainer.mask_cut_responses, self._objective.equal_groups
        kept = trained_rows(rows, self._algorithm, skip_cut=skip_cut, equal_groups=equal_groups)
        if self._kl_coef <= 0:
            batch = replace(batch, base_log_probs=None)
        return self._objective.correct(batch.rows(kept))

    def _whitened(self, batches: list[TrainingBatch], counts: Counts) -> list[TrainingBatch]:
        if not self._objective.whitens:
            return batches
        moments = torch.tensor(
            [counts.actions_trained, counts.advantages, counts.squared_advantages], dtype=torch.float64
        )
        return [replace(batch, advantages=whitened(batch.advantages, moments)) for batch in batches]

    def _scaled(
        self, batches: list[TrainingBatch], rows: Sequence[RaggedRows], watch: Stopwatch
    ) -> list[TrainingBatch]:
        """Divide advantages by the deviation of the rewards of all rows of the step, of all ranks, trained or not."""
        if self._trainer.advantage_scale == "none":
            return batches
        rewards = torch.cat([_rewards_of(one) for one in rows])
        with watch.during("reduce"):
            count, total = self._sum_over_ranks(torch.stack([torch.tensor(len(rewards)).double(), rewards.sum()]))
            # About the mean: sums of squares of large rewards would cancel.
            (squares,) = self._sum_over_ranks((rewards - total / count).square().sum()[None])
        divisor = math.sqrt(squares / max(count - 1, 1)) + SCALE_EPS
        return [replace(batch, advantages=(batch.advantages.double() / divisor).float()) for batch in batches]

    def _take_updates(
        self, batches: list[TrainingBatch], counts: Counts, watch: Stopwatch, before_change: Callable[[], None]
    ) -> Updates:
        """Take the updates of a step until one has NaN or infinity, or moves the policy beyond `trainer.target_kl`."""
        updates, learning_rates = Updates(), self._learning_rate_ratios()
        tokens = self._objective.constant_tokens
        most_kl = math.inf if self._trainer.target_kl is None else self._trainer.target_kl
        whole = StepTotals(counts.actions_trained, counts.sequences_trained, counts.rows, tokens)
        for mini_batch, totals in self._mini_batches.of_step(batches, whole, counts.rows_trained, self.step):
            own_sums, row_ratios = self._once_it_fits(functools.partial(self._accumulate, mini_batch, totals, watch))
            with watch.during("reduce"):
                sums = Sums(*self._sum_over_ranks(own_sums))
                norms = [optimizer.reduce() for optimizer in self._optimizers]
            updates.policy_kl_nats = sums.policy_kl / max(totals.actions, 1)
            # The first update in any case: else a batch of stale rows might never be trained.
            if updates.taken and learning_rates[0] and updates.policy_kl_nats > most_kl:
                self._clear()
                break
            changes_weights = updates.add(sums, norms, totals.actions, row_ratios)
            before_change()
            with watch.during("optimizer"):
                for optimizer, ratio in zip(self._optimizers, learning_rates, strict=True):
                    if changes_weights and ratio:
                        optimizer.step(ratio)
                    optimizer.clear()
            if updates.nonfinite:
                break
        return updates

    def _clear(self) -> None:
        for optimizer in self._optimizers:
            optimizer.clear()

    def _scored(self, batch: TrainingBatch, watch: Stopwatch) -> TrainingBatch:
        """Return rows with the log-probs that are computed here: of the present weights, of the reference."""
        if self._computes_log_probs:
            batch = replace(batch, log_probs=self._log_probs_of(self._actor, batch, watch))
        if self._reference is not None:
            with without_adapters(self._reference):
                batch = replace(batch, base_log_probs=self._log_probs_of(self._reference, batch, watch))
        return batch

    def _log_probs_of(self, model: nn.Module, batch: TrainingBatch, watch: Stopwatch) -> Tensor:
        """Return a model's log-probs of all actions, ``(N,)`` float32."""
        batch = batch.to_score()

        def of_all_parts() -> Tensor:
            found = torch.zeros(batch.advantages.shape, device=self._device)
            for part in in_step(batch.micro_batches(self._micro_batch, model), batch, model, meeting=self._meet):
                assert part.log_probs is not None
                self._note_size(part)
                with watch.during("forward"), torch.no_grad():
                    log_probs, _ = inside(model, functools.partial(self._log_probs, model, part, with_entropy=False))
                found[part.log_probs.long()] = log_probs.float()
            return found

        return self._once_it_fits(of_all_parts)

    def _once_it_fits(self, passes: Callable[[], _Result]) -> _Result:
        """Return the result of passes, begun anew with half the tokens each time that the device has no memory."""
        while True:
            try:
                return passes()
            except torch.OutOfMemoryError:
                # Halved after this block: the traceback of the error holds the tensors of the pass.
                refuse_retry(self._actor)
            self._clear()
            self._micro_batch.halve(*self._part_shape)

    def _accumulate(
        self, batches: list[TrainingBatch], totals: StepTotals, watch: Stopwatch
    ) -> tuple[Tensor, list[Tensor]]:
        """Run every micro-batch forward and backward; return this rank's sums and the importance ratios of its rows."""
        sums = torch.zeros(len(Sums._fields), dtype=torch.float64, device=self._device)
        row_ratios: list[Tensor] = []
        trained = [self._actor] if self._critic is None else [self._actor, self._critic]
        for batch in batches:
            parts = batch.micro_batches(self._micro_batch, self._actor)
            # Without an action losses would be 0 / 0.
            is_last = batch is batches[-1] and totals.actions > 0
            for part in in_step(parts, batch, self._actor, trained, is_last=is_last, meeting=self._meet):
                tokens, passed = self._note_size(part)
                sums[:6] += self._actor_pass(part, totals, row_ratios, watch)
                if self._critic is not None:
                    sums[6] += self._critic_pass(part, totals.actions, watch)
                sums[7] += tokens
                sums[8] += passed
        # In the last phase of the passes: a rank whose device hangs is found there, and not among those that wait for
        # it in "reduce".
        self._clock.wait()
        return sums, row_ratios

    def _meet(self) -> None:
        self._clock.wait()
        self._telemetry.phase("reduce")

    def _note_size(self, part: TrainingBatch) -> tuple[int, int]:
        """Return the tokens of a micro-batch and those of its pass; note the shape of the pass, for a halved bound."""
        rows, tokens = len(part), int(part.flat.lengths.sum())
        width = int(part.flat.lengths.max())
        passed = rows * (width + -width % self._width_multiple)
        if part.tokens_once is not None:
            tokens = passed = part.tokens_once
        elif self.packs_rows:
            passed = tokens
        self._part_shape = torch.Size((rows, -(-passed // rows)))
        return tokens, passed

    def _log_probs(self, model: nn.Module, part: TrainingBatch, *, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Return a policy's log-probs of a micro-batch and, if wanted, the entropies, each ``(N,)``."""
        settings: Any = {"packing": self.packs_rows, "temperature": self._temperature, "with_entropy": with_entropy}
        return policy_log_probs(model, part, width_multiple=self._width_multiple, **settings)

    def _actor_pass(
        self, part: TrainingBatch, totals: StepTotals, row_ratios: list[Tensor], watch: Stopwatch
    ) -> Tensor:
        """Add the gradients of the policy, KL and entropy losses of a micro-batch; return the first sums of `Sums`."""
        counts, objective = part.counts, self._objective
        trains = self._learning_rate_ratios()[0] > 0
        with watch.during("forward"), torch.set_grad_enabled(trains):
            log_probs, entropies = inside(
                self._actor, lambda: self._log_probs(self._actor, part, with_entropy=self._trainer.entropy_coef > 0)
            )
            policy = objective.policy(log_probs, part)
            policy_loss = objective.aggregate(policy.losses, counts, totals)
            kl = entropy = torch.zeros_like(policy_loss)
            if part.base_log_probs is not None:
                kl = self._kl_coef * objective.kl(log_probs, part.base_log_probs, counts, totals)
            if entropies is not None:
                entropy = objective.entropy_loss(entropies, counts, totals)
        if trains:
            with watch.during("backward"):
                (policy_loss + kl + entropy).backward()
                self._optimizers[0].collect()
        if len(part.advantages):
            row_ratios.append(row_means(policy.ratios, counts))
        with torch.no_grad():
            assert part.log_probs is not None
            # k3 of the sampling policy to the trained one: (r - 1) - log r, r the trained probability to the sampling.
            policy_kl = k3_kl(part.log_probs - log_probs).sum()
        ratios, clipped = policy.ratios.sum(), policy.clipped.sum()
        losses = policy_loss.detach(), kl.detach(), ratios, clipped, entropy.detach(), policy_kl
        return torch.stack(losses).double()

    def _critic_pass(self, part: TrainingBatch, actions: float, watch: Stopwatch) -> Tensor:
        assert self._critic is not None and part.values is not None and part.returns is not None
        with watch.during("forward"), torch.enable_grad():
            values = critic_values(self._critic, part, packing=self.packs_rows, width_multiple=self._width_multiple)
            # The loss has only differences: their mean need not be subtracted.
            unit = self._optimizers[1].unit
            clip_range = self._trainer.value_clip_range
            losses = value_losses(values / unit, part.values / unit, part.returns / unit, clip_range)
            loss = losses.sum() / actions / 2
        with watch.during("backward"):
            loss.backward()
            self._optimizers[1].collect()
        return loss.detach().double()

    def _sum_over_ranks(self, sums: Tensor) -> list[float]:
        sums = sums.to(self._device)
        if self._group is not None:
            dist.all_reduce(sums, group=self._group)
        return sums.tolist()

    def _extremes_over_ranks(self, corrected: Sequence[Corrected]) -> tuple[float, float]:
        """Return the least and the largest ratio of the correction over all ranks."""
        extremes = torch.stack([each.extremes.to(self._device) for each in corrected]).amax(dim=0)
        if self._group is not None:
            dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self._group)
        negated, largest = extremes.tolist()
        return -negated, largest


def _after(state: Tensor | None, count: float, total: float, squares: float) -> Moments | None:
    """Return moments with those of a step; None without a state."""
    return None if state is None else Moments.of(state).after(count, total, squares)


def _rewards_of(rows: RaggedRows) -> Tensor:
    """Return the rewards that the advantages are made of, ``(B,)`` float64 on the CPU."""
    rewards = rows.columns.get("reward")
    if rewards is None:
        raise FieldError("reward is missing, whose deviation scales the advantages (trainer.advantage_scale)")
    return torch.from_numpy(np.asarray(rewards, np.float64).reshape(-1))
