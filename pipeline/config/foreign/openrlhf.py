"""The options of OpenRLHF's `openrlhf.cli.train_ppo_ray`, with the names before 0.10 as aliases."""

from __future__ import annotations

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
    unless_true,
)

_ESTIMATORS = {"rloo": "rloo", "reinforce_baseline": "reinforce_baseline", "group_norm": "grpo", "dr_grpo": "dr_grpo"}
_ONE_GPU = "trainer.world_size is the number of ranks, rollout.workers that of workers, each with GPUs of its own (`rlhfd plan`); with several ranks divide buffer.sample_batch_size, the rows of one, by their number"


def _rows_of_a_rollout(given: Given) -> int:
    return given.count("rollout.batch_size") * given.count("rollout.n_samples_per_prompt")


def _mini_batches(value: Any, given: Given) -> dict[str, Any]:
    found, rest = divmod(_rows_of_a_rollout(given), given.count("train.batch_size"))
    if rest or not found:
        raise NotCarriedError(
            "must divide rollout.batch_size x rollout.n_samples_per_prompt: trainer.mini_batches counts updates of equal size"
        )
    return {"trainer.mini_batches": found}


def _kl(value: Any, given: Given) -> dict[str, Any]:
    in_loss = bool(given["algo.kl.use_loss"])
    return {"trainer.kl_coef": value if in_loss else 0.0, "rollout.kl_coef": 0.0 if in_loss else value}


def _kl_estimator(value: Any, given: Given) -> dict[str, Any]:
    # use_kl_estimator_k3, the option's name in earlier releases, is a switch.
    name = ("k3" if value else "k1") if isinstance(value, bool) else value
    return {"trainer.kl_estimator" if given["algo.kl.use_loss"] else "rollout.kl_estimator": name}


def _prompts(value: Any, given: Given) -> dict[str, Any]:
    names = [name.strip() for name in str(value).split(",")]
    if len(names) == 1:
        return {"prompts.path": data_path(names[0])}
    probs = str(given["data.prompt_probs"] or "").split(",") if "data.prompt_probs" in given else ["1"] * len(names)
    if len(probs) != len(names):
        raise NotCarriedError(f"data.prompt_probs has {len(probs)} for {len(names)} data sets")
    return {
        "prompts.sources": [
            {"path": data_path(name), "weight": float(one)} for name, one in zip(names, probs, strict=True)
        ]
    }


def _reward_models(value: Any, given: Given) -> dict[str, Any]:
    paths = [path.strip() for path in str(value).split(",")]
    if len(paths) == 1:
        return {"model.reward": value}
    if given["reward.remote_url"]:
        raise NotCarriedError("OpenRLHF loads no reward model beside reward.remote_url")
    return {"rewards": [{"name": "model", "path": path} for path in paths]}


def _remote(value: Any, given: Given) -> dict[str, Any]:
    place = str(value)
    if place.endswith(".py"):
        return {"rewards": [{"name": f"{PurePosixPath(place).stem}:reward_func"}]}
    if not place.startswith(("http://", "https://")):
        raise NotCarriedError("must be a Python file, or the address of a service")
    return {"rewards": [{"name": "remote", "url": one} for one in place.split(",")]}


def _episodes(value: Any, given: Given) -> dict[str, Any]:
    files = given["data.prompt_dataset"]
    return passes(value, "train.num_episodes", {} if files is None else _prompts(files, given))


def _clip(value: Any, given: Given) -> dict[str, Any]:
    if not is_ppo(given):
        # OpenRLHF clips what is left of a score after its group; the default is beyond that of most runs.
        if "reward.clip_range" not in given or _is_beyond_groups(value, given):
            return {}
        raise NotCarriedError(
            "OpenRLHF clips scores that are compared with their group already, rollout.reward_clip those before: without a group, that is with gae, both are the same"
        )
    if not isinstance(value, list) or len(value) != 2 or value[0] != -value[1]:
        raise NotCarriedError("rollout.reward_clip is a range around 0: -10 10 is 10")
    return {"rollout.reward_clip": value[1]}


