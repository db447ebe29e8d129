"""The configuration's defaults, bounds and the values that follow from others."""

from __future__ import annotations

import dataclasses
import re
import typing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.buffer import admission
from pipeline.config.conflicts import conflicts
from pipeline.config.rewards import REWARD_NAMES, table_of
from pipeline.config.schema import Config
from pipeline.config.sections import Section

SECTIONS: dict[str, type[Section]] = {
    name: type(info.default) for name, info in Config.model_fields.items() if isinstance(info.default, Section)
}
FIELDS = [
    (f"{section}.{name}", info) for section, model in SECTIONS.items() for name, info in model.model_fields.items()
]
OPTIONS = [
    (f"rewards.{name}.{option}", info) for name in REWARD_NAMES for option, info in table_of(name).model_fields.items()
    if option != "name"
]  # fmt: skip


def build(**values: Any) -> Config:
    """A configuration of ``section__key=value``."""
    tables: dict[str, Any] = {}
    for name, value in values.items():
        section, separator, key = name.partition("__")
        if separator:
            tables.setdefault(section, {})[key] = value
        else:
            tables[section] = value
    return Config.model_validate(tables)


def test_every_key_says_in_one_sentence_what_it_is() -> None:
    tables = {**SECTIONS, **{f"rewards.{name}": table_of(name) for name in REWARD_NAMES}}
    described = {f"{name}.{key}": text for name, table in tables.items() for key, text in table.meanings().items()}

    assert {key for key, _ in [*FIELDS, *OPTIONS]} <= described.keys()
    assert [key for key, text in described.items() if not text.endswith(".") or ". " in text] == []


def test_every_key_has_a_default_but_those_of_a_service_and_a_model() -> None:
    assert {key for key, info in [*FIELDS, *OPTIONS] if info.is_required()} == {
        "rewards.judge.url", "rewards.judge.model", "rewards.model.path", "rewards.remote.url",
    }  # fmt: skip


def is_number(annotation: Any) -> bool:
    kinds = {*(typing.get_args(annotation) or [annotation])}
    return typing.get_origin(annotation) is not tuple and kinds <= {int, float, type(None)}


def test_every_number_has_a_bound() -> None:
    numbers = {key: info.metadata for key, info in [*FIELDS, *OPTIONS] if is_number(info.annotation)}

    def is_bounded(constraints: list[object]) -> bool:
        return any(hasattr(one, name) for one in constraints for name in ("ge", "gt", "le", "lt"))

    assert len(numbers) > 100
    assert [key for key, constraints in numbers.items() if not is_bounded(constraints)] == []


class TestDerivedValues:
    def test_of_the_embedded_run(self) -> None:
        config = Config()

        assert (config.group_size, config.sample_batch_size, config.prompts_per_ticket) == (8, 256, 16)
        assert (config.rollout_kl_coef, config.trainer_kl_coef) == (0.0, 0.01)
        assert config.rows_per_version == 256

    def test_of_ppo(self) -> None:
        config = build(rollout__algorithm="ppo")

        assert (config.group_size, config.sample_batch_size, config.prompts_per_ticket) == (1, 128, 64)
        assert (config.rollout_kl_coef, config.trainer_kl_coef) == (0.01, 0.0)

    def test_given_values_go_first(self) -> None:
        config = build(buffer__sample_batch_size=24, rollout__batch_size=5, rollout__kl_coef=0.5, trainer__kl_coef=0.0)

        assert (config.sample_batch_size, config.prompts_per_ticket) == (24, 5)
        assert (config.rollout_kl_coef, config.trainer_kl_coef) == (0.5, 0.0)

    def test_a_version_takes_every_rank_every_accumulated_batch_and_every_step_between(self) -> None:
        config = build(
            trainer__world_size=2, trainer__gradient_accumulation_steps=3, trainer__publish_every=5,
            buffer__sample_batch_size=16,
        )  # fmt: skip

        assert config.rows_per_version == 16 * 2 * 3 * 5

    def test_a_ticket_has_a_prompt_even_if_half_a_batch_is_less_than_a_group(self) -> None:
        assert build(buffer__sample_batch_size=8).prompts_per_ticket == 1


