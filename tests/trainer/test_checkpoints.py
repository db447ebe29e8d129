"""Checkpoints: whole or absent, found again, verified before use."""

import contextlib
import errno
import json
import os
import resource
import shutil
import subprocess
import threading

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pipeline.errors import CheckpointError, ConfigError
from pipeline.progress import Telemetry
from pipeline.runtime.checkpoint_note import CheckpointNote, earlier_of_run, heads_in, read_note, verify
from pipeline.runtime.latest_checkpoint import Latest, read_latest, write_latest
from pipeline.trainer import checkpoints
from pipeline.trainer.checkpoints import load_state, save_checkpoint
from tests.support import tiny
from tests.support.told import Told


class Tokenizer:
    def save_pretrained(self, folder):
        (folder / "tokenizer.json").write_text("{}")


def note(step, **changes):
    values = {
        "identity": "this", "step": step, "version": step, "position": 10 * step, "complete": False,
        "digest": "0a", "fingerprint": "0b", "config": {"trainer": {"learning_rate": 0.1}},
    }  # fmt: skip
    return CheckpointNote(**{**values, **changes})


def state(value=0.0):
    return {
        "progress": torch.tensor([1, 2, 3]),
        "actor.step.a": torch.tensor(value),
        "actor.exp_avg.a": torch.full((3, 2), value, dtype=torch.bfloat16),
    }


def save(root, step, *, value=0.0, keep=0, **changes):
    return save_checkpoint(
        root, note(step, **changes), actor=tiny.llama(step), tokenizer=Tokenizer(), state=state(value), keep=keep
    )


