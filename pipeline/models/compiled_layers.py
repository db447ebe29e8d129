"""The choice of compiled layers (`pipeline.models.layer_code`): each model is tried at the start.

A pass of some thousand tokens on a card is bound by the launches of its kernels, of which a compiled layer has a
fraction. The trial computes the same rows at each start, in each way in which the process runs the model later. So a
start compiles the code of the start before: the order of its sums follows from the first sizes that it sees, and a
restart gives the same bits.
"""

from __future__ import annotations

import functools
import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.models.attention_kernels import chooses_kernels
from pipeline.models.card_attention import BY_ROWS, attend_by
from pipeline.models.critic import Critic
from pipeline.models.device import free_cached
from pipeline.models.flat_rows import FlatRows
from pipeline.models.layer_code import LayerCode, detach, first_line
from pipeline.models.layer_streaming import decoder_layers
from pipeline.models.log_probs import action_log_probs, action_values
from pipeline.models.lora import without_adapters
from pipeline.models.packing import OWN_ATTENTION, log_probs_of_rows, packed_attention, values_of_rows
from pipeline.models.weights.probe import tolerance_nats_a_token

_COLUMNS: Final = {"cpu": 31, "cuda": 509}
_ROWS: Final = (3, 5, 11, 19, 37, 67)
_FEW_COLUMNS: Final = 127
"""Tokens of a row of the trial at most, and the rows of its passes; the first pass on a card has shorter rows.

Inductor chooses kernels by the tokens of a pass. On a card both gradients of a norm are one kernel, if its input has
5 * 2**20 numbers, and the pass 4,096 tokens and twice as many as the hidden size. Such a bound is a condition of the
graph: passes beyond it need another one. So the trial has passes of all sizes, each about twice the one before, up to
34,000 tokens on a card and 2,000 on a CPU.

Sizes that are equal while a graph is made are one symbol to torch. A prime is no size of heads or hidden states, which
would fix the tokens of a row.
"""

_TIMED_TOKENS, _TIMES, _LEAST_GAIN = 10_000, 3, 1.02
"""Most tokens of a pass whose time is compared, how often it is taken each way, and the gain that counts as one."""

