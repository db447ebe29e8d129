"""Evaluations: tickets of a second kind, on held-out prompts; they have no extent and no row, and no trainer sees them.

A version that is due gets no successor before its evaluation is complete: `holds` keeps back the batches that would
train one. So all tickets of an evaluation are of the same weights, whoever dies meanwhile. Tickets of rollouts are
issued as ever. An evaluation counts with its last ticket, as one line (`pipeline.telemetry.evaluations`). One that is
cut, by a death of the buffer or the end of the run, leaves nothing, and is made again.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Sequence

from pipeline.buffer.context import BufferContext
from pipeline.runtime.evaluation_plan import EvaluationPlan
from pipeline.runtime.messages import EVALUATION_TICKETS, Evaluated, Failed, Settled, Ticket, WantTickets
from pipeline.telemetry.evaluations import Evaluation, EvaluationFile, PromptResult

_TICKETS_BITS = 20
_INCARNATION_BITS = 31

log = logging.getLogger(__name__)


@dataclasses.dataclass
class _Task:
    """Prompts of one ticket.

    Attributes:
        file: Number of their file.
        position: The first one's.
        prompts: Their number.
        attempts: Tickets handed out for them.
    """

    file: int
    position: int
    prompts: int
    attempts: int = 0


@dataclasses.dataclass
class _Round:
    """One evaluation under way.

    Attributes:
        pending: Tasks without a ticket.
        out: Task and worker of each ticket in hand.
        results: Results of each file.
        done: Prompts whose task has ended, with a result or without.
    """

    version: int
    fingerprint: int
    pending: collections.deque[_Task]
    out: dict[int, tuple[_Task, str]]
    results: list[list[PromptResult]]
    done: int = 0


class Evaluations:
    """The evaluation under way, and those that are due; nothing without a plan.

    Attributes:
        plan: The held-out prompts; None: no version is ever due.
        completed: Evaluations completed by this buffer.
        abandoned: Evaluations that ended without a result, because of a newer version or a rollback.
        evaluated: Prompts with a result, of all evaluations.
        failed: Prompts without one.
    """

    def __init__(
        self, context: BufferContext, plan: EvaluationPlan | None, book: EvaluationFile | None, *, incarnation: int
    ) -> None:
        """Take over the complete evaluations.

        Args:
            context: The surroundings, shared with tickets and leases.
            plan: See `plan` of the class.
            book: The complete evaluations; given with a plan.
            incarnation: The buffer's: a ticket of an earlier one has another number.
        """
        self.completed = self.abandoned = self.evaluated = self.failed = 0
        self._context = context
        self.plan = plan
        self._book = book
        self._capacity: dict[str, int] = {}
        self._round: _Round | None = None
        self._next_ticket = EVALUATION_TICKETS + ((incarnation % (1 << _INCARNATION_BITS)) << _TICKETS_BITS)

    @property
    def last(self) -> Evaluation | None:
        """The newest complete evaluation of the run's versions; None without one, or if its plan is another one."""
        ledger = self._context.ledger
        newest = ledger.totals.policy_version
        last = None if self._book is None else self._book.newest(newest, ledger.versions.fingerprint_of)
        return last if last is not None and self.plan is not None and last.plan == self.plan.digest else None

    @property
    def progress(self) -> tuple[int, int]:
        """Prompts done and all prompts of the evaluation under way; 0 and 0 without one."""
        if self.plan is None or self._round is None:
            return 0, 0
        return self._round.done, sum(self.plan.prompts)

    def holds(self, version: int) -> bool:
        """Return whether the batches that follow a version must wait: it, or one before it, is due and not complete."""
        newest = self._context.ledger.totals.policy_version
        if self.plan is None or newest < 0:
            return False
        every = self.plan.every
        due = -(-newest // every) * every
        if due == newest and self._is_complete(newest):
            due += every
        return version >= due

    def want(self, message: WantTickets) -> None:
        """Record the number of tickets that a worker can hold."""
        self._capacity[message.worker] = message.tickets

    def forget(self, worker: str) -> None:
        """Hand no more tickets to a dead worker."""
        self._capacity.pop(worker, None)

    def orphan(self, worker: str, *, held: Sequence[int], blamed: int | None = None) -> None:
        """Take the tickets of a dead worker that its successor does not hold; they are handed out again.

        Args:
            worker: Name of the dead worker.
            held: Tickets that the worker or its successor holds.
            blamed: The ticket that it was at, which alone counts as an attempt; None if unknown: the oldest.
        """
        if self._round is None:
            return
        for ticket, (task, holder) in list(self._round.out.items()):
            if holder == worker and ticket not in held:
                blamed = ticket if blamed is None else blamed
                del self._round.out[ticket]
                if blamed != ticket:
                    task.attempts -= 1
                self._retry(self._round, task, "its worker died")

    def end(self, report: Evaluated | Failed) -> None:
        """Record the outcome of a ticket; one of an earlier evaluation changes nothing."""
        task, holder = (self._round and self._round.out.get(report.ticket)) or (None, "")
        if self._round is None or task is None or holder != report.worker:
            self._context.observer.duplicate()
        else:
            del self._round.out[report.ticket]
            if isinstance(report, Failed):
                if report.retry:
                    self._retry(self._round, task, report.reason)
                else:
                    self._give_up(self._round, task, report.reason)
            elif problem := self._problem(self._round, task, report):
                self._retry(self._round, task, problem)
            else:
                self._round.results[task.file] += report.results
                self._round.done += task.prompts
                self.evaluated += len(report.results)
                self.failed += task.prompts - len(report.results)
        if (incarnation := self._context.peers.get(report.worker)) is not None:
            self._context.send(report.worker, Settled(incarnation, report.ticket))

    def step(self, now_s: float, *, paused: bool) -> None:
        """Begin an evaluation that is due, hand out its tickets, and end it with its last one."""
        if self.plan is None:
            return
        ledger, found = self._context.ledger, self._round
        newest = ledger.totals.policy_version
        fingerprint = ledger.versions.fingerprint_of(newest) if newest >= 0 else None
        if found is not None and (found.version, found.fingerprint) != (newest, fingerprint):
            log.warning("an evaluation is given up, its weights are not the newest any more: version=%d newest=%d",
                        found.version, newest)  # fmt: skip
            self.abandoned += 1
            found = self._round = None
        if found is None:
            if fingerprint is None or newest % self.plan.every or self._is_complete(newest):
                return
            tasks = collections.deque(_Task(*ticket) for ticket in self.plan.tickets())
            found = self._round = _Round(newest, fingerprint, tasks, {}, [[] for _ in self.plan.names])
            log.info("evaluation: version=%d prompts=%d tickets=%d", newest, sum(self.plan.prompts), len(tasks))
        if not paused:
            self._issue(found, now_s)
        if not found.pending and not found.out:
            self._complete(found)

    def _is_complete(self, version: int) -> bool:
        fingerprint = self._context.ledger.versions.fingerprint_of(version)
        assert self.plan is not None and self._book is not None
        return fingerprint is not None and self._book.find(version, fingerprint, self.plan.digest) is not None

    def _issue(self, found: _Round, now_s: float) -> None:
        held = collections.Counter(worker for _, worker in found.out.values())
        while found.pending:
            # The worker with the fewest tickets first, as for rollouts.
            free = [(held[worker], worker) for worker, most in self._capacity.items() if held[worker] < most]
            if not free:
                return
            _, worker = min(free)
            held[worker] += 1
            task, ticket = found.pending.popleft(), self._next_ticket
            self._next_ticket += 1
            task.attempts += 1
            found.out[ticket] = task, worker
            self._context.send(
                worker,
                Ticket(
                    self._context.peers[worker], ticket, task.position, task.prompts, task.attempts, 0, 0,
                    found.version, now_s + self._context.limits.ticket_timeout_s, task.file,
                ),
            )  # fmt: skip

    def _retry(self, found: _Round, task: _Task, reason: str) -> None:
        if task.attempts >= self._context.limits.max_attempts:
            self._give_up(found, task, reason)
        else:
            found.pending.append(task)

    def _give_up(self, found: _Round, task: _Task, reason: str) -> None:
        assert self.plan is not None
        log.warning("held-out prompts without a result: file=%s position=%d prompts=%d attempts=%d reason=%s",
                    self.plan.names[task.file], task.position, task.prompts, task.attempts, reason)  # fmt: skip
        found.done += task.prompts
        self.failed += task.prompts

    def _problem(self, found: _Round, task: _Task, report: Evaluated) -> str:
        assert self.plan is not None
        if (report.policy_version, report.fingerprint) != (found.version, found.fingerprint):
            return f"it was rolled out with version {report.policy_version}"
        positions = [result.position for result in report.results]
        ours = range(task.position, task.position + task.prompts)
        whole = all(result.is_possible and result.responses == self.plan.num_generations for result in report.results)
        if not whole or len(set(positions)) < len(positions) or not set(positions) <= set(ours):
            return "its results are impossible"
        return ""

    def _complete(self, found: _Round) -> None:
        assert self.plan is not None and self._book is not None
        evaluation = self.plan.evaluation(found.version, f"{found.fingerprint:016x}", found.results)
        self._book.add(evaluation)
        self._round = None
        self.completed += 1
        total = evaluation.total
        if total.pass_at_1 is None:
            log.error("no held-out prompt has a result; the log says why: version=%d", found.version)
            return
        of_k = f" pass_at_{evaluation.k}=%.4f" if evaluation.k > 1 else ""
        rates = (total.pass_at_1, total.pass_at_k) if of_k else (total.pass_at_1,)
        event = f"evaluated: version=%d pass_at_1=%.4f{of_k} reward=%.4f prompts=%d failed=%d"
        log.info(event, found.version, *rates, total.reward_mean, total.prompts, total.failed)
