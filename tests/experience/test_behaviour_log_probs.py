"""The engine's log-probs travel beside the trainer's; rows without them keep their bytes and digests."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from pipeline.errors import FieldError
from pipeline.experience import codec
from pipeline.experience.batching import make_experience_batch
from pipeline.experience.types import BufferItem, Experience, ExperienceVL
from pipeline.trainer.state import digest_after
from tests.support.experiences import made_up, made_up_vl, through
from tests.support.items import item_of


def with_behaviour(experience: Experience) -> Experience:
    """Return the experience with log-probs of an engine, 0.25 below its own."""
    assert experience.action_log_probs is not None and experience.action_mask is not None
    behaviour = (experience.action_log_probs - 0.25) * experience.action_mask
    return dataclasses.replace(experience, behaviour_log_probs=behaviour)


def real(experience: Experience, name: str) -> Tensor:
    """Return a field's values at the actions, row by row."""
    assert experience.action_mask is not None
    return torch.as_tensor(getattr(experience, name)[experience.action_mask.bool()])


@pytest.mark.parametrize(
    ("ppo", "checksum", "digest"),
    [(True, 0xE4A5ED62608D5936, 0x607B7B5D135A457D), (False, 0xC4D080A0D1014363, 0x72F60704164DF437)],
)
def test_rows_without_them_have_known_bytes_and_a_known_digest(ppo: bool, checksum: int, digest: int) -> None:
    items = [item_of(3, 4, ppo=ppo), item_of(2, 5, ppo=ppo, base=7), item_of(4, 1, ppo=ppo, base=3)]
    batch = make_experience_batch(items)

    encoded = codec.encode(batch, memoryview(bytearray(1 << 14)))

    assert (encoded.nbytes, encoded.checksum) == (908, checksum)
    assert digest_after(5, [batch]) == digest


@pytest.mark.parametrize("vision", [False, True])
def test_they_come_back_from_an_extent_where_they_belong(vision: bool) -> None:
    made = made_up_vl if vision else made_up
    appends = [with_behaviour(made(rows=3, seed=seed)) for seed in (1, 2)]

    batch = through(*appends)

    assert isinstance(batch, ExperienceVL) == vision
    expected = torch.cat([real(one, "behaviour_log_probs") for one in appends])
    assert torch.equal(real(batch, "behaviour_log_probs"), expected)
    assert torch.allclose(real(batch, "behaviour_log_probs"), real(batch, "action_log_probs") - 0.25)


def test_a_digest_tells_them_apart() -> None:
    plain = made_up()
    first, second = with_behaviour(plain), with_behaviour(plain)
    assert second.behaviour_log_probs is not None
    second.behaviour_log_probs[0, 0] += 0.5

    digests = {digest_after(0, [one]) for one in (plain, first, second)}

    assert len(digests) == 3


def test_one_that_is_not_finite_is_named() -> None:
    item = dataclasses.replace(item_of(3, 2), behaviour_log_probs=torch.tensor([0.0, float("nan")]))

    with pytest.raises(FieldError, match="row 0: behaviour_log_probs is nan in column 1"):
        make_experience_batch([item])


def test_they_are_given_by_name_so_that_positions_stay_those_of_the_originals() -> None:
    positional = [field.name for field in dataclasses.fields(BufferItem) if not field.kw_only]

    assert positional[-1] == "references"
    assert "behaviour_log_probs" not in positional
