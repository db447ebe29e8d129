"""The optimizer of one model, on one rank or several, in low precision or not."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.config.optimizers import Optimizer
from pipeline.errors import FieldError
from pipeline.trainer.update_rules import AdamW, RuleSettings, new_rules

_BUCKET_ELEMENTS = 1 << 25
"""Gradients that ranks reduce in one call: 128 MiB."""


class ModelOptimizer:
    """The optimizer of one model: gradients summed over ranks, clipped by their norm, and applied in float32.

    For weights of lower precision the optimizer works on float32 copies: a step of 1e-6 is lost in bfloat16.
    The calls of one step: `collect` after every backward pass, `reduce` once, `step` unless the step is skipped, and
    `clear`.

    Parameters may be trained in units: AdamW takes the step of the parameter divided by `unit`, with the gradient of
    that one. For the head of a critic this is PopArt (arXiv:1602.07714, arXiv:1809.04474). Its values are V = W h + b.
    With mean m and deviation s of returns, normalized values are (V - m) / s, of the head W / s and (b - m) / s. PopArt
    trains that head, and corrects it at each change of m and s so that V stays. Here W and b are kept, and change as
    the head of PopArt makes them change, with s as the unit. So V stays by itself, bit for bit, and published weights
    and checkpoints have a plain critic. Weight decay alone differs: it leads b to 0, not to m.

    Attributes:
        unit: The unit, 1 at first; set before `reduce`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        learning_rate: float,
        betas: tuple[float, float],
        weight_decay: float,
        clip_norm: float,
        process_group: dist.ProcessGroup | None = None,
        in_units: Collection[str] = (),
        kind: Optimizer = "adamw",
    ) -> None:
        """Take over the model's parameters; on several ranks, copy their values from the group's first rank.

        Args:
            model: The model whose parameters that require a gradient are trained, in place.
            learning_rate: The largest learning rate.
            betas: AdamW's decay of both moments.
            weight_decay: AdamW's weight decay.
            clip_norm: Largest norm of the gradient of all parameters together.
            process_group: The ranks that take each step together; None for this process alone.
            in_units: Names of the parameters that are trained in units.
            kind: The rule by which gradients change weights (`pipeline.trainer.update_rules`).

        Raises:
            FieldError: If no parameter requires a gradient.
            ConfigError: If the rule lacks its package, or has nothing to train in this model.
        """
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if not trained:
            raise FieldError(f"{type(model).__name__} has no parameter that requires a gradient")
        self._group = process_group
        self._names, self._weights = list(trained), self._taken_over(trained)
        self._masters = [
            weight if weight.dtype == torch.float32 else weight.detach().float() for weight in self._weights
        ]
        self._is_copied = [weight.dtype != torch.float32 for weight in self._weights]
        self._learning_rate = learning_rate
        self._clip_norm = clip_norm
        self._norm = torch.zeros(())
        self.unit = 1.0
        self._weight_decay = weight_decay
        settings = RuleSettings(learning_rate, betas, weight_decay)
        named = list(zip(self._names, self._masters, trained.values(), strict=True))
        self._in_units = [master for name, master, _ in named if name in in_units]
        others = [(master, parameter) for name, master, parameter in named if name not in in_units]
        masters, parameters = [master for master, _ in others], [parameter for _, parameter in others]
        in_force = new_rules(kind, masters, parameters, model, settings)
        self._rules = [rule for rule, _ in in_force]
        # A head of few weights: AdamW trains it beside any rule.
        self._rule_of_units = AdamW(self._in_units, settings) if self._in_units else None
        if self._rule_of_units is not None:
            in_force.append((self._rule_of_units, self._in_units))
        self._rule_of = {id(master): rule for rule, ruled in in_force for master in ruled}

    def _taken_over(self, trained: dict[str, nn.Parameter]) -> list[Tensor]:
        """Return the tensors that a step changes, with the same values on every rank."""
        if self._group is not None:
            for weight in trained.values():
                dist.broadcast(weight.detach(), dist.get_global_rank(self._group, 0), self._group)
        return list(trained.values())

    def collect(self) -> None:
        """Add the gradients of one backward pass to the float32 copies: micro-batches are summed in float32."""
        for weight, master in self._copies():
            if weight.grad is not None:
                # Added as they are: a copy in float32 would be a launch more for each weight, and as much memory.
                master.grad = weight.grad.float() if master.grad is None else master.grad.add_(weight.grad)
                weight.grad = None

    def reduce(self) -> float:
        """Sum the gradients over the ranks; return their norm before clipping, the same on every rank."""
        if self._group is not None or any(master.grad is not None for master in self._masters):
            # Every rank reduces every weight, even a rank without a row to train on. A weight that no row used (image
            # weights in a step of text rows) decays on one rank as on several.
            for master in self._masters:
                master.grad = torch.zeros_like(master) if master.grad is None else master.grad
        gradients = [master.grad for master in self._masters if master.grad is not None]
        if self._group is not None:
            for bucket in _buckets(gradients):
                flat = torch.cat([gradient.flatten() for gradient in bucket])
                dist.all_reduce(flat, group=self._group)
                parts = flat.split([gradient.numel() for gradient in bucket])
                torch._foreach_copy_(bucket, [part.view_as(one) for part, one in zip(parts, bucket, strict=True)])
        self._to_units()
        self._norm = nn.utils.get_total_norm(gradients)
        return float(self._norm)

    def _to_units(self) -> None:
        """Multiply the gradients of parameters that are trained in units."""
        for master in self._in_units if self.unit != 1 else ():
            if master.grad is not None:
                master.grad.mul_(self.unit)

    def step(self, ratio: float) -> None:
        """Apply the gradients at `ratio` of the largest learning rate."""
        nn.utils.clip_grads_with_norm_(self._masters, self._clip_norm, self._norm)
        learning_rate = self._learning_rate * ratio
        for rule in self._rules:
            rule.step(learning_rate)
        if self._rule_of_units is not None:
            # A decay of W / s is one of W by as much.
            self._rule_of_units.step(learning_rate * self.unit, weight_decay=self._weight_decay / self.unit)
        if copies := list(self._copies()):
            weights, masters = zip(*copies, strict=True)
            with torch.no_grad():
                torch._foreach_copy_(weights, masters)

    def clear(self) -> None:
        """Clear the gradients, also those of a backward pass that was not collected."""
        for tensor in (*self._masters, *self._weights):
            tensor.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """Return moments, step counts and float32 copies by name: the tensors that a step changes, not copies.

        Training resumes exactly if saved values are copied into them and the model has the weights of the same step.
        """
        found: dict[str, Tensor] = {}
        for name, master, is_copied in zip(self._names, self._masters, self._is_copied, strict=True):
            found |= {f"{kind}.{name}": tensor for kind, tensor in self._rule_of[id(master)].state(master).items()}
            if is_copied:
                found[f"float32.{name}"] = master
        return found

    def _copies(self) -> Iterator[tuple[Tensor, Tensor]]:
        pairs = zip(self._weights, self._masters, strict=True)
        return ((weight, master) for weight, master in pairs if weight is not master)


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    elements = 0
    for gradient in gradients:
        if bucket and elements + gradient.numel() > _BUCKET_ELEMENTS:
            yield bucket
            bucket, elements = [], 0
        bucket.append(gradient)
        elements += gradient.numel()
    yield bucket