_GRADIENT_TOLERANCE: Final = {torch.float32: 1e-3}
_GRADIENT_TOLERANCE_16_BITS: Final = 0.2
"""Largest difference of a layer's gradient, as a share of its norm, that rounding explains."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Uses:
    """The passes in which a process runs a model.

    Attributes:
        packed: Whether rows are end to end; else they are padded.
        trained: Whether there are passes with gradients.
        scored: Whether there are passes without.
        without_adapters: Whether those are also without its adapters: it is the reference too.
        tokens: Most tokens of a pass; the trial has no larger ones, besides its first one.
    """

    packed: bool = False
    trained: bool = False
    scored: bool = True
    without_adapters: bool = False
    tokens: int = 0


def compile_layers(
    models: Mapping[nn.Module, Uses],
    device: torch.device,
    *,
    only_if_faster: bool = False,
    backend: Any = "inductor",
    clock_s: Callable[[], float] = time.perf_counter,
) -> int:
    """Compile the decoder layers of models, each that can be, and log which, or why not.

    A model's log-probs or values and a layer's gradient must be those of the model as it is, up to rounding.

    Args:
        models: Causal language models and critics with their uses, changed in place: in eval mode, with the weights,
            adapters, attention and checkpointing of their passes.
        device: Their device.
        only_if_faster: Whether a model is left as it is unless its passes take less time compiled.
        backend: The backend of torch.compile.
        clock_s: Seconds, by which passes are compared.

    Returns:
        The number of layers that are compiled.
    """
    # Models share graphs with one kernel, not with another one of the same name.
    total, kernel = 0, functools.cache(attend_by)
    for model, uses in models.items():
        began_s, before = time.monotonic(), _graphs()
        attention = packed_attention(model, device) if uses.packed else OWN_ATTENTION
        attend = None if attention in (BY_ROWS, OWN_ATTENTION) else kernel(attention)
        code = LayerCode(packed=uses.packed, attend=attend, backend=backend)
        layers = code.attach(model)
        if attention == BY_ROWS:
            problem: str | None = "this device and dtype have no kernel for packed rows"
        else:
            problem = _problem(model, code, uses, device)
        code.compiles = False
        gain = ""
        if problem is None and only_if_faster:
            try:
                times_as_fast = _gain(model, code, uses, device, clock_s)
            except Exception as error:  # noqa: BLE001 - as of the trial: another process may have taken the memory since
                problem = first_line(error)
            else:
                gain = f" times_as_fast={times_as_fast:.2f}"
                problem = None if times_as_fast >= _LEAST_GAIN else f"its passes are {times_as_fast:.2f} times as fast"
        if problem is None:
            total += layers
            log.info("layers are compiled: model=%s layers=%d graphs=%d seconds=%.1f%s",
                     type(model).__name__, layers, _graphs() - before, time.monotonic() - began_s, gain)  # fmt: skip
        else:
            detach(model)
            log.log(logging.INFO if only_if_faster else logging.WARNING,
                    "layers are not compiled: model=%s reason=%s", type(model).__name__, problem)  # fmt: skip
    # The trial's passes were as large as a step's, and an engine on the same card starts meanwhile.
    free_cached()
    return total


def _gain(model: nn.Module, code: LayerCode, uses: Uses, device: torch.device, clock_s: Callable[[], float]) -> float:
    """Return how many times as fast as without it compiled code computes the first use of a model."""
    sizes = _sizes(uses, device)
    rows, columns = max(((rows, columns) for rows, columns in sizes if rows * columns <= _TIMED_TOKENS), key=math.prod)
    run = _runs(model, code, uses, device, rows, columns)[0]
    # In turns: other processes of the card slow both ways alike. Each way has computed this size before.
    times: dict[bool, list[float]] = {True: [], False: []}
    try:
        for is_used in (True, False) * _TIMES:
            code.is_used = is_used
            _wait(device)
            began_s = clock_s()
            run()
            _wait(device)
            times[is_used].append(clock_s() - began_s)
    finally:
        code.is_used = True
    return statistics.median(times[False]) / statistics.median(times[True])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _problem(model: nn.Module, code: LayerCode, uses: Uses, device: torch.device) -> str | None:
    """Return the reason for which a model is not computed by compiled code, after a trial of it; None if it can be."""
    try:
        for number, (rows, columns) in enumerate(_sizes(uses, device)):
            for run in _runs(model, code, uses, device, rows, columns):
                code.is_used, code.passes, before = True, 0, _graphs()
                found = run()
                if code.problem:
                    return code.problem
                if not code.passes or code.missed:
                    return "its layers' passes have no form that is compiled"
                if number and _graphs() == before:
                    # The graph of a smaller pass, whose numbers were compared.
                    continue
                code.is_used = False
                expected = run()
                if (problem := _difference(found, expected, next(model.parameters()).dtype)) is not None:
                    return f"the trial differs: {problem}"
        return None if code.passes else "it has no decoder layers, or none that is trained"
    except Exception as error:  # noqa: BLE001 - of the compiled backward pass, without which the run goes on
        return first_line(error)
    finally:
        code.is_used = True


def _sizes(uses: Uses, device: torch.device) -> list[tuple[int, int]]:
    """Return the rows of each pass of a trial, and the tokens of a row at most."""
    columns = _COLUMNS.get(device.type, _COLUMNS["cuda"])
    # Odd, as sizes of heads are not.
    most_rows = min((uses.tokens // columns - 1) | 1, _ROWS[-1])
    rows = sorted({most_rows, *(rows for rows in _ROWS if rows < most_rows)}) if most_rows >= _ROWS[0] else []
    first = _ROWS[0], min(columns, _FEW_COLUMNS)
    return list(dict.fromkeys([first, *((each, columns) for each in rows)]))


def _runs(
    model: nn.Module, code: LayerCode, uses: Uses, device: torch.device, rows: int, columns: int
) -> list[Callable[[], list[Tensor]]]:
    """Return functions that run a model in each way of its uses, by passes of some rows: outputs, then gradients."""
    layers = decoder_layers(model)
    parameters = [one for layer in layers[len(layers) // 2 :][:1] for one in layer.parameters() if one.requires_grad]
    compute = chooses_kernels(_numbers_of(model, device, rows, columns, packed=uses.packed))

    def trained() -> list[Tensor]:
        with torch.enable_grad():
            numbers = compute()
            # Some layers are compiled and some are not: checkpointing could not compute them again.
            wanted = [] if code.problem else parameters
            gradients = torch.autograd.grad(numbers.sum(), wanted, allow_unused=True) if wanted else ()
        return [numbers.detach(), *(one for one in gradients if one is not None)]

    def scored() -> list[Tensor]:
        with torch.no_grad():
            return [compute()]

    def without() -> list[Tensor]:
        with without_adapters(model):
            return scored()

    wanted = (trained, uses.trained and parameters), (scored, uses.scored), (without, uses.without_adapters)
    return [run for run, is_wanted in wanted if is_wanted]


def _numbers_of(
    model: nn.Module, device: torch.device, rows: int, columns: int, *, packed: bool
) -> Callable[[], Tensor]:
    """Return a function that returns a model's log-probs or values of rows, the same rows at each start."""
    columns = min(columns, _most_columns(model))
    ids = torch.randint(0, 2, (rows, columns), generator=torch.Generator().manual_seed(0)).to(device)
    # Rows of different lengths, left-padded by 0, 2, 4 and 6 columns.
    is_token = np.arange(columns) >= 2 * (np.arange(rows) % 4)[:, None]
    if packed:
        is_action = (is_token & (np.arange(columns) >= columns // 2))[is_token]
        row = np.broadcast_to(np.arange(rows)[:, None], is_token.shape)[is_token]
        tokens = ids[torch.from_numpy(is_token).to(device)]
        flat = FlatRows.of(tokens, is_token.sum(axis=1), np.flatnonzero(is_action), row[is_action])
        if isinstance(model, Critic):
            return lambda: values_of_rows(model, flat)
        return lambda: log_probs_of_rows(model, flat)[0]
    mask = torch.from_numpy(is_token).long().to(device)
    compute = cast("Callable[..., Tensor]", action_values if isinstance(model, Critic) else action_log_probs)
    return lambda: compute(model, ids, mask, columns // 2)


def _difference(found: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> str | None:
    """Return by how much two ways of a run differ, if rounding does not explain it; NaN and infinity do always."""
    gap = float((found[0] - expected[0]).abs().mean())
    most = tolerance_nats_a_token(dtype) * max(1.0, float(expected[0].abs().mean()))
    if not gap <= most:
        return f"outputs by {gap:.2g}, by {most:.2g} at most"
    gap = _norm([mine - its for mine, its in zip(found[1:], expected[1:], strict=True)])
    most = _GRADIENT_TOLERANCE.get(dtype, _GRADIENT_TOLERANCE_16_BITS) * _norm(expected[1:])
    return None if gap <= most else f"gradients by {gap:.2g}, by {most:.2g} at most"


def _norm(tensors: Any) -> float:
    return float(sum(float(one.float().norm()) ** 2 for one in tensors) ** 0.5)


def _most_columns(model: nn.Module) -> int:
    """Return the tokens of the longest row for which a model has positions."""
    config: Any = getattr(getattr(model, "backbone", model), "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    return int(getattr(text, "max_position_embeddings", None) or _COLUMNS["cuda"])


def _graphs() -> int:
    """Return the graphs that this process has compiled."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
