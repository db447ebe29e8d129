"""The keys that follow from the plan of a run: sharding, vLLM's cache, passes, place of the training state.

    trainer.sharding                  full where a whole model does not fit beside each rank, none elsewhere
    rollout.cache_bytes               on a card with a rank, as much as vLLM's rows can use and a step leaves
    trainer.activation_checkpointing  on a card, where a step does not fit without it
    trainer.micro_batch_tokens        on a card, as many as fit
    rollout.logits_forward_tokens     on a card, as many as fit beside that
    trainer.keep_state                memory where /dev/shm has room for it, else disk

Each choice follows from the configuration, the headers of the models' files and the size of the machine, so that each
start on one machine, and each restart of a role, chooses alike. Checkpoints are the same in all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from pipeline import sort_digits
from pipeline.config.conflicts import conflicts
from pipeline.config.load import get
from pipeline.config.model_files import has_images
from pipeline.config.plan import VLLM_ROWS, Models, cache_bytes, models_of, needs
from pipeline.config.schema import Config
from pipeline.config.types import BUILTIN_PREFIX
from pipeline.errors import ConfigError
from pipeline.runtime.lock import shm_directory
from pipeline.supervisor.capacity.budgets import Budget, budgets_of, remedies, size
from pipeline.supervisor.capacity.machine import Machine, described

_LOG_PROB_TOKENS = (65_536, 32_768)
"""Tokens of a log-prob pass; 16,384 where none of these fits."""
_PASS_TOKENS = (65_536, 32_768, 16_384, 8_192)
"""Tokens of a training pass, those first that keep a card busiest: on an H200 a pass of 16,384 takes 0.07 s of
arithmetic and .25 s of launches, and 65,536 were 8 % faster in all."""
_RESERVE, _SHARDED_RESERVE = 0.1, 0.25
"""Share of a card that a choice leaves free: the plan knows no fragments, and other processes take some. A pass over
shards that runs out of memory ends the run, since a rank cannot repeat it alone; others are halved."""

_FORMS: Final[dict[str, Callable[[Any], str]]] = {
    "trainer.sharding": str,
    "rollout.cache_bytes": size,
    "trainer.micro_batch_tokens": "{:,}".format,
    "trainer.activation_checkpointing": lambda value: str(value).lower(),
    "rollout.logits_forward_tokens": "{:,}".format,
    "trainer.keep_state": str,
}
"""The keys that a user may leave to the plan, and how their values are written."""


class Choices(NamedTuple):
    """The configuration in force, and the reason of each value that the plan chose or could not choose, by key."""

    config: Config
    reasons: dict[str, str]

    @property
    def shown(self) -> dict[str, str]:
        """The values in force with their reasons, by key."""
        values = {key: get(self.config, key) for key in _FORMS if key in self.reasons}
        return {
            key: f"{'left out' if value is None else _FORMS[key](value)} here: {self.reasons[key]}"
            for key, value in values.items()
        }


def decided(config: Config, environ: Mapping[str, str]) -> Choices:
    """Return the configuration with the plan's choices for this machine and its environment.

    Raises:
        ConfigError: If there is no plan, and it would have to size the cache of an engine that sleeps.
    """
    try:
        machine = described(environ)
        if config.trainer.keep_state == "auto" and _holds_state(config):
            found = decided(config.changed("trainer", keep_state="memory"), environ)
            return Choices(found.config, {**found.reasons, "trainer.keep_state": "a killed instance has left it there"})
        return choice(config, _models(config), machine._replace(shm_bytes=_shm_room(config, machine)))
    except ConfigError as error:
        return _without_plan(config, error)


def choice(config: Config, models: Models, machine: Machine) -> Choices:
    """Return the configuration with the plan's choices for a machine.

    Args:
        config: The configuration.
        models: The sizes of its models.
        machine: The machine.

    Raises:
        ConfigError: If the machine has fewer GPUs than ranks.
    """
    reasons: dict[str, str] = {}
    for keys, choose in (
        (("trainer.sharding",), _sharding),
        (("rollout.cache_bytes",), _cache),
        (("trainer.activation_checkpointing", "trainer.micro_batch_tokens"), _passes),
        (("rollout.logits_forward_tokens",), _log_prob_passes),
        (("trainer.keep_state",), _state),
    ):
        config, reason = choose(config, models, machine)
        if reason is not None:
            reasons |= dict.fromkeys(keys, reason)
    return Choices(config, reasons)


def misfits(config: Config, environ: Mapping[str, str]) -> list[str]:
    """Return what does not fit on this machine, if it has GPUs, and the keys to change: a line each, usually none."""
    try:
        machine = described(environ)
        if not machine.gpus or str(config.model.actor).startswith(BUILTIN_PREFIX):
            return []
        models = models_of(config)
        config = choice(config, models, machine).config
        lacking = [budget for budget in budgets_of(config, models, machine) if budget.lacks_bytes]
    except ConfigError as error:
        return [f"no plan: {error}"]
    lines = [f"{budget.name} takes {size(budget.total_bytes)} of {size(budget.capacity_bytes)}" for budget in lacking]
    return [*lines, *(f"to fit: {line}" for line in remedies(config, models, machine))] if lacking else []


def _without_plan(config: Config, error: ConfigError) -> Choices:
    rollout = config.rollout
    if rollout.sleep and rollout.engine == "vllm" and rollout.cache_bytes is None:
        raise ConfigError(
            f"rollout.cache_bytes: must be set with rollout.sleep, no plan chooses it: {error}"
        ) from error
    sharding = "none" if config.trainer.sharding == "auto" else config.trainer.sharding
    keep_state = "memory" if config.trainer.keep_state == "auto" else config.trainer.keep_state
    reason = _settled(config) or f"no plan: {error}"
    return Choices(config.changed("trainer", sharding=sharding, keep_state=keep_state), {"trainer.sharding": reason})


def _models(config: Config) -> Models:
    """Return the sizes of a run's models; those of the embedded one, which its first start makes, are known."""
    folder = sort_digits.model_directory(sort_digits.directory_of(config.daemon.state_dir))
    return models_of(sort_digits.with_paths(config), {str(folder): sort_digits.sizes()})


