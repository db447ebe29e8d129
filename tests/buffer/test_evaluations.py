"""Evaluation tickets: of one version, each prompt once, beside the books of rollouts and never in them."""

import dataclasses
import json
import math

import msgspec
import pytest

from pipeline.buffer.metrics import BufferMetrics
from pipeline.runtime.messages import (
    EVALUATION_TICKETS,
    Drain,
    Evaluated,
    Failed,
    Hello,
    Lease,
    PeerDied,
    Published,
    Sealed,
    Settled,
    Ticket,
)
from pipeline.supervisor.hangs import RunWatch
from pipeline.telemetry.log import JsonFormatter
from pipeline.telemetry.metrics import EVALUATION_LABELS, SlotName
from pipeline.telemetry.reader import MetricsReader
from pipeline.telemetry.slab import MetricsSlab
from tests.support.protocol import LIMITS, Bench, seal_of, trainer, worker
from tests.support.town import Book, plan, results_of


class Evaluating(Bench):
    """A buffer with 7 held-out prompts in two files, in 4 tickets; every second version is due."""

    def __init__(self, *, every=2, limits=LIMITS, **options):
        self.book = Book()
        super().__init__(limits, plan=plan(every), book=self.book, **options)

    def tickets(self, peer="worker-0"):
        """Return the new evaluation tickets of a worker; those of rollouts stay."""
        found = [m for name, m in self.sent if name == peer and isinstance(m, Ticket) and m.evaluation >= 0]
        self.sent = [(name, message) for name, message in self.sent if message not in found]
        return found

    def evaluate(self, peer="worker-0", version=0, fingerprint=9):
        """Have a worker evaluate until it gets no more tickets."""
        while tickets := self.tickets(peer):
            self.say(*(evaluated(ticket, peer, version, fingerprint) for ticket in tickets))


def evaluated(ticket, peer="worker-0", version=0, fingerprint=9):
    return Evaluated(peer, ticket.ticket, version, fingerprint, results_of(ticket), ticket.attempt)


def test_a_due_version_gets_no_successor_before_its_evaluation_is_complete(caplog):
    caplog.set_level("INFO")
    bench = Evaluating()
    bench.say(Published(0, 9, 0), *worker(), *trainer())
    first = bench.tickets()
    bench.say(*map(seal_of, bench.heard("worker-0", Ticket)))
    assert bench.heard("trainer-0", Lease) == [], "version 0 is due"

    bench.say(*map(evaluated, first))
    bench.evaluate()

    assert [lease.for_version for lease in bench.heard("trainer-0", Lease)] == [0]
    (found,) = bench.book.found
    assert (found.version, found.fingerprint) == (0, f"{9:016x}")
    # Prompts 0 ... 4 and 0, 1 with p mod 3 right responses of 2.
    assert found.total.pass_at_1 == pytest.approx((0 + 0.5 + 1 + 0 + 0.5 + 0 + 0.5) / 7)
    assert found.total.pass_at_k == pytest.approx((0 + 1 + 1 + 0 + 1 + 0 + 1) / 7)
    assert [(one.prompts, one.failed) for one in found.files] == [(5, 0), (2, 0)]
    (record,) = [record for record in caplog.records if record.msg.startswith("evaluated")]
    fields = json.loads(JsonFormatter("buffer").format(record))
    assert (fields["event"], fields["version"], fields["prompts"], fields["failed"]) == ("evaluated", 0, 7, 0)
    assert (fields["pass_at_1"], fields["pass_at_2"]) == (found.total.pass_at_1, found.total.pass_at_k)


def test_a_version_that_is_not_due_is_trained_on_at_once_and_batches_of_a_due_one_are_not_leased_ahead():
    bench = Evaluating(every=2, limits=dataclasses.replace(LIMITS, max_staleness=2))
    bench.say(Published(0, 9, 0), *worker(tickets=9), *trainer(batches=9))
    bench.evaluate()

    bench.say(*map(seal_of, bench.heard("worker-0", Ticket)))

    # Rows for three versions are ready: those of versions 0 and 1 are leased, those of version 2 wait for it.
    assert bench.ledger.ready == 8
    assert [lease.for_version for lease in bench.heard("trainer-0", Lease)] == [0, 1]


def test_evaluation_tickets_are_in_no_book_of_rollouts():
    """Tickets, positions and rows are the same with and without an evaluation."""
    with_it, without = Evaluating(), Bench()
    for bench in (with_it, without):
        bench.say(Published(0, 9, 0), *worker(), *trainer())
        if bench is with_it:
            bench.evaluate()
        bench.say(*map(seal_of, bench.heard("worker-0", Ticket)))

    assert with_it.ledger.totals == without.ledger.totals
    assert with_it.heard("trainer-0", Lease) == without.heard("trainer-0", Lease)
    assert with_it.buffer.used_bytes == without.buffer.used_bytes
    assert with_it.balanced


