"""Running moments against averages in NumPy that hold all steps at once."""

import math

import numpy as np
import pytest

from pipeline.experience.running_moments import LEAST_STDDEV, RATE, Moments


def of_steps(*steps):
    found = Moments()
    for numbers in steps:
        values = np.asarray(numbers, np.float64)
        found = found.after(len(values), values.sum(), np.square(values).sum())
    return found


def test_the_moments_are_weighted_averages_over_the_steps():
    rng = np.random.default_rng(0)
    steps = [rng.normal(3 * step, 1 + step, size=rng.integers(1, 50)) for step in range(40)]
    weights = (1 - RATE) ** np.arange(40)[::-1]
    mean = np.average([values.mean() for values in steps], weights=weights)
    square = np.average([np.square(values).mean() for values in steps], weights=weights)

    found = of_steps(*steps)

    assert found.mean == pytest.approx(mean, rel=1e-12)
    assert found.scale == pytest.approx(np.sqrt(square - mean**2), rel=1e-12)


def test_the_first_step_alone_gives_its_own_mean_and_deviation():
    found = of_steps([1.0, 2.0, 6.0])

    assert found.mean == pytest.approx(3.0)
    assert found.scale == pytest.approx(np.std([1.0, 2.0, 6.0]))


def test_small_deviations_of_large_numbers_are_seen():
    assert of_steps([1e6, 1e6 + 1]).scale == pytest.approx(0.5, rel=1e-2)


def test_equal_numbers_have_the_scale_1_and_others_at_least_the_least():
    assert Moments() == (0.0, 0.0, 0.0) and Moments().mean == 0.0 and Moments().scale == 1.0
    for value in (0.0, 5.0, -1e6, 0.1):
        assert of_steps([value] * 7, [value] * 3).scale == 1.0
        assert of_steps([value] * 7, [value] * 3).mean == pytest.approx(value)
    assert of_steps([0.0, 1e-9]).scale == LEAST_STDDEV


@pytest.mark.parametrize(("total", "squares"), [(math.nan, 1.0), (1.0, math.inf), (math.inf, math.inf)])
def test_a_step_without_finite_numbers_changes_nothing(total, squares):
    before = of_steps([1.0, 3.0])

    assert before.after(2, total, squares) == before
    assert before.after(0, 0.0, 0.0) == before


def test_a_state_holds_every_bit():
    found, state = of_steps([0.1, 0.7], [1 / 3]), Moments.new_state()

    found.keep(state)

    assert Moments.of(state) == found
    assert Moments.of(Moments.new_state()) == Moments()
