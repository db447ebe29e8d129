"""The recipes of docs/recipes.md learn: the commands of the page, word for word, in a folder with the examples."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pipeline.runtime.lock import shm_directory
from tests.support.daemon import clean_environment, only_run

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "recipes.md").read_text()
# The steps that are compared at both ends of a run.
ENDS = 10
TIMEOUT_S = 800.0
BOOKS = re.compile(
    r"experiences: sealed (\d+) = trained (\d+) \+ dropped (\d+) .*\+ ready (\d+) \+ leased (\d+)$", re.M
)


class Recipe(NamedTuple):
    """A section of the page.

    Attributes:
        title: Its heading.
        config: Its configuration, below the top folder.
        steps: Optimizer steps of the run.
        rows: Rows of a step.
        gain: Least rise of the mean reward from the first steps to the last ones.
    """

    title: str
    config: str
    steps: int
    rows: int
    gain: float


MATH = Recipe("Math with math-verify and truncated importance sampling", "examples/math/grpo.toml", 40, 256, 0.25)
REWARD_MODEL = Recipe("PPO with a reward model", "examples/reward-model/ppo.toml", 40, 128, 0.4)
TOOL = Recipe("Several turns with a tool", "examples/calculator/grpo.toml", 30, 256, 0.04)
RECIPES = [MATH, REWARD_MODEL, TOOL]


class Ended(NamedTuple):
    """A recipe that was run: the lines of its steps, and the output of `rlhfd samples`."""

    steps: list[dict[str, Any]]
    samples: str


def section(title: str) -> str:
    (text,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return str(text)


def commands(title: str) -> list[str]:
    """Return the lines of the section's one block of commands."""
    (block,) = re.findall(r"^```sh\n(.*?)^```$", section(title), re.MULTILINE | re.DOTALL)
    return str(block).splitlines()


def keys_shown(title: str) -> str:
    """Return the section's indented lines, a part of its configuration."""
    return textwrap.dedent("\n".join(re.findall(r"^    .*$", section(title), re.MULTILINE)))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder in which the page's commands find what a checkout has: bin, examples, and .venv with this Python."""
    (tmp_path / "bin").symlink_to(ROOT / "bin")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    made = shutil.ignore_patterns("run", "state", "model", "policy", "reward", "__pycache__")
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=made)
    return tmp_path


def run(checkout: Path, recipe: Recipe) -> tuple[str, str]:
    """Run the commands of a recipe; return the errors of `rlhfd start`, where its log goes, and the last output."""
    logged = printed = ""
    for line in commands(recipe.title):
        try:
            done = executed(checkout, line)
        except subprocess.TimeoutExpired:
            shutil.rmtree(shm_directory((checkout / recipe.config).parent / "run"), ignore_errors=True)
            raise
        printed = done.stdout
        if line.startswith("bin/rlhfd start "):
            logged = done.stderr
    return logged, printed