def test_the_tickets_of_a_dead_worker_are_handed_out_again_and_each_prompt_counts_once():
    bench = Evaluating()
    bench.say(Published(0, 9, 0), *worker(0), *worker(1))
    lost, kept = bench.tickets("worker-0"), bench.tickets("worker-1")
    assert len(lost) == len(kept) == 2

    bench.say(PeerDied("worker-0", lost[0].ticket))
    bench.say(*(evaluated(ticket, "worker-1") for ticket in kept))
    again = bench.tickets("worker-1")
    # The dead worker's last message was in flight.
    bench.say(evaluated(lost[0]), *(evaluated(ticket, "worker-1") for ticket in again))

    assert {(t.evaluation, t.position) for t in again} == {(t.evaluation, t.position) for t in lost}
    assert not {ticket.ticket for ticket in again} & {ticket.ticket for ticket in lost}
    assert sorted(ticket.attempt for ticket in again) == [1, 2], "only the ticket at which it died has an attempt more"
    assert [one.prompts for one in bench.book.found[0].files] == [5, 2]


def test_a_successor_that_connects_before_the_death_is_reported_frees_its_tickets():
    bench = Evaluating()
    bench.say(Published(0, 9, 0), *worker())
    lost = bench.tickets()

    bench.say(*worker(incarnation=2))

    assert len(bench.tickets()) == len(lost)


def test_a_repeated_result_counts_once_and_is_settled_again():
    bench = Evaluating()
    bench.say(Published(0, 9, 0), *worker())
    ticket = bench.tickets()[0]

    bench.say(evaluated(ticket), evaluated(ticket))
    bench.evaluate()

    assert [message.ticket for message in bench.heard("worker-0", Settled)].count(ticket.ticket) == 2
    assert bench.counts.duplicates == 1


def test_a_killed_buffer_makes_the_evaluation_anew_and_a_complete_one_never():
    bench = Evaluating()
    bench.say(Published(0, 9, 0), *worker())
    old = bench.tickets()
    bench.say(*map(evaluated, old))
    assert bench.buffer.evaluations.progress[0] > 0

    bench.restart()
    bench.say(*worker(incarnation=2))
    new = bench.tickets()
    bench.say(*(evaluated(ticket) for ticket in old), *map(evaluated, new))
    bench.evaluate()
    assert len(bench.book.found) == 1 and bench.book.found[0].total.prompts == 7
    bench.restart()
    bench.say(*worker(incarnation=3))

    assert not {ticket.ticket for ticket in old} & {ticket.ticket for ticket in new}
    assert bench.tickets() == []


def test_prompts_without_a_result_are_failed_and_never_wrong():
    bench = Evaluating()
    bench.say(Published(0, 9, 0), *worker())
    first, second = bench.tickets()

    bench.say(Failed("worker-0", first.ticket, "no reward", False), evaluated(second))
    bench.evaluate()

    (found,) = bench.book.found
    assert (found.total.prompts, found.total.failed) == (5, 2)
    # Without prompts 0 and 1 of the first file.
    assert found.total.pass_at_1 == pytest.approx((1 + 0 + 0.5 + 0 + 0.5) / 5)


def test_a_ticket_is_retried_up_to_the_limit_of_attempts():
    bench = Evaluating()
    bench.say(Published(0, 9, 0), *worker())
    attempts = []
    while tickets := bench.tickets():
        for ticket in tickets:
            if (ticket.evaluation, ticket.position) == (0, 0):
                attempts.append(ticket.attempt)
                bench.say(Failed("worker-0", ticket.ticket, "late", True, ticket.attempt))
            else:
                bench.say(evaluated(ticket))

    assert attempts == [1, 2, 3]
    assert bench.book.found[0].total.failed == bench.buffer.evaluations.failed == 2


@pytest.mark.parametrize(
    "change",
    [
        {"policy_version": 1},
        {"fingerprint": 8},
        {"results": lambda found: found * 2},
        {"results": lambda found: [msgspec.structs.replace(found[0], position=77)]},
        {"results": lambda found: [msgspec.structs.replace(found[0], reward=math.nan)]},
        {"results": lambda found: [msgspec.structs.replace(found[0], responses=3)]},
        {"results": lambda found: [msgspec.structs.replace(found[0], right=3)]},
    ],
)
def test_results_of_other_weights_and_impossible_ones_are_not_counted(change):
    bench = Evaluating()
    bench.say(Published(0, 9, 0), *worker())
    ticket, other = bench.tickets()
    report = evaluated(ticket)
    fields = {key: value(report.results) if callable(value) else value for key, value in change.items()}

    bench.say(msgspec.structs.replace(report, **fields))

    assert bench.buffer.evaluations.progress[0] == 0
    bench.say(evaluated(other))
    again = []
    while tickets := bench.tickets():
        again += tickets
        bench.say(*map(evaluated, tickets))
    assert (ticket.evaluation, ticket.position, 2) in [(each.evaluation, each.position, each.attempt) for each in again]
    assert bench.book.found[0].total.prompts == 7