@contextlib.contextmanager
def files_of_at_most(nbytes):
    """Limit the size of files: a write past it fails as on a full disk, in the middle of the file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_checkpoint_is_a_model_of_transformers_and_a_state(tmp_path):
    folder = save(tmp_path, 70, value=1.5)

    loaded = AutoModelForCausalLM.from_pretrained(folder)
    found = state()
    verify(folder, read_note(folder))
    load_state(folder, found)
    assert folder == tmp_path / "step-000070"
    for name, tensor in tiny.llama(70).state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert all(torch.equal(found[name], tensor) for name, tensor in state(1.5).items())


def test_an_index_tells_the_weights_of_the_model_from_the_training_state(tmp_path):
    """Without it vLLM takes each safetensors file of the folder for a part of the model."""
    folder = save(tmp_path, 70)

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    weights = load_file(folder / "model.safetensors")
    assert index["weight_map"] == dict.fromkeys(weights, "model.safetensors") and len(weights) > 1


def test_the_last_one_is_named_in_plain_json(tmp_path):
    save(tmp_path, 70)
    save(tmp_path, 73, complete=True)

    named = json.loads((tmp_path / "latest.json").read_text())

    assert named.pop("seal")
    assert {key: named[key] for key in named if key != "run"} == {
        "identity": "this", "step": 73, "version": 73, "position": 730, "complete": True, "path": "step-000073",
        "fingerprint": "0b",
    }  # fmt: skip
    assert read_latest(tmp_path) == Latest(**named)


def test_one_of_the_same_step_is_replaced(tmp_path):
    save(tmp_path, 5, value=1.0)

    save(tmp_path, 5, value=2.0)

    found = state()
    load_state(tmp_path / "step-000005", found)
    assert found["actor.step.a"] == 2.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest.json", "step-000005"]


def test_only_the_last_ones_of_a_run_are_kept(tmp_path):
    save(tmp_path, 50)
    (tmp_path / "latest.json").unlink()

    for step in (10, 20, 30, 40):
        save(tmp_path, step, keep=2)

    names = sorted(path.name for path in tmp_path.glob("step-*"))
    assert names == ["step-000030", "step-000040", "step-000050"], "the other run's stays"


def test_a_copy_under_another_name_is_the_users_neither_removed_nor_counted_nor_gone_on_from(tmp_path):
    save(tmp_path, 10)
    for name in ("step-000010.bak", "step-000010 copy", "step-000099"):
        shutil.copytree(tmp_path / "step-000010", tmp_path / name)

    for step in (20, 30, 40):
        save(tmp_path, step, keep=2)

    copies = ["step-000010 copy", "step-000010.bak", "step-000099"]
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [
        *copies[:2],
        "step-000030",
        "step-000040",
        copies[2],
    ]
    assert [folder.name for folder, _ in heads_in(tmp_path)] == ["step-000030", "step-000040"]


def test_of_a_checkpoint_that_the_user_has_moved_and_linked_the_link_alone_is_removed(tmp_path):
    root, archive = tmp_path / "checkpoints", tmp_path / "archive"
    root.mkdir()
    save(root, 10)
    (root / "step-000010").rename(archive)
    (root / "step-000010").symlink_to(archive)

    save(root, 20, keep=1)

    assert [path.name for path in root.glob("step-*")] == ["step-000020"]
    assert (archive / "trainer_state.json").exists()


def test_an_old_checkpoint_that_cannot_be_removed_is_named(tmp_path, monkeypatch, caplog):
    def busy(folder, *, ignore_errors=False):
        if not ignore_errors:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(folder))

    save(tmp_path, 10)
    monkeypatch.setattr(shutil, "rmtree", busy)
    caplog.set_level("INFO")

    save(tmp_path, 20, keep=1)

    assert [record.getMessage() for record in caplog.records if "old checkpoint" in record.getMessage()] == [
        f"an old checkpoint cannot be removed, remove it by hand: path={tmp_path / 'step-000010'}: "
        f"[Errno 39] Directory not empty: '{tmp_path / 'step-000010'}'"
    ]


def test_a_full_disk_leaves_the_checkpoint_before_and_nothing_else(tmp_path):
    save(tmp_path, 1)

    with files_of_at_most(4096), pytest.raises(CheckpointError) as raised:
        save(tmp_path, 2)

    assert str(tmp_path / "step-000002") in str(raised.value)
    assert "B were written" in str(raised.value) and "B are free" in str(raised.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest.json", "step-000001"]
    assert read_latest(tmp_path).step == 1
    assert save(tmp_path, 2).exists(), "with room again it is written"


def test_a_disk_without_an_inode_is_named_as_such(tmp_path, monkeypatch):
    (tmp_path / ".latest.new").mkdir()
    real = os.statvfs
    # Fields 5 to 7: inodes, free ones, those for this user.
    monkeypatch.setattr("os.statvfs", lambda place: os.statvfs_result((*real(place)[:5], 400, 0, 0, *real(place)[8:])))

    with pytest.raises(CheckpointError, match=r"B are free, but no inode$"):
        save(tmp_path, 1)


def test_a_folder_of_which_not_even_the_room_can_be_told_is_a_checkpoint_that_is_not_written(tmp_path):
    # As of a file system that answers each call with EACCES, EIO or ESTALE.
    with pytest.raises(CheckpointError, match=r"step-000001 could not be written: .*File name too long"):
        save(unreadable := tmp_path / ("n" * 300), 1)

    assert not checkpoints._written_bytes(unreadable)


def test_old_ones_stay_while_the_best_one_is_not_known(tmp_path, caplog):
    save(tmp_path, 1)
    (tmp_path / "best").symlink_to("n" * 300)

    save(tmp_path, 2, keep=1)

    assert (tmp_path / "step-000001").exists() and "old checkpoints are not removed before the next one" in caplog.text
    (tmp_path / "best").unlink()
    save(tmp_path, 3, keep=1)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000003"]


@pytest.mark.parametrize("step", [1, 2])
def test_one_that_cannot_be_recorded_as_the_latest_is_not_left_and_the_one_of_its_step_is_put_back(tmp_path, step):
    save(tmp_path, 1, value=1.0)
    # The record is written under this name first.
    (tmp_path / ".latest.new").mkdir()

    with pytest.raises(CheckpointError, match=f"step-{step:06d} could not be written"):
        save(tmp_path, step, value=2.0, fingerprint="0c")

    assert sorted(path.name for path in tmp_path.iterdir()) == [".latest.new", "latest.json", "step-000001"]
    assert read_latest(tmp_path).step == 1
    found = state()
    load_state(tmp_path / "step-000001", found)
    assert found["actor.step.a"] == 1.0


def test_one_whose_record_is_in_place_stays_though_the_record_is_not_flushed(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def failing(root, latest):
        write_latest(root, latest)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(checkpoints, "write_latest", failing)
    with pytest.raises(CheckpointError, match="Input/output error"):
        save(tmp_path, 2)

    assert read_latest(tmp_path).step == 2 and (tmp_path / "step-000002").is_dir()


def test_what_a_killed_process_left_half_written_is_removed(tmp_path):
    """Also where nobody has taken its end: the first process of a container may do so late or never."""
    with subprocess.Popen(["sleep", "60"]) as killed, subprocess.Popen(["sleep", "60"]) as running:
        try:
            killed.kill()
            os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
            for pid in (99999999, killed.pid, running.pid):
                (tmp_path / f".step-000001.{pid}").mkdir()

            save(tmp_path, 2)
        finally:
            running.kill()

    left = [f".step-000001.{running.pid}", "latest.json", "step-000002"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left


@pytest.mark.parametrize("name", ["model.safetensors", "trainer_state.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("harm", ["flipped", "cut", "gone"])
def test_any_damage_is_found(tmp_path, name, harm):
    folder = save(tmp_path, 1)
    path = folder / name
    data = bytearray(path.read_bytes())
    if harm == "flipped":
        data[-1] ^= 1
    path.unlink() if harm == "gone" else path.write_bytes(data[:-1] if harm == "cut" else data)

    with pytest.raises(CheckpointError, match=name):
        verify(folder, read_note(folder))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"actor.step.a": torch.zeros(2)}, r"actor.step.a is \(\) torch.float32, expected \(2,\)"),
        ({"actor.step.a": torch.tensor(0.0, dtype=torch.float64)}, r"expected \(\) torch.float64"),
        ({"actor.step.b": torch.tensor(0.0)}, "actor.step.b is missing"),
    ],
)
def test_a_state_of_another_model_changes_nothing(tmp_path, changed, message):
    folder = save(tmp_path, 1, value=9.0)
    into = {**state(), **changed}

    with pytest.raises(CheckpointError, match=message):
        load_state(folder, into)

    assert into["actor.exp_avg.a"].eq(0).all()


@pytest.mark.parametrize("name", ["kl_coef", "return_moments", "scores.moments"])
def test_a_state_without_a_settings_tensor_leaves_the_first_one_and_one_that_is_not_needed_is_left_out(tmp_path, name):
    folder = save(tmp_path, 1, value=9.0)
    started, constant = {**state(), name: torch.tensor(0.5, dtype=torch.float64)}, state()

    load_state(folder, started)

    assert started[name] == 0.5 and started["actor.exp_avg.a"].eq(9).all()
    adapted = {**state(9.0), name: torch.tensor(0.7, dtype=torch.float64)}
    folder = save_checkpoint(tmp_path, note(2), actor=tiny.llama(), tokenizer=Tokenizer(), state=adapted)
    load_state(folder, constant)
    load_state(folder, started)
    assert constant["actor.exp_avg.a"].eq(9).all() and name not in constant
    assert started[name] == 0.7


def test_earlier_ones_come_newest_first_and_of_the_same_run_only(tmp_path):
    save(tmp_path, 45)
    (tmp_path / "latest.json").unlink()
    for step in (9, 10, 1_000_000, 50):
        save(tmp_path, step)
    shutil.rmtree(tmp_path / "step-000050")

    found = [folder.name for folder in earlier_of_run(tmp_path, read_latest(tmp_path))]

    assert found == ["step-000050", "step-000010", "step-000009"]


def test_a_latest_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "latest.json").write_text("{")

    with pytest.raises(ConfigError, match=r"latest.json.*--fresh"):
        read_latest(tmp_path)


def test_a_run_goes_on_saving_though_its_note_was_damaged_meanwhile_and_keeps_its_earlier_checkpoints(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "latest.json").write_text("{")

    second = save(tmp_path, 2)

    assert read_latest(tmp_path).step == 2
    assert list(earlier_of_run(tmp_path, read_latest(tmp_path))) == [second, tmp_path / "step-000001"]


class SlowActor:
    """Writes one file of fixed length piece by piece, as long as each piece is reported as progress."""

    def __init__(self, told, *, stalls=False):
        self.told = told
        self.noticed = 0
        self._stalls = stalls

    def save_pretrained(self, folder):
        folder.mkdir()
        with (folder / "growing").open("wb") as file:
            file.truncate(1 << 20)
            for piece in range(3):
                self.told.clear()
                if not (self._stalls and piece):
                    file.write(bytes(1 << 16))
                    file.flush()
                self.noticed += self.told.wait(2.0 if self._stalls else 20.0)


class Heard(Telemetry):
    def __init__(self, told):
        super().__init__()
        self.progress = told.set


@pytest.mark.parametrize(("stalls", "noticed"), [(False, 3), (True, 1)])
def test_a_single_file_that_takes_long_is_progress_as_long_as_it_grows(tmp_path, monkeypatch, stalls, noticed):
    monkeypatch.setattr(checkpoints, "_LOOK_S", 0.02)
    told = threading.Event()
    actor = SlowActor(told, stalls=stalls)

    save_checkpoint(tmp_path, note(1), actor=actor, tokenizer=Tokenizer(), state=state(), telemetry=Heard(told))

    assert actor.noticed == noticed


def test_a_large_file_is_brought_to_disk_piece_by_piece(tmp_path, monkeypatch):
    def told(flush_bytes):
        monkeypatch.setattr(checkpoints, "_FLUSH_BYTES", flush_bytes)
        heard = Told()
        checkpoints._flush(folder, heard)
        return len(heard.beats)

    folder = save(tmp_path, 1)
    pieces = [
        -(-path.stat().st_size // 4096) for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 4096
    ]
    assert sum(pieces) > 4, "some are larger"

    assert told(4096) == told(1 << 28) + sum(pieces)
    verify(folder, read_note(folder))
