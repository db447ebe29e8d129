"""The quarantine: the copies of a damaged or deadly batch, and their display."""

import stat
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

from pipeline.buffer.quarantine import Quarantine
from pipeline.errors import DecodeError
from pipeline.experience import codec
from pipeline.experience.saved_rows import read_quarantine
from pipeline.storage import extent_file
from pipeline.storage.arena import Arena
from pipeline.storage.layout import LedgerLayout
from pipeline.storage.records import ExtentRecord
from tests.support.experiences import made_up

LAYOUT = LedgerLayout(extents=4, rows_per_extent=4)


@pytest.fixture
def place(tmp_path):
    """An arena of two sealed extents that is mapped without its payload, as the buffer has it, and a quarantine."""
    Arena.create(tmp_path / "arena", payload_bytes=1 << 20, ledger_bytes=LAYOUT.nbytes, layout=LAYOUT.identity)
    whole, arena = Arena(tmp_path / "arena"), Arena(tmp_path / "arena", payload=False)
    experiences = [made_up(rows=4, seed=seed) for seed in (3, 4)]
    records = []
    for ticket, experience in enumerate(experiences):
        offset = ticket * (1 << 16)
        encoded = codec.encode(experience, whole.extent(offset, 1 << 16))
        records.append(
            ExtentRecord(
                ticket, rows=4, prompts=2, ticket=ticket, position=10 + 2 * ticket, policy_version=5, fingerprint=77,
                offset=offset, nbytes=encoded.nbytes, checksum=encoded.checksum,
            )
        )  # fmt: skip
    counted = []
    quarantine = Quarantine(tmp_path / "state" / "quarantine", arena, most_bytes=1 << 20, count=counted.append)
    yield SimpleNamespace(
        whole=whole, arena=arena, records=records, experiences=experiences, counted=counted, quarantine=quarantine,
        folder=tmp_path / "state" / "quarantine",
    )  # fmt: skip
    whole.close()
    arena.close()


def test_a_quarantined_batch_is_read_as_the_trainer_would_have_got_it(place):
    first, second = place.records

    place.quarantine.keep([(first, [2, 3]), (second, [0])], "killed_trainer", "trainer-0 died twice")

    (path,) = place.folder.iterdir()
    case = read_quarantine(path)
    assert (case.reason, case.detail) == ("killed_trainer", "trainer-0 died twice")
    assert [(e.ticket, e.position, e.chosen, e.policy_version, e.fingerprint) for e in case.extents] == [
        (0, 10, [2, 3], 5, 77),
        (1, 12, [0], 5, 77),
    ]
    expected = torch.cat([place.experiences[0].reward[2:], place.experiences[1].reward[:1]])
    assert torch.equal(case.experience().reward, expected)
    assert place.counted == ["kept"]


def test_a_damaged_spool_in_the_folder_takes_no_room_of_the_copies(place):
    place.folder.mkdir(parents=True)
    (place.folder / f"spool-0123{extent_file.SUFFIX}").write_bytes(bytes(1 << 20))

    place.quarantine.keep([(place.records[0], [0])], "checksum", "torn")

    assert place.counted == ["kept"]


def test_the_file_is_safetensors_and_for_its_user_alone(place):
    place.quarantine.keep([(place.records[0], [0])], "checksum", "torn")

    (path,) = place.folder.iterdir()
    with safe_open(path, framework="pt") as file:
        data = bytes(file.get_tensor("ticket-0").numpy())
        assert file.metadata()["reason"] == "checksum"
    assert data == bytes(place.whole.extent(0, place.records[0].nbytes))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(place.folder.stat().st_mode) == 0o700


def test_damaged_bytes_are_kept_as_they_are_and_say_that_they_are_no_experience(place):
    record = place.records[0]
    memory = place.whole.extent(0, record.nbytes)
    memory[4:12] = b"\xff" * 8

    place.quarantine.keep([(record, [0])], "checksum", "torn")

    (path,) = place.folder.iterdir()
    with pytest.raises(DecodeError):
        read_quarantine(path).experience()