def test_an_evaluation_of_superseded_or_rolled_back_weights_is_given_up():
    bench = Evaluating()
    bench.say(Published(2, 9, 0), *worker())
    old = bench.tickets()

    bench.say(Published(0, 11, 0, rollback=True))
    assert bench.buffer.evaluations.abandoned == 1
    bench.say(*(evaluated(ticket, version=2) for ticket in old))
    bench.evaluate(version=0, fingerprint=11)

    assert [(found.version, found.fingerprint) for found in bench.book.found] == [(0, f"{11:016x}")]
    assert bench.book.found[0].total.prompts == 7


def test_after_a_rollback_the_last_evaluation_is_that_of_a_version_that_is_left():
    bench = Evaluating()
    bench.say(Published(0, 9, 0), *worker())
    bench.evaluate()
    bench.say(Published(2, 10, 0))
    bench.evaluate(version=2, fingerprint=10)
    assert bench.buffer.evaluations.last.version == 2

    bench.say(Published(1, 11, 0, rollback=True))

    assert [found.version for found in bench.book.found] == [0, 2]
    assert bench.buffer.evaluations.last.version == 0
    # Its number is that of other weights from now on, which are not due.
    bench.buffer.evaluations.plan = plan(4)
    bench.say(Published(2, 12, 0))
    assert bench.buffer.evaluations.last.version == 0


def test_no_tickets_while_paused_or_draining():
    bench = Evaluating()
    bench.buffer.paused = True
    bench.say(Published(0, 9, 0), *worker())
    assert bench.tickets() == []
    bench.buffer.paused = False
    bench.say()
    assert len(bench.tickets()) == 2

    bench.say(Drain())
    bench.say(PeerDied("worker-0"), *worker(incarnation=2))

    assert bench.tickets() == []


def test_a_message_of_no_worker_or_of_the_wrong_kind_is_refused():
    bench = Evaluating()
    bench.say(Published(0, 9, 0), *worker())
    ticket = bench.tickets()[0]

    bench.say(msgspec.structs.replace(evaluated(ticket), worker="trainer-0"))
    # Of a worker that does not hold the ticket: it changes nothing.
    bench.say(evaluated(ticket, "worker-1"))
    bench.say(Evaluated("worker-0", 3, 0, 9, []), Sealed("worker-0", EVALUATION_TICKETS + 3, 4, 200, 1, 0, 9))
    bench.say(Hello("worker-7", 1))

    assert bench.buffer.refused == 4
    assert bench.buffer.evaluations.progress[0] == 0


def test_the_metrics_have_the_last_evaluation_by_file_and_the_progress_of_the_next(tmp_path):
    slab = MetricsSlab.create(tmp_path / "metrics", [SlotName("supervisor"), SlotName("buffer")])
    slab.begin("buffer", 0)
    metrics = BufferMetrics(slab.writer("buffer", 0))
    names = dict(zip(EVALUATION_LABELS, ("math", "aime"), strict=False))

    def read(name, **labels):
        metrics.publish(bench.buffer, 0.0, 1 << 20)
        return MetricsReader(slab, names=names).read().value(f"rlhfd_evaluation{name}", **labels)

    bench = Evaluating()
    bench.say(Published(0, 9, 0), *worker())
    first, second = bench.tickets()
    bench.say(Failed("worker-0", first.ticket, "no reward", False), evaluated(second))
    assert [read("_under_way_prompts", state=state) for state in ("done", "all")] == [4, 7]
    assert read("_pass_at_1_ratio", file="all") is None and read("_version") is None

    bench.evaluate()

    assert [read("_under_way_prompts", state=state) for state in ("done", "all")] == [0, 0]
    assert [read("_prompts_total", result=result) for result in ("evaluated", "failed")] == [5, 2]
    assert (read("s_total", result="complete"), read("_version")) == (1, 0)
    total, files = bench.book.found[-1].total, bench.book.found[-1].files
    assert read("_pass_at_1_ratio", file="all") == total.pass_at_1
    assert [read("_reward_mean", file=name) for name in ("math", "aime")] == [one.reward_mean for one in files]
    bench.book.found.append(msgspec.structs.replace(bench.book.found[0], plan="of other files"))
    assert read("_version") == 0, "of this plan"
    slab.close()


def test_an_evaluation_is_progress_of_a_run():
    """A long evaluation, in which no row is sealed and no step is taken, is no standstill."""
    watch = RunWatch()

    assert not any(watch.look(now_s, (0.0, 0.0, now_s // 8, 100.0), 10.0, is_judged=True) for now_s in range(60))
    assert any(watch.look(60.0 + now_s, (0.0, 0.0, 7.0, 100.0), 10.0, is_judged=True) for now_s in range(12))
