"""The options of TRL: `GRPOConfig` with transformers' `TrainingArguments`, and those of `trl grpo` beside them."""

from __future__ import annotations

import math
from typing import Any, Final

from pipeline.config.foreign.option import (
    Convert,
    Given,
    NotCarriedError,
    Option,
    Trainer,
    by_value,
    carried,
    data_path,
    missing,
    needless,
    only_if,
    passes,
    trackers,
    unless_true,
    warmup_share,
    warmup_steps,
)
from pipeline.errors import counted

PROMPT_TOKENS: Final = 1024
"""Tokens of a prompt in a conversion without a bound: rollout.max_new_tokens needs one beside it."""

_AGGREGATIONS = {
    "grpo": "sequence_mean", "dapo": "token_mean", "bnpo": "token_mean", "dr_grpo": "dr_grpo", "cispo": "token_mean",
}  # fmt: skip
_CORRECTIONS = {
    "token_truncate": "token", "token_mask": "token_mask", "sequence_truncate": "sequence",
    "sequence_mask": "sequence_mask",
}  # fmt: skip
_REWARDS = {"accuracy_reward": "math", "accuracy": "math"}
_REASONING: Final = "reasoning_accuracy_reward"


def _micro_batches(given: Given) -> int:
    """Return the micro-batches of one generation, of a process (steps_per_generation)."""
    if "generation_batch_size" in given:
        of_a_step = given.count("per_device_train_batch_size") * given.count("num_processes")
        found, rest = divmod(given.count("generation_batch_size"), of_a_step)
        if rest or not found:
            raise NotCarriedError(
                f"generation_batch_size must be a multiple of the {of_a_step} rows of a micro-batch of all processes"
            )
        return found
    return given.count("steps_per_generation", given.count("gradient_accumulation_steps"))


def _mini_batches(given: Given) -> int:
    found, rest = divmod(_micro_batches(given), given.count("gradient_accumulation_steps"))
    if rest or not found:
        raise NotCarriedError("steps_per_generation must be a multiple of gradient_accumulation_steps here")
    return found


def _updates(given: Given) -> int:
    """Return the optimizer updates of a generation, a step of rlhfd."""
    return _mini_batches(given) * given.count("num_iterations")


def _rows(_: Any, given: Given) -> dict[str, Any]:
    return {"buffer.sample_batch_size": given.count("per_device_train_batch_size") * _micro_batches(given)}


def _steps(key: str) -> Any:
    """Return the conversion of a number of updates to one of steps; a share is one of max_steps."""

    def convert(value: Any, given: Given) -> dict[str, Any]:
        number = value if isinstance(value, int | float) else 0
        if 0 < number < 1:
            if given.number("max_steps") <= 0:
                raise NotCarriedError("a share needs max_steps in the same file")
            number *= given["max_steps"]
        return {key: max(0, math.ceil(number / _updates(given)))}

    return convert


def _saves(value: Any, given: Given) -> dict[str, Any]:
    # With another strategy it has no effect.
    return dict(_steps("trainer.save_every")(value, given)) if given["save_strategy"] == "steps" else {}


def _save_strategy(value: Any, given: Given) -> dict[str, Any]:
    if value in ("no", False):
        return {"trainer.save_every": 0}
    if value != "steps":
        raise NotCarriedError("the end of a pass over the prompts is no step of its own: trainer.save_every")
    return {}


def _schedule(value: Any, given: Given) -> dict[str, Any]:
    if value in ("constant", "constant_with_warmup"):
        return {"trainer.decay_steps": 0}
    if value not in ("linear", "cosine", "cosine_with_min_lr"):
        raise NotCarriedError("the learning rate is constant, or falls linearly or by a cosine, after a warm-up")
    if given.number("max_steps") <= 0:
        raise NotCarriedError(
            "a fall to 0 needs max_steps: trainer.decay_steps and trainer.final_learning_rate_ratio = 0"
        )
    return {
        **({} if value == "linear" else {"trainer.schedule": "cosine"}),
        "trainer.decay_steps": math.ceil(given["max_steps"] / _updates(given)),
        "trainer.final_learning_rate_ratio": _least_share(given) if value == "cosine_with_min_lr" else 0.0,
    }


