"""docs/coming-from.md: what differs, how a file is converted, and a table of the options of each trainer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from pipeline.config.advice import SECTIONS, toml
from pipeline.config.foreign.lookup import TRAINERS
from pipeline.config.foreign.option import Option, Trainer
from pipeline.config.own_model import SHOWN

_INTRODUCTION: Final = """\
# Coming from TRL, verl or OpenRLHF

<!-- Made by `python -m docs.made`; checked by tests/project/test_made_pages.py. -->

A configuration is one file of TOML ([configuration.md](configuration.md)); reward functions of TRL and verl are called as they are ([rewards.md](rewards.md#your-own-functions)), and
[losses.md](losses.md#differs-from-trl-verl-openrlhf) has the differences of the formulas. The tables below name the key of each option.

## What differs in the whole

- Rollout and training are processes of their own and run at the same time: by default a row may be one policy version old (`buffer.max_staleness = 1`). With 0 they take turns, as they do
  in the others.
- A batch is counted in rows, which are responses: `buffer.sample_batch_size` is those of a step of one rank. verl and OpenRLHF count prompts in places.
- A step is one batch with all its updates (`trainer.epochs` x `trainer.mini_batches`); steps, versions, checkpoints and evaluations count it once.
- Models and data are folders and files of this machine. Nothing is downloaded.
- GPUs are given to roles; with `rollout.sleep = true` engine and trainer share one in turns. `rlhfd plan` shows which fits where.
- `rollout.algorithm = "dapo"`, `"dr_grpo"`, `"rloo"`, `"gspo"`, `"cispo"` or `"reinforce++"` sets the defaults of that algorithm ([losses.md](losses.md#presets-rolloutalgorithm)); a conversion writes the single keys.
- A run has no end unless `trainer.max_steps` or `trainer.max_epochs` is set. It can be stopped and started again at any time.
"""

_CONVERSIONS: Final = """\
## A conversion

`rlhfd init FOLDER --from trl FILE` reads the options of a run and writes `FOLDER/grpo.toml`, or `ppo.toml`. FILE is JSON or YAML, such as the configuration of `trl grpo --config` or Hydra's `config.yaml` and `overrides.yaml`, a
shell script, such as those of verl and OpenRLHF, or the Python program of TRL that calls `GRPOTrainer`; nothing of it is executed. A comment names the option of each key, and the difference in meaning. A default of the other trainer is written
where the run would be another one without it. The options that could not be carried are printed, each with the reason, and stand at the end of the file. `rlhfd config check` then names
the model and the data that are not there yet.

`examples/coming-from/` has a run of each trainer as one writes it there, with its reward function, for a tiny model, `models/my-model`, and data that CI puts beside them. CI runs these commands there:

```sh
rlhfd init trl --from trl trl.yaml
rlhfd start --config trl/grpo.toml --set rollout.max_prompt_length=12
rlhfd init verl --from verl verl.sh
rlhfd start --config verl/grpo.toml
rlhfd init openrlhf --from openrlhf openrlhf.sh
rlhfd start --config openrlhf/ppo.toml --set trainer.max_steps=3 --set 'rewards=["order:score"]'
```

- **TRL**, GRPO with two reward functions and weights. A generation is 16 x 4 rows, which TRL trains in 4 / 2 updates: a step here, so that 4 updates are `trainer.max_steps = 2`. TRL bounds no prompt, and the
  1,024 tokens in its place are more than the tiny model has positions for. CI gives the rows of a step to TRL's own `GRPOTrainer`, made of the same file: rewards and advantages of each row are equal within 1e-6.
- **verl**, GRPO without the deviation and with the loss of Dr. GRPO. 8 prompts of 4 responses are 32 rows, and `ppo_mini_batch_size = 4`, in prompts, is `trainer.mini_batches = 2`. verl's dual clip at 3 and its weight decay
  are written, since they are its defaults.
- **OpenRLHF**, PPO with a critic and the KL in the reward. An OpenRLHF run ends with its prompts (`trainer.max_epochs`), here a number of steps ends it before. Its reward function has another signature:
  `order.py` has the function of rlhfd beside it.
"""

_TABLE: Final = """\
*carried*: the key takes the place of the option; *needless*: rlhfd does without it; *missing*: it has no counterpart. A default of rlhfd is that of a model of one's own; "-" is none, or one that
follows from other keys. A name in parentheses is an earlier one of the option. `*` stands for any further names.
"""


def page() -> str:
    """Return docs/coming-from.md."""
    lines = [_INTRODUCTION, _CONVERSIONS, *(line for trainer in TRAINERS for line in _table(trainer))]
    return "\n".join(lines)


def _table(trainer: Trainer) -> Iterator[str]:
    yield f"## {trainer.name}\n"
    yield f"The options of {trainer.name} {trainer.release}. {_TABLE}"
    for key, value, reason in trainer.always:
        yield f"- A conversion sets `{key} = {toml(value)}`: {reason}."
    yield ""
    yield f"| {trainer.name} | key | default of {trainer.name} | default of rlhfd | difference, or reason |"
    yield "|---|---|---|---|---|"
    for option in trainer.options:
        yield _row(option)
    yield ""


def _row(option: Option) -> str:
    names = ", ".join(f"`{name}`" for name in option.names)
    names += f" ({', '.join(f'`{name}`' for name in option.aliases)})" if option.aliases else ""
    keys = ", ".join(f"`{key}`" for key in option.key)
    if option.kind != "carried":
        return f"| {names} | *{option.kind}*{f', near it {keys}' if keys else ''} | | | {_cell(option.remark)} |"
    default = "-" if option.default is None else f"`{toml(option.default)}`"
    return f"| {names} | {keys} | {default} | {_own(option.key[0])} | {_cell(option.remark)} |"


def _own(key: str) -> str:
    """Return the default of a key for a model of one's own."""
    if key == "model.actor":
        return "-"
    if key in SHOWN:
        return _cell(SHOWN[key]).partition(":")[0]
    section, _, name = key.partition(".")
    value: Any = getattr(SECTIONS[section], name) if name else None
    return "-" if value is None else f"`{_cell(toml(value))}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
