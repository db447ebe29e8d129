"""The consequence of a child's exit by table: a restart, the shutdown, or the end with an exit code."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.config.schema import DaemonConfig
from pipeline.errors import ExitCode
from pipeline.runtime.messages import Message, PeerDied
from pipeline.supervisor.exits import ExitHandler
from pipeline.supervisor.fleet import Slot
from pipeline.supervisor.placement import Devices
from pipeline.supervisor.restarts import RestartPolicy
from tests.supervisor.test_fleet import Idlers


class Case:
    """A handler of two ranks and two workers, of which no child runs.

    Attributes:
        sent: Messages to the buffer.
        drained: Reasons of a drain.
        aborted: Exit codes and reasons of an end.
    """

    def __init__(self, folder: Path) -> None:
        self.sent: list[Message] = []
        self.drained: list[str] = []
        self.aborted: list[tuple[ExitCode, str]] = []
        self.fleet = Idlers(folder)
        self.ranks = self.fleet.ranks
        # The metrics have no slot for them.
        policies = [RestartPolicy(DaemonConfig(), random.Random()) for _ in range(2)]
        self.workers = [Slot("rollout", index, Devices("", ()), policy) for index, policy in enumerate(policies)]
        self.fleet.slots += self.workers
        self.handler = ExitHandler(
            self.fleet,
            self,  # type: ignore[arg-type]
            drain=self.drained.append,
            abort=lambda code, reason: self.aborted.append((code, reason)),
        )

    def send(self, message: Message) -> None:
        """Record a message to the buffer."""
        self.sent.append(message)

    def ends(self, slot: Slot, code: int, **state: object) -> None:
        """Let a slot's child have ended in a state."""
        slot.state = "ended"
        for name, value in state.items():
            setattr(slot, name, value)
        self.handler.handle(slot, code)


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    case = Case(tmp_path)
    yield case
    case.fleet.slab.close()


def test_training_is_complete_once_every_rank_has_finished(case: Case) -> None:
    case.ends(case.ranks[1], 0, finished=True)
    assert case.drained == []

    case.ends(case.ranks[0], 0, finished=True)

    assert (case.drained, case.aborted) == (["training is complete"], [])
    assert [rank.state for rank in case.ranks] == ["ended", "ended"]


@pytest.mark.parametrize(
    ("code", "killed", "state"),
    [
        (ExitCode.FAILED, {"from_outside": True}, "backoff"),
        (ExitCode.FAILED, {"from_outside": False}, "ended"),
        (ExitCode.OK, {"ended_by": "group"}, "backoff"),
    ],
)
def test_a_rank_that_is_killed_at_its_end_on_another_machine_or_with_its_group_has_not_finished(
    case: Case, code: ExitCode, killed: dict[str, object], state: str
) -> None:
    """On another machine its gateway ends by an error, as a rank does whose last checkpoint cannot be written."""
    case.ends(case.ranks[1], code, finished=True, **killed)

    assert case.ranks[1].state == state


def test_a_rank_that_dies_brings_back_the_one_that_has_finished(case: Case) -> None:
    case.ends(case.ranks[1], 0, finished=True)

    case.ends(case.ranks[0], -9, working_on=17, last_pid=4711)

    assert [rank.state for rank in case.ranks] == ["backoff", "backoff"]
    assert case.sent[-1] == PeerDied("trainer-0", 17, 4711)
    assert (case.drained, case.aborted) == ([], [])


def test_a_rank_killed_with_its_group_is_not_at_fault_for_its_lease(case: Case) -> None:
    case.ends(case.ranks[0], -9, working_on=17, last_pid=4711, ended_by="group")

    assert case.sent == [PeerDied("trainer-0", -1, 4711)]


@pytest.mark.parametrize(
    ("state", "blamed"),
    [
        ({}, 17),
        ({"ended_by": "oom"}, 17),
        ({"ended_by": "watchdog"}, 17),
        ({"from_outside": True}, -1),
        ({"ended_by": "watchdog", "from_outside": True}, -1),
        ({"unusable": True}, -1),
    ],
)
def test_a_ticket_or_lease_is_blamed_only_for_a_death_that_it_may_have_caused(
    case: Case, state: dict[str, object], blamed: int
) -> None:
    case.ends(case.workers[1], -9, working_on=17, last_pid=4711, **state)
    assert case.sent == [PeerDied("worker-1", blamed, 4711)]

    case.ends(case.ranks[0], -9, working_on=17, last_pid=4712, **state)
    assert case.sent[-1] == PeerDied("trainer-0", blamed, 4712)


def test_the_last_worker_that_fails_ends_the_run_and_no_earlier_one(case: Case) -> None:
    case.ends(case.workers[0], 1, unusable=True, error="no weights")
    assert (case.workers[0].state, case.aborted) == ("failed", [])

    case.ends(case.workers[1], 1, unusable=True, error="no weights")

    assert case.aborted == [(ExitCode.GAVE_UP, "rollout-1 failed (exit code 1): no weights")]


@pytest.mark.parametrize(
    ("last_line", "told"),
    [
        ("2026-01-02T03:04:05.678Z INFO rollout-0 pipeline.rollout.worker: weights are loaded", False),
        ("2026-01-02T03:04:05.678Z WARNING rollout-0 pipeline.rollout.worker: the driver is gone", True),
        ("CUDA error: an illegal memory access was encountered", True),
        ("", False),
    ],
)
def test_a_line_of_a_log_that_warns_of_nothing_is_no_cause_of_a_death(
    case: Case, caplog: pytest.LogCaptureFixture, last_line: str, told: bool
) -> None:
    case.ends(case.workers[0], -9, last_line=last_line)

    (line,) = [line for line in caplog.messages if line.startswith("rollout-0 ended")]
    assert line.partition(" s: ")[2] == (last_line if told else "it reported no error")


@pytest.mark.parametrize("code", [ExitCode.BAD_CONFIG, ExitCode.GAVE_UP])
def test_a_childs_own_verdict_on_the_run_is_the_runs_exit_code(case: Case, code: ExitCode) -> None:
    case.ends(case.workers[0], code, error="prompts.path: gone")

    assert case.aborted == [(code, "prompts.path: gone")]
    assert case.workers[0].state == "ended", "it is not restarted"


def test_a_setup_is_restarted_after_a_kill_and_up_to_the_limit_and_an_error_of_its_own_ends_the_run(case: Case) -> None:
    setup = case.fleet.add("setup", 0, Devices("", ()))
    setup.policy = RestartPolicy(DaemonConfig(restart_limit=3), random.Random(0))

    for _ in range(2):
        case.ends(setup, -9)
        assert (setup.state, case.aborted) == ("backoff", [])
    case.ends(setup, -9)
    assert setup.state == "failed"
    assert [code for code, _ in case.aborted] == [ExitCode.GAVE_UP]

    case.aborted.clear()
    case.ends(setup, 1, error="PermissionError: no")
    assert case.aborted == [(ExitCode.FAILED, "the embedded model could not be made: PermissionError: no")]
