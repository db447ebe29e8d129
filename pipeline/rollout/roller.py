"""Rollers: prompts in, experience out."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import xxhash

from pipeline.config.lengths import Lengths
from pipeline.config.user_modules import PROMPT
from pipeline.errors import ConfigError, PromptError
from pipeline.experience.extent_format import Array
from pipeline.experience.ragged import RaggedRows
from pipeline.models.flat_rows import Index
from pipeline.progress import Telemetry
from pipeline.prompts.rendering import Rendering, Template, render
from pipeline.prompts.source import PromptSource
from pipeline.prompts.types import Prompt
from pipeline.rollout.environment.turns import Turns, TurnSettings, sample_turns
from pipeline.rollout.generation.interface import Completed, Engine, Sampling
from pipeline.rollout.generation.weights import WeightsSource, WorkerWeights
from pipeline.rollout.insert_gate import Fault, find_fault
from pipeline.rollout.prompt_batch import PromptBatch, sample_all, tokens_of
from pipeline.rollout.reward.row_rewards import RowRewards
from pipeline.rollout.vision_prompts import RenderedPrompt, VisionPrompts, vision_rows_of
from pipeline.storage.weights_header import WeightsVersion
from pipeline.telemetry.evaluations import PromptResult

if TYPE_CHECKING:
    from pipeline.rollout.maker import NaiveExperienceMaker

log = logging.getLogger(__name__)


class RolledPrompt(NamedTuple):
    """A prompt that was rolled out.

    Attributes:
        position: Position of the prompt.
        answer: The right answer.
    """

    position: int
    answer: Any


@dataclasses.dataclass(frozen=True)
class Rolled:
    """The result of a rollout.

    Attributes:
        rows: Experience of the prompts that could be rolled out; None if none could.
        prompts_failed: Prompts set aside.
        refused: Why the last prompt set aside could not be rolled out.
        fault: Why the experience must not be sealed.
        prompts: The prompt of each group of `rows`.
        versions: Weights that the responses were sampled with, oldest first; empty if all are those held by the
            caller.
        results: Results of held-out prompts, which have no experience.
        prompts_cut: Prompts rolled out that lost their first tokens.
    """

    rows: RaggedRows | None
    prompts_failed: int
    refused: PromptError | None = None
    fault: Fault | None = None
    prompts: Sequence[RolledPrompt] = ()
    versions: tuple[int, ...] = ()
    results: tuple[PromptResult, ...] = ()
    prompts_cut: int = 0

    @property
    def stopped(self) -> Array:
        """``(B,)`` bool, whether each response ended by itself, or by its environment."""
        assert self.rows is not None
        return ~self.rows.columns["info.cut"]


@dataclasses.dataclass(frozen=True)
class Begun:
    """Prompts that are ready to be sampled.

    Attributes:
        kept: The prompts that can be rolled out.
        prompts: All prompts, those set aside included.
        refused: Why the last prompt set aside could not be rolled out.
        position: Position of the first prompt, those set aside included.
        response_tokens: Most tokens of a response; None: only the row's length bounds it.
    """

    kept: list[tuple[Prompt, RenderedPrompt]]
    prompts: int
    refused: PromptError | None
    position: int
    response_tokens: int | None = None


@dataclasses.dataclass(eq=False, repr=False)
class LocalRoller:
    """Renders prompts, calls engine and maker, checks the experience; samples depend on the position alone.

    `roll` does all of it. `pipeline.rollout.ticket_stream` has several rollouts in hand: it calls `begin`, has the
    prompts sampled by the engine, and calls `finish`.

    Attributes:
        maker: Makes experience of prompts.
        source: The prompts; closed with the roller.
        tokenizer: The actor's.
        weights: The weights that the maker uses.
        seed: Seed of the run.
        lengths: Maximum tokens of a row, a prompt and a response.
        vocabulary: Tokens of the model; ids are below it.
        template: As in `pipeline.prompts.rendering.render`.
        sampling: Sampling parameters of the longest row; a batch has its own `max_length` and `seed`.
        vision: Renders prompts with images; None for a model of text alone.
        turns: Turns of rows in an environment, closed with the engine; None: a row is one response.
        group_size: Responses of a prompt (G); None: the maker's.
        cuts_prompts: Whether a prompt of text that is too long loses its first tokens; else it is set aside.
        evaluations: The rollers of the held-out files, which share parts of this one, and are closed with it.
        telemetry: Told of the engine's activity and of the tokens of each `roll`; says whether the log may quote
            prompts.
        last_location: File and line of the last prompt of the newest rollout.
    """

    maker: NaiveExperienceMaker
    source: PromptSource
    tokenizer: Any
    weights: WorkerWeights
    _: dataclasses.KW_ONLY
    seed: int
    lengths: Lengths
    vocabulary: int
    template: Template | Rendering
    sampling: Sampling
    vision: VisionPrompts | None = None
    turns: TurnSettings | None = None
    group_size: int | None = None
    cuts_prompts: bool = False
    evaluations: Sequence[LocalRoller] = ()
    telemetry: Telemetry = Telemetry.none()
    last_location: str = dataclasses.field(default="", init=False)
    _has_told_cut: bool = dataclasses.field(default=False, init=False)

    def of(self, evaluation: int) -> LocalRoller:
        """Return the roller of a held-out file, or this one for -1."""
        return self if evaluation < 0 else self.evaluations[evaluation]

    def roll(self, position: int, prompts: int, *, response_tokens: int | None = None) -> Rolled:
        """Roll out the prompts at ``position ... position + prompts - 1``.

        A prompt that leaves no room for a response, that the chat template refuses, or one of whose images cannot be
        read, is set aside and logged.

        Args:
            position: The first prompt's.
            prompts: Number of prompts.
            response_tokens: Most tokens of a response; None: only `max_length` bounds it.

        Raises:
            RewardError: If a reward is not a finite number, or the reward function raised.
            ConfigError: If a prompt has images and the model takes text alone, or is chat messages and there is no
                template for them.
        """
        begun = self.begin(position, prompts, response_tokens=response_tokens)
        if not begun.kept:
            return Rolled(None, prompts, begun.refused)
        batch = self.batch_of(begun)
        with self.telemetry.activity("generate"):
            if (turns := self.turns_of(begun, batch, itertools.count().__next__)) is not None:
                turns.clear_problem()
                completed = sample_turns(self.engine, turns, self.telemetry.sampled)
            else:
                completed = sample_all(self.engine, batch.requests(itertools.count().__next__))
                self.telemetry.sampled(tokens_of(completed))
        return self.finish(begun, batch, completed)

    def has_images(self, position: int) -> bool:
        """Return whether the prompt at a position has images."""
        return bool(self.source.at(position).images)

    @property
    def engine(self) -> Engine:
        """The engine that samples the prompts."""
        return self.weights.engine

    def begin(self, position: int, prompts: int, *, response_tokens: int | None = None) -> Begun:
        """Render prompts; arguments and errors as for `roll`."""
        refused: PromptError | None = None
        kept: list[tuple[Prompt, RenderedPrompt]] = []
        for each in range(position, position + prompts):
            prompt = self.source.at(each)
            try:
                ids_and_pixels = rendered(
                    prompt, self.tokenizer, self.template, self.lengths, self.vision, cuts_prompts=self.cuts_prompts
                )
                kept.append((prompt, ids_and_pixels))
            except PromptError as error:
                # A new error: the frames of the one raised refer to the arena, and the result is kept.
                refused = PromptError(str(error), bare=error.bare)
                log.warning("prompt set aside: position=%d line=%d reason=%s",
                            each, prompt.line, error.told(texts=self.telemetry.log_texts))  # fmt: skip
        return Begun(kept, prompts, refused, position, response_tokens)

    def batch_of(self, begun: Begun) -> PromptBatch:
        """Return prompts with their sampling parameters, for the engine.

        Raises:
            FieldError: If the maker refuses them; also ShapeError.
        """
        # On the CPU: the maker copies each mini-batch to the device of its model.
        prompts = [torch.tensor(rendered.ids, dtype=torch.int64) for _, rendered in begun.kept]
        prompt_columns = max(map(len, prompts))
        # A response never gets the room that shorter prompts leave.
        room = self.lengths.row - prompt_columns if self.lengths.response is None else self.lengths.response
        max_length = prompt_columns + min(room, begun.response_tokens or room)
        columns = [{**prompt.columns, PROMPT: prompt.prompt} for prompt, _ in begun.kept]
        return self.maker.begin(
            prompts,
            prompt_columns,
            dataclasses.replace(self.sampling, max_length=max_length, seed=seed_of(self.seed, begun.position)),
            [prompt.answer for prompt, _ in begun.kept],
            columns=columns,
            vision=vision_rows_of(begun.kept) if self.vision else None,
            group_size=self.group_size,
        )

    def turns_of(self, begun: Begun, batch: PromptBatch, new_key: Callable[[], int]) -> Turns | None:
        """Return the turns of prompts in their environments; None: they have one response each."""
        if self.turns is None:
            return None
        return Turns(self.turns, batch, [prompt for prompt, _ in begun.kept], self.tokenizer, new_key)

    def finish(self, begun: Begun, batch: PromptBatch, completed: Sequence[Completed]) -> Rolled:
        """Score the responses of prompts, and check the experience; errors as for `roll`.

        Args:
            begun: The prompts.
            batch: Batch of these prompts.
            completed: One element a prompt, in order.
        """
        self._announce(begun, batch.group_size)
        indices = list(range(len(begun.kept)))

        def keep(rows: Index) -> None:
            # Whole groups are left out.
            indices[:] = (rows[:: batch.group_size] // batch.group_size).tolist()

        rows = self.maker.finish(batch, batch.joined(completed), on_kept=keep)
        kept = (begun.kept[index][0] for index in indices)
        return Rolled(
            rows,
            begun.prompts - len(begun.kept),
            begun.refused,
            find_fault(rows, vocabulary=self.vocabulary, has_observations=self.turns is not None),
            [RolledPrompt(prompt.position, prompt.answer) for prompt in kept],
            versions_of(completed),
            prompts_cut=sum(found.cut > 0 for _, found in begun.kept),
        )

    def _announce(self, begun: Begun, group_size: int) -> None:
        """Tell the reward of the prompts, and once the log of the first prompt that lost its first tokens."""
        self.last_location = begun.kept[-1][0].location
        cut = next(((prompt, found.cut) for prompt, found in begun.kept if found.cut), None)
        if cut is not None and not self._has_told_cut:
            self._has_told_cut = True
            log.warning("a prompt is cut from the left, rlhfd_prompts_cut_total counts them: position=%d line=%d "
                        "tokens=%d of %d", cut[0].position, cut[0].line, self.lengths.prompt,
                        self.lengths.prompt + cut[1])  # fmt: skip
        if isinstance(self.maker.reward_model, RowRewards):
            self.maker.reward_model.begin([prompt for prompt, _ in begun.kept], group_size)

    def fetch(self, source: WeightsSource) -> WeightsVersion:
        """Replace the weights by the newest version; see `ModelWeights.fetch`."""
        return self.weights.fetch(source)

    def close(self) -> None:
        """Close the prompts and the engine."""
        self.source.close()
        for held_out in self.evaluations:
            held_out.close()
        self.engine.close()
        if self.turns is not None:
            self.turns.pool.close()


def versions_of(completed: Sequence[Completed]) -> tuple[int, ...]:
    """Return the versions that responses were sampled with, oldest first."""
    return tuple(sorted({span.version for done in completed for each in done.responses for span in each.spans}))


def rendered(
    prompt: Prompt,
    tokenizer: Any,
    template: Template | Rendering,
    lengths: Lengths,
    vision: VisionPrompts | None,
    *,
    cuts_prompts: bool = False,
) -> RenderedPrompt:
    """Return the tokens and pixels of a prompt.

    Args:
        prompt: The prompt.
        tokenizer: The actor's.
        template: The use of the chat template.
        lengths: The lengths in force.
        vision: The images of a vision-language model; None for a model of text alone.
        cuts_prompts: Whether a prompt of text that is too long loses its first tokens.

    Raises:
        PromptError: If the prompt cannot be rendered, or leaves no room for a response.
        ConfigError: If no prompt of its kind can be rendered.
    """
    if vision is not None:
        found = vision.render(prompt, template)
    elif prompt.images:
        raise ConfigError(f"{prompt.named} has images, but model.actor takes text alone")
    else:
        found = RenderedPrompt(render(prompt, tokenizer, template))
    if len(found.ids) > lengths.prompt and cuts_prompts and not found.vision:
        return RenderedPrompt(found.ids[-lengths.prompt :], cut=len(found.ids) - lengths.prompt)
    if len(found.ids) > lengths.prompt:
        row, longest, response = lengths
        problem = f"leave no room for a response: rollout.max_length is {row}"
        if response is not None:
            problem = f"are too many: prompts have at most {longest} (rollout.max_prompt_length)"
        raise PromptError(f"{len(found.ids)} tokens {problem}")
    return found


def seed_of(run_seed: int, position: int) -> int:
    """Return the sampling seed of the ticket that starts at a prompt position; it is the same on any worker."""
    return xxhash.xxh3_64_intdigest(f"{run_seed}:{position}".encode()) >> 1
