"""A rollout worker: takes a ticket, rolls its prompts out with the newest weights, seals the experience."""

from __future__ import annotations

import dataclasses
import logging
import os
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash

from pipeline import codec
from pipeline.arena import Arena
from pipeline.codec_bounds import extent_bytes_bound
from pipeline.errors import (
    ArenaFullError,
    ConfigError,
    FieldError,
    MistrustedError,
    PromptError,
    RewardError,
    ShapeError,
    TokenError,
)
from pipeline.experience import Experience
from pipeline.generation import ResponseGenerator
from pipeline.insert_gate import Fault, find_fault
from pipeline.messages import (
    Drain,
    Failed,
    FaultReason,
    Faulty,
    Hello,
    Message,
    Sealed,
    Settled,
    Ticket,
    Wait,
    WantTickets,
    Welcome,
)
from pipeline.prompts import Prompt, PromptSource, render
from pipeline.rollout_metrics import RolloutMetrics
from pipeline.rollout_samples import RolloutSamples
from pipeline.transport import Sender, worker_name
from pipeline.vision_prompts import RenderedPrompt, VisionPrompts
from pipeline.weights import WeightsReader
from pipeline.weights_header import WeightsVersion

TICKETS_AHEAD = 2
_TRIED_PROMPTS = 64
_TRIED_ROLLOUTS = 3

log = logging.getLogger(__name__)


class Maker(Protocol):
    """What a rollout needs of an experience maker (`NaiveExperienceMaker`)."""

    def make_experience(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, gt_answer: Any = None, **generate_kwargs: Any
    ) -> Experience:
        """Return the experience of a left-padded batch of prompts."""


@dataclasses.dataclass(frozen=True)
class Rolled:
    """What came of a ticket: experience of the prompts that could be rolled out (None if none could).

    `stopped` is ``(B,)`` bool: whether the response ended by itself. `answers` has the right one of each prompt.
    `refused` tells why the last prompt that could not be rolled out was set aside, `fault` why the experience must not
    be sealed.
    """

    experience: Experience | None
    prompts_failed: int
    refused: PromptError | None = None
    fault: Fault | None = None
    stopped: torch.Tensor | None = None
    answers: Sequence[Any] = ()


