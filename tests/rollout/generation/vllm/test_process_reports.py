"""Reports of an engine's process to a worker that is busy; vLLM itself is not needed."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any, cast

from pipeline.errors import LinkEndedError
from pipeline.rollout.generation.interface import EngineLoad
from pipeline.rollout.generation.vllm import process, wire
from pipeline.runtime.link import Link

STEPS = 50


class EndsARequestAStep:
    """A core with that many steps of work."""

    def __init__(self) -> None:
        self.steps = 0
        self.done = threading.Event()

    @property
    def busy(self) -> bool:
        return self.steps < STEPS

    def step(self) -> bool:
        self.steps += 1
        if not self.busy:
            self.done.set()
        return True

    def stepped(self) -> wire.Stepped:
        rows = [wire.Row([7] * 4000, None, stopped=True, spans=[])]
        return wire.Stepped([wire.Ended(self.steps, rows)], 0, EngineLoad(0, 0))


def serve(core: EndsARequestAStep, link: Link[wire.Order]) -> None:
    with contextlib.suppress(LinkEndedError):
        process._serve(cast("Any", core), link)


def test_the_steps_go_on_while_the_worker_reads_nothing_and_it_gets_all_reports_afterwards() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        # Less than one report.
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        core, worker = EndsARequestAStep(), Link(ours, wire.reports)
        engine = threading.Thread(target=serve, args=(core, Link(theirs, wire.orders)), daemon=True)
        engine.start()

        went_on = core.done.wait(20)
        ended: list[int] = []
        while len(ended) < STEPS and (reports := worker.receive(20)):
            ended += [one.key for report in reports if isinstance(report, wire.Stepped) for one in report.ended]
        worker.close()
        engine.join(20)

    assert went_on
    assert ended == list(range(1, STEPS + 1))
    assert not engine.is_alive()