def _sharding(config: Config, models: Models, machine: Machine) -> tuple[Config, str | None]:
    """Return "none" or "full" in place of "auto"."""
    if (reason := _settled(config)) is not None:
        return config.changed("trainer", sharding="none") if config.trainer.sharding == "auto" else config, reason
    whole, sharded = config.changed("trainer", sharding="none"), config.changed("trainer", sharding="full")
    budget = max(_of_ranks(whole, models, machine), key=lambda budget: budget.total_bytes - budget.capacity_bytes)
    needed = f"with whole ranks {budget.name} takes {size(budget.total_bytes)} of {size(budget.capacity_bytes)}"
    if not budget.lacks_bytes:
        return whole, needed
    if has_images(Path(config.model.actor)):
        return whole, f"{needed}, and vision-language models are not sharded"
    if found := conflicts(sharded):
        return whole, f"{needed}, and {found[0].keys[0]} {found[0].message}"
    before, after = (sum(budget.lacks_bytes for budget in budgets_of(one, models, machine)) for one in (whole, sharded))
    return (sharded, needed) if after < before else (whole, f"{needed}, and shards need no less")


def _cache(config: Config, models: Models, machine: Machine) -> tuple[Config, str | None]:
    """Return the cache of a vLLM that shares its card with a rank.

    It holds the rows that vLLM runs at a time, at their greatest length: more is of no use to a ticket. Where no step
    fits beside that, it is halved until one does: fewer rows run at a time. An engine that sleeps has a cache of a
    fixed size in any case: what is free at its start may be the trainer's when it wakes.
    """
    rollout = config.rollout
    if config.trainer.kind == "external" or not _shares_with_growing_cache(config, models, machine):
        return config, None
    most = rollout.inference_batch_size or VLLM_ROWS
    halves = [most >> halvings for halvings in range(most.bit_length())]
    # A cache that takes what is free would leave a step nothing: rather the whole card, without a reserve.
    for share, rows in itertools.product((_share(config), 1.0), halves):
        sized = config.changed("rollout", cache_bytes=cache_bytes(config, models, rows))
        stepping, _ = _passes(sized, models, machine)
        if _fit(_cards_of_ranks(stepping, models, machine), share):
            return sized, f"{rows:,} rows of {config.lengths.row:,} tokens, beside a step on the same card"
    reason = "no cache leaves room for a step on the same card"
    return (sized, f"one row, {reason}") if rollout.sleep else (config, reason)


def _passes(config: Config, models: Models, machine: Machine) -> tuple[Config, str | None]:
    """Return the tokens of a training pass and whether activations are checkpointed, on cards.

    A configured value stays. Activations are kept where a pass of the fewest tokens fits with them.
    """
    trainer = config.trainer
    has_size = trainer.micro_batch_size is not None or trainer.micro_batch_tokens is not None
    if not machine.gpus or trainer.kind == "external" or (has_size and trainer.activation_checkpointing is not None):
        return config, None
    share = _share(config)
    if _shares_with_growing_cache(config, models, machine):
        return config, "the cache of vllm takes what is free of the same card: rollout.cache_bytes bounds it"
    for keeps in (True, False):
        if trainer.activation_checkpointing is keeps:
            continue
        for tokens in (None,) if has_size else _PASS_TOKENS:
            # Left out, a model without layers to checkpoint is no error.
            checkpointing = trainer.activation_checkpointing if not keeps else False
            sized = config.changed("trainer", activation_checkpointing=checkpointing)
            sized = sized if tokens is None else sized.changed("trainer", micro_batch_tokens=tokens)
            cards = _cards_of_ranks(sized, models, machine)
            if _fit(cards, share):
                return sized, _fullest(cards)
    reason = f"no pass leaves {1.0 - share:.0%} of the card free"
    if not has_size and not _fit(_cards_of_ranks(config, models, machine), 1.0):
        smallest = config.changed("trainer", micro_batch_tokens=_PASS_TOKENS[-1])
        if _fit(_cards_of_ranks(smallest, models, machine), 1.0):
            return smallest, reason
    return config, reason