class Roller:
    """Prompts in, experience out: tokenizes, pads, calls the maker. What it samples depends on the position alone."""

    def __init__(
        self,
        maker: Maker,
        source: PromptSource,
        tokenizer: Any,
        *,
        seed: int,
        max_length: int,
        vocabulary: int,
        template: str,
        generate_kwargs: Mapping[str, Any],
        device: torch.device,
        vision: VisionPrompts | None = None,
        log_texts: bool = False,
    ) -> None:
        self._vision = vision
        self._log_texts = log_texts
        self._maker = maker
        self._source = source
        self._tokenizer = tokenizer
        self._seed = seed
        self._max_length = max_length
        self._vocabulary = vocabulary
        self._template = template
        self._generate_kwargs = dict(generate_kwargs)
        self._device = device

    def roll(self, position: int, prompts: int) -> Rolled:
        """Roll out the prompts at ``position ... position + prompts - 1``.

        A prompt that leaves no room for a response, that the chat template refuses, or one of whose images cannot be
        read, is set aside and logged.

        Raises:
            RewardError: If a reward is no finite number, or the reward function raised.
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
                # Another one: what is kept must not hold this one's frames, and by them the arena.
                refused = PromptError(str(error), bare=error.bare)
                log.warning("prompt set aside: position=%d line=%d reason=%s",
                            place, prompt.index + 1, error.told(texts=self._log_texts))  # fmt: skip
        if not kept:
            return Rolled(None, prompts, refused)
        input_ids, mask = self._pad([rendered.ids for _, rendered in kept])
        experience = self._maker.make_experience(
            input_ids,
            mask,
            gt_answer=[prompt.answer for prompt, _ in kept],
            max_length=self._max_length,
            seed=seed_of(self._seed, position),
            **self._generate_kwargs,
            **(_vision_keywords(kept) if self._vision else {}),
        )
        fault = find_fault(experience, vocabulary=self._vocabulary, pad_token_id=self._tokenizer.pad_token_id)
        if fault is not None:
            return Rolled(experience, prompts - len(kept), refused, fault)
        answers = [prompt.answer for prompt, _ in kept]
        return Rolled(experience, prompts - len(kept), refused, None, self._stopped(experience), answers)

    def _render(self, prompt: Prompt) -> RenderedPrompt:
        template: Any = self._template
        if self._vision is not None:
            rendered = self._vision.render(prompt, template)
        elif prompt.images:
            raise ConfigError(f"prompt {prompt.index} has images, but model.actor takes text alone")
        else:
            rendered = RenderedPrompt(render(prompt, self._tokenizer, template))
        if len(rendered.ids) >= self._max_length:
            raise PromptError(
                f"{len(rendered.ids)} tokens leave no room for a response: rollout.max_length is {self._max_length}"
            )
        return rendered

    def _stopped(self, experience: Experience) -> torch.Tensor:
        """A response that leaves room stopped by itself; one that fills it did if it ends with eos."""
        assert experience.action_mask is not None
        lengths, columns = experience.action_mask.sum(dim=1), experience.action_mask.shape[1]
        ends_with_eos = experience.sequences[:, -1] == self._tokenizer.eos_token_id
        return torch.logical_or(lengths < columns, ends_with_eos)

    def _pad(self, rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(len(ids) for ids in rows)
        input_ids = torch.full((len(rows), width), self._tokenizer.pad_token_id, dtype=torch.int64)
        mask = torch.zeros((len(rows), width), dtype=torch.int64)
        for row, ids in enumerate(rows):
            input_ids[row, width - len(ids) :] = torch.tensor(ids)
            mask[row, width - len(ids) :] = 1
        return input_ids.to(self._device), mask.to(self._device)


def _vision_keywords(kept: list[tuple[Prompt, RenderedPrompt]]) -> dict[str, Any]:
    """Pixels of all prompts end to end, how many images each has, and their paths: pixels travel, files do not."""
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
    """Return the sampling seed of the ticket that starts at a prompt position: the same on any worker."""
    return xxhash.xxh3_64_intdigest(f"{run_seed}:{position}".encode()) >> 1


class RolloutWorker:
    """The worker's decisions: which ticket next, with which weights, and what to tell the buffer."""

    def __init__(
        self,
        roller: Roller,
        arena: Arena,
        weights_path: Path,
        targets: Mapping[str, torch.Tensor],
        sender: Sender,
        metrics: RolloutMetrics,
        *,
        index: int,
        clock: Callable[[], float],
        group_size: int = 1,
        checksum: bool = True,
        initial_version: int = -1,
        engine: ResponseGenerator | None = None,
        check: Callable[[WeightsVersion], None] = lambda fetched: None,
        log_texts: bool = False,
        samples: RolloutSamples | None = None,
    ) -> None:
        """Introduce this worker to the buffer.

        Args:
            roller: Makes experience of prompts.
            arena: Mapped with its payload.
            weights_path: File of the published weights; it appears with the first publish.
            targets: The tensors that published weights are copied into, by published name.
            sender: To the buffer.
            metrics: Where the work is counted.
            index: This worker's number.
            clock: Monotonic seconds.
            group_size: Responses of a prompt (G).
            checksum: Whether sealed extents carry one.
            initial_version: The version of the weights as loaded; -1 if only published ones count.
            engine: What generates; it is paused while weights are copied, and told of them. None where nobody need be.
            check: Called with each version fetched; raises MistrustedError if the model does not compute with it.
            log_texts: Whether reasons may quote prompts, responses and answers.
            samples: Keeps some rollouts for people to read.
        """
        self.draining = False
        self.held = WeightsVersion(initial_version, 0)
        self._roller = roller
        self._arena = arena
        self._weights_path = weights_path
        self._targets = targets
        self._sender = sender
        self._metrics = metrics
        self._name = worker_name(index)
        self._clock = clock
        self._group_size = group_size
        self._checksum = checksum
        self._engine = engine
        self._check = check
        self._log_texts = log_texts
        self._samples = samples
        self._reader: WeightsReader | None = None
        self._incarnation = random.getrandbits(62)
        self._buffer_incarnation: int | None = None
        self._tickets: list[Ticket] = []
        self._unsettled: dict[int, Message] = {}
        sender.send(self._hello())

    @property
    def idle(self) -> bool:
        """Whether there is no ticket to work on."""
        return not self._tickets

    @property
    def finished(self) -> bool:
        """Whether a drain is complete: nothing in hand, nothing the buffer does not know of."""
        return self.draining and not self._tickets and not self._unsettled

    def handle(self, message: Message) -> None:
        """Take note of what the buffer says."""
        match message:
            case Welcome(incarnation=incarnation) if incarnation != self._buffer_incarnation:
                self._meet(incarnation)
            case Ticket(to=self._incarnation):
                if message.ticket not in self._unsettled and all(t.ticket != message.ticket for t in self._tickets):
                    self._tickets.append(message)
            case Settled(to=self._incarnation, ticket=ticket):
                self._unsettled.pop(ticket, None)
            case Wait(to=self._incarnation, reason=reason):
                self._metrics.wait_for(reason)
            case Drain():
                self.draining = True

    def step(self) -> None:
        """Work on the oldest ticket in hand."""
        ticket = self._tickets[0]
        self._metrics.in_flight(len(self._tickets))
        self._metrics.work_on(ticket.ticket, ticket.deadline_s)
        outcome = self._work(ticket)
        self._metrics.work_on()
        self._tickets.pop(0)
        self._unsettled[ticket.ticket] = outcome
        self._sender.send(outcome)
        self._metrics.in_flight(len(self._tickets))

    def close(self) -> None:
        """Unmap the weights."""
        if self._reader is not None:
            self._reader.close()
        if self._samples is not None:
            self._samples.close()

    def _hello(self) -> Hello:
        held = [*self._unsettled, *(ticket.ticket for ticket in self._tickets)]
        return Hello(self._name, self._incarnation, held, pid=os.getpid())

    def _meet(self, incarnation: int) -> None:
        if self._buffer_incarnation is not None:
            # Tickets of the dead one that are still unread are void: it is told of those in hand, and gives the others,
            # with their room, to whoever comes.
            self._incarnation = random.getrandbits(62)
        self._buffer_incarnation = incarnation
        self._sender.send(self._hello())
        for message in self._unsettled.values():
            self._sender.send(message)
        self._sender.send(WantTickets(self._name, self._incarnation, TICKETS_AHEAD))

    def _work(self, ticket: Ticket) -> Message:
        if self._must_fetch(ticket):
            self._fetch()
        if self._samples is not None:
            self._samples.begin()
        try:
            rolled = self._roller.roll(ticket.position, ticket.prompts)
            if rolled.experience is None:
                return self._failed(ticket, "all its prompts were set aside", retry=False)
            if self._clock() > ticket.deadline_s:
                return self._failed(ticket, "deadline passed", retry=True)
            if rolled.fault is not None:
                return self._faulty(ticket, rolled.fault, rolled.experience)
            return self._seal(ticket, rolled)
        except (FieldError, ShapeError) as error:
            return self._faulty(ticket, Fault(_reason_of(error), error.told(texts=self._log_texts)), None)
        except (RewardError, ArenaFullError) as error:
            # The rollout itself is unusable: the same prompts would give the same again.
            # As text: a kept record must not hold the error's frames, and by them the arena.
            reason = error.told(texts=self._log_texts)
            log.error("rollout failed: ticket=%d position=%d reason=%s", ticket.ticket, ticket.position, reason)
            return self._failed(ticket, reason, retry=False)

    def _seal(self, ticket: Ticket, rolled: Rolled) -> Sealed:
        experience = rolled.experience
        assert experience is not None
        with self._metrics.activity("seal"):
            encoded = self._encode(ticket, experience)
        assert rolled.stopped is not None
        self._metrics.rolled(
            experience,
            prompts=ticket.prompts,
            prompts_failed=rolled.prompts_failed,
            group_size=self._group_size,
            stopped=rolled.stopped,
        )
        if self._samples is not None:
            self._samples.keep(
                experience, rolled.stopped, rolled.answers,
                ticket=ticket.ticket, position=ticket.position, version=self.held.version,
            )  # fmt: skip
        return Sealed(
            self._name, ticket.ticket, len(experience.sequences), encoded.nbytes, encoded.checksum,
            self.held.version, self.held.fingerprint, rolled.prompts_failed,
        )  # fmt: skip

    def _faulty(self, ticket: Ticket, fault: Fault, experience: Experience | None) -> Faulty:
        """Say what is wrong with a rollout; what there is of it goes into the extent, for the quarantine."""
        log.error("rollout refused: ticket=%d position=%d reason=%s detail=%s",
                  ticket.ticket, ticket.position, fault.reason, fault.detail)  # fmt: skip
        self._metrics.failed(prompts=ticket.prompts, group_size=self._group_size, retried=False)
        rows, encoded = 0, codec.Encoded(0, 0)
        # Fields whose lengths disagree have no place in an extent.
        if experience is not None and fault.reason != "lengths":
            try:
                encoded, rows = self._encode(ticket, experience), len(experience.sequences)
            except (FieldError, ShapeError, ArenaFullError) as error:
                log.warning("rollout refused without a copy: ticket=%d reason=%s", ticket.ticket, str(error))
        return Faulty(
            self._name, ticket.ticket, fault.reason, fault.detail, rows, encoded.nbytes, encoded.checksum,
            self.held.version, self.held.fingerprint,
        )  # fmt: skip

    def _encode(self, ticket: Ticket, experience: Experience) -> codec.Encoded:
        return codec.encode(experience, self._arena.extent(ticket.offset, ticket.nbytes), checksum=self._checksum)

    def _failed(self, ticket: Ticket, reason: str, *, retry: bool) -> Failed:
        self._metrics.failed(prompts=ticket.prompts, group_size=self._group_size, retried=retry)
        return Failed(self._name, ticket.ticket, reason, retry)

    def _must_fetch(self, ticket: Ticket) -> bool:
        """Whether the weights in hand are not those that the ticket is for, or were rolled back."""
        if self._reader is None and self._weights_path.exists():
            self._reader = WeightsReader(self._weights_path)
        newest = None if self._reader is None else self._reader.newest()
        if newest is None or newest == self.held:
            return False
        return ticket.policy_version != self.held.version or newest.history != self.held.history

    def _fetch(self) -> None:
        assert self._reader is not None
        with self._metrics.activity("fetch_weights"):
            started_s = self._clock()
            if self._engine is not None:
                self._engine.pause()
            self.held = self._reader.fetch(self._targets)
            if self._engine is not None:
                self._engine.update_weights(_of_actor(self._targets))
                self._engine.resume()
            try:
                self._check(self.held)
            except MistrustedError:
                self._metrics.mistrusted()
                raise
            self._metrics.fetched(self.held.version, self._reader.nbytes, self._clock() - started_s)