def _least_share(given: Given) -> float:
    keywords = given["lr_scheduler_kwargs"]
    share = keywords.get("min_lr_rate") if isinstance(keywords, dict) else None
    if isinstance(share, bool) or not isinstance(share, int | float):
        raise NotCarriedError("cosine_with_min_lr needs the share min_lr_rate among lr_scheduler_kwargs")
    return float(share)


def _scheduler_keywords(value: Any, given: Given) -> dict[str, Any]:
    if given["lr_scheduler_type"] != "cosine_with_min_lr" or list(value) != ["min_lr_rate"]:
        raise NotCarriedError("of the keywords min_lr_rate of cosine_with_min_lr alone is here too")
    return {}


def _if_warm(convert: Convert) -> Convert:
    # The schedule of this name takes no notice of a warm-up; constant_with_warmup has one.
    return lambda value, given: {} if given["lr_scheduler_type"] == "constant" else convert(value, given)


def _epochs(value: Any, given: Given) -> dict[str, Any]:
    if given.number("max_steps") > 0:
        return {}
    return passes(value, "num_train_epochs", _mixture(given["datasets"], given) if "datasets" in given else {})


def _loss(value: Any, given: Given) -> dict[str, Any]:
    if value not in _AGGREGATIONS:
        raise NotCarriedError(f"the losses that are here too are {', '.join(_AGGREGATIONS)}")
    found: dict[str, Any] = {"trainer.loss_aggregation": _AGGREGATIONS[value]}
    if value == "dr_grpo":
        found["trainer.dr_grpo_tokens"] = given["max_completion_length"]
    if value == "cispo":
        found |= {"trainer.policy_loss": "cispo", "trainer.clip_low": 1.0}
        if "epsilon_high" not in given:
            raise NotCarriedError(
                f"without epsilon_high TRL's largest ratio is epsilon, {given['epsilon']}; here it is 1 + "
                "trainer.clip_high, and must be above 1: set it",
                found,
            )
    return found


def _clip_high(value: Any, given: Given) -> dict[str, Any]:
    if given["loss_type"] != "cispo":
        return {"trainer.clip_high": value}
    if given.number("epsilon_high") <= 1:
        raise NotCarriedError("the largest ratio of cispo is 1 + trainer.clip_high here, and must be above 1")
    return {"trainer.clip_high": round(value - 1, 12)}


def _ratio(value: Any, given: Given) -> dict[str, Any]:
    if value == "sequence" and given["loss_type"] not in ("grpo", "dapo", "bnpo"):
        raise NotCarriedError(f"one ratio a sequence (gspo) with loss_type = {given['loss_type']} is not here")
    return {"trainer.policy_loss": "gspo"} if value == "sequence" else {}


def _scale(value: Any, given: Given) -> dict[str, Any]:
    found = {True: "grpo", "group": "grpo", False: "dr_grpo", "none": "dr_grpo", "batch": "dr_grpo"}.get(value)
    if found is None:
        raise NotCarriedError("advantages are scaled by the deviation of the group or of the batch, or not at all")
    return {"rollout.advantages": found, **({"trainer.advantage_scale": "batch"} if value == "batch" else {})}


def _correction(value: Any, given: Given) -> dict[str, Any]:
    if not given["use_vllm"]:
        return {}
    if given["vllm_importance_sampling_correction"] is False:
        return {"trainer.importance_correction": "none"}
    if value not in _CORRECTIONS:
        raise NotCarriedError(f"the modes that are here too are {', '.join(_CORRECTIONS)}")
    return {"trainer.importance_correction": _CORRECTIONS[value]}


