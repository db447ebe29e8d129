"""The replay buffer between real processes: each row once, after any kill; nothing is left behind."""

import dataclasses
import errno
import os
import pickle
import shutil
import signal
import threading
import time
import uuid
from pathlib import Path

import pytest
import torch

from pipeline import DetachedReplayBuffer
from pipeline.errors import (
    ArenaFullError,
    BufferClosedError,
    ConfigError,
    DeadlineError,
    DecodeError,
    FieldError,
    ShapeError,
)
from pipeline.experience.batching import make_experience_batch, remove_padding_in_sequences, split_experience_batch
from pipeline.experience.types import SCORE_FIELDS, BufferItem, Experience, ExperienceVL
from pipeline.replay.client import ROWS_PER_EXTENT, make_folder, sweep
from pipeline.storage.layout import LedgerLayout
from pipeline.storage.ledger import Ledger
from tests.support.daemon import is_alive
from tests.support.experiences import made_up
from tests.support.replay_crew import Crew, numbered, numbers_of

MIB = 1 << 20


@pytest.fixture(scope="module")
def crew():
    """Processes to start by one line; each test kills or ends those that it started."""
    crew = Crew()
    yield crew
    crew.close()


def buffer_of(sample_batch_size, limit=0, *, arena_bytes=4 * MIB, timeout_s=60.0):
    return DetachedReplayBuffer(sample_batch_size, limit, arena_bytes=arena_bytes, timeout_s=timeout_s)


