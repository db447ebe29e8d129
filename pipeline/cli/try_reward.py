"""`rlhfd try-reward`: scores given rows with the configured reward, and shows each part of it."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.options import configured, load, placing, prepare_as_start
from pipeline.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from pipeline.cli.reward_rows import Row
    from pipeline.config.load import LoadedConfig
    from pipeline.rollout.reward.trial import RewardTrial, Trial

_MOST_CHARACTERS = 40


@click.command("try-reward", short_help="Score given rows with the configured reward, and show each part.")
@click.argument("file", required=False, type=click.Path(path_type=Path))
@configured
@click.option("--response", "responses", multiple=True, metavar="TEXT",
              help="In place of FILE: a response to prompts of the configuration; may be repeated.")  # fmt: skip
@click.option("--prompts", "count", type=click.IntRange(min=1), default=3, show_default=True,
              help="Number of these prompts, the first ones of the run.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a row.")
def try_reward(
    file: Path | None, path: Path | None, sets: tuple[str, ...], responses: tuple[str, ...], count: int, as_json: bool
) -> None:
    """Score the rows of FILE with the configured reward functions and reward model, and show each part.

    FILE has one JSON object a line: {"prompt": "7302>", "response": "0237", "answer": "0237"}; "answer" is optional,
    and "cut": true marks a response without the stop token. The functions are found as by `rlhfd start` and called in
    this process; print and a debugger work. The exit code is 1 if a row has no reward.

    \b
    Examples:
      rlhfd try-reward rows.jsonl --config grpo.toml
      rlhfd try-reward --config grpo.toml --response 0237 --response 7302
      rlhfd try-reward rows.jsonl --json | jq .parts
    """
    from pipeline import sort_digits
    from pipeline.cli import reward_rows
    from pipeline.config import user_modules
    from pipeline.config.rewards import OwnReward, reward_functions

    if (file is None) == (not responses):
        both = "" if file is None else ", not both"
        raise click.UsageError(f"give a FILE of rows, or at least one --response{both}")
    if any(map(reward_rows.is_broken, responses)):
        raise click.UsageError("--response is no UTF-8")
    loaded = load(path, sets, files=True, unused=() if file is None else ("prompts.path",))
    config = sort_digits.with_paths(loaded.config)
    # Before torch is loaded, which takes seconds: most mistakes are in the rows.
    rows: Iterable[Row] = [] if file is None else reward_rows.of_file(file)
    prepare_as_start(loaded.path)
    # A mistake in a module is told at once, before torch is loaded and the embedded model is made.
    with placing(loaded):
        for reward in reward_functions(config):
            if isinstance(reward, OwnReward):
                user_modules.load_function("rewards", reward.name)
    from pipeline.rollout.reward.trial import RewardTrial
    from pipeline.trainer import setup

    if loaded.config.model.actor == sort_digits.BUILTIN or (file is None and sort_digits.is_used(loaded.config)):
        directory = sort_digits.directory_of(config.daemon.state_dir)
        if not sort_digits.is_prepared(directory):
            click.echo(f"making the embedded model in {directory}, once: some 10 s", err=True)
        setup.prepare(directory)
    with placing(loaded):
        trial = RewardTrial(config)
        if file is None:
            rows = reward_rows.of_prompts(config, responses, count)
        found = [(row, _scored(trial, row, config.rollout.reward_timeout_s)) for row in rows]
    for line in _json_lines(found) if as_json else _table(found, loaded):
        click.echo(line)
    if problems := [f"{row.location}: {result.problem}" for row, result in found if result.problem]:
        click.echo("\n".join(problems), err=True)
        sys.exit(int(ExitCode.FAILED))


def _scored(trial: RewardTrial, row: Row, timeout_s: float) -> Trial:
    """Return the reward of a row, and say so where a run would not wait for it: here a debugger may hold it up."""
    late = (
        f"{row.location}: no score within {timeout_s:g} s (rollout.reward_timeout_s): a run leaves the row out; "
        "Ctrl-C ends the wait"
    )
    timer = threading.Timer(timeout_s, click.echo, (late,), {"err": True})
    timer.daemon = True
    # With 0 a run has no limit.
    if timeout_s:
        timer.start()
    try:
        return trial.score(row.prompt, row.response, is_cut=row.is_cut)
    except ConfigError as error:
        # A prompt that no template renders: the number of a row of a file says little.
        is_of_row = str(error).startswith(row.prompt.named) and row.location != row.prompt.named
        raise (ConfigError(f"{row.location}: {error}") if is_of_row else error) from error
    finally:
        timer.cancel()


def _json_lines(found: list[tuple[Row, Trial]]) -> Iterable[str]:
    for row, result in found:
        fields: dict[str, Any] = {
            "place": row.location,
            "reward": None if result.problem else sum(result.parts.values()),
            "parts": result.parts,
            "numbers": result.numbers,
            "prompt": row.prompt.prompt,
            "response": row.response,
            "answer": row.prompt.answer,
            "tokens": result.tokens,
            "cut": result.is_cut,
            "problem": result.problem,
        }
        yield json.dumps(fields, ensure_ascii=False)


def _table(found: list[tuple[Row, Trial]], loaded: LoadedConfig) -> Iterable[str]:
    from pipeline.cli.status import table
    from pipeline.config.rewards import part_names

    names = part_names(loaded.config)
    numbers = list(dict.fromkeys(name for _, result in found for name in result.numbers))
    columns = ("row", "reward", *names, *numbers, "tokens", "prompt", "response", "answer")
    rows = []
    for row, result in found:
        cells = [f"{result.parts[name]:g}" if name in result.parts else "–" for name in names]
        cells += [f"{result.numbers[name]:g}" if name in result.numbers else "–" for name in numbers]
        reward = "none" if result.problem else f"{sum(result.parts.values()):.4f}"
        tokens = f"{result.tokens}{' cut' if result.is_cut else ''}"
        texts = [_short(text) for text in (row.prompt.prompt, row.response, row.prompt.answer)]
        rows.append((row.location, reward, *cells, tokens, *texts))
    yield from table(columns, rows)
    if rewards := [sum(result.parts.values()) for _, result in found if not result.problem]:
        mean, spread = sum(rewards) / len(rewards), f"{min(rewards):g} to {max(rewards):g}"
        yield f"\n{len(rewards)} of {len(found)} rows have a reward: mean {mean:.4f}, {spread}"


def _short(value: Any) -> str:
    text = "–" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"
