"""From prompts to experience: sample responses, score them, and compute the training fields of PPO or GRPO.

`NaiveExperienceMaker` keeps coati's signature. Actor, critic, reward model and initial model may be any objects that
implement the calls named in its docstring.
"""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from pipeline.errors import FieldError, RewardError, ShapeError
from pipeline.experience.advantages import (
    action_rewards,
    coati_action_rewards,
    coati_kl,
    generalized_advantages,
    group_advantages,
    group_mixed,
    k3_kl,
    kl_rewards,
)
from pipeline.experience.types import Experience, ExperienceVL
from pipeline.experience.vision_rows import VisionRows, take_vision
from pipeline.models.inputs import is_transformers_model
from pipeline.models.lora import without_adapters
from pipeline.models.pass_size import PassSize, RowBound
from pipeline.models.vision_inputs import check_prompt_images, vision_backbone
from pipeline.rollout.generation.hf_generate import ActorGenerator
from pipeline.rollout.generation.interface import ResponseGenerator, Sampling
from pipeline.rollout.generation.stops import parse_stop_token_ids
from pipeline.rollout.generation.transformers import TransformersGenerator, can_replace_generate
from pipeline.rollout.model_passes import ModelPasses
from pipeline.rollout.progress import with_numbers
from pipeline.rollout.rows import Rows, check_prompts, check_tokens

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
        tokenizer: Its pad and eos token ids are used; eos replaces a missing pad.
        kl_coef: Weight of the KL term in the reward.
        gamma: Discount of GAE.
        lam: Lambda of GAE.
        use_grpo: GRPO instead of PPO.
        num_generation: Responses of each prompt (G), at least 2, contiguous; GRPO only.
        inference_batch_size: Most rows at once in generation, reward model and critic; None: all, cut by `pass_size`.
        logits_forward_batch_size: Most rows of a mini-batch of log-probs or values; None for
            `inference_batch_size`.
        compat: "coati" for the value position, the reward placement and the per-action kl of the original, to
            reproduce its runs: values are the last A columns of the right-padded rows, the score is added to every
            action, and kl is exp(k) - 1 - k. None for the correct formulas.
        temperature: Of sampling and of all log-probs, unless a call of `make_experience` passes one.
        generator: An engine that samples in place of the actor; None to sample with the actor.
        reuse_sampling_log_probs: Take `action_log_probs` from the engine if it returns them, which saves a forward
            pass of the actor. In float32 they differ from the trainer's by rounding alone (mostly 1e-6); in bfloat16
            by more. For this reason the default computes them again, with the function that the trainer uses.
        drop_errored: Leave out rows whose score is not a finite number, with GRPO their whole group, in place of
            refusing the whole batch: an errored reward is not reward 0. The batch is still refused if no row is left.
        refuse_not_finite: Refuse log-probs and values that are not finite numbers. With False the caller has to check
            the experience, as the insert gate does (`pipeline.rollout.insert_gate`).
        seed: Seed of the calls of `make_experience` that pass none; None for a seed from the operating system.
        stage: Called with the name of each stage, "generate", "reward", "logprob", "ref_logprob" or "value"; the
            returned context manager is entered around the stage.
        on_progress: Called once a token or mini-batch, with the keywords of `ReportsProgress` that its signature has.
        on_out_of_memory: Called with "generate" or "pass" when one runs out of the device's memory and is halved.

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
        compat: Literal["coati"] | None = None,
        temperature: float = 1.0,
        generator: ResponseGenerator | None = None,
        reuse_sampling_log_probs: bool = False,
        drop_errored: bool = False,
        refuse_not_finite: bool = True,
        seed: int | None = None,
        stage: Callable[[str], AbstractContextManager[None]] = lambda name: contextlib.nullcontext(),
        on_progress: Callable[..., None] = lambda: None,
        on_out_of_memory: Callable[[str], None] = lambda during: None,
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
        self.logits_forward_batch_size = logits_forward_batch_size
        self.compat = compat
        self.temperature = temperature
        self.generator = generator
        self.reuse_sampling_log_probs = reuse_sampling_log_probs
        self.drop_errored = drop_errored
        self.refuse_not_finite = refuse_not_finite
        self._stage = stage
        self._on_progress = on_progress
        self._on_out_of_memory = on_out_of_memory
        self._sizes: WeakKeyDictionary[nn.Module, PassSize] = WeakKeyDictionary()
        self._row_bound = RowBound("rollout.inference_batch_size", functools.partial(on_out_of_memory, "generate"))
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
        self, input_ids: Tensor, attention_mask: Tensor, gt_answer: Any = None, **generate_kwargs: Any
    ) -> Experience:
        """Sample responses to prompts and return their experience.

        Args:
            input_ids: ``(prompts, P)`` int64, padded on the left.
            attention_mask: ``(prompts, P)``, 1 where the token is real.
            gt_answer: Ground truth passed to the reward model, one element a prompt; None for a list of None.
            **generate_kwargs: `max_length` (required; columns of prompt and response together), `stop_token_ids` (an
                int is one stop token, a list of ints ONE stop sequence, a list of lists are alternatives; None or []
                ends at eos), `temperature`, `top_p`, `top_k`, `do_sample`, `seed` (sampling depends on no other state),
                `use_cache`, `eos_token_id`, `pad_token_id`; and for a vision-language prompt, whose image tokens are
                in `input_ids` already, `pixel_values`, `image_grid_thws`, `pixel_values_videos`, `video_grid_thws`,
                `image_num`, `video_num` ((prompts,); if omitted, each prompt has one or none has any, unless grids are
                a list) and `raw_images`, as in `ExperienceVL`; grids may be named as in transformers. Other keywords
                are passed to ``actor.generate``.

        Returns:
            An `Experience` on the CPU, by the shapes of `pipeline.experience.types`, with B = prompts (x G with GRPO).
            `info` has "score", the raw reward ``(B,)`` float32, and with GRPO "group_mixed" ``(B,)`` bool. An
            `ExperienceVL` if pixels are given or the actor is a vision-language model, whether or not a row has an
            image.

        Raises:
            ShapeError: If shapes do not agree, a prompt has no tokens, or P is not below `max_length`.
            FieldError: If prompts are not a tensor or not padded on the left, a model returns a number that is not
                finite, pixels, grids, counts and image tokens do not match, or (`TokenError`) a token is not in the
                actor's vocabulary.
            RewardError: If a score is not a finite number; with `drop_errored`, if no row is left.
        """
        check_prompts(input_ids, attention_mask)
        input_ids, attention_mask = input_ids.cpu(), attention_mask.cpu()
        group_size = self.num_generation if self.use_grpo else 1
        answers = _repeat_answers(gt_answer, len(input_ids), group_size)
        vision = take_vision(generate_kwargs, input_ids)
        if (backbone := vision_backbone(self.actor)) is not None:
            vision = vision or VisionRows.none(len(input_ids))
            check_prompt_images(backbone, input_ids, attention_mask, vision)
        sampling, extra = self._read(generate_kwargs, input_ids.shape[1])
        with _eval_mode(self.actor, self.critic, self.reward_model, self.initial_model):
            with self._stage("generate"):
                rows, sampled_log_probs = self._sample(input_ids, attention_mask, group_size, sampling, extra, vision)
            with self._stage("reward"):
                scores = self._passes.scores(self.reward_model, rows, answers, keep_errored=self.drop_errored)
            if self.drop_errored and (kept := self._without_errored(scores)) is not None:
                rows, scores = rows.rows(kept), scores[kept]
                sampled_log_probs = None if sampled_log_probs is None else sampled_log_probs[kept]
            if self.reuse_sampling_log_probs and sampled_log_probs is not None:
                log_probs = sampled_log_probs
                self._passes.check_finite("generator", "log-prob", log_probs)
            else:
                with self._stage("logprob"):
                    log_probs = self._passes.log_probs("actor", self.actor, rows, sampling.temperature)
            base_log_probs = None
            if self.initial_model is not None:
                with self._stage("ref_logprob"), self._reference_weights():
                    base_log_probs = self._passes.log_probs(
                        "initial_model", self.initial_model, rows, sampling.temperature
                    )
            log_ratios = torch.zeros_like(log_probs) if base_log_probs is None else log_probs - base_log_probs
            learned = (self._group_fields if self.use_grpo else self._critic_fields)(rows, scores, log_ratios)
        fields = {
            "sequences": rows.sequences,
            "action_log_probs": log_probs,
            "attention_mask": rows.attention_mask,
            "action_mask": rows.action_mask,
            "base_action_log_probs": base_log_probs,
            **learned,
        }
        if rows.vision is None:
            return Experience(**fields)
        fields["info"] |= rows.vision.counts()
        return ExperienceVL(**fields, **rows.vision.fields())

    @property
    def _passes(self) -> ModelPasses:
        return ModelPasses(
            self.inference_batch_size,
            self.logits_forward_batch_size,
            self.refuse_not_finite,
            with_numbers(self._on_progress),
            functools.partial(self._on_out_of_memory, "pass"),
            self._sizes,
        )

    def _reference_weights(self) -> AbstractContextManager[None]:
        is_actor = self.initial_model is self.actor and isinstance(self.actor, nn.Module)
        return without_adapters(self.actor) if is_actor else contextlib.nullcontext()

    def _read(self, generate_kwargs: dict[str, Any], prompt_width: int) -> tuple[Sampling, dict[str, Any]]:
        """Return the sampling parameters, and the keywords that only the actor takes."""
        keywords = dict(generate_kwargs)
        max_length = keywords.pop("max_length", None)
        if max_length is None:
            raise FieldError("max_length is missing: columns of prompt and response together")
        if prompt_width >= max_length:
            raise ShapeError(f"prompts are {prompt_width} columns wide; max_length {max_length} leaves no response")
        eos = keywords.pop("eos_token_id", self.tokenizer.eos_token_id)
        eos_token_ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
        pad = keywords.pop("pad_token_id", self.tokenizer.pad_token_id)
        if pad is None:
            pad = eos_token_ids[0] if eos_token_ids else 0
        seed = keywords.pop("seed", None)
        if seed is None:
            seed = int(torch.randint(2**62, (), generator=self._seeds))
        sampling = Sampling(
            max_length=max_length,
            pad_token_id=pad,
            eos_token_ids=eos_token_ids,
            stop_sequences=parse_stop_token_ids(keywords.pop("stop_token_ids", None)),
            temperature=keywords.pop("temperature", self.temperature),
            top_p=keywords.pop("top_p", 1.0),
            top_k=keywords.pop("top_k", 0),
            do_sample=keywords.pop("do_sample", True),
            seed=seed,
        )
        return sampling, keywords

    def _engine(self, extra: dict[str, Any]) -> ResponseGenerator:
        others = sorted(extra.keys() - {"use_cache"})
        if self.generator is not None:
            if others:
                raise FieldError(f"unknown generation keyword {others[0]}: the generator does not take it")
            return self.generator
        if not others and can_replace_generate(self.actor):
            return TransformersGenerator(self.actor, self._on_progress)
        return ActorGenerator(self.actor, extra, self._on_progress)

    def _sample(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        group_size: int,
        sampling: Sampling,
        extra: dict[str, Any],
        vision: VisionRows | None,
    ) -> tuple[Rows, Tensor | None]:
        # Passed only if there are images: an engine for text alone need not take the argument.
        images = {"vision": vision} if vision is not None and vision.tensors_exist else {}
        engine = self._engine(extra)
        responses = self._row_bound.run(
            len(input_ids) * group_size,
            self.inference_batch_size,
            lambda rows: engine.generate(
                input_ids, attention_mask, sampling, group_size=group_size, batch_rows=rows, **images
            ),
        )
        if is_transformers_model(self.actor):
            check_tokens(responses.sequences, self.actor.config.get_text_config().vocab_size)
        rows = Rows.of(
            attention_mask.repeat_interleave(group_size, dim=0),
            responses,
            sampling,
            vision=None if vision is None else vision.repeated(group_size),
        )
        return rows, responses.log_probs

    def _without_errored(self, scores: Tensor) -> Tensor | None:
        """Return the rows to keep, ``(rows,)`` int64; None for all of them."""
        good = torch.isfinite(scores)
        if bool(good.all()):
            return None
        if self.use_grpo:
            good = good.reshape(-1, self.num_generation).all(dim=1).repeat_interleave(self.num_generation)
        if not bool(good.any()):
            errored = int((~torch.isfinite(scores)).sum())
            raise RewardError(f"{errored} of {len(scores)} rows have no reward, and no row is left")
        return good.nonzero().squeeze(1)

    def _critic_fields(self, rows: Rows, scores: Tensor, log_ratios: Tensor) -> dict[str, Any]:
        coati = self.compat == "coati"
        with self._stage("value"):
            values = self._passes.values(self.critic, rows, coati=coati)
        reward_actions = coati_action_rewards if coati else action_rewards
        rewards = reward_actions(scores, log_ratios, rows.action_mask, self.kl_coef)
        advantages = self.calculate_advantage(values, rewards, rows.num_actions)
        return {
            "values": values,
            "reward": scores,
            "kl": (coati_kl if coati else k3_kl)(log_ratios, rows.action_mask),
            "advantages": advantages.masked_fill(~rows.action_mask, 0.0),
            "info": {"score": scores.clone()},
        }

    def _group_fields(self, rows: Rows, scores: Tensor, log_ratios: Tensor) -> dict[str, Any]:
        kl = kl_rewards(log_ratios, rows.action_mask, self.kl_coef)
        rewards = scores + kl
        return {
            "values": rewards.clone(),
            "reward": rewards,
            "kl": kl,
            "advantages": group_advantages(rewards, self.num_generation),
            "info": {"score": scores, "group_mixed": group_mixed(scores, self.num_generation)},
        }


def _repeat_answers(gt_answer: Any, prompts: int, group_size: int) -> list[Any]:
    answers = [None] * prompts if gt_answer is None else list(gt_answer)
    if len(answers) != prompts:
        raise ShapeError(f"gt_answer has {len(answers)} elements, input_ids has {prompts} rows")
    return [answer for answer in answers for _ in range(group_size)]


@contextlib.contextmanager
def _eval_mode(*models: Any) -> Iterator[None]:
    """Switch dropout off; on exit, restore it in the modules that were in training mode."""
    modules = [module for model in models if isinstance(model, nn.Module) for module in model.modules()]
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
