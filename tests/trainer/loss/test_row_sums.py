"""Sums over the actions of rows that lie end to end."""

import pytest
import torch

from pipeline.trainer.loss.row_sums import of_actions, row_means, row_sums

VALUES, COUNTS = torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([0, 3, 0, 1, 0])


def test_each_row_has_the_sum_and_the_mean_of_its_own_actions():
    assert row_sums(VALUES, COUNTS).tolist() == [0, 7, 0, 8, 0]
    assert row_means(VALUES, COUNTS).tolist() == pytest.approx([0, 7 / 3, 0, 8, 0])
    assert of_actions(row_sums(VALUES, COUNTS), COUNTS, 4).tolist() == [7, 7, 7, 8]
    assert row_sums(torch.zeros(0), torch.tensor([0, 0])).tolist() == [0, 0]


def test_the_gradient_of_a_mean_reaches_its_row_alone():
    values = VALUES.clone().requires_grad_()

    (gradient,) = torch.autograd.grad(row_means(values, COUNTS)[1], values)

    assert gradient.tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    empty = torch.zeros(0, requires_grad=True)
    assert torch.autograd.grad(row_sums(empty, torch.tensor([0])).sum(), empty)[0].shape == (0,)


def test_the_sum_of_a_row_is_the_same_bit_for_bit_beside_any_others():
    draws = torch.Generator().manual_seed(0)
    rows = [torch.randn(count, generator=draws) for count in (1, 1000, 17, 33_000)]
    alone = [float(row_sums(row, torch.tensor([len(row)]))) for row in rows]

    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 2, 0]):
        counts = torch.tensor([len(rows[row]) for row in order])
        found = row_sums(torch.cat([rows[row] for row in order]), counts)
        assert found.tolist() == [alone[row] for row in order]
    assert alone[3] == pytest.approx(float(rows[3].double().sum()), rel=1e-6)