def _rewards(value: Any, given: Given) -> dict[str, Any]:
    """Return the tables of reward model and functions, whose weights stand in this order; also for the model alone.

    Raises:
        NotCarriedError: If the weights are others than the rewards, or a function is not here; it has the other tables.
    """
    functions = given["reward_funcs"] or []
    names = [functions] if isinstance(functions, str) else list(functions)
    model = given["reward_model_name_or_path"]
    weights = list(given["reward_weights"] or [1.0] * (len(names) + (model is not None)))
    if len(weights) != len(names) + (model is not None):
        rewards = counted(len(names) + (model is not None), "reward")
        raise NotCarriedError(f"reward_weights has {len(weights)} for {rewards}")
    if None in weights:
        raise NotCarriedError("reward_weights has null in place of a weight")
    of_functions = weights[len(weights) - len(names) :]
    here = [(str(name).removeprefix("trl.rewards."), weight) for name, weight in zip(names, of_functions, strict=True)]
    tables = [_function(name, weight) for name, weight in here if name != _REASONING]
    found: dict[str, Any] = {"rewards": tables} if tables else {}
    if model is not None and weights[0] == 1 and not any(table["name"] == "model" for table in tables):
        found["model.reward"] = model
    elif model is not None:
        found["rewards"] = [_model(model, weights[0]), *tables]
    reasons = []
    if len(tables) < len(here):
        reasons.append(
            f"{_REASONING} gives 0 to a response without </think>, which math scores as any other: name a function of "
            "your own in [[rewards]], or trl.rewards:reasoning_accuracy_reward where TRL is installed"
        )
    if any(name in _REWARDS for name, _ in here):
        if any(":" in table["name"] for table in tables):
            # The column of the answer is none that functions get by its name.
            reasons.append(
                'accuracy_reward reads the column solution, which prompts.answer_column = "solution" would take from '
                "the functions of your own: have it as a column answer, too"
            )
        else:
            found["prompts.answer_column"] = "solution"
    if reasons:
        raise NotCarriedError("; ".join(reasons), found)
    return found


def _reward_model(value: Any, given: Given) -> dict[str, Any]:
    # Of functions beside it, their option writes both.
    return {} if given["reward_funcs"] else _rewards(value, given)


def _model(path: str, weight: Any) -> dict[str, Any]:
    found = {"name": "model", "path": path}
    return found if weight == 1 else {**found, "weight": weight}


def _function(name: str, weight: Any) -> dict[str, Any]:
    if "/" in name:
        return _model(name, weight)
    if name == "think_format_reward":
        found: dict[str, Any] = {"name": "regex", "pattern": r"(?s)\A<think>(?!.*<think>).*?</think>"}
    elif name == "get_soft_overlong_punishment":
        found = {"name": "length", "limit_tokens": 1280, "buffer_tokens": 256}
    else:
        found = {"name": _REWARDS.get(name) or ":".join(name.rsplit(".", 1))}
        if ":" in found["name"]:
            # The parameters of TRL's first example, completion_ids and any others, do not tell.
            found["style"] = "trl"
    return found if weight == 1 else {**found, "weight": weight}


def _mixture(value: Any, given: Given) -> dict[str, Any]:
    sources = [source for one in value for source in _sources(one)]
    if len(sources) > 1:
        return {"prompts.sources": sources}
    return {f"prompts.{name}": each for name, each in sources[0].items()}


def _sources(one: Any) -> list[dict[str, Any]]:
    if not isinstance(one, dict) or "path" not in one:
        raise NotCarriedError("a data set of the mixture must have a path")
    if further := sorted(set(one) - {"path", "name", "split", "data_files"}):
        raise NotCarriedError(f"{', '.join(further)} of a data set has no key")
    split = {"split": one["split"]} if one.get("split") else {}
    files = one.get("data_files")
    if files is None:
        return [{"path": data_path(str(one["path"]), str(one.get("name") or "")), **split}]
    if one["path"] not in ("json", "parquet", "arrow") or isinstance(files, dict):
        raise NotCarriedError("data_files are read where path is json, parquet or arrow, as one file or a list")
    return [{"path": str(file), **split} for file in ([files] if isinstance(files, str) else files)]


def _peft(value: Any, given: Given) -> dict[str, Any]:
    if value and "lora_target_modules" not in given:
        raise NotCarriedError(
            "without target modules peft chooses by the model, q_proj and v_proj of most; here all linear layers have "
            "adapters: model.lora_targets"
        )
    return {}


def _adapters(key: str) -> Any:
    return only_if(lambda given: bool(given["use_peft"]), key)


