"""The lengths in force for each choice of the three keys, and the runs that they make."""

from __future__ import annotations

import pytest

from pipeline.config.identity import identity_of
from pipeline.config.lengths import Lengths, row_bytes_bound
from pipeline.config.schema import Config


def with_lengths(**values: int) -> Config:
    return Config.model_validate({"rollout": values})


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, Lengths(24, 23, None)),
        ({"max_length": 100}, Lengths(100, 99, None)),
        ({"max_length": 100, "max_new_tokens": 60}, Lengths(100, 40, 60)),
        ({"max_length": 100, "max_prompt_length": 30}, Lengths(100, 30, 70)),
        ({"max_prompt_length": 30, "max_new_tokens": 60}, Lengths(90, 30, 60)),
        ({"max_length": 90, "max_prompt_length": 30, "max_new_tokens": 60}, Lengths(90, 30, 60)),
    ],
)
def test_two_of_the_keys_give_the_third(values: dict[str, int], expected: Lengths) -> None:
    config = with_lengths(**values)

    assert config.lengths == expected
    assert config.row_bytes == row_bytes_bound(expected.row)
    assert Config.model_validate_json(config.model_dump_json()).lengths == expected


def test_a_run_of_one_length_is_the_same_run_as_before_the_keys_were_three() -> None:
    assert identity_of(Config()) == identity_of(with_lengths(max_length=24)) == "4c0516a8fd31815957c95a10f5d3d3ef"


def test_runs_of_other_responses_are_other_runs() -> None:
    forms = (
        {"max_length": 90},
        {"max_length": 90, "max_new_tokens": 60},
        {"max_length": 90, "max_new_tokens": 50},
    )
    same = {"max_prompt_length": 30, "max_new_tokens": 60}

    assert len({identity_of(with_lengths(**values)) for values in forms}) == 3
    assert identity_of(with_lengths(**same)) == identity_of(with_lengths(**forms[1]))
