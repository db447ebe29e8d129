"""The memory of a run, on each card, in /dev/shm and on the host: room, need, and the keys that lower the need."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pipeline.config.advice import toml
from pipeline.config.conflicts import conflicts
from pipeline.config.model_files import has_images
from pipeline.config.plan import DAEMON_BYTES, ENGINE_TERMS, Models, Terms, card_bytes, needs, process_bytes
from pipeline.config.schema import Config
from pipeline.supervisor.capacity.machine import SHM, Machine
from pipeline.supervisor.placement import assign

_REMEDIES = (
    ("rollout.sleep", True),
    ("trainer.activation_checkpointing", True),
    ("trainer.sharding", "full"),
    ("model.reference_device", "trainer"),
    ("model.reference_device", "worker"),
    ("model.reference_device", "host"),
    ("trainer.micro_batch_size", 1),
    ("trainer.micro_batch_tokens", 1),
    ("rollout.inference_batch_size", 8),
    ("rollout.log_probs", "trainer"),
    ("rollout.log_probs", "engine"),
    ("trainer.keep_state", "disk"),
    ("model.dtype", "bfloat16"),
    ("model.lora_rank", 32),
)
"""Changes that lower the memory, those first that change training least."""

_OF_A_STEP = ("gradients", "activations of a micro-batch", "logits", "gathered layers and root")
"""Terms that are free of a rank that has stepped."""

STEP_PHASE, AWAKE_PHASE = "while the trainer steps", "while the engine is awake"
"""The phases of a card with `rollout.sleep`."""


_CARD = "GPU of"


class Budget(NamedTuple):
    """A memory or disk: its room and the need of a run, in bytes."""

    name: str
    terms: Terms
    capacity_bytes: int

    @property
    def total_bytes(self) -> int:
        """Sum of the terms."""
        return sum(self.terms.values())

    @property
    def is_card(self) -> bool:
        """Whether it is the memory of a GPU."""
        return self.name.startswith(_CARD)

    @property
    def holds_ranks(self) -> bool:
        """Whether a trainer rank needs some of it."""
        return any(term.startswith("trainer ") for term in self.terms)

    @property
    def lacks_bytes(self) -> int:
        """Bytes that are missing; 0 if the run fits."""
        return max(self.total_bytes - self.capacity_bytes, 0)


def budgets_of(config: Config, models: Models, machine: Machine) -> list[Budget]:
    """Return the budget of each kind of card, of /dev/shm and of the host's memory.

    Raises:
        ConfigError: If there are fewer GPUs than ranks.
    """
    on_cards = machine.gpus > 0
    found = needs(config, models, on_cards=on_cards)
    cards: dict[str, list[str]] = {}
    roles = assign(config, [str(gpu) for gpu in range(machine.gpus)], [])
    for (role, index), where in roles.items():
        # Models of a cluster are on its other machines, all but those of this machine's ranks.
        if index < config.ranks_here if role == "trainer" else config.cluster.engine == "local":
            first, *further = where.gpu.split(",")
            cards.setdefault(first, []).append(f"{role} {index}")
            for gpu in further:
                cards.setdefault(gpu, []).append(f"shard of rollout {index}")
    budgets, seen = [], set()
    host = {"processes without their models": DAEMON_BYTES + sum(process_bytes(config, role) for role, _ in roles)}
    for gpu, names in cards.items():
        of_role = {"trainer": found.rank, "rollout": found.worker, "shard": found.shard}
        terms = {f"{name}: {term}": nbytes for name in names for term, nbytes in of_role[name.split()[0]].items()}
        host |= {f"{name}: {term}": nbytes for name in names if name.startswith("rollout")
                 for term, nbytes in found.worker_host.items()}  # fmt: skip
        if not gpu:
            host |= terms
            continue
        if config.rollout.sleep and config.model.lora_rank and config.rollout.engine == "vllm":
            # With adapters an engine that sleeps has its weights in host memory.
            host |= {f"{name}: weights of the engine": found.worker["weights of the engine"]
                     for name in names if name.startswith("rollout")}  # fmt: skip
        beside = {role: card_bytes(config, role, its) for role, its in of_role.items()}
        terms |= {f"{name}: {term}": nbytes for name in names for term, nbytes in beside[name.split()[0]].items()}
        # Models pass through host memory to a card, those of all processes at the same time.
        host |= {f"{name}: load": found.rank_load if name.startswith("trainer") else found.worker_load
                 for name in names if not name.startswith("shard")}  # fmt: skip
        kinds = tuple(name.split()[0] for name in names)
        if kinds not in seen:
            seen.add(kinds)
            alike = sum(tuple(name.split()[0] for name in others) == kinds for others in cards.values())
            phase, terms = _largest_phase(config, kinds, terms)
            budgets.append(Budget(f"{_CARD} {' and '.join(names)} ({alike} like it){phase}", terms, machine.gpu_bytes))
    budgets.append(Budget(SHM, found.shared, machine.shm_bytes))
    shared = {f"/dev/shm: {name}": nbytes for name, nbytes in found.shared.items()}
    return [*budgets, Budget("host memory", {**shared, **host}, machine.ram_bytes)]


def _largest_phase(config: Config, kinds: tuple[str, ...], terms: Terms) -> tuple[str, Terms]:
    """Return the terms of a card in the phase that needs more, and its name: a step, or rollouts (`rollout.sleep`)."""
    if not config.rollout.sleep or len(set(kinds)) < 2:
        return "", terms
    name, largest = max(phases(terms).items(), key=lambda phase: sum(phase[1].values()))
    return f", {name}", largest


def phases(terms: Terms) -> dict[str, Terms]:
    """Return the terms of a card that an engine and a rank share in turns (`rollout.sleep`), by phase.

    Args:
        terms: All terms of the card, each behind the name of its process.
    """
    return {
        phase: {term: nbytes for term, nbytes in terms.items() if term.partition(": ")[2] not in free}
        for phase, free in ((STEP_PHASE, ENGINE_TERMS), (AWAKE_PHASE, _OF_A_STEP))
    }


def remedies(config: Config, models: Models, machine: Machine) -> list[str]:
    """Return changes of keys that lower what does not fit: what makes it fit first, then each key's effect."""
    before = _lacking(config, models, machine)
    left, changed = before, config
    together: list[str] = []
    singles: list[tuple[bool, str]] = []
    for key, value in _REMEDIES:
        if (alone := _changed(config, key, value)) is None:
            continue
        setting = f"{key} = {toml(value)}"
        if (missing := _lacking(alone, models, machine)) < before:
            singles.append((missing > 0, f"{setting}: {_effect(missing)}"))
        more = _changed(changed, key, value)
        if left and more is not None and (missing := _lacking(more, models, machine)) < left:
            together, left, changed = [*together, setting], missing, more
    lines = [line for _, line in sorted(singles, key=lambda one: one[0])]
    if len(together) > 1 and not left:
        lines.insert(0, f"{' and '.join(together)}: fits")
    return lines or ["no change of a key lowers it: a smaller model, or more memory"]


def _lacking(config: Config, models: Models, machine: Machine) -> int:
    return sum(budget.lacks_bytes for budget in budgets_of(config, models, machine))


def _effect(missing: int) -> str:
    return f"{size(missing)} are still missing" if missing else "fits"


def _changed(config: Config, key: str, value: object) -> Config | None:
    """Return the configuration with one key changed; None if that is no change, or not allowed."""
    section, _, name = key.partition(".")
    part = getattr(config, section)
    cannot_shard = key == "trainer.sharding" and (
        config.trainer.world_size == 1 or has_images(Path(config.model.actor))
    )
    # Without a bound of tokens that of rows is the one to lower.
    has_no_tokens = key == "trainer.micro_batch_tokens" and part.micro_batch_tokens is None
    # An engine of one's own may be unable to.
    cannot_sleep = key == "rollout.sleep" and config.rollout.engine != "vllm"
    if getattr(part, name) == value or cannot_shard or has_no_tokens or cannot_sleep:
        return None
    changed = config.changed(section, **{name: value})
    return None if conflicts(changed) else changed


def size(nbytes: int) -> str:
    """Return a number of bytes as text."""
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 10**8 else f"{nbytes / 1e6:,.1f} MB"
