"""Rewards: functions of a row with the interface of a reward model, and the check of scores.

A reward that is not a finite number ends the experience with `RewardError`; it never becomes reward 0.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.config import user_modules
from pipeline.config.rewards import REWARD_NAMES, OwnReward, RewardConfig, reward_of
from pipeline.errors import ConfigError, RewardError, counted
from pipeline.experience.vision_rows import MODEL_KEYWORDS, VisionRows
from pipeline.progress import Telemetry
from pipeline.rollout.response_text import ResponseText
from pipeline.rollout.reward.foreign import adapted
from pipeline.rollout.reward.given_rows import GivenRows
from pipeline.rollout.reward.numbers import Scored, of_rows, scored, split
from pipeline.rollout.reward.row_rewards import LARGEST, RewardProblems, RowRewards, is_reward
from pipeline.rollout.reward.signatures import Signature, awaited, parameters_of
from pipeline.rollout.reward.wire import RowScore, row_score

RewardFunction = Callable[..., Any]
"""``fn(input_ids (S,), attention_mask (S,), gt_answer=, response_start=, response_end=, tokenizer=)`` -> a number.

A function with parameters named `pixel_values`, `image_grid_thw`, `pixel_values_videos`, `video_grid_thw` or
`raw_images` gets these of the row too, None where the row has none; one named `response`, the text of the response; one
named `prompt`, the prompt as its file has it; any other one, the column of the prompt's row with this name. `answer` is
`gt_answer` where the row has no such column (`pipeline.rollout.reward.signatures`). In place of the number it may
return a dict with it as "reward" and further numbers (`pipeline.rollout.reward.numbers`). A function of
TRL or verl is called as it is by that of `load_reward_function` (`pipeline.rollout.reward.foreign`)."""

NAMED = "reward"
"""The module that functions of this package show in errors: ``reward:exact``."""


class FunctionReward(RowRewards):
    """Functions with the interface of a reward model, in coati's convention for verifiable rewards; results add up.

    See `RowRewards` for attributes and errors.

    Args:
        functions: At least one; each is called once a row with right-padded ids and the columns of the response
            (`response_end` exclusive, the stop included), and returns a number or a tensor with one element. One that
            is `batched` is called once for all rows; calls of an async one run at the same time.
        tokenizer: Passed to every function.
        telemetry: Told also of progress after each row: a function that never returns makes none.
        weights: As for `RowRewards`.
        timeout_s: Limit of the calls of an async function, for all rows together; 0: none.
        labels: As for `RowRewards`.
        text: Decodes the responses; None: with the special tokens of `tokenizer`, but pad and eos.
        problems: As for `RowRewards`.

    Raises:
        ConfigError: Also if a function has the signature of another trainer.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        tokenizer: Any,
        telemetry: Telemetry = Telemetry.none(),
        *,
        weights: Sequence[float] | None = None,
        timeout_s: float = 0.0,
        labels: Sequence[str] = (),
        text: ResponseText | None = None,
        problems: RewardProblems | None = None,
    ) -> None:
        names = [_name_of(function) for function in functions]
        for name, function in zip(names, functions, strict=True):
            trainer = user_modules.trainer_of(function)
            if trainer and (problem := user_modules.problem_of_call(function, "rlhfd")):
                raise ConfigError(f"{name}, a function of {trainer}, {problem}")
        super().__init__(names, telemetry, weights=weights, labels=labels, problems=problems)
        self._functions = [(function, Signature(function)) for function in functions]
        self._tokenizer = tokenizer
        self._text = ResponseText.of(tokenizer) if text is None else text
        self._timeout_s = timeout_s

    @property
    def facts(self) -> dict[str, Any]:
        """Whether a function names images or the prompt, or takes further columns of its row; and `together`."""
        signatures = [signature for _, signature in self._functions]
        return {
            "sees_images": any(signature.vision for signature in signatures),
            "wants_columns": any(signature.wants_columns for signature in signatures),
            "wants_prompt": any(signature.wants_prompt for signature in signatures),
            "together": self.together,
        }

    @property
    def together(self) -> list[int]:
        """The numbers of the functions that score all rows of a call together: the batched and the async ones."""
        return [at for at, (_, one) in enumerate(self._functions) if one.is_batched or one.is_async]

    def _scores(self, rows: GivenRows, first: int) -> list[RowScore]:
        scores = []
        for row, found in enumerate(self.results(range(len(self._functions)), rows), first):
            if isinstance(error := found[-1], RewardError) and self.problems is None:
                raise error.at(f"row {row}")
            scores.append(row_score(found, is_joint=len(found) - 1 in self.together))
            self._telemetry.progress()
        return scores

    def results(self, which: Sequence[int], rows: GivenRows) -> Iterator[list[Scored | RewardError]]:
        """Yield the results of some functions for each row: scores, or scores up to an error, which is the last.

        NaN is the score of a function that does not apply to the row.

        Args:
            which: Numbers of the functions.
            rows: The rows.
        """
        input_ids, attention_mask, response_start, response_end, gt_answer, vision, columns = rows
        given = [
            {"gt_answer": answer, "response_start": start, "response_end": end, "tokenizer": self._tokenizer}
            for start, end, answer in zip(response_start.tolist(), response_end.tolist(), gt_answer, strict=True)
        ]

        def keywords(signature: Signature, row: int) -> dict[str, Any]:
            seen = _seen(None if vision is None else vision.rows([row])) if signature.vision else {}
            start, end = given[row]["response_start"], given[row]["response_end"]
            text = functools.partial(self._text, input_ids[row, start:end].tolist())
            return signature.keywords(given[row], seen, {} if columns is None else columns[row], text)

        def alone(at: int, row: int) -> Any:
            function, signature = self._functions[at]
            return function(input_ids[row], attention_mask[row], **keywords(signature, row))

        joint = {at: self._joint(at, input_ids, attention_mask, keywords) for at in self.together if at in which}
        for row in range(len(given)):
            found: list[Scored | RewardError] = []
            for at in which:
                call = functools.partial(_taken, joint[at][row]) if at in joint else functools.partial(alone, at, row)
                found.append(_result(self._functions[at][0], call))
                if isinstance(found[-1], RewardError):
                    break
            yield found

    def _joint(
        self, at: int, input_ids: Tensor, attention_mask: Tensor, keywords: Callable[[Signature, int], dict[str, Any]]
    ) -> list[Any]:
        """Return the results of a batched or async function for all rows, an exception for a row without one."""
        function, signature = self._functions[at]
        rows = range(len(input_ids))

        async def of_row(row: int) -> Any:
            return await function(input_ids[row], attention_mask[row], **keywords(signature, row))

        try:
            if not signature.is_batched:
                return awaited([functools.partial(of_row, row) for row in rows], self._timeout_s)
            return self._batched(at, input_ids, attention_mask, keywords)
        # User code may raise any exception; every row has it. A task that it cancels is its own: the call is not.
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001
            return [error] * len(rows)

    def _batched(
        self, at: int, ids: Tensor, mask: Tensor, keywords: Callable[[Signature, int], dict[str, Any]]
    ) -> list[Any]:
        """Return the results of one call of a batched function for the rows that have its columns."""
        function, signature = self._functions[at]
        found: list[Any] = [None] * len(ids)
        given: dict[int, dict[str, Any]] = {}
        for row in range(len(ids)):
            try:
                given[row] = keywords(signature, row)
            except RewardError as error:
                found[row] = error
        if not given:
            return found
        if len(given) < len(found):
            ids, mask = ids[[*given]], mask[[*given]]
        call = functools.partial(function, ids, mask, **signature.together([*given.values()]))
        called = _taken(awaited([call], self._timeout_s)[0]) if signature.is_async else call()
        results = list(of_rows(called, len(given)))
        if len(results) != len(given):
            returned = f"{counted(len(results), 'score')} for {counted(len(given), 'row')}"
            raise RewardError(f"{_name_of(function)} returned {returned}")
        for row, result in zip(given, results, strict=True):
            found[row] = result
        return found


