"""Forged messages against the buffer's decisions, as nothing but a process of the same user could send them."""

import itertools
import random

import pytest

from pipeline.errors import DecodeError, GaveUpError
from pipeline.runtime import messages
from pipeline.runtime.messages import Ack, Published, Release, Sealed
from tests.fuzz.mutation import damaged, forged, wrong_types
from tests.support.protocol import Bench, trainer, worker

pytestmark = pytest.mark.fuzz

NAMES = ("worker-0", "worker-1", "trainer-0")
_FORGED = 20_000
_FORGED_IN_FULL = 1_000_000
_RUN = 500


def count(request, short, full):
    return full if request.config.getoption("--fuzz") else short


@pytest.fixture
def rng(request):
    return random.Random(request.config.getoption("randomly_seed", 0))


def test_no_bytes_crash_the_decoder(request, rng):
    seeds = [messages.encode(forged(rng, kind, NAMES, range(100))) for kind in messages.KINDS for _ in range(10)]
    refused = 0

    total = count(request, 50_000, 1_000_000)
    for _ in range(total):
        data = wrong_types(rng, rng.choice(messages.KINDS)) if rng.random() < 0.3 else damaged(rng, rng.choice(seeds))
        try:
            messages.decode(data)
        except DecodeError:
            refused += 1

    # Both ways were taken, or this has tried nothing.
    assert total // 4 < refused < total


@pytest.mark.timeout(1200)
def test_forged_messages_neither_crash_the_buffer_nor_unbalance_its_books(request, rng):
    tried = refused = trained = 0
    while tried < count(request, _FORGED, _FORGED_IN_FULL):
        bench = Bench(capacity_bytes=1 << 16)
        bench.say(Published(0, 9, 0), *worker(0), *worker(1), *trainer())
        for _ in range(_RUN):
            tried += 1
            try:
                bench.say(_honest(rng, bench) if rng.random() < 0.3 else _forged(rng, bench))
            except GaveUpError:
                # Prompts that all fail, and an arena filled with nothing: an end with its reason, and no crash.
                break
            assert bench.balanced
            bench.now_s += rng.random() * 10
            del bench.sent[:-50]
        refused += bench.buffer.refused
        _same_after_restart(bench)
        trained += bench.ledger.totals.trained

    assert refused > tried // 20 and trained


def _forged(rng, bench):
    known = [*bench.ledger.extents, *bench.ledger.leases, 0, 1, 2, 4, 8, 9, 2**31, bench.ledger.totals.policy_version]
    kinds = [kind for kind in messages.KINDS if kind is not messages.Drain or rng.random() < 0.01]
    return forged(rng, rng.choice(kinds), NAMES, known)


def _honest(rng, bench):
    """Return the next messages of a peer, so that there is work to disturb."""
    reserved = list(bench.ledger.reserved_extents())
    leases = list(bench.ledger.leases)
    version = bench.ledger.totals.policy_version
    said = [Published(version + 1, 9, bench.ledger.totals.leases), *worker(0, incarnation=rng.randrange(3)), *trainer()]
    said += [
        Sealed(f"worker-{record.owner}", record.ticket, record.rows, 64, 1, version, 9)
        for record in itertools.islice(reserved, 4)
    ]
    said += [rng.choice((Ack("trainer-0", lease), Release("trainer-0", lease, 1))) for lease in leases]
    return rng.choice(said)


def _same_after_restart(bench):
    before = bench.ledger.totals, bench.ledger.ready, bench.ledger.leased, bench.ledger.reserved
    bench.restart()
    assert (bench.ledger.totals, bench.ledger.ready, bench.ledger.leased, bench.ledger.reserved) == before
    assert bench.balanced
