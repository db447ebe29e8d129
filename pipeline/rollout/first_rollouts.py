"""Rollouts before the first ticket: what would fail each of them ends the start."""

from __future__ import annotations

import torch

from pipeline.config.lengths import extent_bytes_bound
from pipeline.errors import ArenaFullError, ConfigError, FieldError, PromptError, RewardError
from pipeline.experience import codec
from pipeline.experience.types import Experience
from pipeline.rollout.roller import LocalRoller

_TRIED_PROMPTS = 64
_TRIED_ROLLOUTS = 3
_TRIED_TOKENS = 16


def refuse_broken_reward(roller: LocalRoller, row_bytes: int) -> None:
    """Roll prompts out before the first ticket, so that a broken reward or model ends the start, not the run later.

    Responses have 16 tokens at most: a large model on a CPU would take longer for whole ones than a start may.

    Args:
        roller: The worker's.
        row_bytes: Bytes reserved for a row; pixels may be larger.

    Raises:
        ConfigError: If none of the first prompts can be rolled out, or rows of the first usable one do not fit into
            `row_bytes`.
        RewardError: If none of the first usable prompts gets a reward.
        FieldError: If none of their rollouts passes the insert gate.
        RlhfdError: Any other error of the rollout of a usable prompt.
    """
    refused: list[RewardError | FieldError] = []
    set_aside: PromptError | None = None
    for position in range(_TRIED_PROMPTS):
        try:
            rolled = roller.roll(position, 1, response_tokens=_TRIED_TOKENS)
            if rolled.fault is not None:
                raise FieldError(f"a rollout before the first ticket is refused: {rolled.fault.detail}")
        except (RewardError, FieldError) as error:
            # One prompt may fail; if the first few do, all will.
            refused.append(error)
            if len(refused) == _TRIED_ROLLOUTS:
                break
            continue
        experience = rolled.experience
        if experience is None:
            set_aside = rolled.refused
            continue
        try:
            room = extent_bytes_bound(len(experience.sequences), row_bytes)
            encoded = codec.encode(experience, memoryview(bytearray(room)), checksum=False)
        except ArenaFullError as error:
            raise ConfigError(f"buffer.row_bytes: {error}") from error
        if (whole := encoded.nbytes + _bytes_left_out(experience, roller.lengths.row)) > room:
            raise ConfigError(
                f"buffer.row_bytes: extent of {whole:,} B does not fit: {room:,} B are reserved for the "
                f"{len(experience.sequences)} rows of a prompt at rollout.max_length {roller.lengths.row:,}"
            )
        return
    if refused:
        raise refused[-1]
    assert set_aside is not None
    message = f"prompts.path: none of the first {_TRIED_PROMPTS} prompts can be rolled out, the last one:"
    raise ConfigError(f"{message} {set_aside}", bare=f"{message} {set_aside.bare}")


def _bytes_left_out(experience: Experience, max_length: int) -> int:
    """Return the bytes that the rows would take beyond their own if all responses reached `max_length`."""
    rows, columns = experience.sequences.shape
    a_token = sum(
        value.element_size()
        for value in vars(experience).values()
        if isinstance(value, torch.Tensor) and value.dim() == 2 and len(value) == rows
    )
    return rows * (max_length - columns) * a_token