def _dtype(value: Any, given: Given) -> dict[str, Any]:
    if value in ("auto", None):
        return {}
    if value not in ("float32", "bfloat16"):
        raise NotCarriedError("the built-in trainer computes in float32 or bfloat16")
    return {"model.dtype": value}


def _of_loading(value: Any, given: Given) -> dict[str, Any]:
    further = (
        set(value) - {"dtype", "torch_dtype", "attn_implementation", "revision"} if isinstance(value, dict) else {1}
    )
    if further:
        raise NotCarriedError("of the arguments of from_pretrained dtype alone has a key, model.dtype")
    dtype = value.get("dtype", value.get("torch_dtype"))
    return _dtype(dtype, given)


def _evaluates(given: Given) -> bool:
    return given["eval_strategy"] not in (None, "no", False)


_OPTIONS: Final[tuple[Option, ...]] = (
    # The models.
    carried("model_name_or_path", "model.actor", "a folder: no model is downloaded, `hf download` makes one"),
    carried("dtype", "model.dtype", "weights are held in float32 beside it, as with bf16", to=_dtype, aliases="torch_dtype"),
    carried("bf16", "model.dtype", "TRL computes in bfloat16 by autocast; here the models are bfloat16, their masters float32; left out, a GPU has it and a CPU has not", to=lambda value, given: {} if "dtype" in given else {"model.dtype": "bfloat16" if value else "float32"}),
    carried("model_init_kwargs", "model.dtype", "dtype alone", to=_of_loading),
    needless("disable_dropout", "models never drop out: rollout and training agree"),
    needless("trust_remote_code", "code of a model's folder is never run; a model that needs it is refused"),
    needless("model_revision attn_implementation", "the folder is the revision; each pass takes the attention kernel that suits it"),
    carried("cast_lm_head_to_fp32", "model.float32_logits", "logits in float32, which is measured at the start where it is left out"),
    carried("use_peft", "model.lora_rank", "adapters where the rank is above 0", to=_peft),
    carried("lora_r", "model.lora_rank", "with use_peft", default=16, to=_adapters("model.lora_rank"), written=True),
    carried("lora_alpha", "model.lora_alpha", "with use_peft", default=32, to=_adapters("model.lora_alpha")),
    carried("lora_target_modules", "model.lora_targets", "with use_peft; left out, peft chooses by the model, here all linear layers", to=_adapters("model.lora_targets")),
    carried("use_rslora", "model.lora_kind", "with use_peft", default=False, to=lambda value, given: {"model.lora_kind": "rslora"} if value and given["use_peft"] else {}),
    missing("lora_dropout", "adapters do not drop out", default=0.05, written=True, unless=lambda value, given: not given["use_peft"] or not value),
    missing("lora_target_parameters lora_modules_to_save lora_task_type use_dora", "adapters are LoRA of linear layers", off=("CAUSAL_LM",)),
    missing("GRPOTrainer.quantization_config load_in_8bit load_in_4bit bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage", "weights are not quantized", unless=lambda value, given: not (given["load_in_8bit"] or given["load_in_4bit"])),
    missing("router_aux_loss_coef", "no loss of a router's balance; TRL's default is the model's"),
    missing("sync_ref_model ref_model_mixup_alpha ref_model_sync_steps", "the reference keeps its weights", unless=lambda value, given: not given["sync_ref_model"]),
    # The prompts.
    carried("dataset_name", "prompts.path", 'a file, a folder, or `"datasets:NAME"` for one in the local cache; nothing is downloaded', to=lambda value, given: {"prompts.path": data_path(str(value), str(given["dataset_config"] or ""))}),
    carried("dataset_prompt_column", "prompts.prompt_column prompts.template", "of Open R1's recipes, which make a message of the user of each", to=lambda value, given: {"prompts.prompt_column": value, "prompts.template": "chat"}),
    carried("system_prompt", "prompts.system_prompt", "of Open R1's recipes"),
    carried("dataset_config", "prompts.path", 'the subset: `"datasets:NAME:SUBSET"`', to=lambda value, given: {}),
    carried("dataset_train_split", "prompts.split", default="train"),
    carried("datasets", "prompts.sources", "TRL joins them; here they are mixed by weight", to=_mixture),
    missing("dataset_test_split test_split_size", "evaluation.files has files of their own", key="evaluation.files", unless=lambda value, given: not _evaluates(given)),
    needless("dataset_streaming streaming", "files are read by position, and mapped where they can be"),
    carried("chat_template_kwargs", "prompts.template_arguments"),
    carried("shuffle_dataset", "prompts.shuffle", "each pass is shuffled anew, by daemon.seed", default=True, to=unless_true("prompts.shuffle")),
    needless("remove_unused_columns", "each further column reaches the reward functions that name it"),
    # The rollouts.
    carried("num_generations", "rollout.num_generations", default=8),
    carried("max_completion_length", "rollout.max_new_tokens", "a response of this length without an end is cut", default=512, written=True),
    carried("max_prompt_length", "rollout.max_prompt_length rollout.long_prompts", "of earlier releases, which cut prompts from the left", to=lambda value, given: {"rollout.max_prompt_length": value, "rollout.long_prompts": "cut_left"}),
    carried("vllm_max_model_length", "rollout.max_length", "tokens of prompt and response together"),
    carried("temperature", "rollout.temperature", default=1.0),
    carried("top_p", "rollout.top_p", default=1.0),
    carried("top_k", "rollout.top_k", default=0, to=lambda value, given: {"rollout.top_k": max(0, value or 0)}),
    carried("min_p", "rollout.min_p", "log-probs are those before it, as for top_p"),
    missing("repetition_penalty", "log-probs of a penalized distribution are not those that are trained", off=(1.0,)),
    missing("generation_kwargs", "a sampling option has a key, or is missing"),
    carried("use_vllm", "rollout.engine", default=False, to=lambda value, given: {"rollout.engine": "vllm" if value else "transformers"}),
    needless("vllm_mode vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port", "each worker has an engine of its own, which the daemon starts"),
    needless("vllm_model_impl cache_implementation use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged", "the engine chooses", aliases="vllm_device vllm_dtype vllm_enable_prefix_caching vllm_max_model_len"),
    missing("vllm_enable_sleep_mode", "rollout.sleep needs buffer.max_staleness = 0: set both", key="rollout.sleep"),
    missing("vllm_gpu_memory_utilization", "rollout.cache_bytes is the size of the cache in bytes, no share of the GPU", key="rollout.cache_bytes", unless=lambda value, given: not given["use_vllm"]),
    missing("vllm_tensor_parallel_size", "rollout.tensor_parallel is the GPUs of a worker: set it", key="rollout.tensor_parallel", off=(1,)),
    missing("vllm_structured_outputs_regex", "responses are free; the reward `format`, `regex` or `json_schema` scores them", key="rewards", aliases="vllm_guided_decoding_regex"),
    missing("max_tool_calling_iterations", "rollout.max_turns bounds the turns of an environment", key="rollout.max_turns"),
    missing("GRPOTrainer.tools GRPOTrainer.environment_factory GRPOTrainer.rollout_func", "an environment of your own answers each response (docs/environments.md)", key="rollout.environment"),
    missing("GRPOTrainer.callbacks GRPOTrainer.optimizers", "the daemon trains by a loop of its own; one of yours is an external trainer (docs/trainers.md)", key="trainer.kind"),
    needless("ds3_gather_for_generation pad_to_multiple_of", "workers have whole weights; rows are not padded"),
    # The rewards.
    carried("reward_funcs", "rewards prompts.answer_column", "a function `a.b.c` is `a.b:c`; it is called as TRL calls it; `accuracy_reward`, and `accuracy` of Open R1's recipes, is `math`, whose parsing differs in detail, of the column `solution`; `reasoning_accuracy_reward` is missing; a path with `/` is the folder of a reward model", to=_rewards),
    carried("reward_weights", "rewards", "the weight of each table of rewards, first that of the reward model", to=lambda value, given: {}),
    carried("reward_model_name_or_path", "model.reward rewards", "a folder; with another weight than 1, or beside other models, a table of rewards", to=_reward_model),
    missing("multi_objective_aggregation", "rewards are added up before groups are compared (sum_then_normalize)", off=("sum_then_normalize",)),
    # The batch and its updates.
    carried("per_device_train_batch_size", "trainer.micro_batch_size buffer.sample_batch_size", "rows of a pass; a step of one rank has per_device_train_batch_size x steps_per_generation rows, a whole generation", default=8, written=True, to=lambda value, given: {"trainer.micro_batch_size": value, **_rows(value, given)}),
    carried("gradient_accumulation_steps", "buffer.sample_batch_size", "passes of an update: they follow from rows and trainer.micro_batch_size; the key trainer.gradient_accumulation_steps counts batches", default=1, to=lambda value, given: {}),
    carried("steps_per_generation", "trainer.mini_batches", "updates of a generation: steps_per_generation / gradient_accumulation_steps", to=lambda value, given: {"trainer.mini_batches": _mini_batches(given)}),
    carried("generation_batch_size", "trainer.mini_batches", "as steps_per_generation, in rows of all processes", to=lambda value, given: {"trainer.mini_batches": _mini_batches(given)}),
    carried("num_iterations", "trainer.epochs", "rows are dealt to updates anew in each epoch", default=1),
    missing("config", "the options of that file are not read: convert it, and set those of the command"),
    carried("num_processes", "trainer.world_size", "of accelerate, or torchrun's nproc_per_node x nnodes: TRL's processes sample and train in turns; here the workers have GPUs of their own (`rlhfd plan`)", default=1),
    missing("accelerate_config", "the num_processes of this file is not read (8 in TRL's own): set trainer.world_size to it, buffer.sample_batch_size is the rows of one", key="trainer.world_size", aliases="config_file", unless=lambda value, given: value == "single_gpu" or "num_processes" in given),
    carried("max_steps", "trainer.max_steps", "a step has num_iterations x mini_batches updates, TRL counts updates", default=-1, to=_steps("trainer.max_steps")),
    carried("num_train_epochs", "trainer.max_epochs", "passes over the prompts; max_steps is above it", default=3.0, written=True, to=_epochs),
    # The optimizer.
    carried("learning_rate", "trainer.learning_rate", "of adapters too; here they have 1e-5", default=1e-6, written=True),
    carried("lr_scheduler_type", "trainer.schedule trainer.decay_steps trainer.final_learning_rate_ratio", "TRL's default falls to 0 at max_steps; a fall needs its number of steps here", default="linear", to=_schedule, written=True),
    carried("warmup_steps", "trainer.warmup_steps", "the first of n steps has 1/n of the rate, TRL's 0; none with lr_scheduler_type = constant", default=0, to=_if_warm(warmup_steps("warmup_steps", "warmup_ratio", _steps("trainer.warmup_steps")))),
    carried("warmup_ratio", "trainer.warmup_ratio", "a share of max_steps; warmup_steps is above it", to=_if_warm(warmup_share("warmup_steps", "max_steps"))),
    carried("weight_decay", "trainer.weight_decay", "of all parameters; TRL leaves out biases and norms", default=0.0),
    carried("adam_beta1", "trainer.betas", default=0.9, to=lambda value, given: {"trainer.betas": [value, given["adam_beta2"]]}),
    carried("adam_beta2", "trainer.betas", default=0.999, to=lambda value, given: {"trainer.betas": [given["adam_beta1"], value]}),
    missing("adam_epsilon", "AdamW's epsilon is 1e-8, TRL's default", off=(1e-8,)),
    carried("max_grad_norm", "trainer.gradient_clip_norm", default=1.0),
    carried("optim", "trainer.optimizer", "adamw_8bit: embeddings have 8 bits too; others are missing", default="adamw_torch_fused", to=by_value("trainer.optimizer", {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "adamw_8bit": "adamw_8bit", "adamw_bnb_8bit": "adamw_8bit"}, otherwise="adamw_torch, adamw_torch_fused, adamw_8bit or adamw_bnb_8bit")),
    missing("optim_args optim_target_modules", "the optimizers have no further options"),
    carried("lr_scheduler_kwargs", "trainer.final_learning_rate_ratio", "min_lr_rate of cosine_with_min_lr", to=_scheduler_keywords),
    missing("neftune_noise_alpha label_smoothing_factor", "the loss is that of the policy alone", off=(0.0,)),
    carried("gradient_checkpointing", "trainer.activation_checkpointing", "on a GPU where it is left out; false alone is written", default=True, to=unless_true("trainer.activation_checkpointing"), aliases="activation_checkpointing"),
    needless("gradient_checkpointing_kwargs activation_checkpointing_kwargs average_tokens_across_devices", "divisors are counted over all ranks"),
    # The loss.
    missing("normalize_advantages reward_clip_range missing_eos_penalty", "options of `trl rloo`, which is not converted: rollout.algorithm = \"rloo\", rollout.reward_clip, rollout.kl_coef", key="rollout.reward_clip"),
    carried("beta", "trainer.kl_coef", "TRL multiplies the KL by the ratio of the policies (use_bias_correction_kl), rlhfd does not", default=0.0, written=True),
    missing("use_bias_correction_kl", "the KL of the loss is k3, not times the ratio of the policies; no difference where beta is 0", default=True, written=True, unless=lambda value, given: not given["beta"]),
    carried("loss_type", "trainer.loss_aggregation trainer.policy_loss", "bnpo divides by the tokens of a micro-batch, here by those of the update; sapo, luspo and vespo are missing", default="dapo", to=_loss, written=True),
    carried("epsilon", "trainer.clip_range", default=0.2),
    carried("epsilon_high", "trainer.clip_high", "with cispo the largest ratio less 1", to=_clip_high),
    carried("delta", "trainer.dual_clip"),
    carried("importance_sampling_level", "trainer.policy_loss", "sequence: gspo", default="token", to=_ratio),
    carried("scale_rewards", "rollout.advantages trainer.advantage_scale", "group: grpo, none: dr_grpo, batch: dr_grpo and advantage_scale = batch, by the rows of a step", default="group", to=_scale),
    carried("mask_truncated_completions", "trainer.mask_cut_responses", "a cut response is in no divisor here but dr_grpo's; TRL's grpo counts its row", default=False),
    carried("entropy_coef", "trainer.entropy_coef", "aggregated as the loss; TRL's is always the mean over tokens", default=0.0),
    missing("use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target", "the weight of the entropy is constant", key="trainer.entropy_coef", unless=lambda value, given: not given["use_adaptive_entropy"]),
    missing("top_entropy_quantile", "all tokens are trained", off=(1.0,)),
    missing("off_policy_mask_threshold", "trainer.target_kl ends the updates of a step, no row is left out", key="trainer.target_kl"),
    missing("sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg", "losses sapo and vespo: write them as a policy loss of your own", key="trainer.policy_loss", unless=lambda value, given: given["loss_type"] not in ("sapo", "vespo")),
    carried("vllm_importance_sampling_mode", "trainer.importance_correction", "with use_vllm", default="sequence_mask", to=_correction, written=True),
    carried("vllm_importance_sampling_correction", "trainer.importance_correction", "with use_vllm", default=True, to=lambda value, given: {} if value else _correction(None, given)),
    carried("vllm_importance_sampling_clip_max", "trainer.importance_cap", "with use_vllm", default=3.0, written=True, aliases="vllm_importance_sampling_cap", to=only_if(lambda given: bool(given["use_vllm"]) and given["vllm_importance_sampling_correction"] is not False, "trainer.importance_cap"),
),
    missing("vllm_importance_sampling_clip_min", "weights have no lower bound, but icepop's of 0.5", key="trainer.importance_correction"),
    # Checkpoints, evaluation, reports.
    carried("output_dir", "daemon.state_dir", "a folder of each run is in runs/ of it"),
    carried("run_name", "daemon.run_name"),
    carried("seed", "daemon.seed", "other random numbers than TRL's", default=42),
    carried("save_steps", "trainer.save_every", "in steps, not updates", default=500, to=_saves),
    carried("save_strategy", "trainer.save_every", "no: 0, a checkpoint at the end alone", default="steps", to=_save_strategy),
    carried("save_total_limit", "trainer.keep_checkpoints", "left out, TRL keeps all, here 3", to=lambda value, given: {"trainer.keep_checkpoints": value or 0}),
    needless("resume_from_checkpoint save_only_model save_on_each_node enable_jit_checkpoint ignore_data_skip restore_callback_states_from_checkpoint", "a start goes on from the last checkpoint of the same run (trainer.resume); a checkpoint has all of its state", aliases="overwrite_output_dir save_safetensors"),
    carried("eval_steps", "evaluation.every", "versions, which are steps; evaluation.files has the files, of which TRL's option has no word", to=lambda value, given: dict(_steps("evaluation.every")(value, given)) if _evaluates(given) else {}),
    missing("eval_strategy", "evaluation.files names files of held-out prompts, of which version 0 and each evaluation.every-th one are evaluated", key="evaluation.files", aliases="evaluation_strategy GRPOTrainer.eval_dataset"),
    needless("eval_on_start eval_delay do_train do_eval do_predict", "evaluation.files says whether a run is evaluated"),
    carried("num_generations_eval", "evaluation.num_generations", "left out, TRL takes num_generations, here 1"),
    needless("per_device_eval_batch_size prediction_loss_only eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics bf16_full_eval fp16_full_eval label_names", "held-out prompts are sampled and scored as rollouts are"),
    needless("load_best_model_at_end metric_for_best_model greater_is_better", "checkpoints/best has the best pass@1, then the best mean reward (evaluation.keep_best)"),
    carried("report_to", "metrics.tracker", "metrics.jsonl and the page have each step without any", to=trackers),
    carried("project", "metrics.tracker_project", default="huggingface", aliases="wandb_project"),
    needless("logging_steps logging_strategy logging_first_step logging_nan_inf_filter log_on_each_node log_level log_level_replica disable_tqdm include_num_input_tokens_seen skip_memory_metrics", "each step is logged, as a line of metrics.jsonl; daemon.log_level is the level of the log", aliases="logging_dir"),
    carried("log_completions", "samples.per_minute", "prompts a minute whose responses are kept, 30; 0: none", default=False, to=lambda value, given: {}),
    needless("log_multimodal num_completions_to_print log_unique_prompts", "`rlhfd samples` and the page show rollouts", aliases="wandb_log_unique_prompts"),
    missing("log_completions_hub_repo push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision trackio_space_id trackio_bucket_id trackio_static_space_id", "nothing is sent to the hub: a checkpoint is a folder for `hf upload`", unless=lambda value, given: not (given["push_to_hub"] or given["log_completions_hub_repo"])),
    # The machine.
    needless("use_cpu", "a machine without GPUs runs on its CPU; CUDA_VISIBLE_DEVICES hides them", aliases="no_cuda use_mps_device"),
    missing("fp16", "gradients underflow in float16: bfloat16 or float32", key="model.dtype"),
    carried("torch_compile", "model.compile", "each decoder layer, in training and log-prob passes", default=False),
    needless("tf32 torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config use_cache torch_empty_cache_steps auto_find_batch_size", "a pass that does not fit is halved; kernels are those of torch", aliases="use_liger_loss use_liger half_precision_backend fp16_opt_level jit_mode_eval torchdynamo"),
    needless("fsdp fsdp_config deepspeed parallelism_config accelerator_config ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout local_rank debug", "trainer.sharding shards the models over trainer.world_size ranks by FSDP2; auto does where a whole model does not fit", aliases="num_machines ddp_launcher"),
    needless("dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order train_sampling_strategy length_column_name group_by_length ignore_bias_buffers data_seed", "prompts are read by position in an endless, seeded order"),
    needless("full_determinism", "on a CPU a run repeats bit for bit; rollout.deterministic is for vLLM on GPUs"),
)  # fmt: skip


TRL: Final = Trainer(
    name="TRL",
    word="trl",
    release="1.16",
    options=_OPTIONS,
    programs=("trl", "grpo"),
    others=("rloo", "sft", "dpo", "kto", "reward", "vllm-serve"),
    has_programs=True,
    always=(
        ("trainer.loss_rows", "all", "TRL counts rows of groups with equal rewards in the loss"),
        ("rollout.max_prompt_length", PROMPT_TOKENS, "TRL bounds no prompt; a longer one is set aside here"),
        ("buffer.max_staleness", 0, "TRL samples and trains in turns; 1, the default here, lets both go at once"),
    ),
)
