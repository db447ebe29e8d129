"""Bad input to a real `rlhfd start`: one clear line that names the place, its exit code, and nothing left behind."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import ExitCode
from pipeline.runtime.lock import shm_directory
from tests.support.daemon import EXACT, SMALL, START_TIMEOUT_S, Daemon, rlhfd, total

pytestmark = pytest.mark.integration

BAD_CONFIG = int(ExitCode.BAD_CONFIG)
USAGE = int(ExitCode.USAGE)
PROMPT = json.dumps({"prompt": "7302>", "answer": "0237"})
MAX_LENGTH = 24
ROOT = Path(__file__).parents[2]

REWARDS = """
def nan(ids, mask, **_): return float("nan")
"""


def refused(daemon: Daemon, *, code: int = BAD_CONFIG, timeout_s: float = START_TIMEOUT_S) -> list[str]:
    """Run a start that must fail; return the lines of standard error, after a check that nothing is left behind."""
    with daemon:
        assert daemon.wait(timeout_s) == code, daemon.errors
    assert not daemon.shm_dir.exists()
    assert not daemon.runtime_dir.exists() or list(daemon.runtime_dir.iterdir()) == []
    assert list(daemon.state_dir.glob("runs/*")) == []
    assert "Traceback" not in daemon.errors
    return daemon.errors.splitlines()


def variant(*values: object) -> Any:
    """Return a case that a usual run leaves out: the same path through a start, the text tested within a process."""
    return pytest.param(*values, marks=pytest.mark.variant)


# The configuration: refused before anything is made.


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        (
            "rollout.temprature=0.7",
            "--set rollout.temprature: unknown key rollout.temprature, did you mean temperature?",
        ),
        variant("rolout.temperature=0.7", "--set rolout.temperature: unknown section rolout, did you mean rollout?"),
        variant("trainer.max_steps=many", '--set trainer.max_steps: must be an integer, got "many"'),
        variant("rollout.num_generations=-4", "--set rollout.num_generations: must be at least 1, got -4"),
        variant("buffer.arena_bytes=-1", "--set buffer.arena_bytes: must be greater than 0, got -1"),
        variant(
            "model.actor=/nowhere/model",
            "--set model.actor: no such directory: /nowhere/model (models are local, none is downloaded)",
        ),
        variant(
            "prompts.path=/nowhere/p.jsonl",
            "--set prompts.path: cannot read /nowhere/p.jsonl: No such file or directory",
        ),
        ("trainer.devices=[512]", "--set trainer.devices: device 512 is not there, {gpus} visible"),
    ],
    ids=lambda value: value.partition("=")[0] if "=" in value else "",
)
def test_bad_value_is_refused_in_one_line(tmp_path: Path, task: Path, setting: str, line: str) -> None:
    shown = refused(Daemon(tmp_path, setting, task=task))

    assert len(shown) == 1
    assert re.fullmatch(re.escape(line).replace(r"\{gpus\}", "(1 GPU is|[0-9]+ GPUs are)"), shown[0])


def test_every_error_of_a_file_is_told_with_its_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[rollout]\ntemprature = 0.7\nworkers = "two"\n\n[buffer]\nlimit = -1\n')

    shown = refused(Daemon(tmp_path, arguments=("--config", str(path))))

    assert shown == [
        f"{path}:2:1: unknown key rollout.temprature, did you mean temperature?",
        f'{path}:3:11: rollout.workers: must be an integer, got "two"',
        f"{path}:6:9: buffer.limit: must be at least 0, got -1",
    ]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        variant([], r"{path}:1:1: no prompt in the file, at least one is needed"),
        variant(["", "  "], r"{path}:1:1: no prompt in the file, at least one is needed"),
        ([*[PROMPT] * 6, '{"prompt": "12>", ', PROMPT], r"{path}:7:\d+: not JSON: .+"),
        variant(
            [*[PROMPT] * 6, '{"promt": "12>"}', PROMPT],
            r'{path}:7:1: no key "prompt" among promt, did you mean "promt"\?',
        ),
    ],
    ids=["empty", "blank", "line 7 is no JSON", "line 7 has no prompt"],
)
def test_bad_prompt_file_is_refused_with_the_place(
    tmp_path: Path, task: Path, lines: Sequence[str], message: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))

    shown = refused(Daemon(tmp_path, f"prompts.path={path}", task=task))

    assert len(shown) == 1
    assert re.fullmatch(message.replace("{path}", re.escape(str(path))), shown[0])


def test_arena_larger_than_shared_memory_is_refused_with_both_sizes(tmp_path: Path, task: Path) -> None:
    system = os.statvfs("/dev/shm")
    nbytes = (system.f_blocks + 1) * system.f_frsize

    lines = refused(Daemon(tmp_path, f"buffer.arena_bytes={nbytes}", task=task))

    # The disk may be too small for the rows of such an arena, too.
    shown = [line for line in lines if "WARNING" not in line or "daemon.state_dir: the disk of" not in line]
    assert len(shown) == 1
    assert re.match(
        r"--set buffer\.arena_bytes: an arena of [\d,]+ B does not fit: [\d,]+ B free of [\d,]+ B on ", shown[0]
    )


def test_port_in_use_is_refused_by_its_number(tmp_path: Path, task: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        shown = refused(Daemon(tmp_path, f"metrics.port={port}", task=task))

    assert len(shown) == 1
    assert shown[0].startswith(f"--set metrics.port {port} on 127.0.0.1 is in use by pid {os.getpid()} (")
    assert shown[0].endswith("; metrics.port = 0 takes any free port")


@pytest.mark.parametrize("arguments", [(), ("--serial",)])
def test_shared_memory_of_another_containers_instance_is_refused_and_left_alone(
    tmp_path: Path, task: Path, arguments: tuple[str, ...]
) -> None:
    daemon = Daemon(tmp_path, task=task, arguments=arguments)
    folder = shm_directory(daemon.runtime_dir)
    folder.mkdir()
    (folder / "arena").write_bytes(b"its rows")
    holder = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)

        with daemon:
            assert daemon.wait(START_TIMEOUT_S) == BAD_CONFIG, daemon.errors
            assert (folder / "arena").read_bytes() == b"its rows"

        assert daemon.errors.splitlines() == [
            f"--set daemon.runtime_dir: {folder} is in use by an instance of another container, which has the same "
            "path: give this one another daemon.runtime_dir"
        ]
    finally:
        os.close(holder)
        shutil.rmtree(folder, ignore_errors=True)


def test_serial_with_two_ranks_is_refused(tmp_path: Path, task: Path) -> None:
    shown = refused(Daemon(tmp_path, "trainer.world_size=2", task=task, arguments=("--serial",)))

    assert len(shown) == 1
    assert shown[0].startswith("--serial: ") and "trainer.world_size = 1" in shown[0]


def test_unknown_option_is_a_usage_error(tmp_path: Path) -> None:
    shown = refused(Daemon(tmp_path, arguments=("--frobnicate",)), code=USAGE)

    assert shown[-1] == "Error: No such option '--frobnicate'."


def test_unknown_command_is_a_usage_error(tmp_path: Path) -> None:
    answer = rlhfd("strat", folder=tmp_path)

    assert answer.returncode == USAGE
    assert "Error: No such command 'strat'. Did you mean start?" in answer.stderr


# The reward: found out by a worker, which ends the whole start.


BROKEN_REWARDS = [
    variant("no_such_rewards:f", "cannot import no_such_rewards: there is no module no_such_rewards; looked in "),
    variant("rewards_of_test:missing", "rewards_of_test has no function missing"),
    ("rewards_of_test:nan", "rewards_of_test:nan returned nan; a reward is a finite number"),
]


@pytest.mark.parametrize(("function", "message"), BROKEN_REWARDS)
def test_broken_reward_function_ends_the_start(tmp_path: Path, task: Path, function: str, message: str) -> None:
    (tmp_path / "rewards_of_test.py").write_text(REWARDS)
    # A trainer would only load, and be ended.
    settings = (*SMALL, f'rewards=["{function}"]', "trainer.kind=external")

    shown = refused(Daemon(tmp_path, *settings, task=task))

    # A log line of the supervisor's: time and level stand before it. A module that is missing is found before.
    assert f"rewards: {message}" in shown[-1]


@pytest.mark.variant
@pytest.mark.parametrize(("function", "message"), [BROKEN_REWARDS[-1]])
def test_broken_reward_function_ends_a_serial_start(tmp_path: Path, task: Path, function: str, message: str) -> None:
    (tmp_path / "rewards_of_test.py").write_text(REWARDS)
    settings = (*SMALL, f'rewards=["{function}"]')

    shown = refused(Daemon(tmp_path, *settings, task=task, arguments=("--serial",)))

    assert shown[-1].startswith(f"--set rewards: {message}")


# A vLLM that is not admitted.


@pytest.mark.parametrize("version", ["0.23.2", variant("0.34.0")])
def test_a_release_of_vllm_that_is_not_admitted_ends_the_start(tmp_path: Path, task: Path, version: str) -> None:
    for name in ("vllm", f"vllm-{version}.dist-info"):
        (tmp_path / name).mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError")
    (tmp_path / f"vllm-{version}.dist-info" / "METADATA").write_text(f"Name: vllm\nVersion: {version}\n")
    settings = (*SMALL, "rollout.engine=vllm", "trainer.kind=external")

    shown = refused(Daemon(tmp_path, *settings, task=task, environment={"PYTHONPATH": f"{tmp_path}:{ROOT}"}))

    assert f"rollout.engine: vLLM {version} is not admitted, >=0.24,<0.34 is: " in shown[-1]


# A GPU that cannot be used: no run computes on the CPU in its place.


@pytest.mark.parametrize("arguments", [(), variant(("--serial",))], ids=["daemon", "serial"])
def test_a_gpu_that_cannot_be_used_ends_the_start(tmp_path: Path, task: Path, arguments: tuple[str, ...]) -> None:
    # No machine has as many: CUDA shows no device then, as it does where the driver does not work.
    environment = {"CUDA_VISIBLE_DEVICES": "97"}

    shown = refused(Daemon(tmp_path, *SMALL, task=task, arguments=arguments, environment=environment))

    assert "this process was given GPU 97 (CUDA_VISIBLE_DEVICES) and cannot use it: " in shown[-1]
    assert shown[-1].endswith('; CUDA_VISIBLE_DEVICES="" runs on the CPU')


# Prompts that leave no room.


def test_file_of_which_no_prompt_leaves_room_ends_the_start(tmp_path: Path, task: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "1" * MAX_LENGTH}) + "\n")

    settings = (*SMALL, f"prompts.path={path}", f"rollout.max_length={MAX_LENGTH}", "trainer.kind=external")
    shown = refused(Daemon(tmp_path, *settings, task=task))

    assert shown[-1].endswith(
        "prompts.path: none of the first 64 prompts can be rolled out, the last one: "
        f"{MAX_LENGTH} tokens leave no room for a response: rollout.max_length is {MAX_LENGTH}"
    )


# Prompts that the chat template refuses: its errors may quote them, and stay out of the log.

USER, SYSTEM = {"role": "user", "content": "7302>"}, {"role": "system", "content": "31415926"}
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' %}"
    "{{ raise_exception('no system role: ' ~ message.content) }}"
    "{% endif %}{{ message.content }}{% endfor %}"
)


def chat_settings(folder: Path, task: Path, *conversations: list[dict[str, str]]) -> tuple[str, ...]:
    """Return settings of a run on these chat messages, with the task's model and a template that knows no system."""
    model = shutil.copytree(task / "model", folder / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": messages, "answer": "0237"}) + "\n" for messages in conversations))
    return (*SMALL, EXACT, f"model.actor={model}", f"prompts.path={path}")


@pytest.mark.variant
def test_a_prompt_that_the_chat_template_refuses_is_set_aside_and_the_run_goes_on(tmp_path: Path, task: Path) -> None:
    settings = chat_settings(tmp_path, task, [USER], [USER], [SYSTEM, USER], [USER])

    with Daemon(tmp_path, *settings) as daemon:
        daemon.wait_step(3)
        daemon.wait_until(
            lambda: total(daemon.metrics(), "rlhfd_experiences_total", outcome="failed") > 0, "it is counted"
        )
        daemon.wait_step(daemon.status()["step"] + 2)
        assert total(daemon.metrics(), "rlhfd_items_unaccounted") == 0
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0, daemon.errors

    reason = r"prompts\.jsonl:3: the prompt does not suit the tokenizer's chat template, which raised TemplateError"
    assert re.search(rf"prompt set aside: position=\d+ line=3 reason=\S*{reason}", daemon.errors)
    assert SYSTEM["content"] not in daemon.errors


@pytest.mark.variant
def test_a_file_of_which_the_chat_template_refuses_every_prompt_ends_the_start(tmp_path: Path, task: Path) -> None:
    settings = chat_settings(tmp_path, task, [SYSTEM, USER])

    shown = refused(Daemon(tmp_path, *settings, "trainer.kind=external"))

    place = tmp_path / "prompts.jsonl:1"
    message = "prompts.path: none of the first 64 prompts can be rolled out, the last one"
    assert f"{message}: {place}: the prompt does not suit" in shown[-1]
    assert SYSTEM["content"] not in "".join(shown)
