"""The rules of `trainer.optimizer`, by which the gradients of weights change the weights, and their state.

    adamw       AdamW (arXiv:1711.05101), two moments in float32 a weight
    adamw_8bit  AdamW, each moment one byte and a scale in float32 for 256 of them (arXiv:2110.02861), by the kernels of
                bitsandbytes
    muon        Muon (arXiv:2502.16982) for the matrices of decoder layers, one moment in float32; AdamW for the rest

Weights and gradients are float32. A rule makes its state at once, in its final shape: it is saved and restored by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from pipeline.config.optimizers import Optimizer, missing_package
from pipeline.errors import ConfigError
from pipeline.models.layer_streaming import decoder_layers

_BLOCK = 256
"""Moments that share a scale."""
_LEAST, _BELOW = 4096, 2**31
"""Elements of a weight whose moments have 8 bits: fewer need no memory, and the kernel counts no more."""
_EPS = 1e-8


class RuleSettings(NamedTuple):
    """The settings of a rule: the largest learning rate, AdamW's decay of both moments, the weight decay."""

    learning_rate: float
    betas: tuple[float, float]
    weight_decay: float


class UpdateRule(Protocol):
    """Changes weights by their gradients; a weight without a gradient stays as it is."""

    def step(self, learning_rate: float) -> None:
        """Change the weights."""

    def state(self, weight: Tensor) -> dict[str, Tensor]:
        """Return what the rule keeps of a weight, live."""


def new_rules(
    kind: Optimizer,
    weights: Sequence[Tensor],
    parameters: Sequence[nn.Parameter],
    model: nn.Module,
    settings: RuleSettings,
) -> list[tuple[UpdateRule, list[Tensor]]]:
    """Return the rules of `trainer.optimizer`, each with its weights: AdamW has those that no other rule takes.

    Args:
        kind: `trainer.optimizer`.
        weights: The float32 weights that the rules change.
        parameters: The model's parameter of each weight.
        model: The model.
        settings: The settings of all rules.

    Raises:
        ConfigError: If bitsandbytes is not installed for adamw_8bit, or the model has no decoder layers for muon.
    """
    new_own: Callable[[Sequence[Tensor], RuleSettings], UpdateRule] = AdamW
    is_own = [False] * len(weights)
    if kind == "adamw_8bit":
        new_own = functools.partial(AdamW8bit, *_kernels())
        is_own = [_LEAST <= weight.numel() < _BELOW and weight.is_contiguous() for weight in weights]
    elif kind == "muon":
        hidden = {id(parameter) for layer in decoder_layers(model) for parameter in layer.parameters()}
        new_own, is_own = Muon, [id(parameter) in hidden and parameter.dim() == 2 for parameter in parameters]
        if not any(is_own):
            name = type(model).__name__
            raise ConfigError(f'trainer.optimizer: "muon" trains matrices of decoder layers, and a {name} has none')
    parts = [
        (new, [weight for weight, own in zip(weights, is_own, strict=True) if own == owns])
        for new, owns in ((new_own, True), (AdamW, False))
    ]
    return [(new(ruled, settings), ruled) for new, ruled in parts if ruled]


class AdamW:
    """AdamW of torch."""

    def __init__(self, weights: Sequence[Tensor], settings: RuleSettings) -> None:
        """Make the state of the weights, zeros."""
        self._adamw = torch.optim.AdamW(
            weights, lr=settings.learning_rate, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
        )
        for weight in weights:
            self._adamw.state[weight] = {
                "step": torch.zeros((), dtype=torch.float32, device=weight.device),
                "exp_avg": torch.zeros_like(weight, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(weight, memory_format=torch.preserve_format),
            }

    def step(self, learning_rate: float, *, weight_decay: float | None = None) -> None:
        """Change the weights; a weight decay takes the place of the one before."""
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
            if weight_decay is not None:
                group["weight_decay"] = weight_decay
        self._adamw.step()

    def state(self, weight: Tensor) -> dict[str, Tensor]:
        """Return count of steps and moments of a weight, live."""
        return dict(self._adamw.state[weight])


def _kernels() -> tuple[Callable[..., None], Callable[..., Tensor]]:
    """Return bitsandbytes' step of moments of 8 bits, and its map of the numbers that a byte stands for.

    Raises:
        ConfigError: If bitsandbytes is not installed, or cannot be imported.
    """
    if problem := missing_package("adamw_8bit"):
        raise ConfigError(f"trainer.optimizer: {problem}")
    try:
        from bitsandbytes.functional import create_dynamic_map, optimizer_update_8bit_blockwise
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(f"trainer.optimizer: bitsandbytes cannot be imported: {error}") from error
    return optimizer_update_8bit_blockwise, create_dynamic_map


class AdamW8bit:
    """AdamW with moments of 8 bits."""

    def __init__(
        self,
        update: Callable[..., None],
        new_map: Callable[..., Tensor],
        weights: Sequence[Tensor],
        settings: RuleSettings,
    ) -> None:
        """Make the state of the weights, zeros."""
        self._update, self._weights, self._settings = update, weights, settings
        # The numbers that a byte stands for, as shares of the scale.
        self._numbers = [new_map(signed=signed).to(weights[0].device) for signed in (True, False)]
        self._states = {id(weight): self._new_state(weight) for weight in weights}

    def _new_state(self, weight: Tensor) -> dict[str, Tensor]:
        blocks = -(-weight.numel() // _BLOCK)
        state = {"step": torch.zeros((), dtype=torch.int64)}
        for name in ("exp_avg", "exp_avg_sq"):
            # With a scale of 0, each byte stands for 0.
            state[f"{name}_8bit"] = torch.zeros_like(weight, dtype=torch.uint8)
            state[f"{name}_scale"] = torch.zeros(blocks, device=weight.device)
        return state

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Change the weights."""
        first, second = self._settings.betas
        for weight in self._weights:
            if weight.grad is None:
                continue
            state = self._states[id(weight)]
            # It lies in host memory: nothing waits for a card.
            state["step"] += 1
            self._update(
                "adam", weight.grad.contiguous(), weight, state["exp_avg_8bit"], state["exp_avg_sq_8bit"],
                first, second, 0.0, 0.0, _EPS, int(state["step"]), learning_rate, *self._numbers,
                state["exp_avg_scale"], state["exp_avg_sq_scale"], self._settings.weight_decay,
            )  # fmt: skip

    def state(self, weight: Tensor) -> dict[str, Tensor]:
        """Return count of steps, moments and scales of a weight, live."""
        return self._states[id(weight)]


class Muon:
    """Muon of torch; learning rate and weight decay are AdamW's."""

    def __init__(self, weights: Sequence[Tensor], settings: RuleSettings) -> None:
        """Make the state of the weights, zeros."""
        # The changes of a matrix have the root mean square of AdamW's.
        self._muon: Any = torch.optim.Muon(
            weights, lr=settings.learning_rate, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        for weight in weights:
            self._muon.state[weight] = {"momentum_buffer": torch.zeros_like(weight)}

    def step(self, learning_rate: float) -> None:
        """Change the weights."""
        for group in self._muon.param_groups:
            group["lr"] = learning_rate
        self._muon.step()

    def state(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the moment of a weight, live."""
        return dict(self._muon.state[weight])
