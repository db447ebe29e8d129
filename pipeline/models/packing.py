"""Forward passes over packed rows, concatenated to ``(1, T)`` without a padding column.

Position ids restart at 0 in each row; those of rows with images have three axes, by the model's own count. From them
transformers builds a block-diagonal mask under eager and sdpa attention; the variable-length kernels of flash attention
and of `pipeline.models.varlen_attention` receive the start of each row. A model that ignores both would let a row
attend to the row before it, so the first packed pass of a model tests it on two short rows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.errors import ConfigError, FieldError, ShapeError
from pipeline.experience.types import Experience, is_vl_experience
from pipeline.experience.vision_rows import VisionRows
from pipeline.models.attention_kernels import chooses_kernels, without_cudnn_attention
from pipeline.models.card_attention import BY_ROWS, kernel_of
from pipeline.models.chunked_log_probs import head_log_probs, logits_log_probs, plain_head
from pipeline.models.critic import Critic
from pipeline.models.flat_rows import FlatRows, Index, on_device, ranges
from pipeline.models.inputs import accepted_keywords, backbone_of
from pipeline.models.position_limits import check_rows
from pipeline.models.shared_prefix import SharedRows
from pipeline.models.varlen_attention import problem_of_attention, uses_varlen_attention, windows_of
from pipeline.models.vision_inputs import packed_vision_inputs, refuse_images, vision_backbone

OWN_ATTENTION = "the model's own, with a block mask"

log = logging.getLogger(__name__)

_FIRSTS = ((0, 0, 0, 0, 0, 1), (1, 1, 1, 1, 1, 0))
_SECOND = (0, 1, 0, 0, 1)
"""Rows of tokens that every model has, longer than the window of a convolution: rows of one token look isolated.

