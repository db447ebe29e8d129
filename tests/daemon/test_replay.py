"""One recorded run of steps of several kinds, replayed on other devices, under pdb, and by another configuration."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
import xxhash
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from pipeline.cli.main import main
from pipeline.errors import ConfigError
from pipeline.runtime.checkpoint_note import FileNote, read_note
from pipeline.storage import sealed_json
from pipeline.storage.recording import LINES, Recording, RecordLine, read_recording, rows_path
from pipeline.trainer.checkpoints import STATE_FILE
from pipeline.trainer.recording.bases import Bases
from pipeline.trainer.recording.replay import Replay, report
from tests.daemon.test_recording import lasting, with_weights
from tests.support.daemon import Daemon, rlhfd, telling_reward
from tests.support.recording import rewrite

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

STEPS, SAVED = 7, 4
"""Steps of the run, which ends with a checkpoint, and the step of the checkpoint before."""


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    threads, state, environment = torch.get_num_threads(), torch.get_rng_state(), dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)
    torch.set_rng_state(state)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, task: Path) -> Path:
    """The folder of the run's start, in which ``own/rlhfd.toml`` is its configuration, with a loss beside it."""
    folder = tmp_path_factory.mktemp("recorded")
    own = folder / "own"
    own.mkdir()
    own.joinpath("own_loss.py").write_text(
        "def loss(inputs):\n    return -(inputs.log_probs - inputs.old_log_probs).exp() * inputs.advantages\n"
    )
    reward, timeout = telling_reward(own)
    own.joinpath("rlhfd.toml").write_text(f"""
{reward.replace("=", " = ", 1)}
[model]
actor = "{task / "model"}"
lora_rank = 4
[prompts]
path = "{task / "prompts.jsonl"}"
[rollout]
num_generations = 4
max_length = 16
advantages = "dr_grpo"
{timeout.removeprefix("rollout.").replace("=", " = ", 1)}
[buffer]
sample_batch_size = 32
[trainer]
policy_loss = "own_loss:loss"
advantage_scale = "batch"
mini_batches = 2
epochs = 2
gradient_accumulation_steps = 2
publish_every = 2
packing = true
max_steps = {STEPS}
save_every = {SAVED}
record = "rows"
""")
    arguments = ("--config", str(own / "rlhfd.toml"), "--serial")
    with Daemon(folder, arguments=arguments) as daemon:
        assert daemon.wait() == 0, daemon.errors
        shutil.copytree(daemon.run_dir, folder / "kept")
    return folder


