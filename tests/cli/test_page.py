"""`rlhfd page`: serves the page of a run that is not running, from its folder, until Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.cli.main import main
from pipeline.config.identity import run_name
from pipeline.runtime.lock import StateLock
from pipeline.runtime.run_folder import RunFolder
from tests.runtime.test_run_folder import config
from tests.support.daemon import PROGRAM, clean_environment

URL = "http://127.0.0.1:"


def refusal(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["page", *words, "--runtime-dir", "run/rlhfd"])
    return result.exit_code, result.stderr


def test_the_last_run_is_served_until_ctrl_c(folder: Path) -> None:
    of = config(folder)
    RunFolder(of).claim()
    command = [str(PROGRAM), "page", "--runtime-dir", "run/rlhfd"]
    with subprocess.Popen(command, cwd=folder, env=clean_environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url, _, rest = process.stdout.readline().partition(" ")
        with urllib.request.urlopen(f"{url}api/live") as answer:
            status = json.load(answer)["status"]
        with urllib.request.urlopen(url) as answer:
            text = answer.read()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{url}metrics")
        process.send_signal(signal.SIGINT)
        code = process.wait(30)

    assert url.startswith(URL) and rest == f"shows run {run_name(of)} until Ctrl-C\n"
    assert (status["state"], status["run"]) == ("ended", run_name(of)) and b"/page.js" in text
    assert code == 0


def test_a_run_that_runs_is_refused(folder: Path) -> None:
    of = config(folder)
    RunFolder(of).claim()

    with StateLock(folder / "state", folder / "run", run_name(of)):
        # Its daemon does not answer: there is none but this test.
        assert refusal() == (1, f"run {run_name(of)} is running, by pid {os.getpid()}\n")


def test_a_state_folder_without_a_run_and_another_name_are_refused(folder: Path) -> None:
    assert refusal() == (1, f"no run in {folder / 'state'}\n")
    RunFolder(config(folder)).claim()
    assert refusal("nosuch") == (1, f"no run nosuch in {folder / 'state'}; there are: {run_name(config(folder))}\n")


def test_a_port_in_use_is_named_by_its_option(folder: Path) -> None:
    RunFolder(config(folder)).claim()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        code, error = refusal("--port", str(port))

    assert code == 78 and error.startswith(f"--port {port} on 127.0.0.1 is in use by ")
    assert error.endswith("; --port = 0 takes any free port\n")
