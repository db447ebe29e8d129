"""The adapter from the Hugging Face convention of ``generate`` to the interface of an engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.errors import ShapeError
from pipeline.experience.vision_rows import VisionRows
from pipeline.models.attention_kernels import without_cudnn_attention
from pipeline.models.inputs import accepted_keywords, is_transformers_model
from pipeline.models.position_limits import check_generation
from pipeline.models.vision_inputs import plain_tokens, token_kinds, vision_backbone
from pipeline.progress import Telemetry
from pipeline.rollout.generation.interface import Responses, Sampling, row_seed
from pipeline.rollout.generation.stops import ends_with_stop, response_lengths


class ActorGenerator:
    """An engine over any object with the Hugging Face convention of ``generate``.

    The actor gets rows in batch order at full prompt width, with the prompts already repeated, and returns ``(B, T)``
    ids. It draws from the global random state, which is seeded for the call and restored after it: a row's tokens
    depend on the rows beside it, so that other `batch_rows` give other tokens.

    Args:
        actor: ``generate(input_ids=, attention_mask=, max_length=, do_sample=, temperature=, top_k=, top_p=,
            min_p=, pad_token_id=, eos_token_id=, ...)``; keywords that its signature lacks are left out. Stop sequences
            and strings are passed as `stopping_criteria`, pixels and grids under transformers' names.
        extra_keywords: Passed on unchanged.
        telemetry: Told of each mini-batch.
    """

    def __init__(
        self,
        actor: Any,
        extra_keywords: dict[str, Any] | None = None,
        telemetry: Telemetry = Telemetry.none(),
    ) -> None:
        self._actor = actor
        self._telemetry = telemetry
        self._extra_keywords = extra_keywords or {}

    @without_cudnn_attention()
    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        sampling: Sampling,
        *,
        group_size: int = 1,
        batch_rows: int | None = None,
        vision: VisionRows | None = None,
    ) -> Responses:
        """Sample responses; see `pipeline.rollout.generation.interface.ResponseGenerator`."""
        check_generation(self._actor, (attention_mask != 0).sum(dim=1), sampling.max_length)
        device = getattr(self._actor, "device", input_ids.device)
        rows = input_ids.repeat_interleave(group_size, dim=0)
        masks = attention_mask.repeat_interleave(group_size, dim=0)
        row_vision = None if vision is None else vision.repeated(group_size)
        size = batch_rows or len(rows)
        sequences = []
        with torch.random.fork_rng(devices=_cuda_devices(device)):
            _seed(device, row_seed(sampling.seed, 0))
            for first in range(0, len(rows), size):
                part = slice(first, first + size)
                ids, mask = rows[part].to(device), masks[part].to(device)
                pixels = {} if row_vision is None else self._pixels(ids, mask, row_vision.rows(part))
                generated = self._call(ids, mask, sampling, pixels).to(input_ids.device)
                sequences.append(_checked(generated, rows[part], sampling, first))
                self._telemetry.progress()
        joined = torch.cat(sequences)
        responses = joined[:, input_ids.shape[1] :]
        lengths = response_lengths(responses, sampling.stop_sequences, sampling.eos_token_ids, sampling.pad_token_id)
        if sampling.stop_strings is not None:
            for row, length in enumerate(lengths.tolist()):
                lengths[row] = sampling.stop_strings.end_of(responses[row, :length].tolist()) or length
        beyond = torch.arange(responses.shape[1], device=joined.device) >= lengths.unsqueeze(1)
        responses.masked_fill_(beyond, sampling.pad_token_id)
        return Responses(sequences=joined, lengths=lengths)

    def update_weights(self, actor: Mapping[str, Tensor]) -> None:
        """Do nothing: the engine computes with the actor's own tensors."""

    def pause(self) -> None:
        """Do nothing: no memory is held between calls."""

    def resume(self) -> None:
        """Do nothing."""

    def _pixels(self, ids: Tensor, mask: Tensor, vision: VisionRows) -> dict[str, Tensor]:
        pixels = vision.model_keywords(ids.device)
        backbone = vision_backbone(self._actor)
        if backbone is not None:
            # The model's `generate` computes positions itself, from the kinds of the tokens.
            pixels["mm_token_type_ids"] = token_kinds(backbone, ids, mask, vision)
        return pixels

    def _call(self, ids: Tensor, mask: Tensor, sampling: Sampling, pixels: dict[str, Tensor]) -> Tensor:
        keywords: dict[str, Any] = {
            "max_length": sampling.max_length,
            "do_sample": sampling.do_sample,
            "pad_token_id": sampling.pad_token_id,
            "eos_token_id": list(sampling.eos_token_ids) or None,
            **pixels,
            **self._extra_keywords,
        }
        if sampling.do_sample:
            # Without top_k=0 transformers samples from the 50 most probable tokens: log-probs would not match.
            keywords |= {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
            keywords["min_p"] = sampling.min_p or None
        if sampling.stop_sequences or sampling.stop_strings is not None:
            keywords["stopping_criteria"] = [_stopping_criterion(ids.shape[1], sampling)]
        generate = self._actor.generate
        with _without_processors(self._actor), _plain_samples(self._actor):
            result: Tensor = generate(input_ids=ids, attention_mask=mask, **accepted_keywords(generate, keywords))
        return result


@contextlib.contextmanager
def _without_processors(actor: Any) -> Iterator[None]:
    """Leave out a transformers model's generation settings: its `generate` merges them into those that it is given.

    Penalties, biases and suppressed tokens would be in the samples and not in their log-probs.
    """
    given = getattr(actor, "generation_config", None)
    if given is None or not is_transformers_model(actor):
        yield
        return
    kept = ("bos_token_id", "decoder_start_token_id", "use_cache", "cache_implementation")
    actor.generation_config = type(given)(**{name: getattr(given, name, None) for name in kept})
    try:
        yield
    finally:
        actor.generation_config = given


@contextlib.contextmanager
def _plain_samples(actor: Any) -> Iterator[None]:
    """Have a sampled image or video token embedded as the passes of log-probs embed it.

    Those of the prompt are embedded so as well: their place is taken by features of the image.
    """
    if (backbone := vision_backbone(actor)) is None:
        yield
        return
    embedding = actor.get_input_embeddings()
    with embedding.register_forward_pre_hook(lambda _, given: (plain_tokens(backbone, given[0]), *given[1:])):
        yield


def _stopping_criterion(width: int, sampling: Sampling) -> Callable[..., Tensor]:
    def stopped(input_ids: Tensor, scores: Any, **_ignored: Any) -> Tensor:
        return ends_with_stop(input_ids[:, width:], sampling.stop_sequences, (), sampling.stop_strings)

    return stopped


def _checked(sequences: Tensor, prompts: Tensor, sampling: Sampling, first: int) -> Tensor:
    """Return ids padded to ``(rows, max_length)``; check that they continue the prompts, from row `first` on."""
    width = prompts.shape[1]
    if sequences.dim() != 2 or len(sequences) != len(prompts) or not width < sequences.shape[1] <= sampling.max_length:
        raise ShapeError(
            f"actor.generate returned {tuple(sequences.shape)} for prompts {tuple(prompts.shape)} "
            f"and max_length {sampling.max_length}"
        )
    differing = (sequences[:, :width] != prompts).any(dim=1)
    if bool(differing.any()):
        raise ShapeError(f"row {first + int(differing.nonzero()[0])}: actor.generate changed the prompt")
    return functional.pad(sequences, (0, sampling.max_length - sequences.shape[1]), value=sampling.pad_token_id)


def _seed(device: torch.device | str, seed: int) -> None:
    """Seed the generators of the host and of a device: `torch.manual_seed` would seed those of all other cards too."""
    torch.default_generator.manual_seed(seed)
    for card in _cuda_devices(device):
        with torch.cuda.device(card):
            torch.cuda.manual_seed(seed)


def _cuda_devices(device: torch.device | str) -> list[torch.device]:
    device = torch.device(device)
    return [device] if device.type == "cuda" else []