def executed(checkout: Path, line: str) -> subprocess.CompletedProcess[str]:
    """Return the end of a command in a checkout, which succeeds."""
    # The environment is the tests' own, the port of the metrics any that is free.
    environment = {**clean_environment(), "RLHFD_VENV": sys.prefix, "RLHFD_METRICS__PORT": "0"}
    done = subprocess.run(
        shlex.split(line),
        cwd=checkout,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{line}\n{done.stderr}"
    return done


def ended(checkout: Path, recipe: Recipe, record_property: Callable[[str, object], None]) -> Ended:
    """Run a recipe and print what it learned; check that it learned, and its books."""
    logged, samples = run(checkout, recipe)
    folder = (checkout / recipe.config).parent
    lines = (only_run(folder / "state") / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    rewards = [step["reward_mean"] for step in steps]
    first, last = sum(rewards[:ENDS]) / ENDS, sum(rewards[-ENDS:]) / ENDS
    learned = f"mean reward {first:.3f} in the first {ENDS} steps, {last:.3f} in the last {ENDS} of {len(steps)}"
    record_property("shown", f"{recipe.title}: {learned}\n{samples}")

    assert [step["step"] for step in steps] == list(range(1, recipe.steps + 1)), logged
    assert last - first >= recipe.gain, (rewards, logged)
    (found,) = BOOKS.findall(logged)
    sealed, trained, dropped, ready, leased = map(int, found)
    assert sealed == trained + dropped + ready + leased
    assert (trained, ready, leased) == (recipe.steps * recipe.rows, 0, 0)
    assert "errored" not in logged and "ERROR" not in logged
    return Ended(steps, samples)


@pytest.mark.variant
@pytest.mark.integration
@pytest.mark.timeout(1800)
def test_math_is_learned_with_math_verify_and_truncated_importance_sampling(
    checkout: Path, record_property: Callable[[str, object], None]
) -> None:
    steps, samples = ended(checkout, MATH, record_property)

    # Rows of older policies are corrected: some of their tokens became twice as likely, and their weight is cut.
    corrected = [step for step in steps if step["behaviour_gap_nats"] > 1e-3]
    assert len(corrected) > len(steps) / 2
    assert any(step["behaviour_ratio_max"] > 2 and step["behaviour_cut_ratio"] > 0 for step in steps)
    assert "\\boxed{" in samples


@pytest.mark.integration
@pytest.mark.timeout(1800)
def test_ppo_learns_what_a_reward_model_prefers(checkout: Path, record_property: Callable[[str, object], None]) -> None:
    ended(checkout, REWARD_MODEL, record_property)
    # The few that the page's command shows may be of any letters by chance.
    samples = executed(checkout, f"bin/rlhfd samples --config {REWARD_MODEL.config} --last 100").stdout

    # By the rule of the reader, which no process of the run knows: random letters change 2 times in 7.
    words = re.findall(r"^ +-?[\d.]+ +[+-][\d.]+ +([a-z]+)", samples, re.MULTILINE)
    assert len(words) >= 4
    changes = [(one in "aeiou") != (two in "aeiou") for word in words for one, two in itertools.pairwise(word)]
    # Three standard deviations above them: how many words are recorded depends on the speed of the machine.
    chance = 2 / 7
    assert sum(changes) / len(changes) > chance + 3 * (chance * (1 - chance) / len(changes)) ** 0.5, words


# A usual run takes two steps of it (tests/project/test_examples.py).
@pytest.mark.variant
@pytest.mark.integration
@pytest.mark.timeout(1800)
def test_a_model_learns_to_use_the_calculator(checkout: Path, record_property: Callable[[str, object], None]) -> None:
    _, samples = ended(checkout, TOOL, record_property)

    # A call, its stop, and the result of the tool between brackets.
    assert re.search("\\d+<eos>\N{MATHEMATICAL LEFT ANGLE BRACKET}\\d+>\N{MATHEMATICAL RIGHT ANGLE BRACKET}", samples)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.config.split("/")[1])
def test_a_recipe_shows_keys_of_its_configuration_and_starts_it(recipe: Recipe) -> None:
    config = (ROOT / recipe.config).read_text()
    shown, whole = tomllib.loads(keys_shown(recipe.title)), tomllib.loads(config)

    # `rewards` is a list; the others are sections, of which some keys are shown.
    of_whole = {
        name: {key: whole[name].get(key) for key in keys} if isinstance(keys, dict) else whole.get(name)
        for name, keys in shown.items()
    }
    assert shown and shown == of_whole
    assert [line for line in keys_shown(recipe.title).splitlines() if line not in config.splitlines()] == []
    starts = [line for line in commands(recipe.title) if line.startswith("bin/rlhfd start ")]
    assert len(starts) == 1 and f" --config {recipe.config}" in starts[0]


def test_every_recipe_of_the_page_is_run() -> None:
    assert re.findall(r"^## (.+)$", PAGE, re.MULTILINE) == [recipe.title for recipe in RECIPES]
