"""The benchmark of the whole run: its ways have the same settings, and its figures are those of the traces."""

import json
import sys

import pytest

from benches import run_plain
from benches.run import RunError, Trace, follow, lines_of, tables, trace_of, trace_path
from pipeline.config.schema import Config


def test_plain_pytorch_has_the_defaults_of_rlhfd():
    config = Config()
    trainer = config.trainer

    assert (config.sample_batch_size, config.group_size) == (run_plain.ROWS, run_plain.GROUP)
    assert config.lengths.row == run_plain.MAX_LENGTH
    assert (trainer.learning_rate, trainer.betas) == (run_plain.LEARNING_RATE, run_plain.BETAS)
    assert (trainer.gradient_clip_norm, trainer.clip_range) == (run_plain.CLIP_NORM, run_plain.CLIP)
    assert config.trainer_kl_coef == run_plain.KL_COEF
    assert (config.rollout.temperature, config.rollout.top_p, config.rollout.top_k) == (1.0, 1.0, 0)
    for step in (0, 5, 9, 10, 80, 149, 150, 400):
        assert run_plain.learning_rate_ratio(step) == pytest.approx(trainer.decay.ratio(step))


class Tokenizer:
    eos_token_id = 1

    def decode(self, tokens):
        return "".join(map(str, tokens))


@pytest.mark.parametrize(
    ("response", "expected"), [([2, 3, 1], 1.0), ([2, 3, 1, 0, 0], 1.0), ([2, 3], 0.0), ([3, 2, 1], 0.0), ([1], 0.0)]
)
def test_plain_pytorch_scores_the_exact_answer_ended_by_eos(response, expected):
    assert run_plain.score(response, "23", Tokenizer()) == expected


def test_a_trace_has_the_figures_of_its_steps(tmp_path):
    rewards = [0.1, 0.2, 0.9, 0.8, 0.7, 0.7, 0.6, 0.9]
    lines = [json.dumps({"time_unix_s": 1010.0 + 2 * n, "reward_mean": r}) + "\n" for n, r in enumerate(rewards)]
    trace_path(tmp_path).parent.mkdir(parents=True)
    trace_path(tmp_path).write_text("".join([*lines, '{"time_unix_s": 1']))

    trace = trace_of(lines_of(tmp_path), 1000.0)

    assert trace.ends_s == (10, 12, 14, 16, 18, 20, 22, 24)
    assert (trace.step_s, trace.start_s) == (2.0, 8.0)
    # Means of five: .54, .66, .74: the seventh step is the first at which one reaches .7.
    assert (trace.steps_to_goal, trace.goal_s) == (7, 22.0)
    assert Trace(trace.ends_s, (0.5,) * 8).goal_s is None


def test_ratios_are_to_the_faster_plain_way_and_a_way_that_never_learned_has_no_seconds():
    fast = Trace(tuple(map(float, range(1, 9))), (0.8,) * 8)
    slow = Trace(tuple(2.0 * n for n in range(1, 9)), (0.1,) * 8)

    (table,) = tables({"rlhfd": [fast, fast], "plain, 1": [slow, slow], "plain, 2": [fast, slow]})

    rlhfd, one, two = table.rows
    assert rlhfd == ("rlhfd", "1.00 (1.00 to 1.00)", "1.50 (1.00 to 2.00)", "5.00 (5.00 to 5.00)",
                     "5.00 (5.00 to 5.00)", "5.00 (5.00 to 5.00)", "2 of 2")  # fmt: skip
    assert one[2:] == ("0.750 (0.500 to 1.00)", "-", "-", "-", "0 of 2")
    assert two[6] == "1 of 2"


KILLED_ONCE = """
import json, os, signal, sys
with open(sys.argv[1], "a") as file:
    taken = file.tell() > 0
    print(json.dumps({"step": 1 + taken, "time_unix_s": 1.0, "reward_mean": 0.5}), file=file)
if not taken:
    os.kill(os.getpid(), signal.SIGKILL)
"""
# The first one waits at step 4 for its end; the next one goes on after its checkpoint, step 2.
CHECKPOINTED = """
import json, sys, time
with open(sys.argv[1], "a") as file:
    is_first = file.tell() == 0
    for step in range(1 if is_first else 3, 6):
        print(json.dumps({"step": step, "time_unix_s": 1.0, "reward_mean": 0.5}), file=file, flush=True)
        time.sleep(600 if is_first and step == 4 else 0)
"""


def test_a_command_that_is_killed_is_started_again_where_it_is_to_be(tmp_path):
    trace_path(tmp_path).parent.mkdir(parents=True)
    command = [sys.executable, "-c", KILLED_ONCE, str(trace_path(tmp_path))]

    assert len(follow(command, tmp_path, 2, 2, revives=True).rewards) == 2
    trace_path(tmp_path).unlink()
    with pytest.raises(RunError):
        follow(command, tmp_path, 2, 2)


def test_steps_that_are_taken_again_count_once_and_a_kill_at_a_step_comes_once(tmp_path):
    trace_path(tmp_path).parent.mkdir(parents=True)
    killed = []

    def at_step(step, process):
        if step >= 4 and not killed:
            killed.append(step)
            process.kill()

    follow(
        [sys.executable, "-c", CHECKPOINTED, str(trace_path(tmp_path))], tmp_path, 5, 5, at_step=at_step, revives=True
    )

    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3, 4, 3, 4, 5]