def _taken(result: Any) -> Any:
    if isinstance(result, BaseException):
        raise result
    return result


def vision_keywords(
    reward_model: Callable[..., Any], vision: VisionRows | None, device: torch.device
) -> dict[str, Any]:
    """Return the keywords about images that a reward model's signature names.

    Args:
        reward_model: A model whose ``__call__``, or ``forward``, may name `pixel_values`, `image_grid_thw`,
            `pixel_values_videos`, `video_grid_thw` (of all rows end to end; None where there is none), `image_num`,
            `video_num` (``(B,)`` float32), `raw_images` (one element a row) or `vision` (`VisionRows`).
        vision: Images and videos of the rows; None where there are none.
        device: Device of the tensors.

    Returns:
        The keywords, None for each that the rows lack.
    """
    known_names = (*user_modules.VISION_KEYWORDS, "image_num", "video_num", "vision")
    names = [name for name in known_names if name in parameters_of(reward_model)]
    if vision is None or not names:
        return dict.fromkeys(names)
    pixels = vision.model_keywords(device) if set(names) & set(MODEL_KEYWORDS.values()) else {}
    known = {**pixels, **vision.counts(), "raw_images": vision.raw_images, "vision": vision}
    return {name: known.get(name) for name in names}


def load_reward_function(reward: RewardConfig | str) -> RewardFunction:
    """Import a reward function.

    Args:
        reward: Its name and options, those in force; or a name without options: ``module:function``, the module
            imported from ``sys.path``, or one of `REWARD_NAMES`.

    Returns:
        The function.

    Raises:
        ConfigError: If the name has another form, does not import, or is not callable.
    """
    name = reward if isinstance(reward, str) else reward.name
    if name in REWARD_NAMES:
        # Only then: it needs libraries that other functions do not.
        from pipeline.rollout.reward.named import named_reward

        return named_reward(reward_of(reward))
    if not all(name.partition(":")):
        raise ConfigError(f"rewards: {name!r} is not of the form module:function")
    function = user_modules.load_function("rewards", name)
    style = reward.style if isinstance(reward, OwnReward) else user_modules.AUTO
    if problem := user_modules.problem_of_call(function, style):
        raise ConfigError(f"rewards: {name} {problem}")
    return adapted(function, style)


