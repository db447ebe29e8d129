"""The probe of an engine: a short response to each version, compared with the worker's model of that version.

The worker's model holds the fetched weights, and `pipeline.models.weights.probe` compares it with the trainer's. An
engine with weights of its own may hold others: it is asked by the calls that tickets use, so that its caches are tried,
too. Two findings are errors:

    gap    the mean difference of the log-probs is above a limit
    stale  the same tokens came with the log-probs of the version before, although the model's have changed

The second one needs no limit: it finds an update that an engine has ignored also where the weights change by less than
two kernels differ.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from pipeline.config.losses import GapAction
from pipeline.errors import FieldError, ShapeError, WeightsMismatchError
from pipeline.experience.vision_rows import VisionRows
from pipeline.models.inputs import accepted_keywords, model_inputs
from pipeline.models.vision_inputs import plain_tokens, vision_backbone
from pipeline.rollout.generation.interface import Request, Response, Sampling

PROBE_TOKENS = 8
_LEAST_MOVE_NATS = 1e-5
_LEAST_SHARE = 0.1

Verdict = Literal["ok", "gap", "stale"]

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Answer:
    """One response to the probe.

    Attributes:
        version: That it was requested of.
        token_ids: Its tokens, n of them.
        engines: ``(n,)`` float64, the engine's log-probs; None if it returns none.
        models: ``(n,)`` float64, the model's.
        gaps: Difference of each token, in nats; without the engine's log-probs, that of the model's most probable
            token to the one that the engine took.
    """

    version: int
    token_ids: tuple[int, ...]
    engines: Tensor | None
    models: Tensor
    gaps: tuple[float, ...]


class EngineProbe:
    """Requests a response of each version, and judges it.

    Attributes:
        action: Of a version whose probe fails: a warning, the weights once more and then the end of the worker, or the
            end of the worker.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        tokens: Sequence[int],
        device: torch.device,
        *,
        row_tokens: int,
        limit_nats: float,
        action: GapAction = "resync",
        on_judged: Callable[[Verdict, Sequence[float]], None] = lambda verdict, gaps: None,
    ) -> None:
        """Take over the prompt.

        Args:
            model: The worker's, in eval mode; it holds the version that the engine must compute with.
            tokens: The prompt, at least one token; its end is left out where a row has no room for it. Tokens of
                images are token 0.
            device: The model's.
            row_tokens: Maximum tokens of a row, at least 2.
            limit_nats: Largest mean difference of the log-probs of a token.
            action: See the attribute.
            on_judged: Called with each verdict and the differences, in nats a token.
        """
        self.action = action
        room = min(PROBE_TOKENS, row_tokens - 1)
        prompt = torch.tensor(tokens[: row_tokens - room], dtype=torch.int64)
        backbone = vision_backbone(model)
        self._prompt = prompt if backbone is None else plain_tokens(backbone, prompt)
        self._room = room
        self._model = model
        self._device = device
        self._limit_nats = limit_nats
        self._on_judged = on_judged
        self._before: _Answer | None = None
        self._failed_version: int | None = None

    def request(self, key: int) -> Request:
        """Return the request: one greedy response, which ends by its length."""
        sampling = Sampling(max_length=len(self._prompt) + self._room, pad_token_id=0, do_sample=False)
        return Request(key, self._prompt, 1, self._room, sampling)

    def refused(self, version: int, error: FieldError | ShapeError) -> None:
        """Log that the engine refuses the request, and that this version is not judged."""
        log.warning("the engine refuses its probe and is not compared with the trainer: version=%d error=%s",
                    version, error)  # fmt: skip

    def judge(self, response: Response, version: int) -> bool:
        """Judge the engine by its response; return whether it must be given the version once more, and asked again.

        Args:
            response: Of the engine.
            version: That the model holds, and the engine should.

        Raises:
            WeightsMismatchError: If the probe fails, and the action is the end of the worker.
        """
        answer = self._answer(response, version)
        problem, verdict = self._problem(answer)
        self._on_judged(verdict, answer.gaps)
        if not problem:
            self._before, self._failed_version = answer, None
            return False
        again = self.action == "resync" and self._failed_version != version
        self._failed_version = version
        if self.action == "stop" or (self.action == "resync" and not again):
            raise WeightsMismatchError(problem)
        log.warning("%s%s", problem, "; it gets them again" if again else "")
        if not again:
            self._before = answer
        return again

    def _answer(self, response: Response, version: int) -> _Answer:
        tokens = response.token_ids.to(torch.int64)
        ids = torch.cat([self._prompt, tokens])[None].to(self._device)
        with torch.no_grad():
            # As each pass: a sampled token of images belongs to no image.
            inputs, others = model_inputs(self._model, ids, torch.ones_like(ids), VisionRows.none(1))
            logits = self._model(**inputs, **accepted_keywords(self._model, others)).logits[0]
            every = torch.log_softmax(logits[len(self._prompt) - 1 : -1].double(), dim=-1)
            models = every.gather(1, ids[0, len(self._prompt) :, None])[:, 0].cpu()
        engines = None if response.log_probs is None else response.log_probs.double()
        gaps = (every.amax(dim=1).cpu() if engines is None else engines) - models
        if engines is not None:
            # NaN of both is no difference between them.
            gaps = gaps.abs().masked_fill(engines.isnan() & models.isnan(), 0.0)
        return _Answer(version, tuple(tokens.tolist()), engines, models, tuple(gaps.tolist()))

    def _problem(self, answer: _Answer) -> tuple[str, Verdict]:
        """Return what is wrong, empty if nothing is, and the verdict."""
        before, mean = self._before, sum(answer.gaps) / max(1, len(answer.gaps))
        if before is not None and before.version != answer.version and before.token_ids == answer.token_ids:
            moved = float((answer.models - before.models).abs().mean())
            if answer.engines is not None and before.engines is not None and moved > _LEAST_MOVE_NATS:
                own = float((answer.engines - before.engines).abs().mean())
                if own < _LEAST_SHARE * moved:
                    return (
                        f"the engine computes with old weights: version={answer.version} moved_nats={own:.3g} of its "
                        f"log-probs since version {before.version}, those of the trainer's weights {moved:.3g}"
                    ), "stale"
        if mean <= self._limit_nats:
            return "", "ok"
        return (
            f"the engine does not compute with the weights that it was given: version={answer.version} "
            f"gap_nats={mean:.3g} a token, at most {self._limit_nats:g} (rollout.engine_gap_nats)"
        ), "gap"
