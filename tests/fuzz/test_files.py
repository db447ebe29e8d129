"""Damaged files and messages: each reader refuses them with its own error."""

import random

import msgspec
import pytest

from pipeline.buffer.sizing import checked_layout, ledger_layout
from pipeline.config.schema import Config
from pipeline.errors import ConfigError, DecodeError, UnreachableError
from pipeline.experience import codec
from pipeline.experience.saved_rows import read_quarantine
from pipeline.runtime.latest_checkpoint import Latest, read_latest, write_latest
from pipeline.runtime.lock import InstanceRecord
from pipeline.runtime.role import Report
from pipeline.runtime.workspace import Workspace
from pipeline.storage import extent_file
from pipeline.storage.arena import Arena
from pipeline.storage.extent_file import SUFFIX
from pipeline.storage.files import UNREADABLE
from pipeline.storage.layout import LedgerLayout
from pipeline.storage.records import ExtentRecord
from tests.fuzz.mutation import damaged
from tests.support.experiences import made_up

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(900)]
LAYOUT = LedgerLayout(extents=4, rows_per_extent=4)


@pytest.fixture
def rng(request):
    return random.Random(request.config.getoption("randomly_seed", 0))


@pytest.fixture
def tries(request):
    return 50_000 if request.config.getoption("--fuzz") else 500


def refuses(read_it, write, data, rng, tries, *errors):
    """Try damaged data, and fail on any error but those; return how often it was refused."""
    refused = 0
    for _ in range(tries):
        write(damaged(rng, data))
        try:
            read_it()
        except errors:
            refused += 1
    return refused


def test_records_and_notes(tmp_path, rng, tries):
    InstanceRecord(7, "/dev/shm/x").write(tmp_path)
    write_latest(tmp_path, Latest("identity", 1, 2, 3, False, "path", "run"))
    record, latest = tmp_path / "instance.json", tmp_path / "latest.json"

    torn = refuses(
        lambda: InstanceRecord.read(tmp_path), record.write_bytes, record.read_bytes(), rng, tries, UnreachableError
    )
    lost = refuses(lambda: read_latest(tmp_path), latest.write_bytes, latest.read_bytes(), rng, tries, ConfigError)

    assert tries // 3 < torn < tries and tries // 3 < lost < tries


def test_a_workspace_whose_files_are_damaged_is_made_anew(tmp_path, rng, tries):
    config = Config.model_validate({"buffer": {"arena_bytes": 1 << 20, "sample_batch_size": 32, "row_bytes": 1000}})
    folder = tmp_path / "shm"
    for name in ("run.json", "arena"):
        for _ in range(min(tries, 1000) // 20):
            workspace = Workspace.prepare(folder, config, checked_layout(config))
            assert workspace.run.identity
            with (folder / name).open("r+b") as file:
                head = file.read(200)
                file.seek(0)
                file.write(damaged(rng, head)[:200])

            Workspace.prepare(folder, config, checked_layout(config))

            Arena(folder / "arena", payload=False).close()
    assert ledger_layout(config).nbytes


def test_a_report_is_read_or_refused(rng, tries):
    decoder, data, refused = msgspec.json.Decoder(Report), msgspec.json.encode(Report(state="ready", error="x")), 0
    for _ in range(tries):
        try:
            decoder.decode(damaged(rng, data))
        except UNREADABLE:
            refused += 1
    assert tries // 3 < refused < tries


def test_quarantine_files(tmp_path, rng, tries):
    Arena.create(tmp_path / "arena", payload_bytes=1 << 16, ledger_bytes=LAYOUT.nbytes, layout=LAYOUT.identity)
    arena = Arena(tmp_path / "arena")
    encoded = codec.encode(made_up(rows=4), arena.extent(0, 1 << 16))
    record = ExtentRecord(0, rows=4, prompts=2, offset=0, nbytes=encoded.nbytes, checksum=encoded.checksum)
    path = tmp_path / f"case{SUFFIX}"
    extent_file.save(path, arena, [(record, [0, 2])], {"reason": "checksum", "unix_s": "1.0"})
    data = path.read_bytes()
    place = data.index(b"}  ")

    def write(head):
        path.write_bytes(head + data[place:])

    refused = refuses(lambda: read_quarantine(path).experience(), write, data[:place], rng, tries // 5, DecodeError)

    assert refused > tries // 10
    arena.close()


def test_extents(rng, tries):
    memory = memoryview(bytearray(1 << 16))
    encoded = codec.encode(made_up(), memory)
    data, refused = bytes(memory[: encoded.nbytes]), 0
    for _ in range(tries):
        torn = damaged(rng, data[:600]) + data[600:] if rng.random() < 0.7 else damaged(rng, data)
        try:
            reader = codec.ExtentReader(memoryview(bytearray(torn)))
            codec.gather_padded([(reader, range(reader.header.rows))])
        except DecodeError:
            refused += 1
    assert tries // 4 < refused
