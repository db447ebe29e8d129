"""Defaults that follow from other keys, the model or the device: the values of optional keys that are left out.

The fixed defaults are those of `pipeline.config.schema`, another one for a model of its own that of
`pipeline.config.own_model`; a value that only a start finds, as it measures or loads the model, has its reason alone.
"""

from __future__ import annotations

from typing import Final

from pipeline.config.evaluation import prompts_per_ticket
from pipeline.config.losses import lacks_ratio_for_staleness, log_probs_by
from pipeline.config.own_model import Default
from pipeline.config.plan import VLLM_ROWS
from pipeline.config.schema import Config
from pipeline.config.types import BUILTIN_PREFIX

_PLACED: Final = "placed by `rlhfd plan`"
_PLANNED: Final = "chosen by `rlhfd plan`"


def derived(config: Config, *, on_cards: bool) -> dict[str, Default]:
    """Return the default in force of each key that may be left out, by ``section.key``.

    Args:
        config: The configuration.
        on_cards: Whether the run has GPUs.
    """
    return {
        **_of_models(config, on_cards=on_cards),
        "prompts.answer_column": Default(None, "answer, in the rows that have one"),
        **_of_rollouts(config, on_cards=on_cards),
        **_of_lengths(config),
        **_of_evaluation(config),
        "buffer.sample_batch_size": Default(config.sample_batch_size, f"for {config.rollout.algorithm}"),
        "buffer.row_bytes": Default(config.row_bytes, f"text of {config.lengths.row:,} tokens"),
        **_of_updates(config, on_cards=on_cards),
    }


def _of_models(config: Config, *, on_cards: bool) -> dict[str, Default]:
    model = config.model
    found: dict[str, Default] = {}
    if not on_cards and not model.actor.startswith(BUILTIN_PREFIX):
        found["model.dtype"] = Default(model.dtype, "no GPU")
    if config.reference_on is None:
        found["model.reference"] = Default(None, "not used: no KL has a weight")
    else:
        found["model.reference"] = Default(None, "the actor with its initial weights")
    is_ppo = config.rollout.algorithm == "ppo"
    critic = "the actor's backbone with a value head of zeros" if is_ppo else "not used: grpo has no critic"
    found["model.critic"] = Default(None, critic)
    if model.dtype == "float32":
        found["model.float32_logits"] = Default(None, "model.dtype is float32")
    elif config.trainer.kind == "external" or not on_cards:
        reason = "trainer.kind is external" if config.trainer.kind == "external" else "no GPU"
        found["model.float32_logits"] = Default(False, reason)
    else:
        found["model.float32_logits"] = Default(None, "measured at the start, on the GPU")
    return found


def _of_rollouts(config: Config, *, on_cards: bool) -> dict[str, Default]:
    rollout, rows = config.rollout, config.prompts_per_ticket * config.group_size
    found = {
        "rollout.devices": Default(rollout.devices, _PLACED if on_cards else "no GPU"),
        "rollout.tickets_ahead": Default(rollout.tickets_ahead, "by the engine"),
        "rollout.advantages": Default(config.advantages, f"for {rollout.algorithm}"),
        "rollout.kl_coef": Default(config.rollout_kl_coef, f"for {rollout.algorithm}"),
        "rollout.batch_size": Default(
            config.prompts_per_ticket, f"half of the {config.sample_batch_size} rows of a batch"
        ),
        "rollout.log_probs": Default(log_probs_by(config), _of_log_probs(config)),
        "rollout.engine_gap_nats": Default(
            None, "for fp8" if rollout.quantization == "fp8" else f"by the tolerance of {config.model.dtype}"
        ),
        "rollout.inference_batch_size": Default(
            None, f"{VLLM_ROWS} rows of vLLM" if rollout.engine == "vllm" else f"the {rows} rows of a ticket"
        ),
        "rollout.logits_forward_batch_size": Default(None, _rows_of_a_pass(config, on_cards=on_cards)),
        "rollout.logits_forward_tokens": Default(None, _tokens_of_a_pass(config, on_cards=on_cards)),
    }
    if rollout.engine == "vllm":
        on_a_card = "beside a trainer by the plan, else what the GPU has free"
        found["rollout.cache_bytes"] = Default(None, on_a_card if on_cards else "1 GiB: no GPU")
    if rollout.environment is not None:
        found["rollout.max_turn_tokens"] = Default(None, "the room that the row has left")
    return found


def _of_log_probs(config: Config) -> str:
    model, rollout = config.model, config.rollout
    if log_probs_by(config) == "trainer" and lacks_ratio_for_staleness(config):
        return "trainer.policy_loss reinforce with stale rows"
    return f"engine {rollout.engine} in {model.dtype}"


