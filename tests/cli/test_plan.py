"""`rlhfd plan`: what does not fit is named, with the keys to change."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipeline.cli.main import main
from pipeline.config.identity import run_dir
from pipeline.config.plan import models_of
from pipeline.config.schema import Config
from pipeline.supervisor.capacity.disk import disk_budget, disk_notes
from tests.support import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    tiny.llama(hidden_size=64, intermediate_size=256, num_hidden_layers=8).save_pretrained(folder)
    return folder


def planned(folder: Path, *arguments: str) -> tuple[int, str]:
    sets = ("--set", f"model.actor={folder}", "--set", "model.dtype=bfloat16")
    result = CliRunner().invoke(main, ["plan", *sets, *arguments])
    return result.exit_code, result.output


def test_a_run_that_fits_is_printed_by_device_and_term(folder: Path) -> None:
    code, output = planned(folder, "--gpus", "2", "--gpu-memory", "80GB", "--ram", "64GiB")

    assert code == 0, output
    assert "2 GPUs of 80.0 GB, 68.7 GB of memory, 34.4 GB of it for /dev/shm" in output
    assert "GPU of trainer 0 (1 like it): " in output and "GPU of rollout 0 (1 like it): " in output
    assert "trainer 0: moments" in output and "rollout 0: KV cache" in output
    assert "a publish writes" in output
    assert "does not fit" not in output


def test_what_does_not_fit_is_named_with_the_keys_to_change_the_mildest_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A card of 60 MB holds tensors alone.
    monkeypatch.setattr("pipeline.config.plan.CONTEXT_BYTES", 0)
    settings = ("--set", "trainer.world_size=2", "--set", "rollout.max_length=64")

    code, output = planned(folder, "--gpus", "4", "--gpu-memory", "60MB", "--ram", "64GiB", *settings)

    lines = output.splitlines()
    place = next(place for place, line in enumerate(lines) if line.startswith("does not fit: GPU of trainer 0"))
    assert code == 1
    assert "GPU of rollout" not in lines[place]
    assert lines[place + 1].strip().endswith(": fits"), output
    effects = [line.strip().endswith(": fits") for line in lines[place + 1 :]]
    assert effects == sorted(effects, reverse=True)
    assert any("trainer.micro_batch_size = 1" in line for line in lines[place:])


def test_a_machine_without_gpus_holds_the_models_in_its_memory(folder: Path) -> None:
    code, output = planned(folder, "--gpus", "0", "--ram", "64GiB")

    assert code == 0, output
    assert "no GPU" in output and "GPU of" not in output
    host = output[output.index("host memory:") :]
    assert "trainer 0: weights" in host and "rollout 0: actor" in host and "/dev/shm: weights" in host


def test_the_engine_and_its_cache_beside_a_step_have_a_line_with_the_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())

    code, output = planned(folder, "--gpus", "1", "--gpu-memory", "80GB", "--ram", "64GiB")

    assert code == 0
    assert "\nengine       vllm by auto: vllm is installed here, and the run has GPUs\n" in output
    assert re.search(r"^cache        .* [GM]B: 256 rows of .* tokens, beside a step on the same card$", output, re.M)


def test_the_disk_of_the_state_directory_is_a_place_of_the_plan(folder: Path, tmp_path: Path) -> None:
    machine = ("--gpus", "1", "--gpu-memory", "80GB", "--ram", "64GiB", "--set", f"daemon.state_dir={tmp_path}")

    _, silent = planned(folder, *machine)
    small, output = planned(folder, *machine, "--disk", "1MB", "--set", "trainer.keep_checkpoints=2")
    large, fits = planned(folder, *machine, "--disk", "1TB")

    assert "disk of" not in silent, "another machine's is not known"
    assert (small, large) == (1, 0)
    assert f"does not fit: disk of {tmp_path}" in output and "fewer trainer.keep_checkpoints" in output
    assert "trainer.sharding" not in output, "no change of memory helps a disk"
    parameters = sum(weight.numel() for weight in tiny.llama(
        hidden_size=64, intermediate_size=256, num_hidden_layers=8
    ).parameters())  # fmt: skip
    # bfloat16 weights, their float32 copies, two moments: 14 bytes; two are kept, one is being written.
    assert re.search(rf"checkpoints, 2 and the next one +{3 * 14 * parameters / 1e6:,.1f} MB\n", output)
    assert f"disk of {tmp_path}: " in fits and "1,000.0 GB, fits" in fits
    held_out = ("--set", f"evaluation.files={[str(folder / 'prompts.jsonl')]}")
    _, output = planned(folder, *machine, "--disk", "1MB", "--set", "trainer.keep_checkpoints=2", *held_out)
    assert re.search(rf"checkpoints, 2, the best and the next one +{4 * 14 * parameters / 1e6:,.1f} MB\n", output)
    all_of_them = ("trainer.keep_checkpoints=0", "trainer.save_every=50", "trainer.max_steps=420")
    _, output = planned(folder, *machine, "--disk", "1MB", *(part for each in all_of_them for part in ("--set", each)))
    assert re.search(rf"checkpoints, 9 and the next one +{10 * 14 * parameters / 1e6:,.1f} MB\n", output)
    endless = ("trainer.keep_checkpoints=0", "trainer.save_every=50", "trainer.max_steps=0")
    _, output = planned(folder, *machine, "--disk", "1MB", *(part for each in endless for part in ("--set", each)))
    assert "checkpoints, the first of those that are all kept and the next one " in output


def test_a_check_names_a_disk_that_a_run_may_fill(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs
    monkeypatch.setattr("os.statvfs", lambda place: os.statvfs_result((4096, 4096, 9, 9, 9, *real(place)[5:])))
    config = Config.model_validate({"model": {"actor": str(folder)}, "daemon": {"state_dir": str(tmp_path / "state")}})

    (note,) = disk_notes(config)

    assert note.startswith(f"daemon.state_dir: the disk of {tmp_path}/state has 0.0 MB for this run, which may write ")
    for keep, advice in ((0, "set trainer.keep_checkpoints, or take"), (1, "take"), (9, "lower trainer.keep_chec")):
        (note,) = disk_notes(config.changed("trainer", keep_checkpoints=keep))
        assert f"; {advice}" in note
    assert disk_notes(Config()) == [], "the embedded run writes little"


def test_a_check_names_checkpoints_that_are_all_kept_of_a_run_without_a_last_step(folder: Path, tmp_path: Path) -> None:
    config = Config.model_validate({"model": {"actor": str(folder)}, "daemon": {"state_dir": str(tmp_path / "state")}})
    small = config.changed("buffer", arena_bytes=1 << 20)
    endless = small.changed("trainer", keep_checkpoints=0, save_every=50, max_steps=0)

    (note,) = disk_notes(endless)

    assert re.search(
        r"trainer.keep_checkpoints = 0 keeps all checkpoints, \d.* each 50 steps, without trainer.max_st", note
    )
    for bounds in ({"keep_checkpoints": 3}, {"max_steps": 100}, {"save_every": 0}):
        assert disk_notes(endless.changed("trainer", **bounds)) == []


def test_a_file_that_a_run_removes_while_its_room_is_counted_counts_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config.model_validate({"model": {"actor": str(folder)}, "daemon": {"state_dir": str(tmp_path)}})
    files = [run_dir(config) / "checkpoints" / name for name in ("kept", "removed")]
    files[0].parent.mkdir(parents=True)
    for file in files:
        file.write_bytes(b"x" * 5000)
    real, lstat = os.statvfs, os.lstat

    def removed(path: Any, **arguments: Any) -> os.stat_result:
        if Path(path).name == "removed":
            raise FileNotFoundError(path)
        return lstat(path, **arguments)

    monkeypatch.setattr("os.statvfs", lambda place: os.statvfs_result((4096, 4096, 9, 9, 9, *real(place)[5:])))
    monkeypatch.setattr("os.lstat", removed)
    held_bytes = files[0].stat().st_blocks * 512
    aside = run_dir(config) / "aside" / "1-from-step-000003" / "rows"
    aside.parent.mkdir(parents=True)
    aside.write_bytes(b"x" * 5000)

    assert disk_budget(config, models_of(config)).capacity_bytes == 9 * 4096 + held_bytes > 9 * 4096


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpus", "2", "--ram", "1GiB"), "--gpu-memory: this machine shows no GPU"),
        (("--gpus", "1", "--gpu-memory", "much"), "is not a size such as 80GB"),
        (("--ram", "infGB"), "'infGB' is not a size such as 80GB"),
        (("--disk", "-5GB"), "'-5GB' is not a size such as 80GB"),
        (
            ("--gpus", "1", "--gpu-memory", "1GB", "--set", "trainer.world_size=2"),
            "2 ranks need a GPU each, 1 is there",
        ),
    ],
)
def test_a_plan_that_cannot_be_made_says_why(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr("pipeline.supervisor.capacity.machine.gpus_here", lambda environ: [])

    code, output = planned(folder, *arguments)

    assert code in (2, 78)
    assert message in output


def test_a_folder_without_a_model_is_one_line(tmp_path: Path) -> None:
    code, output = planned(tmp_path, "--gpus", "0")

    assert (code, output) == (78, f"model.actor: {tmp_path} has no config.json\n")


def test_the_embedded_model_has_a_plan_before_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLHFD_CONFIG", raising=False)

    result = CliRunner().invoke(main, ["plan", "--gpus", "0", "--ram", "64GB"])

    assert result.exit_code == 0, result.output
    assert "859,520 parameters, 4 layers" in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("mounted", "room"), [(("--ram", "100GB"), "50.0 GB"), (("--ram", "100GB", "--shm", "80GB"), "80.0 GB")]
)
def test_the_room_in_shared_memory_is_half_of_the_memory_or_as_it_is_mounted(
    folder: Path, mounted: tuple[str, ...], room: str
) -> None:
    _, output = planned(folder, "--gpus", "0", *mounted)

    assert f"100.0 GB of memory, {room} of it for /dev/shm" in output
    assert re.search(rf"^/dev/shm: \S+ \S+ of {room}, fits", output, re.MULTILINE)


def test_a_mount_larger_than_the_memory_holds_no_more_than_the_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ram_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    _, output = planned(folder, "--gpus", "0", "--shm", "900TB")

    assert f"of {ram_bytes / 1e9:,.1f} GB, fits" in output.partition("/dev/shm: ")[2].splitlines()[0]