def _is_beyond_groups(value: Any, given: Given) -> bool:
    """Return whether a range has every score that is divided by the deviation of its group."""
    if given["algo.advantage.estimator"] != "group_norm" or given["algo.advantage.no_std_norm"]:
        return False
    low, high = value
    group = given.count("rollout.n_samples_per_prompt")
    return bool(min(-low, high) >= (group - 1) / group**0.5)


def _aggregation(value: Any, given: Given) -> dict[str, Any]:
    if given["actor.policy_loss_type"] == "gspo":
        # As OpenRLHF does, whatever is set.
        return {"trainer.loss_aggregation": "sequence_mean"}
    modes = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"}
    return dict(by_value("trainer.loss_aggregation", modes, otherwise=" or ".join(modes))(value, given))


def _bounds(value: Any, given: Given) -> dict[str, Any]:
    if not isinstance(value, list) or len(value) != 2:
        raise NotCarriedError("must be two numbers")
    return {"trainer.clip_low": value[0], "trainer.clip_high": value[1]}


def _schedule(value: Any, given: Given) -> dict[str, Any]:
    if value not in ("constant", "constant_with_warmup"):
        raise NotCarriedError(
            "a fall needs its number of steps, which follows from the prompts there: trainer.schedule and trainer.decay_steps"
        )
    return {"trainer.decay_steps": 0}


def _corrects_by_ratio(given: Given) -> bool:
    """Return whether the ratio of gspo begins at the engine's log-probs, in place of a weight beside it."""
    is_on = given["algo.advantage.is_correction_enable"] or given["enable_vllm_is_correction"]
    return given["actor.policy_loss_type"] == "gspo" and bool(
        is_on or given["algo.advantage.is_correction_level"] != "off"
    )


def _correction(value: Any, given: Given) -> dict[str, Any]:
    if _corrects_by_ratio(given):
        return {}
    if value == "off":
        return {"trainer.importance_correction": "none"}
    if given["algo.advantage.is_correction_gating"] not in (None, "ratio"):
        # The gate is listed, and its threshold is no ratio: no weight of another kind takes its place.
        return {"trainer.importance_correction": "none"}
    mode, threshold = given["algo.advantage.is_correction_mode"], given["algo.advantage.is_correction_threshold"]
    # One number is the upper bound.
    low, high = [0.0, *(threshold if isinstance(threshold, list) else [threshold])][-2:]
    if value == "token" and mode == "mask" and low == 0.5:
        return {"trainer.importance_correction": "icepop", "trainer.importance_cap": high}
    if value == "token" and low == 0:
        return {
            "trainer.importance_correction": "token_mask" if mode == "mask" else "token",
            "trainer.importance_cap": high,
        }
    raise NotCarriedError(
        "a token's weight is cut or masked at a cap, with icepop masked below 0.5 too; by sequence it is the product, not OpenRLHF's mean; as it stands trainer.importance_correction has its default"
    )


def _former_correction(value: Any, given: Given) -> dict[str, Any]:
    if not value or _corrects_by_ratio(given):
        return {}
    kind, (low, high) = given["algo.advantage.is_correction_type"], given["algo.advantage.is_correction_threshold"]
    if kind == "icepop" and low == 0.5:
        return {"trainer.importance_correction": "icepop", "trainer.importance_cap": high}
    if kind == "tis" and low == 0:
        return {"trainer.importance_correction": "token", "trainer.importance_cap": high}
    raise NotCarriedError(
        f"{kind} with the bounds {low:g} and {high:g}: a token's weight is cut at a cap, with no bound below it, or with icepop left out below 0.5; trainer.importance_correction is none in its place"
    )


def _gate(value: Any, given: Given) -> dict[str, Any]:
    if given["algo.advantage.is_correction_gating"] not in (None, "ratio"):
        raise NotCarriedError("the bound of another statistic than the ratio")
    return {}


