"""The probe of an engine: its log-probs of a few tokens with each version, compared with the actor's.

A worker that holds the actor compares a short response with its model (`ModelProbe`), which holds the fetched weights
and is itself compared with the trainer's (`pipeline.models.weights.probe`). The engine is asked by the calls that
tickets use, so that its caches are tried, too. A worker whose engine alone holds the actor compares the log-prob of the
first prompt with the one that the trainer publishes (`PublishedProbe`). Two findings are errors:

    gap    the mean difference of the log-probs is above a limit
    stale  the same tokens came with the log-probs of a version before, although the actor's have changed

The second one finds an update that an engine has ignored also where the weights change by less than two kernels differ.
"""

from __future__ import annotations

import abc
import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from pipeline.config.losses import GapAction
from pipeline.errors import FieldError, ShapeError, WeightsMismatchError
from pipeline.experience.vision_rows import VisionRows
from pipeline.models.attention_kernels import without_cudnn_attention
from pipeline.models.inputs import accepted_keywords, model_inputs
from pipeline.models.vision_inputs import plain_tokens, vision_backbone
from pipeline.progress import Telemetry
from pipeline.rollout.generation.interface import Request, Response, Sampling
from pipeline.storage.weights_header import WeightsVersion

PROBE_TOKENS = 8
FP8_GAP_NATS = 0.5
"""Largest mean difference a token of an engine whose weights have 8 bits."""
FP8_LEAST_MOVE_NATS = 0.03
"""Change of the expected log-probs from which on an engine whose weights have 8 bits must have moved, too: these may
stay as they are although most weights of bfloat16 move by one step, which was seen to change log-probs by 0.027."""
LEAST_MOVE_NATS_16_BITS = 0.03
"""The same of the few tokens of a response by a model of 16 bits: where weights hardly change, the rounding of one of
both passes may change and that of the other stay. Such passes were seen to move by 0.004 and by 0.0003."""
_LEAST_MOVE_NATS = 1e-5
_LEAST_SHARE = 0.1

Verdict = Literal["ok", "gap", "stale"]

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Answer:
    """The answer to one probe.

    Attributes:
        version: Version that the probe asked about.
        token_ids: Tokens that the log-probs are of, n of them; empty if they are the same for all versions.
        engines: ``(n,)`` float64, the engine's log-probs; None if it returns none.
        expected: Float64, the log-probs by the worker's model, ``(n,)``, or the trainer's mean of them, ``(1,)``.
        gaps: Difference of each token, in nats; without the engine's log-probs, that of the model's most probable
            token to the one that the engine took.
    """

    version: int
    token_ids: tuple[int, ...]
    engines: Tensor | None
    expected: Tensor
    gaps: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Judging:
    """The rule by which a probe is judged.

    Attributes:
        limit_nats: Largest mean difference of the log-probs of a token.
        action: Consequence of a failed probe: a warning, the weights once more and then the end of the worker, or the
            end of the worker.
        telemetry: Told of each verdict and the differences.
        least_move_nats: Change of the expected log-probs, summed over versions, from which on the engine's must move.
    """

    limit_nats: float
    action: GapAction = "resync"
    telemetry: Telemetry = Telemetry.none()
    least_move_nats: float = _LEAST_MOVE_NATS


class EngineProbe(abc.ABC):
    """Requests a response of a version, and judges it."""

    def __init__(self, judging: Judging) -> None:
        self._judging = judging
        self._least_move_nats = judging.least_move_nats
        self._before: _Answer | None = None
        self._failed_version: int | None = None

    @abc.abstractmethod
    def request(self, key: int) -> Request:
        """Return the request."""

    def refused(self, version: int, error: FieldError | ShapeError) -> None:
        """Log that there can be no request, and that this version is not judged."""
        log.warning("the engine is not compared with the trainer: version=%d reason=%s", version, error)

    def judge(self, response: Response, version: int) -> bool:
        """Judge the engine by its response; return whether it must be given the version once more, and asked again.

        Args:
            response: The engine's response.
            version: Version that the engine should compute with.

        Raises:
            WeightsMismatchError: If the probe fails, and the action is the end of the worker.
        """
        answer = self._answer(response, version)
        problem, verdict = self._problem(answer)
        self._judging.telemetry.engine_judged(verdict, answer.gaps)
        if not problem:
            self._failed_version = None
            # Small steps add up until they can be told from rounding. NaN is replaced by the next.
            if (moved := self._moved(answer)) is None or not moved <= self._least_move_nats:
                self._before = answer
            return False
        action = self._judging.action
        again = action == "resync" and self._failed_version != version
        self._failed_version = version
        if action == "stop" or (action == "resync" and not again):
            raise WeightsMismatchError(problem)
        log.warning("%s%s", problem, "; it gets them again" if again else "")
        if not again:
            self._before = answer
        return again

    @abc.abstractmethod
    def _answer(self, response: Response, version: int) -> _Answer: ...

    def _moved(self, answer: _Answer) -> float | None:
        """Return the mean change of the expected log-probs since the answer before; None if they are not the same."""
        before = self._before
        if before is None or before.version == answer.version or before.token_ids != answer.token_ids:
            return None
        return float((answer.expected - before.expected).abs().mean())

    def _problem(self, answer: _Answer) -> tuple[str, Verdict]:
        """Return what is wrong, empty if nothing is, and the verdict."""
        before, moved, mean = self._before, self._moved(answer), sum(answer.gaps) / max(1, len(answer.gaps))
        if before is not None and moved is not None and moved > self._least_move_nats:
            engines = None if answer.engines is None or before.engines is None else answer.engines - before.engines
            if engines is not None and (own := float(engines.abs().mean())) < _LEAST_SHARE * moved:
                return (
                    f"the engine computes with old weights: version={answer.version} moved_nats={own:.3g} of its "
                    f"log-probs since version {before.version}, those of the trainer's weights {moved:.3g}"
                ), "stale"
        if mean <= self._judging.limit_nats:
            return "", "ok"
        return (
            f"the engine does not compute with the weights that it was given: version={answer.version} "
            f"gap_nats={mean:.3g} a token, at most {self._judging.limit_nats:g} (rollout.engine_gap_nats)"
        ), "gap"


