"""The transport benchmark: its work, worked out by hand, and ways that run for real."""

import os
import signal
import time

import numpy as np
import pytest
import torch

import benches.contest
from benches.contest import BARE, BOUND, DAEMON, OWN, RAGGED, RAW, STREAMER, Contestant, FailedError, Runner, running
from benches.peers import RAY, REVERB
from benches.transport import contest, floors, speed, table
from benches.ways.daemon import arrays_of, experience_of
from benches.workload import SHAPES, appends, rebatch, touch
from pipeline.experience import codec


def test_an_append_is_what_it_says():
    shape = SHAPES["tiny"]
    (append,) = appends(shape, 1, seed=3)

    mask, actions = append.arrays["attention_mask"], append.arrays["action_mask"]
    lengths, responses = mask.sum(axis=1), actions.sum(axis=1)

    assert append.arrays["sequences"].shape == (8, lengths.max()) and actions.shape == (8, responses.max())
    assert ((lengths - responses >= 4) & (lengths - responses <= 8)).all()
    assert ((responses >= 4) & (responses <= 8)).all()
    # Tokens and mask of 8 bytes, four numbers of 4 and a mask of 1 an action, a reward a row.
    assert append.nbytes == 16 * lengths.sum() + 17 * responses.sum() + 4 * 8
    assert append.tokens == append.arrays["sequences"][mask == 1].sum() > 0
    assert not append.arrays["sequences"][mask == 0].any()
    assert np.array_equal(appends(shape, 1, seed=3)[0].arrays["kl"], append.arrays["kl"])
    assert not np.array_equal(appends(shape, 1, seed=4)[0].arrays["reward"], append.arrays["reward"])


def test_rebatching_pads_on_the_left():
    one = {"sequences": np.array([[1, 2]]), "reward": np.array([0.5], np.float32)}
    two = {"sequences": np.array([[3, 4, 5], [0, 0, 6]]), "reward": np.array([1.5, 2.5], np.float32)}

    batch = rebatch([one, two])

    assert batch["sequences"].tolist() == [[0, 1, 2], [3, 4, 5], [0, 0, 6]]
    assert batch["reward"].tolist() == [0.5, 1.5, 2.5]
    assert touch(batch) == 21


def test_peers_and_rlhfd_make_the_same_batch():
    made = appends(SHAPES["tiny"], 2)
    memory = [memoryview(bytearray(1 << 16)) for _ in made]
    encoded = [codec.encode(experience_of(append.arrays), room) for append, room in zip(made, memory, strict=True)]
    readers = [codec.ExtentReader(room[: size.nbytes]) for room, size in zip(memory, encoded, strict=True)]

    ours = arrays_of(codec.gather_padded([(reader, range(8)) for reader in readers]))

    theirs = rebatch([append.arrays for append in made])
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_images_go_along():
    (append,) = appends(SHAPES["vl"], 1)

    experience = experience_of(append.arrays)

    assert experience.image_grid_thws.prod(dim=1).sum() == len(experience.pixel_values)
    assert torch.equal(experience.pixel_values, torch.from_numpy(append.arrays["pixel_values"]))


def test_a_row_of_the_table_is_relative_to_what_stands_beside_it():
    def measured(seconds):
        return {"seconds": seconds, "nbytes": 2_000_000_000, "items": 100, "cpu_s": 4.0, "latencies": []}

    results = {
        BOUND: [measured(1.0), measured(2.0)],
        DAEMON: [measured(2.0), measured(8.0)],
        BARE: [measured(1.5), measured(2.0)],
    }

    made = table(results, "small", 1)

    assert speed(results[DAEMON]).values == (1.0, 0.25)
    # Half of the bound in one round, a quarter in the other; of bare three and one quarter.
    assert made.rows[2][1:] == ("0.625 (0.250 to 1.00)", "0.375", "0.500", "", "", "31.2", "2.00")


def test_the_ratios_asked_of_rlhfd_stand_beside_those_measured():
    def measured(seconds):
        return {"seconds": seconds, "nbytes": 1000}

    results = {
        DAEMON: [measured(2.0), measured(4.0)],
        RAGGED: [measured(1.0), measured(2.0)],
        BARE: [measured(1.0), measured(1.0)],
    }

    rows = list(floors(results, {BARE: 0.6, RAW: 1.5}, "small, 64 rows an append", 2))

    # Raw ZeroMQ was not measured.
    assert rows == [
        ("rlhfd against bare, small, 64 rows an append, 2 to 1", "0.600", "0.375 (0.250 to 0.500)"),
        ("rlhfd, without padding against bare, small, 64 rows an append, 2 to 1", "0.600", "0.750 (0.500 to 1.00)"),
    ]


def test_peers_are_pinned_and_torch_is_ours():
    assert f"torch=={torch.__version__.partition('+')[0]}" in RAY.requirements
    assert all("==" in requirement for requirement in RAY.requirements + REVERB.requirements)


@pytest.mark.integration
@pytest.mark.parametrize("append_rows", [8, pytest.param(64, marks=pytest.mark.variant)])
def test_ways_deliver_what_was_sent(append_rows):
    ways = (BOUND, BARE, DAEMON, RAGGED, OWN, RAW, STREAMER)

    with running(ways, 1, append_rows) as (runners, failed):
        results = contest(runners, "tiny", 0.05, 2)
        waits = runners[DAEMON].measure("tiny", 4, pause_s=0.001)
        # CPU seconds are counted in hundredths.
        spent = [runners[way].measure("tiny", 4000) for way in (DAEMON, BARE)]

    assert not failed
    assert {way: len(found) for way, found in results.items()} == dict.fromkeys(ways, 2)
    # `benches.ways` compares the received tokens with the sent ones.
    assert all(one["nbytes"] > 0 and one["seconds"] > 0 for found in results.values() for one in found)
    assert all(one["items"] % append_rows == 0 for found in results.values() for one in found)
    assert len(waits["latencies"]) == 2 and all(0 < wait < 60 for wait in waits["latencies"])
    for busy in spent:
        assert busy["parts"].keys() == {"buffer"} and 0 < busy["parts"]["buffer"] < busy["cpu_s"]


@pytest.mark.integration
def test_a_way_that_ends_is_told_and_costs_nothing_else():
    with pytest.raises(FailedError, match="ended with 1"):
        Runner(Contestant("nonesuch", "no such way"), 1).begin(time.monotonic() + 60.0)

    with running([Contestant("nonesuch", "no such way")], 1) as (runners, failed):
        pass

    assert runners == {} and [*failed] == ["no such way"]


@pytest.mark.integration
def test_ways_that_never_answer_share_one_deadline_and_leave_nothing(monkeypatch):
    """A way that stands still from its start on, beside its process that does not: the leak check looks for that."""
    monkeypatch.setattr(benches.contest, "_START_S", 1.0)
    make = Runner.__init__

    def standing(runner, *arguments):
        make(runner, *arguments)
        os.kill(runner._process.pid, signal.SIGSTOP)

    monkeypatch.setattr(Runner, "__init__", standing)
    deadlines_s, begin = [], Runner.begin
    monkeypatch.setattr(
        Runner, "begin", lambda runner, deadline_s: deadlines_s.append(deadline_s) or begin(runner, deadline_s)
    )

    with running([BOUND, BARE, RAW], 1) as (runners, failed):
        pass

    assert runners == {} and [*failed] == [way.title for way in (BOUND, BARE, RAW)]
    assert len(deadlines_s) == 3 and len({*deadlines_s}) == 1
