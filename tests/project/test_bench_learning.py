"""The benchmark of what a run learns: ways differ in what they name alone, the figures are those of the runs."""

import pytest

from benches.learning import ROWS, WAYS, Killer, Learned, table, words
from benches.run import RunError, Trace
from pipeline.config.load import load


def trace(*rewards):
    return Trace(tuple(float(n) for n in range(len(rewards))), rewards)


@pytest.mark.parametrize("label", WAYS)
def test_each_way_is_a_configuration_of_as_many_rows_a_step(label, tmp_path):
    config = load(None, [*words(WAYS[label].settings), f"daemon.state_dir={tmp_path}"], environ={}).config

    assert config.rows_per_version == (128 if label == "PPO" else ROWS)


def test_the_gain_is_that_of_the_first_and_last_ten_steps():
    found = Learned.of(trace(*[0.2] * 10, 0.9, 0.9, *[0.6] * 10), "staleness_mean=0.50 x\nstaleness_mean=0.75 policy\n")

    assert (found.first, found.last, found.gain) == pytest.approx((0.2, 0.6, 0.4))
    assert found.staleness == 0.75
    with pytest.raises(RunError, match="no status"):
        Learned.of(trace(*[0.2] * 20), "no status")


def test_a_row_has_median_and_range_of_the_seeds():
    runs = [Learned(0.3, 0.6 + gain, 1.0, 0.5) for gain in (0.0, 0.1, 0.05)]

    (row,) = table({"LoRA": runs}).rows

    assert row[0] == "LoRA" and row[1].startswith('`model.lora_rank=16`, `model.lora_targets=["q_proj", ')
    assert row[2:] == ("0.30 (0.30 to 0.30)", "0.65 (0.60 to 0.70)", "0.35 (0.30 to 0.40)", "1.00", "0.50")


def test_a_kill_waits_for_its_step_and_for_the_run(tmp_path):
    killer = Killer(tmp_path, {4: "trainer-1"})

    killer.at_step(3)
    killer.at_step(4)

    assert killer.left == 1