class ModelProbe(EngineProbe):
    """Compares a greedy response with the worker's model, which holds the version that the engine must compute with."""

    def __init__(
        self,
        model: Callable[..., Any],
        tokens: Sequence[int],
        device: torch.device,
        *,
        row_tokens: int,
        judging: Judging,
    ) -> None:
        """Take over the prompt.

        Args:
            model: The worker's, in eval mode.
            tokens: The prompt, at least one token; its end is left out where a row has no room for it. Tokens of
                images are token 0.
            device: The model's.
            row_tokens: Maximum tokens of a row, at least 2.
            judging: Limit, action and telemetry.
        """
        super().__init__(judging)
        room = min(PROBE_TOKENS, row_tokens - 1)
        prompt = torch.tensor(tokens[: row_tokens - room], dtype=torch.int64)
        if getattr(model, "dtype", torch.float32) != torch.float32:
            self._least_move_nats = max(self._least_move_nats, LEAST_MOVE_NATS_16_BITS)
        backbone = vision_backbone(model)
        self._prompt = prompt if backbone is None else plain_tokens(backbone, prompt)
        self._room = room
        self._model = model
        self._device = device

    def request(self, key: int) -> Request:
        """Return the request: one greedy response, which ends by its length."""
        return _greedy(key, self._prompt, self._room)

    @without_cudnn_attention()
    def _answer(self, response: Response, version: int) -> _Answer:
        tokens = response.token_ids.to(torch.int64)
        ids = torch.cat([self._prompt, tokens])[None].to(self._device)
        with torch.no_grad():
            # As each pass: a sampled token of images belongs to no image.
            inputs, others = model_inputs(self._model, ids, torch.ones_like(ids), VisionRows.none(1))
            logits = self._model(**inputs, **accepted_keywords(self._model, others)).logits[0]
            every = torch.log_softmax(logits[len(self._prompt) - 1 : -1].double(), dim=-1)
            expected = every.gather(1, ids[0, len(self._prompt) :, None])[:, 0].cpu()
        engines = None if response.log_probs is None else response.log_probs.double()
        # Without them the difference has a sign: a token above the model's most probable one is none.
        gaps = tuple((every.amax(dim=1).cpu() - expected).tolist()) if engines is None else _gaps(engines, expected)
        return _Answer(version, tuple(tokens.tolist()), engines, expected, gaps)


class PublishedProbe(EngineProbe):
    """Compares the log-probs of the run's first prompt with their sum, which the trainer published with the version.

    The engine computes them anew: keys and values that it keeps of prompts are not read.

    Attributes:
        published: The version fetched last, with the trainer's answer; the engine is asked about no other.
    """

    def __init__(self, tokens: Sequence[int], dtype: torch.dtype, judging: Judging) -> None:
        """Take over the prompt.

        Args:
            tokens: The trainer's probe, at least two tokens. In 16 bits a few tokens of the engine can be the same by
                chance: no verdict "stale" comes of fewer than `PROBE_TOKENS`.
            dtype: Dtype of the models.
            judging: Limit, action and telemetry.
        """
        super().__init__(judging)
        if dtype != torch.float32 and len(tokens) <= PROBE_TOKENS:
            self._least_move_nats = math.inf
        self._prompt = torch.tensor(tokens, dtype=torch.int64)
        self.published: WeightsVersion | None = None

    def request(self, key: int) -> Request:
        """Return the request: a response of one token, with the log-probs of the prompt's.

        Raises:
            FieldError: If the version has no answer of the trainer.
        """
        if self.published is None or self.published.probe is None:
            raise FieldError("the trainer has published no answer to the probe with this version")
        return dataclasses.replace(_greedy(key, self._prompt, 1), prompt_log_probs=True)

    def _answer(self, response: Response, version: int) -> _Answer:
        assert self.published is not None and response.prompt_log_probs is not None
        probe = self.published.probe
        assert probe is not None and self.published.version == version
        if probe.tokens != len(self._prompt):
            raise WeightsMismatchError(
                f"the trainer's answer to the probe is of {probe.tokens} tokens, this worker's of {len(self._prompt)}: "
                f"version={version}"
            )
        engines = response.prompt_log_probs.double()
        assert len(engines) == len(self._prompt) - 1
        expected = torch.tensor([probe.log_prob / len(engines)], dtype=torch.float64)
        return _Answer(version, (), engines, expected, _gaps(engines.mean(dim=0, keepdim=True), expected))


def _greedy(key: int, prompt: Tensor, room: int) -> Request:
    return Request(key, prompt, 1, room, Sampling(len(prompt) + room, pad_token_id=0, do_sample=False))


def _gaps(engines: Tensor, expected: Tensor) -> tuple[float, ...]:
    """Return the absolute differences; NaN of both is no difference between them."""
    both_nan = engines.isnan() & expected.isnan()
    return tuple((engines - expected).abs().masked_fill(both_nan, 0.0).tolist())
