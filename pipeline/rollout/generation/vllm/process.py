"""The process of a vLLM engine: a `Core`, and a loop that takes orders and steps while a request is in hand.

It imports vLLM before it gets the settings of its model, and takes no memory of the card until then.

It ends with the worker: by SIGKILL from the kernel at the worker's death, or when the worker's end of the link is
closed. Its output goes into the worker's log.
"""

from __future__ import annotations

import errno
import faulthandler
import logging
import os
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, cast

import msgspec
import setproctitle

from pipeline.errors import LinkEndedError
from pipeline.rollout.generation.vllm import wire
from pipeline.rollout.generation.vllm.ranks import compute_on_cpu, start_tracker
from pipeline.runtime.lifeline import PARENT_VARIABLE, die_with_parent
from pipeline.runtime.link import Link
from pipeline.storage.card_turns import keep_inherited
from pipeline.telemetry import log as log_settings

if TYPE_CHECKING:
    from pipeline.rollout.generation.vllm.core import Core

_IDLE_S = 1.0
_REPORT_S = 0.1
# vLLM's errors where another process took or freed memory of the card between two of its looks.
_CHANGED_MEMORY = ("Free memory on device", "Error in memory profiling")
# Errors of the system that a file of the model has; transformers' own have no number. Others are the machine's.
_OF_A_FILE = (None, errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)

log = logging.getLogger(__name__)


def main(descriptor: int, settings_json: str) -> None:
    """Run the engine until the worker closes the link.

    Args:
        descriptor: File descriptor of the link.
        settings_json: Settings as they are before the worker has loaded its models, as JSON.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    # The ranks that vLLM starts die with it.
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    keep_inherited()
    settings = _introduced(settings_json)
    if settings.tensor_parallel > 1:
        start_tracker()
    link = Link(socket.socket(fileno=descriptor), wire.orders)
    try:
        core = _core(link)
    except LinkEndedError:
        # The worker's models could not be loaded.
        return
    # Any error of vLLM: its message is the worker's.
    except Exception as error:
        log.exception("the engine did not start")
        link.send(_refusal(error))
        return
    _set_levels(settings, logging.WARNING)
    link.send(wire.Ready(core.cache_tokens, core.vocabulary))
    try:
        _serve(core, link)
    except LinkEndedError:
        # The worker has closed the link.
        return
    except Exception as error:
        log.exception("the engine failed")
        core.await_ranks()
        link.send(wire.Failed("engine", _one_line(error)))


def forked(descriptor: int, settings_json: str) -> None:
    """Run the engine in a fork of a process that has imported vLLM; see `main`."""
    import numpy
    import torch

    from pipeline.rollout.generation.vllm.core import forget_card

    # All forks would share them.
    numpy.random.seed()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    forget_card()
    main(descriptor, settings_json)


def _introduced(settings_json: str) -> wire.Settings:
    """Return the settings; this process has its title, and writes its log by them."""
    settings = msgspec.json.decode(settings_json, type=wire.Settings)
    setproctitle.setproctitle(settings.title)
    log_settings.configure("vllm", level=settings.log_level, json=settings.log_json)
    # The start of vLLM alone has a dozen warnings, none of which its user can act on.
    _set_levels(settings, logging.ERROR)
    return settings


def _become_rank() -> None:
    """Have this process, which vLLM starts for a card, end with the engine; before vLLM is imported here."""
    die_with_parent()
    settings = _introduced(sys.argv[2])
    if settings.on_cpu:
        compute_on_cpu()


def _core(link: Link[wire.Order]) -> Core:
    started = time.monotonic()
    from pipeline.rollout.generation.vllm.core import Core

    # vLLM imports Ray where it is installed, which adds fields of its own to each record.
    logging.setLogRecordFactory(logging.LogRecord)
    imports_s = time.monotonic() - started
    while not (messages := link.receive(_IDLE_S)):
        pass
    told = time.monotonic()
    core = Core(cast("wire.Settings", messages[0]))
    log.info("vLLM has started: imports_s=%.1f engine_s=%.1f", imports_s, time.monotonic() - told)
    return core


def _set_levels(settings: wire.Settings, level: int) -> None:
    for name in ("vllm", "py.warnings"):
        logging.getLogger(name).setLevel(logging.NOTSET if settings.log_level == "debug" else level)


def _serve(core: Core, link: Link[wire.Order]) -> None:
    paused, reported_s = False, 0.0
    while True:
        working = core.busy and not paused
        for order in link.receive(0.0 if working else _IDLE_S):
            paused = _obey(core, link, order, paused=paused)
        if not core.busy or paused:
            continue
        ended, now_s = core.step(), time.monotonic()
        # A report is a heartbeat of the worker: an engine that steps without progress makes none.
        if (ended or now_s - reported_s >= _REPORT_S) and (report := core.stepped()) is not None:
            reported_s = now_s
            # The worker reads between two tickets that it scores: steps do not wait for it.
            link.post(report)


def _obey(core: Core, link: Link[wire.Order], order: wire.Order, *, paused: bool) -> bool:
    """Carry out an order; return whether the engine is paused.

    Raises:
        SystemExit: If the weights of the engine are of no version any more; the worker was told.
    """
    from pipeline.rollout.generation.vllm.core import UpdateError

    match order:
        case wire.Submit():
            core.submit(order)
        case wire.Cancel(keys=keys):
            core.cancel(keys)
            link.send(core.report([]))
        case wire.Fetch() | wire.Take():
            try:
                if isinstance(order, wire.Fetch):
                    link.send(core.fetch(order.path, order.age))
                else:
                    link.send(core.take(order.path, order.places, order.version))
            except UpdateError as error:
                link.send(wire.Failed(error.kind, str(error)))
                if error.kind != "version":
                    sys.exit(1)
        case wire.Pause():
            link.send(wire.Done())
            return True
        case wire.Resume():
            return False
        case wire.Sleep():
            core.sleep()
            link.send(wire.Done())
        case wire.Wake():
            core.wake()
            link.send(wire.Done())
    return paused


def _refusal(error: Exception) -> wire.Failed:
    """Return the report of a failed start; what another configuration or model cures is no reason for a restart."""
    wrong = isinstance(error, ValueError | TypeError | OSError | NotImplementedError | ImportError | AssertionError)
    wrong = wrong and not str(error).startswith(_CHANGED_MEMORY)
    if isinstance(error, OSError):
        wrong = wrong and error.errno in _OF_A_FILE
    return wire.Failed("config" if wrong else "engine", _one_line(error))


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:600]}" if text else type(error).__name__


if __name__ == "__main__":
    die_with_parent()
    main(int(sys.argv[1]), sys.argv[2])
elif __name__ == "__mp_main__":
    # The name of a main module in a process that was spawned; its arguments are the engine's.
    _become_rank()