def until(condition, timeout_s=30.0):
    """Wait on a condition that another process makes true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        # A short sleep: the condition may hold for a millisecond only.
        time.sleep(0.0005)


# One process.


def test_the_usage_of_the_seeds_page():
    with DetachedReplayBuffer(sample_batch_size=8, limit=16, arena_bytes=MIB) as buffer:
        buffer.append(numbered(range(5)))
        buffer.append(numbered(range(5, 10)))
        assert buffer.get_length() == 1

        batch = buffer.sample(to_device="cpu")

        assert isinstance(batch, Experience)
        assert numbers_of(batch) == [*range(8)]
        assert buffer.get_length() == 0


@pytest.mark.parametrize("ppo", [True, False], ids=["ppo", "grpo"])
def test_rows_come_out_as_they_went_in(ppo):
    experience = made_up(rows=6, ppo=ppo)
    expected = remove_padding_in_sequences(split_experience_batch(experience))

    with buffer_of(6) as buffer:
        buffer.append(experience)
        found = remove_padding_in_sequences(split_experience_batch(buffer.sample()))

    for row, (left, right) in enumerate(zip(found, expected, strict=True)):
        for name in ("sequences", "attention_mask", "action_log_probs", "base_action_log_probs", "action_mask",
                     "values", "kl", "advantages", "reward"):  # fmt: skip
            assert torch.equal(getattr(left, name), getattr(right, name)), (row, name)
        assert left.info.keys() == right.info.keys() == {"score", "group_mixed"}
        assert all(torch.equal(left.info[key], right.info[key]) for key in left.info)


@pytest.mark.parametrize("name", SCORE_FIELDS)
def test_a_score_of_one_number_an_action_stays_with_its_action(name):
    appends = []
    for actions in (3, 4):
        # The last column of each row is padding.
        mask = torch.arange(2 + actions).expand(2, -1) < 1 + actions
        numbers = torch.arange(2.0 * actions).reshape(2, actions)
        fields = {"sequences": torch.ones(mask.shape, dtype=torch.int64), "attention_mask": mask.long(),
                  "action_mask": mask[:, 2:], "action_log_probs": numbers, name: numbers}  # fmt: skip
        appends.append(Experience(**fields))

    with buffer_of(4) as buffer:
        for experience in appends:
            buffer.append(experience)
        batch = buffer.sample()

    expected = [[0, 0, 1], [0, 3, 4], [0, 1, 2], [4, 5, 6]]
    assert batch.action_log_probs.tolist() == getattr(batch, name).tolist() == expected


def test_items_of_different_lengths_go_in_with_or_without_padding():
    padded = split_experience_batch(numbered(range(4)))
    ragged = remove_padding_in_sequences(split_experience_batch(numbered(range(4, 8))))
    assert len({len(item.sequences) for item in ragged}) > 1

    with buffer_of(8) as buffer:
        buffer.extend(padded)
        buffer.extend(ragged)

        assert numbers_of(buffer.sample()) == [*range(8)]


def test_rows_without_a_mask_are_tokens_to_the_end():
    rows = [Experience(sequences=torch.arange(1, n + 1)[None], action_log_probs=torch.ones(1, 1)) for n in (2, 4)]

    with buffer_of(2) as buffer:
        for experience in rows:
            buffer.append(experience)
        batch = buffer.sample()

    assert batch.sequences.tolist() == [[0, 0, 1, 2], [1, 2, 3, 4]]
    assert batch.attention_mask.tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]
    assert rows[0].attention_mask is None


def test_rows_of_int32_without_a_mask_go_in_by_append_and_by_extend():
    rows = Experience(sequences=torch.ones(2, 3, dtype=torch.int32), action_log_probs=torch.ones(2, 1))

    with buffer_of(4) as buffer:
        buffer.append(rows)
        buffer.extend(split_experience_batch(rows))

        assert buffer.sample().attention_mask.tolist() == [[1, 1, 1]] * 4


def with_images(numbers, images, *, width=4, raw_images=None):
    """Return rows with `images` images each; the pixels are the number of their row."""
    text = numbered(numbers)
    owners = [number for number, count in zip(numbers, images, strict=True) for _ in range(4 * count)]
    return ExperienceVL(
        **{**vars(text), "info": {**text.info, "image_num": torch.tensor(images, dtype=torch.float32)}},
        pixel_values=torch.tensor(owners, dtype=torch.float32)[:, None].expand(-1, width) if owners else None,
        image_grid_thws=torch.tensor([[1, 2, 2]] * sum(images)) if owners else None,
        raw_images=raw_images,
    )


def test_images_go_with_their_rows_and_rows_may_have_none():
    with buffer_of(4, arena_bytes=MIB) as buffer:
        buffer.append(with_images([0, 1], [0, 0]))
        # The size of raw images is known only once they are encoded.
        buffer.append(with_images([2, 3], [1, 2], raw_images=[[b"2" * 90_000], [b"3", b"33"]]))
        with pytest.raises(
            FieldError, match=r"pixel_values: float32 \(B, 5\); in the rows before it is float32 \(B, 4\)"
        ):
            buffer.append(with_images([4], [1], width=5))
        with pytest.raises(FieldError, match="Experience and ExperienceVL do not go into one buffer"):
            buffer.append(numbered([5]))

        batch = buffer.sample()

        assert isinstance(batch, ExperienceVL) and numbers_of(batch) == [0, 1, 2, 3]
        assert batch.info["image_num"].tolist() == [0, 0, 1, 2]
        assert batch.pixel_values[:, 0].tolist() == [2.0] * 4 + [3.0] * 8
        assert batch.raw_images == [None, None, [b"2" * 90_000], [b"3", b"33"]]


def uncounted(experience):
    """Return rows whose `info` has no count of images, as that of rows without images."""
    return dataclasses.replace(experience, info={"number": experience.info["number"]})


@pytest.mark.parametrize("with_images_first", [True, False])
def test_rows_without_images_and_without_their_count_go_in_beside_others(with_images_first):
    batches = [with_images([0, 1], [1, 2]), uncounted(with_images([2, 3], [0, 0]))]
    with buffer_of(4) as buffer:
        for experience in batches if with_images_first else batches[::-1]:
            buffer.append(experience)

        batch = buffer.sample()

    order = numbers_of(batch)
    assert sorted(order) == [0, 1, 2, 3]
    assert batch.info["image_num"].tolist() == [{0: 1, 1: 2}.get(number, 0) for number in order]
    assert batch.pixel_values[:, 0].tolist() == [0.0] * 4 + [1.0] * 8


def test_the_largest_batch_of_single_rows_fits_into_the_books():
    layout = LedgerLayout(extents=8192, rows_per_extent=1)
    ledger = Ledger(memoryview(bytearray(layout.nbytes)), layout)
    records = [ledger.reserve(rows=1, prompts=0, offset=0, nbytes=64) for _ in range(8192)]
    for record in records:
        ledger.seal(record, rows=1, nbytes=64, checksum=1, policy_version=0, fingerprint=0, now_s=0.0)

    lease = ledger.lease([(record, [0]) for record in records])

    assert len(ledger.acknowledge(lease)) == 8192


def test_more_rows_than_an_extent_takes_go_in_in_order():
    with buffer_of(1300, arena_bytes=8 * MIB) as buffer:
        buffer.append(numbered(range(2600)))

        assert numbers_of(buffer.sample()) + numbers_of(buffer.sample()) == [*range(2600)]


def test_of_more_rows_than_an_extent_takes_an_error_says_how_many_are_added():
    with buffer_of(512, limit=2) as buffer:
        with pytest.raises(DeadlineError, match=r"^the first 1,024 of 2,048 rows are added: no room for 1,024 rows: "):
            buffer.append(numbered(range(2048)), timeout_s=0.5)

        assert buffer.stats().ready == 1024


def test_flush_clear_and_the_books():
    with buffer_of(4) as buffer:
        buffer.append(numbered(range(6)))
        assert buffer.flush() == 6
        assert buffer.get_length() == 2
        assert [numbers_of(buffer.sample()) for _ in range(2)] == [[0, 1, 2, 3], [4, 5]]
        buffer.append(numbered(range(7)))
        assert buffer.clear() == 7
        assert buffer.get_length() == 0
        buffer.append(numbered(range(20, 24)))

        assert numbers_of(buffer.sample()) == [20, 21, 22, 23]
        stats = buffer.stats()

    assert (stats.sealed, stats.delivered, stats.dropped, stats.ready, stats.leased) == (17, 10, 7, 0, 0)
    assert stats.free_bytes == 4 * MIB


def test_the_limit_holds_producers_back_and_a_timeout_says_what_for():
    with buffer_of(2, limit=1) as buffer:
        buffer.append(numbered(range(2)))
        with pytest.raises(DeadlineError, match="no room for 1 row: 1 batch is queued, the limit is 1"):
            buffer.append(numbered([2]), timeout_s=0.05)
        assert numbers_of(buffer.sample()) == [0, 1]
        with pytest.raises(DeadlineError, match="no batch for worker 3 in time: 0 rows wait, a batch takes 2"):
            buffer.sample(worker_rank=3, timeout_s=0.05)
        assert buffer.stats().sealed == 2


def test_experience_that_never_fits_is_an_error_at_once():
    with buffer_of(2, arena_bytes=64 << 10) as buffer:
        with pytest.raises(ArenaFullError, match=r"[\d,]+ B do not fit into an arena of 65,536 B"):
            buffer.append(made_up(rows=64, prompt=200, actions=200))
        # The padding does not count.
        wide = made_up(rows=2, prompt=3000, actions=1)
        wide.attention_mask[:, :2990] = 0
        buffer.append(wide)
        assert buffer.sample().sequences.shape[1] <= 11


def test_rows_that_fit_without_their_padding_go_in_where_no_room_can_become_free():
    with buffer_of(1024, arena_bytes=MIB) as buffer:
        buffer.append(padded_to(10_000, real=10_000, rows=8))
        assert buffer.stats().free_bytes < 4 * 10_000 * 16

        buffer.append(padded_to(10_000, real=8, rows=4))

        assert buffer.stats().ready == 12


def padded_to(width, *, real, rows):
    mask = torch.zeros(rows, width, dtype=torch.int64)
    mask[:, -real:] = 1
    return Experience(sequences=torch.ones(rows, width, dtype=torch.int64), attention_mask=mask,
                      action_log_probs=torch.zeros(rows, 4), action_mask=torch.ones(rows, 4, dtype=torch.bool),
                      reward=torch.zeros(rows))  # fmt: skip


def test_rows_of_lightrft_have_scores_of_one_number():
    """Values, returns and advantages have shape (1,), as its page says; rows of one action also have A = 1."""
    items = [
        BufferItem(
            sequences=torch.arange(1, 4 + row),
            action_log_probs=torch.full((2 + row,), -0.5),
            base_action_log_probs=torch.full((2 + row,), -0.25),
            values=torch.tensor([row + 0.5]),
            returns=torch.tensor([row + 1.0]),
            advantages=torch.tensor([row - 1.0]),
            attention_mask=torch.ones(3 + row, dtype=torch.long),
            action_mask=torch.ones(2 + row, dtype=torch.bool),
            info={"reward": 1.0, "response_length": 2 + row},
        )
        for row in range(2)
    ]
    with buffer_of(2) as buffer:
        buffer.extend(items)
        batch = buffer.sample()
    assert batch.sequences.tolist() == [[0, 1, 2, 3], [1, 2, 3, 4]]
    assert [batch.values.tolist(), batch.returns.tolist()] == [[[0.5], [1.5]], [[1.0], [2.0]]]
    assert batch.advantages.tolist() == [[-1.0], [0.0]]
    assert batch.info["response_length"].tolist() == [2, 3]


def test_a_packed_batch_and_one_without_actions_go_in_too():
    items = remove_padding_in_sequences(split_experience_batch(numbered(range(2))))
    expected = make_experience_batch(items)
    with buffer_of(2) as buffer:
        buffer.append(make_experience_batch(items, packing_samples=True))
        batch = buffer.sample()
    for name in ("sequences", "attention_mask", "action_mask", "action_log_probs", "reward"):
        assert torch.equal(getattr(batch, name), getattr(expected, name)), name

    with buffer_of(2) as buffer:
        buffer.extend([BufferItem(torch.tensor([5, 6, 7])), BufferItem(torch.tensor([8]))])
        batch = buffer.sample()
    assert batch.sequences.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert batch.attention_mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert batch.action_log_probs is None


def test_numbers_that_are_not_finite_are_refused_where_they_count():
    broken = numbered(range(2))
    broken.action_log_probs[1, 3] = float("nan")
    with buffer_of(2) as buffer:
        free_bytes = buffer.stats().free_bytes
        buffer.append(broken)
        assert numbers_of(buffer.sample()) == [0, 1], "row 1 has two actions: column 3 is padding"

        broken.action_log_probs[1, 1] = float("nan")
        with pytest.raises(FieldError, match="row 1: action_log_probs is nan in column 1 of 4; it must be finite"):
            buffer.append(broken)

        assert (buffer.stats().sealed, buffer.stats().free_bytes) == (2, free_bytes)


def test_bad_input_is_refused_by_name_and_takes_no_room():
    with buffer_of(2) as buffer:
        free_bytes = buffer.stats().free_bytes
        with pytest.raises(FieldError, match="append takes an Experience, not a list; rows go into extend"):
            buffer.append(split_experience_batch(numbered(range(2))))
        with pytest.raises(FieldError, match="row 1 is a NoneType, not a BufferItem"):
            buffer.extend([*split_experience_batch(numbered([0])), None])
        with pytest.raises(ShapeError, match="extend: no items"):
            buffer.extend([])
        with pytest.raises(ShapeError, match="without rows"):
            buffer.append(Experience(sequences=torch.zeros((0, 3), dtype=torch.long)))
        with pytest.raises(ShapeError, match="sequences has shape"):
            buffer.append(Experience(sequences=torch.zeros(3, dtype=torch.long)))
        broken = numbered(range(2))
        broken.values = broken.values[:, :-1]
        with pytest.raises(ShapeError, match="values"):
            buffer.append(broken)
        buffer.append(numbered([0]))
        other = numbered([1])
        other.kl = other.values
        with pytest.raises(FieldError, match=r"kl: float32 \(B, A\); in the rows before it is missing"):
            buffer.append(other)
        buffer.append(numbered([1]))
        assert numbers_of(buffer.sample()) == [0, 1]
        assert buffer.stats().free_bytes == free_bytes

    for arguments in ((0,), (True,), (2.0,), (8, -1), (8193,)):
        with pytest.raises(FieldError, match=r"must be an int from \d to [\d,]+, got"):
            DetachedReplayBuffer(*arguments)
    with pytest.raises(FieldError, match="timeout_s must be None or a number of seconds, got -1"):
        DetachedReplayBuffer(8, timeout_s=-1)
    with pytest.raises(ConfigError, match="does not fit"):
        DetachedReplayBuffer(8, arena_bytes=1 << 60)


def packed(experience):
    return make_experience_batch(split_experience_batch(experience), packing_samples=True)


@pytest.mark.parametrize("rows", [2, ROWS_PER_EXTENT + 1], ids=["one append", "several appends"])
@pytest.mark.parametrize("form", [lambda experience: experience, packed], ids=["padded", "packed"])
def test_what_the_library_takes_and_shared_memory_does_not_is_refused_and_takes_no_room(form, rows):
    """Whatever way a batch goes: a large one, and a packed one, are split and batched anew on theirs."""
    made = form(numbered(range(rows)))
    wrong = [
        ({"info": {"note": ["math"] * rows}}, r"info\['note'\] is a list; shared memory carries only tensors"),
        ({"info": {"note": [1.5] * rows}}, r"info\['note'\] is a list"),
        ({"info": {"note": "math"}}, r"info\['note'\] is a str"),
        ({"info": {"score": 0.5}}, r"info\['score'\] is a float"),
        ({"info": {7: torch.ones(rows)}}, "info has the name 7, a int"),
        ({"sequences": floats(made.sequences)}, "sequences is torch.float32; shared memory carries token ids"),
        ({"sequences": None}, "sequences is a NoneType"),
    ]
    with buffer_of(2) as buffer:
        free_bytes = buffer.stats().free_bytes

        for change, message in wrong:
            with pytest.raises(FieldError, match=message):
                buffer.append(dataclasses.replace(made, **change))

        assert (buffer.stats().sealed, buffer.stats().free_bytes) == (0, free_bytes)
        buffer.append(made)
        assert buffer.stats().sealed == rows


def floats(sequences):
    return [row.float() for row in sequences] if isinstance(sequences, list) else sequences.float()


def test_rows_that_shared_memory_does_not_take_are_refused_and_take_no_room():
    items = split_experience_batch(numbered(range(2)))

    def with_info(*values):
        return [dataclasses.replace(item, info={"it": value}) for item, value in zip(items, values, strict=True)]

    wrong = [
        (with_info("math", "code"), r"info\['it'\] is a list; shared memory carries only tensors, one element a row"),
        (with_info(1.5, "none"), r"info\['it'\] is a list"),
        (with_info(torch.ones(1), torch.ones(2)), r"info\['it'\] is a list"),
        ([BufferItem(torch.ones(3)), BufferItem(torch.ones(2))], "sequences is torch.float32; shared memory"),
    ]
    with buffer_of(2) as buffer:
        free_bytes = buffer.stats().free_bytes

        for rows, message in wrong:
            with pytest.raises(FieldError, match=message):
                buffer.extend(rows)

        assert (buffer.stats().sealed, buffer.stats().free_bytes) == (0, free_bytes)
        buffer.extend(with_info(1.5, 2.5))
        assert buffer.sample().info["it"].tolist() == [1.5, 2.5]


def test_rows_with_a_grid_of_one_dimension_go_in_and_a_list_of_grids_does_not():
    grid = torch.tensor([1, 2, 2])
    batch = ExperienceVL(
        sequences=torch.ones(2, 3, dtype=torch.long),
        attention_mask=torch.ones(2, 3, dtype=torch.long),
        pixel_values=torch.arange(24.0).reshape(8, 3),
        image_grid_thws=torch.stack([grid, grid]),
    )
    items = split_experience_batch(batch)
    assert items[0].image_grid_thws.shape == (3,)

    with buffer_of(2) as buffer:
        with pytest.raises(FieldError, match="image_grid_thws: only tensors are stored, got list"):
            buffer.append(dataclasses.replace(batch, image_grid_thws=[grid, grid]))
        buffer.extend(items)
        got = buffer.sample()

    assert torch.equal(got.image_grid_thws, batch.image_grid_thws)
    assert torch.equal(got.pixel_values, batch.pixel_values)
    assert got.info["image_num"].tolist() == [1.0, 1.0]


def test_damaged_rows_are_an_error_once_and_dropped():
    with buffer_of(2) as buffer:
        buffer.append(numbered([0]))
        buffer.append(numbered([1]))
        buffer.append(numbered([2]))
        buffer._arena.payload[100] ^= 1

        with pytest.raises(DecodeError, match="1 of 2 appends are unusable"):
            buffer.sample()

        assert numbers_of(buffer.sample()) == [1, 2]
        assert buffer.stats().dropped == 1


def test_threads_of_one_process_share_a_buffer():
    taken = []
    with buffer_of(3, limit=2) as buffer:

        def produce(first):
            for number in range(first, first + 30):
                buffer.append(numbered([number]))

        def consume():
            for _ in range(10):
                taken.extend(numbers_of(buffer.sample()))

        threads = [threading.Thread(target=produce, args=(first,)) for first in (0, 30)]
        threads += [threading.Thread(target=consume) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

    assert sorted(taken) == [*range(60)]


def test_closing_wakes_a_thread_of_this_process_and_ends_an_iteration():
    buffer = buffer_of(3)
    ended = []

    def consume():
        for _ in buffer:
            pass
        ended.append(True)

    thread = threading.Thread(target=consume)
    thread.start()
    until(lambda: buffer._links._busy)

    buffer.close()
    thread.join(10)

    assert ended == [True]
    with pytest.raises(BufferClosedError, match="closed by this process"):
        buffer.append(numbered([1]))
    buffer.close()


def test_drain_delivers_the_rest_before_the_end():
    buffer = buffer_of(4)
    buffer.append(numbered(range(6)))
    taken = []
    thread = threading.Thread(target=lambda: taken.extend(numbers_of(batch) for batch in buffer))
    thread.start()

    buffer.close(drain_s=30)
    thread.join(10)

    assert taken == [[0, 1, 2, 3], [4, 5]]


def test_everything_in_it_is_private_and_gone_after_the_end():
    with buffer_of(2) as buffer:
        buffer.append(numbered(range(2)))
        buffer.sample()
        folder = buffer.path
        assert folder.stat().st_mode & 0o777 == 0o700
        assert {
            path.name: path.stat().st_mode & 0o077 for path in folder.iterdir() if path.stat().st_mode & 0o077
        } == {}

    assert not folder.exists()


def test_a_forgotten_buffer_ends_with_its_object():
    buffer = buffer_of(2)
    folder, server = buffer.path, buffer._server.pid

    del buffer

    until(lambda: not folder.exists() and not is_alive(server))


# Several processes.


def test_the_object_travels_pickled_and_by_its_path(crew):
    with buffer_of(2, limit=5, timeout_s=50.0) as buffer:
        member = crew.start("use_pickled", pickled=pickle.dumps(buffer).hex(), number=1)
        assert crew.wait(member, "options") == [[2, 5, 50.0]]
        crew.wait(member, "done")
        other = DetachedReplayBuffer.attach(buffer.path)
        other.append(numbered([2]))
        # This process does not own the buffer: closing ends its own connection alone.
        other.close()

        assert numbers_of(buffer.sample()) == [1, 2]


@pytest.mark.integration
def test_four_producers_and_three_consumers_see_each_row_once(crew):
    with buffer_of(16, limit=8) as buffer:
        producers = [
            crew.start("produce", path=str(buffer.path), first=10_000 * index, count=750) for index in range(4)
        ]
        consumers = [crew.start("consume", path=str(buffer.path)) for _ in range(3)]
        for member in producers:
            crew.wait(member, "done")
        buffer.flush()
        until(lambda: buffer.stats().delivered == 3000)
        assert buffer.stats().sealed == 3000

    streams = []
    for member in consumers:
        crew.wait(member, "done")
        streams.append([number for batch in crew.heard(member, "batch") for number in batch])
    assert sorted(number for stream in streams for number in stream) == [
        number for index in range(4) for number in range(10_000 * index, 10_000 * index + 750)
    ]
    for stream in streams:
        for index in range(4):
            own = [number for number in stream if number // 10_000 == index]
            assert own == sorted(own)


@pytest.mark.integration
def test_nothing_is_lost_or_doubled_while_clients_and_server_are_killed(crew):
    sealed, taken, killed_batches = set(), [], 0
    with buffer_of(8, arena_bytes=MIB) as buffer:
        path = str(buffer.path)
        steady = crew.start("produce", path=path, first=0, count=600)
        consumers = [crew.start("consume", path=path)]
        for turn in range(6):
            producer = crew.start("produce", path=path, first=10_000 * (turn + 1), count=5000, rows=1)
            writing = crew.start("hang_in_append", path=path, number=999_000 + turn)
            consumers.append(crew.start("consume", path=path))
            crew.wait(producer, "appended", count=5 + 7 * turn)
            crew.wait(writing, "writing")
            crew.wait(consumers[-1], "batch")
            if turn % 2:
                os.kill(buffer._server.pid, signal.SIGKILL)
            for member in (producer, writing, consumers[-1]):
                crew.kill(member)
            appended = [number for batch in crew.heard(producer, "appended") for number in batch]
            # An append that was sealed when the producer died, but not yet reported by it.
            sealed |= {*appended, appended[-1] + 1}
            killed_batches += 1
        crew.wait(steady, "done")
        sealed |= {number for batch in crew.heard(steady, "appended") for number in batch}
        buffer.flush()
        until(lambda: buffer.stats().ready + buffer.stats().leased == 0)
        stats = buffer.stats()

    crew.wait(consumers[0], "done")
    taken = [number for member in consumers for batch in crew.heard(member, "batch") for number in batch]
    assert len(taken) == len(set(taken)), "a row came twice"
    assert set(taken) <= sealed, "a row came that was never appended whole"
    # A killed consumer may have taken one batch without reporting it.
    assert stats.delivered - len(taken) <= 8 * killed_batches
    assert stats.sealed == stats.delivered and len(sealed) - 6 <= stats.sealed <= len(sealed)


def test_a_batch_of_a_killed_consumer_goes_to_the_next(crew):
    with buffer_of(2) as buffer:
        buffer.append(numbered(range(4)))
        member = crew.start("hang_in_sample", path=str(buffer.path))
        assert crew.wait(member, "holding") == [[0, 1]]
        assert buffer.stats().leased == 2

        crew.kill(member)

        until(lambda: buffer.stats().leased == 0)
        assert [numbers_of(buffer.sample()) for _ in range(2)] == [[0, 1], [2, 3]]


def test_a_batch_in_hand_survives_the_server(crew):
    with buffer_of(2) as buffer:
        buffer.append(numbered(range(4)))
        member = crew.start("hang_in_sample", path=str(buffer.path))
        crew.wait(member, "holding")
        server = buffer._server.pid

        os.kill(server, signal.SIGKILL)

        assert numbers_of(buffer.sample()) == [2, 3]
        assert buffer._server.pid != server and buffer.stats().leased == 2
        crew.kill(member)
        assert numbers_of(buffer.sample()) == [0, 1]


def test_room_of_a_killed_producer_is_given_back_and_its_socket_is_gone(crew):
    with buffer_of(1) as buffer:
        free_bytes, own = buffer.stats().free_bytes, {*buffer.path.glob("client-*.sock")}
        member = crew.start("hang_in_append", path=str(buffer.path), number=5)
        crew.wait(member, "writing")
        assert buffer.stats().free_bytes < free_bytes
        assert len({*buffer.path.glob("client-*.sock")} - own) == 1

        crew.kill(member)

        until(lambda: buffer.stats().free_bytes == free_bytes)
        assert buffer.stats().sealed == 0
        until(lambda: {*buffer.path.glob("client-*.sock")} == own)


def test_a_fork_does_not_keep_its_dead_parent_alive(crew):
    with buffer_of(1) as buffer:
        free_bytes = buffer.stats().free_bytes
        member = crew.start("fork_and_hang_in_append", path=str(buffer.path))
        crew.wait(member, "writing")
        (child,) = crew.heard(member, "forked")

        crew.kill(member)

        until(lambda: buffer.stats().free_bytes == free_bytes)
        crew.kill(child)


@pytest.mark.parametrize("call", ["sample", "append"])
def test_closing_wakes_who_waits_in_another_process(crew, call):
    buffer = buffer_of(2, limit=1)
    if call == "append":
        buffer.append(numbered(range(2)))
    member = crew.start("wait_for", path=str(buffer.path), call=call)
    crew.wait(member, "waiting")

    buffer.close()

    ((kind, text),) = crew.wait(member, "error", timeout_s=10)
    assert kind == "BufferClosedError"
    assert f"closed by its owner, pid {os.getpid()}" in text
    crew.wait(member, "done")


def test_a_fork_uses_the_buffer_like_any_other_process(crew):
    with buffer_of(21) as buffer:
        crew.wait(crew.start("fork_and_append", path=str(buffer.path), first=0), "done")

        assert sorted(numbers_of(buffer.sample())) == [*range(21)]


def test_a_killed_owner_takes_server_and_folder_along(crew):
    owner = crew.start("own", sample_batch_size=2)
    ((path, server),) = crew.wait(owner, "made")
    buffer = DetachedReplayBuffer.attach(path)
    assert buffer.stats().ready == 1

    crew.kill(owner)

    with pytest.raises(BufferClosedError, match=f"its owner, pid {owner}, died|owner, pid {owner}, or ended with it"):
        buffer.sample(timeout_s=20)
    until(lambda: not Path(path).exists() and not is_alive(server))
    buffer.close()
    with pytest.raises(BufferClosedError, match="no replay buffer in"):
        DetachedReplayBuffer.attach(path)


def test_an_owner_that_ends_without_closing_leaves_nothing(crew):
    owner = crew.start("own", sample_batch_size=2, ends=True)
    ((path, server),) = crew.wait(owner, "made")
    crew.wait(owner, "done")

    until(lambda: not Path(path).exists() and not is_alive(server))


def test_what_a_killed_owner_and_a_killed_server_left_is_swept(crew):
    owner = crew.start("own", sample_batch_size=2)
    ((path, server),) = crew.wait(owner, "made")
    os.kill(server, signal.SIGSTOP)
    crew.kill(owner)
    os.kill(server, signal.SIGKILL)
    until(lambda: not is_alive(server))
    assert Path(path, "arena").exists()
    with buffer_of(2) as living:
        # The sweep removes the dead buffer's folder and no living one's.
        with buffer_of(2) as buffer:
            assert not Path(path).exists()
            buffer.append(numbered([1]))
        living.append(numbered([1]))


@pytest.mark.parametrize(("suffix", "held", "age_s", "stays"), [
    (".new", (), 3600, False),  # killed before it had locked the folder
    (".new", (), 0, True),  # it may be about to lock it
    ("", ("arena",), 0, False),  # killed while it removed the folder, the lock first
])  # fmt: skip
def test_a_folder_that_a_killed_process_left_without_a_lock_is_swept(suffix, held, age_s, stays):
    folder = Path(f"/dev/shm/rlhfd-replay-{os.getuid()}-{uuid.uuid4().hex[:16]}{suffix}")
    folder.mkdir(mode=0o700)
    try:
        for name in held:
            (folder / name).touch()
        os.utime(folder, (time.time() - age_s,) * 2)

        sweep()

        assert folder.exists() == stays
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_a_server_that_dies_again_and_again_is_given_up_with_its_reason():
    with buffer_of(2) as buffer:
        for _ in range(5):
            assert buffer.stats().sealed == 0
            os.kill(pid := buffer._server.pid, signal.SIGKILL)
            until(lambda pid=pid: not is_alive(pid))

        with pytest.raises(
            BufferClosedError, match=r"its server, pid \d+, ended with -9, for the 5th time in a minute"
        ):
            buffer.sample()


def test_a_buffer_whose_server_is_given_up_is_closed_also_with_a_wait_for_its_rows(caplog):
    buffer = buffer_of(2)
    buffer._server._give_up("its server ended")

    buffer.close(drain_s=60.0)

    assert not buffer.path.exists()
    assert caplog.messages[-1].startswith("replay buffer closed before it was empty: ")


def test_a_server_that_cannot_be_started_leaves_no_folder(monkeypatch):
    def refuse(*arguments, **keywords):
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    made = []
    monkeypatch.setattr("subprocess.Popen", refuse)
    monkeypatch.setattr("pipeline.replay.buffer.make_folder", lambda *of: made.append(make_folder(*of)) or made[-1])

    with pytest.raises(OSError, match="Resource temporarily unavailable"):
        buffer_of(2)

    assert not made[0][0].exists()


def test_a_server_that_is_given_up_ends_all_waits_also_where_shared_memory_is_full(monkeypatch):
    def full(path, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with buffer_of(2) as buffer:
        monkeypatch.setattr("pipeline.replay.server.write_private", full)

        buffer._server._give_up("its server ended")

        with pytest.raises(BufferClosedError, match=f"closed by its owner, pid {os.getpid()}, or ended with it"):
            buffer.sample()


def test_the_record_of_a_clients_lease_has_its_room_before_shared_memory_can_be_full():
    with buffer_of(2) as buffer:
        buffer.append(numbered(range(2)))

        assert [path.stat().st_size for path in buffer.path.glob("client-*.lock")] == [8]


def test_a_client_for_which_shared_memory_has_no_room_is_told_so(monkeypatch):
    with buffer_of(2) as buffer:
        monkeypatch.setattr("os.pwrite", lambda *arguments: os.write(full, b"x"))
        with open("/dev/full", "wb", buffering=0) as opened:
            full = opened.fileno()

            with pytest.raises(ConfigError, match="no room in /dev/shm to connect to a replay buffer: No space left"):
                buffer.append(numbered(range(2)))


def test_a_server_loads_no_torch():
    with buffer_of(2) as buffer:
        assert buffer.stats().sealed == 0
        maps = Path(f"/proc/{buffer._server.pid}/maps").read_text()

    assert "zmq" in maps and "torch" not in maps
