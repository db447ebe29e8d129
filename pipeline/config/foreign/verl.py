"""The options of verl's PPO trainer (`verl.trainer.main_ppo`), as Hydra overrides name them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any, Final

from pipeline.config.foreign.option import (
    Given,
    NotCarriedError,
    Option,
    Trainer,
    by_value,
    carried,
    data_path,
    estimator,
    generations,
    is_ppo,
    missing,
    needless,
    of_ppo,
    only_if,
    passes,
    positive,
    trackers,
    unless_true,
    warmup_share,
    warmup_steps,
)

_A, _R, _C, _M = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "critic.", "actor_rollout_ref.model."
_OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg."
_WARMUP = (f"{_A}optim.lr_warmup_steps", f"{_A}optim.lr_warmup_steps_ratio")
_ESTIMATORS = {"grpo": "grpo", "grpo_vectorized": "grpo", "rloo": "rloo", "rloo_vectorized": "rloo",
               "reinforce_plus_plus_baseline": "reinforce_baseline"}  # fmt: skip
_AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "dr_grpo",
}
_KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def _mini_batches(value: Any, given: Given) -> dict[str, Any]:
    found, rest = divmod(given.count("data.train_batch_size"), given.count(f"{_A}ppo_mini_batch_size"))
    if rest or not found:
        raise NotCarriedError("must divide data.train_batch_size: trainer.mini_batches counts updates of equal size")
    return {"trainer.mini_batches": found}


def _aggregation(value: Any, given: Given) -> dict[str, Any]:
    if value not in _AGGREGATIONS:
        raise NotCarriedError(f"the modes that are here too are {', '.join(_AGGREGATIONS)}")
    found: dict[str, Any] = {"trainer.loss_aggregation": _AGGREGATIONS[value]}
    if value == "seq-mean-token-sum-norm":
        found["trainer.dr_grpo_tokens"] = given[f"{_A}loss_scale_factor"] or given["data.max_response_length"]
    return found


def _clip(value: Any, given: Given) -> dict[str, Any]:
    """Return the common range of the ratio, which verl reads where both of its own bounds are null alone."""
    low, high = f"{_A}clip_ratio_low", f"{_A}clip_ratio_high"
    if any(given[name] is not None for name in (low, high)) and value != given[low]:
        raise NotCarriedError(
            "it has no effect in verl, whose clip_ratio_low and clip_ratio_high are 0.2 unless set: set trainer.clip_range to want it"
        )
    return {"trainer.clip_range": value}


def _kl_in_reward(value: Any, given: Given) -> dict[str, Any]:
    if not given["algorithm.use_kl_in_reward"]:
        return {"rollout.kl_coef": 0.0}
    if given["algorithm.kl_ctrl.type"] == "adaptive":
        raise NotCarriedError("rollout.kl_coef is constant; trainer.kl_coef_target adapts the weight in the loss")
    return {"rollout.kl_coef": given["algorithm.kl_ctrl.kl_coef"]}


def _estimates(option: str, key: str) -> Any:
    def convert(value: Any, given: Given) -> dict[str, Any]:
        if not given[option]:
            return {}
        if value not in _KL:
            raise NotCarriedError(f"the estimators that are here too are {', '.join(_KL)}")
        return {key: _KL[value]}

    return convert


def _schedule(value: Any, given: Given) -> dict[str, Any]:
    if value == "constant":
        return {"trainer.decay_steps": 0}
    if value != "cosine":
        raise NotCarriedError("the learning rate is constant or falls by a cosine, after a warm-up")
    if "trainer.total_training_steps" not in given:
        raise NotCarriedError("a cosine needs its number of steps, trainer.total_training_steps in the same file")
    return {
        "trainer.schedule": "cosine",
        "trainer.decay_steps": given.count("trainer.total_training_steps"),
        "trainer.final_learning_rate_ratio": float(given.number(f"{_A}optim.min_lr_ratio")),
    }


def _floor(value: Any, given: Given) -> dict[str, Any]:
    # A part of the schedule, which writes its key; the option has no effect in verl without a cosine.
    if given[f"{_A}optim.lr_scheduler_type"] == "cosine" and "trainer.total_training_steps" not in given:
        raise NotCarriedError("the end of a cosine, which needs trainer.total_training_steps in the same file")
    return {}


def _epochs(value: Any, given: Given) -> dict[str, Any]:
    # The first of both ends a run of verl, too; its default is no wish of the file.
    if "trainer.total_training_steps" in given and "trainer.total_epochs" not in given:
        return {}
    files = given["data.train_files"]
    return passes(value, "trainer.total_epochs", {} if files is None else _files(files, given))


def _files(value: Any, given: Given) -> dict[str, Any]:
    files = [str(one) for one in (value if isinstance(value, list) else [value])]
    if len(files) == 1:
        return {"prompts.path": data_path(files[0])}
    return {"prompts.sources": [{"path": data_path(one)} for one in files]}


def _held_out(value: Any, given: Given) -> dict[str, Any]:
    if given.number("trainer.test_freq") <= 0:
        return {}
    return {"evaluation.files": [str(one) for one in (value if isinstance(value, list) else [value])]}


def _of_evaluation(key: str) -> Any:
    return only_if(lambda given: "data.val_files" in given and given.number("trainer.test_freq") > 0, key)


def _greedy(value: Any, given: Given) -> dict[str, Any]:
    """Return the temperature of the evaluation: verl takes the most likely token unless do_sample is set."""
    if "data.val_files" not in given or given.number("trainer.test_freq") <= 0:
        return {}
    samples = given[f"{_R}val_kwargs.do_sample"]
    return {"evaluation.temperature": given[f"{_R}val_kwargs.temperature"] if samples else 0.0}


def _sampled(name: str) -> Any:
    """Return the conversion of a filter of the evaluation's tokens: verl's default is none, here the rollouts'."""

    def convert(value: Any, given: Given) -> dict[str, Any]:
        if f"{_R}val_kwargs.{name}" not in given and value == given[f"{_R}{name}"]:
            return {}
        return dict(_of_evaluation(f"evaluation.{name}")(max(0, value) if name == "top_k" else value, given))

    return convert


