"""A damaged newest checkpoint: one decision, before any process starts, for all that goes on from it."""

import logging
import shutil
import signal
from pathlib import Path

import msgspec
import pytest
import torch

from pipeline.config.identity import identity_of, run_dir
from pipeline.errors import ConfigError
from pipeline.runtime.checkpoint_note import CheckpointNote, read_note
from pipeline.runtime.latest_checkpoint import checkpoints_dir, read_latest
from pipeline.runtime.run_folder import RunFolder
from pipeline.runtime.run_folder import read_note as read_run
from pipeline.runtime.run_start import open_run
from pipeline.runtime.workspace import RunId
from pipeline.storage import sealed_json
from pipeline.trainer.checkpoints import save_checkpoint
from tests.runtime.test_run_folder import Tokenizer, config, publish


class Shards:
    """A model in two files, as of ranks."""

    def __init__(self, content):
        self.content = content

    def save_pretrained(self, folder):
        Path(folder).mkdir(exist_ok=True)
        for shard in (1, 2):
            (Path(folder) / f"model-0000{shard}-of-00002.safetensors").write_text(f"{self.content}, shard {shard}")


def a_run(folder):
    """Two checkpoints, a spool and a snapshot; return configuration and checkpoints."""
    of = config(folder)
    RunFolder(of).claim()
    saved = [
        save_checkpoint(
            checkpoints_dir(of),
            CheckpointNote(identity_of(of), step, step, 10 * step, False, "0a", f"{step:016x}", {"a": {"b": 1e-6}}),
            actor=Shards(f"actor of {step}"), critic=Shards(f"critic of {step}"), tokenizer=Tokenizer(),
            state={"moment": torch.full((8,), float(step))},
        )
        for step in (5, 10)
    ]  # fmt: skip
    for name in ("spool", "journal"):
        (run_dir(of) / name).mkdir()
        (run_dir(of) / name / f"{identity_of(of)}.safetensors").write_bytes(b"rows")
    return of, saved