def checked_scores(
    scores: Any, batch_size: int, source: str, *, keep_errored: bool = False, first_row: int = 0
) -> Tensor:
    """Return the result of a reward model as one finite number a row.

    Args:
        scores: The result.
        batch_size: Rows that were scored (B).
        source: The model's name, for the error.
        keep_errored: Return NaN for a score that is not a finite number, in place of refusing it.
        first_row: Number of the first row, for the error.

    Returns:
        ``(B,)`` float64 if the scores are, else float32.

    Raises:
        RewardError: If the shape differs, or a score is not finite in float32; the message names the first such row.
    """
    try:
        tensor = torch.as_tensor(scores)
    except (RuntimeError, TypeError, ValueError) as error:
        raise RewardError(f"{source} returned a {type(scores).__name__}, not one number a row") from error
    if tensor.shape != (batch_size,):
        raise RewardError(f"{source} returned scores of shape {tuple(tensor.shape)}, not ({batch_size},)")
    tensor = tensor if tensor.dtype == torch.float64 else tensor.float()
    finite = tensor.abs() <= LARGEST
    if keep_errored:
        return tensor.masked_fill(~finite, math.nan)
    if not bool(finite.all()):
        row = int((~finite).nonzero()[0])
        found = f"{tensor[row].item()} for row {first_row + row}"
        raise RewardError(f"{source} returned {found}; a reward is a finite number")
    return tensor


def _seen(vision: VisionRows | None) -> dict[str, Any]:
    """Return the image keywords of one row."""
    if vision is None:
        return dict.fromkeys(user_modules.VISION_KEYWORDS)
    seen = {model_name: getattr(vision, name)[0] for name, model_name in MODEL_KEYWORDS.items()}
    return {**seen, "raw_images": vision.raw_images[0]}


def _name_of(function: RewardFunction) -> str:
    return f"{function.__module__}:{function.__qualname__}" if hasattr(function, "__qualname__") else repr(function)


def _result(function: RewardFunction, call: Callable[[], Any]) -> Scored | RewardError:
    """Return the score that a call gives, NaN for None, or its error, with the exception behind it as the cause."""
    name = _name_of(function)
    try:
        result = call()
    # User code may raise any exception, also of a task that it has cancelled.
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001
        # With a cause it is no error of the function: the row lacks what the call needs.
        if isinstance(error, RewardError) and (error.cause or getattr(function, "__module__", "") == NAMED):
            return error.at(name)
        location = _location_of(function, error)
        bare = f"{name} raised {type(error).__name__}{location}"
        found = RewardError(f"{name} raised {error!r}{location}", bare=bare, raised=True, cause=bare)
        found.__cause__ = error
        return found
    try:
        result, numbers = split(result)
    except RewardError as error:
        said = f"{name} returned a dict: {error}{_location_of(function)}"
        return RewardError(said, cause=said)
    if result is None:
        return scored(math.nan, numbers)
    try:
        # A text is none, though it may read as one: a function that returns it is not the one that its author means.
        if isinstance(result, str | bytes | bytearray):
            raise TypeError("a text is no number")
        score = float(result)
    # The result may be of any type.
    except Exception as error:  # noqa: BLE001
        location = _location_of(function)
        message, bare = (
            f"{name} returned {shown}; a reward is a finite number{location}"
            for shown in (_shown(result), f"a {type(result).__name__}")
        )
        found = RewardError(message, bare=bare, cause=bare)
        found.__cause__ = error
        return found
    if not is_reward(score):
        location = _location_of(function)
        kind = "a reward is a finite number"
        if math.isfinite(score):
            kind = f"float32, in which a reward is trained, holds numbers up to {LARGEST:.4g}"
        message = f"{name} returned {score}; {kind}{location}"
        large = "a number beyond float32" if math.isfinite(score) else score
        return RewardError(message, cause=f"{name} returned {large}{location}")
    return scored(score, numbers)


def _location_of(function: RewardFunction, error: BaseException | None = None) -> str:
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