def _log_prob_passes(config: Config, models: Models, machine: Machine) -> tuple[Config, str | None]:
    """Return the tokens of the workers' log-prob passes, on cards that have room beside all else."""
    rollout = config.rollout
    bounds = rollout.logits_forward_batch_size, rollout.inference_batch_size, rollout.logits_forward_tokens
    if not machine.gpus or any(bound is not None for bound in bounds) or not _cards_of_passes(config, models, machine):
        return config, None
    if rollout.engine == "vllm" and rollout.cache_bytes is None:
        return config, "the cache of vllm takes what is free of the same card: rollout.cache_bytes bounds it"
    share = _share(config)
    for tokens in _LOG_PROB_TOKENS:
        sized = config.changed("rollout", logits_forward_tokens=tokens)
        cards = _cards_of_passes(sized, models, machine)
        if _fit(cards, share):
            return sized, _fullest(cards)
    return config, f"no larger pass leaves {1.0 - share:.0%} of the card free"


def _share(config: Config) -> float:
    """Return the share of a card that a choice may fill."""
    return 1.0 - (_SHARDED_RESERVE if config.shards_trainer else _RESERVE)


def _fit(cards: list[Budget], share: float) -> bool:
    return all(card.total_bytes <= share * card.capacity_bytes for card in cards)


def _fullest(cards: list[Budget]) -> str:
    """Return the need and the room of the card that needs most."""
    fullest = max(cards, key=lambda card: card.total_bytes)
    return f"{fullest.name} takes {size(fullest.total_bytes)} of {size(fullest.capacity_bytes)}"


def _cards_of_passes(config: Config, models: Models, machine: Machine) -> list[Budget]:
    """Return the cards on which workers run models over rows."""
    cards = [budget for budget in budgets_of(config, models, machine) if budget.is_card]
    return [card for card in cards if any(term.endswith(": passes over rows") for term in card.terms)]


def _shares_with_growing_cache(config: Config, models: Models, machine: Machine) -> bool:
    """Return whether ranks share their cards with an engine whose cache is the rest of the card."""
    grows = config.rollout.engine == "vllm" and config.rollout.cache_bytes is None
    cards = _cards_of_ranks(config, models, machine)
    return grows and any(term.startswith(("rollout ", "shard ")) for card in cards for term in card.terms)


def _state(config: Config, models: Models, machine: Machine) -> tuple[Config, str | None]:
    """Return "memory" or "disk" in place of "auto" as the place of the training state."""
    if config.trainer.keep_state != "auto":
        return config, None
    kept = config.changed("trainer", keep_state="memory")
    if config.trainer.keep_state_every > 1:
        return kept, "trainer.keep_state_every is set"
    # Without arena and ledger: where these alone leave no room, a publish finds out, and keeps no state in memory.
    shared = needs(kept, models, on_cards=machine.gpus > 0).shared
    needed = shared["weights"] + shared["training state"]
    reason = f"/dev/shm has {size(machine.shm_bytes)}, weights and training state take {size(needed)}"
    return (kept if needed <= machine.shm_bytes else config.changed("trainer", keep_state="disk")), reason


def _holds_state(config: Config) -> bool:
    """Return whether a killed instance has left its training state in /dev/shm, however little room there is now."""
    return (shm_directory(config.daemon.runtime_dir) / "training").exists()


def _shm_room(config: Config, machine: Machine) -> int:
    """Return the room in /dev/shm with that of this instance's own files, which a killed instance has left."""
    folder = shm_directory(config.daemon.runtime_dir)
    try:
        own = sum(path.stat().st_blocks * 512 for path in folder.iterdir() if path.is_file())
    except OSError:
        own = 0
    return min(machine.shm_bytes + own, machine.ram_bytes)


def _settled(config: Config) -> str | None:
    """Return the reason of a sharding that no plan decides; None if the plan decides."""
    if config.trainer.sharding != "auto":
        return "configured"
    if config.trainer.kind == "external":
        return "an external trainer shards its own models"
    if config.trainer.world_size == 1:
        return "one rank"
    if config.trainer.nodes > 1:
        return "ranks of several machines hold shards if it is full"
    if str(config.model.actor).startswith(BUILTIN_PREFIX):
        return "the embedded model fits"
    return None


def _of_ranks(config: Config, models: Models, machine: Machine) -> list[Budget]:
    return [budget for budget in budgets_of(config, models, machine) if budget.holds_ranks]


def _cards_of_ranks(config: Config, models: Models, machine: Machine) -> list[Budget]:
    return [budget for budget in _of_ranks(config, models, machine) if budget.is_card]
