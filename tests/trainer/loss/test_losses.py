"""The losses against values worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipeline.errors import ShapeError
from pipeline.trainer.loss.losses import masked_mean, mean_and_stddev, moments_of, policy_loss, value_loss, whiten

NAN = float("nan")


def row(*values: float) -> Tensor:
    return torch.tensor([values])


def flags(*values: int) -> Tensor:
    return torch.tensor([values], dtype=torch.bool)


def logs(*values: float) -> Tensor:
    return torch.tensor([[math.log(value) for value in values]])


def test_the_mean_of_no_element_is_0() -> None:
    assert masked_mean(row(1, 2), flags(0, 0)) == 0


def test_masked_mean_counts_masked_elements_only() -> None:
    assert masked_mean(row(1, NAN, 5), flags(1, 0, 1)).item() == 3.0
    assert masked_mean(row(1, NAN, 5), flags(1, 0, 1), denominator=12).item() == 0.5
    assert masked_mean(row(1, NAN), flags(0, 0)).item() == 0.0
    with pytest.raises(ShapeError, match=r"\(1, 2\) and mask \(1, 3\)"):
        masked_mean(row(1, 2), flags(1, 1, 1))


def test_values_of_rows_are_none_of_columns() -> None:
    """Of two rows with two actions each they would be taken along the other dimension."""
    zeros, mask = torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool)
    of_rows = torch.tensor([1.0, -1.0])

    with pytest.raises(ShapeError):
        policy_loss(zeros, zeros, of_rows, mask, 0.2)
    with pytest.raises(ShapeError):
        value_loss(zeros, zeros, of_rows, mask, 0.2)
    # With a column of their own they are those of rows.
    assert policy_loss(zeros, zeros, of_rows.unsqueeze(1), mask, 0.2).loss == 0


def test_policy_loss_by_hand() -> None:
    # ratio, advantage -> -min(r A, clip(r, 0.8, 1.2) A)
    ratios = (1.0, 1.5, 1.5, 0.5, 0.5, 1.1)
    advantages = row(2.0, 2.0, -2.0, 2.0, -2.0, 1.0)
    expected = (-2.0, -2.4, 3.0, -1.0, 1.6, -1.1)
    mask = flags(1, 1, 1, 1, 1, 1)

    result = policy_loss(logs(*(0.1 * r for r in ratios)), logs(*[0.1] * 6), advantages, mask, 0.2)

    assert result.loss.item() == pytest.approx(sum(expected) / 6)
    assert result.ratios[0].tolist() == pytest.approx(ratios)
    assert result.clipped[0].tolist() == [False, True, False, False, True, False]


def test_policy_gradient_of_fresh_experience_is_minus_the_advantage_and_vanishes_where_clipped() -> None:
    log_probs = torch.zeros(1, 3, requires_grad=True)
    old_log_probs = row(0.0, -1.0, -1.0)  # ratios 1, e, e

    policy_loss(log_probs, old_log_probs, row(3.0, 3.0, -3.0), flags(1, 1, 1), 0.2).loss.backward()

    assert log_probs.grad is not None
    assert log_probs.grad[0].tolist() == pytest.approx([-1.0, 0.0, math.e])


def test_what_lies_outside_the_mask_changes_neither_losses_nor_gradients() -> None:
    mask = flags(1, 0)
    inputs = torch.zeros(1, 2, requires_grad=True)

    policy = policy_loss(inputs, row(0.5, NAN), row(1.0, NAN), mask, 0.2)
    value = value_loss(inputs, row(0.5, NAN), row(1.0, NAN), mask, 0.2)
    (policy.loss + value).backward()

    assert policy.loss.item() == pytest.approx(-math.exp(-0.5))
    assert value.item() == pytest.approx(0.5)
    assert policy.ratios[0, 1].item() == 1.0
    assert inputs.grad is not None
    assert inputs.grad[0].tolist() == pytest.approx([-math.exp(-0.5) - 1.0, 0.0])


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_values_outside_the_mask_change_neither_the_value_loss_nor_its_gradient(bad: float) -> None:
    values = torch.tensor([[0.5, bad, 2.0, bad]], requires_grad=True)
    old, returns, mask = row(0.4, bad, 1.0, 0.0), row(1.0, bad, 1.0, bad), flags(1, 0, 1, 0)

    loss = value_loss(values, old, returns, mask, 0.2)
    loss.backward()

    # By hand: (0.5 - 1)^2 = 0.25, and (2 - 1)^2 = 1; half of their mean, with slopes (V - R) / 2.
    assert loss.item() == pytest.approx(0.3125)
    assert values.grad is not None
    assert values.grad[0].tolist() == pytest.approx([-0.25, 0.0, 0.5, 0.0])


def test_nan_inside_the_mask_is_not_hidden() -> None:
    mask = flags(1)

    assert policy_loss(row(NAN), row(0.0), row(1.0), mask, 0.2).loss.isnan()
    assert policy_loss(row(0.0), row(NAN), row(1.0), mask, 0.2).loss.isnan()
    assert policy_loss(row(0.0), row(0.0), row(NAN), mask, 0.2).loss.isnan()
    assert value_loss(row(0.0), row(0.0), row(NAN), mask, 0.2).isnan()


def test_value_loss_by_hand() -> None:
    # value, old value, return -> max((v - R)^2, (old + clip(v - old, -0.2, 0.2) - R)^2) / 2
    values, old_values = row(1.0, 1.0, 0.1, 2.0, -3.0), row(0.0, 0.9, 0.0, 0.0, -1.0)
    returns = row(1.0, 0.0, 1.0, 5.0, -4.0)
    expected = ((0.2 - 1.0) ** 2, 1.0**2, 0.9**2, (0.2 - 5.0) ** 2, (-1.2 + 4.0) ** 2)

    loss = value_loss(values, old_values, returns, flags(1, 1, 1, 1, 1), 0.2)

    assert loss.item() == pytest.approx(sum(expected) / 5 / 2)


def test_the_value_gradient_vanishes_where_the_clip_holds() -> None:
    values = torch.tensor([[1.0, 0.1]], requires_grad=True)

    value_loss(values, row(0.0, 0.0), row(2.0, 2.0), flags(1, 1), 0.2).backward()

    assert values.grad is not None
    assert values.grad[0].tolist() == pytest.approx([0.0, -1.9 / 2])


@given(split=st.integers(1, 5), seed=st.integers(0, 10_000))
def test_losses_of_parts_add_up_to_the_loss_of_the_whole(split: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    first, second, third = torch.randn(3, 6, 4, generator=generator)
    mask = torch.rand(6, 4, generator=generator) < 0.7
    mask[0, 0] = True
    count = float(mask.sum())

    whole = policy_loss(first, second, third, mask, 0.2).loss, value_loss(first, second, third, mask, 0.2)
    parts = []
    for rows in (slice(None, split), slice(split, None)):
        x, y, z, kept = first[rows], second[rows], third[rows], mask[rows]
        policy = policy_loss(x, y, z, kept, 0.2, denominator=count).loss
        parts.append((policy, value_loss(x, y, z, kept, 0.2, denominator=count)))

    assert sum(policy.item() for policy, _ in parts) == pytest.approx(whole[0].item(), abs=1e-5)
    assert sum(value.item() for _, value in parts) == pytest.approx(whole[1].item(), abs=1e-5)


def test_moments_of_parts_add_up_and_give_mean_and_deviation() -> None:
    values, mask = row(1.0, 3.0, NAN, 5.0, 7.0), flags(1, 1, 0, 1, 1)

    moments = moments_of(values[:, :2][mask[:, :2]]) + moments_of(values[:, 2:][mask[:, 2:]])
    mean, stddev = mean_and_stddev(moments)

    assert moments.tolist() == [4.0, 16.0, 84.0]
    assert (mean.item(), stddev.item()) == pytest.approx((4.0, math.sqrt(5.0)))
    assert [value.item() for value in mean_and_stddev(torch.zeros(3))] == [0.0, 0.0]


def test_whitened_elements_have_mean_0_and_variance_1() -> None:
    values, mask = row(1.0, 3.0, NAN, 5.0, 7.0), flags(1, 1, 0, 1, 1)

    whitened = whiten(values, mask)

    root = math.sqrt(5.0)
    assert whitened[0].tolist() == pytest.approx([-3 / root, -1 / root, 0.0, 1 / root, 3 / root])


def test_equal_elements_have_a_deviation_whatever_their_rounding() -> None:
    for count in range(1, 40):
        for value in (0.1, 0.3, 1.7, 1e3 + 0.1):
            values, mask = torch.full((1, count), value), torch.ones(1, count, dtype=torch.bool)
            assert mean_and_stddev(moments_of(values[mask]))[1] < 1e-4
            assert whiten(values, mask).isfinite().all()


def test_equal_elements_whiten_to_zero() -> None:
    values, mask = row(0.3, 0.3, 0.3), flags(1, 1, 1)

    assert whiten(values, mask)[0].tolist() == pytest.approx([0.0] * 3, abs=1e-3)
