"""`rlhfd eval`: evaluates one model on held-out prompts, outside a run."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.options import configured, load, placing, prepare_as_start
from pipeline.errors import ConfigError, counted

if TYPE_CHECKING:
    from pipeline.config.load import LoadedConfig
    from pipeline.config.schema import Config
    from pipeline.runtime.checkpoint_note import CheckpointNote
    from pipeline.telemetry.evaluations import Evaluation, PromptResult


@click.command("eval", short_help="Evaluate a model on held-out prompts.")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
@configured
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The model: the folder of a checkpoint, or any other for from_pretrained; else model.actor.",
)
@click.option(
    "--pass-rates",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the rows of the one file as JSON lines, each with the share of its responses that passed.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def evaluate(
    files: tuple[Path, ...],
    path: Path | None,
    sets: tuple[str, ...],
    model: Path | None,
    pass_rates: Path | None,
    as_json: bool,
) -> None:
    """Evaluate a model on held-out prompts: FILES, else evaluation.files of the configuration.

    Sampling, rewards and numbers are those of an evaluation during a run with this configuration: for a checkpoint of
    an evaluated version the results are the same. Lengths and dtype that nothing sets are those of the run that wrote
    the checkpoint. Rewards must be set unless that run had those of the embedded task. Progress goes to standard error.

    \b
    Examples:
      rlhfd eval --config grpo.toml --model state/runs/NAME/checkpoints/best
      rlhfd eval held-out.jsonl --model state/runs/NAME/checkpoints/step-000070 --set evaluation.num_generations=8
      rlhfd eval --config grpo.toml --model state/runs/NAME/checkpoints/best --json | jq .total.pass_at_1
      rlhfd eval train.jsonl --config grpo.toml --pass-rates rated.jsonl     (prompts.pass_rate_column)
    """
    from pipeline import sort_digits
    from pipeline.runtime.checkpoint_note import head_of

    head = None if model is None else head_of(model)
    if model is not None:
        sets = (*sets, f"model.actor={json.dumps(str(model))}")
    if files:
        sets = (*sets, f"evaluation.files={json.dumps([str(file) for file in files])}")
    unused = ("prompts.path", "rewards") if head and _has_default_reward(head) else ("prompts.path",)
    loaded = load(path, sets, files=True, unused=unused)
    if not loaded.config.evaluation.files:
        raise click.UsageError("give FILES of held-out prompts, or a configuration with evaluation.files")
    if pass_rates is not None and len(loaded.config.evaluation.files) > 1:
        raise click.UsageError("--pass-rates needs one file of prompts")
    config = sort_digits.with_paths(loaded.config if head is None else _as_its_run(loaded, head))
    prepare_as_start(loaded.path)
    from pipeline.config.evaluation import held_out
    from pipeline.prompts.pass_rates import refuse_unwritable
    from pipeline.rollout.evaluation import alone
    from pipeline.trainer import setup

    if loaded.config.model.actor == sort_digits.BUILTIN:
        setup.prepare(sort_digits.directory_of(config.daemon.state_dir))
    elif any(one.path == sort_digits.BUILTIN for one in loaded.config.prompts.files):
        # The embedded prompts are not made for a model that has nothing to do with them.
        config = config.model_copy(update={"prompts": held_out(config, config.evaluation.files[0])})
    if pass_rates is not None:
        with _writing(pass_rates):
            refuse_unwritable(held_out(config, config.evaluation.files[0]), pass_rates)
    shown = sys.stderr.isatty()
    results: list[PromptResult] = []
    with placing(loaded):
        found = alone.evaluate(
            config,
            on_progress=_show_progress if shown else lambda done, prompts: None,
            on_result=lambda file, result: results.append(result),
        )
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(found).decode())
    else:
        click.echo("\n".join(lines_of(found)))
    # Last: where the disk is full by now, the results are told.
    if pass_rates is not None:
        with _writing(pass_rates):
            _write_pass_rates(config, results, pass_rates)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--pass-rates: cannot write {path}: {error.strerror}") from error


def _write_pass_rates(config: Config, results: list[PromptResult], path: Path) -> None:
    from pipeline.config.evaluation import held_out
    from pipeline.prompts.pass_rates import write_pass_rates
    from pipeline.prompts.source import PromptSource

    prompts = held_out(config, config.evaluation.files[0])
    column = config.prompts.pass_rate_column or "pass_rate"
    with contextlib.closing(PromptSource(prompts, config.daemon.seed)) as source:
        rates = {source.at(result.position).index: result.right / result.responses for result in results}
    left_out = write_pass_rates(prompts, rates, path, column=column)
    click.echo(f'{counted(len(rates), "row")} with the column "{column}" in {path}'
               + (f", {left_out:,} without a result are left out" if left_out else ""), err=True)  # fmt: skip


def _has_default_reward(head: CheckpointNote) -> bool:
    """Return whether the run of a checkpoint was scored by the default reward alone, that of the embedded task."""
    from pipeline.config.own_model import NEEDED
    from pipeline.config.schema import Config

    defaults, key = Config().model_dump(mode="json"), "rewards"
    parts = [one.split(".") for one in NEEDED[key]]
    others = all(head.config.get(section, {}).get(name) == defaults[section][name] for section, name in parts)
    return others and head.config.get(key) == defaults[key]


def _as_its_run(loaded: LoadedConfig, head: CheckpointNote) -> Config:
    """Return the configuration with the defaults that the run of a checkpoint had; those of another model are its own.

    They follow from the model that a run began with, and from the GPUs of its machine.
    """
    from pipeline.config.conflicts import conflicts
    from pipeline.config.lengths import LENGTH_KEYS

    config = loaded.config
    for keys in (("model.dtype",), LENGTH_KEYS):
        if any(key in loaded.origins for key in keys):
            continue
        for section, _, name in (key.partition(".") for key in keys):
            its = head.config.get(section, {})
            config = config.changed(section, **{name: its[name]}) if name in its else config
    if found := conflicts(config):
        raise ConfigError("\n".join(f"{loaded.where(one.keys[0])}: {one.message}" for one in found))
    return config


def _show_progress(done: int, prompts: int) -> None:
    click.echo(f"\r{done:,} of {counted(prompts, 'prompt')}", nl=done == prompts, err=True)


def lines_of(evaluation: Evaluation) -> list[str]:
    """Return an evaluation as a table, a row a file and one for all of several."""
    from pipeline.cli.status import table

    # With k = 1 both are one number.
    of_k = evaluation.k > 1
    columns = (
        "file", "prompts", "failed", "pass@1", *([f"pass@{evaluation.k}"] if of_k else []), "reward", "length", "cut"
    )  # fmt: skip
    rows = []
    files = evaluation.files
    for one in [*files, evaluation.total] if len(files) > 1 else files:
        values = [
            (one.pass_at_1, "{:.4f}"),
            *([(one.pass_at_k, "{:.4f}")] if of_k else []),
            (one.reward_mean, "{:.4f}"),
            (one.response_length_mean_tokens, "{:.1f}"),
            (one.cut_ratio, "{:.1%}"),
        ]
        cells = ["–" if value is None else form.format(value) for value, form in values]
        rows.append((one.name, f"{one.prompts:,}", f"{one.failed:,}", *cells))
    return table(columns, rows)