class TestValues:
    @pytest.mark.parametrize(
        ("value", "expected"),
        [(4096, 4096), ("64MiB", 64 << 20), ("2GiB", 2 << 30), ("8 KiB", 8192), ("100B", 100), (" 1TiB ", 1 << 40)],
    )
    def test_arena_bytes_with_and_without_a_unit(self, value: int | str, expected: int) -> None:
        assert build(buffer__arena_bytes=value).buffer.arena_bytes == expected

    @pytest.mark.parametrize("value", ["64MB", "64", "MiB", "-1MiB", "1.5GiB", "0MiB", 1.0, True, "", 2**62])
    def test_other_arena_bytes_are_refused(self, value: object) -> None:
        with pytest.raises(ValidationError):
            build(buffer__arena_bytes=value)

    @pytest.mark.parametrize("value", [None, 5, [5, 6], [[5], [6, 7]], []])
    def test_stop_token_ids_of_every_form(self, value: object) -> None:
        assert build(rollout__stop_token_ids=value).rollout.stop_token_ids == value

    @pytest.mark.parametrize("value", [-1, "5", True, [-1], [[]], [[5], 6], [5, [6]], 1.0])
    def test_other_stop_token_ids_are_refused(self, value: object) -> None:
        with pytest.raises(ValidationError):
            build(rollout__stop_token_ids=value)

    @pytest.mark.parametrize("key", ["temperature", "learning_rate"])
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0, "1", True])
    def test_rates_are_finite_and_positive(self, key: str, value: object) -> None:
        section = "rollout" if key == "temperature" else "trainer"

        with pytest.raises(ValidationError):
            build(**{f"{section}__{key}": value})

    def test_configuration_survives_json(self) -> None:
        config = build(
            trainer__betas=[0.8, 0.9], trainer__devices=[0, 1], rollout__stop_token_ids=[[1, 2], [3]],
            daemon__runtime_dir="/run/x", model__critic="/models/critic",
        )  # fmt: skip

        assert Config.model_validate_json(config.model_dump_json()) == config

    def test_configuration_cannot_be_changed(self) -> None:
        with pytest.raises(ValidationError):
            Config().rollout.workers = 2  # type: ignore[misc]


