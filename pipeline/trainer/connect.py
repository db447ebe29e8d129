"""Connections of trainer ranks to a running daemon over ZeroMQ: `pipeline.connect`, and the built-in trainer's."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import time
from pathlib import Path

from pipeline.config.schema import Config
from pipeline.errors import ConfigError, UnreachableError
from pipeline.runtime.lock import find
from pipeline.runtime.role import reward_source
from pipeline.runtime.transport import BUFFER, Mailbox, Outbox, Traffic, trainer_name
from pipeline.runtime.workspace import Workspace
from pipeline.storage.arena import Arena
from pipeline.storage.files import try_lock
from pipeline.trainer.connection import Check, Connection
from pipeline.trainer.external_metrics import ExternalMetrics
from pipeline.trainer.prefetch import Gathering
from pipeline.trainer.publish_check import PublishCheck

_CONNECT_TIMEOUT_S = 30.0
_LOCK_TIMEOUT_S, _POLL_S = 0.5, 0.01

_locks: set[int] = set()
"""Descriptors of the ranks of this process. A lock is held while any copy of its descriptor is open: not by a child."""


def _after_fork() -> None:
    for descriptor in _locks:
        os.close(descriptor)
    _locks.clear()


os.register_at_fork(after_in_child=_after_fork)


def connect(
    runtime_dir: str | os.PathLike[str] = "run/rlhfd", *, rank: int = 0, world_size: int = 1, prefetch: int = 2
) -> Connection:
    """Connect a trainer rank to the daemon that serves `runtime_dir`.

    Args:
        runtime_dir: The daemon's ``daemon.runtime_dir``.
        rank: This process's rank; each rank connects once.
        world_size: Number of ranks, as configured under ``trainer.world_size``.
        prefetch: Batches leased ahead, including the batch in hand; at least 1.

    Returns:
        The rank's connection: it yields batches of experience and publishes weights. The caller closes it.

    Raises:
        NotRunningError: If no daemon serves `runtime_dir`.
        UnreachableError: If the daemon's buffer does not answer within 30 s.
        ConfigError: If the rank is connected already, the daemon has another world size, or `prefetch` is no whole
            number from 1 on.
    """
    if not isinstance(prefetch, int) or prefetch < 1:
        raise ConfigError(f"prefetch is {prefetch}, not 1, 2 or more: without a lease no batch would ever come")
    folder = Path(find(Path(runtime_dir)).shm_dir)
    config = Config.model_validate_json(Workspace.open(folder).config_path.read_bytes())
    if (ranks := config.trainer.world_size) != world_size or not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} of {world_size}: trainer.world_size of the daemon is {ranks}")
    if config.trainer.kind != "external":
        raise ConfigError("trainer.kind of the daemon is builtin: start it with --set trainer.kind=external")
    connection = open_connection(folder, config, rank=rank, prefetch=prefetch, check=PublishCheck(folder))
    try:
        if not connection.session.await_buffer(_CONNECT_TIMEOUT_S):
            raise UnreachableError(f"the buffer of {runtime_dir} did not answer within {_CONNECT_TIMEOUT_S:g} s")
    except BaseException:
        # An interrupt too.
        connection.close()
        raise
    return connection


def open_connection(
    folder: Path,
    config: Config,
    *,
    rank: int,
    prefetch: int,
    traffic: Traffic | None = None,
    check: Check = lambda actor, critic: None,
) -> Connection:
    """Connect over ZeroMQ to the buffer whose sockets and arena lie in `folder`.

    Args:
        folder: The instance's folder in shared memory.
        config: The run's configuration.
        rank: This process's rank.
        prefetch: Batches leased ahead, including the batch in hand.
        traffic: Counts the messages.
        check: Called with the state dicts of each publish; raises if they must not be published.
    """
    opened = contextlib.ExitStack()
    try:
        descriptor = lock_rank(folder, rank)
        _locks.add(descriptor)
        opened.callback(_unlock, descriptor)
        arena = opened.enter_context(contextlib.closing(Arena(folder / "arena")))
        arena.populate()
        place = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.callback(os.close, place)
        # Not by its name: a later daemon, whose folder has the same one, would count its own leases as trained.
        here = Path(f"/proc/self/fd/{place}")
        mailbox = opened.enter_context(contextlib.closing(Mailbox(here, trainer_name(rank), traffic)))
        outbox = Outbox(here, BUFFER, traffic)
        opened.callback(lambda: outbox.close(linger_s=0.0 if _is_removed(place) else 1.0))
        metrics = None
        if config.trainer.kind == "external":
            metrics = ExternalMetrics(folder / "metrics", rank=rank, reward_source=reward_source(config))
        return Connection(
            arena, folder / "weights", mailbox, outbox,
            rank=rank, world_size=config.trainer.world_size, prefetch=prefetch, gathering=Gathering.of(config),
            on_close=opened.close, check=check, metrics=metrics, weight_slots=config.trainer.weight_slots,
            has_ended=functools.partial(_is_removed, place),
        )  # fmt: skip
    except BaseException:
        # Else the rank would be connected as long as this process lives, and no later attempt could be.
        opened.close()
        raise


def _is_removed(place: int) -> bool:
    """Return whether an open folder is removed: a daemon that ends removes its own, a killed one leaves it."""
    return os.fstat(place).st_nlink == 0


def _unlock(descriptor: int) -> None:
    _locks.discard(descriptor)
    os.close(descriptor)


def lock_rank(folder: Path, rank: int) -> int:
    """Return a descriptor that holds the lock of a rank, which one process at a time has.

    Raises:
        ConfigError: If another process holds it.
    """
    descriptor = os.open(folder / f"{trainer_name(rank)}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline_s = time.monotonic() + _LOCK_TIMEOUT_S
    while not try_lock(descriptor, fcntl.LOCK_EX):
        # The supervisor holds it for a moment after the death of a trainer.
        if time.monotonic() > deadline_s:
            os.close(descriptor)
            raise ConfigError(f"trainer rank {rank} is connected already")
        time.sleep(_POLL_S)
    return descriptor
