"""The growth that the soak counts as a leak, and the growth that it does not."""

from __future__ import annotations

import pytest

from tests.chaos.test_soak import Held, growth


@pytest.mark.parametrize("leak", [0, 16 << 20])
def test_a_leak_is_told_from_how_often_a_step_is_met(leak: int) -> None:
    def resident(at_s: float) -> int:
        # A busy machine in its second half: three of four samples are taken during a step; before, one of four.
        is_in_step = at_s // 10 % 4 < (1 if at_s < 600 else 3)
        return int((400 << 20) + is_in_step * (20 << 20) + leak * at_s / 1200)

    samples = [Held(float(at_s), resident(at_s), 0, 0, 0) for at_s in range(0, 1200, 10)]

    assert growth(samples) / 3600 * 1200 == pytest.approx(leak, abs=1 << 20)
