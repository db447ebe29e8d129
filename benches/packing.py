"""Training on ragged rows, padded and packed: padding, tokens a second, activations with and without checkpoints."""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benches.measure import Sample, interleaved
from benches.report import Section, Table
from benches.sharding import Shape, configured, made_up, write_model
from pipeline.experience.types import Experience
from pipeline.trainer.learner import Learner
from pipeline.trainer.process import whole_models

_SHAPE = Shape(hidden=256, inner=704, layers=6, vocabulary=4096, rows=32, tokens=512)
_QUICK = Shape(hidden=128, inner=352, layers=2, vocabulary=512, rows=16, tokens=128)
_PROMPT_TOKENS = 32
_CPU = torch.device("cpu")
_WAYS: dict[str, dict[str, Any]] = {
    "`micro_batch_size = 8`": {"micro_batch_size": 8, "packing": False},
    "`micro_batch_tokens`": {"micro_batch_size": None, "packing": False},
    "`micro_batch_tokens`, `packing`": {"micro_batch_size": None, "packing": True},
}
_TEXT = """A random Llama of {parameters:.1f} M parameters in float32 takes steps of GRPO on {rows} made-up rows, on a
CPU with one thread: prompts of {least} to {prompt} tokens, responses of log-uniform length, 8 to {response} tokens,
{share:.0%} of the batch's tokens padding. `micro_batch_tokens` is {tokens:,}. *Padding*: of the tokens of the passes.
*Tokens/s*: those of rows, padding left out, by the time of a whole step. *Activations*: bytes that autograd keeps from
the forward passes until the backward ones, at most at a time, parameters left out; *checkpointed* with
`trainer.activation_checkpointing`. Ways take turns of a step, {rounds} each; median (range)."""


class _Saved:
    """Bytes of tensors that autograd holds, now and at most; those that several operations hold count once."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._held: dict[int, int] = {}
        self._bytes = 0
        self.most = 0

    def pack(self, tensor: Tensor) -> _Held:
        """Count a tensor that is saved for the backward pass."""
        return _Held(tensor.detach(), self)

    def hold(self, tensor: Tensor) -> None:
        """Count a holder of a tensor's memory."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._parameters:
            return
        holders = self._held.get(storage.data_ptr(), 0)
        self._held[storage.data_ptr()] = holders + 1
        if not holders:
            self._bytes += storage.nbytes()
            self.most = max(self.most, self._bytes)

    def free(self, tensor: Tensor) -> None:
        """Count a holder less."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._parameters:
            return
        self._held[storage.data_ptr()] -= 1
        if not self._held[storage.data_ptr()]:
            self._bytes -= storage.nbytes()


class _Held:
    """A saved tensor, counted until autograd frees it."""

    def __init__(self, tensor: Tensor, saved: _Saved) -> None:
        self.tensor = tensor
        self._saved = saved
        saved.hold(tensor)

    def __del__(self) -> None:
        self._saved.free(self.tensor)


def ragged(shape: Shape, seed: int) -> Experience:
    """Return made-up rows: prompts padded on the left, responses on the right."""
    drawn = torch.Generator().manual_seed(seed)
    actions = shape.tokens - _PROMPT_TOKENS
    prompts = torch.randint(_PROMPT_TOKENS // 2, _PROMPT_TOKENS + 1, (shape.rows, 1), generator=drawn)
    low, high = torch.tensor(8.0).log(), torch.tensor(float(actions)).log()
    lengths = (low + (high - low) * torch.rand(shape.rows, 1, generator=drawn)).exp().round().long()
    # The batch is as wide as its longest row.
    lengths[0] = actions
    columns = torch.arange(shape.tokens)
    attention_mask = ((columns >= _PROMPT_TOKENS - prompts) & (columns < _PROMPT_TOKENS + lengths)).long()
    return made_up(attention_mask, _PROMPT_TOKENS, shape.vocabulary, drawn)


def run(*, quick: bool) -> Sequence[Section]:
    """Measure the ways in turns, then the activations of each."""
    with tempfile.TemporaryDirectory() as folder:
        return [_measured(Path(folder), *((_QUICK, 1) if quick else (_SHAPE, 5)))]


def _measured(folder: Path, shape: Shape, rounds: int) -> Section:
    parameters = write_model(folder / "model", shape)
    # Four of the longest rows.
    tokens = 4 * shape.tokens
    batch = ragged(shape, seed=0)
    assert batch.attention_mask is not None
    real = int(batch.attention_mask.sum())

    def learner(*, checkpointed: bool, **trainer: Any) -> tuple[Learner, torch.nn.Module]:
        if trainer["micro_batch_size"] is None:
            trainer["micro_batch_tokens"] = tokens
        config = configured(
            folder / "model", shape, shared_prefix=False, activation_checkpointing=checkpointed, **trainer
        )
        actor = whole_models(config, _CPU)["actor"]
        return Learner(config.trainer, "grpo", actor, kl_coef=config.trainer_kl_coef), actor

    def step(taker: Learner) -> tuple[float, float]:
        began_s = time.perf_counter()
        stats = taker.update([batch])
        return real / (time.perf_counter() - began_s), stats.padding_ratio

    def activations(way: dict[str, Any], *, checkpointed: bool) -> int:
        taker, actor = learner(checkpointed=checkpointed, **way)
        saved = _Saved(actor)
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda held: held.tensor):
            taker.update([batch])
        return saved.most

    ways = {name: functools.partial(step, learner(checkpointed=False, **way)[0]) for name, way in _WAYS.items()}
    for way in ways.values():
        way()
    found = {name: Sample.of(speed for speed, _ in turns) for name, turns in interleaved(ways, rounds).items()}
    padded = found[next(iter(_WAYS))]
    rows = [
        (
            name,
            f"{way()[1]:.1%}",
            f"{found[name]}",
            f"{found[name].over(padded)}",
            f"{activations(_WAYS[name], checkpointed=False) / 1e6:.0f} MB",
            f"{activations(_WAYS[name], checkpointed=True) / 1e6:.0f} MB",
        )
        for name, way in ways.items()
    ]
    text = _TEXT.format(
        parameters=parameters / 1e6,
        rows=shape.rows,
        least=_PROMPT_TOKENS // 2,
        prompt=_PROMPT_TOKENS,
        response=shape.tokens - _PROMPT_TOKENS,
        share=1 - real / batch.sequences.numel(),
        tokens=tokens,
        rounds=rounds,
    ).replace("\n", " ")
    header = ("way", "padding", "tokens/s", "against the first", "activations", "checkpointed")
    return Section("packing", "Training on ragged rows, padded and packed", text, [Table(header, rows)])
