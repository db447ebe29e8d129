"""The meeting of trainer ranks on several machines (`trainer.nodes`): one TCP store, on the first rank's machine.

    gateway of a remote rank       first rank                          each other rank
    address of this machine  --->  opens the store, a free port  --->  enters the process group through it

The address is the one by which Ray's nodes know this machine. Address and port are files of one generation in the
instance's folder; a remote rank gets them from its gateway.

The first rank tells the digests of the models that each rank reads on its own machine. A machine with other files of
one of them is refused: its ranks would train with it, and no number would tell.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import logging
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as distributed

from pipeline.config.schema import Config
from pipeline.errors import ConfigError, RlhfdError
from pipeline.models.device import process_device
from pipeline.runtime.role import Report, RoleContext
from pipeline.runtime.run_inputs import digest_of_model
from pipeline.storage.files import write_whole
from pipeline.trainer.sharding.replicas import TIMEOUT

_POLL_S = 0.05
_CONNECT = datetime.timedelta(minutes=1)
# Ray takes some seconds until it reports a lost machine.
_VERDICT_S = 30.0
_SIOCGIFADDR = 0x8915
_DIGESTS = "models"
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

log = logging.getLogger(__name__)


class StoppedError(Exception):
    """A shutdown before the ranks have met."""


class Meeting(msgspec.Struct, frozen=True):
    """The place where the ranks of one generation meet.

    Attributes:
        host: Address of the first rank's machine.
        port: Port of its store.
        device: Type of the first rank's device, ``"cuda"`` or ``"cpu"``: all ranks compute on one type.
    """

    host: str
    port: int
    device: str


def offer_address(folder: Path, generation: int, host: str) -> None:
    """Tell the ranks of a generation the address of this machine; each gateway does, with the same one."""
    _write(_host_path(folder, generation), host.encode())


def forget_earlier(folder: Path, generation: int) -> None:
    """Remove the files by which ranks of earlier generations met, those among them that a kill left half-written."""
    for left in folder.glob("ranks-*"):
        if int(left.name.removeprefix("ranks-").partition(".")[0]) < generation:
            left.unlink(missing_ok=True)


def found_meeting(folder: Path, generation: int, waits: Callable[[], None]) -> Meeting:
    """Wait until the first rank has opened its store.

    Args:
        folder: The instance's folder.
        generation: The generation of the ranks.
        waits: Called between two looks; may raise.
    """
    return msgspec.json.decode(_awaited(_meeting_path(folder, generation), waits), type=Meeting)


def enter_group(config: Config, context: RoleContext, meeting: Meeting | None = None) -> None:
    """Enter the process group of all ranks; returns once every rank has.

    Args:
        config: The run's configuration.
        context: This rank's process.
        meeting: The place of the meeting, on a remote rank; None on the daemon's machine.

    Raises:
        StoppedError: If a shutdown comes first.
        ConfigError: If this machine lacks a model, or has other files of it than the first rank's.
        RlhfdError: If the store cannot be opened or reached.
    """

    def waits() -> None:
        if context.stopping:
            raise StoppedError

    context.report(Report(state="pending"))
    folder, generation = context.folder, context.generation
    device = process_device().type
    try:
        if meeting is not None:
            store = _store(meeting.host, meeting.port)
        elif context.index:
            meeting = found_meeting(folder, generation, waits)
            store = _store(meeting.host, meeting.port)
        else:
            forget_earlier(folder, generation)
            host = _awaited(_host_path(folder, generation), waits).decode()
            store = _store(host, 0, is_master=True)
            tell_models(config, store)
            meeting = Meeting(host, store.port, device)
            _write(_meeting_path(folder, generation), msgspec.json.encode(meeting))
        if context.index and context.index % config.ranks_here == 0:
            refuse_other_models(config, store)
        for name in INTERFACES:
            # By default a machine's address is that of its name, which may be a loopback one.
            os.environ.setdefault(name, _interface_to(meeting.host, meeting.port))
        distributed.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            store=store,
            rank=context.index,
            world_size=config.trainer.world_size,
            timeout=TIMEOUT,
        )
    except (distributed.DistError, OSError) as error:
        raise RlhfdError(f"the trainer ranks do not meet: {error}") from error
    context.in_process_group = True
    context.report(Report(state="placed"))


def tell_models(config: Config, store: Any) -> None:
    """Tell the other machines the digest of each model that their ranks read there."""
    folders = _models(config)
    digests = {key: digest_of_model(folders[key]) for key in _compared(config, folders)}
    store.set(_DIGESTS, msgspec.json.encode(digests).decode())


def refuse_other_models(config: Config, store: Any) -> None:
    """Compare the models of this machine with those of the first rank; called by one rank of each other machine.

    Raises:
        ConfigError: If a model is missing here, or has other files.
    """
    folders = _models(config)
    for key, folder in folders.items():
        if not folder.is_dir():
            raise ConfigError(f"{key}: {folder} is no folder of this machine")
    expected = msgspec.json.decode(store.get(_DIGESTS), type=dict[str, str])
    for key, digest in expected.items():
        if digest_of_model(folders[key]) != digest:
            raise ConfigError(f"{key}: {folders[key]} has other weights here than on the daemon's machine")


def _models(config: Config) -> dict[str, Path]:
    """Return the folders from which a rank loads models, by the key that names each of them."""
    found = {"model.actor": config.model.actor}
    if config.model.lora_rank and config.model.lora_adapter is not None:
        found["model.lora_adapter"] = config.model.lora_adapter
    if config.rollout.algorithm == "ppo" and config.model.critic is not None:
        found["model.critic"] = config.model.critic
    if config.reference_on == "trainer" and config.reference_folder is not None:
        found["model.reference"] = config.reference_folder
    return {key: Path(path) for key, path in found.items()}


def _compared(config: Config, keys: Iterable[str]) -> set[str]:
    """Return the keys of the models that no rank sends to another one: of whole models the reference alone."""
    return {key for key in keys if config.shards_trainer or key == "model.reference"}


def leave_the_verdict(context: RoleContext, error: BaseException) -> None:
    """After an error of a collective, leave the time to the supervisor, or gateway, that knows why the other is gone.

    This rank sees a closed connection before the other one's end is known: a killed process takes time to end, and a
    cluster to report it. The supervisor ends all ranks with the first one that ends, which is the one to blame for the
    batch in work; rows of a blamed batch stay with the ranks that have them, and sums differ by rounding.
    """
    if not isinstance(error, distributed.DistError) and "gloo" not in str(error):
        return
    log.warning("another trainer rank is gone: %s", next(iter(str(error).splitlines()), ""))
    deadline_s = time.monotonic() + _VERDICT_S
    while time.monotonic() < deadline_s and not context.stopping:
        time.sleep(_POLL_S)
    context.report(Report(killed=True))


def _store(host: str, port: int, *, is_master: bool = False) -> Any:
    """Open or enter the store at an address; 0 is a free port."""
    # A store that is there answers at once; the port may be closed between two machines.
    found_within = TIMEOUT if is_master else _CONNECT
    store = distributed.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=is_master, wait_for_workers=False, timeout=found_within
    )
    store.set_timeout(TIMEOUT)
    return store


def _interface_to(host: str, port: int) -> str:
    """Return the name of the network interface by which this machine reaches an address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: the kernel chooses the route.
        probe.connect((host, port))
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == own:
                    return name
    raise OSError(f"no network interface has the address {own}")


def _host_path(folder: Path, generation: int) -> Path:
    return folder / f"ranks-{generation}.host"


def _meeting_path(folder: Path, generation: int) -> Path:
    return folder / f"ranks-{generation}.meeting"


def _awaited(path: Path, waits: Callable[[], None]) -> bytes:
    while True:
        waits()
        with contextlib.suppress(FileNotFoundError):
            return path.read_bytes()
        time.sleep(_POLL_S)


def _write(path: Path, content: bytes) -> None:
    write_whole(path, content, path.with_name(f"{path.name}.{os.getpid()}"), flush=False)
