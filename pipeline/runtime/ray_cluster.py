"""A gateway's connection to its Ray cluster, its waits for cluster and room, and the begin of its actor."""

from __future__ import annotations

import logging
import math
import os
import re
import socket
import time
from typing import Any, Final

from pipeline.config.schema import Config
from pipeline.errors import ConfigError, RlhfdError
from pipeline.runtime.role import Report, RoleContext

_NAMESPACE: Final = "rlhfd"
_CONNECT_S: Final = 5.0
_REJOIN_S: Final = 1.0
_MOST_CHARACTERS: Final = 2000
_LOOK_S: Final = 0.1
_PENDING_S: Final = 10.0
_PENDING_REPEAT_S: Final = 300.0

log = logging.getLogger(__name__)


class NoRoomError(Exception):
    """A shutdown before the cluster was there or had room."""


def join(config: Config, context: RoleContext) -> None:
    """Connect to the cluster as a driver; after the first start it is waited for without a deadline.

    The cluster existed before, and its head may be started anew. A death for each try would soon end the run.

    Raises:
        ConfigError: If there is no such cluster, at the first start of this process.
        NoRoomError: If a shutdown comes before there is one.
    """
    # No usage report leaves the machine.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    is_pending, due_s = False, 0.0
    while (error := _connected(config.cluster.address)) is not None:
        context.stop_on_sigterm()
        if context.generation <= 1:
            raise ConfigError(error)
        if context.stopping:
            raise NoRoomError
        if time.monotonic() > due_s:
            is_pending, due_s = True, time.monotonic() + _PENDING_REPEAT_S
            log.warning("waits for the cluster: %s", error)
            context.report(Report(state="pending"))
        time.sleep(_REJOIN_S)
    if is_pending:
        context.report(Report(state="placed"))
    # `ray.init` has installed a handler of its own.
    context.stop_on_sigterm()
    # Ray's has fields that no formatter here knows.
    logging.setLogRecordFactory(logging.LogRecord)


def _connected(address: str) -> str | None:
    """Connect to the cluster at an address; return the reason if this cannot be done."""
    # Only the gateways of a cluster load it.
    import ray
    from ray.exceptions import RayError

    place = address
    try:
        if address == "auto":
            place = _joined_address()
        # Ray itself would try for minutes, without a message.
        host, _, port = place.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
        # Not `place`: Ray looks for the token of a cluster by itself for "auto" alone.
        ray.init(address=address, namespace=_NAMESPACE, log_to_driver=False, configure_logging=False)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        told = one_line(error)
        if error.__cause__ is not None:
            # Ray tells that it cannot connect; why is the last line of what this comes from, such as a missing token.
            told += f": {one_line(error.__cause__).rpartition(' | ')[2]}"
        return f"cluster.address: no Ray cluster at {place} that this machine is part of (ray start): {told}"
    return None


def _joined_address() -> str:
    """Return the address that is "auto" for Ray.

    Raises:
        ConnectionError: If there is none.
    """
    from ray._private import services

    # As `ray.init` does: it keeps the address of a node that has ended.
    services.find_gcs_addresses.cache_clear()
    address: str | None = services.canonicalize_bootstrap_address("auto")
    if address is None:
        raise ConnectionError("RAY_ADDRESS is local")
    return address


def begin_actor() -> None:
    """Prepare the process of an actor: plain log records, and no GPU unless the actor requested one."""
    import ray

    logging.setLogRecordFactory(logging.LogRecord)
    if not ray.get_gpu_ids():
        # It sees all GPUs of its machine otherwise.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def as_error_of_start(error: ConfigError, context: RoleContext) -> RlhfdError:
    """Return the error by which a gateway ends when its actor cannot use the configuration on its machine."""
    if context.generation <= 1:
        return error
    # The configuration was valid on another machine, and may be on the next one: retry.
    return RlhfdError(str(error), bare=error.bare)


def await_room(placed: Any, context: RoleContext, wanted: str, actor: Any = None) -> None:
    """Wait until the cluster has room, without a deadline: the free resources are logged now and then.

    Args:
        placed: Reference to an object that exists once there is room.
        context: The gateway's; told of a wait of some seconds and of its end.
        wanted: The resources, for the log.
        actor: Its first answer is `placed`; it has room before, while it starts slowly.

    Raises:
        NoRoomError: If a shutdown comes first.
    """
    import ray

    is_pending, due_s = False, time.monotonic() + _PENDING_S
    while not ray.wait([placed], timeout=_LOOK_S)[0]:
        if context.stopping:
            raise NoRoomError
        if time.monotonic() > due_s and actor is not None and _has_process(actor):
            due_s = math.inf
        if time.monotonic() > due_s:
            is_pending, due_s, free = True, time.monotonic() + _PENDING_REPEAT_S, ray.available_resources()
            log.warning("waits for room in the cluster: %s free_gpus=%g free_cpus=%g",
                        wanted, free.get("GPU", 0.0), free.get("CPU", 0.0))  # fmt: skip
            context.report(Report(state="pending"))
    if is_pending:
        context.report(Report(state="placed"))


def _has_process(actor: Any) -> bool:
    """Return whether a node has a process for an actor, which may still import its class."""
    import ray

    try:
        from ray._private import state

        # While an actor waits for room its address is that of a node that was asked for it.
        none = {0, *(node["NodeManagerPort"] for node in ray.nodes())}
        return state.actors(actor._actor_id.hex()).get("Address", {}).get("Port", 0) not in none
    except Exception as error:  # noqa: BLE001 - no documented interface of Ray: of another form it tells nothing
        log.debug("the cluster does not tell whether an actor has a process: %s", error)
        return False


def one_line(error: BaseException) -> str:
    """Return Ray's whole message on one line, without colours: the reason is rarely in its first line."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", str(error) or type(error).__name__).split("\n")
    return " | ".join(line.strip() for line in lines if line.strip())[:_MOST_CHARACTERS]
