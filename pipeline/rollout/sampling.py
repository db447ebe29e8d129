"""The sampling parameters of a configuration: of its rollouts, and of its held-out prompts.

A response ends with the tokens that all files of the model's folder list: its tokenizer's eos, and the `eos_token_id`
of generation_config.json and config.json. Many models end a turn with a token that only one of the files names.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.config.model_files import end_token_ids
from pipeline.config.schema import Config
from pipeline.config.types import stop_sequences_of
from pipeline.config.vocabularies import problem_of_tokens
from pipeline.errors import ConfigError
from pipeline.rollout.generation.interface import Sampling
from pipeline.rollout.generation.stop_strings import StopStrings

log = logging.getLogger(__name__)


def sampling_of(config: Config, tokenizer: Any, vocabulary: int) -> Sampling:
    """Return the sampling parameters of the longest row of a run; a batch has its own `max_length` and `seed`.

    Args:
        config: The instance's.
        tokenizer: The actor's.
        vocabulary: Tokens of the model.

    Raises:
        ConfigError: If the model lacks a token of `rollout.stop_token_ids`, which would end no response.
    """
    rollout = config.rollout
    stop_sequences = stop_sequences_of(rollout.stop_token_ids)
    if problem := problem_of_tokens(stop_sequences, vocabulary):
        raise ConfigError(f"rollout.stop_token_ids: {problem}")
    return Sampling(
        max_length=config.lengths.row,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_ids=end_tokens(config, tokenizer, vocabulary),
        stop_sequences=stop_sequences,
        stop_strings=_strings(rollout.stop, tokenizer),
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        seed=config.daemon.seed,
    )


def held_out_sampling(config: Config, sampling: Sampling, tokenizer: Any) -> Sampling:
    """Return the sampling parameters of held-out prompts: those of the rollouts but for the keys of `[evaluation]`."""
    evaluation, strings = config.evaluation, sampling.stop_strings
    # The vocabulary is read for other texts only.
    if evaluation.stop is not None and tuple(evaluation.stop) != (() if strings is None else strings.strings):
        strings = _strings(evaluation.stop, tokenizer)
    temperature = sampling.temperature if evaluation.temperature is None else evaluation.temperature
    return dataclasses.replace(
        sampling,
        stop_strings=strings,
        temperature=temperature or sampling.temperature,
        do_sample=temperature > 0,
        top_p=sampling.top_p if evaluation.top_p is None else evaluation.top_p,
        top_k=sampling.top_k if evaluation.top_k is None else evaluation.top_k,
        min_p=sampling.min_p if evaluation.min_p is None else evaluation.min_p,
    )


def end_tokens(config: Config, tokenizer: Any, vocabulary: int) -> tuple[int, ...]:
    """Return the tokens that end a response; log where the ids come from, if the tokenizer lacks some.

    Args:
        config: The instance's.
        tokenizer: The actor's.
        vocabulary: Tokens of the model; an id that it lacks is never sampled.
    """
    own = tokenizer.eos_token_id
    token_ids = [] if own is None else [own]
    special = set(getattr(tokenizer, "all_special_ids", ()))
    added = set(getattr(tokenizer, "added_tokens_decoder", ()))
    for file, ids in end_token_ids(Path(config.model.actor)).items():
        new = [token for token in ids if token < vocabulary and token not in token_ids]
        token_ids += new
        if ordinary := [token for token in new if token not in special | added]:
            log.warning("a response ends with tokens that are no special tokens: ids=%s file=%s", ordinary, file)
        elif new:
            log.info("a response ends with tokens beside the tokenizer's eos: ids=%s file=%s eos=%s", new, file, own)
    return tuple(token_ids)


def _strings(texts: Sequence[str], tokenizer: Any) -> StopStrings | None:
    return StopStrings(texts, tokenizer) if texts else None
