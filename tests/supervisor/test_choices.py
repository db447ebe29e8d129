"""What the plan chooses on a card and in /dev/shm: training passes, checkpointed activations, the training state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import Qwen2Config, Qwen2ForCausalLM

from pipeline.cli.main import main
from pipeline.config.load import get
from pipeline.config.plan import models_of, needs
from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.runtime.lock import shm_directory
from pipeline.supervisor.capacity import machine as machines
from pipeline.supervisor.capacity.budgets import budgets_of
from pipeline.supervisor.capacity.choices import Choices, choice, decided
from pipeline.supervisor.capacity.machine import Machine
from tests.config.test_plan import QWEN_05B, described

GB = 10**9
KEYS = ("trainer.activation_checkpointing", "trainer.micro_batch_tokens")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**QWEN_05B))
    described(folder, {name: list(weight.shape) for name, weight in model.named_parameters()})
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def cards(gpu_gb: float, count: int = 2) -> Machine:
    return Machine(gpus=count, gpu_bytes=round(gpu_gb * GB), ram_bytes=1000 * GB, shm_bytes=500 * GB)


def configured(folder: Path, rollout: Mapping[str, Any] = MappingProxyType({}), **trainer: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"actor": str(folder), "dtype": "bfloat16"},
            "buffer": {"sample_batch_size": 256},
            "rollout": {"max_prompt_length": 512, "max_new_tokens": 1536, **rollout},
            "trainer": {"save_every": 10, **trainer},
        }
    )


def chosen(config: Config, machine: Machine) -> tuple[Choices, tuple[Any, Any]]:
    found = choice(config, models_of(config), machine)
    return found, (get(found.config, KEYS[0]), get(found.config, KEYS[1]))


@pytest.mark.parametrize(
    ("gpu_gb", "trainer", "values"),
    [
        # 0.5 B keeps 1.7 MB a token: 65,536 tokens take 111 GB, with what the allocator keeps 145.
        (192, {}, (False, 65_536)),
        (141, {}, (False, 32_768)),
        (80, {}, (False, 16_384)),
        (40, {}, (False, 8_192)),
        # No pass of that many tokens fits with its activations; None: where a model has layers to checkpoint.
        (30, {}, (None, 65_536)),
        (16, {}, (None, 8_192)),
        # A configured value stays, and decides the other.
        (141, {"activation_checkpointing": True}, (True, 65_536)),
        (40, {"micro_batch_tokens": 16_384}, (None, 16_384)),
        (80, {"micro_batch_tokens": 16_384}, (False, 16_384)),
        (80, {"micro_batch_size": 4}, (False, None)),
        (80, {"micro_batch_size": 4, "activation_checkpointing": True}, (True, None)),
        (80, {"kind": "external", "save_every": 0}, (None, None)),
    ],
)
def test_a_pass_is_as_large_as_the_card_allows(
    folder: Path, gpu_gb: float, trainer: dict[str, Any], values: tuple[Any, Any]
) -> None:
    found, in_force = chosen(configured(folder, **trainer), cards(gpu_gb))

    assert in_force == values
    if found.reasons.keys() & set(KEYS):
        assert found.reasons[KEYS[0]].startswith("GPU of trainer 0 (1 like it) takes ")


def test_a_choice_leaves_a_tenth_of_the_card_free_and_a_quarter_where_ranks_are_sharded(folder: Path) -> None:
    for trainer, share in (({}, 0.9), ({"world_size": 2, "sharding": "full"}, 0.75)):
        config = configured(folder, micro_batch_tokens=16_384, **trainer)
        kept = configured(folder, micro_batch_tokens=16_384, activation_checkpointing=False, **trainer)
        (rank, *_) = (one for one in budgets_of(kept, models_of(kept), cards(80, 4)) if one.holds_ranks)
        least = rank.total_bytes / share / GB

        assert chosen(config, cards(least * 1.001, 4))[1][0] is False
        assert chosen(config, cards(least * 0.999, 4))[1][0] is None


def test_a_card_for_which_no_pass_is_small_enough_keeps_the_defaults_and_the_reason_says_so(folder: Path) -> None:
    found, in_force = chosen(configured(folder), cards(10))

    assert in_force == (None, None)
    assert found.reasons[KEYS[1]] == "no pass leaves 10% of the card free"


def test_a_card_that_the_smallest_pass_alone_fits_has_that_one(folder: Path) -> None:
    smallest = configured(folder, micro_batch_tokens=8_192)
    (rank, *_) = (one for one in budgets_of(smallest, models_of(smallest), cards(80)) if one.holds_ranks)

    found, in_force = chosen(configured(folder), cards(rank.total_bytes * 1.02 / GB))

    assert in_force == (None, 8_192)
    assert found.reasons[KEYS[1]] == "no pass leaves 10% of the card free"


CACHE = "rollout.cache_bytes"
A_ROW = 2 * 2048 * 24 * 2 * 128
"""Bytes of a row of 2,048 tokens: keys and values of 24 layers, 2 heads of 64, in 16 bits."""


@pytest.mark.parametrize(
    ("gpu_gb", "rollout", "rows", "tokens"),
    [
        (141, {}, 256, 32_768),
        (80, {}, 256, 16_384),
        (80, {"inference_batch_size": 64}, 64, 16_384),
        (30, {}, 128, 16_384),
        # Without the reserve alone: the smallest pass.
        (24, {}, 32, 8_192),
    ],
)
def test_beside_a_rank_the_cache_of_vllm_has_room_for_the_rows_that_run_and_leaves_a_step_its_own(
    folder: Path, gpu_gb: float, rollout: dict[str, Any], rows: int, tokens: int
) -> None:
    config = configured(folder, {"engine": "vllm", **rollout})

    found, in_force = chosen(config, cards(gpu_gb, 1))

    assert found.config.rollout.cache_bytes == rows * A_ROW
    assert found.reasons[CACHE] == f"{rows} rows of 2,048 tokens, beside a step on the same card"
    assert in_force[1] == tokens
    (card,) = (one for one in budgets_of(found.config, models_of(config), cards(gpu_gb, 1)) if one.is_card)
    assert card.total_bytes <= (1.0 if tokens == 8_192 else 0.9) * card.capacity_bytes
    assert found.shown[CACHE].endswith(f" here: {found.reasons[CACHE]}")


@pytest.mark.parametrize(
    ("gpus", "settings"),
    [
        (1, {"engine": "vllm", "cache_bytes": "8GiB"}),
        (1, {}),
        (2, {"engine": "vllm"}),
        (0, {"engine": "vllm"}),
    ],
)
def test_a_cache_that_is_set_or_has_its_card_alone_is_not_chosen(
    folder: Path, gpus: int, settings: dict[str, Any]
) -> None:
    config = configured(folder, settings)

    found, _ = chosen(config, cards(141, gpus))

    assert found.config.rollout.cache_bytes == config.rollout.cache_bytes
    assert CACHE not in found.reasons


def test_beside_a_trainer_of_ones_own_nothing_bounds_the_cache(folder: Path) -> None:
    found, _ = chosen(configured(folder, {"engine": "vllm"}, kind="external"), cards(141, 1))

    assert found.config.rollout.cache_bytes is None


def test_where_no_cache_leaves_a_step_its_room_the_reason_says_so(folder: Path) -> None:
    found, in_force = chosen(configured(folder, {"engine": "vllm"}), cards(10, 1))

    assert found.config.rollout.cache_bytes is None and in_force == (None, None)
    assert found.reasons[CACHE] == "no cache leaves room for a step on the same card"
    assert "rollout.cache_bytes bounds it" in found.reasons[KEYS[1]]


def asleep_at_steps(folder: Path) -> Config:
    settings = configured(folder, {"engine": "vllm"}).model_dump(exclude_unset=True)
    settings["rollout"]["sleep"] = True
    settings["buffer"]["max_staleness"] = 0
    return Config.model_validate(settings)


@pytest.mark.parametrize(("gpu_gb", "rows", "least"), [(141, 256, 256), (24, 128, 32), (10, 1, None)])
def test_an_engine_that_sleeps_has_a_cache_of_a_fixed_size_and_a_larger_one(
    folder: Path, gpu_gb: float, rows: int, least: int | None
) -> None:
    awake, config = configured(folder, {"engine": "vllm"}), asleep_at_steps(folder)

    found, _ = chosen(config, cards(gpu_gb, 1))

    assert found.config.rollout.cache_bytes == rows * A_ROW
    without_sleep = chosen(awake, cards(gpu_gb, 1))[0].config.rollout.cache_bytes
    assert without_sleep == (None if least is None else least * A_ROW)
    together = [one for one in budgets_of(found.config, models_of(config), cards(gpu_gb, 1)) if one.is_card]
    assert [one.lacks_bytes > 0 for one in together] == [least is None]
    if least is None:
        assert found.reasons[CACHE] == "one row, no cache leaves room for a step on the same card"


def test_without_a_plan_an_engine_that_sleeps_needs_the_size_of_its_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(environ: Mapping[str, str]) -> Machine:
        raise ConfigError("the driver is silent")

    monkeypatch.setattr("pipeline.supervisor.capacity.choices.described", silent)
    config = asleep_at_steps(folder)

    with pytest.raises(ConfigError, match=r"^rollout\.cache_bytes: must be set .* the driver is silent$"):
        decided(config, {})

    sized = config.model_copy(update={"rollout": config.rollout.model_copy(update={"cache_bytes": GB})})
    assert decided(sized, {}).config.rollout.cache_bytes == GB


def test_without_a_card_nothing_of_a_pass_is_chosen(folder: Path) -> None:
    found, in_force = chosen(configured(folder), cards(0, 0))

    assert in_force == (None, None) and not found.reasons.keys() & set(KEYS)


TOKENS = "rollout.logits_forward_tokens"


@pytest.mark.parametrize(
    ("gpu_gb", "rollout", "tokens"),
    [
        # The reference's passes take 47 kB a token with what the allocator keeps; 11.7 GB in all with the largest.
        (80, {}, 65_536),
        (12, {}, 32_768),
        (11, {}, None),
        (80, {"logits_forward_tokens": 5_000}, 5_000),
        (80, {"logits_forward_batch_size": 4}, None),
        (80, {"inference_batch_size": 4}, None),
        (80, {"engine": "vllm"}, None),
        (80, {"engine": "vllm", "cache_bytes": "8GiB"}, 65_536),
    ],
)
def test_a_log_prob_pass_is_as_large_as_the_workers_card_allows(
    folder: Path, gpu_gb: float, rollout: dict[str, Any], tokens: int | None
) -> None:
    config = configured(folder, rollout)

    found = choice(config, models_of(config), cards(gpu_gb))

    assert found.config.rollout.logits_forward_tokens == tokens
    reason = found.reasons.get(TOKENS, "")
    if tokens in (32_768, 65_536):
        assert reason.startswith("GPU of rollout 0 (1 like it) takes ")
        (card,) = (one for one in budgets_of(found.config, models_of(config), cards(gpu_gb)) if "rollout" in one.name)
        assert card.total_bytes <= 0.9 * card.capacity_bytes
    elif rollout.get("engine") == "vllm":
        assert reason == "the cache of vllm takes what is free of the same card: rollout.cache_bytes bounds it"
    else:
        assert (reason == "no larger pass leaves 10% of the card free") == (not rollout)


def test_no_log_prob_pass_is_chosen_without_a_card_or_without_passes(folder: Path) -> None:
    without_passes = {"engine": "vllm", "cache_bytes": "8GiB", "log_probs": "engine"}
    for config, machine in (
        (configured(folder), cards(0, 0)),
        (configured(folder, without_passes, kl_coef=0.0), cards(80)),
    ):
        found = choice(config, models_of(config), machine)

        assert found.config.rollout.logits_forward_tokens is None
        assert TOKENS not in found.reasons


def needed_by(config: Config) -> int:
    shared = needs(config, models_of(config), on_cards=False).shared
    return shared["weights"] + shared["training state"]


@pytest.mark.parametrize(("missing", "place"), [(0, "memory"), (1, "disk")])
def test_the_training_state_is_in_memory_where_the_room_suffices_and_on_disk_elsewhere(
    folder: Path, missing: int, place: str
) -> None:
    config = configured(folder)
    room = needed_by(config)

    found = choice(config, models_of(config), cards(141)._replace(shm_bytes=room - missing))

    assert found.config.trainer.keep_state == place
    assert found.reasons["trainer.keep_state"].startswith("/dev/shm has ")
    given = choice(configured(folder, keep_state="memory"), models_of(config), cards(141)._replace(shm_bytes=0))
    assert given.config.trainer.keep_state == "memory" and "trainer.keep_state" not in given.reasons


def test_a_state_with_every_nth_version_is_in_memory(folder: Path) -> None:
    config = configured(folder, keep_state_every=4)

    found = choice(config, models_of(config), cards(141)._replace(shm_bytes=0))

    assert (found.config.trainer.keep_state, found.reasons["trainer.keep_state"]) == (
        "memory",
        "trainer.keep_state_every is set",
    )


def test_the_files_that_a_killed_instance_left_count_as_room(folder: Path, tmp_path: Path) -> None:
    """The next start finds less free in /dev/shm, and must choose as the first one did."""
    config = configured(folder)
    daemon = config.daemon.model_copy(update={"runtime_dir": tmp_path / "run"})
    config = config.model_copy(update={"daemon": daemon})
    own = shm_directory(config.daemon.runtime_dir)
    left = 1 << 20
    own.mkdir()
    try:
        (own / "weights").write_bytes(bytes(left))
        needed = needed_by(config)
        chosen_with = [_chosen_with(config, needed - left + more) for more in (0, -(1 << 16))]
    finally:
        (own / "weights").unlink()
        own.rmdir()

    assert chosen_with == ["memory", "disk"]


def test_a_state_that_a_killed_instance_has_left_is_used_though_others_have_filled_the_room(
    folder: Path, tmp_path: Path
) -> None:
    daemon = configured(folder).daemon.model_copy(update={"runtime_dir": tmp_path / "run"})
    config = configured(folder).model_copy(update={"daemon": daemon})
    own = shm_directory(daemon.runtime_dir)
    own.mkdir()
    try:
        before = _chosen_with(config, 0)
        (own / "training").touch()
        after = _chosen_with(config, 0)
    finally:
        (own / "training").unlink(missing_ok=True)
        own.rmdir()

    assert (before, after) == ("disk", "memory")


def _chosen_with(config: Config, shm_bytes: int) -> str:
    with pytest.MonkeyPatch.context() as patch:
        machine = Machine(gpus=0, gpu_bytes=0, ram_bytes=1000 * GB, shm_bytes=shm_bytes)
        patch.setattr("pipeline.supervisor.capacity.choices.described", lambda environ: machine)
        return decided(config, {}).config.trainer.keep_state


def test_the_embedded_model_has_a_plan_before_it_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = Config.model_validate({"daemon": {"state_dir": tmp_path / "none"}})
    monkeypatch.setattr("pipeline.supervisor.capacity.choices.described", lambda environ: cards(141, 1))

    found = decided(config, {})

    trainer = found.config.trainer
    assert (trainer.sharding, trainer.keep_state, trainer.micro_batch_tokens) == ("none", "memory", 65_536)
    assert found.shown["trainer.sharding"] == "none here: one rank"


def test_without_a_plan_a_start_has_the_plain_defaults(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_gpus(environ: object) -> Machine:
        raise ConfigError("the driver is silent")

    monkeypatch.setattr("pipeline.supervisor.capacity.choices.described", no_gpus)

    found = decided(configured(folder, world_size=2), {})

    assert (found.config.trainer.sharding, found.config.trainer.keep_state) == ("none", "memory")
    assert found.reasons == {"trainer.sharding": "no plan: the driver is silent"}


def test_the_choices_are_shown_by_plan_and_by_the_configuration(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "gpus_here", lambda environ: [141 * GB] * 2)
    monkeypatch.setattr(machines, "visible_gpus", lambda environ: list("01"))
    sets = [word for item in (f"model.actor={folder}", "model.dtype=bfloat16", "rollout.max_prompt_length=512",
                              "rollout.max_new_tokens=1536", "buffer.sample_batch_size=256")
            for word in ("--set", item)]  # fmt: skip

    shown = CliRunner().invoke(main, ["config", "show", "--effective", *sets]).output
    planned = CliRunner().invoke(main, ["plan", "--ram", "1TB", *sets]).output

    reason = "GPU of trainer 0 (1 like it) takes "
    assert f"# micro_batch_tokens is left out  # 32,768 here: {reason}" in shown
    assert f"# activation_checkpointing is left out  # false here: {reason}" in shown
    assert "# logits_forward_tokens is left out  # 65,536 here: GPU of rollout 0 (1 like it) takes " in shown
    assert "\nlog-probs    passes of 65,536 tokens: GPU of rollout 0 (1 like it) takes " in planned
    assert 'keep_state = "auto"  # memory here: /dev/shm has ' in shown
    assert f"\npasses       32,768 tokens, activations kept: {reason}" in planned
    assert "\nstate        in memory: /dev/shm has 500.0 GB, weights and training state take " in planned
