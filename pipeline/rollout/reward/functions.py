"""Rewards: functions of a row with the interface of a reward model, and the check of scores.

A reward that is not a finite number ends the experience with `RewardError`; it never becomes reward 0.
"""

from __future__ import annotations

import importlib
import inspect
import math
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.config import user_modules
from pipeline.errors import ConfigError, RewardError
from pipeline.experience.vision_rows import MODEL_KEYWORDS, VisionRows

RewardFunction = Callable[..., Any]
"""``fn(input_ids (S,), attention_mask (S,), gt_answer=, response_start=, response_end=, tokenizer=)`` -> a number.

A function with parameters named `pixel_values`, `image_grid_thw`, `pixel_values_videos`, `video_grid_thw` or
`raw_images` gets these of the row too, None where the row has none."""

_VISION_PARAMETERS = (*MODEL_KEYWORDS.values(), "raw_images")


class FunctionReward:
    """Functions with the interface of a reward model, in coati's convention for verifiable rewards; results add up.

    Args:
        functions: At least one; each is called once a row with right-padded ids and the columns of the response
            (`response_end` exclusive, the stop included), and returns a number or a tensor with one element.
        tokenizer: Passed to every function.
        on_progress: Called after each row: a function that never returns ends these calls.
        on_row: Called with the results of the functions for a row, before `on_progress`.

    Raises:
        ConfigError: If there are no functions.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        tokenizer: Any,
        on_progress: Callable[[], None] = lambda: None,
        on_row: Callable[[Sequence[float]], None] = lambda parts: None,
    ) -> None:
        if not functions:
            raise ConfigError("no reward functions: give at least one")
        self._functions = [(function, _named(function, _VISION_PARAMETERS)) for function in functions]
        self._tokenizer = tokenizer
        self._on_progress = on_progress
        self._on_row = on_row

    @property
    def sees_images(self) -> bool:
        """Whether a function names images among its parameters."""
        return any(names for _, names in self._functions)

    def __call__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        response_start: Tensor,
        response_end: Tensor,
        gt_answer: Sequence[Any],
        vision: VisionRows | None = None,
    ) -> Tensor:
        """Score rows.

        Args:
            input_ids: ``(B, S)`` int64, right-padded.
            attention_mask: ``(B, S)``, 1 where the token is real.
            response_start: ``(B,)`` int64, column of the first response token.
            response_end: ``(B,)`` int64, column after the last response token.
            gt_answer: One element a row.
            vision: Images and videos of the rows.

        Returns:
            ``(B,)`` float32.

        Raises:
            RewardError: If a function raises, or does not return one finite number.
        """
        scores = []
        for row, (ids, mask, start, end, answer) in enumerate(
            zip(input_ids, attention_mask, response_start.tolist(), response_end.tolist(), gt_answer, strict=True)
        ):
            keywords = {
                "gt_answer": answer,
                "response_start": start,
                "response_end": end,
                "tokenizer": self._tokenizer,
            }
            seen = _seen(None if vision is None else vision.rows([row]))
            parts = [
                _score(function, row, ids, mask, keywords | {name: seen[name] for name in names})
                for function, names in self._functions
            ]
            scores.append(sum(parts))
            self._on_row(parts)
            self._on_progress()
        return torch.tensor(scores, dtype=torch.float32)


def vision_keywords(
    reward_model: Callable[..., Any], vision: VisionRows | None, device: torch.device
) -> dict[str, Any]:
    """Return the keywords about images that a reward model's signature names.

    Args:
        reward_model: Its ``__call__``, or ``forward``, may name `pixel_values`, `image_grid_thw`,
            `pixel_values_videos`, `video_grid_thw` (of all rows end to end; None where there is none), `image_num`,
            `video_num` (``(B,)`` float32), `raw_images` (one element a row) or `vision` (`VisionRows`).
        vision: Images and videos of the rows; None where there are none.
        device: Of the tensors.

    Returns:
        The keywords, None for each that the rows lack.
    """
    names = _named(reward_model, (*_VISION_PARAMETERS, "image_num", "video_num", "vision"))
    if vision is None or not names:
        return dict.fromkeys(names)
    pixels = vision.model_keywords(device) if set(names) & set(MODEL_KEYWORDS.values()) else {}
    known = {**pixels, **vision.counts(), "raw_images": vision.raw_images, "vision": vision}
    return {name: known.get(name) for name in names}


def load_reward_function(name: str, *, field: str = "rollout.reward_functions") -> RewardFunction:
    """Import a reward function by its name.

    Args:
        name: ``module:function``; the module is imported from ``sys.path``.
        field: The configuration field with this name, for the error.

    Returns:
        The function.

    Raises:
        ConfigError: If the name has another form, does not import, or is not callable.
    """
    module_name, separator, function_name = name.partition(":")
    if not (module_name and separator and function_name):
        raise ConfigError(f"{field}: {name!r} is not of the form module:function")
    try:
        module = importlib.import_module(module_name)
    # User code may raise any exception at import, and would again at the next start.
    except Exception as error:
        kind = "" if isinstance(error, ImportError | SyntaxError) else f"{type(error).__name__}: "
        looked = user_modules.not_found(error, module_name)
        raise ConfigError(f"{field}: cannot import {module_name}: {kind}{error}{looked}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"{field}: {module_name} has no function {function_name}")
    loaded: RewardFunction = function
    return loaded


def checked_scores(scores: Any, batch_size: int, source: str, *, keep_errored: bool = False) -> Tensor:
    """Return the result of a reward model as one finite number a row.

    Args:
        scores: The result.
        batch_size: Rows that were scored (B).
        source: The model's name, for the error.
        keep_errored: Return NaN for a score that is not a finite number, in place of refusing it.

    Returns:
        ``(B,)`` float32.

    Raises:
        RewardError: If the shape differs, or a score is not finite; the message names the first such row.
    """
    tensor = torch.as_tensor(scores)
    if tensor.shape != (batch_size,):
        raise RewardError(f"{source} returned scores of shape {tuple(tensor.shape)}, not ({batch_size},)")
    tensor = tensor.float()
    finite = torch.isfinite(tensor)
    if keep_errored:
        return tensor.masked_fill(~finite, math.nan)
    if not bool(finite.all()):
        row = int((~finite).nonzero()[0])
        raise RewardError(f"{source} returned {tensor[row].item()} for row {row}; a reward is a finite number")
    return tensor


def _named(function: Callable[..., Any], names: Sequence[str]) -> list[str]:
    """Return the names that are parameters of a function."""
    target = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        parameters = inspect.signature(target).parameters
    # Some functions written in C have no signature, and so no named parameters.
    except (TypeError, ValueError):
        return []
    return [name for name in names if name in parameters]


def _seen(vision: VisionRows | None) -> dict[str, Any]:
    """Return the image keywords of one row."""
    if vision is None:
        return dict.fromkeys(_VISION_PARAMETERS)
    seen = {model_name: getattr(vision, name)[0] for name, model_name in MODEL_KEYWORDS.items()}
    return {**seen, "raw_images": vision.raw_images[0]}


def _score(function: RewardFunction, row: int, ids: Tensor, mask: Tensor, keywords: dict[str, Any]) -> float:
    name = f"{function.__module__}:{function.__qualname__}" if hasattr(function, "__qualname__") else repr(function)
    try:
        result = function(ids, mask, **keywords)
    # User code may raise any exception; the error names the row.
    except Exception as error:
        place = _place_of(function, error)
        cause = f"{name} raised {type(error).__name__}"
        message, bare = f"{name} raised {error!r} for row {row}{place}", f"{cause} for row {row}{place}"
        raise RewardError(message, bare=bare, raised=True, cause=f"{cause}{place}") from error
    try:
        score = float(result)
    # The result may be of any type.
    except Exception as error:
        returned = "{} returned {} for row {}; a reward is a finite number{}".format
        kind, place = f"a {type(result).__name__}", _place_of(function)
        message, bare = returned(name, _shown(result), row, place), returned(name, kind, row, place)
        raise RewardError(message, bare=bare, cause=f"{name} returned {kind}{place}") from error
    if not math.isfinite(score):
        place = _place_of(function)
        message = f"{name} returned {score} for row {row}; a reward is a finite number{place}"
        raise RewardError(message, cause=f"{name} returned {score}{place}")
    return score


def _place_of(function: RewardFunction, error: BaseException | None = None) -> str:
    """Return `` (file:line)``: the line of a function's file that raised, or of its definition; empty if not known."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    raised = [] if error is None else traceback.extract_tb(error.__traceback__)[1:]
    if code is None:
        return f" ({raised[-1].filename}:{raised[-1].lineno})" if raised else ""
    lines = [frame.lineno for frame in raised if frame.filename == code.co_filename]
    return f" ({code.co_filename}:{lines[-1] if lines else code.co_firstlineno})"


def _shown(result: Any) -> str:
    """Return a function's result as one short line; an array as its shape, because its values would fill a screen."""
    shape = getattr(result, "shape", ())
    return f"shape {tuple(shape)}" if len(shape) else f"{result!r:.80}"