def _no_std(value: Any, given: Given) -> dict[str, Any]:
    estimator_name = given["algo.advantage.estimator"]
    if value and estimator_name in ("gae", "reinforce", "reinforce_baseline"):
        raise NotCarriedError(
            f"advantages of {estimator_name} are divided by their deviation here too; with PPO trainer.whiten_advantages = false leaves out mean and deviation"
        )
    return {}


def _filtering(value: Any, given: Given) -> dict[str, Any]:
    if value and _ESTIMATORS.get(str(given["algo.advantage.estimator"])) not in ("grpo", "dr_grpo", "rloo"):
        raise NotCarriedError("prompts come in the place of groups with group_norm, dr_grpo and rloo alone")
    return {"rollout.max_refill": 1000} if value else {}


def _evaluated(key: str) -> Any:
    return only_if(lambda given: "eval.dataset" in given and given.number("eval.steps") > 0, key)


_OPTIONS: Final[tuple[Option, ...]] = (
    # The models.
    carried("actor.model_name_or_path", "model.actor", "a folder: no model is downloaded, `hf download` makes one", aliases="pretrain"),
    carried("critic.model_name_or_path", "model.critic", "left out, the actor's backbone with a value head of zeros; in OpenRLHF the reward model", to=of_ppo("model.critic"), aliases="critic_pretrain"),
    carried("reward.model_name_or_path", "model.reward rewards", "a folder; several, with commas between them, are a table each, whose scores are added up", to=_reward_models, aliases="reward_pretrain"),
    carried("reward.remote_url", "rewards", "a Python file: `module:reward_func`, to be written with the parameters of rlhfd; an address: the reward `remote`, whose requests have another form (docs/rewards.md)", to=_remote, aliases="remote_rm_url"),
    missing("train.agent_func_path", "an environment of your own answers each response (docs/environments.md)", key="rollout.environment", aliases="agent_func_path"),
    carried("ds.param_dtype", "model.dtype", to=by_value("model.dtype", {"bf16": "bfloat16"}, otherwise="gradients underflow in float16: bfloat16 or float32"), default="bf16"),
    carried("bf16", "model.dtype", to=lambda value, given: {"model.dtype": "bfloat16" if value else "float32"}),
    carried("ds.lora.rank", "model.lora_rank", default=0, aliases="lora_rank"),
    carried("ds.lora.alpha", "model.lora_alpha", default=16, written=True, to=only_if(lambda given: bool(given["ds.lora.rank"]), "model.lora_alpha"), aliases="lora_alpha"),
    carried("ds.lora.target_modules", "model.lora_targets", default="all-linear", to=lambda value, given: {"model.lora_targets": [value] if isinstance(value, str) and value != "all-linear" else value} if given["ds.lora.rank"] else {}, aliases="target_modules"),
    missing("ds.lora.dropout ds.load_in_4bit", "adapters do not drop out; weights are not quantized", aliases="lora_dropout load_in_4bit"),
    carried("ref.offload", "model.reference_device", "host: its layers come from host memory", to=lambda value, given: {"model.reference_device": "host"} if value else {}, aliases="ref_reward_offload"),
    missing("reward.offload", "the reward model is in each worker"),
    # The prompts.
    carried("data.prompt_dataset", "prompts.path prompts.sources", "a file, a folder, or `\"datasets:NAME\"` for one in the local cache", to=_prompts, aliases="prompt_data"),
    carried("data.prompt_probs", "prompts.sources", "the weight of each source", to=lambda value, given: {}, aliases="prompt_data_probs"),
    carried("data.prompt_split", "prompts.split", default="train", aliases="prompt_split"),
    carried("data.input_key", "prompts.prompt_column", default="input", written=True, aliases="input_key"),
    carried("data.label_key", "prompts.answer_column", aliases="label_key"),
    carried("data.apply_chat_template", "prompts.template", "chat: all prompts; left out, lists of messages alone", default=False, to=lambda value, given: {"prompts.template": "chat"} if value else {}, aliases="apply_chat_template"),
    missing("data.input_template", "write the prompts of the file so", aliases="input_template"),
    missing("data.max_samples", "a file is read whole", aliases="max_samples"),
    carried("data.max_len", "rollout.max_length", "tokens of prompt and response; a prompt that leaves no room is set aside", default=2048, written=True, to=lambda value, given: {} if "prompt_max_len" in given else {"rollout.max_length": value}, aliases="max_len"),
    carried("prompt_max_len", "rollout.max_prompt_length", "of OpenRLHF before 0.10; longer prompts are set aside"),
    carried("rollout.max_new_tokens", "rollout.max_new_tokens", aliases="generate_max_len"),
    needless("data.image_key data.max_images_per_prompt", "images are in the column images (docs/images.md)"),
    needless("data.disable_fast_tokenizer data.dataloader_num_workers", "prompts are read by position", aliases="disable_fast_tokenizer"),
    # The rollouts.
    carried("rollout.batch_size", "buffer.sample_batch_size", "OpenRLHF counts prompts, rlhfd rows: times rollout.n_samples_per_prompt; the key rollout.batch_size here is the prompts of a ticket", default=1024, to=lambda value, given: {"buffer.sample_batch_size": _rows_of_a_rollout(given)}, written=True, aliases="rollout_batch_size"),
    carried("rollout.n_samples_per_prompt", "rollout.num_generations", default=1, to=generations, written=True, aliases="n_samples_per_prompt"),
    carried("rollout.temperature", "rollout.temperature", default=1.0, aliases="temperature"),
    carried("rollout.top_p", "rollout.top_p", default=1.0, aliases="top_p"),
    carried("rollout.micro_batch_size", "rollout.logits_forward_batch_size", "rows of a log-prob pass of a worker", default=1, aliases="micro_rollout_batch_size"),
    needless("rollout.vllm_generate_batch_size rollout.max_tokens_per_gpu rollout_tasks_per_gpu", "a worker fills its engine (rollout.tickets_ahead)", aliases="vllm_generate_batch_size rollout_max_tokens_per_gpu"),
    carried("vllm.num_engines", "rollout.engine rollout.workers", "a worker has one engine; 0: transformers", to=lambda value, given: {"rollout.engine": "vllm", "rollout.workers": value} if value else {"rollout.engine": "transformers"}, aliases="vllm_num_engines"),
    missing("vllm.tensor_parallel_size", "rollout.tensor_parallel is the GPUs of a worker: set it", key="rollout.tensor_parallel", off=(1,), aliases="vllm_tensor_parallel_size"),
    missing("vllm.gpu_memory_utilization", "rollout.cache_bytes is the size of the cache in bytes, no share of the GPU", key="rollout.cache_bytes", aliases="vllm_gpu_memory_utilization"),
    missing("vllm.enable_sleep ds.enable_sleep", "rollout.sleep needs buffer.max_staleness = 0: set both", key="rollout.sleep", aliases="vllm_enable_sleep deepspeed_enable_sleep"),
    needless("vllm.sync_backend vllm.sync_with_ray vllm.enable_prefix_caching vllm.enforce_eager", "weights go through shared memory; the engine has vLLM's own defaults", aliases="vllm_sync_backend vllm_sync_with_ray enable_prefix_caching enforce_eager"),
    carried("train.async_enable", "buffer.max_staleness", "train.async_queue_size versions; without it the conversion sets 0", default=False, to=lambda value, given: {"buffer.max_staleness": given.count("train.async_queue_size")} if value else {}, aliases="async_train"),
    carried("train.async_queue_size", "buffer.max_staleness", "with train.async_enable", default=1, to=lambda value, given: {}, aliases="async_queue_size"),
    carried("train.partial_rollout_enable", "rollout.weight_updates", "in_flight", to=lambda value, given: {"rollout.weight_updates": "in_flight"} if value else {}, aliases="partial_rollout"),
    # The batch and its updates.
    carried("train.batch_size", "trainer.mini_batches", "OpenRLHF counts the rows of an update, rlhfd the updates of a rollout", default=128, to=_mini_batches, written=True, aliases="train_batch_size"),
    carried("train.micro_batch_size", "trainer.micro_batch_size", default=1, to=lambda value, given: {} if given["train.dynamic_batch_enable"] else {"trainer.micro_batch_size": value}, aliases="micro_train_batch_size"),
    carried("train.dynamic_batch_enable", "trainer.micro_batch_tokens", "with train.max_tokens_per_gpu", default=False, to=lambda value, given: {}, aliases="use_dynamic_batch"),
    carried("train.max_tokens_per_gpu", "trainer.micro_batch_tokens", "with train.dynamic_batch_enable", default=16192, written=True, to=only_if(lambda given: bool(given["train.dynamic_batch_enable"]), "trainer.micro_batch_tokens"), aliases="train_max_tokens_per_gpu"),
    carried("train.max_epochs", "trainer.epochs", "passes over the rows of a step, in both", default=1, aliases="max_epochs"),
    carried("train.num_episodes", "trainer.max_epochs", "passes over the prompts", default=1, written=True, to=_episodes, aliases="num_episodes"),
    # The optimizer.
    carried("actor.adam.lr", "trainer.learning_rate", "of adapters too; here they have 1e-5", written=True, default=1e-6, aliases="actor_learning_rate"),
    carried("critic.adam.lr", "trainer.critic_learning_rate", default=9e-6, written=True, to=of_ppo("trainer.critic_learning_rate"), aliases="critic_learning_rate"),
    carried("actor.adam.betas", "trainer.betas", default=[0.9, 0.95], written=True, aliases="adam_betas"),
    carried("actor.adam.weight_decay", "trainer.weight_decay", default=0.0, aliases="l2"),
    carried("actor.max_norm", "trainer.gradient_clip_norm", default=1.0, aliases="max_norm"),
    carried("actor.lr_scheduler", "trainer.schedule trainer.decay_steps", "OpenRLHF's cosine falls over all steps, whose number follows from the prompts; here it is trainer.decay_steps", default="cosine_with_min_lr", to=_schedule, written=True, aliases="lr_scheduler"),
    missing("actor.lr_warmup_ratio", "trainer.warmup_ratio is a share of trainer.decay_steps or trainer.max_steps, not of steps that follow from the prompts", key="trainer.warmup_ratio", default=0.03, written=True, unless=lambda value, given: not value, aliases="lr_warmup_ratio"),
    missing("actor.min_lr_ratio", "trainer.final_learning_rate_ratio, with the fall that it ends", key="trainer.final_learning_rate_ratio", aliases="min_lr_ratio"),
    carried("actor.optim", "trainer.optimizer", "muon: the learning rate is AdamW's (actor.adam.lr), the momentum 0.95", default="adam", to=by_value("trainer.optimizer", {"adam": "adamw", "muon": "muon"}, otherwise="adam or muon")),
    missing("actor.muon.* critic.optim critic.muon.* actor.adam.eps critic.adam.eps ds.adam_offload ds.grad_accum_dtype", "the optimizer's state is in float32 on the device, AdamW's epsilon is 1e-8, and the critic has the actor's", off=("adam", 1e-8), aliases="adam_offload grad_accum_dtype"),
    missing("critic.adam.betas critic.adam.weight_decay critic.lr_scheduler critic.lr_warmup_ratio critic.min_lr_ratio critic.max_norm", "the critic has the actor's optimizer, with a learning rate of its own", key="trainer.critic_learning_rate", unless=lambda value, given: not is_ppo(given)),
    missing("train.enable_ema train.ema_beta ptx_coef", "the weights of a checkpoint are those of its step", aliases="enable_ema ema_beta"),
    # The loss.
    carried("actor.policy_loss_type", "trainer.policy_loss rollout.log_probs", "the ratio of gspo with a correction begins at the engine's log-probs: rollout.log_probs is engine, and no weight is beside it", default="ppo", to=lambda value, given: {"trainer.policy_loss": value, **({"rollout.log_probs": "engine"} if _corrects_by_ratio(given) else {})}, aliases="policy_loss_type"),
    carried("actor.loss_agg_mode", "trainer.loss_aggregation", "gspo is always aggregated by sequence_mean in OpenRLHF", default="token-mean", to=_aggregation, written=True, aliases="loss_agg_mode"),
    carried("actor.eps_clip", "trainer.clip_range", default=0.2, aliases="eps_clip"),
    carried("actor.eps_clip_low_high", "trainer.clip_low trainer.clip_high", to=_bounds, aliases="eps_clip_low_high"),
    carried("actor.dual_clip", "trainer.dual_clip", aliases="dual_clip"),
    carried("actor.entropy_coef", "trainer.entropy_coef", aliases="entropy_loss_coef"),
    missing("actor.aux_loss_coef", "no loss of a router's balance", off=(0,), aliases="aux_loss_coef"),
    carried("critic.value_clip", "trainer.value_clip_range", default=0.5, written=True, to=of_ppo("trainer.value_clip_range"), aliases="value_clip"),
    carried("critic.freezing_steps", "trainer.critic_warmup_steps", "plus 1: OpenRLHF counts steps from 0, and trains the actor in those above", default=-1, written=True, to=lambda value, given: {"trainer.critic_warmup_steps": max(0, value + 1)} if is_ppo(given) else {}, aliases="freezing_actor_steps"),
    carried("algo.advantage.estimator", "rollout.algorithm rollout.advantages", "gae: ppo, group_norm: grpo; reinforce and flash_reinforce are missing", default="gae", to=estimator(_ESTIMATORS, lambda given: bool(given["algo.advantage.no_std_norm"])), written=True, aliases="advantage_estimator"),
    carried("algo.advantage.gamma", "rollout.gamma", default=1, to=of_ppo("rollout.gamma"), aliases="gamma"),
    carried("algo.advantage.lambd", "rollout.lam", default=1, written=True, to=of_ppo("rollout.lam"), aliases="lambd"),
    carried("algo.advantage.no_std_norm", "rollout.advantages", "with group_norm: dr_grpo; missing with gae, reinforce and reinforce_baseline", default=False, to=_no_std, aliases="no_advantage_std_norm"),
    carried("algo.advantage.is_correction_level", "trainer.importance_correction", default="off", written=True, to=_correction),
    carried("algo.advantage.is_correction_mode", "trainer.importance_correction", default="mask", to=lambda value, given: {}),
    missing("algo.advantage.is_correction_gating", "the gate is the ratio: trainer.importance_correction is none in its place", key="trainer.importance_correction", off=("ratio",)),
    carried("algo.advantage.is_correction_threshold", "trainer.importance_cap", "the upper bound; the lower one is 0.5 with icepop", default=[0.5, 5.0], to=_gate),
    carried("algo.advantage.is_correction_enable", "trainer.importance_correction", "of OpenRLHF 0.10, with is_correction_type", to=_former_correction),
    carried("algo.advantage.is_correction_type", "trainer.importance_correction", "of OpenRLHF 0.10: icepop; tis with a lower bound of 0: token; seq-mask-tis is missing", default="tis", to=lambda value, given: {}),
    carried("enable_vllm_is_correction", "trainer.importance_correction", "of OpenRLHF before 0.10: token", to=lambda value, given: {"trainer.importance_correction": "token"} if value and not _corrects_by_ratio(given) else {}),
    carried("vllm_is_truncated_threshold", "trainer.importance_cap", "of OpenRLHF before 0.10", to=only_if(lambda given: bool(given["enable_vllm_is_correction"]) and not _corrects_by_ratio(given), "trainer.importance_cap")),
    carried("algo.kl.init_coef", "rollout.kl_coef trainer.kl_coef", "in the reward, with algo.kl.use_loss in the loss; in the reward of GRPO rlhfd takes the mean of a response, OpenRLHF the sum from each token on", default=0.01, written=True, to=_kl, aliases="init_kl_coef"),
    carried("algo.kl.use_loss", "trainer.kl_coef", "the weight in the loss in place of that in the reward", default=False, to=lambda value, given: {}, aliases="use_kl_loss"),
    carried("algo.kl.estimator", "rollout.kl_estimator trainer.kl_estimator", "of the weight in force", default="k1", written=True, to=_kl_estimator, aliases="kl_estimator use_kl_estimator_k3"),
    missing("algo.kl.target algo.kl.horizon", "the weight in the reward is constant; trainer.kl_coef_target adapts the one in the loss, over 10,000 rows", key="trainer.kl_coef_target", unless=lambda value, given: "algo.kl.target" not in given and "kl_target" not in given, aliases="kl_target kl_horizon"),
    missing("algo.kl.unbiased_gradient", "the KL of the loss is not multiplied by the ratio of the policies"),
    carried("algo.dynamic_filtering_enable", "rollout.max_refill", "prompts in the place of groups with equal rewards; of OpenRLHF's range 0 1, and of estimators that compare a group", default=False, to=_filtering, aliases="dynamic_filtering"),
    missing("algo.dynamic_filtering_range", "groups of equal rewards are left out, whatever the reward", key="rollout.max_refill", unless=lambda value, given: not given["algo.dynamic_filtering_enable"] or value == [0, 1], aliases="dynamic_filtering_reward_range"),
    # The rewards.
    carried("reward.clip_range", "rollout.reward_clip", "with gae: OpenRLHF clips to -10 ... 10, rlhfd not; other estimators clip there what is left of a score after its group", default=[-10, 10], written=True, to=_clip, aliases="reward_clip_range"),
    carried("reward.overlong_buffer_len", "rollout.overlong_buffer_tokens", to=lambda value, given: {"rollout.overlong_buffer_tokens": int(value)} if value else {}, aliases="overlong_buffer_len"),
    carried("reward.overlong_penalty_factor", "rollout.overlong_penalty", default=1, to=only_if(lambda given: bool(given["reward.overlong_buffer_len"]), "rollout.overlong_penalty"), aliases="overlong_penalty_factor"),
    missing("reward.stop_properly_penalty_coef", "trainer.mask_cut_responses leaves cut responses out; a reward of your own can punish them", key="trainer.mask_cut_responses", aliases="stop_properly_penalty_coef"),
    missing("reward.normalize_enable", "rollout.reward_scale divides scores by their running deviation, OpenRLHF by mean and deviation that the reward model has stored", key="rollout.reward_scale", aliases="normalize_reward"),
    # Checkpoints, evaluation, reports.
    carried("ckpt.output_dir", "daemon.state_dir", "a folder of each run is in runs/ of it, its checkpoints below", aliases="save_path"),
    carried("ckpt.save_steps", "trainer.save_every", "-1: at the end alone", default=-1, written=True, to=positive("trainer.save_every"), aliases="save_steps"),
    carried("ckpt.max_num", "trainer.keep_checkpoints", default=3, aliases="max_ckpt_num"),
    needless("ckpt.path ckpt.save_hf ckpt.disable_ds ckpt.max_mem ckpt.load_enable ckpt.best_metric_key ds.use_universal_ckpt critic.save_value_network", "a checkpoint is a folder for from_pretrained with all of the run's state; a start goes on from the last one (trainer.resume)", aliases="ckpt_path save_hf_ckpt disable_ds_ckpt max_ckpt_mem load_checkpoint use_ds_universal_ckpt save_value_network best_metric_key"),
    carried("eval.dataset", "evaluation.files", "with eval.steps", to=lambda value, given: {"evaluation.files": [str(value)]} if given.number("eval.steps") > 0 else {}, aliases="eval_dataset"),
    carried("eval.steps", "evaluation.every", default=-1, to=_evaluated("evaluation.every"), aliases="eval_steps"),
    carried("eval.temperature", "evaluation.temperature", default=0.6, written=True, to=_evaluated("evaluation.temperature"), aliases="eval_temperature"),
    carried("eval.n_samples_per_prompt", "evaluation.num_generations", default=4, written=True, to=_evaluated("evaluation.num_generations"), aliases="eval_n_samples_per_prompt"),
    missing("eval.split", "the split of the prompts (prompts.split) is that of the held-out files", key="prompts.split", aliases="eval_split"),
    needless("logger.logging_steps", "each step is logged", aliases="logging_steps"),
    carried("logger.wandb.key", "metrics.tracker", "wandb; its key is in WANDB_API_KEY alone", to=lambda value, given: {"metrics.tracker": ["wandb"]} if value else {}, aliases="use_wandb"),
    carried("logger.wandb.project", "metrics.tracker_project", default="openrlhf_train_ppo", aliases="wandb_project"),
    carried("logger.wandb.run_name", "daemon.run_name", aliases="wandb_run_name"),
    missing("logger.wandb.org logger.wandb.group", "WANDB_ENTITY and WANDB_RUN_GROUP are wandb's own variables", aliases="wandb_org wandb_group"),
    carried("logger.tensorboard_dir", "metrics.tracker", "tensorboard; its files are in the run's folder", to=lambda value, given: {"metrics.tracker": ["tensorboard"]} if value else {}, aliases="use_tensorboard"),
    carried("train.seed", "daemon.seed", "other random numbers than OpenRLHF's", default=42, aliases="seed"),
    carried("train.full_determinism_enable", "rollout.deterministic", aliases="full_determinism"),
    # The machine.
    missing("actor.num_nodes actor.num_gpus_per_node critic.num_nodes critic.num_gpus_per_node ref.num_nodes ref.num_gpus_per_node reward.num_nodes reward.num_gpus_per_node", _ONE_GPU, key="trainer.world_size", off=(1,), aliases="actor_num_nodes actor_num_gpus_per_node critic_num_nodes critic_num_gpus_per_node ref_num_nodes ref_num_gpus_per_node reward_num_nodes reward_num_gpus_per_node"),
    needless("train.colocate_all train.colocate_actor_ref train.colocate_critic_reward", "`rlhfd plan` places the roles; model.reference_device that of the reference", aliases="colocate_all_models colocate_actor_ref colocate_critic_reward"),
    carried("actor.gradient_checkpointing_enable", "trainer.activation_checkpointing", "on a GPU where it is left out", to=unless_true("trainer.activation_checkpointing"), aliases="gradient_checkpointing"),
    carried("ds.packing_samples", "trainer.packing", "where the models can, if it is left out", to=unless_true("trainer.packing"), aliases="packing_samples"),
    needless("ds.zero_stage ds.zpg ds.overlap_comm ds.deepcompile ds.attn_implementation ds.experts_implementation ds.use_liger_kernel ds.ring_attn_size ds.ring_attn_head_stride ds.tensor_parallel_size ds.value_head_prefix actor.gradient_checkpointing_reentrant local_rank use_ms",
             "trainer.sharding shards the models over trainer.world_size ranks by FSDP2; kernels are those of torch", aliases="zero_stage zpg overlap_comm deepcompile attn_implementation flash_attn use_liger_kernel ring_attn_size ring_head_stride ds_tensor_parallel_size value_head_prefix gradient_checkpointing_use_reentrant actor_init_on_gpu perf"),
    missing("actor.freeze_visual_encoder", "all weights are trained, or adapters", key="model.lora_rank", aliases="freeze_visual_encoder"),
)  # fmt: skip

OPENRLHF: Final = Trainer(
    name="OpenRLHF",
    word="openrlhf",
    release="0.11",
    options=_OPTIONS,
    programs=("train_ppo_ray",),
    always=(
        ("trainer.loss_rows", "all", "OpenRLHF counts rows of groups with equal rewards in the loss"),
        (
            "buffer.max_staleness",
            0,
            "OpenRLHF samples and trains in turns without train.async_enable; 1 is the default here",
        ),
    ),
)