def test_beyond_its_bytes_it_keeps_the_oldest_and_counts_the_rest(place):
    quarantine = Quarantine(place.folder, place.arena, most_bytes=6_000, count=place.counted.append)
    # A file is its header, a page at least, and the extent.
    assert 1000 < place.records[0].nbytes < 1900

    for record in place.records * 2:
        quarantine.keep([(record, [0])], f"reason{len(place.counted)}", "")

    assert place.counted == ["kept", "full", "full", "full"]
    assert len(list(place.folder.iterdir())) == 1


def test_copies_of_one_second_do_not_replace_each_other(place, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda form: "20261128T110500")
    record, _ = place.records

    for row in range(3):
        place.quarantine.keep([(record, [row])], "checksum", f"attempt {row}")

    cases = [read_quarantine(path) for path in place.folder.iterdir()]
    assert sorted((case.detail, case.extents[0].chosen) for case in cases) == [
        ("attempt 0", [0]), ("attempt 1", [1]), ("attempt 2", [2]),
    ]  # fmt: skip
    assert place.counted == ["kept"] * 3


def test_a_file_in_the_way_of_the_folder_is_counted_and_no_crash(place):
    place.folder.parent.mkdir()
    place.folder.write_text("")

    place.quarantine.keep([(place.records[0], [0])], "checksum", "torn")

    assert place.counted == ["error"]


@pytest.mark.parametrize("cut", [0, 5, 100, 4096, -1])
def test_a_file_that_was_cut_is_refused(place, cut):
    place.quarantine.keep([(place.records[0], [0])], "checksum", "torn")
    (path,) = place.folder.iterdir()
    path.write_bytes(path.read_bytes()[:cut])

    with pytest.raises(DecodeError):
        extent_file.read_extent(extent_file.load(path), 0)


@pytest.mark.parametrize("start", [b"0.5", b"-8", b"1e3", b"99999999999999999999", b'""'])
def test_a_file_whose_header_says_that_an_extent_is_nowhere_is_refused(place, start):
    place.quarantine.keep([(place.records[0], [0])], "checksum", "torn")
    (path,) = place.folder.iterdir()
    length, data = int.from_bytes(path.read_bytes()[:8], "little"), path.read_bytes()
    head = data[8 : 8 + length].replace(b'"data_offsets":[0,', b'"data_offsets":[%s,' % start).rstrip()
    path.write_bytes(data[:8] + head.ljust(length) + data[8 + length :])

    with pytest.raises(DecodeError):
        extent_file.read_extent(extent_file.load(path), 0)


@pytest.mark.parametrize("extents", [1, 2, 30, 64, 300])
def test_every_extent_of_a_file_is_read_as_it_was_however_many_there_are(place, tmp_path, extents):
    records = [ExtentRecord(n, rows=4, prompts=2, ticket=n, offset=64 * n, nbytes=60 + n % 5) for n in range(extents)]
    place.whole.payload[: 64 * extents] = bytes(n % 251 for n in range(64 * extents))

    extent_file.save(tmp_path / "many.safetensors", place.arena, [(record, [0]) for record in records], {})

    file = extent_file.load(tmp_path / "many.safetensors")
    for n, record in enumerate(records):
        assert extent_file.read_extent(file, n) == bytes(place.whole.extent(record.offset, record.nbytes))
    with safe_open(tmp_path / "many.safetensors", framework="pt") as opened:
        assert len(opened.keys()) == extents


def test_a_disk_that_takes_a_part_of_each_write_gets_all_of_a_file(place, tmp_path, monkeypatch):
    write = extent_file.os.pwrite
    monkeypatch.setattr(extent_file.os, "pwrite", lambda file, data, offset: write(file, data[:1000], offset))

    extent_file.save(tmp_path / "one.safetensors", place.whole, [(place.records[0], [0])], {"reason": "x" * 5000})

    file = extent_file.load(tmp_path / "one.safetensors")
    assert extent_file.read_extent(file, 0) == bytes(place.whole.extent(0, place.records[0].nbytes))


def test_a_time_that_is_no_number_is_damage(place, tmp_path):
    path = tmp_path / "case.safetensors"
    extent_file.save(path, place.whole, [(place.records[0], [0])], {"reason": "checksum", "unix_s": "1n0"})

    with pytest.raises(DecodeError, match="its time is damaged"):
        read_quarantine(path)