class TestConflicts:
    @pytest.mark.parametrize(
        ("values", "key", "message"),
        [
            (
                {"buffer__sample_batch_size": 4, "buffer__max_staleness": 2, "buffer__limit": 1},
                "buffer.limit",
                "leaves no room for a group of 8: 1 batch of 4 rows",
            ),
            (
                {"trainer__micro_batch_size": 4, "trainer__micro_batch_tokens": 4096},
                "trainer.micro_batch_size",
                "must be left out with trainer.micro_batch_tokens, which takes its place",
            ),
            (
                {"rollout__logits_forward_batch_size": 4, "rollout__logits_forward_tokens": 4096},
                "rollout.logits_forward_batch_size",
                "must be left out with rollout.logits_forward_tokens, which takes its place",
            ),
            (
                {"trainer__world_size": 4, "trainer__nodes": 2},
                "cluster.engine",
                'must be "ray" with trainer.nodes above 1',
            ),
            (
                {"cluster__engine": "ray", "trainer__world_size": 4, "trainer__nodes": 3},
                "trainer.world_size",
                "must be a multiple of trainer.nodes, 3, got 4",
            ),
            (
                {"cluster__engine": "ray", "trainer__world_size": 2, "trainer__nodes": 2, "trainer__kind": "external"},
                "trainer.kind",
                'must be "builtin" with trainer.nodes above 1',
            ),
            (
                {"cluster__engine": "ray", "rollout__devices": [1]},
                "rollout.devices",
                "must be auto where Ray gives each worker its GPUs (cluster.worker_gpus)",
            ),
            (
                {"trainer__record": "rows", "trainer__world_size": 2},
                "trainer.record",
                'must be "off" unless the built-in trainer has one rank, which takes a step alone',
            ),
            (
                {"trainer__record": "steps", "trainer__kind": "external"},
                "trainer.record",
                'must be "off" unless the built-in trainer has one rank, which takes a step alone',
            ),
            *(
                (
                    {"trainer__keep_state_every": 2, **without},
                    "trainer.keep_state_every",
                    'must be 1 unless the built-in trainer keeps its state in memory (trainer.keep_state = "memory")',
                )
                for without in ({"trainer__keep_state": "disk"}, {"trainer__kind": "external"})
            ),
            (
                {"rollout__environment": "a:B"},
                "rewards",
                "must be set with rollout.environment; [] for the rewards of its turns alone",
            ),
            (
                {"rollout__environment": "a:B", "rewards": [], "rollout__max_turn_tokens": 24},
                "rollout.max_turn_tokens",
                "must be at most the 23 tokens of a row's response, got 24",
            ),
        ],
    )
    def test_conflict_names_its_key_and_the_values(self, values: dict[str, Any], key: str, message: str) -> None:
        with pytest.raises(ValidationError, match=re.escape(f"{key}: {message}")):
            build(**values)

    @pytest.mark.parametrize(
        "values",
        [
            {"rollout__num_generations": 1, "rollout__algorithm": "ppo"},
            {"rewards": [], "model__reward": "/models/reward"},
            {"rewards": [], "rollout__environment": "a:B", "rollout__max_turn_tokens": 23},
            {"buffer__sample_batch_size": 20, "buffer__max_staleness": 0, "trainer__world_size": 2},
            {"buffer__sample_batch_size": 4, "buffer__max_staleness": 2},
            {"trainer__decay_steps": 0},
            {"model__dtype": "float16", "trainer__kind": "external"},
            {"rollout__sleep": True, "rollout__engine": "mine:new_engine", "buffer__max_staleness": 0},
            {"rollout__sleep": True, "rollout__engine": "vllm", "buffer__max_staleness": 0},
        ],
    )
    def test_what_goes_together_is_accepted(self, values: dict[str, Any]) -> None:
        build(**values)

    @given(
        group=st.integers(2, 12), batch=st.integers(1, 16), staleness=st.integers(0, 3), limit=st.integers(0, 4),
        world_size=st.integers(1, 3), prompts=st.integers(1, 3),
    )  # fmt: skip
    def test_what_is_accepted_never_stops_and_what_would_stop_is_refused(
        self, group: int, batch: int, staleness: int, limit: int, world_size: int, prompts: int
    ) -> None:
        tables: dict[str, dict[str, Any]] = {
            "rollout": {"num_generations": group, "batch_size": prompts},
            "buffer": {"sample_batch_size": batch, "max_staleness": staleness, "limit": limit},
            "trainer": {"world_size": world_size},
        }
        sections = {name: model.model_validate(tables.get(name, {})) for name, model in SECTIONS.items()}
        config = Config.model_construct(**sections)

        accepted = not conflicts(config)

        if accepted:
            assert runs_on(config)
        elif staleness == 0 and config.rows_per_version % group:
            assert not runs_on(config)


@dataclasses.dataclass
class Books:
    """The ledger's interface for `pipeline.buffer.admission`, for rollouts and training that take no time."""

    ready: int = 0
    reserved: int = 0
    policy_version: int = 0
    leases: int = 0
    trained_through: int = 0
    vacant: tuple[int, ...] = ()
    redo: tuple[()] = ()
    position: int = 0
    round_left: int = 0

    @property
    def totals(self) -> Books:
        return self

    def has_free_slot(self) -> bool:
        return True


def runs_on(config: Config, versions: int = 24) -> bool:
    """Whether tickets and batches go on until that many versions are published, and no row is wasted."""
    limits = admission.Limits(
        sample_batch_size=config.sample_batch_size, rows_per_version=config.rows_per_version,
        group_size=config.group_size, prompts_per_ticket=config.prompts_per_ticket,
        max_staleness=config.buffer.max_staleness, limit_batches=config.buffer.limit,
        world_size=config.trainer.world_size, row_bytes=1,
    )  # fmt: skip
    books = Books()
    while books.policy_version < versions:
        ledger: Any = books
        prompts, _ = admission.prompts_to_issue(ledger, limits)
        begun = admission.new_round(ledger, limits, admission.room_in_bound(ledger, limits))
        books.round_left = max(0, books.round_left + begun - prompts)
        books.ready += prompts * config.group_size
        if books.ready >= config.sample_batch_size:
            books.ready -= config.sample_batch_size
            books.leases += 1
            if books.leases - books.trained_through == limits.batches_per_version:
                books.trained_through, books.policy_version = books.leases, books.policy_version + 1
                books.round_left = 0
                if books.ready and not limits.max_staleness:
                    # A group cut by the end of a version: the rest of it is stale at once.
                    return False
        elif not prompts:
            return False
    return True
