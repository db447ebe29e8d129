"""Prompts and rollouts before the first ticket: what would fail each of them ends the start, what is odd is noted."""

from __future__ import annotations

import contextlib
import itertools
import logging
from pathlib import Path
from typing import Any

from pipeline.config.evaluation import held_out
from pipeline.config.lengths import extent_bytes_bound
from pipeline.config.model_files import end_token_ids
from pipeline.config.schema import Config
from pipeline.errors import ConfigError, FieldError, PromptError, RewardError
from pipeline.experience import codec
from pipeline.experience.ragged import RaggedRows
from pipeline.prompts.rendering import Rendering, remarks, render, rendering_of, special_texts
from pipeline.prompts.source import PromptSource
from pipeline.rollout.roller import LocalRoller

log = logging.getLogger(__name__)

_NOTED_PROMPTS = 16
_SHOWN_TOKENS = 8
_SEARCHED_PROMPTS = 256
TRIED_PROMPTS = 64
"""Prompts of which one must be usable."""
_TRIED_ROLLOUTS = 3
_TRIED_TOKENS = 16


def note_first_prompts(config: Config, tokenizer: Any) -> None:
    """Log the ends of the first rendered prompt, of training and of each held-out file; warn of odd ones.

    A message that holds the text of a special token is odd too.

    Args:
        config: The instance's.
        tokenizer: The actor's.
    """
    rendering = rendering_of(config.prompts)
    ends = set(itertools.chain.from_iterable(end_token_ids(Path(config.model.actor)).values()))
    of_evaluation = [held_out(config, file) for file in config.evaluation.files]
    for section in (config.prompts, *of_evaluation):
        found: list[str] = []
        with contextlib.closing(PromptSource(section, config.daemon.seed)) as source:
            for position in range(min(_NOTED_PROMPTS, len(source))):
                prompt = source.at(position)
                # Another problem of a prompt is found where it is rolled out.
                with contextlib.suppress(PromptError, ConfigError):
                    found = remarks(prompt, tokenizer, rendering, ends)
                    if found or not position:
                        _log_ends(render(prompt, tokenizer, rendering), prompt.location, found, tokenizer, config)
                if found:
                    break
            _warn_of_special_texts(source, tokenizer, rendering)


def _warn_of_special_texts(source: PromptSource, tokenizer: Any, rendering: Rendering) -> None:
    """Warn if messages of the first prompts hold the text of special tokens: such a text ends or begins a turn."""
    special = {number: token.content for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items()
               if token.special}  # fmt: skip
    first, tokens = "", set[str]()
    searched, number = min(_SEARCHED_PROMPTS, len(source)), 0
    for position in range(searched):
        with contextlib.suppress(PromptError, ConfigError):
            prompt = source.at(position)
            if found := special_texts(prompt, tokenizer, special, rendering):
                first, number = first or prompt.location, number + 1
                tokens.update(found)
    if number:
        log.warning("messages hold the text of special tokens, which the tokenizer takes as these tokens: "
                    "prompts=%d of=%d first=%s tokens=%s", number, searched, first, sorted(tokens))  # fmt: skip


def _log_ends(ids: list[int], location: str, found: list[str], tokenizer: Any, config: Config) -> None:
    first, last = ids[:_SHOWN_TOKENS], ids[-_SHOWN_TOKENS:]
    text = f" ends_with={tokenizer.decode(last)!r}" if config.daemon.log_texts else ""
    if found:
        log.warning("a rendered prompt is odd: %s: prompt=%s tokens=%d first_ids=%s last_ids=%s%s",
                    "; ".join(found), location, len(ids), first, last, text)  # fmt: skip
    else:
        log.info("a prompt is rendered: prompt=%s tokens=%d first_ids=%s last_ids=%s%s",
                 location, len(ids), first, last, text)  # fmt: skip


def refuse_broken_reward(roller: LocalRoller, row_bytes: int) -> None:
    """Roll prompts out before the first ticket, so that a broken reward or model ends the start, not the run later.

    Responses have 16 tokens at most: a large model on a CPU would take longer for whole ones than a start may.

    Args:
        roller: The worker's.
        row_bytes: Bytes reserved for a row; pixels may be larger.

    Raises:
        ConfigError: If none of the first prompts can be rolled out, or rows of the first usable one, or of the first
            with images, do not fit into `row_bytes`.
        RewardError: If none of the first usable prompts gets a reward.
        FieldError: If none of their rollouts passes the insert gate.
        RlhfdError: Any other error of the rollout of a usable prompt.
    """
    refused: list[RewardError | FieldError] = []
    set_aside: PromptError | None = None
    is_usable = False
    for position in range(TRIED_PROMPTS):
        if is_usable and not roller.has_images(position):
            continue
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
        rows = rolled.rows
        if rows is None:
            set_aside = rolled.refused
            continue
        room = extent_bytes_bound(len(rows), row_bytes)
        if (whole := codec.Encoding(rows).nbytes + _bytes_left_out(rows, roller.lengths.row)) > room:
            raise ConfigError(
                f"buffer.row_bytes: extent of {whole:,} B does not fit: {room:,} B are reserved for the "
                f"{len(rows)} rows of a prompt at rollout.max_length {roller.lengths.row:,}"
            )
        if is_usable or roller.vision is None or roller.has_images(position):
            return
        # Rows of text say nothing about the room for pixels.
        is_usable = True
    if is_usable:
        return
    if refused:
        raise refused[-1]
    assert set_aside is not None
    message = f"prompts.path: none of the first {TRIED_PROMPTS} prompts can be rolled out, the last one:"
    raise ConfigError(f"{message} {set_aside}", bare=f"{message} {set_aside.bare}")


def _bytes_left_out(rows: RaggedRows, max_length: int) -> int:
    """Return the bytes that the rows would take beyond their own if all responses reached `max_length`."""
    columns = (rows.tensor(field.name) for field in rows.fields if field.columns)
    a_token = sum(values.element_size() for values in columns if values is not None)
    return sum(max_length - length for length in rows.lengths) * a_token
