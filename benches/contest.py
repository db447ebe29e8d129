"""Runs ways of `benches.ways` against each other: one process each, which stays up during the turns of the others."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from benches.peers import RAY, REVERB, Environment, NotInstallableError, python_of
from benches.report import ROOT
from benches.workload import APPEND_ROWS, ROWS_VARIABLE, TRAINER_VARIABLE

WARM_APPENDS = 32
_ANSWER_S = 60.0
# Some ways start clusters of their own, all at the same time.
_START_S = 240.0


class Contestant(NamedTuple):
    """A way: its module, its title in tables, its environment (None: that of rlhfd), and variables of its processes."""

    module: str
    title: str
    environment: Environment | None = None
    variables: tuple[tuple[str, str], ...] = ()


BOUND = Contestant("bound", "bound: two plain copies and the touch, no messages")
BARE = Contestant("bare", "bare: the same three processes, plain copies, no promise kept")
DAEMON = Contestant("daemon", "rlhfd: worker, buffer, external trainer")
RAGGED = Contestant(
    "daemon", "rlhfd, without padding: worker, buffer, external trainer", variables=((TRAINER_VARIABLE, "ragged"),)
)
OWN = Contestant("daemon", "rlhfd, its own trainer: worker, buffer, trainer", variables=((TRAINER_VARIABLE, "own"),))
REPLAY = Contestant("replay", "rlhfd: `DetachedReplayBuffer`")
RAW = Contestant("zeromq_raw", "ZeroMQ, raw bytes, zero-copy send")
STREAMER = Contestant("zeromq_streamer", "ZeroMQ, raw bytes, through a process between the two")
TRANSFER_QUEUE = Contestant("transfer_queue", "TransferQueue", RAY)
COATI = Contestant("coati", "coati's DetachedReplayBuffer, on a Ray queue", RAY)
PICKLE = Contestant("zeromq_pickle", "ZeroMQ, pickle")
TORCHRL = Contestant("torchrl_memmap", "TorchRL, shared memmap and semaphores", RAY)
PEERS = (
    RAW,
    STREAMER,
    PICKLE,
    TORCHRL,
    Contestant("torch_queue", "torch.multiprocessing.Queue, file_system"),
    Contestant("torch_queue_fd", "torch.multiprocessing.Queue, file_descriptor"),
    Contestant("reverb_queue", "reverb", REVERB),
    COATI,
    TRANSFER_QUEUE,
)


class FailedError(Exception):
    """A way gave no answer; the message has its last output."""


class Runner:
    """A way in its process, which starts at construction."""

    def __init__(self, contestant: Contestant, producers: int, append_rows: int = APPEND_ROWS) -> None:
        environment = contestant.environment
        python = sys.executable if environment is None else python_of(environment)
        # One thread each: with more, the processes of one way would compete for the cores.
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "RAY_DEDUP_LOGS": "0", "PYTHONWARNINGS": "ignore"}
        self._process = subprocess.Popen(
            [python, "-m", "benches.ways", contestant.module, str(producers)],
            cwd=ROOT, text=True,
            env={
                **os.environ, **threads, **quiet, **dict(contestant.variables),
                "PYTHONPATH": str(ROOT), ROWS_VARIABLE: str(append_rows),
            },
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def begin(self, deadline_s: float) -> None:
        """Wait until the way is ready to be measured.

        Args:
            deadline_s: Monotonic time of the end of the wait.

        Raises:
            FailedError: If it does not become ready.
        """
        try:
            self._answer(deadline_s)
        except FailedError:
            self.close()
            raise

    def measure(self, shape: str, appends: int, *, pause_s: float = 0.0) -> dict[str, Any]:
        """Make the producers send `appends` appends in all, and return the measurements of `benches.ways`."""
        assert self._process.stdin
        order = {"shape": shape, "appends": appends, "pause_s": pause_s}
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise FailedError("its process has ended") from error
        return self._answer(time.monotonic() + _ANSWER_S)

    def close(self) -> None:
        """End the process and its children."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()
        assert self._process.stdout
        self._process.stdout.close()

    def _kill(self) -> None:
        """Kill the process with all that it has started: a producer or a buffer would wait for it for ever."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _answer(self, deadline_s: float) -> dict[str, Any]:
        assert self._process.stdout
        left_s = max(0.0, deadline_s - time.monotonic())
        # An answer is one line, written at once: if a part can be read, the whole line can.
        if not select.select([self._process.stdout], [], [], left_s)[0]:
            self._kill()
            raise FailedError(f"no answer after another {left_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise FailedError(f"its process ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def running(
    contestants: Sequence[Contestant], producers: int, append_rows: int = APPEND_ROWS
) -> Iterator[tuple[dict[Contestant, Runner], dict[str, str]]]:
    """Start ways; yield the running ones, and the reasons why the others do not run."""
    runners: dict[Contestant, Runner] = {}
    failed: dict[str, str] = {}
    try:
        for contestant in contestants:
            try:
                runners[contestant] = Runner(contestant, producers, append_rows)
            except NotInstallableError as error:
                failed[contestant.title] = str(error)
        # One for all, which start at the same time: with one for each a slow machine would be waited for six times.
        deadline_s = time.monotonic() + _START_S
        for contestant in [*runners]:
            try:
                runners[contestant].begin(deadline_s)
            except FailedError as error:
                del runners[contestant]
                failed[contestant.title] = str(error)
        yield runners, failed
    finally:
        for runner in runners.values():
            runner.close()


def calibrate(runners: Mapping[Contestant, Runner], shape: str, seconds: float) -> dict[Contestant, int]:
    """Return the number of appends that keep each way busy for `seconds`; ways that fail at this shape are left out."""
    counts = {}
    for contestant, runner in runners.items():
        try:
            runner.measure(shape, WARM_APPENDS)
            rate = WARM_APPENDS / runner.measure(shape, WARM_APPENDS)["seconds"]
        except FailedError:
            continue
        counts[contestant] = max(WARM_APPENDS, int(rate * seconds) // 4 * 4)
    return counts
