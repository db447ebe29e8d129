"""From prompts to experience: sample responses, score them, and compute the training fields of PPO or GRPO.

`NaiveExperienceMaker` keeps coati's signature. Actor, critic, reward model and initial model may be any objects that
implement the calls named in its docstring.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from pipeline.errors import ConfigError, FieldError, ShapeError
from pipeline.experience.advantage_estimators import AdvantageInputs
from pipeline.experience.advantages import (
    SCORE_CLIP,
    action_rewards,
    coati_action_rewards,
    coati_kl,
    generalized_advantages,
    k3_kl,
    placed_scores,
)
from pipeline.experience.ragged import RaggedRows
from pipeline.experience.types import Experience
from pipeline.experience.vision_rows import VisionRows, take_vision
from pipeline.models.flat_rows import Index
from pipeline.models.inputs import eval_mode, is_transformers_model
from pipeline.models.lora import without_adapters
from pipeline.models.pass_size import RowBound
from pipeline.models.vision_inputs import check_prompt_images, vision_backbone
from pipeline.progress import Telemetry
from pipeline.rollout.generation.blocking import BlockingEngine
from pipeline.rollout.generation.hf_generate import ActorGenerator
from pipeline.rollout.generation.interface import ResponseGenerator, Sampling
from pipeline.rollout.generation.transformers import TransformersGenerator, can_replace_generate
from pipeline.rollout.model_passes import ModelPasses
from pipeline.rollout.prompt_batch import PromptBatch, read_sampling, sample_all
from pipeline.rollout.reward.row_rewards import RowRewards
from pipeline.rollout.rows import Rows, check_prompts, check_tokens, rows_with_reward
from pipeline.rollout.shaping import Shaping

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ExperienceMaker(ABC):
    """Base class of makers: holds the four models that make experience.

    Args:
        actor: The trained model; samples responses.
        critic: Estimates values; None if the algorithm has no critic.
        reward_model: Scores responses.
        initial_model: The reference model of the KL term.
    """

    def __init__(self, actor: Any, critic: Any, reward_model: Any, initial_model: Any) -> None:
        self.actor = actor
        self.critic = critic
        self.reward_model = reward_model
        self.initial_model = initial_model

    @abstractmethod
    def make_experience(self, input_ids: Tensor, attention_mask: Tensor, **generate_kwargs: Any) -> Experience:
        """Return the experience of prompts; see `NaiveExperienceMaker.make_experience`."""


class NaiveExperienceMaker(ExperienceMaker):
    """Makes experience for PPO (GAE over a critic's values) or GRPO (rewards normalized within a prompt's group).

    Args:
        actor: ``actor.generate(input_ids=, attention_mask=, max_length=, ...)`` -> ``(B, T)`` ids that continue the
            prompts, and ``actor(input_ids=, attention_mask=, ...)`` with ``.logits``. A transformers model that keeps
            the library's ``generate`` is sampled by `TransformersGenerator` instead: the same tokens, faster.
        critic: ``critic(input_ids=, attention_mask=)`` -> ``(B, S)`` values of right-padded rows. PPO requires a
            critic; with GRPO it must be None.
        reward_model: ``reward_model(input_ids=, attention_mask=, response_start=, response_end=, gt_answer=)`` ->
            ``(B,)`` scores of right-padded rows; `response_end` is exclusive and the stop is included. Pixels are
            passed only if its signature names them (`pipeline.rollout.reward.functions.vision_keywords`).
        initial_model: The reference model, called as the actor for ``.logits``; None only if `kl_coef` is 0. If it is
            the actor itself, it is called without its LoRA adapters.
        tokenizer: The tokenizer whose pad and eos token ids are used; eos replaces a missing pad.
        kl_coef: Weight of the KL term in the reward.
        gamma: Discount of GAE.
        lam: Lambda of GAE.
        use_grpo: GRPO instead of PPO.
        num_generation: Responses of each prompt (G), at least 2, contiguous; GRPO only.
        inference_batch_size: Most rows at once in generation, reward model and critic; None: all, cut by `pass_size`.
        logits_forward_batch_size: Most rows of a mini-batch of log-probs, values or scores of a model; None for
            `inference_batch_size`.
        logits_forward_tokens: Most tokens of such a mini-batch; None: as many as `pass_size` says, or without bound
            where rows are bounded.
        compat: "coati" for the value position, the reward placement and the per-action kl of the original, to
            reproduce its runs: values are the last A columns of the right-padded rows, the score is added to every
            action, and kl is exp(k) - 1 - k. None for the correct formulas.
        temperature: Temperature of sampling and of all log-probs, unless a call of `make_experience` passes one.
        generator: An engine that samples in place of the actor; None to sample with the actor.
        reuse_sampling_log_probs: Take `action_log_probs` from the engine if it returns them, which saves a forward
            pass of the actor. In float32 they differ from the trainer's by rounding alone (mostly 1e-6); in bfloat16
            by more. For this reason the default computes them again, with the function that the trainer uses.
        drop_errored: Leave out rows whose score is not a finite number, with GRPO their whole group, in place of
            refusing the whole batch: an errored reward is not reward 0. The batch is still refused if no row is left.
        refuse_not_finite: Refuse log-probs and values that are not finite numbers. With False the caller has to check
            the experience, as the insert gate does (`pipeline.rollout.insert_gate`).
        width_multiple: Multiple to which the widths of forward passes are rounded up, in tokens; None: 64 on a GPU,
            else 1.
        shaping: Rewards, advantages and further fields of a configuration; the default is GRPO's and PPO's own.
        seed: Seed of the calls of `make_experience` that pass none; None for a seed from the operating system.
        telemetry: Told of each token and mini-batch, of the activities "generate", "reward", "logprob", "ref_logprob"
            and "value", and of calls that run out of the device's memory.

    Raises:
        FieldError: If an argument is invalid, or one that the algorithm requires is missing.

    Examples:
        PPO, and GRPO with 8 responses of each prompt, over small untrained models:

        >>> from types import SimpleNamespace
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from pipeline import Critic, FunctionReward
        >>> config = GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=1, bos_token_id=None, eos_token_id=1)
        >>> actor, reference = GPT2LMHeadModel(config).eval(), GPT2LMHeadModel(config).eval()
        >>> tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=1)
        >>> def length(input_ids, attention_mask, *, response_start, response_end, **_):
        ...     return response_end - response_start
        >>> reward = FunctionReward([length], tokenizer)
        >>> maker = NaiveExperienceMaker(actor, Critic.from_actor(actor), reward, reference, tokenizer, kl_coef=0.01)
        >>> input_ids = torch.tensor([[0, 5, 6], [4, 5, 7]])
        >>> prompts = {"input_ids": input_ids, "attention_mask": (input_ids != 0).long()}
        >>> experience = maker.make_experience(**prompts, max_length=8, stop_token_ids=[[tokenizer.eos_token_id]])
        >>> experience.sequences.shape, experience.values.shape, experience.advantages.shape, experience.reward.shape
        (torch.Size([2, 8]), torch.Size([2, 5]), torch.Size([2, 5]), torch.Size([2]))
        >>> maker_grpo = NaiveExperienceMaker(
        ...     actor, None, reward, reference, tokenizer, use_grpo=True, num_generation=8
        ... )
        >>> experience = maker_grpo.make_experience(**prompts, max_length=8)
        >>> experience.sequences.shape, experience.values.shape, experience.advantages.shape, experience.reward.shape
        (torch.Size([16, 8]), torch.Size([16]), torch.Size([16]), torch.Size([16]))
    """

    def __init__(
        self,
        actor: Any,
        critic: Any,
        reward_model: Any,
        initial_model: Any,
        tokenizer: PreTrainedTokenizerBase | Any,
        kl_coef: float = 0.01,
        gamma: float = 1.0,
        lam: float = 0.95,
        use_grpo: bool = False,
        num_generation: int = 8,
        inference_batch_size: int | None = None,
        logits_forward_batch_size: int | None = 2,
        *,
        logits_forward_tokens: int | None = None,
        compat: Literal["coati"] | None = None,
        temperature: float = 1.0,
        generator: ResponseGenerator | None = None,
        reuse_sampling_log_probs: bool = False,
        drop_errored: bool = False,
        refuse_not_finite: bool = True,
        width_multiple: int | None = None,
        shaping: Shaping = Shaping(),  # noqa: B008 - immutable
        seed: int | None = None,
        telemetry: Telemetry = Telemetry.none(),
    ) -> None:
        super().__init__(actor, critic, reward_model, initial_model)
        if use_grpo and num_generation < 2:
            raise FieldError(f"num_generation is {num_generation}; GRPO compares at least 2 responses of a prompt")
        if use_grpo and critic is not None:
            raise FieldError(
                f"critic is a {type(critic).__name__} with use_grpo=True; GRPO compares a prompt's responses with each "
                "other and uses no critic: it must be None"
            )
        if not use_grpo and critic is None:
            raise FieldError("critic is None; PPO needs one")
        if initial_model is None and kl_coef != 0:
            raise FieldError(f"initial_model is None with kl_coef {kl_coef}; without a reference it must be 0")
        if compat not in (None, "coati"):
            raise FieldError(f'compat is {compat!r}; it must be None or "coati"')
        for name, size in (("inference", inference_batch_size), ("logits_forward", logits_forward_batch_size)):
            if size is not None and size < 1:
                raise FieldError(f"{name}_batch_size is {size}; it must be at least 1")
        self.tokenizer = tokenizer
        self.kl_coef = kl_coef
        self.gamma = gamma
        self.lam = lam
        self.use_grpo = use_grpo
        self.num_generation = num_generation
        self.inference_batch_size = inference_batch_size
        self.compat = compat
        self.temperature = temperature
        self.generator = generator
        self.reuse_sampling_log_probs = reuse_sampling_log_probs
        self.drop_errored = drop_errored
        self.width_multiple = width_multiple
        self.shaping = shaping
        self.telemetry = telemetry
        self._passes = ModelPasses(
            inference_batch_size,
            logits_forward_batch_size,
            refuse_not_finite,
            telemetry,
            width_multiple,
            logits_forward_tokens,
        )
        self._row_bound = RowBound(telemetry)
        self._seeds = torch.Generator()
        if seed is None:
            self._seeds.seed()
        else:
            self._seeds.manual_seed(seed)

    @torch.no_grad()
    def calculate_advantage(self, value: Tensor, reward: Tensor, num_actions: int) -> Tensor:
        """Return the generalized advantages of PPO.

        Args:
            value: ``(B, A)`` float32, the value of the state before each action, zero after the last one.
            reward: ``(B, A)`` float32, zero after the last action.
            num_actions: A; later columns are ignored.

        Returns:
            ``(B, A)`` float32.

        Raises:
            ShapeError: If `value` and `reward` differ in rows or columns, or `num_actions` is not within `value`'s
                columns.
        """
        if value.dim() != 2 or not 1 <= num_actions <= value.shape[1]:
            raise ShapeError(f"value has shape {tuple(value.shape)}, num_actions is {num_actions}")
        mask = torch.ones_like(value[:, :num_actions], dtype=torch.bool)
        return generalized_advantages(
            value[:, :num_actions], reward[:, :num_actions], mask, gamma=self.gamma, lam=self.lam
        )

    @torch.no_grad()
    def make_experience(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        gt_answer: Any = None,
        *,
        columns: Sequence[Mapping[str, Any]] | None = None,
        **generate_kwargs: Any,
    ) -> Experience:
        """Sample responses to prompts and return their experience.

        Args:
            input_ids: ``(prompts, P)`` int64, padded on the left.
            attention_mask: ``(prompts, P)``, 1 where the token is real.
            gt_answer: Ground truth passed to the reward model, one element a prompt; None for a list of None.
            columns: Further columns of the prompts, one element a prompt, for a reward model that names them.
            **generate_kwargs: `max_length` (required; columns of prompt and response together), `stop_token_ids` (an
                int is one stop token, a list of ints ONE stop sequence, as in coati, a list of lists are alternatives;
                None or [] ends at eos; in `rollout.stop_token_ids` of a daemon a list of ints are alternatives),
                `stop_strings` (texts of which each ends a response, as `pipeline.rollout.generation.stop_strings` says;
                in several calls a `StopStrings` saves the reading of the vocabulary), `temperature`, `top_p`, `top_k`,
                `min_p`, `do_sample` (None: the default), `seed` (sampling depends on no other state), `use_cache`,
                `eos_token_id` (default: the tokenizer's and those of the actor's `generation_config`), `pad_token_id`;
                and for a vision-language prompt, whose image tokens are in `input_ids` already, `pixel_values`,
                `image_grid_thws`, `pixel_values_videos`, `video_grid_thws`, `image_num`, `video_num` ((prompts,); if
                omitted, each prompt has one or none has any, unless grids are a list) and `raw_images`, as in
                `ExperienceVL`; grids may be named as in transformers. Other keywords are passed to
                ``actor.generate``.

        Returns:
            An `Experience` on the CPU, by the shapes of `pipeline.experience.types`, with B = prompts (x G with GRPO);
            padding, also that of the prompts, is `pad_token_id`.
            `info` has "score", the raw reward ``(B,)`` float32, with several reward functions also "reward.NAME" of
            each, before its weight, "number.LABEL.NAME" of each further number of a function, NaN where a row has none,
            and with GRPO "group_mixed" ``(B,)`` bool. An `ExperienceVL` if pixels are given or the actor is a
            vision-language model, whether or not a row has an image.

        Raises:
            ShapeError: If shapes do not agree, a prompt has no tokens, or P is not below `max_length`.
            FieldError: If prompts are not a tensor or not padded on the left, a model returns a number that is not
                finite, pixels, grids, counts and image tokens do not match, or (`TokenError`) a token is not in the
                actor's vocabulary.
            RewardError: If a score is not a finite number; with `drop_errored`, if no row is left.
        """
        check_prompts(input_ids, attention_mask)
        vision = take_vision(generate_kwargs, input_ids)
        sampling, extra = read_sampling(
            {"eos_token_id": self._ends(), **generate_kwargs},
            input_ids.shape[1],
            self.tokenizer,
            temperature=self.temperature,
            seeds=self._seeds,
        )
        input_ids, real = input_ids.cpu(), attention_mask.cpu() != 0
        self._check_tokens(input_ids[real], real.sum(dim=1).numpy())
        prompts = [ids[mask] for ids, mask in zip(input_ids, real, strict=True)]
        batch = self.begin(prompts, input_ids.shape[1], sampling, gt_answer, columns=columns, vision=vision)
        with eval_mode(self.actor), self.telemetry.activity("generate"):
            engine = BlockingEngine(self._generator(extra), most_rows=self.inference_batch_size, bound=self._row_bound)
            completed = sample_all(engine, batch.requests(itertools.count().__next__))
        made = self.finish(batch, batch.joined(completed))
        return made.in_columns(batch.prompt_columns, batch.num_actions, sampling.pad_token_id)

    def begin(
        self,
        prompts: Sequence[Tensor],
        prompt_columns: int,
        sampling: Sampling,
        gt_answer: Any = None,
        *,
        columns: Sequence[Mapping[str, Any]] | None = None,
        vision: VisionRows | None = None,
        group_size: int | None = None,
    ) -> PromptBatch:
        """Return prompts with their sampling parameters.

        A caller with an engine of its own submits the batch's requests, and passes their responses to `finish`.

        Args:
            prompts: The tokens of each prompt, ``(p,)`` int64 on the CPU.
            prompt_columns: P, at least the tokens of the longest prompt.
            sampling: The sampling parameters; a response has `max_length` - P tokens at most.
            gt_answer: As for `make_experience`.
            columns: As for `make_experience`.
            vision: Images and videos of each prompt; None if no prompt has any.
            group_size: Responses of each prompt; None: those of the algorithm. Scores alone are of any number.

        Returns:
            The batch.

        Raises:
            ShapeError: If answers or columns are not one a prompt.
            FieldError: If pixels, grids and image tokens do not match.
        """
        group_size = group_size or (self.num_generation if self.use_grpo else 1)
        answers = _repeated("gt_answer", gt_answer, len(prompts), group_size)
        row_columns = None if columns is None else _repeated("columns", columns, len(prompts), group_size)
        if (backbone := vision_backbone(self.actor)) is not None:
            vision = vision or VisionRows.none(len(prompts))
            padded = pad_sequence(list(prompts), batch_first=True)
            mask = pad_sequence([torch.ones_like(prompt) for prompt in prompts], batch_first=True)
            check_prompt_images(backbone, padded, mask, vision)
        return PromptBatch(prompts, prompt_columns, group_size, answers, vision, sampling, row_columns)

    @torch.no_grad()
    def scores(self, batch: PromptBatch, rows: Rows) -> Tensor:
        """Return the raw rewards alone, ``(B,)``, with `drop_errored` NaN where there is none; see `finish`."""
        with eval_mode(self.reward_model), self.telemetry.activity("reward"):
            return self._passes.scores(
                self.reward_model, rows, batch.answers, keep_errored=self.drop_errored, columns=batch.columns
            )

    @torch.no_grad()
    def finish(
        self, batch: PromptBatch, rows: Rows, *, on_kept: Callable[[Index], None] = lambda kept: None
    ) -> RaggedRows:
        """Return the experience of a batch and its responses: scores, log-probs, and the fields of the algorithm.

        Args:
            batch: The result of `begin`.
            rows: Its prompts with their responses (`PromptBatch.joined` or `rows`), ``prompts * G`` rows.
            on_kept: Called with the indices of the rows that are left, if some are left out.

        Returns:
            The fields of `make_experience`, without padding; with `drop_errored` without the rows left out.

        Raises:
            ShapeError: As `make_experience`.
            FieldError: As `make_experience`.
            RewardError: As `make_experience`.
        """
        self._check_tokens(rows.tokens, rows.totals)
        temperature, kept = batch.sampling.temperature, None
        with eval_mode(self.actor, self.critic, self.reward_model, self.initial_model):
            scores = self.scores(batch, rows)
            if self.drop_errored and (kept := rows_with_reward(scores, batch.group_size)) is not None:
                rows, scores = rows.rows(kept), scores[kept]
                on_kept(kept)
            log_probs = self._log_probs(rows, temperature)
            base_log_probs = None
            if self.initial_model is not None:
                with self.telemetry.activity("ref_logprob"), self._reference_weights():
                    base_log_probs = self._passes.log_probs("initial_model", self.initial_model, rows, temperature)
            log_ratios = torch.zeros(rows.action_mask.shape)
            if base_log_probs is not None and log_probs is not None:
                log_ratios = rows.columns(log_probs - base_log_probs)
            learned = (self._group_fields if self.use_grpo else self._critic_fields)(rows, scores, log_ratios)
        info = learned.pop("info") | self.shaping.marks(rows)
        if isinstance(self.reward_model, RowRewards):
            info |= self.reward_model.info(kept, has_turns=rows.turns is not None)
        if rows.vision is not None:
            info |= rows.vision.counts()
        by_columns = {name for name, values in learned.items() if values.dim() == 2}
        actions = {
            "action_log_probs": log_probs,
            "base_action_log_probs": base_log_probs,
            "behaviour_log_probs": rows.sampled_log_probs if self.shaping.keeps_engine_log_probs else None,
            "action_mask": None if rows.turns is None or not bool(rows.turns.observed.any()) else ~rows.turns.observed,
            **{name: rows.flat(values) for name, values in learned.items() if name in by_columns},
        }
        return RaggedRows.of_columns(
            rows.tokens,
            lengths=rows.totals.tolist(),
            counts=rows.lengths.tolist(),
            actions={name: values for name, values in actions.items() if values is not None},
            rows={name: values for name, values in learned.items() if name not in by_columns},
            info=info,
            vision=rows.vision,
        )

    def _check_tokens(self, tokens: Tensor, lengths: Index) -> None:
        if is_transformers_model(self.actor):
            check_tokens(tokens, lengths, self.actor.config.get_text_config().vocab_size)

    def _log_probs(self, rows: Rows, temperature: float) -> Tensor | None:
        """Return the log-probs of the policy that sampled, ``(N,)``; None if the trainer computes them."""
        if self.shaping.log_probs_by == "trainer":
            return None
        if self.reuse_sampling_log_probs and rows.sampled_log_probs is not None:
            self._passes.check_finite("generator", "log-prob", rows, rows.sampled_log_probs)
            return rows.sampled_log_probs
        if self.shaping.log_probs_by == "engine":
            raise ConfigError('rollout.log_probs: "engine" needs an engine that returns log-probs, this one has none')
        with self.telemetry.activity("logprob"):
            return self._passes.log_probs("actor", self.actor, rows, temperature)

    def _ends(self) -> list[int]:
        """Return the tokens that end a response by default: the tokenizer's eos, and those of the model's files."""
        listed = getattr(getattr(self.actor, "generation_config", None), "eos_token_id", None)
        ids = [self.tokenizer.eos_token_id, *(listed if isinstance(listed, list | tuple) else [listed])]
        return list(dict.fromkeys(token for token in ids if isinstance(token, int)))

    def _reference_weights(self) -> AbstractContextManager[None]:
        is_actor = self.initial_model is self.actor and isinstance(self.actor, nn.Module)
        return without_adapters(self.actor) if is_actor else contextlib.nullcontext()

    def _generator(self, extra: dict[str, Any]) -> ResponseGenerator:
        others = sorted(extra.keys() - {"use_cache"})
        if self.generator is not None:
            if others:
                raise FieldError(f"unknown generation keyword {others[0]}: the generator does not take it")
            return self.generator
        if not others and can_replace_generate(self.actor):
            return TransformersGenerator(self.actor, self.telemetry, width_multiple=self.width_multiple)
        return ActorGenerator(self.actor, extra, self.telemetry)

    def _critic_fields(self, rows: Rows, scores: Tensor, log_ratios: Tensor) -> dict[str, Any]:
        coati = self.compat == "coati"
        with self.telemetry.activity("value"):
            values = rows.columns(self._passes.values(self.critic, rows, coati=coati))
        scores, mask = scores.float(), rows.action_mask
        kl = self.shaping.kl_estimator(log_ratios, mask)
        of_turns = None if rows.turns is None else rows.columns(rows.turns.rewards.float())
        # The whole score is clipped, or each turn's, where it is placed; the penalty of length is no part of it.
        placed = self.shaping.scaled(placed_scores(scores, mask, of_turns))
        clipped = self.shaping.bounded(placed, coati=SCORE_CLIP)
        shaped = self.shaping.shaped(rows, clipped.sum(dim=1))
        reward_actions = coati_action_rewards
        if not coati:
            reward_actions = functools.partial(action_rewards, turn_rewards=clipped)
        rewards = reward_actions(shaped, kl, mask, self.kl_coef)
        if self.shaping.advantages is None and of_turns is not None:
            # Observations are no time steps.
            advantages = generalized_advantages(values, rewards, mask, gamma=self.gamma, lam=self.lam)
        elif self.shaping.advantages is None:
            advantages = self.calculate_advantage(values, rewards, rows.num_actions)
        else:
            whole = shaped - self.kl_coef * kl.sum(dim=1)
            inputs = AdvantageInputs(whole, 1, mask, rewards, values, self.gamma, self.lam)
            advantages = self.shaping.estimate(inputs)
        return {
            "values": values,
            "reward": scores,
            "kl": (coati_kl if coati else k3_kl)(log_ratios, rows.action_mask),
            "advantages": advantages.masked_fill(~rows.action_mask, 0.0),
            "info": {"score": scores.clone(), **self.shaping.clipped(placed)},
        }

    def _group_fields(self, rows: Rows, scores: Tensor, log_ratios: Tensor) -> dict[str, Any]:
        return self.shaping.group_fields(rows, scores, log_ratios, kl_coef=self.kl_coef, group_size=self.num_generation)


def _repeated(name: str, given: Sequence[Any] | None, prompts: int, group_size: int) -> list[Any]:
    """Return one element a row of one element a prompt, the G rows of a prompt contiguous; None: each is None.

    Raises:
        ShapeError: If there is not one element a prompt.
    """
    elements = [None] * prompts if given is None else list(given)
    if len(elements) != prompts:
        raise ShapeError(f"{name} has {len(elements)} elements, input_ids has {prompts} rows")
    return [element for element in elements for _ in range(group_size)]