def flipped(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def as_folder(path):
    path.unlink()
    path.mkdir()


DAMAGE = {
    "first byte": lambda path: flipped(path, 0),
    "a byte in the middle": lambda path: flipped(path, path.stat().st_size // 2),
    "last byte": lambda path: flipped(path, -2),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"more"),
    "empty": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(),
    "a folder": as_folder,
}
FILES = (
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "critic/model-00002-of-00002.safetensors",
    "trainer_state.safetensors",
    "trainer_state.json",
)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("file", FILES)
def test_any_damage_of_the_newest_checkpoint_takes_the_whole_run_back_to_the_one_before(tmp_path, caplog, file, damage):
    of, (_, newest) = a_run(tmp_path)
    DAMAGE[damage](newest / file)

    with caplog.at_level(logging.INFO):
        assert open_run(of, tmp_path / "shm") == ""

    assert read_latest(checkpoints_dir(of)) == read_note(checkpoints_dir(of) / "step-000005").latest(
        Path("step-000005")
    )
    aside = run_dir(of) / "aside" / "1-from-step-000005"
    assert sorted(path.name for path in aside.iterdir()) == ["checkpoints", "journal", "spool"], "nothing is removed"
    assert (aside / "checkpoints" / "step-000010").is_dir() and not newest.exists()
    assert not [*(run_dir(of) / "spool").iterdir(), *(run_dir(of) / "journal").iterdir()]
    (error,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert file in error
    assert "step=5 instead of 10" in caplog.text


@pytest.mark.parametrize("lost", ["step-000010", "step-000010/critic"])
def test_a_missing_folder_is_damage_too(tmp_path, lost):
    of, _ = a_run(tmp_path)
    shutil.rmtree(checkpoints_dir(of) / lost)

    open_run(of, tmp_path / "shm")

    assert read_latest(checkpoints_dir(of)).step == 5
    assert not list((run_dir(of) / "spool").iterdir()), "the rows of the lost steps' weights go with them"


def test_a_whole_checkpoint_is_gone_on_from_with_its_rows(tmp_path, caplog):
    of, _ = a_run(tmp_path)

    open_run(of, tmp_path / "shm")

    assert read_latest(checkpoints_dir(of)).step == 10
    assert not (run_dir(of) / "aside").exists() and len(list((run_dir(of) / "spool").iterdir())) == 1
    assert not caplog.records


@pytest.mark.parametrize("record", ["step-000010/trainer_state.json", "latest.json"])
def test_a_flipped_bit_of_any_byte_of_a_note_never_becomes_another_value(tmp_path, record):
    of, _ = a_run(tmp_path / "made")
    steps, whole = [], {note.step: note for note in map(read_note, checkpoints_dir(of).glob("step-*"))}
    size = (checkpoints_dir(of) / record).stat().st_size

    for place in range(0, size, 5):
        folder = tmp_path / "tried"
        shutil.copytree(tmp_path / "made", folder)
        again = config(folder)
        flipped(checkpoints_dir(again) / record, place)
        open_run(again, folder / "shm")
        latest = read_latest(checkpoints_dir(again))
        assert latest == whole[latest.step].latest(checkpoints_dir(again) / latest.path), place
        steps.append(latest.step)
        shutil.rmtree(folder)

    # The record is made again from the checkpoints; a checkpoint's own note cannot be.
    assert set(steps) == {10 if record == "latest.json" else 5}


@pytest.mark.parametrize("damage", ["first byte", "truncated", "empty", "missing"])
def test_a_damaged_record_of_the_latest_costs_no_step(tmp_path, damage):
    of, _ = a_run(tmp_path)
    DAMAGE[damage](checkpoints_dir(of) / "latest.json")

    open_run(of, tmp_path / "shm")

    assert read_latest(checkpoints_dir(of)).step == 10


@pytest.mark.parametrize("damage", ["first byte", "truncated", "empty"])
def test_a_damaged_description_of_the_run_is_written_again(tmp_path, caplog, damage):
    of, _ = a_run(tmp_path)
    DAMAGE[damage](run_dir(of) / "run.json")

    open_run(of, tmp_path / "shm")

    assert read_run(run_dir(of)).identity == identity_of(of)
    assert read_latest(checkpoints_dir(of)).step == 10
    assert "description is damaged" in caplog.text


def test_a_damaged_description_of_a_named_run_without_checkpoints_is_refused(tmp_path):
    of = config(tmp_path, daemon={"run_name": "mine"})
    RunFolder(of).claim()
    DAMAGE["truncated"](run_dir(of) / "run.json")

    with pytest.raises(ConfigError, match=r"run\.json: .*remove this file"):
        open_run(of, tmp_path / "shm")


def test_with_no_whole_checkpoint_the_start_is_refused_and_changes_nothing(tmp_path):
    of, saved = a_run(tmp_path)
    for folder in saved:
        (folder / FILES[0]).write_bytes(b"")
    before = sorted(path for path in run_dir(of).rglob("*"))

    with pytest.raises(ConfigError, match=r"step-000010: no checkpoint of this run can be used.*--fresh"):
        open_run(of, tmp_path / "shm")

    assert sorted(path for path in run_dir(of).rglob("*")) == before


def test_a_complete_run_whose_model_is_damaged_is_not_called_complete(tmp_path):
    of, (_, newest) = a_run(tmp_path)
    of = config(tmp_path, trainer={"max_steps": 10})
    assert "is complete" in open_run(of, tmp_path / "shm")
    flipped(newest / FILES[1], 3)

    assert open_run(of, tmp_path / "shm") == ""
    assert read_latest(checkpoints_dir(of)).step == 5


def test_a_damaged_checkpoint_is_not_gone_back_to(tmp_path):
    of, (older, _) = a_run(tmp_path)
    flipped(older / FILES[1], 3)

    with pytest.raises(ConfigError, match=r"--from step-000005: .*model-00002-of-00002.safetensors is damaged"):
        open_run(of, tmp_path / "shm", back_to="5")

    assert read_latest(checkpoints_dir(of)).step == 10 and not (run_dir(of) / "aside").exists()


def test_versions_in_shared_memory_are_newer_than_any_checkpoint(tmp_path):
    of, (_, newest) = a_run(tmp_path)
    shm = tmp_path / "shm"
    shm.mkdir()
    (shm / "run.json").write_bytes(msgspec.json.encode(RunId("1", identity_of(of), str(run_dir(of).resolve()), 1)))
    publish(shm, 12)
    flipped(newest / FILES[1], 3)

    open_run(of, shm)

    assert newest.exists(), "the trainer decides by the versions that it finds"


def test_a_signal_ends_the_verification_of_a_large_checkpoint(tmp_path):
    of, _ = a_run(tmp_path)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        signal.raise_signal(signal.SIGHUP)
        with pytest.raises(SystemExit) as ended:
            open_run(of, tmp_path / "shm")
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    assert ended.value.code == 0
    assert read_latest(checkpoints_dir(of)).step == 10


# The seal.


class Point(msgspec.Struct, frozen=True):
    x: float
    named: dict[str, float | str] = {}


def test_a_record_comes_back_as_it_was_and_with_any_bit_flipped_as_it_was_or_not_at_all():
    point = Point(1e-6, {"a": 0.1, "ü": "1"})
    written = sealed_json.encode(point)
    assert sealed_json.decode(written, Point) == point

    for place in range(len(written)):
        for bit in range(8):
            damaged = bytearray(written)
            damaged[place] ^= 1 << bit
            try:
                found = sealed_json.decode(bytes(damaged), Point)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            assert found == point, bytes(damaged)


def test_a_record_without_a_seal_is_damaged():
    with pytest.raises(msgspec.DecodeError, match="damaged: its seal is not that of its members"):
        sealed_json.decode(b'{"x": 2.5}', Point)
