"""The course of the learning rate, and the keys that it follows from."""

import math

import pytest

from pipeline.config.load import load
from pipeline.config.rates import Decay
from pipeline.errors import ConfigError


def ratios(count, *decay, first=0):
    return [Decay(*decay).ratio(step, first=first) for step in range(first, first + count)]


def test_the_learning_rate_rises_falls_and_stays():
    linear = ratios(16, "linear", 4, 13, 0.1)

    assert linear[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.91])
    assert linear[12:] == pytest.approx([0.19, 0.1, 0.1, 0.1])
    assert ratios(4, "linear", 2, 0, 0.1) == [0.5, 1.0, 1.0, 1.0]
    assert ratios(4, "linear", 0, 2, 0.0) == [1.0, 0.5, 0.0, 0.0]
    assert ratios(4, "linear", 4, 4, 0.1)[3] == 1.0


def test_a_cosine_falls_slowly_then_fast_then_slowly_to_the_final_ratio():
    cosine = ratios(16, "cosine", 4, 13, 0.1)

    assert cosine[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert cosine[4:13] == pytest.approx([0.1 + 0.9 * (1 + math.cos(math.pi * done / 10)) / 2 for done in range(1, 10)])
    assert cosine[13:] == pytest.approx([0.1, 0.1, 0.1])
    assert cosine[8] == pytest.approx(0.55), "the half of the fall at the half of its steps"


def test_a_model_that_is_trained_later_rises_from_there_and_ends_with_the_others():
    assert ratios(6, "linear", 2, 14, 0.0, first=10) == pytest.approx([0.5, 1.0, 2 / 3, 1 / 3, 0.0, 0.0])


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        ((), Decay("linear", 10, 150, 0.1)),
        (("trainer.schedule=constant",), Decay("constant", 10, 0, 0.1)),
        (("trainer.schedule=cosine", "trainer.decay_steps=40"), Decay("cosine", 10, 40, 0.1)),
        (("trainer.warmup_ratio=0.1",), Decay("linear", 15, 150, 0.1)),
        (("trainer.warmup_ratio=0.03", "trainer.decay_steps=50"), Decay("linear", 2, 50, 0.1)),
        (("trainer.warmup_ratio=0.5", "trainer.decay_steps=0", "trainer.max_steps=9"), Decay("linear", 5, 0, 0.1)),
        (
            ("trainer.warmup_ratio=0.1", "trainer.schedule=constant", "trainer.max_steps=70"),
            Decay("constant", 7, 0, 0.1),
        ),
        (("trainer.warmup_ratio=0", "trainer.warmup_steps=3"), Decay("linear", 3, 150, 0.1)),
    ],
)
def test_the_keys_give_the_course(sets, expected):
    assert load(None, list(sets), {}).config.trainer.decay == expected


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (
            ("trainer.warmup_ratio=0.1", "trainer.warmup_steps=10"),
            "trainer.warmup_steps: must be left out with trainer.warmup_ratio, which takes its place",
        ),
        (
            ("trainer.warmup_ratio=0.1", "trainer.decay_steps=0"),
            "trainer.warmup_ratio: needs trainer.decay_steps or trainer.max_steps, of which it is a share",
        ),
        (
            ("trainer.warmup_ratio=0.1", "trainer.decay_steps=0", "trainer.max_epochs=2"),
            "trainer.warmup_ratio: needs trainer.decay_steps or trainer.max_steps",
        ),
        (
            ("trainer.warmup_ratio=0.1", "trainer.schedule=constant"),
            "trainer.warmup_ratio: needs trainer.max_steps, of which it is a share",
        ),
        (("trainer.warmup_ratio=1.0",), "trainer.warmup_ratio: must be less than 1, got 1.0"),
        (
            ("trainer.schedule=cosine", "trainer.decay_steps=0"),
            'trainer.schedule: must be "constant" or "linear" with trainer.decay_steps = 0',
        ),
        (("trainer.schedule=step",), 'trainer.schedule: must be "linear", "cosine" or "constant", got "step"'),
    ],
)
def test_a_course_without_an_end_or_of_two_minds_is_refused(sets, message):
    with pytest.raises(ConfigError) as refused:
        load(None, list(sets), {})

    assert message in str(refused.value)
