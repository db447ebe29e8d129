"""Rollers: prompts in, experience out.

A worker rolls out with a `Roller`: `LocalRoller` in its own process, `pipeline.rollout.ray.RemoteRoller` in front of a
`LocalRoller` on another machine. The worker does not depend on which of the two it has.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import xxhash

from pipeline.config.lengths import Lengths
from pipeline.config.sizes import extent_bytes_bound
from pipeline.errors import ArenaFullError, ConfigError, FieldError, PromptError, RewardError
from pipeline.experience import codec
from pipeline.experience.types import Experience
from pipeline.models.weights.store import WeightsReader
from pipeline.prompts import Prompt, PromptSource, render
from pipeline.rollout.generation.interface import ResponseGenerator
from pipeline.rollout.insert_gate import Fault, find_fault
from pipeline.rollout.vision_prompts import RenderedPrompt, VisionPrompts
from pipeline.storage.weights_header import WeightsVersion

_TRIED_PROMPTS = 64
_TRIED_ROLLOUTS = 3
_TRIED_TOKENS = 16

log = logging.getLogger(__name__)


class Maker(Protocol):
    """The method of an experience maker (`NaiveExperienceMaker`) that a rollout calls."""

    def make_experience(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, gt_answer: Any = None, **generate_kwargs: Any
    ) -> Experience:
        """Return the experience of a left-padded batch of prompts."""


class WeightsSource(Protocol):
    """Source of published weights: shared memory (`WeightsReader`), or a copy sent over the network (`WeightsCopy`)."""

    def fetch(self, into: Mapping[str, torch.Tensor]) -> WeightsVersion:
        """Copy the newest version into tensors, by published name; return that version."""


@dataclasses.dataclass(frozen=True)
class Rolled:
    """The result of a rollout.

    Attributes:
        experience: Rows of the prompts that could be rolled out; None if none could.
        prompts_failed: Prompts set aside.
        refused: Why the last prompt set aside could not be rolled out.
        fault: Why the experience must not be sealed.
        stopped: ``(B,)`` bool, whether the response ended by itself; None without experience or with a fault.
        answers: The right answer of each prompt rolled out.
    """

    experience: Experience | None
    prompts_failed: int
    refused: PromptError | None = None
    fault: Fault | None = None
    stopped: torch.Tensor | None = None
    answers: Sequence[Any] = ()


class Roller(Protocol):
    """The interface of a rollout worker to its models: `LocalRoller`, or `RemoteRoller` for an actor of a cluster."""

    def roll(self, position: int, prompts: int) -> Rolled:
        """Roll out the prompts at ``position ... position + prompts - 1``."""

    def fetch(self, source: WeightsReader) -> WeightsVersion:
        """Replace the weights by the newest version; return that version."""

    def close(self) -> None:
        """Release the prompts, or the actor."""


@dataclasses.dataclass(frozen=True)
class ModelWeights:
    """The weights of a roller's models, replaced in place.

    Attributes:
        targets: The tensors that published weights are copied into, by published name.
        engine: Paused during the copy, then notified of the new weights; None if there is none.
        check: Called with each version fetched; raises WeightsMismatchError if the model does not compute with it.
    """

    targets: Mapping[str, torch.Tensor]
    engine: ResponseGenerator | None = None
    check: Callable[[WeightsVersion], None] = lambda fetched: None

    def fetch(self, source: WeightsSource) -> WeightsVersion:
        """Replace the weights by the newest version.

        Args:
            source: Holds the newest version.

        Returns:
            The version fetched.

        Raises:
            WeightsMismatchError: If the model does not compute with the version fetched.
            WeightsError: If the weights are torn, or another model's.
        """
        if self.engine is not None:
            self.engine.pause()
        fetched = source.fetch(self.targets)
        if self.engine is not None:
            self.engine.update_weights(_of_actor(self.targets))
            self.engine.resume()
        self.check(fetched)
        return fetched


class LocalRoller:
    """Tokenizes and pads prompts, calls the maker, checks the experience. Its samples depend on the position alone.

    Attributes:
        on_prompts: Called with the prompts of each rollout before it begins, for messages that name them.
        last_place: File and line of the last prompt of the newest rollout.
        lengths: Maximum tokens of a row, a prompt and a response.
    """

    on_prompts: Callable[[Sequence[Prompt]], None] = staticmethod(lambda prompts: None)

    def __init__(
        self,
        maker: Maker,
        source: PromptSource,
        tokenizer: Any,
        weights: ModelWeights,
        *,
        seed: int,
        lengths: Lengths,
        vocabulary: int,
        template: str,
        generate_kwargs: Mapping[str, Any],
        vision: VisionPrompts | None = None,
        log_texts: bool = False,
    ) -> None:
        """Take over the prompts.

        Args:
            maker: Makes experience of prompts.
            source: The prompts; closed with the roller.
            tokenizer: The actor's.
            weights: Those that the maker computes with.
            seed: Of the run.
            lengths: Maximum tokens of a row, a prompt and a response.
            vocabulary: Tokens of the model; ids are below it.
            template: As in `pipeline.prompts.render`.
            generate_kwargs: Passed to the maker with each batch.
            vision: Renders prompts with images; None for a model of text alone.
            log_texts: Whether the log may quote prompts.
        """
        self._vision = vision
        self._log_texts = log_texts
        self._maker = maker
        self._source = source
        self._tokenizer = tokenizer
        self._weights = weights
        self._seed = seed
        self.lengths = lengths
        self._vocabulary = vocabulary
        self._template = template
        self._generate_kwargs = dict(generate_kwargs)
        self.last_place = ""

    def roll(self, position: int, prompts: int, *, response_tokens: int | None = None) -> Rolled:
        """Roll out the prompts at ``position ... position + prompts - 1``.

        A prompt that leaves no room for a response, that the chat template refuses, or one of whose images cannot be
        read, is set aside and logged.

        Args:
            position: The first prompt's.
            prompts: How many.
            response_tokens: Most tokens of a response; None: only `max_length` bounds it.

        Raises:
            RewardError: If a reward is not a finite number, or the reward function raised.
            ConfigError: If a prompt has images and the model takes text alone, or is chat messages and there is no
                template for them.
        """
        refused: PromptError | None = None
        kept: list[tuple[Prompt, RenderedPrompt]] = []
        for place in range(position, position + prompts):
            prompt = self._source.at(place)
            try:
                kept.append((prompt, self._render(prompt)))
            except PromptError as error:
                # A new error: the frames of the one raised refer to the arena, and the result is kept.
                refused = PromptError(str(error), bare=error.bare)
                log.warning("prompt set aside: position=%d line=%d reason=%s",
                            place, prompt.line, error.told(texts=self._log_texts))  # fmt: skip
        if not kept:
            return Rolled(None, prompts, refused)
        self.last_place = kept[-1][0].place
        self.on_prompts([prompt for prompt, _ in kept])
        input_ids, mask = self._pad([rendered.ids for _, rendered in kept])
        room = self._columns(input_ids.shape[1]) - input_ids.shape[1]
        experience = self._maker.make_experience(
            input_ids,
            mask,
            gt_answer=[prompt.answer for prompt, _ in kept],
            max_length=input_ids.shape[1] + min(room, response_tokens or room),
            seed=seed_of(self._seed, position),
            **self._generate_kwargs,
            **(_vision_keywords(kept) if self._vision else {}),
        )
        fault = find_fault(experience, vocabulary=self._vocabulary, pad_token_id=self._tokenizer.pad_token_id)
        if fault is not None:
            return Rolled(experience, prompts - len(kept), refused, fault)
        answers = [prompt.answer for prompt, _ in kept]
        return Rolled(experience, prompts - len(kept), refused, None, self._stopped(experience), answers)

    def fetch(self, source: WeightsSource) -> WeightsVersion:
        """Replace the weights by the newest version; see `ModelWeights.fetch`."""
        return self._weights.fetch(source)

    def close(self) -> None:
        """Close the prompts."""
        self._source.close()

    def _render(self, prompt: Prompt) -> RenderedPrompt:
        template: Any = self._template
        if self._vision is not None:
            rendered = self._vision.render(prompt, template)
        elif prompt.images:
            raise ConfigError(f"{prompt.named} has images, but model.actor takes text alone")
        else:
            rendered = RenderedPrompt(render(prompt, self._tokenizer, template))
        if len(rendered.ids) > self.lengths.prompt:
            row, longest, response = self.lengths
            problem = f"leave no room for a response: rollout.max_length is {row}"
            if response is not None:
                problem = f"are too many: prompts have at most {longest} (rollout.max_prompt_length)"
            raise PromptError(f"{len(rendered.ids)} tokens {problem}")
        return rendered

    def _columns(self, prompt_columns: int) -> int:
        """Return the columns of prompt and response: a response never gets the room that shorter prompts leave."""
        response = self.lengths.response
        return self.lengths.row if response is None else prompt_columns + response

    def _stopped(self, experience: Experience) -> torch.Tensor:
        """Return ``(B,)`` bool: the response is shorter than the room for it, or ends with eos."""
        assert experience.action_mask is not None
        lengths, columns = experience.action_mask.sum(dim=1), experience.action_mask.shape[1]
        if (eos := self._tokenizer.eos_token_id) is None:
            return lengths < columns
        return torch.logical_or(lengths < columns, experience.sequences[:, -1] == eos)

    def _pad(self, rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(len(ids) for ids in rows)
        input_ids = torch.full((len(rows), width), self._tokenizer.pad_token_id, dtype=torch.int64)
        mask = torch.zeros((len(rows), width), dtype=torch.int64)
        for row, ids in enumerate(rows):
            input_ids[row, width - len(ids) :] = torch.tensor(ids)
            mask[row, width - len(ids) :] = 1
        # On the CPU: the maker copies each mini-batch to the device of its model.
        return input_ids, mask


def _vision_keywords(kept: list[tuple[Prompt, RenderedPrompt]]) -> dict[str, Any]:
    """Return pixels of all prompts end to end, images per prompt, and their paths, for files are not stored."""
    keywords: dict[str, Any] = {
        name: torch.cat(parts)
        for name in ("pixel_values", "image_grid_thws")
        if (parts := [rendered.vision[name] for _, rendered in kept if rendered.vision])
    }
    return {
        **keywords,
        "image_num": torch.tensor([len(prompt.images) for prompt, _ in kept], dtype=torch.float32),
        "raw_images": [list(prompt.images) or None for prompt, _ in kept],
    }


def seed_of(run_seed: int, position: int) -> int:
    """Return the sampling seed of the ticket that starts at a prompt position; it is the same on any worker."""
    return xxhash.xxh3_64_intdigest(f"{run_seed}:{position}".encode()) >> 1


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


def _of_actor(targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("actor."): tensor for name, tensor in targets.items() if name.startswith("actor.")}
