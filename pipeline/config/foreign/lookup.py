"""The answer to an unknown key or section that is one of another trainer: its key here, or docs/coming-from.md."""

from __future__ import annotations

import functools
import re
from typing import Final

from pipeline.config.foreign.openrlhf import OPENRLHF
from pipeline.config.foreign.option import Option, Trainer
from pipeline.config.foreign.trl import TRL
from pipeline.config.foreign.verl import VERL

PAGE: Final = "docs/coming-from.md"
TRAINERS: Final = (TRL, VERL, OPENRLHF)

WORDS: Final = {
    "lr": "trainer.learning_rate",
    "kl_beta": "trainer.kl_coef",
    "num_ppo_epochs": "trainer.epochs",
    "num_mini_batches": "trainer.mini_batches",
    "cliprange": "trainer.clip_range",
    "num_train_steps": "trainer.max_steps",
    "total_steps": "trainer.max_steps",
    "max_token_len_per_gpu": "trainer.micro_batch_tokens",
    "lambda": "rollout.lam",
    "gae_lambda": "rollout.lam",
    "group_size": "rollout.num_generations",
    "num_return_sequences": "rollout.num_generations",
    "max_tokens": "rollout.max_new_tokens",
    "max_seq_len": "rollout.max_length",
    "num_workers": "rollout.workers",
    "gpus": "rollout.devices",
    "ref_model": "model.reference",
    "reward_model": "model.reward",
    "precision": "model.dtype",
    "dataset": "prompts.path",
    "checkpoint_dir": "daemon.state_dir",
    "log_file": "daemon.log_format",
    "nproc_per_node": "trainer.world_size",
    "nnodes": "trainer.nodes",
    "staleness": "buffer.max_staleness",
    "buffer_size": "buffer.limit",
    "epsilon_low": "trainer.clip_low",
    "dataset_split": "prompts.split",
    "dynamic_sampling": "rollout.max_refill is the number of further prompts for groups that are left out",
    "mini_batch_size": "trainer.mini_batches is the number of updates of a step, not the rows of one",
    "num_epochs": "trainer.epochs is the passes over the rows of a step, trainer.max_epochs those over the prompts",
    "missing_eos_penalty": "trainer.mask_cut_responses leaves cut responses out; a reward of your own can punish them",
    "response_length": "rollout.max_new_tokens",
    "vf_coef": "the critic has an optimizer of its own, with trainer.critic_learning_rate",
    "whiten_rewards": "trainer.whiten_advantages whitens advantages, rewards are as they are",
    "total_episodes": "trainer.max_steps is the number of steps, each of buffer.sample_batch_size rows",
}
"""Words of the field that are no option of these trainers, or have one meaning in all: a key, or an answer."""

_TOO_GENERAL: Final = {
    "alpha", "dropout", "enable", "key", "len", "log", "mode", "model", "name", "optim", "org", "path", "rank",
    "ref", "split", "steps", "target", "type", "group", "debug", "actor", "rollout", "reward", "project",
}  # fmt: skip


def answer(name: str) -> str:
    """Return the answer to a key that is an option of TRL, verl or OpenRLHF; empty for any other one.

    Args:
        name: The key in lower case, without a section or with those of the trainer.
    """
    if meant := WORDS.get(name):
        return meant if " " in meant else f"did you mean {meant}?"
    # Of each trainer the first option that is carried.
    found = {trainer.word: (trainer, option, full) for trainer, option, full in reversed(_index().get(name, ()))}
    found |= {one[0].word: one for one in reversed(_index().get(name, ())) if one[1].kind == "carried"}
    if not found:
        return _answer_to_table(name)
    matches = [found[trainer.word] for trainer in TRAINERS if trainer.word in found]
    keys = {option.key for _, option, _ in matches}
    is_one = len(keys) == 1 and all(option.kind == "carried" for _, option, _ in matches)
    if is_one and not any(option.remark or option.key[1:] for _, option, _ in matches):
        return f"did you mean {matches[0][1].key[0]}?"
    if is_one and len(matches) > 1:
        names = " and ".join(f"{trainer.name}'s {full}" for trainer, _, full in matches)
        return f"{names} are {' and '.join(*keys)} here, with differences ({PAGE})"
    said: dict[str, list[str]] = {}
    for trainer, option, full in matches:
        said.setdefault(_said(option), []).append(f"{trainer.name}'s {full}")
    answers = (f"{' and '.join(names)} {'are' if names[1:] else 'is'} {text}" for text, names in said.items())
    return f"{'; '.join(answers)} ({PAGE})"


def key_of(name: str) -> str:
    """Return the key that a word of the field, or an option of another trainer, is here as it is; empty if it is none.

    Args:
        name: As for `answer`.
    """
    meant = re.fullmatch(r"did you mean ([a-z_.]+)\?", answer(name))
    return meant[1] if meant else ""


def _answer_to_table(name: str) -> str:
    """Return the answer to a table within a section that is one of verl or OpenRLHF; empty for any other one."""
    within = [
        (trainer, option) for trainer in TRAINERS for option in trainer.options
        if any(name in full.lower().split(".")[1:-1] for full in option.names)
    ]  # fmt: skip
    if name in _TOO_GENERAL or not within:
        return ""
    carried = [(trainer, option) for trainer, option in within if option.kind == "carried"]
    if len({option.key for _, option in carried}) == 1 and all(option.kind != "missing" for _, option in within):
        trainer, option = carried[0]
        return f"{trainer.name}'s {option.name} is {_said(option)} ({PAGE})"
    trainers = dict.fromkeys(trainer.name for trainer, _ in within)
    return f"a table of {' and '.join(trainers)}: {PAGE} has the key of each of its options"


def answer_to_section(name: str) -> str:
    """Return the answer to a section that is one of verl or OpenRLHF; empty for any other one."""
    trainers = [trainer for trainer in TRAINERS if name in trainer.sections]
    if not trainers:
        return ""
    names, words = (" or ".join(one) for one in zip(*((each.name, each.word) for each in trainers), strict=True))
    return f"a section of {names}: `rlhfd init --from {words} FILE` converts a file, {PAGE} has their options"


def _said(option: Option) -> str:
    if option.kind != "carried":
        return f"{option.kind} here: {option.remark}"
    return f"{' and '.join(option.key)} here" + (f": {option.remark}" if option.remark else "")


@functools.cache
def _index() -> dict[str, tuple[tuple[Trainer, Option, str], ...]]:
    """Return the options by each name that a key may have: the whole one, and its last part."""
    found: dict[str, list[tuple[Trainer, Option, str]]] = {}
    for trainer in TRAINERS:
        seen = set[tuple[str, tuple[str, ...]]]()
        for option in trainer.options:
            for full in (*option.names, *option.aliases):
                parts = full.lower().split(".")
                ends = {full.lower(), parts[-1]} if "*" not in parts[-1] else {".".join(parts[:-1]), parts[-2]}
                for end in sorted(ends - (_TOO_GENERAL if parts[1:] else set())):
                    if "*" not in end and (end, option.names) not in seen:
                        seen.add((end, option.names))
                        found.setdefault(end, []).append((trainer, option, full.removesuffix(".*")))
    return {name: tuple(options) for name, options in found.items()}
