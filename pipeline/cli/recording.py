"""`rlhfd record` and `rlhfd replay`: the recorded steps of a run, listed and taken again."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.options import finding, load, placing, prepare_as_start
from pipeline.cli.runs import run_folder_of
from pipeline.errors import ExitCode, FieldError, RlhfdError, counted

if TYPE_CHECKING:
    from pipeline.storage.recording import Recording

_COLUMNS = ("step", "rows", "sampled by", "bytes", "experiences", "weights", "replayed from")

_run_option = click.option(
    "--run", default="", metavar="NAME", help="Run of that name, or its folder; else the running or the last one."
)


@click.command(short_help="List the recorded steps of a run.")
@finding
@_run_option
@click.option("--last", type=click.IntRange(min=0), default=20, show_default=True, help="Number of steps; 0: all.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a step.")
def record(path: Path | None, runtime_dir: Path | None, run: str, last: int, as_json: bool) -> None:
    """List the recorded steps of a run: the rows of each, the versions that sampled them, and its digests.

    A run records its steps with trainer.record = "steps", and their rows too with "rows"; the rows of a step are needed
    to replay it. The last column is the checkpoint that `rlhfd replay` begins from.

    \b
    Examples:
      rlhfd record
      rlhfd record --json --last 0 | jq -r .weights
    """
    from pipeline.cli.status import table
    from pipeline.storage.recording import recording_of

    folder = _folder_of(path, runtime_dir, run)
    recording = recording_of(folder)
    entries = list(entries_of(folder, recording, last))
    if as_json:
        for entry in entries:
            click.echo(json.dumps(entry))
        return
    kept = sum(recording.has_rows(step) for step in recording.steps)
    click.echo(f"{counted(len(recording.steps), 'step')} recorded, {kept:,} with their rows: {recording.folder}")
    if entries:
        click.echo("\n".join(table(_COLUMNS, [_row(entry) for entry in entries])))


@click.command(short_help="Take a recorded step again, bit for bit.")
@finding
@_run_option
@click.option("--step", type=click.IntRange(min=1), metavar="N", help="The step to take again.")
@click.option("--rows", is_flag=True, help="Train on all recorded rows with this configuration, compare nothing.")
@click.option("--set", "sets", multiple=True, metavar="SECTION.KEY=VALUE", help="With --rows: set one value.")
@click.option("--debug", is_flag=True, help="Take the step under pdb, from its first line on.")
@click.option("--device", default="", metavar="DEVICE", help="cpu or cuda:N; else as the step was taken.")
def replay(
    path: Path | None,
    runtime_dir: Path | None,
    run: str,
    step: int | None,
    rows: bool,
    sets: tuple[str, ...],
    debug: bool,
    device: str,
) -> None:
    """Take a recorded step again in this process, and compare experience and weights with the recorded ones.

    It begins from the newest checkpoint before the step, or from the models as the run began, and takes each step from
    there on its recorded rows: no worker and no daemon take part. The exit code is 1 at the first difference; with
    --debug the replay goes on to the step. On another device or with other libraries the weights differ by rounding.

    With --rows the recorded rows train the models of the given configuration, from its first step on, each step one
    line of JSON as in metrics.jsonl. Algorithm and advantages must be those of the run.

    \b
    Examples:
      rlhfd replay --step 70
      rlhfd replay --step 70 --debug
      rlhfd replay --rows --config other.toml --set trainer.learning_rate=1e-5
    """
    if rows == (step is not None):
        raise click.UsageError("give either --step N or --rows")
    if sets and not rows:
        raise click.UsageError("--set needs --rows: a step is replayed with its recorded settings")
    if debug and rows:
        raise click.UsageError("--debug needs --step")
    folder = _folder_of(path, runtime_dir, run)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from pipeline.config import load as config_load

    prepare_as_start(path or config_load.path_in(os.environ))
    if step is None:
        _train(folder, path, sets, device)
        return
    from pipeline.trainer.recording import replay as replaying

    try:
        equal = replaying.report(folder, step, device, debug=debug, write=click.echo)
    except OSError as error:
        raise RlhfdError(f"step {step} cannot be replayed: {error}") from error
    sys.exit(int(ExitCode.OK if equal else ExitCode.FAILED))


def entries_of(folder: Path, recording: Recording, last: int) -> Iterator[dict[str, Any]]:
    """Yield the last recorded steps as JSON objects, in order; 0: all."""
    from msgspec.structs import asdict

    from pipeline.trainer.recording.bases import Bases

    bases = Bases(folder, recording)
    for step in sorted(recording.steps)[-last:]:
        taken, weights = recording.steps[step], recording.weights.get(step)
        base = bases.of(step)
        yield {
            "step": step,
            "time_unix_s": taken.time_unix_s,
            "for_version": taken.for_version,
            "version": None if weights is None else weights.version,
            "rows": sum(batch.rows for batch in taken.batches),
            "bytes": taken.nbytes if recording.has_rows(step) else 0,
            "experiences": taken.experiences,
            "weights": "" if weights is None else weights.weights,
            "replayed_from": None if base is None else base.name,
            "batches": [
                {**asdict(batch), "origins": [asdict(origin) for origin in batch.origins]} for batch in taken.batches
            ],
        }


def _train(folder: Path, path: Path | None, sets: tuple[str, ...], device: str) -> None:
    from pipeline import sort_digits

    loaded = load(path, sets, files=True)
    config = sort_digits.with_paths(loaded.config)
    from pipeline.trainer import setup
    from pipeline.trainer.recording import replay as replaying

    if sort_digits.is_used(loaded.config):
        setup.prepare(sort_digits.directory_of(config.daemon.state_dir))
    try:
        with placing(loaded):
            replaying.train(config, folder, device, write=click.echo)
    except OSError as error:
        raise RlhfdError(f"the recorded rows cannot be trained on: {error}") from error
    except FieldError as error:
        has_kl = "base_action_log_probs" in str(error)
        advice = "; rows of a run without a KL have no log-probs of a reference: trainer.kl_coef = 0" if has_kl else ""
        raise RlhfdError(f"the recorded rows do not fit this configuration: {error}{advice}") from error


def _folder_of(path: Path | None, runtime_dir: Path | None, run: str) -> Path:
    return Path(run) if "/" in run else run_folder_of(runtime_dir, path, run)


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    versions = sorted({origin["version"] for batch in entry["batches"] for origin in batch["origins"]})
    sampled = f"{versions[0]}" if len(versions) == 1 else f"{versions[0]}-{versions[-1]}" if versions else ""
    values = (sampled, f"{entry['bytes']:,}" if entry["bytes"] else "", entry["experiences"], entry["weights"],
              entry["replayed_from"])  # fmt: skip
    return (f"{entry['step']:,}", f"{entry['rows']:,}", *(value or "–" for value in values))