def _reason_of(error: FieldError | ShapeError) -> FaultReason:
    """Return what a rollout counts as that its maker refused: there is nothing of it that could be kept."""
    if isinstance(error, TokenError):
        return "vocabulary"
    return "lengths" if isinstance(error, ShapeError) else "malformed"


def _of_actor(targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("actor."): tensor for name, tensor in targets.items() if name.startswith("actor.")}


def refuse_broken_reward(roller: Roller, row_bytes: int) -> None:
    """Roll prompts out before the first ticket, so that a broken reward or model ends the start and not the night.

    Args:
        roller: The worker's.
        row_bytes: Room that is reserved for a row; pixels may be larger.

    Raises:
        ConfigError: If none of the first prompts can be rolled out, or rows of the first usable one do not fit into
            `row_bytes`.
        RewardError: If none of the first usable prompts gets a reward.
        FieldError: If none of their rollouts passes the insert gate.
        RlhfdError: Whatever else the rollout of a usable prompt raises.
    """
    refused: list[RewardError | FieldError] = []
    set_aside: PromptError | None = None
    for position in range(_TRIED_PROMPTS):
        try:
            rolled = roller.roll(position, 1)
            if rolled.fault is not None:
                raise FieldError(f"a rollout before the first ticket is refused: {rolled.fault.detail}")
        except (RewardError, FieldError) as error:
            # One prompt may fail; where the first few do all will.
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
            codec.encode(experience, memoryview(bytearray(room)), checksum=False)
        except ArenaFullError as error:
            raise ConfigError(f"buffer.row_bytes: {error}") from error
        return
    if refused:
        raise refused[0]
    assert set_aside is not None
    told = f"prompts.path: none of the first {_TRIED_PROMPTS} prompts can be rolled out, the last one:"
    raise ConfigError(f"{told} {set_aside}", bare=f"{told} {set_aside.bare}")
