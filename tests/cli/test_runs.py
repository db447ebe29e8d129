"""`rlhfd runs`: what each run is, its state, and where its model lies."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline import sort_digits
from pipeline.cli.main import main
from pipeline.cli.runs import state_dir_of
from pipeline.config.identity import run_dir, run_name
from pipeline.config.load import load
from pipeline.runtime.lock import InstanceLock, StateLock
from pipeline.runtime.run_folder import RunFolder
from tests.runtime.test_run_folder import config, save
from tests.support.daemon import PROGRAM, clean_environment
from tests.support.instances import SERVE, process, serving


def shown(*words):
    result = CliRunner().invoke(main, ["runs", *words, "--runtime-dir", "run/rlhfd"])
    assert result.exit_code == 0, result.output
    return result


def test_each_run_is_listed_with_its_state_and_the_folder_of_its_model(folder):
    complete, running = config(folder, trainer={"max_steps": 2}), config(folder, daemon={"seed": 1})
    models = {}
    for of, step in ((complete, 2), (running, 1234)):
        RunFolder(of).claim()
        models[run_name(of)] = str(save(of, step, "a"))

    with StateLock(folder / "state", folder / "run", run_name(running)):
        entries = json.loads(shown("--json").stdout)
        table = shown().stdout.splitlines()

    assert [(run["name"], run["state"], run["step"], run["checkpoint"]) for run in entries] == [
        (run_name(complete), "complete", 2, models[run_name(complete)]),
        (run_name(running), "running", 1234, models[run_name(running)]),
    ]
    assert entries[1]["checkpoints"] == ["step-001234"] and entries[1]["settings"]["daemon.seed"] == 1
    assert table[0].split() == ["run", "algorithm", "model", "step", "state", "last", "start", "checkpoint"]
    assert table[2].startswith(run_name(running)) and table[2].endswith(models[run_name(running)])
    assert "1,234" in table[2]
    assert json.loads(shown("--json").stdout)[1]["state"] == "stopped", "its daemon has ended"


@pytest.mark.parametrize(("is_its_own", "step"), [(True, 140), (False, 100)])
def test_a_run_that_runs_is_listed_with_its_present_step(folder, is_its_own, step):
    """Another run's instance has its runtime directory where the state directory is one of several machines."""
    of = config(folder)
    RunFolder(of).claim()
    save(of, 100, "a")

    async def tell(request):
        return {"step": 140, "run": run_name(of) if is_its_own else "another"}

    at = folder / "run"
    with InstanceLock(at), StateLock(folder / "state", at, run_name(of)), serving(at, tell) as told:
        told.write(at)
        (run,) = json.loads(shown("--json").stdout)

    assert (run["step"], run["checkpoints"]) == (step, ["step-000100"])


def test_the_name_of_a_run_that_config_show_tells_is_that_of_its_folder(folder):
    of = sort_digits.with_paths(load(None, (), {}).config)
    RunFolder(of).claim()

    shown = CliRunner().invoke(main, ["config", "show", "--effective"]).stdout

    (made,) = (folder / "state" / "runs").iterdir()
    assert f"# run_name is left out  # {made.name}, by the run's identity" in shown.splitlines()


def test_runs_are_listed_while_an_instance_removes_its_shared_memory(folder):
    with process(folder / "run/rlhfd", SERVE):
        assert shown().stdout == f"no run in {folder / 'state'}\n"


def test_runs_are_listed_while_an_instance_starts(folder):
    of = config(folder, daemon={"runtime_dir": "run/rlhfd"})
    RunFolder(of).claim()

    with InstanceLock(folder / "run/rlhfd"), StateLock(folder / "state", folder / "run/rlhfd", run_name(of)):
        assert [run["state"] for run in json.loads(shown("--json").stdout)] == ["running"]
    with InstanceLock(folder / "run/rlhfd"):
        # Of another state directory, maybe.
        unknown = CliRunner().invoke(main, ["runs", "--runtime-dir", "run/rlhfd"])
    assert unknown.exit_code == 4 and "it starts or ends" in unknown.stderr


def test_without_a_run_the_folder_that_was_searched_is_named(folder, caplog):
    assert shown().stdout == f"no run in {folder / 'state'}\n"


def test_of_a_runtime_directory_without_an_instance_a_line_says_whose_runs_are_shown(folder):
    RunFolder(config(folder)).claim()
    (folder / "c.toml").write_text("")

    for command in ("runs", "samples"):
        result = CliRunner().invoke(main, [command, "--runtime-dir", "run2"])

        assert result.exit_code == 0
        assert (
            f"no instance runs in run2: these are the runs of {folder}/state, --config names those of" in result.stderr
        )
    named = CliRunner().invoke(main, ["runs", "--json", "--runtime-dir", "run2", "--config", "c.toml"])
    assert [run["name"] for run in json.loads(named.stdout)] == [run_name(config(folder))]
    # A service that is stopped: the folders of its unit are known.
    assert state_dir_of(Path("/run/rlhfd-none"), None) == Path("/var/lib/rlhfd-none")


def test_a_run_with_a_damaged_record_of_its_latest_checkpoint_is_listed_with_its_newest_one(folder, caplog):
    of = config(folder)
    RunFolder(of).claim()
    model = save(of, 7, "a")
    (run_dir(of) / "checkpoints/latest.json").write_text("{")

    (run,) = json.loads(shown("--json").stdout)

    assert (run["step"], run["checkpoint"], run["state"]) == (7, str(model), "stopped")
    assert "latest.json" in caplog.text and "damaged" in caplog.text


def test_a_run_whose_description_is_damaged_is_named(folder, caplog):
    RunFolder(config(folder)).claim()
    (run_dir(config(folder)) / "run.json").write_text("{")

    assert shown().stdout == f"no run in {folder / 'state'}\n"
    assert f"a run is left out, its description cannot be read: {run_dir(config(folder))}" in caplog.text


def test_a_file_in_the_place_of_a_folder_is_named_in_one_line(folder):
    (folder / "state").mkdir()
    (folder / "state/log").write_text("")

    result = CliRunner().invoke(main, ["logs", "--runtime-dir", "run/rlhfd"])

    assert (result.exit_code, result.stderr) == (1, f"{folder}/state/log/rlhfd.log: Not a directory\n")


@pytest.mark.needs("setpriv")
def test_folders_that_this_user_may_not_read_are_named_in_one_line(folder, subtests):
    RunFolder(config(folder)).claim()
    run, log = run_dir(config(folder)), folder / "state/log"
    log.mkdir()
    # As another user than root, who may read all.
    bare = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all"] if not os.geteuid() else []
    for denied, command, line in (
        (run.parent, "runs", f"{run.parent}: Permission denied"),
        (run, "page", f"{run}/run.json: Permission denied"),
        (log, "logs", f"{log}/rlhfd.log: Permission denied"),
    ):
        mode = denied.stat().st_mode
        denied.chmod(0)
        with subtests.test(command):
            ended = subprocess.run(
                [*bare, str(PROGRAM), command], env=clean_environment(), capture_output=True, text=True
            )
            assert (ended.returncode, ended.stdout) == (1, "")
            assert line in ended.stderr and "Traceback" not in ended.stderr and "remove" not in ended.stderr
        denied.chmod(mode)


def test_samples_of_a_run_that_is_not_there_name_those_that_are(folder):
    RunFolder(config(folder)).claim()

    result = CliRunner().invoke(main, ["samples", "--run", "nosuch", "--runtime-dir", "run/rlhfd"])

    assert result.exit_code == 1
    assert result.stderr == f"no run nosuch in {folder / 'state'}; there are: {run_dir(config(folder)).name}\n"
