"""Defaults that follow from other keys, the model or the device are shown with the value in force and its origin."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config import load as config_load
from pipeline.config.advice import SECTIONS
from pipeline.config.derived import derived
from tests.config.test_example_runs import SHAPES, write_model

NO_VALUE = {
    "model.reward", "model.lora_adapter", "prompts.max_characters", "prompts.pass_rate_column",
    "prompts.system_prompt", "prompts.tools_file", "prompts.tools_column", "rollout.environment",
    "rollout.stop_token_ids", "rollout.reward_clip", "trainer.target_kl", "trainer.kl_coef_target",
    "trainer.dual_clip", "metrics.tls_cert", "metrics.tls_key", "metrics.token_file",
}  # fmt: skip
"""Keys that are off if they are left out."""


def loaded(*sets: str, on_cards: bool = False) -> config_load.LoadedConfig:
    return config_load.load(None, sets, {}, on_cards=on_cards)


def shown(*sets: str, on_cards: bool = False) -> list[str]:
    return config_load.render(loaded(*sets, on_cards=on_cards), effective=True, origin=True).splitlines()


def test_every_key_that_may_be_left_out_has_a_default_with_its_origin_or_is_off() -> None:
    sets = ("rollout.engine=vllm", "rollout.environment=own:Game", "rewards=[]",
            "trainer.loss_aggregation=dr_grpo")  # fmt: skip
    config = loaded(*sets).config

    optional = {
        f"{section}.{name}"
        for section, model in SECTIONS.items()
        for name, field in type(model).model_fields.items()
        if field.default is None
    }

    # The name of a run follows from the paths of the embedded task: `rlhfd config show` has it.
    assert optional - derived(config, on_cards=False).keys() == {*NO_VALUE, "daemon.run_name"}
    assert all(found.reason for found in derived(config, on_cards=True).values())


@pytest.mark.parametrize(
    ("sets", "on_cards", "line"),
    [
        ((), False, 'log_probs = "engine"  # default; engine transformers in float32'),
        (("model.dtype=bfloat16",), True, 'log_probs = "worker"  # default; engine transformers in bfloat16'),
        (
            ("trainer.policy_loss=reinforce",),
            False,
            'log_probs = "trainer"  # default; trainer.policy_loss reinforce with stale rows',
        ),
        ((), False, "# inference_batch_size is left out  # the 128 rows of a ticket"),
        (("rollout.engine=vllm",), False, "# inference_batch_size is left out  # 256 rows of vLLM"),
        ((), False, 'advantages = "grpo"  # default; for grpo'),
        (("rollout.algorithm=ppo",), False, 'advantages = "gae"  # default; for ppo'),
        (("rollout.algorithm=ppo",), False, "sample_batch_size = 128  # default; for ppo"),
        (("trainer.clip_range=0.3",), False, "clip_high = 0.3  # default; trainer.clip_range"),
        (
            ("trainer.loss_aggregation=dr_grpo", "rollout.max_length=40", "rollout.max_new_tokens=8"),
            False,
            "dr_grpo_tokens = 8  # default; the longest response",
        ),
        (("rollout.max_length=40", "rollout.max_new_tokens=8"), False,
         "max_prompt_length = 32  # default; max_length less max_new_tokens"),
        ((), False, "# activation_checkpointing is left out  # false: no GPU"),
        (
            (),
            True,
            "# activation_checkpointing is left out  # chosen by `rlhfd plan`",
        ),
        ((), False, "# micro_batch_size is left out  # by the size of the model: no GPU"),
        ((), True, "# micro_batch_size is left out  # trainer.micro_batch_tokens takes its place"),
        ((), False, "# logits_forward_batch_size is left out  # by the size of the model: no GPU"),
        ((), True, "# logits_forward_batch_size is left out  # rollout.logits_forward_tokens takes its place"),
        ((), True, "# logits_forward_tokens is left out  # chosen by `rlhfd plan`"),
        ((), False, "# logits_forward_tokens is left out  # no GPU"),
        (("rollout.logits_forward_batch_size=4",), True,
         "# logits_forward_tokens is left out  # rollout.logits_forward_batch_size is set"),
        (("rollout.engine=vllm",), False, "# cache_bytes is left out  # 1 GiB: no GPU"),
        (("rollout.engine=vllm", "rollout.quantization=fp8", "model.dtype=bfloat16"), True,
         'importance_correction = "token"  # default; needed by rollout.quantization'),
        (("rollout.engine=vllm", "rollout.quantization=fp8", "model.dtype=bfloat16"), True,
         "# engine_gap_nats is left out  # for fp8"),
        (("evaluation.files=['a']", "rollout.top_p=0.9"), False, "top_p = 0.9  # default; rollout.top_p"),
        (("evaluation.files=['a']", "evaluation.num_generations=4"), False,
         "pass_k = 4  # default; evaluation.num_generations"),
        ((), False, "# float32_logits is left out  # model.dtype is float32"),
        (("model.dtype=bfloat16",), True, "# float32_logits is left out  # measured at the start, on the GPU"),
        (("model.dtype=bfloat16",), False, "float32_logits = false  # default; no GPU"),
        ((), True, 'devices = "auto"  # default; placed by `rlhfd plan`'),
    ],
)  # fmt: skip
def test_a_default_is_shown_with_what_it_follows_from(sets: tuple[str, ...], on_cards: bool, line: str) -> None:
    assert line in shown(*sets, on_cards=on_cards)


def test_a_model_of_its_own_is_in_float32_for_lack_of_a_gpu(tmp_path: Path) -> None:
    write_model(tmp_path / "model", SHAPES["0.5b"])

    assert 'dtype = "float32"  # default; no GPU' in shown(f"model.actor={tmp_path}/model")
    assert 'dtype = "bfloat16"  # default; for a model of its own on a GPU' in shown(
        f"model.actor={tmp_path}/model", on_cards=True
    )


def test_a_key_that_is_set_has_no_other_origin() -> None:
    assert 'log_probs = "worker"  # --set rollout.log_probs' in shown("rollout.log_probs=worker")


@pytest.mark.parametrize(
    ("sets", "on_cards", "is_installed", "line"),
    [
        ((), True, True, 'engine = "vllm"  # auto: vllm is installed here, and the run has GPUs'),
        ((), True, False, 'engine = "transformers"  # auto: vllm is not installed here'),
        ((), False, True, 'engine = "transformers"  # auto: no GPU'),
        (
            ("cluster.engine=ray",),
            True,
            True,
            'engine = "transformers"  # auto: whether the machines of a cluster have vllm is not known here',
        ),
    ],
)
def test_the_engine_follows_from_gpus_and_installation(
    monkeypatch: pytest.MonkeyPatch, sets: tuple[str, ...], line: str, *, on_cards: bool, is_installed: bool
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if is_installed else None)

    found = loaded("rollout.engine=auto", *sets, on_cards=on_cards)

    assert line in config_load.render(found, effective=False, origin=False).splitlines()
    assert config_load.load_again(found, lambda loaded: []).config == found.config


VLLM_HERE = "importlib.util.find_spec", lambda name: object()


def test_the_engine_of_a_model_of_its_own_is_chosen_and_that_of_the_embedded_one_is_transformers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_model(tmp_path / "model", SHAPES["0.5b"])
    own = f"model.actor={tmp_path}/model"
    monkeypatch.setattr(*VLLM_HERE)

    assert loaded(own, on_cards=True).config.rollout.engine == "vllm"
    assert 'engine = "vllm"  # default; auto: vllm is installed here, and the run has GPUs' in shown(own, on_cards=True)
    assert 'engine = "transformers"  # default; auto: no GPU' in shown(own)
    assert loaded(own, "rollout.engine=transformers", on_cards=True).config.rollout.engine == "transformers"
    assert 'engine = "transformers"  # default' in shown(on_cards=True)


@pytest.mark.parametrize("sets", [(), ("rollout.engine=auto",)])
def test_a_vllm_that_a_run_cannot_have_is_not_chosen_and_the_reason_is_its_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sets: tuple[str, ...]
) -> None:
    write_model(tmp_path / "model", SHAPES["0.5b"])
    monkeypatch.setattr(*VLLM_HERE)

    found = loaded(f"model.actor={tmp_path}/model", "model.lora_rank=600", *sets, on_cards=True)

    assert found.config.rollout.engine == "transformers"
    assert found.reasons["rollout.engine"] == (
        'auto: vllm is installed, but --set model.lora_rank: must be at most 512 with rollout.engine = "vllm", got 600'
    )


def test_a_release_of_vllm_that_is_not_admitted_is_not_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_model(tmp_path / "model", SHAPES["0.5b"])
    monkeypatch.setattr(*VLLM_HERE)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.23.2")

    found = loaded(f"model.actor={tmp_path}/model", on_cards=True)

    assert found.config.rollout.engine == "transformers"
    assert found.reasons["rollout.engine"] == "auto: vLLM 0.23.2 is not admitted, >=0.24,<0.34 is"


def test_files_that_vllm_cannot_take_are_a_reason_too_and_other_problems_of_files_stay_errors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_model(tmp_path / "model", SHAPES["0.5b"])
    monkeypatch.setattr(*VLLM_HERE)

    def load(problem: str, engine: str) -> config_load.LoadedConfig:
        def check(loaded: config_load.LoadedConfig) -> list[str]:
            return [problem] if loaded.config.rollout.engine in engine else []

        sets = (f"model.actor={tmp_path}/model",)
        return config_load.load(None, sets, {}, check_files=check, on_cards=True)

    assert load("not these positions", "vllm").reasons["rollout.engine"] == (
        "auto: vllm is installed, but not these positions"
    )
    with pytest.raises(config_load.ConfigErrors, match=r"^no such file$"):
        load("no such file", "vllm transformers")