@pytest.fixture
def run(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run."""
    monkeypatch.syspath_prepend(str(recorded / "own"))
    return Path(shutil.copytree(recorded / "kept", tmp_path / "kept"))


def test_steps_of_several_updates_batches_and_packed_rows_are_replayed_bit_for_bit(recorded: Path, run: Path) -> None:
    recording, lines = read_recording(run / "recording"), list[str]()
    assert [*recording.steps] == list(range(1, STEPS + 1)) and [*recording.weights] == [0, 2, 4, 6, STEPS]
    assert all(len(taken.batches) == 2 for taken in recording.steps.values())
    # The loss is found beside the configuration that RLHFD_CONFIG names, as `start` finds it.
    named = {"RLHFD_CONFIG": str(recorded / "own" / "rlhfd.toml")}
    answer = rlhfd("replay", "--step", str(STEPS), "--run", str(run), folder=run, environment=named)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert answer.stdout.splitlines()[0] == f"step {STEPS} from checkpoint step-{SAVED:06d}, on cpu"

    assert report(run, SAVED, "cpu", debug=False, write=lines.append), lines

    assert lines[0] == f"step {SAVED} from the start of the run, on cpu"
    assert [line.endswith("weights were not published") for line in lines[1:]] == [False, True, False, True, False]


def test_recorded_rows_train_another_configuration(recorded: Path, run: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = str(recorded / "own" / "rlhfd.toml")
    words = ("replay", "--rows", "--config", config, "--run", str(run))
    answer = CliRunner().invoke(main, [*words])
    assert answer.exit_code == 0, answer.output
    logged = (run / "metrics.jsonl").read_text().splitlines()
    assert [lasting(line) for line in answer.stdout.splitlines()] == [lasting(line) for line in logged]
    for sets, message in (
        (
            [
                "rollout.algorithm=ppo",
                "trainer.policy_loss=ppo",
                "rollout.advantages=gae",
                "trainer.advantage_scale=none",
            ],
            "rollout.algorithm: ppo, the recorded rows are of grpo",
        ),
        (["rollout.advantages=rloo"], "rollout.advantages: rloo, the recorded rows are of dr_grpo"),
    ):
        given = [word for value in sets for word in ("--set", value)]
        refused = CliRunner().invoke(main, [*words, *given])
        assert refused.exit_code == 78 and message in refused.output
    for step in (1, 4):
        rows_path(run / "recording", step).unlink()

    told = CliRunner().invoke(main, [*words, "--set", "trainer.learning_rate=1e-3"])

    assert [json.loads(line)["step"] for line in told.stdout.splitlines()] == [2, 3, 5, 6, 7]
    assert "without the rows of all steps: first=2 last=7 kept=5" in caplog.text


def test_a_checkpoint_of_a_gpu_is_replayed_on_the_cpu(run: Path) -> None:
    checkpoint = run / "checkpoints" / f"step-{SAVED:06d}"
    state = load_file(checkpoint / STATE_FILE)
    save_file({**state, "generator.cuda": torch.zeros(16, dtype=torch.uint8)}, checkpoint / STATE_FILE)
    note, whole = read_note(checkpoint), (checkpoint / STATE_FILE).read_bytes()
    note.files[STATE_FILE] = FileNote(len(whole), f"{xxhash.xxh3_64_intdigest(whole):016x}")
    (checkpoint / "trainer_state.json").write_bytes(sealed_json.encode(note))
    lines: list[str] = []

    assert report(run, SAVED + 1, "cpu", debug=False, write=lines.append), lines

    assert f"checkpoint step-{SAVED:06d}" in lines[0]
    for device, message in (("cuda:99", "can use"), ("meta", "neither cpu nor cuda:N"), ("gpu", "--device gpu: ")):
        with pytest.raises(ConfigError, match=message) as refusal:
            Replay(run, SAVED + 1, device)
        assert "\n" not in str(refusal.value)


def test_under_pdb_a_difference_before_the_step_is_told_and_the_step_is_reached(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(run / "recording", lambda line: with_weights(line, SAVED, 1))
    for folder in (run / "checkpoints").iterdir():
        shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
    lines: list[str] = []
    assert not report(run, SAVED + 1, "cpu", debug=False, write=lines.append)
    assert lines[-1].startswith(f"step {SAVED}: ") and "differs" in lines[-1]
    monkeypatch.setattr(sys, "stdin", io.StringIO("p len(batches)\ncontinue\n"))

    assert not report(run, SAVED + 1, "cpu", debug=True, write=lines.append)

    assert lines[-2].startswith(f"step {SAVED}: ") and "differs" in lines[-2]
    assert lines[-1].startswith(f"step {SAVED + 1}: ") and "equal to the recorded ones" in lines[-1]
    assert "(Pdb) 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    "typed",
    [
        pytest.param("q\n", id="at once", marks=pytest.mark.variant),
        pytest.param("next\nq\n", id="within"),
        pytest.param("", id="end of input", marks=pytest.mark.variant),
    ],
)
def test_a_step_that_is_left_in_pdb_is_not_compared(run: Path, monkeypatch: pytest.MonkeyPatch, typed: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    lines: list[str] = []

    assert report(run, SAVED + 1, "cpu", debug=True, write=lines.append)

    assert lines[-1] == f"step {SAVED + 1}: left in the debugger, nothing is compared"
    assert not any("differs" in line for line in lines)


def test_a_difference_is_explained_by_the_start_that_took_the_step(run: Path) -> None:
    (_, start), *_ = read_recording(run / "recording").starts
    config = {**start.config, "trainer": {**start.config["trainer"], "sharding": "none"}}
    old = msgspec.structs.replace(start, libraries={**start.libraries, "torch": "1.0", "rlhfd": "0.1"})
    new = RecordLine(SAVED, start=msgspec.structs.replace(start, config=config))
    rewrite(run / "recording", lambda line: with_weights(
        msgspec.structs.replace(line, start=old) if line.start else line, 2, 1))  # fmt: skip
    path = run / "recording" / LINES
    lines = path.read_bytes().splitlines(keepends=True)
    at = next(place for place, line in enumerate(lines) if f'"step":{SAVED},"published"'.encode() in line)
    path.write_bytes(b"".join([*lines[: at + 1], sealed_json.encode(new, indent=-1), *lines[at + 1 :]]))
    for folder in (run / "checkpoints").glob("step-*"):
        shutil.rmtree(folder)
    told: list[str] = []

    # A start by --serial and one by the daemon differ in trainer.sharding, which changes no step of one rank.
    assert not report(run, SAVED + 1, "cpu", debug=False, write=told.append)

    assert told[-3].startswith("step 2: ") and "differs" in told[-3]
    assert f"  torch is {torch.__version__} here, 1.0 there" in told[-2:]
    assert told[-1].endswith("here, 0.1 there") or told[-2].endswith("here, 0.1 there")


def test_the_list_and_the_replay_begin_at_the_same_checkpoint(run: Path) -> None:
    def listed() -> dict[int, str | None]:
        answer = CliRunner().invoke(main, ["record", "--json", "--last", "0", "--run", str(run)])
        return {entry["step"]: entry["replayed_from"] for entry in map(json.loads, answer.output.splitlines())}

    def begun(step: int) -> str | None:
        try:
            replay = Replay(run, step)
        except ConfigError:
            return None
        return "start" if not replay.base else f"step-{replay.base:06d}"

    wholly = {step: "start" if step <= SAVED else f"step-{SAVED:06d}" for step in range(1, STEPS + 1)}
    assert listed() == {step: begun(step) for step in wholly} == wholly
    rows = rows_path(run / "recording", 2)
    rows.write_bytes(rows.read_bytes()[:-1])
    lacking = {**wholly, 2: None, 3: None, 4: None}
    assert listed() == {step: begun(step) for step in wholly} == lacking
    with pytest.raises(ConfigError, match="first step 2: the file of its rows is not whole"):
        Replay(run, 3)
    rows.unlink()
    with pytest.raises(ConfigError, match=r"removed for newer ones: raise trainer\.keep_checkpoints for a later"):
        Replay(run, 3)
    # A checkpoint of another history is none for either.
    rewrite(run / "recording", lambda line: with_weights(line, SAVED, 1))
    assert listed() == {step: begun(step) for step in wholly} == {1: "start", **dict.fromkeys(range(2, STEPS + 1))}


def test_the_list_looks_at_each_file_of_rows_a_few_times(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    has_rows = Recording.has_rows
    monkeypatch.setattr(Recording, "has_rows", lambda recording, step: looks.append(step) or has_rows(recording, step))
    bases = Bases(run, read_recording(run / "recording"))

    assert [base.step for step in range(1, STEPS + 1) if (base := bases.of(step))] == [0] * SAVED + [SAVED] * 3

    assert looks == list(range(1, STEPS + 1))
