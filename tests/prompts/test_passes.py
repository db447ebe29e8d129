"""The end of a run after some passes over its prompts."""

import json

import pytest

from pipeline.config.load import load
from pipeline.errors import ConfigError
from pipeline.prompts.passes import last_step, prompts_of_passes


def config_of(folder, *sets):
    lines = [json.dumps({"prompt": "p" * (1 + number % 5)}) for number in range(25)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    own = (f"prompts.path={folder / 'prompts.jsonl'}", "rollout.num_generations=4", "buffer.sample_batch_size=32")
    return load(None, [*own, *sets], {}).config


@pytest.mark.parametrize(
    ("sets", "prompts", "steps"),
    [
        ((), 0, 0),
        (("trainer.max_steps=7",), 0, 7),
        (("trainer.max_epochs=1",), 25, 3),
        (("trainer.max_epochs=2",), 50, 6),
        (("trainer.max_epochs=2", "trainer.max_steps=4"), 50, 4),
        (("trainer.max_epochs=2", "trainer.max_steps=40"), 50, 6),
        (("trainer.max_epochs=2", "prompts.min_characters=3"), 30, 3),
        (("trainer.max_epochs=2", "trainer.world_size=2", "trainer.publish_every=2"), 50, 3),
        (("trainer.max_epochs=2", "trainer.gradient_accumulation_steps=3"), 50, 2),
        (("trainer.max_epochs=2", "rollout.algorithm=ppo"), 50, 1),
    ],
)
def test_a_run_ends_with_its_steps_or_its_passes_whichever_come_first(tmp_path, sets, prompts, steps):
    config = config_of(tmp_path, *sets)

    assert (prompts_of_passes(config), last_step(config)) == (prompts, steps)


@pytest.mark.parametrize(
    ("sets", "step", "position", "last"),
    [
        ((), 3, 24, 6),
        (("trainer.gradient_accumulation_steps=2",), 3, 24, 4),
        (("buffer.sample_batch_size=16",), 3, 24, 9),
        (("trainer.max_steps=4",), 3, 24, 4),
        (("trainer.max_epochs=1",), 6, 49, 6),
    ],
)
def test_a_resume_with_other_rows_a_step_counts_the_prompts_that_are_left(tmp_path, sets, step, position, last):
    """Three steps of 32 rows have 24 of the 50 prompts; six steps 48."""
    config = config_of(tmp_path, "trainer.max_epochs=2", *sets)

    assert last_step(config, step=step, position=position) == last


def test_passes_without_the_rows_of_a_step_are_refused(tmp_path):
    config = config_of(tmp_path, "trainer.max_epochs=1", "buffer.sample_batch_size=128")

    with pytest.raises(ConfigError, match=r"trainer.max_epochs: 1 pass has 25 prompts, of 100 rows, fewer"):
        last_step(config)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (("prompts.sources=[{path='a'}, {path='b'}]",), "trainer.max_epochs: must be 0 with prompts.sources"),
        (("trainer.kind=external",), "trainer.max_epochs: must be 0 with trainer.kind"),
    ],
)
def test_a_pass_that_has_no_meaning_is_refused(sets, message):
    with pytest.raises(ConfigError, match=message):
        load(None, ["trainer.max_epochs=1", *sets], {})
