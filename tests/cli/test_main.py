"""The command line: its output, the stream of it, and the exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from pipeline.cli import detached
from pipeline.cli import main as cli
from pipeline.cli import status as status_view
from pipeline.config.load import LoadedConfig
from pipeline.errors import ConfigError, ExitCode
from pipeline.runtime.lock import InstanceLock, InstanceRecord
from tests.support.instances import SERVE, process

STATUS = {
    "state": "ready",
    "run_id": "20261121-ab",
    "pid": 12345,
    "uptime_s": 192.3,
    "config": "config.toml",
    "run": "grpo-small-1f2e3d4c",
    "checkpoint": "/data/state/runs/grpo-small-1f2e3d4c/checkpoints/step-001000",
    "metrics_url": "http://127.0.0.1:9477/",
    "algorithm": "grpo",
    "model": "builtin:sort-digits",
    "step": 1042,
    "max_steps": 2000,
    "policy_version": 1041,
    "reward_mean": 0.8125,
    "reward_trend": 0.4375,
    "reward_since_step": 541,
    "tokens_per_s": 12345.6,
    "steps_per_s": 0.1,
    "why": "trainer-0 waits for data: 128 of 256 rows are ready.",
    "needs_restart": ["rollout.temperature"],
    "staleness_mean_versions": 0.8,
    "buffer": {
        "ready_items": 128,
        "leased_items": 256,
        "reserved_items": 64,
        "capacity_bytes": 64 << 20,
        "used_bytes": 16 << 20,
        "sealed": 36352,
        "trained": 36000,
        "dropped": {"stale": 90, "filtered": 0, "quarantined": 6},
        "unaccounted": 0,
    },
    "processes": [
        {"name": "buffer", "role": "buffer", "index": 0, "pid": 1235, "state": "ready", "restarts": 0,
         "uptime_s": 59, "resident_bytes": 900, "devices": "cpu", "last_exit": None},
        {"name": "rollout-0", "role": "rollout", "index": 0, "pid": 1236, "state": "backoff", "restarts": 12,
         "uptime_s": 3 * 3600 + 300, "resident_bytes": 3 << 30, "devices": [0, 1], "last_exit": -9},
        {"name": "rollout-1", "role": "rollout", "index": 1, "pid": None, "state": "failed", "last_exit": 78},
    ],
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("folder")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, list(arguments))


def rlhfd(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", "from pipeline.cli.main import main; main()", *arguments],
        capture_output=True, text=True, env=os.environ | environ,
    )  # fmt: skip


def commands_of(group: click.Group, *names: str) -> Iterator[tuple[str, ...]]:
    """Yield the names of a group and of each of its commands."""
    yield names
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands_of(command, *names, name)
        else:
            yield (*names, name)


class TestCommands:
    def test_import_is_light(self) -> None:
        code = (
            "import sys, pipeline.cli.main; print(*{name.partition('.')[0] for name in sys.modules} "
            "& {'torch', 'numpy', 'transformers', 'pydantic', 'msgspec', 'asyncio', 'zmq', 'rich', 'ray'})"
        )

        assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "\n"

    def test_exit_codes_of_children_are_kept_though_the_parent_ignores_their_ends(self) -> None:
        code = (
            "import signal, subprocess, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
            "from pipeline.cli.main import main; main(['completion', 'bash'], standalone_mode=False); "
            "sys.exit(subprocess.run([sys.executable, '-c', 'raise SystemExit(7)']).returncode)"
        )

        assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 7

    def test_output_that_a_full_disk_refuses_is_one_line_on_standard_error(self) -> None:
        # More than Python's buffer, and less.
        for words in (["config", "show", "--effective"], ["completion", "bash"], ["--help"], ["--version"]):
            code = f"from pipeline.cli.main import main; main({words})"
            with open("/dev/full", "w") as full:
                ended = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True)

            assert (ended.returncode, ended.stderr) == (1, "standard output: No space left on device\n"), words

    def test_standard_streams_that_are_closed_are_the_null_device(self, tmp_path: Path) -> None:
        code = (
            "import faulthandler, os; from pipeline.cli.main import main; "
            "main(['completion', 'bash'], standalone_mode=False); faulthandler.enable(); "
            "found = ' '.join(os.readlink(f'/proc/self/fd/{number}') for number in range(3)); "
            f"open({str(tmp_path / 'found')!r}, 'w').write(found)"
        )

        closed = 'exec "$@" <&- >&- 2>&-'
        status = subprocess.run(["bash", "-c", closed, "bash", sys.executable, "-c", code]).returncode

        assert (status, (tmp_path / "found").read_text()) == (0, "/dev/null /dev/null /dev/null")

    def test_a_current_folder_that_was_removed_is_named_in_one_line(self, tmp_path: Path) -> None:
        code = (
            f"import os; os.chdir({str(tmp_path)!r}); from pipeline.cli.main import main; "
            f"os.rmdir({str(tmp_path)!r}); main(['logs', '--runtime-dir', 'run'])"
        )

        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

        assert ended.returncode == ExitCode.FAILED
        assert ended.stderr == "the current folder has been removed: change to another one\n"

    def test_a_runtime_directory_of_another_user_is_no_wrong_usage(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # As the calls of another user find a directory of mode 0700.
        monkeypatch.setattr(os, "access", lambda *_: False)

        assert run("status", "--runtime-dir", str(folder)).exit_code == ExitCode.NOT_RUNNING

    @pytest.mark.parametrize("words", [["config", "show", "--effective"], ["logs", "--config", "c.toml"]])
    def test_a_pipe_whose_reader_is_gone_is_no_failure(self, folder: Path, words: list[str]) -> None:
        """As of `| head`: a shell with pipefail would take it for one."""
        (folder / "c.toml").write_text("[daemon]\nstate_dir = 'state'")
        (folder / "state/log").mkdir(parents=True)
        (folder / "state/log/rlhfd.log").write_text("a line\n")
        reader, writer = os.pipe()
        os.close(reader)
        code = f"from pipeline.cli.main import main; main({words})"

        ended = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, check=False)
        os.close(writer)

        assert (ended.returncode, ended.stderr) == (0, b"")

    def test_a_path_that_is_none_is_named_in_one_line(self, folder: Path) -> None:
        (folder / "loop").symlink_to("loop")
        for path, reason in (("loop", "Too many levels of symbolic links"), ("a" * 300, "File name too long")):
            result = run("status", "--runtime-dir", path)

            assert result.exit_code == ExitCode.FAILED
            assert result.stderr.startswith(path) and result.stderr.endswith(f": {reason}\n")

    def test_configuration_and_status_need_no_torch(self) -> None:
        code = (
            "import sys; from pipeline.cli.main import main\n"
            "for arguments in (['config', 'check'], ['status']): main(arguments, standalone_mode=False)\n"
        )
        ended = subprocess.run(
            [sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, check=False
        )

        imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
        assert "pydantic" in imported and not imported & {"torch", "numpy", "transformers"}

    def test_help_of_every_command_has_examples(self, subtests: pytest.Subtests) -> None:
        # That of `bench` is another program's, which would take the place of this process.
        for names in sorted({*commands_of(cli.main)} - {("bench",)}):
            with subtests.test(" ".join(["rlhfd", *names])):
                result = run(*names, "--help")

                assert result.exit_code == 0
                examples = result.output.partition("\n  Examples:\n")[2].partition("\n\n")[0].splitlines()
                # One a line, none folded into its neighbour; a group shows those of its commands.
                assert examples and all(line.startswith("    ") and "rlhfd " in line for line in examples)
                assert any(" ".join(["rlhfd", *names]) in line for line in examples)
                assert "..." not in result.output.partition("Commands:")[2], "the list describes each command in full"

    def test_the_commands_are_these(self) -> None:
        config = cli.main.commands["config"]

        assert set(cli.main.commands) == {
            "attach",
            "bench",
            "collect-env",
            "completion",
            "config",
            "dashboards",
            "eval",
            "init",
            "logs",
            "page",
            "pause",
            "plan",
            "ps",
            "record",
            "reload",
            "replay",
            "resume",
            "runs",
            "samples",
            "start",
            "status",
            "stop",
            "systemd",
            "top",
            "try-reward",
            "why",
        }
        assert isinstance(config, click.Group) and set(config.commands) == {"check", "show", "schema"}
        systemd = cli.main.commands["systemd"]
        assert isinstance(systemd, click.Group) and set(systemd.commands) == {"install", "uninstall", "unit"}

    def test_version(self) -> None:
        result = run("--version")

        assert result.exit_code == 0 and result.output.startswith("rlhfd ")

    @pytest.mark.parametrize(
        "arguments",
        [["strat"], ["--wrong"], ["start", "--set"], ["stop", "--timeout-s", "x"], ["stop", "--timeout-s", "-1"],
         ["config", "chck"], ["status", "extra"], ["start", " "]],
    )  # fmt: skip
    def test_usage_errors_exit_with_2(self, arguments: list[str]) -> None:
        assert run(*arguments).exit_code == ExitCode.USAGE


class TestConfig:
    def test_check_of_a_right_file(self, folder: Path) -> None:
        (folder / "c.toml").write_text("[rollout]\nworkers = 2")

        result = run("config", "check", "--config", "c.toml")

        assert (result.exit_code, result.stdout, result.stderr) == (0, "c.toml: ok\n", "")

    def test_check_of_the_embedded_run(self) -> None:
        assert run("config", "check").stdout == "embedded defaults: ok\n"

    @pytest.mark.parametrize("command", [("config", "check"), ("start",)], ids=" ".join)
    def test_unknown_keys_end_with_78_and_a_line_each(self, folder: Path, command: tuple[str, ...]) -> None:
        (folder / "old.toml").write_text("buffer.checksum = 1\ntrainer.width_multiple = 1\n")

        ended = rlhfd(*command, "--config", "old.toml")

        assert (ended.returncode, ended.stdout) == (78, "")
        assert [line.partition(", ")[0] for line in ended.stderr.splitlines()] == [
            "old.toml:1:8: unknown key buffer.checksum",
            "old.toml:2:9: unknown key trainer.width_multiple",
        ]

    def test_check_of_the_embedded_run_with_an_engine_that_is_not_installed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pipeline.config.vllm_release.problem_of_vllm", lambda: "vllm is not installed here")

        result = run("config", "check", "--set", "rollout.engine=vllm")

        assert result.exit_code == 78
        assert "rollout.engine: vllm is not installed here: RLHFD_EXTRAS=vllm bin/rlhfd start" in result.stderr

    def test_check_prints_every_error_in_a_line_and_exits_with_78(self, folder: Path) -> None:
        (folder / "config.toml").write_text("\n" * 6 + "[rollout]\ntemprature = 1\n[buffer]\narena_bytes = -5\n")

        ended = rlhfd("config", "check", "--set", "model.actor=none", RLHFD_CONFIG="config.toml")

        assert (ended.returncode, ended.stdout) == (78, "")
        assert ended.stderr.splitlines() == [
            "config.toml:8:1: unknown key rollout.temprature, did you mean temperature?",
            "config.toml:10:15: buffer.arena_bytes: must be greater than 0, got -5",
            f"--set model.actor: no such directory: {folder}/none (models are local, none is downloaded)",
        ]

    def test_show_and_its_options(self) -> None:
        assert run("config", "show", "--set", "rollout.workers=2").stdout == "[rollout]\nworkers = 2\n"
        assert run("config", "show", "--origin", "--set", "rollout.workers=2").stdout == (
            "[rollout]\nworkers = 2  # --set rollout.workers\n"
        )
        assert "sample_batch_size = 256\n" in run("config", "show", "--effective").stdout
        assert run("config", "show").stdout == ""

    def test_schema_is_json(self) -> None:
        assert "workers" in json.loads(run("config", "schema").stdout)["properties"]["rollout"]["properties"]


class TestStart:
    @pytest.fixture
    def started(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, LoadedConfig]:
        """Runners that only record their arguments."""
        calls: dict[str, LoadedConfig] = {}

        def runner(name: str, code: ExitCode) -> SimpleNamespace:
            def run(loaded: LoadedConfig, *, back_to: str) -> ExitCode:
                calls[f"{name} {back_to}".strip()] = loaded
                return code

            return SimpleNamespace(run=run)

        monkeypatch.setitem(sys.modules, "pipeline.supervisor.supervisor", runner("supervisor", ExitCode.GAVE_UP))
        monkeypatch.setitem(sys.modules, "pipeline.serial", runner("serial", ExitCode.OK))
        return calls

    def test_supervisor_gets_the_configuration_and_gives_the_exit_code(self, started: dict[str, LoadedConfig]) -> None:
        result = run("start", "--set", "rollout.workers=3")

        assert result.exit_code == ExitCode.GAVE_UP
        assert started["supervisor"].config.rollout.workers == 3

    def test_serial_runs_in_this_process(self, started: dict[str, LoadedConfig]) -> None:
        assert run("start", "--serial").exit_code == 0
        assert list(started) == ["serial"]

    def test_a_start_gets_the_checkpoint_that_it_goes_back_to(self, started: dict[str, LoadedConfig]) -> None:
        assert run("start", "--from", "step-000050").exit_code == ExitCode.GAVE_UP
        assert list(started) == ["supervisor step-000050"]

        both, empty = run("start", "--from", "step-000050", "--fresh"), run("start", "--from", "")

        assert both.exit_code == ExitCode.USAGE and "give one of them" in both.stderr
        assert empty.exit_code == ExitCode.USAGE and "--from is empty" in empty.stderr
        assert list(started) == ["supervisor step-000050"]

    @pytest.mark.parametrize("assignment", ["rollout.workers=0", "model.actor=none"])
    def test_nothing_starts_with_a_bad_configuration(self, started: dict[str, LoadedConfig], assignment: str) -> None:
        result = run("start", "--set", assignment)

        assert result.exit_code == ExitCode.BAD_CONFIG and not started
        assert result.stdout == "" and result.stderr.startswith("--set ")

    def test_error_of_the_runner_is_a_line_and_its_exit_code(
        self, started: dict[str, LoadedConfig], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(loaded: LoadedConfig, *, back_to: str) -> ExitCode:
            raise ConfigError("port 9477 is in use")

        monkeypatch.setitem(sys.modules, "pipeline.supervisor.supervisor", SimpleNamespace(run=refuse))

        result = run("start")

        assert (result.exit_code, result.stderr) == (ExitCode.BAD_CONFIG, "port 9477 is in use\n")

    def test_a_serial_run_outlives_the_reader_of_its_output(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        from pipeline import serial

        reader, writer = os.pipe()
        os.close(reader)
        with open(writer, "w") as lost:
            monkeypatch.setattr(sys, "stdout", lost)
            for line in ("step=1", "step=2"):
                serial._tell(line)
        monkeypatch.setattr(sys, "stdout", None)
        serial._tell("step=3")

        assert [record.getMessage() for record in caplog.records] == [
            "standard output is lost, the run goes on without it: [Errno 32] Broken pipe"
        ]

    def test_the_end_of_a_detached_start_without_an_instance_is_told(self) -> None:
        code = (
            "import sys, pathlib; from pipeline.cli import detached; detached._PROGRAM = 'raise SystemExit(0)'; "
            "sys.exit(detached.start((), pathlib.Path('run')))"
        )

        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

        assert (ended.returncode, ended.stdout) == (
            0, "it has ended: its run is complete, or it was stopped; `rlhfd runs` shows which\n",
        )  # fmt: skip

    def test_the_commands_after_a_detached_start_have_its_folder_as_a_shell_takes_it(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        detached._print_hints(InstanceRecord(1, "shm", log="log"), Path("my run"))

        assert "rlhfd stop --runtime-dir 'my run' " in capsys.readouterr().out


class TestStop:
    def test_running_instance_ends_and_the_command_waits_for_it(self, folder: Path) -> None:
        with process(folder, SERVE) as child:
            result = run("stop", "--runtime-dir", ".")

            assert (result.exit_code, result.output) == (0, "")
            assert child.wait(10) == 0

    def test_instance_that_does_not_answer_gets_sigterm(self, folder: Path) -> None:
        with process(folder) as child:
            result = run("stop", "--runtime-dir", ".")

            assert result.exit_code == 0 and result.stderr.endswith("; sending SIGTERM\n")
            assert child.wait(10) == -signal.SIGTERM

    def test_instance_that_goes_on_is_a_failure_that_names_it(self, folder: Path) -> None:
        with process(folder, SERVE, "deaf") as child:
            result = run("stop", "--runtime-dir", ".", "--timeout-s", "0.1")

            assert result.exit_code == ExitCode.FAILED
            assert result.stderr == f"pid {child.pid} in . has not ended within 0.1 s\n"

    def test_an_end_that_is_not_wholly_on_disk_is_a_failure_that_names_the_folder(self, folder: Path) -> None:
        with process(folder, SERVE, "failing"):
            result = run("stop", "--runtime-dir", ".")

        left = f"{folder}/shm keeps the rest for the next start, `rlhfd logs` has the reason\n"
        assert result.exit_code == ExitCode.FAILED
        assert result.stderr == f"it has ended, and not all of it is on disk: {left}"

    def test_nobody_there_exits_with_3(self, folder: Path) -> None:
        ended = rlhfd("stop")

        assert (ended.returncode, ended.stderr) == (3, f"no instance runs in {folder}/run/rlhfd\n")

    def test_instance_is_found_by_a_configuration_that_has_become_wrong(self, folder: Path) -> None:
        (folder / "c.toml").write_text("[daemon]\nruntime_dir = '.'\n[rollout]\nworkers = 0")
        with process(folder, SERVE):
            assert run("stop", "--config", "c.toml").exit_code == 0


class TestStatus:
    @pytest.mark.parametrize("way", ["option", "environment", "configuration"])
    def test_instance_is_found_by(self, folder: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
        options = {"option": ["--runtime-dir", "r"], "configuration": ["--config", "c.toml"]}.get(way, [])
        (folder / "c.toml").write_text("[daemon]\nruntime_dir = 'r'")
        (folder / "r").mkdir()
        if way == "environment":
            monkeypatch.setenv("RLHFD_RUNTIME_DIR", "r")

        with process(folder / "r", SERVE) as child:
            answer = json.loads(run("status", "--json", *options).stdout)

        assert answer == {"state": "ready", "pid": child.pid, "reward_trend": 0.5, "reward_since_step": 7}

    def test_terminal_without_arrows_is_no_error(self, folder: Path) -> None:
        with process(folder, SERVE):
            ended = rlhfd("status", "--runtime-dir", str(folder), PYTHONIOENCODING="latin-1")

        assert ended.returncode == 0, ended.stderr
        assert r"\u2191 +0.5000 since step 7" in ended.stdout

    def test_characters_that_a_terminal_lacks_are_escaped_by_every_command(self, folder: Path) -> None:
        ended = rlhfd("config", "show", "--set", "daemon.state_dir=/\u043f", PYTHONIOENCODING="latin-1")

        assert (ended.returncode, ended.stderr) == (0, "")
        assert r'state_dir = "/\u043f"' in ended.stdout

    def test_nobody_there_exits_with_3(self) -> None:
        ended = rlhfd("status", RLHFD_RUNTIME_DIR="/none")

        assert (ended.returncode, ended.stdout, ended.stderr) == (3, "", "no instance runs in /none\n")

    def test_instance_that_starts_exits_with_4(self, folder: Path) -> None:
        with InstanceLock(folder):
            result = run("status", "--runtime-dir", ".")

        assert result.exit_code == ExitCode.UNREACHABLE
        assert "does not answer: it starts or ends, or runs with --serial" in result.stderr

    def test_answer_is_readable_at_a_glance(self) -> None:
        assert status_view.render(STATUS).splitlines() == [
            "state      ready, up 3 min 12 s",
            "step       1,042 of 2,000, about 2 h 39 min left",
            "reward     0.8125 ↑ +0.4375 since step 541",
            "speed      12,346 tokens/s, 6.0 steps/min",
            "now        trainer-0 waits for data: 128 of 256 rows are ready.",
            "ATTENTION  rollout 1 has failed; rollout 0 was started again 12 times; 6 rows are in quarantine; "
            "changed, needs a restart: rollout.temperature",
            "buffer     128 ready, 256 leased, 64 reserved; arena 16.0 MiB of 64.0 MiB (25%)",
            "staleness  0.80 versions, policy version 1,041",
            "rows       36,352 sealed, 36,000 trained, 96 (90 stale, 6 quarantined) dropped",
            "model      builtin:sort-digits, grpo",
            "checkpoint /data/state/runs/grpo-small-1f2e3d4c/checkpoints/step-001000",
            "run        grpo-small-1f2e3d4c, id 20261121-ab",
            "daemon     pid 12345, configured by config.toml",
            "metrics    http://127.0.0.1:9477/",
            "",
            "process    pid   state    restarts  up          memory   devices  last exit",
            "buffer 0   1235  ready    0         59 s        900 B    cpu      –",
            "rollout 0  1236  backoff  12        3 h 05 min  3.0 GiB  0, 1     SIGKILL",
            "rollout 1  –     failed   –         –           –        –        exit 78",
        ]

    def test_without_a_number_of_steps_there_is_no_end_to_tell(self) -> None:
        assert "step       1,042" in status_view.render(STATUS | {"max_steps": 0}).splitlines()

    def test_a_cluster_is_shown_by_its_nodes_and_actors(self) -> None:
        nodes = [{"name": f"gpu-{number}", "address": f"10.0.0.{number}", "workers": []} for number in range(3)]
        whole = {"nodes": nodes, "left": [], "actors": {"pending": 0, "placed": 2}}
        lost = {"nodes": nodes[:2], "left": ["gpu-2 (10.0.0.2)"], "actors": {"pending": 1, "placed": 1}}

        assert "cluster    3 nodes; actors: 2 placed" in status_view.render(STATUS | {"cluster": whole}).splitlines()
        assert (
            "cluster    2 nodes, 1 left: gpu-2 (10.0.0.2); actors: 1 placed, 1 waits for a node"
            in status_view.render(STATUS | {"cluster": lost}).splitlines()
        )
        assert "cluster" not in status_view.render(STATUS | {"cluster": None})

    def test_a_rollout_in_progress_tells_rows_and_tokens(self) -> None:
        buffer, worker, failed = STATUS["processes"]
        rolling = worker | {"progress": {"rows_done": 12, "rows": 128, "tokens": 3412}}
        passing = worker | {"index": 2, "progress": {"rows_done": 64, "rows": 128, "tokens": 0}}

        lines = status_view.render(STATUS | {"processes": [buffer, rolling, failed, passing]}).splitlines()

        (line,) = [line for line in lines if line.startswith("rollouts")]
        assert line == "rollouts   rollout 0: 12 of 128 rows, 3,412 tokens; rollout 2: 64 of 128 rows"

    def test_nothing_to_look_at_is_not_shown(self) -> None:
        healthy = STATUS | {"needs_restart": [], "processes": STATUS["processes"][:1], "buffer": {"unaccounted": 0}}

        assert status_view.warnings(healthy) == []
        assert "ATTENTION" not in status_view.render(healthy)

    def test_values_of_the_last_step_stand_in_one_line(self) -> None:
        learning = {"loss": -0.00212, "entropy": 1.3125, "response_length": 41.25, "clipped": 0.0125, "kl": None}

        text = status_view.render(STATUS | {"learning": learning})

        assert "learning   loss -0.00212, entropy 1.312 nats, response length 41.2 tokens, clipped 1.25%\n" in text, (
            text
        )
        assert "learning" not in status_view.render(STATUS)

    def test_lost_rows_stand_out(self) -> None:
        text = status_view.render(STATUS | {"buffer": {"unaccounted": 2}})

        assert "ATTENTION  2 rows are unaccounted for, please report this; " in text

    @pytest.mark.parametrize("missing", [*STATUS, "everything"])
    def test_answer_with_gaps_is_shown_with_dashes(self, missing: str) -> None:
        status: dict[str, Any] = {} if missing == "everything" else STATUS | {missing: None}

        assert status_view.render(status).startswith("state ")

    @pytest.mark.parametrize(("trend", "arrow"), [(0.1, "↑"), (-0.1, "↓"), (0.0, "→")])
    def test_trend_has_its_arrow(self, trend: float, arrow: str) -> None:
        assert f"0.8125 {arrow} " in status_view.render(STATUS | {"reward_trend": trend})
