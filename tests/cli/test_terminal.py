"""The terminal commands' output for an instance's answers, and a bug report from a broken machine."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.cli import top as top_view
from pipeline.cli.collect_env import collect, text
from pipeline.cli.status import devices, engine, render
from pipeline.config.schema import Config
from pipeline.telemetry import log_file
from tests.cli.test_main import STATUS
from tests.support.instances import SERVE, process

WHY = {
    "sentences": ["trainer-0 waits for data."],
    "processes": [
        {"name": "buffer", "pid": 1235, "stopped": False, "activity": "wait_data", "since_s": 0.1, "working_on": -1,
         "last_minute": {"wait_data": 0.99, "other": 0.01}},
        {"name": "rollout-0", "pid": 1236, "stopped": True, "activity": "generate", "since_s": 41.2, "working_on": 1700,
         "last_minute": {"generate": 0.9, "reward": 0.1}},
    ],
}  # fmt: skip


def test_the_last_minute_is_whole_in_a_pipe_and_has_the_activities_that_fit_on_a_screen() -> None:
    spent = {"generate": 0.4, "log_probs": 0.3, "reference": 0.2, "reward": 0.06, "wait_ticket": 0.04}
    (rollout,) = (one for one in WHY["processes"] if one["name"] == "rollout-0")
    why = {**WHY, "processes": [{**rollout, "last_minute": spent}]}
    console = Console(width=250, file=io.StringIO())

    console.print(top_view.screen(STATUS, why, width=250))

    all_of_it = "generate 40% log_probs 30% reference 20% reward 6% wait_ticket 4%"
    assert all_of_it in top_view.text(STATUS, why)
    assert "generate 40% log_probs 30% reference 20%  " in console.file.getvalue()


@pytest.mark.parametrize(
    ("process", "shown"),
    [
        ({"devices": "cpu", "device": ""}, "cpu"),
        ({"devices": "cpu", "device": "cpu"}, "cpu"),
        ({"devices": "3", "device": ""}, "3"),
        ({"devices": "3", "device": "NVIDIA H200"}, "3: NVIDIA H200"),
        ({"devices": "cpu", "device": "cpu", "node": ""}, "cpu"),
        ({"devices": "cpu", "device": "cpu", "node": "gpu-7 (10.0.0.7)"}, "node gpu-7 (10.0.0.7)"),
        ({}, "–"),
    ],
)
def test_a_device_is_shown_with_its_name_once_it_computes(process: dict[str, str], shown: str) -> None:
    assert devices(process) == shown


class TestTop:
    def test_a_row_tells_what_a_process_is_at(self) -> None:
        lines = top_view.text(STATUS, WHY).splitlines()

        assert [re.split(r"\s{2,}", line) for line in lines] == [
            ["process", "pid", "state", "doing", "for", "on", "engine", "last minute", "restarts", "memory",
             "devices"],
            ["buffer 0", "1235", "ready", "wait_data", "0 s", "–", "–", "wait_data 99%", "0", "900 B", "cpu"],
            ["rollout 0", "1236", "stopped", "generate", "41 s", "ticket 1,700", "–", "generate 90% reward 10%", "12",
             "3.0 GiB", "0, 1"],
            ["rollout 1", "–", "failed", "–", "–", "–", "–", "–", "–", "–", "–"],
        ]  # fmt: skip

    def test_a_ticket_in_work_has_the_rows_and_tokens_done(self) -> None:
        progress = {"progress": {"rows_done": 12, "rows": 128, "tokens": 3412}}
        processes = [one | progress if one["role"] == "rollout" else one for one in STATUS["processes"]]

        (row,) = [row for row in top_view.rows(STATUS | {"processes": processes}, WHY) if row[0] == "rollout 0"]

        assert row[5] == "ticket 1,700: 12 of 128 rows, 3,412 tokens"

    def test_an_engine_is_shown_by_its_work_in_hand_and_by_status_with_its_speed(self) -> None:
        values = {
            "running": 1024, "waiting": 8, "room": 1024, "cache_ratio": 0.971, "preemptions": 2,
            "tokens_in_per_s": 1234.5, "tokens_out_per_s": 56789.0, "prefix_hit_ratio": 0.25,
        }  # fmt: skip
        processes = [one | {"engine": values} if one["pid"] == 1236 else one for one in STATUS["processes"]]
        status = STATUS | {"processes": processes}

        (row,) = [row for row in top_view.rows(status, WHY) if row[0] == "rollout 0"]

        assert row[6] == "1,024 run, 8 wait, cache 97 %, 2 preempted"
        assert (
            "engines    rollout 0: 1,024 run, 8 wait, cache 97 %, 2 preempted, prefix hits 25 %, 1,234 tokens/s in, "
            "56,789 out"
        ) in render(status).splitlines()
        assert engine({"engine": {"running": 3, "waiting": 0, "cache_ratio": 0.0, "preemptions": 0}}) == "3 run, 0 wait"
        assert engine({"engine": None}) == engine({}) == ""

    def test_the_screen_has_panel_warnings_sentences_and_processes(self) -> None:
        console = Console(file=io.StringIO(), width=160, color_system=None)

        console.print(top_view.screen(STATUS, WHY))

        assert isinstance(console.file, io.StringIO)
        shown = console.file.getvalue()
        for part in ("1,042 / 2,000", "ATTENTION: rollout 1 has failed", "trainer-0 waits for data.", "ticket 1,700"):
            assert part in shown

    @pytest.mark.parametrize(
        ("width", "last"), [(50, "for"), (60, "restarts"), (80, "memory"), (100, "devices"), (160, "devices")]
    )
    def test_a_narrow_screen_leaves_columns_out_and_cuts_none_short(self, width: int, last: str) -> None:
        console = Console(file=io.StringIO(), width=width, color_system=None)

        console.print(top_view.screen(STATUS, WHY, width=width))

        assert isinstance(console.file, io.StringIO)
        head, *lines = console.file.getvalue().splitlines()[-6:-2]
        assert head.split()[-1] == last
        assert [line.split()[:2] for line in lines] == [["buffer", "0"], ["rollout", "0"], ["rollout", "1"]]
        assert "…" not in "".join([head, *lines])

    @pytest.mark.parametrize(
        ("height", "parts", "processes"),
        [(24, 3, 3), (11, 3, 3), (10, 2, 3), (8, 1, 3), (6, 1, 3), (5, 1, 2), (4, 1, 1)],
    )
    def test_a_short_screen_has_the_processes_that_fit_and_counts_the_others(
        self, height: int, parts: int, processes: int
    ) -> None:
        console = Console(file=io.StringIO(), width=100, color_system=None)
        status = {**STATUS, "algorithm": "grpo"}

        console.print(top_view.screen(status, WHY, width=100, height=height))

        assert isinstance(console.file, io.StringIO)
        lines = console.file.getvalue().splitlines()
        assert len(lines) <= height
        shown = [line for line in lines if line.startswith(("buffer 0", "rollout 0", "rollout 1"))]
        assert len(shown) == processes
        assert ("ATTENTION: rollout 1 has failed" in lines) == (parts > 1)
        assert ("trainer-0 waits for data." in lines) == (parts > 2)
        assert "Ctrl-C leaves" in lines[-1] and ("4 more warnings" in lines[-1]) == (parts == 1)
        assert ("more processes" in lines[-1]) == (processes < 3)

    def test_an_answer_of_another_version_is_no_error(self) -> None:
        console = Console(file=io.StringIO(), width=160)

        console.print(top_view.screen({}, {}))
        assert top_view.text({}, {}).startswith("process")


class TestReport:
    def test_a_broken_configuration_is_told_with_its_mistakes_and_the_rest_is_there(self, tmp_path: Path) -> None:
        (tmp_path / "c.toml").write_text("[rollout]\nworkers = 0\n")

        told = text(collect(tmp_path / "c.toml", (), {"PATH": os.environ["PATH"]}, None))

        assert f"{tmp_path}/c.toml:2:11: rollout.workers: must be at least 1, got 0" in told
        assert f"no instance runs in {tmp_path}/run/rlhfd" in told
        assert "## packages" in told and "msgspec: 0." in told

    @pytest.mark.parametrize("content", ["[", "\0", "[daemon]\nruntime_dir = 3"])
    def test_nothing_makes_it_fail(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "c.toml").write_text(content)

        assert text(collect(tmp_path / "c.toml", ("x",), {}, None)).count("## ") == 12

    def test_what_cannot_be_told_costs_nothing_else(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("platform.platform", lambda: 1 / 0)

        told = collect(None, (), {}, tmp_path)

        assert "not available: ZeroDivisionError: division by zero" in told["machine"]
        assert isinstance(told["limits"], dict) and "open files" in told["limits"]

    def test_variables_that_hold_secrets_are_hidden(self) -> None:
        told = collect(
            None, (), {"HF_TOKEN": "a1", "RLHFD_X_PASSWORD": "a2", "TOKENIZERS_PARALLELISM": "a3", "MINE": "a4"}, None
        )

        assert told["environment"] == {
            "HF_TOKEN": "(hidden)", "RLHFD_X_PASSWORD": "(hidden)", "TOKENIZERS_PARALLELISM": "a3",
        }  # fmt: skip

    def test_the_key_of_a_service_is_hidden_under_any_name(self, tmp_path: Path) -> None:
        (tmp_path / "c.toml").write_text(
            '[[rewards]]\nname = "remote"\nurl = "https://judge.example/v1"\napi_key_variable = "VLLM_JUDGE"\n'
        )
        environ = {
            "VLLM_JUDGE": "sesame1",
            "VLLM_BEARER": "sesame2",
            "NVIDIA_PAT": "sesame3",
            "RAY_DB_PWD": "sesame4",
            "VLLM_A": "5",
        }

        told = collect(tmp_path / "c.toml", (), environ, None)

        assert told["environment"] == {**dict.fromkeys(environ, "(hidden)"), "VLLM_A": "5"}
        assert "sesame" not in text(told)

    def test_secrets_in_addresses_are_masked_in_every_part(self, tmp_path: Path) -> None:
        (tmp_path / "c.toml").write_text(
            '[[rewards]]\nname = "remote"\nurl = "https://judge.example/v1?key=sesame1&rows=3"\n'
        )
        environ = {"HF_ENDPOINT": "https://me:ab/c3@hub.example/", "RLHFD_SAMPLES__PER_MINUTE": "7"}

        told = text(collect(tmp_path / "c.toml", (), environ, None))

        assert 'url = "https://judge.example/v1?key=***&rows=3"' in told
        assert "HF_ENDPOINT: https://***@hub.example/" in told and "RLHFD_SAMPLES__PER_MINUTE: 7" in told
        assert not any(secret in told for secret in ("sesame1", "ab/c3"))


class TestLastErrors:
    LINES = (
        "2026-11-21T07:30:01.250Z INFO rollout-0 pipeline.a: fine\n"
        "2026-11-21T07:30:01.250Z WARNING rollout-0 pipeline.a: hm: tickets=3\n"
        "2026-11-21T07:30:01.250Z ERROR supervisor pipeline.b: boom\n"
    )

    def write(self, folder: Path, text: str = "") -> Path:
        (folder / "c.toml").write_text(text)
        log = log_file.path_in(folder / "state")
        log.parent.mkdir(parents=True)
        log.write_text(self.LINES)
        return folder / "c.toml"

    def test_warnings_and_errors_of_a_run_that_has_ended_are_in_the_report(self, tmp_path: Path) -> None:
        told = collect(self.write(tmp_path), (), {}, None)

        assert told["last warnings and errors"] == self.LINES.splitlines()[1:]

    def test_where_lines_may_quote_prompts_none_is_told(self, tmp_path: Path) -> None:
        told = text(collect(self.write(tmp_path, "[daemon]\nlog_texts = true\n"), (), {}, None))

        assert "boom" not in told and "left out, for daemon.log_texts is true" in told

    def test_folders_and_texts_are_those_of_the_instance_and_not_of_the_file(self, tmp_path: Path) -> None:
        # As started with --set daemon.log_texts=true and another state directory.
        path, run = self.write(tmp_path), tmp_path / "run2"
        (tmp_path / "its").mkdir()
        its = Config.model_validate({"daemon": {"state_dir": tmp_path / "its", "log_texts": True}})
        run.mkdir()
        with process(run, SERVE):
            (run / "shm" / "config.json").write_text(its.model_dump_json())
            told = collect(path, (), {}, run)

        (left_out,) = told["last warnings and errors"]
        assert left_out.startswith("left out, for daemon.log_texts is true and lines may quote prompts")
        assert str(tmp_path / "its") in told["shared memory and disks"]

    def test_an_instance_that_is_not_there_has_no_folders_of_another_one(self, tmp_path: Path) -> None:
        told = collect(self.write(tmp_path), (), {}, tmp_path / "run2")

        none = f"no instance runs in {tmp_path}/run2: name its configuration by --config"
        assert told["runs"] == told["last warnings and errors"] == [none]


class TestCompletion:
    def completed(self, *words: str) -> list[str]:
        asked = {"_RLHFD_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
        code = "from pipeline.cli.main import main; main(prog_name='rlhfd')"
        told = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | asked, capture_output=True, text=True, check=True
        )
        return [line.partition(",")[2] for line in told.stdout.splitlines()]

    def test_commands_options_and_keys_are_completed(self) -> None:
        assert self.completed("rlhfd", "re") == ["record", "reload", "replay", "resume"]
        assert self.completed("rlhfd", "config", "s") == ["schema", "show"]
        assert self.completed("rlhfd", "p") == ["page", "pause", "plan", "ps"]
        assert self.completed("rlhfd", "start", "--d") == ["--detach"]
        assert self.completed("rlhfd", "try-reward", "--res") == ["--response"]
        assert self.completed("rlhfd", "top", "--j") == ["--json"]
        assert self.completed("rlhfd", "start", "--set", "rollout.wo") == ["rollout.workers="]

    @pytest.mark.parametrize(
        ("shell", "word"), [("bash", "complete -o"), ("zsh", "#compdef rlhfd"), ("fish", "complete ")]
    )
    def test_each_shell_gets_its_script(self, shell: str, word: str) -> None:
        code = f"from pipeline.cli.main import main; main(['completion', '{shell}'])"
        script = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

        assert word in script and "_RLHFD_COMPLETE" in script
        if shell == "bash":
            subprocess.run(["bash", "-n"], input=script, text=True, check=True)
