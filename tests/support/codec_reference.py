"""The bytes of an extent, made one value after another from the description in `extent_format`; slow."""

import msgspec
import torch

from pipeline.experience.types import OBJECT_FIELDS

TOKEN_FIELDS = ("sequences", "attention_mask")
ACTION_FIELDS = (
    "action_log_probs", "base_action_log_probs", "behaviour_log_probs", "values", "returns", "kl", "advantages",
    "action_mask", "action_entropy", "reward",
)  # fmt: skip
NAMES = (*TOKEN_FIELDS, *ACTION_FIELDS, *OBJECT_FIELDS)


def extent_of(experience):
    """Return the bytes of an extent, None for each byte of padding that is undefined."""
    fields = [(name, getattr(experience, name)) for name in NAMES if getattr(experience, name) is not None]
    fields += [(f"info.{name}", value) for name, value in (experience.info or {}).items()]
    rows, width = experience.sequences.shape
    of_actions = experience.action_mask if experience.action_mask is not None else experience.action_log_probs
    columns = of_actions.shape[1]
    spans = [_span(experience, row, width, columns) for row in range(rows)]
    tokens, actions = [end - start for start, end, _ in spans], [taken for _, _, taken in spans]
    full = [
        name
        for name, lengths, shift in (("attention_mask", tokens, 0), ("action_mask", actions, width - columns))
        if (mask := getattr(experience, name)) is not None
        and all(
            mask[row].tolist() == [int(end - length <= c + shift < end) for c in range(mask.shape[1])]
            for row, ((_, end, _), length) in enumerate(zip(spans, lengths, strict=True))
        )
    ]
    kinds = {name: _columns_of(name, value, columns) for name, value in fields}
    described = [
        [name, str(value.dtype).removeprefix("torch."), kinds[name], [] if kinds[name] else list(value.shape[1:])]
        for name, value in fields
    ]
    header = msgspec.msgpack.encode([rows, described, tokens, actions, full, None])
    extent = [*len(header).to_bytes(4, "little"), *header]
    extent += [0] * (-len(extent) % 64)
    for name, value in fields:
        if name in full:
            continue
        extent += [None] * (-len(extent) % 64)
        if not kinds[name]:
            extent += _bytes(value)
            continue
        is_token = kinds[name] == "S"
        for row, length in enumerate(tokens if is_token else actions):
            stop = spans[row][1] - (0 if is_token else width - columns)
            extent += _bytes(value[row, max(stop - length, 0) : max(stop, 0)])
    return extent


def _span(experience, row, width, columns):
    mask, action_mask = experience.attention_mask, experience.action_mask
    present = [c for c in range(width) if mask is None or mask[row, c]]
    start, end = present[0], present[-1] + 1
    first = next((c for c in range(columns) if action_mask is None or action_mask[row, c]), columns)
    return start, end, max(end - max(start, width - columns + first), 0)


def _columns_of(name, value, columns):
    if name in TOKEN_FIELDS:
        return "S"
    return "A" if name in ACTION_FIELDS and value.dim() == 2 and value.shape[1] == columns else ""


def _bytes(value):
    value = value.detach().flatten().clone(memory_format=torch.contiguous_format)
    return value.view(torch.uint8).numpy().tobytes() if value.numel() else b""
