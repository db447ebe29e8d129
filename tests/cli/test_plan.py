"""`rlhfd plan`: what does not fit is named, with the keys to change."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.cli.main import main
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


def test_what_does_not_fit_is_named_with_the_keys_to_change_the_mildest_first(folder: Path) -> None:
    settings = ("--set", "trainer.world_size=2", "--set", "rollout.max_length=64")

    code, output = planned(folder, "--gpus", "4", "--gpu-memory", "40MB", "--ram", "64GiB", *settings)

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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpus", "2", "--ram", "1GiB"), "--gpu-memory: this machine shows no GPU"),
        (("--gpus", "1", "--gpu-memory", "much"), "is not a size such as 80GB"),
        (
            ("--gpus", "1", "--gpu-memory", "1GB", "--set", "trainer.world_size=2"),
            "2 ranks need a GPU each, 1 are there",
        ),
        (("--set", "model.actor=builtin:sort-digits"), "a plan needs a model's folder"),
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