The first rows differ in the number of each token too: attention that weighs all tokens equally sees their mean alone.
"""

_scored_end_to_end: WeakSet[nn.Module] = WeakSet()
_isolates_rows: WeakKeyDictionary[nn.Module, dict[tuple[bool, bool], bool]] = WeakKeyDictionary()
"""Of each model that was tested, by whether it used a kernel of `pipeline.models.varlen_attention`, and whether its
positions had three axes: of these, some models make no block mask."""


@dataclass(frozen=True, slots=True)
class PackedRows:
    """B rows, concatenated, each without its last action: T tokens, and N actions.

    Attributes:
        input_ids: ``(1, T)`` int64.
        position_ids: ``(1, T)`` int64, 0 at the start of each row; ``(3, 1, T)`` of a vision-language model.
        cu_seqlens: ``(B + 1,)`` int32, the start of each row, and T.
        max_seqlen: Tokens of the longest row.
        row_lengths: Tokens of each row.
        before: ``(N,)`` int64, the index of the token before each action.
        pixels: Pixels and grids of the rows' images and videos, under their names in transformers.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    row_lengths: list[int]
    before: Tensor
    pixels: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of_model(cls, model: object, rows: FlatRows, vision: VisionRows | None) -> Self:
        """Return rows, whose images belong to tokens before the last one, for a model; see `of_flat`."""
        if (backbone := vision_backbone(model)) is None:
            refuse_images(model, vision)
            return cls.of_flat(rows)
        return cls.of_flat(*packed_vision_inputs(backbone, rows, vision))

    @classmethod
    def of_flat(cls, rows: FlatRows, positions: Tensor | None = None, pixels: dict[str, Tensor] | None = None) -> Self:
        """Return rows without their last tokens: no action follows them.

        Args:
            rows: Rows that end with their last actions.
            positions: ``(3, T)`` int64, the positions of their tokens; None for those of text.
            pixels: Pixels and grids.
        """
        device, ends = rows.tokens.device, np.cumsum(rows.lengths)
        # Their numbers: a mask on a card would make the host wait for the number of ones in it.
        kept = np.delete(np.arange(int(ends[-1])), ends - 1)
        index, lengths = on_device(kept, device), rows.lengths - 1
        if positions is None:
            position_ids = on_device(ranges(np.zeros_like(lengths), lengths), device).unsqueeze(0)
        else:
            position_ids = positions[:, index].unsqueeze(1)
        return cls(
            input_ids=rows.tokens[index].unsqueeze(0),
            position_ids=position_ids,
            cu_seqlens=on_device(np.append(0, np.cumsum(lengths)).astype(np.int32), device),
            max_seqlen=int(lengths.max()),
            row_lengths=lengths.tolist(),
            # One token less in each row before.
            before=rows.action - 1 - rows.row,
            pixels=pixels or {},
        )

    def check(self, model: nn.Module, field: str) -> None:
        """Refuse a model in which packed rows change each other, by the outputs in a field, with a FieldError."""
        check_rows(model, torch.tensor(self.row_lengths))
        _check_isolation(model, field, self.input_ids.device, three_axes=self.position_ids.dim() == 3)

    def keywords(self, model: object) -> dict[str, Any]:
        """Return a model's keywords besides the ids; transformers passes the last ones to its attention."""
        # A mask of four dimensions is passed on as it is, so that none of T x T is made; the attention reads none.
        mask = {"attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.input_ids.device)}
        return {
            **(mask if uses_varlen_attention(model) else {}),
            "position_ids": self.position_ids,
            "use_cache": False,
            "cu_seq_lens_q": self.cu_seqlens,
            "cu_seq_lens_k": self.cu_seqlens,
            "max_length_q": self.max_seqlen,
            "max_length_k": self.max_seqlen,
            "row_lengths": self.row_lengths,
            **self.pixels,
        }


def prepare_packing(models: Sequence[nn.Module], device: torch.device, wanted: bool | None = True) -> bool:
    """Choose the attention of models that are trained on packed rows, all of these models or none, and log which.

    Args:
        models: Causal language models, changed in place, and critics.
        device: Their device.
        wanted: `trainer.packing`; None for: if all of them can, by an attention that needs no mask of T x T tokens.

    Returns:
        Whether rows are packed.

    Raises:
        ConfigError: If it is wanted and a model is none of transformers, or would let packed rows attend to each
            other.
    """
    if wanted is False:
        return False

    def check(backbone: nn.Module) -> None:
        three_axes = vision_backbone(backbone) is not None
        _check_isolation(backbone, "last_hidden_state", device, three_axes=three_axes)

    for model in models:
        if (problem := problem_of_attention(model, check, needs_kernel=wanted is None)) is not None:
            name = type(model).__name__
            if wanted:
                raise ConfigError(f"trainer.packing: a {name} cannot be packed: {problem}")
            log.info("rows are padded: model=%s reason=%s", name, problem)
            return False
    for model in models:
        owner = model.backbone if isinstance(model, Critic) else model
        log.info("rows are packed: model=%s attention=%s", type(owner).__name__, packed_attention(model, device))
    return True


def packed_attention(model: Any, device: torch.device) -> str:
    """Return the name of the attention of a model's packed passes: that of `kernel_of`, or `OWN_ATTENTION`."""
    owner = model.backbone if isinstance(model, Critic) else model
    return _kernel_for(owner, device) if uses_varlen_attention(owner) else OWN_ATTENTION


def pack_scored_rows(models: Sequence[nn.Module], device: torch.device) -> None:
    """Have passes without a loss hold rows end to end, of each of some models for which a card has a kernel.

    The trainer's passes are by the same kernel, so the ratio of an unchanged policy is nearer to 1.
    """
    for model in models:
        owner = model.backbone if isinstance(model, Critic) else model
        if _kernel_for(owner, device) != BY_ROWS and prepare_packing([model], device, None):
            _scored_end_to_end.add(model)


def packs_scored_rows(model: object) -> bool:
    """Return whether a model's passes without a loss hold rows end to end, by `pack_scored_rows`."""
    return isinstance(model, nn.Module) and model in _scored_end_to_end


def _kernel_for(owner: Any, device: torch.device) -> str:
    text = owner.config.get_text_config()
    size, heads = getattr(text, "head_dim", None), getattr(text, "num_attention_heads", None)
    if not size and not heads:
        # Layers without attention.
        return BY_ROWS
    size = size or text.hidden_size // heads
    # The dtype of passes, which the shards of a model do not have.
    dtype = getattr(owner.config, "dtype", None) or next(owner.parameters()).dtype
    return kernel_of(device, dtype, size, any(windows_of(owner)))


def packed_action_log_probs(
    model: nn.Module, experience: Experience, *, temperature: float = 1.0, chunk_tokens: int | None = None
) -> list[Tensor]:
    """Return log-probs of the actions of a packed batch, from one forward pass; the packed form of `action_log_probs`.

    Args:
        model: A causal language model of transformers. Its ``.logits`` are used if it has no `plain_head`.
        experience: A batch from `make_experience_batch(..., packing_samples=True)`, with an `action_mask`.
        temperature: The sampling temperature, above 0.
        chunk_tokens: Positions whose logits exist at once; None for 2**26 logits, 256 MiB in float32.

    Returns:
        For each row ``(A_i,)`` float32, natural logarithms, differentiable if gradients are enabled: the layout of the
        batch's per-action fields.

    Raises:
        FieldError: If the batch is not packed, is a vision-language one or has no action mask, or if packed rows would
            attend to each other in this model.
        ShapeError: If a row has no token before its first action.
        ValueError: If the temperature is not above 0.
    """
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; log-probs need one above 0")
    rows = _rows_of(experience)
    settings: Any = {"temperature": temperature, "chunk_tokens": chunk_tokens}
    log_probs, _ = _log_probs(model, PackedRows.of_flat(rows), rows.labels, **settings)
    return list(log_probs.split(rows.counts.tolist()))


def _rows_of(experience: Experience) -> FlatRows:
    """Return the rows of a packed batch; see `packed_action_log_probs`."""
    if is_vl_experience(experience):
        raise FieldError("a vision-language experience cannot be packed, only one of text alone")
    sequences, mask = experience.sequences, experience.action_mask
    if isinstance(sequences, Tensor):
        raise FieldError("the batch is padded; packed rows come from make_experience_batch(packing_samples=True)")
    if mask is None:
        raise FieldError("action_mask is missing")
    # The pass leaves out a row's last token, which is its last action if it has one.
    rows = [row if len(own) else functional.pad(row, (0, 1)) for row, own in zip(sequences, mask, strict=True)]
    lengths, counts = (np.array([len(row) for row in columns]) for columns in (rows, mask))
    if len(bare := np.flatnonzero(counts >= lengths)):
        row = bare[0]
        raise ShapeError(f"row {row}: {counts[row]} actions of {lengths[row]} tokens; one must stand before them")
    actions = ranges(np.cumsum(lengths) - counts, counts)
    return FlatRows.of(torch.cat(rows), lengths, actions, np.repeat(np.arange(len(lengths)), counts))


def log_probs_of_rows(
    model: nn.Module,
    rows: FlatRows,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    shared: bool = False,
    vision: VisionRows | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs and entropies of the actions of rows, from one pass over the rows laid end to end.

    Args:
        model: As for `packed_action_log_probs`.
        rows: Rows that end with their last action.
        temperature: The sampling temperature, above 0.
        with_entropy: Whether to compute the entropies too.
        shared: Whether the pass computes each prompt once for all its rows.
        vision: Images and videos of the rows, for a vision-language model of the Qwen2-VL kind.

    Returns:
        Log-probs and entropies, each ``(N,)`` float32; None in place of the entropies if `with_entropy` is False.

    Raises:
        FieldError: If packed rows would attend to each other in this model, it cannot share prompts, or it is of text
            alone and rows have images; of images as `pipeline.models.vision_inputs.vision_inputs`.
        ShapeError: If a row has fewer image tokens than its grids require.
    """
    packed = SharedRows.of_flat(rows) if shared else PackedRows.of_model(model, rows, vision)
    settings: Any = {"temperature": temperature, "chunk_tokens": None, "with_entropy": with_entropy}
    log_probs, entropies = _log_probs(model, packed, rows.labels, **settings)
    return log_probs, entropies if with_entropy else None


def values_of_rows(critic: Critic, rows: FlatRows, *, shared: bool = False, vision: VisionRows | None = None) -> Tensor:
    """Return the value of the state before each action, ``(N,)`` float32, by the backbone's pass over rows end to end.

    Arguments and errors are those of `log_probs_of_rows`.
    """
    packed = SharedRows.of_flat(rows) if shared else PackedRows.of_model(critic, rows, vision)
    values: Tensor = critic.value_head(packed_states(critic.backbone, packed).float()).squeeze(-1)
    return values


def last_states(model: nn.Module, tokens: Tensor, lengths: Index) -> Tensor:
    """Return the hidden states of a model's backbone at the last token of each row, ``(B, H)``; see `packed_states`.

    Args:
        model: A model of transformers with a backbone.
        tokens: ``(T,)`` int64, the tokens of the rows.
        lengths: ``(B,)`` int64, tokens of each row, at least 1.
    """
    # A pass leaves out the last token of a row, the action: one more stands for it.
    ends = np.cumsum(lengths)
    with_one = on_device(np.insert(np.arange(int(ends[-1])), ends, ends - 1), tokens.device)
    longer = lengths + 1
    rows = FlatRows.of(tokens[with_one], longer, np.cumsum(longer) - 1, np.arange(len(lengths)))
    return packed_states(backbone_of(model), PackedRows.of_flat(rows))


@chooses_kernels
def _log_probs(
    model: nn.Module,
    rows: PackedRows | SharedRows,
    labels: Tensor,
    *,
    temperature: float,
    chunk_tokens: int | None,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    settings: Any = {"temperature": temperature, "chunk_tokens": chunk_tokens, "with_entropy": with_entropy}
    head = plain_head(model, rows.input_ids.device)
    if head is not None:
        states = packed_states(backbone_of(model), rows)
        return head_log_probs(head, states, labels, **settings)
    rows.check(model, "logits")
    optional = accepted_keywords(model, {**rows.keywords(model), "logits_to_keep": rows.before})
    logits = model(input_ids=rows.input_ids, **optional).logits[0]
    logits = logits if len(logits) == len(labels) else logits[rows.before]
    return logits_log_probs(logits, labels, **settings)


def packed_action_values(critic: Critic, experience: Experience) -> list[Tensor]:
    """Return the value of the state before each action of a packed batch; the packed form of `action_values`.

    Args:
        critic: A critic, as from `load_critic`; its backbone runs one forward pass.
        experience: A batch from `make_experience_batch(..., packing_samples=True)`, with an `action_mask`.

    Returns:
        For each row ``(A_i,)`` float32, differentiable if gradients are enabled.

    Raises:
        FieldError: If the batch is not packed, is a vision-language one or has no action mask, or if packed rows would
            attend to each other in this model.
        ShapeError: If a row has no token before its first action.
    """
    rows = _rows_of(experience)
    return list(values_of_rows(critic, rows).split(rows.counts.tolist()))


@chooses_kernels
def packed_states(backbone: Any, rows: PackedRows | SharedRows) -> Tensor:
    """Return the last hidden states at the token before each action, ``(N, H)``.

    Raises:
        FieldError: If packed rows would attend to each other in this backbone.
    """
    rows.check(backbone, "last_hidden_state")
    output = backbone(input_ids=rows.input_ids, **accepted_keywords(backbone, rows.keywords(backbone)))
    states: Tensor = output.last_hidden_state[0, rows.before]
    return states


@without_cudnn_attention()
@torch.no_grad()
def _check_isolation(model: nn.Module, field: str, device: torch.device, *, three_axes: bool) -> None:
    """Refuse a model in which the second of two packed rows depends on the first."""
    tested = _isolates_rows.setdefault(model, {})
    if (way := (uses_varlen_attention(model), three_axes)) not in tested:

        def second_row(first: tuple[int, ...]) -> Tensor:
            ids = torch.tensor([[*first, *_SECOND]], device=device)
            lengths = [len(first), len(_SECOND)]
            starts = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32, device=device)
            positions = torch.cat([torch.arange(length, device=device) for length in lengths]).unsqueeze(0)
            positions = positions.expand(3, 1, -1) if three_axes else positions
            rows = PackedRows(ids, positions, starts, max(lengths), lengths, ids.new_empty(0))
            # The same random state, so the same dropout, in both calls.
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                output = model(input_ids=ids, **accepted_keywords(model, rows.keywords(model)))
            outputs: Tensor = getattr(output, field)
            return outputs[0, lengths[0] :].float()

        one, other = map(second_row, _FIRSTS)
        tested[way] = torch.allclose(one, other, rtol=1e-4, atol=1e-4)
    if not tested[way]:
        raise FieldError(f"{type(model).__name__} lets a packed row attend to the row before it; use a padded batch")