def _reward(value: Any, given: Given) -> dict[str, Any]:
    name = given["reward.custom_reward_function.name"] or "compute_score"
    return {"rewards": [{"name": f"{PurePosixPath(str(value)).stem}:{name}"}]}


def _overlong(value: Any, given: Given) -> dict[str, Any]:
    if not value:
        return {}
    found = {"rollout.overlong_buffer_tokens": given[f"{_OVERLONG}len"]}
    if f"{_OVERLONG}penalty_factor" in given:
        found["rollout.overlong_penalty"] = given[f"{_OVERLONG}penalty_factor"]
    return found


def _refill(value: Any, given: Given) -> dict[str, Any]:
    if not given["algorithm.filter_groups.enable"]:
        return {}
    most = int(given.number("algorithm.filter_groups.max_num_gen_batches"))
    if most == 1:
        raise NotCarriedError("with one batch no prompt comes in the place of another, and its groups stay as they are")
    return {"rollout.max_refill": most - 1 if most > 1 else 1000}


def _correction(value: Any, given: Given) -> dict[str, Any]:
    if given["algorithm.rollout_correction.bypass_mode"]:
        return {}
    found = {None: "none", "token": "token", "sequence": "sequence"}.get(value)
    if found is None:
        raise NotCarriedError("must be token or sequence")
    if isinstance(given["algorithm.rollout_correction.rollout_is_threshold"], str):
        # Two bounds leave weights out; where they are not carried no weight is cut in their place.
        found = "none"
    return {"trainer.importance_correction": found}


def _cap(value: Any, given: Given) -> dict[str, Any]:
    if "algorithm.rollout_correction.rollout_is" not in given or given["algorithm.rollout_correction.bypass_mode"]:
        return {}
    if not isinstance(value, str):
        return {"trainer.importance_cap": value}
    low, _, high = value.partition("_")
    if given["algorithm.rollout_correction.rollout_is"] != "token" or not high or float(low) != 0.5:
        raise NotCarriedError(
            "two bounds are those of icepop, of tokens and with 0.5 below: no weight is cut in their place"
        )
    return {"trainer.importance_correction": "icepop", "trainer.importance_cap": float(high)}


def _former_cap(value: Any, given: Given) -> dict[str, Any]:
    if not value or value <= 0:
        return {}
    return {"trainer.importance_correction": "token", "trainer.importance_cap": value}


def _responses_of_evaluation(value: Any, given: Given) -> dict[str, Any]:
    found = dict(_of_evaluation("evaluation.num_generations")(value, given))
    if found and value != 1 and not _greedy(value, given)["evaluation.temperature"]:
        raise NotCarriedError(
            "without val_kwargs.do_sample and a temperature the responses to a prompt are equal: one is sampled"
        )
    return found


def _as_the_actor(name: str) -> Callable[[Any, Given], bool]:
    """Return whether an option of the critic, which is that of the actor in verl if left out, changes nothing."""
    return lambda value, given: not is_ppo(given) or value == given[f"{_A}{name}"]


def _truncation(value: Any, given: Given) -> dict[str, Any]:
    if value in ("right", "middle"):
        raise NotCarriedError("a prompt is cut from the left, or set aside and counted")
    # A filter leaves none of them to be cut.
    return {"rollout.long_prompts": "cut_left"} if value == "left" and not given["data.filter_overlong_prompts"] else {}


def _no_tools(value: Any) -> dict[str, Any]:
    raise NotCarriedError(
        "the functions of prompts.tools_file are a JSON list; their calls are an environment's, rollout.environment"
    )


_FSDP = ("param_offload", "optimizer_offload", "grad_offload", "offload_policy", "reshard_after_forward", "fsdp_size",
         "forward_prefetch", "wrap_policy", "wrap_policy.min_num_params", "model_dtype", "use_orig_params")  # fmt: skip
