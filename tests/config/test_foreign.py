"""Options of TRL, verl and OpenRLHF: the tables, the page and the answers about them, conversions and their files."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import transformers

from pipeline.config import load as config_load
from pipeline.config.advice import SECTIONS, problem_of_key, problem_of_section
from pipeline.config.foreign import conversion, files
from pipeline.config.foreign.lookup import _TOO_GENERAL, PAGE, TRAINERS, WORDS, answer
from pipeline.config.foreign.option import Trainer
from pipeline.errors import ConfigError

KEYS = {f"{section}.{name}" for section, model in SECTIONS.items() for name in type(model).model_fields} | {"rewards"}
OWN_NAMES = {key.rpartition(".")[2] for key in KEYS}
BY_WORD = {trainer.word: trainer for trainer in TRAINERS}
A, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
CORRECTION = "algorithm.rollout_correction"


def converted(word: str, options: dict[str, Any]) -> conversion.Conversion:
    return conversion.convert(BY_WORD[word], options, {})


def values(word: str, options: dict[str, Any]) -> dict[str, Any]:
    return {key: setting.value for key, setting in converted(word, options).settings.items()}


def lost(word: str, options: dict[str, Any]) -> list[str]:
    """Return what is lost of some options beyond that which is lost of a file with none."""
    without = converted(word, {}).lost
    return [line for line in converted(word, options).lost if line not in without]


class TestTables:
    @pytest.mark.parametrize("trainer", TRAINERS, ids=lambda trainer: trainer.word)
    def test_every_row_names_keys_that_are_there_or_a_reason_and_no_option_has_two_rows(self, trainer: Trainer) -> None:
        names = [name for option in trainer.options for name in (*option.names, *option.aliases)]

        assert len(names) == len(set(names)) > 150
        for option in trainer.options:
            assert set(option.key) <= KEYS, option.name
            assert option.key if option.kind == "carried" else option.remark, option.name
            assert len(option.names) == 1 or option.kind != "carried", option.name

    def test_the_table_of_trl_has_every_training_argument_of_transformers(self) -> None:
        names = {one.name for one in dataclasses.fields(transformers.TrainingArguments) if not one.name.startswith("_")}

        assert len(names) > 100
        assert {name for name in names if BY_WORD["trl"].find(name) is None} == set()

    def test_every_word_of_the_field_is_a_key_or_an_answer(self) -> None:
        assert {key for key in WORDS.values() if " " not in key} <= KEYS


class TestAnswers:
    @pytest.mark.parametrize("trainer", TRAINERS, ids=lambda trainer: trainer.word)
    def test_a_known_option_is_answered_by_its_key_or_the_page_never_by_the_nearest_spelling(
        self, trainer: Trainer
    ) -> None:
        keys: dict[str, set[str]] = {name: {meant} for name, meant in WORDS.items()}
        for option in (option for each in TRAINERS for option in each.options):
            for name in (*option.names, *option.aliases):
                keys.setdefault(name.rpartition(".")[2].lower(), set()).update(option.key)
        names = {name.rpartition(".")[2].lower() for one in trainer.options for name in (*one.names, *one.aliases)}
        # The one with a table in its answer is tried in tests/config/test_mistakes.py.
        tried = sorted(name for name in names - OWN_NAMES - {*WORDS, "reward_funcs"} if answer(name))

        assert len(tried) > 80
        for name in tried:
            for problem in (problem_of_key("trainer", name), problem_of_section(name, 1)):
                _, is_key, meant = problem.removesuffix("?").partition(", did you mean ")
                assert {meant, f"trainer.{meant}"} & keys[name] if is_key else PAGE in problem, problem
        # Words that mean other things elsewhere, and those that are keys here.
        assert {name for name in names - OWN_NAMES if not answer(name) and "*" not in name} <= _TOO_GENERAL

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("logging_steps", "TRL's logging_steps is needless here: each step is logged"),
            ("kl_loss_coef", f"verl's {A}.kl_loss_coef is trainer.kl_coef here: with use_kl_loss ({PAGE})"),
            ("filter_groups", "verl's algorithm.filter_groups.enable is rollout.max_refill here: "),
            ("val_kwargs", f"a table of verl: {PAGE} has the key of each of its options"),
            ("kl_ctrl", f"a table of verl: {PAGE} has the key of each of its options"),
            ("save_steps", "TRL's save_steps and OpenRLHF's ckpt.save_steps are trainer.save_every here, with differ"),
            (
                "gpu_memory_utilization",
                f"verl's {R}.gpu_memory_utilization and OpenRLHF's vllm.gpu_memory_utilization are missing here: ",
            ),
            (
                "eps_clip_low_high",
                "OpenRLHF's actor.eps_clip_low_high is trainer.clip_low and trainer.clip_high here (",
            ),
        ],
    )
    def test_the_answer_names_trainer_key_and_difference(self, name: str, said: str) -> None:
        assert problem_of_key("trainer", name).startswith(f"unknown key trainer.{name}, {said}")

    @pytest.mark.parametrize(
        ("name", "key"),
        [("eps_clip", "clip_range"), ("ppo_epochs", "epochs"), ("label_key", "prompts.answer_column"),
         ("max_response_length", "rollout.max_new_tokens"), ("lr", "learning_rate"),
         ("n", "rollout.num_generations")],
    )  # fmt: skip
    def test_an_option_of_the_same_meaning_is_answered_by_its_key_alone(self, name: str, key: str) -> None:
        assert problem_of_key("trainer", name) == f"unknown key trainer.{name}, did you mean {key}?"

    def test_an_unknown_option_is_answered_by_the_page(self) -> None:
        for problem in (problem_of_key("trainer", "zzz"), problem_of_section("zzz", 1)):
            assert problem.endswith(f"{PAGE} those of other trainers")
        assert lost("verl", {f"{A}.zzz": 1, f"{A}.use_kl_loss": True}) == [f"{A}.zzz: no option that {PAGE} has"]


TRL_CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    # A generation is a step: 8 x 4 rows, in 4 / 2 updates, twice; TRL counts updates.
    (
        {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "steps_per_generation": 4,
         "num_iterations": 2, "max_steps": 40, "warmup_steps": 6, "save_steps": 10},
        {"buffer.sample_batch_size": 32, "trainer.mini_batches": 2, "trainer.epochs": 2, "trainer.micro_batch_size": 8,
         "trainer.max_steps": 10, "trainer.warmup_steps": 2, "trainer.save_every": 3},
    ),
    # Without steps_per_generation it is that of an update.
    (
        {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "max_steps": 40},
        {"buffer.sample_batch_size": 32, "trainer.max_steps": 40, "trainer.decay_steps": 40,
         "trainer.final_learning_rate_ratio": 0.0},
    ),
    (
        {"per_device_train_batch_size": 4, "generation_batch_size": 64, "num_processes": 2, "max_steps": 16},
        {"buffer.sample_batch_size": 32, "trainer.mini_batches": 8, "trainer.world_size": 2, "trainer.max_steps": 2},
    ),
    ({"warmup_ratio": 0.1, "warmup_steps": 3, "max_steps": 50}, {"trainer.warmup_steps": 3}),
    ({"lr_scheduler_type": "constant", "warmup_steps": 10}, {"trainer.warmup_steps": None}),
    ({"lr_scheduler_type": "constant", "warmup_ratio": 0.1, "max_steps": 50}, {"trainer.warmup_ratio": None}),
    ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 10}, {"trainer.warmup_steps": 10}),
    ({"min_p": 0.1, "scale_rewards": "batch", "shuffle_dataset": False, "max_prompt_length": 64},
     {"rollout.min_p": 0.1, "rollout.advantages": "dr_grpo", "trainer.advantage_scale": "batch",
      "prompts.shuffle": False, "rollout.max_prompt_length": 64, "rollout.long_prompts": "cut_left"}),
    ({"lr_scheduler_type": "cosine", "max_steps": 50},
     {"trainer.schedule": "cosine", "trainer.decay_steps": 50, "trainer.final_learning_rate_ratio": 0.0}),
    ({"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.25}, "max_steps": 50},
     {"trainer.schedule": "cosine", "trainer.final_learning_rate_ratio": 0.25}),
    ({}, {"trainer.max_epochs": 3}),
    ({"warmup_steps": 0, "warmup_ratio": 0.1, "max_steps": 50}, {"trainer.warmup_ratio": 0.1}),
    ({"num_train_epochs": 2, "max_steps": -1}, {"trainer.max_epochs": 2}),
    ({}, {"trainer.kl_coef": 0.0, "trainer.loss_rows": "all", "buffer.max_staleness": 0}),
    ({}, {"rollout.max_new_tokens": 512, "rollout.max_prompt_length": 1024}),
    ({"loss_type": "grpo"}, {"trainer.loss_aggregation": "sequence_mean"}),
    (
        {"loss_type": "dr_grpo", "max_completion_length": 99, "scale_rewards": False},
        {"trainer.loss_aggregation": "dr_grpo", "trainer.dr_grpo_tokens": 99, "rollout.advantages": "dr_grpo"},
    ),
    (
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"trainer.policy_loss": "cispo", "trainer.clip_low": 1.0, "trainer.clip_high": 4.0},
    ),
    (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        {"trainer.policy_loss": "gspo", "trainer.clip_range": 3e-4, "trainer.clip_high": 4e-4},
    ),
    (
        {"use_vllm": True},
        {"rollout.engine": "vllm", "trainer.importance_correction": "sequence_mask", "trainer.importance_cap": 3.0},
    ),
    ({"use_vllm": True, "vllm_importance_sampling_correction": False}, {"trainer.importance_correction": "none"}),
    (
        {"use_peft": True, "lora_target_modules": ["q_proj"]},
        {"model.lora_rank": 16, "model.lora_targets": ["q_proj"], "trainer.learning_rate": 1e-6},
    ),
    ({"reward_model_name_or_path": "r"}, {"model.reward": "r", "rewards": None}),
    (
        {"reward_model_name_or_path": "r", "reward_weights": [0.5]},
        {"model.reward": None, "rewards": [{"name": "model", "path": "r", "weight": 0.5}]},
    ),
    (
        {"reward_model_name_or_path": "r", "reward_funcs": ["accuracy_reward"], "reward_weights": [1.0, 0.5]},
        {"model.reward": "r", "rewards": [{"name": "math", "weight": 0.5}], "prompts.answer_column": "solution"},
    ),
    (
        {"reward_funcs": ["models/kind", "./models/brief", "a.b"], "reward_weights": [1.0, 2.0, 0.5]},
        {"rewards": [{"name": "model", "path": "models/kind"},
                     {"name": "model", "path": "./models/brief", "weight": 2.0},
                     {"name": "a:b", "style": "trl", "weight": 0.5}]},
    ),
    ({"dataset_prompt_column": "problem"}, {"prompts.prompt_column": "problem", "prompts.template": "chat"}),
    ({"dataset_name": "a/b", "dataset_config": "c"}, {"prompts.path": "datasets:a/b:c"}),
    (
        {"datasets": [{"path": "json", "data_files": ["a.jsonl", "b.jsonl"]}, {"path": "c/d", "split": "test"}]},
        {"prompts.sources": [{"path": "a.jsonl"}, {"path": "b.jsonl"}, {"path": "datasets:c/d", "split": "test"}]},
    ),
    ({"adam_beta2": 0.95}, {"trainer.betas": [0.9, 0.95]}),
    ({"optim": "adamw_bnb_8bit"}, {"trainer.optimizer": "adamw_8bit"}),
    ({"report_to": ["wandb", "none"], "save_strategy": "no"}, {"metrics.tracker": ["wandb"], "trainer.save_every": 0}),
    ({"save_steps": 20, "save_strategy": "no"}, {"trainer.save_every": 0}),
    ({"vllm_max_model_length": 2048}, {"rollout.max_length": 2048}),
    # Neither is an earlier name: checkpoints are not in the folder of TensorBoard, and GRPO's data have the run's seed.
    ({"output_dir": "out", "logging_dir": "out/logs", "seed": 7, "data_seed": 8},
     {"daemon.state_dir": "out", "daemon.seed": 7}),
    # Of Open R1's recipes.
    ({"reward_funcs": ["accuracy", "format"]},
     {"rewards": [{"name": "math"}, {"name": "format"}], "prompts.answer_column": "solution"}),
]  # fmt: skip
VERL_CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    # Prompts are counted there, rows and updates here.
    (
        {"algorithm.adv_estimator": "grpo", "data.train_batch_size": 64, f"{R}.n": 8, f"{A}.ppo_mini_batch_size": 16},
        {"rollout.algorithm": "grpo", "rollout.advantages": "grpo", "buffer.sample_batch_size": 512,
         "rollout.num_generations": 8, "trainer.mini_batches": 4, "trainer.kl_coef": 0.0, "rollout.kl_coef": 0.0,
         "trainer.dual_clip": 3.0, "trainer.weight_decay": 0.01, "trainer.importance_correction": "none"},
    ),
    (
        {f"{R}.n": 1, "data.train_batch_size": 256},
        {"rollout.algorithm": "ppo", "rollout.lam": 1.0, "trainer.value_clip_range": 0.5,
         "trainer.critic_warmup_steps": 0, "buffer.sample_batch_size": 256},
    ),
    (
        {"algorithm.adv_estimator": "grpo", "algorithm.norm_adv_by_std_in_grpo": False, f"{R}.n": 4},
        {"rollout.advantages": "dr_grpo"},
    ),
    ({f"{A}.use_kl_loss": True, f"{A}.kl_loss_coef": 0.02, f"{A}.kl_loss_type": "mse"},
     {"trainer.kl_coef": 0.02, "trainer.kl_estimator": "k2"}),
    ({"algorithm.use_kl_in_reward": True, "algorithm.kl_penalty": "low_var_kl"},
     {"rollout.kl_coef": 0.001, "rollout.kl_estimator": "k3", "trainer.kl_coef": 0.0}),
    ({f"{A}.loss_agg_mode": "seq-mean-token-sum-norm", "data.max_response_length": 77},
     {"trainer.loss_aggregation": "dr_grpo", "trainer.dr_grpo_tokens": 77}),
    ({"algorithm.adv_estimator": "grpo", f"{R}.n": 4, "algorithm.gamma": 1.0}, {"rollout.gamma": None}),
    # Releases before 0.9.1 took the mean of each sequence, whatever is set.
    *(({f"{A}.policy_loss.loss_mode": "gspo", f"{A}.loss_agg_mode": theirs},
       {"trainer.policy_loss": "gspo", "trainer.loss_aggregation": ours})
      for theirs, ours in (("token-mean", "token_mean"), ("seq-mean-token-mean", "sequence_mean"))),
    # The ratio begins at the engine's log-probs, and no weight is beside it.
    ({f"{CORRECTION}.bypass_mode": True, f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_is_threshold": 3},
     {"rollout.log_probs": "engine", "trainer.importance_correction": None, "trainer.importance_cap": None}),
    ({f"{CORRECTION}.bypass_mode": False}, {"rollout.log_probs": None, "trainer.importance_correction": "none"}),
    ({f"{A}.use_dynamic_bsz": True, f"{A}.ppo_micro_batch_size_per_gpu": 3}, {"trainer.micro_batch_tokens": 16384}),
    ({"data.train_files": ["a.parquet", "b.parquet"], "data.val_files": "c.parquet", "trainer.test_freq": 5},
     {"prompts.sources": [{"path": "a.parquet"}, {"path": "b.parquet"}], "evaluation.files": ["c.parquet"],
      "evaluation.every": 5, "evaluation.temperature": 0.0}),
    # The evaluation of verl has no filter but its own.
    ({"data.val_files": "c.parquet", "trainer.test_freq": 5, f"{R}.top_p": 0.9, f"{R}.top_k": 20},
     {"rollout.top_p": 0.9, "rollout.top_k": 20, "evaluation.top_p": 1.0, "evaluation.top_k": 0}),
    ({"data.val_files": "c.parquet", "trainer.test_freq": 5, f"{R}.top_p": 0.9, f"{R}.val_kwargs.top_p": 0.7,
      f"{R}.val_kwargs.top_k": 8}, {"evaluation.top_p": 0.7, "evaluation.top_k": 8}),
    ({"data.val_files": "c.parquet", "trainer.test_freq": 5, f"{R}.val_kwargs.n": 4,
      f"{R}.val_kwargs.do_sample": True, f"{R}.val_kwargs.temperature": 0.6},
     {"evaluation.num_generations": 4, "evaluation.temperature": 0.6}),
    ({"data.val_files": "c.parquet", "trainer.test_freq": 5}, {"evaluation.top_p": None, "evaluation.top_k": None}),
    ({f"{R}.top_p": 0.9, f"{R}.top_k": 20}, {"evaluation.top_p": None, "evaluation.top_k": None}),
    ({"custom_reward_function.path": "/x/my_reward.py", "custom_reward_function.name": "f"},
     {"rewards": [{"name": "my_reward:f"}]}),
    ({"reward.custom_reward_function.path": "r.py"}, {"rewards": [{"name": "r:compute_score"}]}),
    ({"algorithm.adv_estimator": "grpo", f"{R}.n": 4, "algorithm.filter_groups.enable": True,
      "algorithm.filter_groups.max_num_gen_batches": 10}, {"rollout.max_refill": 9}),
    ({f"{A}.clip_ratio": 0.3, f"{A}.clip_ratio_low": None, f"{A}.clip_ratio_high": None}, {"trainer.clip_range": 0.3}),
    ({f"{A}.optim.lr_warmup_steps_ratio": 0.1, "trainer.total_training_steps": 50},
     {"trainer.warmup_ratio": 0.1, "trainer.max_steps": 50}),
    ({f"{A}.optim.optimizer": "AdamW8bit", f"{A}.optim.optimizer_impl": "bitsandbytes.optim"},
     {"trainer.optimizer": "adamw_8bit"}),
    ({f"{A}.optim.lr_scheduler_type": "cosine", f"{A}.optim.min_lr_ratio": 0.2, "trainer.total_training_steps": 50},
     {"trainer.schedule": "cosine", "trainer.decay_steps": 50, "trainer.final_learning_rate_ratio": 0.2}),
    ({f"{A}.optim.lr_warmup_steps": -1, f"{A}.optim.lr_warmup_steps_ratio": 0.1, "trainer.total_training_steps": 50},
     {"trainer.warmup_ratio": 0.1}),
    ({"trainer.total_epochs": 4, "trainer.total_training_steps": 50},
     {"trainer.max_epochs": 4, "trainer.max_steps": 50}),
    ({"data.truncation": "left", "data.filter_overlong_prompts": True}, {"rollout.long_prompts": None}),
    ({"trainer.total_epochs": 4, "data.shuffle": False, "data.truncation": "left"},
     {"trainer.max_epochs": 4, "prompts.shuffle": False, "rollout.long_prompts": "cut_left"}),
    ({f"{M}.lora_rank": 8}, {"model.lora_rank": 8, "model.lora_alpha": 16, "trainer.learning_rate": 1e-6}),
    ({f"{R}.top_k": -1, "trainer.logger": ["console", "wandb"]}, {"rollout.top_k": 0, "metrics.tracker": ["wandb"]}),
    ({"algorithm.rollout_correction.rollout_is": "token", "algorithm.rollout_correction.rollout_is_threshold": 3.0},
     {"trainer.importance_correction": "token", "trainer.importance_cap": 3.0}),
    # Of releases before 0.6, whose default is no correction.
    ({f"{A}.tis_imp_ratio_cap": 2.5}, {"trainer.importance_correction": "token", "trainer.importance_cap": 2.5}),
    ({"algorithm.rollout_correction.rollout_is": "token",
      "algorithm.rollout_correction.rollout_is_threshold": "0.5_5.0"},
     {"trainer.importance_correction": "icepop", "trainer.importance_cap": 5.0}),
    ({"algorithm.rollout_correction.rollout_is": "token",
      "algorithm.rollout_correction.rollout_is_threshold": "0.2_5.0"},
     {"trainer.importance_correction": "none", "trainer.importance_cap": None}),
    ({"reward_model.reward_kwargs.overlong_buffer_cfg.enable": True,
      "reward_model.reward_kwargs.overlong_buffer_cfg.len": 100,
      "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor": 1.0},
     {"rollout.overlong_buffer_tokens": 100, "rollout.overlong_penalty": 1.0}),
    # The actor is trained from step 5 on.
    ({"algorithm.adv_estimator": "gae", "trainer.critic_warmup": 5}, {"trainer.critic_warmup_steps": 4}),
    # The files that verl writes have the earlier name behind the present one, as null.
    ({f"{A}.optim.lr_scheduler_type": "cosine", f"{A}.optim.warmup_style": None, "trainer.total_training_steps": 9},
     {"trainer.schedule": "cosine", "trainer.decay_steps": 9}),
    ({f"{A}.optim.clip_grad": None, f"{A}.grad_clip": 0.3}, {"trainer.gradient_clip_norm": 0.3}),
    ({f"{A}.optim.clip_grad": 0.3, f"{A}.grad_clip": None}, {"trainer.gradient_clip_norm": 0.3}),
    ({f"{A}.grad_clip": 0.3, f"{A}.optim.clip_grad": 1.0}, {"trainer.gradient_clip_norm": 0.3}),
]  # fmt: skip
OPENRLHF_CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    # Rows of an update are counted there, updates here; the KL is in the reward.
    (
        {"rollout.batch_size": 64, "rollout.n_samples_per_prompt": 8, "train.batch_size": 128,
         "algo.advantage.estimator": "group_norm"},
        {"buffer.sample_batch_size": 512, "trainer.mini_batches": 4, "rollout.num_generations": 8,
         "rollout.advantages": "grpo", "rollout.kl_coef": 0.01, "trainer.kl_coef": 0.0, "rollout.reward_clip": None},
    ),
    *(({"actor.policy_loss_type": "gspo", **mode},
       {"trainer.policy_loss": "gspo", "trainer.loss_aggregation": "sequence_mean"})
      for mode in ({}, {"actor.loss_agg_mode": "token-mean"})),
    ({"loss_agg_mode": "seq-mean-token-mean"}, {"trainer.loss_aggregation": "sequence_mean"}),
    # The ratio of gspo begins at the engine's log-probs then, and no weight is beside it.
    *(({"actor.policy_loss_type": "gspo", **correction},
       {"rollout.log_probs": "engine", "trainer.importance_correction": None, "trainer.importance_cap": None})
      for correction in ({"algo.advantage.is_correction_level": "token"}, {"algo.advantage.is_correction_enable": True},
                         {"enable_vllm_is_correction": True, "vllm_is_truncated_threshold": 2.0})),
    ({"algo.advantage.estimator": "group_norm", "rollout.n_samples_per_prompt": 8, "algo.advantage.gamma": 1.0},
     {"rollout.gamma": None}),
    # OpenRLHF clips a score before it is compared with those of its group with gae alone.
    ({}, {"rollout.reward_clip": 10}),
    ({"reward.clip_range": [-5, 5]}, {"rollout.reward_clip": 5}),
    # The names before 0.10.
    (
        {"rollout_batch_size": 64, "n_samples_per_prompt": 4, "train_batch_size": 64, "pretrain": "m",
         "advantage_estimator": "rloo", "init_kl_coef": 0.1, "use_kl_loss": True, "kl_estimator": "k3"},
        {"buffer.sample_batch_size": 256, "trainer.mini_batches": 4, "model.actor": "m", "rollout.advantages": "rloo",
         "trainer.kl_coef": 0.1, "rollout.kl_coef": 0.0, "trainer.kl_estimator": "k3"},
    ),
    ({"use_kl_estimator_k3": True, "use_kl_loss": True}, {"trainer.kl_estimator": "k3"}),
    ({"use_kl_estimator_k3": True}, {"rollout.kl_estimator": "k3"}),
    ({"use_kl_estimator_k3": False}, {"rollout.kl_estimator": "k1"}),
    ({}, {"rollout.algorithm": "ppo", "rollout.lam": 1, "trainer.betas": [0.9, 0.95], "trainer.value_clip_range": 0.5,
          "prompts.prompt_column": "input", "rollout.max_length": 2048, "trainer.critic_warmup_steps": 0}),
    ({"data.prompt_dataset": "a/b,c.jsonl", "data.prompt_probs": "0.7,0.3"},
     {"prompts.sources": [{"path": "datasets:a/b", "weight": 0.7}, {"path": "c.jsonl", "weight": 0.3}]}),
    ({"reward.model_name_or_path": "r"}, {"model.reward": "r"}),
    ({"reward_pretrain": "r, models/s"},
     {"model.reward": None, "rewards": [{"name": "model", "path": "r"}, {"name": "model", "path": "models/s"}]}),
    ({"reward.remote_url": "http://h:5000/get_reward"},
     {"rewards": [{"name": "remote", "url": "http://h:5000/get_reward"}]}),
    ({"train.async_enable": True, "train.async_queue_size": 3, "train.partial_rollout_enable": True},
     {"buffer.max_staleness": 3, "rollout.weight_updates": "in_flight"}),
    ({"algo.advantage.is_correction_level": "token"},
     {"trainer.importance_correction": "icepop", "trainer.importance_cap": 5.0}),
    ({"actor.optim": "muon"}, {"trainer.optimizer": "muon"}),
    ({"algo.advantage.is_correction_level": "token", "algo.advantage.is_correction_threshold": [3.0]},
     {"trainer.importance_correction": "token_mask", "trainer.importance_cap": 3.0}),
    ({"algo.advantage.is_correction_level": "token", "algo.advantage.is_correction_gating": "binary_kl",
      "algo.advantage.is_correction_threshold": 0.05},
     {"trainer.importance_correction": "none", "trainer.importance_cap": None}),
    ({"algo.advantage.is_correction_enable": True, "algo.advantage.is_correction_type": "icepop",
      "algo.advantage.is_correction_threshold": [0.5, 4.0]},
     {"trainer.importance_correction": "icepop", "trainer.importance_cap": 4.0}),
    ({"algo.advantage.is_correction_enable": True, "algo.advantage.is_correction_threshold": [0.0, 3.0]},
     {"trainer.importance_correction": "token", "trainer.importance_cap": 3.0}),
    # A weight below 0.5 is raised to it there.
    ({"algo.advantage.is_correction_enable": True},
     {"trainer.importance_correction": "none", "trainer.importance_cap": None}),
    # Steps 0 to 5 are the critic's.
    ({"critic.freezing_steps": 5}, {"trainer.critic_warmup_steps": 6}),
    ({"actor.eps_clip_low_high": [0.2, 0.27], "vllm.num_engines": 4},
     {"trainer.clip_low": 0.2, "trainer.clip_high": 0.27, "rollout.engine": "vllm", "rollout.workers": 4}),
]  # fmt: skip
CASES = [
    (word, *case)
    for word, cases in (("trl", TRL_CASES), ("verl", VERL_CASES), ("openrlhf", OPENRLHF_CASES))
    for case in cases
]


class TestConversions:
    def test_options_become_keys_of_the_same_run(self, subtests: pytest.Subtests) -> None:
        for word, options, expected in CASES:
            with subtests.test(word, options=options):
                found = values(word, options)
                assert {key: found.get(key) for key in expected} == expected

    def test_folders_of_reward_models_are_those_of_the_current_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "run").mkdir()
        done = converted("trl", {"reward_funcs": ["models/kind", "a.b", "/models/brief"]})

        (tmp_path / "run" / "c.toml").write_text(conversion.render(done, "file", tmp_path / "run"))

        rewards = config_load.load(tmp_path / "run" / "c.toml", [], {}).config.rewards
        paths = [str(getattr(reward, "path", reward.name)) for reward in rewards]
        assert paths == [str(tmp_path / "models" / "kind"), "a:b", "/models/brief"]
        assert [getattr(reward, "style", None) for reward in rewards] == [None, "trl", None]

    def test_what_is_written_is_a_configuration(self, tmp_path: Path, subtests: pytest.Subtests) -> None:
        for word, options, _ in CASES:
            with subtests.test(word, options=options):
                text = conversion.render(converted(word, options), "file", tmp_path)
                (tmp_path / "c.toml").write_text(text)

                assert tomllib.loads(text)
                config_load.load(tmp_path / "c.toml", [], {})

    @pytest.mark.parametrize(
        ("word", "options", "reason"),
        [
            (
                "trl",
                {"scale_rewards": "row"},
                'scale_rewards = "row": advantages are scaled by the deviation of the group',
            ),
            (
                "trl",
                {"datasets": [{"path": "json", "data_files": ["a", "b"]}]},
                "num_train_epochs = 3.0 (TRL's default): several sources",
            ),
            (
                "trl",
                {"reward_model_name_or_path": "r", "reward_weights": [1.0, 2.0]},
                'reward_model_name_or_path = "r": reward_weights has 2 for 1 reward',
            ),
            (
                "trl",
                {"reward_model_name_or_path": "r", "reward_weights": [None]},
                'reward_model_name_or_path = "r": reward_weights has null in place of a weight',
            ),
            (
                "openrlhf",
                {"reward.model_name_or_path": "r,s", "reward.remote_url": "http://h/s"},
                'reward.model_name_or_path = "r,s": OpenRLHF loads no reward model beside reward.remote_url',
            ),
            ("trl", {"num_train_epochs": 0.5}, "num_train_epochs = 0.5: trainer.max_epochs counts whole passes"),
            ("openrlhf", {"train.num_episodes": 2, "data.prompt_dataset": "a,b"}, "train.num_episodes = 2: several"),
            ("verl", {f"{A}.optim.lr_scheduler_type": "cosine"}, f'{A}.optim.lr_scheduler_type = "cosine": a cosine'),
            ("trl", {"loss_type": "sapo"}, 'loss_type = "sapo": the losses that are here too are grpo, dapo'),
            ("trl", {"lr_scheduler_type": "cosine"}, 'lr_scheduler_type = "cosine": a fall to 0 needs max_steps: '),
            ("trl", {"lr_scheduler_type": "sqrt"}, 'lr_scheduler_type = "sqrt": the learning rate is constant, or'),
            ("trl", {"warmup_steps": 0.1}, "warmup_steps = 0.1: a share needs max_steps in the same file"),
            ("trl", {"adam_epsilon": 1e-5}, "adam_epsilon = 1e-05: AdamW's epsilon is 1e-8, TRL's default"),
            ("trl", {"beta": 0.1}, "use_bias_correction_kl = true (TRL's default): the KL of the loss is k3"),
            ("trl", {"config_file": "z.yaml"}, 'config_file = "z.yaml": the num_processes of this file is not read'),
            (
                "trl",
                {"use_peft": True, "lora_dropout": 0.0},
                "use_peft = true: without target modules peft chooses by the model, q_proj and v_proj of most; here",
            ),
            ("trl", {"epsilon": -1}, "epsilon = -1: trainer.clip_range must be greater than 0, got -1"),
            ("trl", {"run_name": "my run"}, 'run_name = "my run": daemon.run_name '),
            ("trl", {"report_to": "comet_ml"}, 'report_to = "comet_ml": no tracker comet_ml: there are tensorboard'),
            ("verl", {f"{A}.clip_ratio": 0.3}, f"{A}.clip_ratio = 0.3: it has no effect in verl, whose clip_ratio_low"),
            ("verl", {f"{A}.ppo_mini_batch_size": 96}, f"{A}.ppo_mini_batch_size = 96: must divide data.train_batch"),
            ("verl", {f"{R}.n": 4}, f"{R}.n = 4: PPO has one response to a prompt here"),
            ("verl", {"algorithm.adv_estimator": "remax"}, 'algorithm.adv_estimator = "remax": the estimators that'),
            ("verl", {"data.truncation": "right"}, 'data.truncation = "right": a prompt is cut from the left'),
            ("verl", {"data.train_files": ["$x/a"]}, 'data.train_files = ["$x/a"]: the value needs the shell'),
            (
                "verl",
                {"reward.reward_manager.name": "batch"},
                'reward.reward_manager.name = "batch": batch calls the fu',
            ),
            (
                "verl",
                {"trainer.v1.trainer_mode": "separate_async"},
                'trainer.v1.trainer_mode = "separate_async": rollouts and training go at once',
            ),
            ("verl", {"algorithm.use_pf_ppo": True}, "algorithm.use_pf_ppo = true: rows are trained once"),
            ("openrlhf", {"reward.clip_range": [-1, 2]}, "reward.clip_range = [-1, 2]: rollout.reward_clip is a range"),
            ("openrlhf", {"actor.lr_scheduler": "cosine"}, 'actor.lr_scheduler = "cosine": a fall needs its'),
            ("openrlhf", {"train.batch_size": 96}, "train.batch_size = 96: must divide rollout.batch_size x rollout.n"),
            ("openrlhf", {"ds.zero_stag": 3}, f"ds.zero_stag: no option that {PAGE} has"),
            (
                "openrlhf",
                {"algo.advantage.no_std_norm": True},
                "algo.advantage.no_std_norm = true: advantages of gae are divided by their deviation here too",
            ),
            (
                "openrlhf",
                {"algo.advantage.estimator": "reinforce_baseline", "algo.dynamic_filtering_enable": True},
                "algo.dynamic_filtering_enable = true: prompts come in the place of groups with group_norm",
            ),
            (
                "verl",
                {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.max_num_gen_batches": 1},
                "algorithm.filter_groups.enable = true: with one batch no prompt comes in the place of another",
            ),
            (
                "verl",
                {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.max_num_gen_batches": "few"},
                "algorithm.filter_groups.enable = true: algorithm.filter_groups.max_num_gen_batches must be a number",
            ),
            (
                "verl",
                {"data.val_files": "v.parquet", "trainer.test_freq": 5, f"{R}.val_kwargs.n": 4},
                f"{R}.val_kwargs.n = 4: without val_kwargs.do_sample and a temperature the responses to a prompt ",
            ),
            (
                "trl",
                {"save_strategy": "epoch", "save_steps": 20},
                'save_strategy = "epoch": the end of a pass over the prompts is no step',
            ),
        ],
    )
    def test_what_cannot_be_carried_is_listed_with_the_reason(
        self, word: str, options: dict[str, Any], reason: str
    ) -> None:
        (line,) = [line for line in lost(word, options) if not line.startswith(("model.actor", "prompts.path"))]

        assert line.startswith(reason)

    def test_an_option_that_another_one_keeps_from_being_carried_names_that_one(self) -> None:
        batch = {"per_device_train_batch_size": 8, "generation_batch_size": 12}

        assert [line.partition(": ")[2] for line in lost("trl", batch) if line.startswith(tuple(batch))] == [
            "generation_batch_size must be a multiple of the 8 rows of a micro-batch of all processes"
        ] * 2

    @pytest.mark.parametrize("name", ["group_norm", "rloo", "dr_grpo", "reinforce_baseline"])
    def test_a_clip_of_scores_that_are_compared_with_their_group_is_not_carried(self, name: str) -> None:
        options = {"algo.advantage.estimator": name, "rollout.n_samples_per_prompt": 8}

        def lines(bounds: list[int]) -> list[str]:
            done = converted("openrlhf", {**options, "reward.clip_range": bounds})
            assert "rollout.reward_clip" not in done.settings
            return [line.partition(",")[0] for line in done.lost if line.startswith("reward.clip_range")]

        # Of 8 scores none is further than 7 / 8 ** 0.5 = 2.5 deviations from the mean.
        assert bool(lines([-10, 10])) == bool(lines([-3, 3])) == (name != "group_norm")
        assert lines([-2, 2]) == ["reward.clip_range = [-2"]

    def test_of_verls_critic_its_defaults_are_not_listed(self) -> None:
        ppo = {"algorithm.adv_estimator": "gae"}
        defaults = {
            **dict.fromkeys(("critic.optim.lr_warmup_steps", "critic.optim.total_training_steps"), -1),
            "critic.optim.weight_decay": 0.01, "critic.optim.betas": [0.9, 0.999], "critic.optim.min_lr_ratio": 0.0,
            "critic.optim.lr_scheduler_type": "constant", "critic.grad_clip": 1.0, "critic.loss_agg_mode": "token-mean",
            "critic.optim.optimizer": "AdamW", "critic.optim.optimizer_impl": "torch.optim",
            "critic.model.lora_rank": 0, "critic.model.lora_alpha": 16, "critic.model.lora.type": "lora",
            "critic.model.tokenizer_path": "m", "critic.model.tiled_mlp.num_shards": 4, "critic.model.mtp.layers": 1,
        }  # fmt: skip

        assert lost("verl", {**ppo, **defaults}) == []
        changed = {"critic.optim.weight_decay": 0.1, "critic.model.lora_rank": 8, "critic.grad_clip": 0.5}
        found = [line.partition(":")[0] for line in lost("verl", {**ppo, **defaults, **changed})]
        assert found[:1] == ["critic.model.lora_rank = 8"] and "critic.model.lora_alpha = 16" in found
        assert found[-2:] == ["critic.optim.weight_decay = 0.1", "critic.grad_clip = 0.5"]

    def test_passes_and_updates_of_verls_critic_are_listed_where_they_are_not_the_actors(self) -> None:
        critic = {"critic.ppo_epochs": 4, "critic.ppo_mini_batch_size": 64}

        assert lost("verl", critic) == [
            "critic.ppo_epochs = 4: the critic has the actor's passes over the rows of a step",
            "critic.ppo_mini_batch_size = 64: the critic has the actor's updates",
        ]
        assert lost("verl", {**critic, f"{A}.ppo_epochs": 4, f"{A}.ppo_mini_batch_size": 64}) == []
        assert lost("verl", {"critic.ppo_epochs": 1, "critic.ppo_mini_batch_size": 256}) == [], "the actor's defaults"
        assert lost("verl", {**critic, "algorithm.adv_estimator": "grpo"}) == [], "GRPO has no critic"

    def test_a_reward_that_is_missing_leaves_the_others_in_place(self) -> None:
        alone = {"reward_funcs": "trl.rewards.reasoning_accuracy_reward"}
        options = {"reward_funcs": ["reasoning_accuracy_reward", "think_format_reward"], "reward_weights": [1.0, 0.5]}

        (line,) = (line for line in lost("trl", options) if line.startswith("reward_funcs"))
        assert "reasoning_accuracy_reward gives 0 to a response without </think>" in line
        (table,) = values("trl", options)["rewards"]
        assert (table["name"], table["weight"]) == ("regex", 0.5)
        assert any("reasoning_accuracy_reward gives 0" in line for line in lost("trl", alone))
        beside_a_model = {**alone, "reward_model_name_or_path": "r"}
        assert values("trl", beside_a_model)["model.reward"] == "r"
        assert sum("gives 0" in line for line in lost("trl", beside_a_model)) == 1

    def test_cispo_without_its_largest_ratio_is_listed_and_stays_cispo(self) -> None:
        (line,) = lost("trl", {"loss_type": "cispo"})

        assert line.startswith('loss_type = "cispo": without epsilon_high TRL\'s largest ratio is epsilon, 0.2; here')
        assert values("trl", {"loss_type": "cispo"})["trainer.policy_loss"] == "cispo"
        assert lost("trl", {"loss_type": "cispo", "epsilon_high": 5.0}) == []

    def test_the_solution_is_not_taken_from_functions_that_read_it_by_name(self) -> None:
        options = {"reward_funcs": ["accuracy_reward", "my.lib.good"]}

        (line,) = (line for line in lost("trl", options) if line.startswith("reward_funcs"))
        assert "accuracy_reward reads the column solution" in line and "as a column answer, too" in line
        assert "prompts.answer_column" not in values("trl", options)
        own = conversion.convert(BY_WORD["trl"], {"reward_funcs": "accuracy_reward"}, {"prompts.answer_column": "a"})
        assert own.settings["prompts.answer_column"].value == "a"

    def test_the_end_of_a_cosine_that_is_not_carried_has_its_own_line(self) -> None:
        optim, steps = f"{A}.optim", {"trainer.total_training_steps": 50}
        cosine = {f"{optim}.lr_scheduler_type": "cosine", f"{optim}.min_lr_ratio": 0.2}

        assert [line.partition(":")[0] for line in lost("verl", cosine)] == [
            f'{optim}.lr_scheduler_type = "cosine"', f"{optim}.min_lr_ratio = 0.2",
        ]  # fmt: skip
        assert lost("verl", {**cosine, **steps}) == []
        assert lost("verl", {f"{optim}.min_lr_ratio": 0.2}) == [], "without a cosine verl does not read it"

    @pytest.mark.parametrize(
        ("word", "options"),
        [
            ("trl", {"repetition_penalty": 1.0, "min_p": None, "optim": "adamw_torch_fused", "push_to_hub": False,
                     "vllm_gpu_memory_utilization": 0.3, "sapo_temperature_pos": 1.0, "logging_steps": 5}),
            ("trl", {"accelerate_config": "single_gpu"}),
            ("trl", {"use_peft": True, "lora_dropout": 0.0, "lora_target_modules": ["q_proj"]}),
            ("trl", {"use_peft": False}),
            ("trl", {"accelerate_config": "zero2", "num_processes": 2}),
            ("verl", {"trainer.nnodes": 1, f"{R}.tensor_model_parallel_size": 1, "trainer.val_before_train": False,
                      "reward_model.reward_manager": "dapo", "reward.reward_manager.name": "naive",
                      f"{A}.policy_loss.kl_cov_ratio": 0.0002, f"{A}.fsdp_config.param_offload": True}),
            # Defaults, as in the files that verl writes.
            ("verl", {"data.train_max_samples": -1, "data.video_key": "videos", f"{M}.mtp.method": "mtp",
                      "data.return_multi_modal_inputs": True, "data.datagen.path": None, f"{R}.skip_rollout": False,
                      "algorithm.adv_estimator": "grpo", "algorithm.rollout_correction.loss_type": "ppo_clip",
                      "reward_model.forward_max_token_len_per_gpu": 9, "reward_manager.name": "naive",
                      "trainer.v1.trainer_mode": "sync", "trainer.v1.sampler.max_off_policy_threshold": 8,
                      f"{M}.lora.type": "lora", f"{M}.lora_rank": 0, f"{A}.qat.mode": "w4a16", f"{A}.qat.enable": False,
                      f"{R}.disaggregation.prefill_replicas": 1, f"{R}.moe_load_balance_metrics_interval": 0,
                      "reward.sandbox_fusion.url": None, "reward.sandbox_fusion.max_concurrent": 64}),
            ("openrlhf", {"actor.num_nodes": 1, "actor.aux_loss_coef": 0, "ds.zero_stage": 3}),
        ],
    )  # fmt: skip
    def test_values_by_which_nothing_is_lost_are_not_listed(self, word: str, options: dict[str, Any]) -> None:
        assert lost(word, options) == []

    @pytest.mark.parametrize("trainer", TRAINERS, ids=lambda trainer: trainer.word)
    def test_no_value_of_any_option_is_an_error_and_what_is_written_is_toml(
        self, tmp_path: Path, trainer: Trainer, subtests: pytest.Subtests
    ) -> None:
        for value in (0, -1, 1.5, 1e400, "x", "", True, False, None, [], [1], ["a", 2], {}, {"a": 1}):
            with subtests.test(value=value):
                options = {name.replace("*", "x"): value for option in trainer.options for name in option.names}
                done = conversion.convert(trainer, options, {})
                tomllib.loads(conversion.render(done, "f", tmp_path))

    @pytest.mark.parametrize(
        ("word", "options", "key"),
        [
            ("trl", {"loss_type": "dr_grpo", "max_completion_length": None}, "dr_grpo_tokens"),
            ("verl", {f"{A}.use_kl_loss": True, f"{A}.kl_loss_coef": None}, "kl_coef"),
        ],
    )
    def test_a_key_of_an_option_that_is_null_is_left_out(
        self, tmp_path: Path, word: str, options: dict[str, Any], key: str
    ) -> None:
        written = tomllib.loads(conversion.render(converted(word, options), "f", tmp_path))

        assert key not in written["trainer"]

    def test_a_default_that_would_change_the_run_is_written_and_named_as_one(self, tmp_path: Path) -> None:
        lines = conversion.render(converted("verl", {}), "f", tmp_path).splitlines()

        assert f"weight_decay = 0.01  # {A}.optim.weight_decay, verl's default" in lines
        assert any(line.startswith("max_epochs = 30  # trainer.total_epochs, verl's default") for line in lines)
        assert not any(line.startswith("temperature") for line in lines)

    def test_the_end_of_the_file_has_what_was_not_carried(self, tmp_path: Path) -> None:
        text = conversion.render(converted("trl", {"adam_epsilon": 1e-5, "max_steps": 3}), "f", tmp_path)

        assert "\n# Not carried:\n# - " in text
        assert (
            "\n# - adam_epsilon = 1e-05: AdamW's epsilon is 1e-8, TRL's default\n"
            in text.partition("# Not carried:")[2]
        )


class TestFiles:
    def read(self, folder: Path, name: str, text: str | bytes, word: str) -> dict[str, Any]:
        path = folder / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return files.read(path, BY_WORD[word])

    def test_numbers_that_yaml_takes_for_texts_are_numbers(self, tmp_path: Path) -> None:
        text = "learning_rate: 1e-6\nreport_to: none\nreward_funcs: [a.b]\nrun_name: '12'\n"

        found = self.read(tmp_path, "c.yaml", text, "trl")

        assert found == {"learning_rate": 1e-6, "report_to": "none", "reward_funcs": ["a.b"], "run_name": "12"}

    def test_tables_of_verl_become_names_with_dots_and_references_are_resolved(self, tmp_path: Path) -> None:
        text = (
            "data: {max_prompt_length: 100, apply_chat_template_kwargs: {enable_thinking: false}}\n"
            "actor_rollout_ref:\n  actor:\n    _target_: x\n    ppo_epochs: 2\n"
            "    entropy_coeff: ${data.max_prompt_length}\n    grad_clip: '${oc.select:a.b,0.5}'\n"
            "trainer: {project_name: p, default_local_dir: 'c/${trainer.project_name}/${x}'}\n"
        )

        assert self.read(tmp_path, "c.yml", text, "verl") == {
            "data.max_prompt_length": 100,
            "data.apply_chat_template_kwargs": {"enable_thinking": False},
            f"{A}.ppo_epochs": 2,
            f"{A}.entropy_coeff": 100,
            f"{A}.grad_clip": 0.5,
            "trainer.project_name": "p",
            "trainer.default_local_dir": "c/p/${x}",
        }
        assert self.read(tmp_path, "c.yml", "hydra: {run: {dir: x}}\ndata: {max_prompt_length: 9}\n", "verl") == {
            "data.max_prompt_length": 9
        }

    def test_a_table_that_is_not_known_stays_beside_its_own_options(self, tmp_path: Path) -> None:
        table = "data.apply_chat_template_kwargs"
        text = f"python3 -m verl.trainer.main_ppo {table}=$KWARGS {table}.enable_thinking=False\n"

        found = self.read(tmp_path, "run.sh", text, "verl")

        assert found == {table: "$KWARGS", f"{table}.enable_thinking": False}
        assert lost("verl", found) == [
            f'{table} = "$KWARGS": the value needs the shell, or another option: write it into the file',
            f"{table}.enable_thinking: no option that {PAGE} has",
        ]

    def test_what_is_not_carried_is_a_line_each_also_of_words_with_several(self, tmp_path: Path) -> None:
        text = "trl grpo --beta=0.1 $(jq -r \\\n  .options\n  run.json)\n"

        done = converted("trl", self.read(tmp_path, "run.sh", text, "trl"))

        assert any(line.startswith(r"$(jq -r \\u000a") for line in done.lost), done.lost
        assert tomllib.loads(conversion.render(done, "run.sh", tmp_path))

    def test_a_script_is_read_with_its_variables_from_its_program_on(self, tmp_path: Path) -> None:
        text = (
            "#!/bin/bash\nset -x\nexport WANDB_KEY=a=b\nEMPTY=\nHOME_DIR=${1:-$HOME/x}   # a comment\n"
            "more='trainer.nnodes=2 trainer.device=cpu'\n"
            'train="[\'$HOME_DIR/a.parquet\', "b.parquet"]"\n'
            'python3 -m verl.trainer.main_ppo --config-name x \\\n  data.train_files="$train" \\\n'
            '  +data.max_prompt_length=1e2 trainer.logger=\'["console","wandb"]\' \\\n'
            '  trainer.project_name=$OTHER trainer.total_training_steps=null $more $unknown "$@" 2>&1 | tee log.a=1\n'
        )

        found = self.read(tmp_path, "run.sh", text, "verl")

        assert found.pop("config_name") == "x"
        assert found == {
            "data.train_files": ["~/x/a.parquet", "b.parquet"],
            "data.max_prompt_length": 100.0,
            "trainer.logger": ["console", "wandb"],
            "trainer.project_name": "$OTHER",
            "trainer.total_training_steps": None,
            "trainer.nnodes": 2,
            "trainer.device": "cpu",
            "$unknown": None,
        }

    def test_arrays_of_options_are_filled_in(self, tmp_path: Path) -> None:
        text = (
            "n=${N:-5}; batch=$((4 * 16)); empty=${EMPTY:-}\n"
            "DATA=(\n  data.train_files=\"['$HOME/a.parquet']\"  # these\n  data.train_batch_size=${batch}\n)\n"
            "ROLLOUT=(\n  actor_rollout_ref.rollout.n=${n} 'data.prompt_key=a b'\n"
            '  data.max_response_length=$((batch * (n - 1) / 2 + 1024))\n)\nALL=("${DATA[@]}" algorithm.lam=0.9)\n'
            'ALL+=("${ROLLOUT[@]}" +data.apply_chat_template_kwargs.enable_thinking=False)\nLAUNCH=(python3)\n'
            '"${LAUNCH[@]}" -m verl.trainer.main_ppo --config-name=ppo_trainer.yaml \\\n'
            '  "${ALL[@]}" "${OTHER[@]}" \\\n'
            '  trainer.total_epochs=${empty:-3} "$@"\n'
        )

        found = self.read(tmp_path, "run.sh", text, "verl")

        assert found == {
            "config_name": "ppo_trainer.yaml",
            "data.train_files": ["~/a.parquet"],
            "data.train_batch_size": 64,
            "actor_rollout_ref.rollout.n": 5,
            "data.prompt_key": "a b",
            "data.max_response_length": 1152,
            "algorithm.lam": 0.9,
            "data.apply_chat_template_kwargs": {"enable_thinking": False},
            "${OTHER[@]}": None,
            "trainer.total_epochs": 3,
        }
        assert not any("config_name" in line for line in converted("verl", found).lost)

    def test_a_value_of_a_branch_is_not_taken_for_that_of_each_run(self, tmp_path: Path) -> None:
        text = (
            "lr=1e-6\nlength=512\nrows=8 # for all\nMORE=(algorithm.gamma=0.9)\n"
            'case "$DEVICE" in\n  gpu|cuda)\n    length=2048\n    MORE+=(data.seed=3 algorithm.gamma=0.9)\n    ;;\n'
            "  npu)\n    length=16; rows=8\n    MORE+=(trainer.save_freq=9 trainer.test_freq=2) ;;\nesac\n"
            'if [ $# -gt 0 ]; then\n  lr=$1\nfi\n[ -n "$X" ] && nodes=4\n'
            'check() {\n  n=5\n  echo "rows=9 is large; if so"\n}\n'
            "if true; then\n  seed=7\n  python3 -m verl.trainer.main_ppo algorithm.gamma=1.0 trainer.test_freq=2 \\\n"
            '    "${MORE[@]}" \\\n'
            "    data.train_batch_size=$rows data.max_response_length=${length} \\\n"
            "    actor_rollout_ref.actor.optim.lr=$lr \\\n"
            "    actor_rollout_ref.rollout.n=${n:-1} trainer.nnodes=$nodes \\\n"
            "    trainer.total_epochs=$seed\nelse\n  trainer.total_epochs=1\nfi\n"
        )

        found = self.read(tmp_path, "run.sh", text, "verl")

        assert found == {
            "algorithm.gamma": 0.9,
            "data.seed": "3",
            "trainer.save_freq": "9",
            "trainer.test_freq": 2,
            "data.train_batch_size": 8,
            "data.max_response_length": "${length}",
            "actor_rollout_ref.actor.optim.lr": "$lr",
            "actor_rollout_ref.rollout.n": "${n:-1}",
            "trainer.nnodes": "$nodes",
            "trainer.total_epochs": 7,
        }
        done = converted("verl", found)
        branch = "a branch of the script sets it: write the value into the file"
        assert {f'data.seed = "3": {branch}', f'trainer.save_freq = "9": {branch}'} <= set(done.lost)
        assert not done.settings.keys() & {"daemon.seed", "rollout.max_new_tokens", "trainer.learning_rate"}

    def test_only_the_command_of_the_trainer_has_its_options(self, tmp_path: Path) -> None:
        text = (
            "python3 prepare.py --seed 3\npython3 -m verl.trainer.main_ppo data.train_batch_size=8 \\\n"
            "  # algorithm.lam=0.5 \\\n  algorithm.gamma=0.9 \\\n  trainer.save_freq=2 > run.log 2>&1 &\nwait\n"
            "python3 -m merge --local_dir x algorithm.lam=0.7\n"
        )

        found = self.read(tmp_path, "run.sh", text, "verl")

        assert found == {"data.train_batch_size": 8, "algorithm.gamma": 0.9, "trainer.save_freq": 2}
        text = "python3 -m verl.trainer.main_ppo data.train_batch_size=8\npython3 -m merge algorithm.lam=0.7\n"
        assert self.read(tmp_path, "run.sh", text, "verl") == {"data.train_batch_size": 8}

    def test_the_lines_of_a_document_are_one_command(self, tmp_path: Path) -> None:
        text = (
            "read -r -d '' options <<EOF\nopenrlhf.cli.train_ppo_ray\n   --train.seed 3\n   --actor.adam.lr 1e-6\n"
            "   --ds.packing_samples\nEOF\n\ndeepspeed --module $options --train.seed 9\n"
        )

        assert self.read(tmp_path, "run.sh", text, "openrlhf") == {
            "train.seed": 3,
            "actor.adam.lr": 1e-6,
            "ds.packing_samples": True,
        }

    def test_a_value_that_is_called_as_the_program_begins_no_options(self, tmp_path: Path) -> None:
        text = "trl grpo --model_name_or_path m --loss_type grpo \\\n  --run_name trl --max_steps 8\n"

        assert self.read(tmp_path, "run.sh", text, "trl") == {
            "model_name_or_path": "m", "loss_type": "grpo", "run_name": "trl", "max_steps": 8,
        }  # fmt: skip

    def test_a_script_of_another_run_of_trl_is_refused(self, tmp_path: Path) -> None:
        for command in ("trl rloo", "accelerate launch trl/scripts/rloo.py"):
            run = command.rpartition("launch ")[2]
            with pytest.raises(ConfigError, match=f"a run of `{run}`; of TRL those of `trl grpo` are converted"):
                self.read(tmp_path, "run.sh", f"{command} --model_name_or_path m --reward_clip_range -5 5\n", "trl")

    def test_a_program_of_trl_is_read_without_running_it(self, tmp_path: Path) -> None:
        text = (
            "import torch\nfrom datasets import load_dataset\nfrom peft import LoraConfig, TaskType\n"
            "from trl import GRPOConfig, GRPOTrainer\nfrom trl.rewards import think_format_reward\n"
            "import my.rewards as rewards\nfrom letters import right\nMODEL = 'models/m'\nSTEPS = 4\n"
            "raise SystemExit('this program is read, and not run')\n"
            "def main():\n"
            "    data = load_dataset('parquet', data_files='a.parquet', split='train')\n"
            "    args = GRPOConfig('out', learning_rate=1e-5, max_steps=STEPS, bf16=not True, beta=float('1'),\n"
            "                      model_init_kwargs={'torch_dtype': torch.bfloat16}, **more)\n"
            "    lora = LoraConfig(r=4, target_modules=('q_proj',), bias='none', task_type=TaskType.CAUSAL_LM, x=1)\n"
            "    GRPOTrainer(MODEL, [right, rewards.long, think_format_reward, own], args=args, peft_config=lora,\n"
            "                train_dataset=data.map(chat), callbacks=[])\n"
            "def own(completions, **_): ...\n"
            "if __name__ == '__main__':\n    main()\n"
        )

        found = self.read(tmp_path, "train.py", text, "trl")

        assert found == {
            "output_dir": "out", "learning_rate": 1e-5, "max_steps": 4, "bf16": "not True", "beta": "float('1')",
            "model_init_kwargs": {"torch_dtype": "bfloat16"}, "**more": "more",
            "use_peft": True, "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "lora_target_modules": ["q_proj"],
            "LoraConfig.x": 1, "model_name_or_path": "models/m", "GRPOTrainer.callbacks": [], "data.map(chat)": None,
            "reward_funcs": ["letters.right", "my.rewards.long", "trl.rewards.think_format_reward", "train.own"],
            "datasets": [{"path": "parquet", "data_files": "a.parquet", "split": "train"}],
        }  # fmt: skip
        done = converted("trl", found)
        computed = "the program computes it: write the value into the file"
        assert {f'bf16 = "not True": {computed}', f"beta = \"float('1')\": {computed}"} <= set(done.lost)
        assert [table["name"] for table in done.settings["rewards"].value] == [
            "letters:right", "my.rewards:long", "regex", "train:own",
        ]  # fmt: skip
        assert done.settings["prompts.path"].value == "a.parquet" and done.settings["model.lora_rank"].value == 4
        assert "data.map(chat): the data are read as they are: write the result to a file" in done.lost

    def test_a_model_that_a_program_moves_and_the_tools_of_its_trainer_are_known(self, tmp_path: Path) -> None:
        text = (
            "model = AutoModelForCausalLM.from_pretrained('models/m', torch_dtype=torch.bfloat16).to('cuda').eval()\n"
            "GRPOTrainer(model=model, tools=[search], eval_dataset=held_out, callbacks=[log], optimizers=(own, None))\n"
        )

        done = converted("trl", self.read(tmp_path, "train.py", text, "trl"))

        assert done.settings["model.actor"].value == "models/m"
        ways = [line.partition(": ")[2] for line in done.lost if line.startswith("GRPOTrainer.")]
        assert [way[:27] for way in ways] == [
            "an environment of your own ", *(["the daemon trains by a loop"] * 2), "evaluation.files names file",
        ]  # fmt: skip

    def test_functions_of_a_program_that_trains_at_its_import_are_not_carried(self, tmp_path: Path) -> None:
        text = "def own(completions): ...\nGRPOTrainer('m', own, args=GRPOConfig(beta=b, max_steps=2)).train()\n"

        found = self.read(tmp_path, "train.py", text, "trl")

        assert 'reward_funcs = "train.own": an import of this program would train: move its functions to a module' in (
            "\n".join(converted("trl", found).lost)
        )

    def test_a_program_that_calls_another_trainer_of_trl_is_refused(self, tmp_path: Path) -> None:
        data = "data = load_dataset('json', data_files='a.jsonl')\n"
        with pytest.raises(ConfigError, match=r"t\.py: a run of `RLOOTrainer`; of TRL those of `GRPOTrainer` are conv"):
            self.read(tmp_path, "t.py", f"{data}RLOOTrainer('m', f, args=RLOOConfig(beta=0.05)).train()\n", "trl")

        own = f"{data}class OwnTrainer(GRPOTrainer): ...\nOwnTrainer('m', f, args=GRPOConfig(beta=0.05)).train()\n"
        assert self.read(tmp_path, "t.py", own, "trl")["beta"] == 0.05

    @pytest.mark.parametrize("word", ["verl", "openrlhf"])
    def test_a_program_of_another_trainer_is_refused(self, tmp_path: Path, word: str) -> None:
        with pytest.raises(ConfigError, match=r"t\.py: a program; of \w+ JSON, YAML and shell scripts are converted"):
            self.read(tmp_path, "t.py", "a = 1\n", word)

    def test_a_list_of_overrides_needs_no_program(self, tmp_path: Path) -> None:
        found = self.read(tmp_path, "overrides", "data.train_batch_size=8\n# no\nalgorithm.lam=0.9\n", "verl")

        assert found == {"data.train_batch_size": 8, "algorithm.lam": 0.9}

    def test_the_overrides_that_hydra_writes_are_read(self, tmp_path: Path) -> None:
        text = "- data.train_files=['a','b']\n- +algorithm.lam=0.9\n- trainer.total_epochs=2\n"

        assert self.read(tmp_path, "overrides.yaml", text, "verl") == {
            "data.train_files": ["a", "b"], "algorithm.lam": 0.9, "trainer.total_epochs": 2,
        }  # fmt: skip

    def test_a_command_of_trl_that_names_a_file_has_its_reason(self, tmp_path: Path) -> None:
        found = self.read(tmp_path, "run.sh", "trl grpo --config grpo.yaml", "trl")

        assert lost("trl", found) == [
            'config = "grpo.yaml": the options of that file are not read: convert it, and set those of the command'
        ]

    def test_options_of_a_command_have_none_one_or_several_values(self, tmp_path: Path) -> None:
        text = (
            "ray job submit --address=x -- python3 -m openrlhf.cli.train_ppo_ray --ds.packing_samples \\\n"
            "  --reward.clip_range -5 5 --pretrain 'a b' --actor.adam.lr=1e-6 && echo --seed 3"
        )

        assert self.read(tmp_path, "run.sh", text, "openrlhf") == {
            "ds.packing_samples": True,
            "reward.clip_range": [-5, 5],
            "pretrain": "a b",
            "actor.adam.lr": 1e-6,
        }
        flags = "accelerate launch --num_processes 2 grpo.py --learning_rate 1e-6 --bf16 --report_to wandb"
        assert self.read(tmp_path, "t.sh", flags, "trl") == {
            "num_processes": 2, "learning_rate": 1e-6, "bf16": True, "report_to": "wandb",
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("launcher", "expected"),
        [
            ("accelerate launch --config_file z.yaml --num_processes=8 -m trl.scripts.grpo",
             {"config_file": "z.yaml", "num_processes": 8}),
            ("echo --num_processes 3; accelerate launch --num-processes 4 grpo.py", {"num_processes": 4}),
            ("torchrun --nproc_per_node 8 grpo.py", {"num_processes": 8}),
            ("torchrun --nnodes=2 --nproc-per-node=8 grpo.py", {"num_processes": 16}),
            ("torchrun --nnodes=$NODES --nproc_per_node=8 grpo.py", {"num_processes": "8 x $NODES"}),
            ("deepspeed --num_gpus 2 --num_nodes 2 grpo.py", {"num_processes": 4}),
            ("accelerate launch --num_processes $N grpo.py", {"num_processes": "$N"}),
            ("torchrun --nproc_per_node 8 grpo.py --num_processes 2", {"num_processes": 2}),
            ("accelerate launch --config_file z.yaml --num_processes 2 examples/scripts/gspo.py",
             {"config_file": "z.yaml", "num_processes": 2}),
        ],
    )  # fmt: skip
    def test_the_processes_of_the_launcher_are_ranks(
        self, tmp_path: Path, launcher: str, expected: dict[str, Any]
    ) -> None:
        command = f"{launcher} --per_device_train_batch_size 4 --gradient_accumulation_steps 2"

        found = self.read(tmp_path, "run.sh", command, "trl")

        assert found == {**expected, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
        count, done = expected["num_processes"], converted("trl", found)
        assert done.settings["buffer.sample_batch_size"].value == 8
        if isinstance(count, int):
            assert done.settings["trainer.world_size"].value == count and lost("trl", found) == []
        else:
            assert f'num_processes = "{count}": the value needs the shell' in "\n".join(done.lost)

    def test_a_word_that_no_library_reads_as_a_list_is_a_text(self) -> None:
        for word in ("[2026-13-01]", "{" * 2000):
            assert files.scalar(word) == word

    @pytest.mark.parametrize(
        ("name", "text", "error"),
        [
            ("c.json", '{"beta": 0.1,\n "lr" 3}', "c.json:2:7: Expecting ':' delimiter"),
            ("c.yaml", "beta: 1\n  gamma: [1", "c.yaml:2:8: mapping values are not allowed here"),
            ("c.yaml", "- a\n- b", "c.yaml:1:1: must be options with their values, got \"['a', 'b']\""),
            ("c.json", "3", "c.json:1:1: must be options with their values, got '3'"),
            ("c.yaml", b"beta: 1\nx: \xff", "c.yaml:2: not UTF-8 but byte 0xff"),
            ("c.yaml", "run_name: 2026-13-01", "c.yaml: month must be in 1..12"),
            ("c.yaml", "lr: 1", "c.yaml: no option of TRL is in the file"),
            ("c.sh", 'a\n--beta "$(x', "c.sh:2: no closing quotation, for a word that begins here"),
            ("c.sh", "a\n\n--beta 'x\nb", "c.sh:3: no closing quotation, for a word that begins here"),
            ("c.py", "GRPOConfig(\n  beta=)\n", "c.py:2:8: invalid syntax"),
            ("c.py", "beta = 1\0", "c.py: source code string cannot contain null bytes"),
            ("c.py", "beta = 1", "c.py: no option of TRL is in the file"),
            ("c.sh", "hello", "c.sh: no option of TRL is in the file"),
            ("c.sh", "", "c.sh: no option of TRL is in the file"),
        ],
    )
    def test_a_file_that_cannot_be_read_is_named_with_its_place(
        self, tmp_path: Path, name: str, text: str | bytes, error: str
    ) -> None:
        with pytest.raises(ConfigError) as raised:
            self.read(tmp_path, name, text, "trl")
        assert str(raised.value) == f"{tmp_path}/{error}"

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"x\.yaml: cannot be read: No such file or directory"):
            files.read(tmp_path / "x.yaml", BY_WORD["trl"])

    def test_the_whole_of_training_arguments_loses_nothing_but_what_differs(self, tmp_path: Path) -> None:
        """What `GRPOConfig(...).to_dict()` holds: each option with its default."""
        arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, max_steps=4)
        found = self.read(tmp_path, "c.json", json.dumps(arguments.to_dict()), "trl")

        places = ("model.actor: ", "prompts.path: ", "rewards: ")
        assert [line for line in converted("trl", found).lost if not line.startswith(places)] == []
