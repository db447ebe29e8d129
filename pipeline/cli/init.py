"""`rlhfd init`: a folder with a configuration, prompts and a reward function that starts as it is, or a conversion."""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import click

from pipeline.errors import RlhfdError

_PROMPTS = 64
_CONFIG = """\
# A run of GRPO: rlhfd start --config grpo.toml
# `rlhfd config show` lists every key with its value. Relative paths and the reward function are looked up here.

[daemon]
runtime_dir = "run"
state_dir = "state"             # a folder a run: checkpoints, metrics.jsonl; the log

[model]
actor = {actor}

[prompts]
path = "prompts.jsonl"          # a line: {{"prompt": "7302>", "answer": "0237"}}

[rollout]
num_generations = 8             # responses to each prompt
max_prompt_length = {prompt:<11} # tokens; a longer prompt is set aside
max_new_tokens = {response:<14} # tokens of a response

[[rewards]]
name = "my_rewards:score"

[buffer]
sample_batch_size = 64          # responses in an optimizer step

[trainer]
learning_rate = {learning_rate}
save_every = 50                 # a checkpoint each 50 steps
"""
_BUILTIN = '"builtin:sort-digits"   # a small model, made at the first start; or the folder of a causal LM'
_REWARD = '''\
"""The reward: called once for each response, in a process of its own. `rlhfd try-reward` calls it on given rows."""


def score(input_ids, attention_mask, *, gt_answer, response_start, response_end, tokenizer):
    """Return 1 for the answer of the prompt, and up to 0.5 for characters that stand in their right places.

    Args:
        input_ids: Tokens of prompt and response, a tensor of one dimension.
        attention_mask: 1 where a token is real.
        gt_answer: "answer" of the prompt's line; None if it has none.
        response_start: Index of the first token of the response.
        response_end: Index after its last token.
        tokenizer: The actor's tokenizer.
    """
    response = tokenizer.decode(input_ids[response_start:response_end], skip_special_tokens=True).strip()
    if response == gt_answer:
        return 1.0
    right = sum(mine == wanted for mine, wanted in zip(response, gt_answer))
    return 0.5 * right / max(len(response), len(gt_answer))
'''


def contents(model: Path | None) -> dict[str, str]:
    """Return the text of each file by its name.

    Args:
        model: Folder of the model to train; None for the embedded one.
    """
    config = _CONFIG.format(
        actor=_BUILTIN if model is None else json.dumps(str(model.absolute()), ensure_ascii=False),
        prompt=12 if model is None else 128,
        response=12 if model is None else 128,
        learning_rate="4e-4" if model is None else "1e-6",
    )
    rng = random.Random(0)
    prompts = []
    for _ in range(_PROMPTS):
        digits = "".join(rng.choices("0123456789", k=rng.randint(3, 6)))
        prompts.append(json.dumps({"prompt": f"{digits}>", "answer": "".join(sorted(digits))}))
    return {"grpo.toml": config, "prompts.jsonl": "\n".join(prompts) + "\n", "my_rewards.py": _REWARD}


@click.command(short_help="Write a configuration to start from, of one's own or of TRL, verl or OpenRLHF.")
@click.argument("folder", default=".", type=click.Path(path_type=Path, file_okay=False), metavar="[FOLDER]")
@click.option(
    "--model",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="A causal LM and its tokenizer, as save_pretrained wrote them; else the embedded model, or that of FILE.",
)
@click.option(
    "--from",
    "source",
    type=(click.Choice(["trl", "verl", "openrlhf"]), click.Path(path_type=Path)),
    metavar="TRAINER FILE",
    help="Convert a run of trl, verl or openrlhf: options in JSON or YAML, a shell script, or the program of TRL.",
)
def init(folder: Path, model: Path | None, source: tuple[str, Path] | None) -> None:
    """Write grpo.toml, prompts.jsonl and my_rewards.py into FOLDER, which is made if it is missing.

    The run starts as it is; change the files one by one to your own. Nothing is overwritten.

    With --from the configuration alone is written, as grpo.toml or ppo.toml, from FILE: a comment names the option of
    each key, and the difference in meaning. The options that could not be carried are shown, and stand at its end.
    docs/coming-from.md has all options.

    \b
    Examples:
      rlhfd init my-run
      rlhfd init my-run --model models/my-model
      rlhfd init my-run --from trl grpo_config.yaml
      rlhfd init my-run --from verl run_qwen.sh
    """
    if source is not None:
        _convert(*source, folder, model)
        return
    write_new(folder, contents(model))
    click.echo("Next:")
    if folder.resolve() != Path.cwd():
        click.echo(f"  cd {shlex.quote(str(folder))}")
    program = shlex.quote(_program())
    click.echo(
        f"  {program} config check --config grpo.toml\n"
        f"  {program} try-reward --config grpo.toml --response 0237\n"
        f"  {program} start --config grpo.toml"
    )


def _convert(word: str, path: Path, folder: Path, model: Path | None) -> None:
    """Write the configuration of a run of another trainer, and tell what could not be carried."""
    from pipeline.config import load as config_load
    from pipeline.config.foreign import conversion, files
    from pipeline.config.foreign.lookup import PAGE, TRAINERS
    from pipeline.supervisor.placement import visible_gpus

    trainer = next(each for each in TRAINERS if each.word == word)
    options = files.read(path, trainer)
    done = conversion.convert(trainer, options, {} if model is None else {"model.actor": str(model.absolute())})
    name = f"{done.algorithm}.toml"
    write_new(folder, {name: conversion.render(done, path.name, folder)})
    for line in done.lost:
        click.echo(f"not carried: {line}", err=True)
    if done.lost:
        click.echo(f"{PAGE} has all options of {trainer.name}", err=True)
    try:
        config_load.load(folder / name, (), {}, on_cards=bool(visible_gpus(os.environ)))
    except config_load.ConfigErrors as found:
        for error in found.errors:
            click.echo(f"to be mended: {error}", err=True)
    # Paths of the file are from the current folder, and so are its modules.
    program, file = shlex.quote(_program()), shlex.quote(str(folder / name))
    click.echo(f"Next:\n  {program} config check --config {file}\n  {program} start --config {file}")


def write_new(folder: Path, files: Mapping[str, str]) -> None:
    """Write new files into a folder, which is made if it is missing; none if one of them is there already."""
    for name, text in files.items():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RlhfdError(f"nothing was written, {name} cannot name a path that is not UTF-8") from error
    if present := [str(folder / name) for name in files if (folder / name).exists()]:
        raise RlhfdError(f"nothing was written, there is already {', '.join(present)}")
    path, made = folder, list[Path]()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            path = folder / name
            # "x": a file that another process makes at this moment is not overwritten, either.
            with path.open("x", encoding="utf-8") as file:
                made.append(path)
                file.write(text)
    except OSError as error:
        # As on a full disk: files that stay would refuse the next try.
        for each in made:
            each.unlink(missing_ok=True)
        raise RlhfdError(f"nothing was written, {path}: {error.strerror}") from error
    for each in made:
        click.echo(f"wrote {each}")


def _program() -> str:
    """Return the word by which a shell in any folder finds this program: its name, if that is this one on the PATH."""
    own = Path(sys.executable).parent / "rlhfd"
    found = shutil.which("rlhfd")
    if found is not None and own.exists() and Path(found).samefile(own):
        return "rlhfd"
    checkout = Path(__file__).resolve().parents[2] / "bin/rlhfd"
    return str(checkout if checkout.exists() else own)