def _of_lengths(config: Config) -> dict[str, Default]:
    rollout, lengths = config.rollout, config.lengths
    is_embedded = config.model.actor.startswith(BUILTIN_PREFIX)
    if rollout.max_prompt_length is not None and rollout.max_new_tokens is not None:
        row = "the sum of max_prompt_length and max_new_tokens"
    else:
        row = "for the embedded run" if is_embedded else "the model's files tell no positions"
    bounded = lengths.response is not None
    return {
        "rollout.max_length": Default(lengths.row, row),
        # With max_length alone the other two bound nothing.
        "rollout.max_prompt_length": Default(
            lengths.prompt if bounded else None, "max_length less max_new_tokens" if bounded else "max_length bounds it"
        ),
        "rollout.max_new_tokens": Default(
            lengths.response,
            "max_length less max_prompt_length" if bounded else "max_length less the longest prompt of a ticket",
        ),
    }


def _of_evaluation(config: Config) -> dict[str, Default]:
    evaluation, rollout = config.evaluation, config.rollout
    if not evaluation.files:
        sampling = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens", "stop")
        keys = ("pass_k", "pass_function", *sampling, "batch_size")
        return {f"evaluation.{key}": Default(None, "no evaluation: evaluation.files is empty") for key in keys}
    return {
        "evaluation.pass_k": Default(evaluation.num_generations, "evaluation.num_generations"),
        "evaluation.pass_function": Default(None, "the whole reward"),
        "evaluation.temperature": Default(rollout.temperature, "rollout.temperature"),
        "evaluation.top_p": Default(rollout.top_p, "rollout.top_p"),
        "evaluation.top_k": Default(rollout.top_k, "rollout.top_k"),
        "evaluation.min_p": Default(rollout.min_p, "rollout.min_p"),
        "evaluation.max_new_tokens": Default(config.lengths.response, "as in the rollouts"),
        "evaluation.stop": Default(rollout.stop, "rollout.stop"),
        "evaluation.batch_size": Default(prompts_per_ticket(config), "as many rows as a ticket of rollouts"),
    }


def _of_updates(config: Config, *, on_cards: bool) -> dict[str, Default]:
    trainer = config.trainer
    found = {"trainer.kl_coef": Default(config.trainer_kl_coef, f"for {config.rollout.algorithm}")}
    if trainer.kind == "external":
        return found
    if config.rollout.quantization != "none":
        found["trainer.importance_correction"] = Default(
            trainer.importance_correction, "needed by rollout.quantization"
        )
    has_clips = trainer.policy_loss != "reinforce"
    found["trainer.devices"] = Default(trainer.devices, _PLACED if on_cards else "no GPU")
    found |= {
        f"trainer.{key}": Default(trainer.clip_range if has_clips else None, "trainer.clip_range")
        for key in ("clip_low", "clip_high")
    }
    if trainer.loss_aggregation == "dr_grpo":
        tokens = config.lengths.response or config.lengths.row
        found["trainer.dr_grpo_tokens"] = Default(tokens, "the longest response")
    by_tokens = trainer.micro_batch_tokens is not None or on_cards
    found["trainer.micro_batch_size"] = Default(
        None, "trainer.micro_batch_tokens takes its place" if by_tokens else "by the size of the model: no GPU"
    )
    found["trainer.micro_batch_tokens"] = Default(None, _PLANNED if on_cards else "no GPU")
    found["trainer.activation_checkpointing"] = Default(None, _PLANNED if on_cards else "false: no GPU")
    found["trainer.packing"] = Default(None, "where the models' attention has a kernel for it, told at the start")
    found["trainer.shared_prefix"] = Default(
        None, "false, on a GPU" if on_cards else "true where it saves 15 % and the models can: no GPU"
    )
    return found


def _rows_of_a_pass(config: Config, *, on_cards: bool) -> str:
    if config.rollout.inference_batch_size is not None:
        return "rollout.inference_batch_size"
    by_tokens = config.rollout.logits_forward_tokens is not None or on_cards
    return "rollout.logits_forward_tokens takes its place" if by_tokens else "by the size of the model: no GPU"


def _tokens_of_a_pass(config: Config, *, on_cards: bool) -> str:
    if config.rollout.logits_forward_batch_size is not None:
        return "rollout.logits_forward_batch_size is set"
    if config.rollout.inference_batch_size is not None:
        return "rollout.inference_batch_size is set"
    return _PLANNED if on_cards else "no GPU"