_OF_CRITIC = {
    f"{_C}{name}": value
    for name, value in {
        "optim.optimizer": "AdamW", "optim.lr_warmup_steps": -1, "optim.lr_warmup_steps_ratio": 0.0,
        "optim.total_training_steps": -1, "optim.weight_decay": 0.01, "optim.betas": [0.9, 0.999],
        "optim.clip_grad": 1.0, "optim.min_lr_ratio": 0.0, "optim.num_cycles": 0.5,
        "optim.lr_scheduler_type": "constant", "grad_clip": 1.0, "loss_agg_mode": "token-mean",
    }.items()
}  # fmt: skip
"""Defaults of verl's critic."""
_CONFIGURATIONS = ("ppo_trainer", "ppo_megatron_trainer", "ppo_veomni_trainer", "ppo_torchtitan_trainer")
_OPTIONS: Final[tuple[Option, ...]] = (
    # The data.
    carried("data.train_files", "prompts.path prompts.sources", "verl joins several files; here they are mixed by weight", to=_files),
    carried("data.val_files", "evaluation.files", "where trainer.test_freq is above 0", to=_held_out),
    carried("data.prompt_key", "prompts.prompt_column", default="prompt"),
    needless("data.reward_fn_key", "the column data_source reaches a reward function that names it"),
    carried("data.max_prompt_length", "rollout.max_prompt_length", "a longer prompt is set aside, and counted; verl's `truncation = error` ends the run", default=512, written=True, aliases="actor_rollout_ref.rollout.prompt_length"),
    carried("data.max_response_length", "rollout.max_new_tokens", default=512, written=True, aliases="actor_rollout_ref.rollout.response_length"),
    carried("data.train_batch_size", "buffer.sample_batch_size", "verl counts prompts, rlhfd rows: times rollout.n; of one rank of the trainer", default=1024, to=lambda value, given: {"buffer.sample_batch_size": given.count("data.train_batch_size") * given.count(f"{_R}n")}, written=True),
    missing("data.gen_batch_size", "rollout.max_refill issues prompts one by one in the place of those that are left out", key="rollout.max_refill"),
    missing("data.val_batch_size data.train_max_samples data.val_max_samples data.validation_shuffle", "a file is read whole; head(1) makes a shorter one", off=(-1,)),
    carried("data.shuffle", "prompts.shuffle", "each pass is shuffled anew, by daemon.seed", default=True, to=unless_true("prompts.shuffle")),
    carried("data.seed", "daemon.seed", "other random numbers than verl's"),
    needless("data.filter_overlong_prompts data.filter_overlong_prompts_workers", "a prompt beyond rollout.max_prompt_length is set aside when its turn comes; with the filter none is cut"),
    carried("data.truncation", "rollout.long_prompts", "left: cut_left; error: longer ones are set aside, and counted", default="error", to=_truncation),
    carried("data.apply_chat_template_kwargs", "prompts.template_arguments"),
    carried("data.tool_config_path", "prompts.tools_file", "a JSON list of functions, not verl's YAML", to=lambda value, given: _no_tools(value)),
    needless("data.image_key", "images are in the column images"),
    missing("data.video_key data.audio_key data.mm_processor_kwargs data.image_patch_size data.return_multi_modal_inputs data.function_tool_path", "rows have text and images (docs/images.md)", off=("videos", "audios", 14, True)),
    missing("data.custom_cls.* data.datagen.* data.tokenizer data.trust_remote_code", "rows are read from files; the tokenizer is that of model.actor"),
    needless("data.use_shm data.dataloader_num_workers data.return_raw_input_ids data.return_raw_chat data.return_full_prompt data.sampler.*", "prompts are read by position in an endless, seeded order"),
    # The models.
    carried(f"{_M}path", "model.actor", "a folder: no model is downloaded, `hf download` makes one"),
    carried(f"{_M}enable_gradient_checkpointing", "trainer.activation_checkpointing", "on a GPU where it is left out; false alone is written", default=True, to=unless_true("trainer.activation_checkpointing")),
    carried(f"{_M}use_remove_padding", "trainer.packing", "where the models can, if it is left out; false alone is written", default=True, to=unless_true("trainer.packing")),
    carried(f"{_M}lora_rank", "model.lora_rank", default=0, aliases=f"{_M}lora.rank"),
    carried(f"{_M}lora_alpha", "model.lora_alpha", default=16, aliases=f"{_M}lora.alpha",
            to=lambda value, given: {"model.lora_alpha": value} if given.number(f"{_M}lora_rank") else {}, written=True),
    carried(f"{_M}target_modules", "model.lora_targets", default="all-linear", aliases=f"{_M}lora.target_modules",
            to=lambda value, given: {"model.lora_targets": value} if given.number(f"{_M}lora_rank") else {}),
    carried(f"{_M}lora_adapter_path", "model.lora_adapter", aliases=f"{_M}lora.adapter_path"),
    missing(f"{_M}exclude_modules {_M}lora.*", "adapters are LoRA of the layers of model.lora_targets", key="model.lora_targets", unless=lambda value, given: not given[f"{_M}lora_rank"]),
    missing(f"{_M}override_config {_M}override_config.* {_M}external_lib {_M}custom_chat_template {_M}hf_config_path {_M}tokenizer_path", "a model is its folder: change the files there"),
    missing(f"{_M}mtp.*", "no further head is trained, or drafts tokens", unless=lambda value, given: not given[f"{_M}mtp.enable"]),
    needless(f"{_M}use_shm {_M}trust_remote_code {_M}enable_activation_offload {_M}use_liger {_M}use_fused_kernels {_M}fused_kernel_options.* {_M}tiled_mlp.*",
             "a pass that does not fit is halved; kernels are those of torch; code of a folder is never run"),
    # The actor.
    carried(f"{_A}ppo_mini_batch_size", "trainer.mini_batches", "verl counts the prompts of an update, rlhfd the updates: data.train_batch_size / ppo_mini_batch_size", default=256, to=_mini_batches, written=True),
    carried(f"{_A}ppo_micro_batch_size_per_gpu", "trainer.micro_batch_size", to=lambda value, given: {} if given[f"{_A}use_dynamic_bsz"] else {"trainer.micro_batch_size": value}, aliases=f"{_A}ppo_micro_batch_size"),
    carried(f"{_A}use_dynamic_bsz", "trainer.micro_batch_tokens", "with ppo_max_token_len_per_gpu", default=False, to=lambda value, given: {}),
    carried(f"{_A}ppo_max_token_len_per_gpu", "trainer.micro_batch_tokens", "with use_dynamic_bsz", default=16384, to=lambda value, given: {"trainer.micro_batch_tokens": value} if given[f"{_A}use_dynamic_bsz"] else {}, written=True),
    carried(f"{_A}ppo_epochs", "trainer.epochs", default=1),
    needless(f"{_A}shuffle {_A}data_loader_seed", "the rows of an epoch are dealt to updates anew, by step and epoch"),
    carried(f"{_A}clip_ratio", "trainer.clip_range", "verl reads it where clip_ratio_low and clip_ratio_high are null alone; they are 0.2", default=0.2, to=_clip),
    carried(f"{_A}clip_ratio_low", "trainer.clip_low", default=0.2),
    carried(f"{_A}clip_ratio_high", "trainer.clip_high", default=0.2),
    carried(f"{_A}clip_ratio_c", "trainer.dual_clip", "verl has a dual clip at 3, rlhfd none", default=3.0, to=lambda value, given: {"trainer.dual_clip": value} if given[f"{_A}policy_loss.loss_mode"] == "vanilla" else {}, written=True),
    carried(f"{_A}loss_agg_mode", "trainer.loss_aggregation", "before 0.9.1 verl takes seq-mean-token-mean with gspo, whatever is set; seq-mean-token-sum and token-sum are missing", default="token-mean", to=_aggregation, written=True),
    carried(f"{_A}loss_scale_factor", "trainer.dr_grpo_tokens", "with loss_agg_mode = seq-mean-token-sum-norm", to=lambda value, given: {}),
    carried(f"{_A}policy_loss.loss_mode", "trainer.policy_loss", "vanilla: ppo, gspo, cispo; the others are missing", default="vanilla", to=by_value("trainer.policy_loss", {"vanilla": "ppo", "gspo": "gspo", "cispo": "cispo"}, otherwise="the losses that are here too are vanilla, gspo, cispo; or one of your own, trainer.policy_loss")),
    missing(" ".join(f"{_A}policy_loss.{name}" for name in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef", "dro_beta", "*")) + f" {_A}tau_pos {_A}tau_neg {_A}calculate_sum_pi_squared {_A}sum_pi_squared_checkpointing", "the losses of these options: write them as a policy loss of your own", key="trainer.policy_loss", unless=lambda value, given: given[f"{_A}policy_loss.loss_mode"] in ("vanilla", "gspo", "cispo")),
    carried(f"{_A}use_kl_loss", "trainer.kl_coef", "the weight, 0 without it", default=False, to=lambda value, given: {"trainer.kl_coef": given[f"{_A}kl_loss_coef"] if given[f"{_A}use_kl_loss"] else 0.0}, written=True),
    carried(f"{_A}kl_loss_coef", "trainer.kl_coef", "with use_kl_loss", default=0.001, to=lambda value, given: {}),
    carried(f"{_A}kl_loss_type", "trainer.kl_estimator", "with use_kl_loss; kl: k1, mse: k2, low_var_kl: k3; abs, full and forms with a + are missing", default="low_var_kl", to=_estimates(f"{_A}use_kl_loss", "trainer.kl_estimator")),
    carried(f"{_A}entropy_coeff", "trainer.entropy_coef", default=0),
    carried(f"{_A}grad_clip", "trainer.gradient_clip_norm", default=1.0, aliases=f"{_A}optim.clip_grad"),
    carried(f"{_A}optim.lr", "trainer.learning_rate", "of adapters too; here they have 1e-5", written=True, default=1e-6),
    carried(f"{_A}optim.lr_warmup_steps", "trainer.warmup_steps", "the first of n steps has 1/n of the rate, verl's 0", default=-1, to=warmup_steps(*_WARMUP, positive("trainer.warmup_steps"))),
    carried(f"{_A}optim.lr_warmup_steps_ratio", "trainer.warmup_ratio", "a share of trainer.total_training_steps", default=0.0, to=warmup_share(_WARMUP[0], "trainer.total_training_steps")),
    carried(f"{_A}optim.lr_scheduler_type", "trainer.schedule trainer.decay_steps", "a cosine needs trainer.total_training_steps", default="constant", to=_schedule, aliases=f"{_A}optim.warmup_style"),
    carried(f"{_A}optim.weight_decay", "trainer.weight_decay", default=0.01, written=True),
    carried(f"{_A}optim.betas", "trainer.betas", default=[0.9, 0.999]),
    carried(f"{_A}optim.min_lr_ratio", "trainer.final_learning_rate_ratio", "with cosine", to=_floor),
    missing(f"{_A}optim.num_cycles {_A}optim.total_training_steps {_A}optim.zero_indexed_step", "a cosine has half a cycle, over trainer.decay_steps", key="trainer.decay_steps", unless=lambda value, given: value in (-1, 0.5) or given[f"{_A}optim.lr_scheduler_type"] == "constant"),
    carried(f"{_A}optim.optimizer", "trainer.optimizer", "AdamW, or AdamW8bit of bitsandbytes.optim or torchao.optim", default="AdamW", to=by_value("trainer.optimizer", {"AdamW": "adamw", "AdamW8bit": "adamw_8bit"}, otherwise="AdamW or AdamW8bit")),
    needless(f"{_A}optim.optimizer_impl", "the optimizer follows from its name"),
    missing(f"{_A}optim.override_optimizer_config {_A}optim.override_optimizer_config.*", "the optimizers have no further options"),
    needless(" ".join(f"{_A}fsdp_config.{name}" for name in _FSDP) + f" {_A}strategy {_A}fsdp_config.* {_A}megatron.* {_A}veomni.* {_A}torchtitan.* {_A}ulysses_sequence_parallel_size {_A}router_replay.*", "trainer.sharding shards the models over trainer.world_size ranks by FSDP2; auto does where a whole model does not fit"),
    needless(f"{_A}use_torch_compile {_A}entropy_from_logits_with_chunking {_A}entropy_from_logits_chunk_size {_A}entropy_checkpointing {_A}calculate_entropy {_A}pad_to_length {_A}use_prefix_grouper {_A}use_fused_kernels {_A}use_remove_padding {_A}rollout_n {_A}load_weight",
             "a pass that does not fit is halved; the entropy is in metrics.jsonl; trainer.shared_prefix computes a prompt once"),
    needless(f"{_A}checkpoint.* critic.checkpoint.*", "a checkpoint has all of the run's state, and a folder for from_pretrained"),
    missing(f"{_A}freeze_vision_tower", "all weights are trained, or adapters"),
    missing(f"{_A}qat.*", "weights are not quantized in training", unless=lambda value, given: not given[f"{_A}qat.enable"]),
    # The reference.
    needless("actor_rollout_ref.ref.*", "model.reference_device chooses the role that computes the reference's log-probs"),
    needless("actor_rollout_ref.hybrid_engine actor_rollout_ref.nccl_timeout", "workers and trainer are processes of their own"),
    # The rollouts.
    carried(f"{_R}name", "rollout.engine", "vllm, or hf: transformers; sglang and trtllm are missing", to=by_value("rollout.engine", {"vllm": "vllm", "hf": "transformers"}, otherwise="the engines are vllm, transformers, or one of your own")),
    carried(f"{_R}n", "rollout.num_generations", default=1, to=generations, written=True),
    carried(f"{_R}temperature", "rollout.temperature", default=1.0),
    carried(f"{_R}top_p", "rollout.top_p", default=1),
    carried(f"{_R}top_k", "rollout.top_k", "-1 is 0 here", default=-1, to=positive("rollout.top_k")),
    needless(f"{_R}do_sample {_R}mode {_R}seed {_R}calculate_log_probs {_R}free_cache_engine {_R}load_format {_R}layered_summon {_R}skip_tokenizer_init {_R}disable_log_stats {_R}enable_chunked_prefill {_R}enable_prefix_caching {_R}max_num_batched_tokens {_R}max_num_seqs {_R}scheduling_policy {_R}logprobs_mode {_R}over_sample_rate {_R}multi_stage_wake_up {_R}agent.* {_R}checkpoint_engine.* {_R}prometheus.* {_R}trace.* {_R}nnodes {_R}n_gpus_per_node {_R}data_parallel_size {_R}router_config_path {_R}cudagraph_capture_sizes {_R}skip_rollout {_R}skip_dump_dir",
             "each worker has an engine of its own, with vLLM's own defaults; metrics and samples are the daemon's"),
    carried(f"{_R}full_determinism", "rollout.deterministic", default=False),
    carried(f"{_R}max_model_len", "rollout.max_length", "the sum of prompt and response here", to=lambda value, given: {}),
    carried(f"{_R}dtype", "model.dtype", "of all models", default="bfloat16", to=by_value("model.dtype", {"bfloat16": "bfloat16", "float32": "float32"}, otherwise="the built-in trainer computes in float32 or bfloat16")),
    missing(f"{_R}quantization", "rollout.quantization is fp8 or none: set it, with trainer.importance_correction", key="rollout.quantization"),
    missing(f"{_R}gpu_memory_utilization", "rollout.cache_bytes is the size of the cache in bytes, no share of the GPU", key="rollout.cache_bytes"),
    missing(f"{_R}tensor_model_parallel_size", "rollout.tensor_parallel is the GPUs of a worker: set it", key="rollout.tensor_parallel", off=(1,)),
    missing(f"{_R}pipeline_model_parallel_size {_R}expert_parallel_size", "an engine splits each layer over its GPUs", key="rollout.tensor_parallel", off=(1,)),
    missing(f"{_R}ignore_eos {_R}enforce_eager {_R}engine_kwargs.* {_R}quantization_config_file {_R}qat {_R}mtp {_R}enable_rollout_routing_replay {_R}moe_load_balance_metrics_interval",
            "vLLM's own options have no keys", off=(0,)),
    missing(f"{_R}disaggregation.*", "an engine reads and writes a response itself", unless=lambda value, given: not given[f"{_R}disaggregation.enabled"]),
    carried(f"{_R}log_prob_micro_batch_size_per_gpu", "rollout.logits_forward_batch_size", "rows of a log-prob pass of a worker", aliases=f"{_R}log_prob_micro_batch_size"),
    needless(f"{_R}log_prob_use_dynamic_bsz {_R}log_prob_max_token_len_per_gpu", "a pass that does not fit is halved"),
    carried(f"{_R}val_kwargs.n", "evaluation.num_generations", default=1, to=_responses_of_evaluation),
    carried(f"{_R}val_kwargs.temperature", "evaluation.temperature", "0 unless val_kwargs.do_sample", default=0, to=_greedy, written=True),
    carried(f"{_R}val_kwargs.do_sample", "evaluation.temperature", "false: 0, the most likely token", default=False, to=lambda value, given: {}),
    carried(f"{_R}val_kwargs.top_p", "evaluation.top_p", "left out, that of the rollouts here; 1 in verl", default=1.0, to=_sampled("top_p"), written=True),
    carried(f"{_R}val_kwargs.top_k", "evaluation.top_k", "-1 is 0 here; left out, that of the rollouts here, -1 in verl", default=-1, to=_sampled("top_k"), written=True),
    carried(f"{_R}multi_turn.max_assistant_turns", "rollout.max_turns", "of an environment (docs/environments.md)"),
    missing(" ".join(f"{_R}multi_turn.{name}" for name in ("enable", "max_user_turns", "max_parallel_calls", "tool_config_path", "interaction_config_path", "max_tool_response_length", "format", "*")), "several turns are an environment of your own", key="rollout.environment", unless=lambda value, given: not given[f"{_R}multi_turn.enable"]),
    # The algorithm.
    carried("algorithm.adv_estimator", "rollout.algorithm rollout.advantages", "gae: ppo; reinforce_plus_plus_baseline: reinforce_baseline; reinforce_plus_plus, remax, opo, gpg and others are missing", default="gae", to=estimator(_ESTIMATORS, lambda given: given["algorithm.norm_adv_by_std_in_grpo"] is False), written=True),
    carried("algorithm.norm_adv_by_std_in_grpo", "rollout.advantages", "false: dr_grpo", default=True, to=lambda value, given: {}),
    carried("algorithm.gamma", "rollout.gamma", default=1.0, to=of_ppo("rollout.gamma")),
    carried("algorithm.lam", "rollout.lam", default=1.0, to=of_ppo("rollout.lam"), written=True),
    carried("algorithm.use_kl_in_reward", "rollout.kl_coef", "the weight, 0 without it; with GRPO rlhfd takes the mean of a response, verl the sum", default=False, to=_kl_in_reward, written=True),
    carried("algorithm.kl_ctrl.kl_coef", "rollout.kl_coef", "with use_kl_in_reward", default=0.001, to=lambda value, given: {}),
    carried("algorithm.kl_penalty", "rollout.kl_estimator", "with use_kl_in_reward", default="kl", to=_estimates("algorithm.use_kl_in_reward", "rollout.kl_estimator")),
    missing("algorithm.kl_ctrl.type algorithm.kl_ctrl.horizon algorithm.kl_ctrl.target_kl", "the weight in the reward is constant; trainer.kl_coef_target adapts the one in the loss", key="trainer.kl_coef_target", unless=lambda value, given: not given["algorithm.use_kl_in_reward"] or given["algorithm.kl_ctrl.type"] != "adaptive"),
    carried("algorithm.filter_groups.enable", "rollout.max_refill", "prompts in the place of groups with equal rewards; of rewards, not of another metric", default=False, to=_refill),
    carried("algorithm.filter_groups.max_num_gen_batches", "rollout.max_refill", "less 1: further batches; 0, no bound, is 1,000 here; the trainer of 0.9 (trainer.use_v1) has no bound", default=0, to=lambda value, given: {}),
    needless("algorithm.filter_groups.metric algorithm.filter_groups.max_inflight_gen_batches", "groups are compared by their reward"),
    carried("algorithm.rollout_correction.rollout_is", "trainer.importance_correction", to=_correction, written=True),
    carried("algorithm.rollout_correction.rollout_is_threshold", "trainer.importance_cap", "two bounds with _ between them: icepop", default=2.0, to=_cap),
    carried(f"{_A}tis_imp_ratio_cap", "trainer.importance_correction trainer.importance_cap", "of verl before 0.6: token", to=_former_cap),
    carried("algorithm.rollout_correction.bypass_mode", "rollout.log_probs", "engine: the ratio of the loss begins at the engine's log-probs, and rollout_is has no effect", default=False, to=lambda value, given: {"rollout.log_probs": "engine"} if value else {}),
    missing(" ".join(f"algorithm.rollout_correction.{name}" for name in ("rollout_rs", "rollout_rs_threshold", "rollout_is_batch_normalize", "*")), "token_mask, sequence_mask and icepop leave out weights beyond a bound", key="trainer.importance_correction", off=("ppo_clip",)),
    missing("algorithm.use_pf_ppo algorithm.pf_ppo.*", "rows are trained once, as they are", unless=lambda value, given: not given["algorithm.use_pf_ppo"]),
    # The critic.
    carried(f"{_C}optim.lr", "trainer.critic_learning_rate", default=1e-5, to=of_ppo("trainer.critic_learning_rate")),
    carried(f"{_C}model.path", "model.critic", "left out, the actor's backbone with a value head of zeros", to=of_ppo("model.critic")),
    carried(f"{_C}cliprange_value", "trainer.value_clip_range", default=0.5, to=of_ppo("trainer.value_clip_range"), written=True),
    carried("trainer.critic_warmup", "trainer.critic_warmup_steps", "less 1: verl counts steps from 1, and trains the actor from that one on", default=0, to=lambda value, given: {"trainer.critic_warmup_steps": max(0, value - 1)} if is_ppo(given) else {}, written=True),
    missing(f"{_C}ppo_epochs", "the critic has the actor's passes over the rows of a step", key="trainer.epochs", unless=_as_the_actor("ppo_epochs")),
    missing(f"{_C}ppo_mini_batch_size", "the critic has the actor's updates", key="trainer.mini_batches", unless=_as_the_actor("ppo_mini_batch_size")),
    needless(f"{_C}enable {_C}strategy {_C}fsdp.* {_C}megatron.* {_C}ppo_* {_C}forward_* {_C}use_dynamic_bsz {_C}rollout_n {_C}shuffle {_C}data_loader_seed {_C}ulysses_sequence_parallel_size {_C}model.fsdp_config.* {_C}model.enable_gradient_checkpointing {_C}model.use_remove_padding {_C}model.use_shm {_C}model.trust_remote_code {_C}model.enable_activation_offload {_C}model.use_liger {_C}model.use_fused_kernels {_C}model.fused_kernel_options.* {_C}model.tokenizer_path {_C}model.tiled_mlp.* {_C}optim.optimizer_impl",
             "the critic is trained with the actor's passes, updates and sharding; rollout.algorithm = ppo has one"),
    missing(f"{_C}model.lora_rank {_C}model.lora_alpha {_C}model.target_modules {_C}model.exclude_modules {_C}model.lora.*", "the critic is trained whole", key="model.lora_rank",
            unless=lambda value, given: not (is_ppo(given) and (given[f"{_C}model.lora_rank"] or given[f"{_C}model.lora.rank"]))),
    missing(f"{_C}model.mtp.*", "no further head is trained, or drafts tokens", unless=lambda value, given: not given[f"{_C}model.mtp.enable"]),
    missing(f"{_C}optim.* {_C}grad_clip {_C}loss_agg_mode {_C}loss_scale_factor {_C}model.*", "the critic has the actor's optimizer, with a learning rate of its own; its loss is the mean over actions", key="trainer.critic_learning_rate", unless=lambda value, given: not is_ppo(given), off_by_name=_OF_CRITIC),
    # The rewards.
    carried("reward.custom_reward_function.path", "rewards", "`module:function`, the file beside the configuration; verl's signature is called as it is", to=_reward, aliases="custom_reward_function.path"),
    carried("reward.custom_reward_function.name", "rewards", default="compute_score", to=lambda value, given: {}, aliases="custom_reward_function.name"),
    missing("reward.custom_reward_function.reward_kwargs.* custom_reward_function.reward_kwargs.*", "a function has its own defaults", key="rewards"),
    carried("reward.reward_model.model_path", "model.reward", "with reward.reward_model.enable; its score is added to those of the functions", to=only_if(lambda given: bool(given["reward.reward_model.enable"]), "model.reward"), aliases="reward_model.model.path"),
    carried("reward.reward_model.enable", "model.reward", to=lambda value, given: {}, aliases="reward_model.enable"),
    carried(f"{_OVERLONG}enable", "rollout.overlong_buffer_tokens", "DAPO's penalty of length", to=_overlong, aliases="reward_model.overlong_buffer.enable reward_model.reward_kwargs.overlong_buffer_cfg.enable"),
    carried(f"{_OVERLONG}len", "rollout.overlong_buffer_tokens", to=lambda value, given: {}, aliases="reward_model.overlong_buffer.len reward_model.reward_kwargs.overlong_buffer_cfg.len"),
    carried(f"{_OVERLONG}penalty_factor", "rollout.overlong_penalty", to=lambda value, given: {}, aliases="reward_model.overlong_buffer.penalty_factor reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor"),
    needless("reward_model.overlong_buffer.log reward.reward_kwargs.overlong_buffer_cfg.log reward_model.reward_kwargs.overlong_buffer_cfg.log reward.reward_kwargs.max_resp_len reward_model.reward_kwargs.max_resp_len reward.reward_manager.* reward_manager.* reward.num_workers reward_model.num_workers reward_model.launch_reward_fn_async",
             "rollout.reward_processes rows are scored at a time; every function is known by its parameters"),
    missing("reward_model.reward_manager reward.reward_manager reward.reward_manager.name reward_manager.name", "batch calls the function with lists, data_sources, solution_strs, ground_truths and extra_infos: write it for one row, with data_source, solution_str, ground_truth and extra_info, or as one of rlhfd with @pipeline.batched (docs/rewards.md); the others call it once a row, as here", key="rewards", unless=lambda value, given: value != "batch"),
    missing("reward_model.* reward.reward_model.*", "the reward model runs in each worker, with the actor's token ids or its own tokenizer (model.reward_tokenizer)", key="model.reward_tokenizer", unless=lambda value, given: not given["reward.reward_model.enable"]),
    missing("sandbox_fusion.* reward.sandbox_fusion.*", "the reward `code` runs tests in a process of its own", key="rewards", unless=lambda value, given: not (given["sandbox_fusion.url"] or given["reward.sandbox_fusion.url"])),
    missing("reward.*", "a reward is a table of rewards (docs/rewards.md)", key="rewards"),
    # The trainer.
    carried("trainer.total_training_steps", "trainer.max_steps", "a step is a batch with all its updates in both"),
    carried("trainer.total_epochs", "trainer.max_epochs", "passes over the prompts; the first of it and trainer.total_training_steps ends the run", default=30, written=True, to=_epochs),
    carried("trainer.project_name", "metrics.tracker_project", default="verl_examples"),
    carried("trainer.experiment_name", "daemon.run_name", default="gsm8k"),
    carried("trainer.logger", "metrics.tracker", "metrics.jsonl and the page have each step without any", default=["console", "wandb"], to=trackers),
    carried("trainer.default_local_dir", "daemon.state_dir", "a folder of each run is in runs/ of it"),
    carried("trainer.save_freq", "trainer.save_every", "-1: at the end alone", default=-1, to=positive("trainer.save_every"), written=True),
    carried("trainer.test_freq", "evaluation.every", "with data.val_files", default=-1, to=_of_evaluation("evaluation.every")),
    needless("trainer.val_before_train", "version 0 is evaluated, too"),
    carried("trainer.resume_mode", "trainer.resume", default="auto", to=by_value("trainer.resume", {"auto": "auto", "disable": "never"}, otherwise="a start goes on from the last checkpoint of the same run, or begins it anew")),
    carried("trainer.max_actor_ckpt_to_keep", "trainer.keep_checkpoints", "left out, verl keeps all, here 3"),
    missing("trainer.n_gpus_per_node trainer.nnodes", "trainer.world_size is the number of ranks, rollout.workers that of workers, each with GPUs of its own (`rlhfd plan`); with several ranks divide buffer.sample_batch_size, the rows of one, by their number", key="trainer.world_size", off=(1,)),
    carried("trainer.log_val_generations", "samples.per_minute", "prompts a minute whose responses are kept", default=0, to=lambda value, given: {}),
    needless("trainer.rollout_data_dir trainer.validation_data_dir", "`rlhfd samples --json` has rollouts, evaluations.jsonl the evaluations"),
    missing("trainer.resume_from_path trainer.val_only trainer.default_hdfs_dir trainer.checkpoint_callback_class", "`rlhfd start --from step-N` goes back to a checkpoint, `rlhfd eval` evaluates without training"),
    missing("trainer.v1.trainer_mode trainer.v1.sampler.max_off_policy_threshold", "rollouts and training go at once with buffer.max_staleness above 0, the most versions that a row may be old: set it", key="buffer.max_staleness", unless=lambda value, given: given["trainer.v1.trainer_mode"] in (None, "sync")),
    needless("trainer.balance_batch trainer.del_local_ckpt_after_load trainer.max_critic_ckpt_to_keep trainer.esi_redundant_time trainer.ray_wait_register_center_timeout trainer.device trainer.use_v1 trainer.v1.* trainer.use_legacy_worker_impl",
             "rows are dealt to the ranks for equal work; the daemon watches its processes itself"),
    missing("distillation.*", "the policy is trained by rewards alone", unless=lambda value, given: not given["distillation.enabled"]),
    missing("config_path config_name", "the options of that file are not read: convert it by itself", unless=lambda value, given: PurePosixPath(str(value)).stem in (*_CONFIGURATIONS, "config")),
    needless("model_engine hydra.*", "the trainer shards its models by FSDP2"),
    needless("transfer_queue.* ray_kwargs.* ray_init.* global_profiler.* skip.* *.profiler.*", "the buffer is the daemon's; no Ray is needed on one server"),
)  # fmt: skip


VERL: Final = Trainer(
    name="verl",
    word="verl",
    release="0.9",
    options=_OPTIONS,
    programs=("main_ppo", "main_dapo"),
    always=(
        ("trainer.loss_rows", "all", "verl counts rows of groups with equal rewards in the loss"),
        ("buffer.max_staleness", 0, "verl samples and trains in turns; 1, the default here, lets both go at once"),
        ("prompts.answer_column", "reward_model.ground_truth", "the column of verl's data"),
    ),
)
