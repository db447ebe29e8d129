"""Rows of several turns in a real daemon: the same bits for any number of workers and after kills, and refusals."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.support.daemon import SMALL, Daemon, descendants, rlhfd, total

pytestmark = pytest.mark.integration
STEPS = 4
ENVIRONMENT = """
import asyncio, os
from pipeline import Turn

class Telling:
    async def reset(self, prompt, answer, columns):
        self.turns = 0

    async def step(self, response):
        await asyncio.sleep(float(os.environ.get("TURN_S", "0")))
        self.turns += 1
        told = sum(map(ord, response))
        return Turn(f"{told % 100}>", reward=told % 7 / 7, done=told % 3 == 0, tool_failed=told % 5 == 0)
"""

# The same conversation, driven by verifiers: a taskset, and a harness in the environment's process.
VERIFIERS = """
import verifiers.v1 as vf
from openai import AsyncOpenAI
from pathlib import Path
from pipeline import verifiers_environment

__all__ = ["Tellings", "Loop", "Env"]

class Telling(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward()
    async def told(self, trace: vf.Trace) -> float:
        return sum(map(ord, trace.assistant_messages[-1].content)) % 7 / 7

class Tellings(vf.Taskset[Telling, vf.TasksetConfig]):
    def load(self):
        lines = Path(__file__).with_name("prompts").read_text().splitlines()
        return [Telling(vf.TaskData(prompt=line)) for line in lines]

class Loop(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT, SUPPORTS_RESUME, EXECUTES_CODE, NEEDS_CONTAINER = True, True, False, False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        said = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as model:
            for turn in (1, 2, 3):
                done = await model.chat.completions.create(model=ctx.model, messages=said)
                text = done.choices[0].message.content
                told = sum(map(ord, text))
                if told % 3 == 0:
                    break
                said += [{"role": "assistant", "content": text}, {"role": "user", "content": f"{told % 100}>"}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

class Env(vf.Env[vf.SingleAgentEnvConfig]):
    async def run(self, task, agents):
        await agents.agent.run(task)

def load():
    config = {"taskset": {"id": "told"}, "agent": {"runtime": {"type": "subprocess"}}, "max_concurrent_agents": None}
    return vf.load_environment(vf.resolve_env_config(config))

make = verifiers_environment(load, render=lambda messages: "".join(one["content"] for one in messages))
"""


def settings(folder: Path) -> tuple[str, ...]:
    folder.mkdir(exist_ok=True)
    (folder / "answering.py").write_text(ENVIRONMENT)
    return (
        *SMALL, "rollout.environment=answering:Telling", "rewards=[]", "rollout.max_turns=3",
        "rollout.max_turn_tokens=5", "rollout.max_prompt_length=9", "rollout.max_length=29",
        "buffer.max_staleness=0", f"trainer.max_steps={STEPS}", "trainer.critic_warmup_steps=1",
        "rollout.environment_processes=2", "samples.per_minute=600",
    )  # fmt: skip


def environments_of(worker: int) -> list[int]:
    """Return the pids of a worker's processes that hold environments."""
    return [pid for pid in descendants(worker) if b"rlhfd: environment" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("algorithm", [pytest.param("grpo", marks=pytest.mark.variant), "ppo"])
def test_turns_of_two_workers_with_kills_are_those_of_a_serial_run_bit_for_bit(
    tmp_path: Path, task: Path, algorithm: str
) -> None:
    endings = {}
    sets = (*settings(tmp_path / "serial"), f"rollout.algorithm={algorithm}")
    with Daemon(tmp_path / "serial", *sets, task=task, arguments=("--serial",)) as daemon:
        endings["serial"] = daemon.ended()
    sets = (*settings(tmp_path / "killed"), f"rollout.algorithm={algorithm}", "rollout.workers=2")
    with Daemon(tmp_path / "killed", *sets, task=task, environment={"TURN_S": "0.2"}) as daemon:
        daemon.wait_step(1)
        worker = daemon.pids()["rollout-0"]
        daemon.wait_until(lambda: total(daemon.metrics(), "rlhfd_environment_steps_total") > 150, "steps are under way")
        environments = environments_of(worker)
        assert len(environments) == 2
        for pid in environments:
            os.kill(pid, signal.SIGKILL)
        daemon.wait_step(2)
        assert daemon.pids()["rollout-0"] == worker, "the worker has replaced them"
        daemon.signal(signal.SIGKILL, "rollout-0")
        daemon.wait_step(3)
        metrics = daemon.metrics()
        endings["killed"] = daemon.ended()
    samples = daemon.ask("samples", "--json").stdout

    assert endings["killed"] == endings["serial"] and endings["killed"][0] == str(STEPS), endings
    assert total(metrics, "rlhfd_stage_errors_total", stage="environment") == 0
    assert total(metrics, "rlhfd_environment_steps_total", result="tool_failed") > 0
    assert total(metrics, "rlhfd_items_unaccounted") == 0
    assert '"observed":[false' in samples and "\N{MATHEMATICAL LEFT ANGLE BRACKET}" in daemon.ask("samples").stdout


# CI has it not, for its size (CONTRIBUTING.md).
@pytest.mark.skipif(importlib.util.find_spec("verifiers") is None, reason="pip install 'rlhfd[verifiers]'")
@pytest.mark.timeout(900)
def test_an_environment_of_verifiers_trains_the_bits_of_one_of_ones_own_whoever_is_killed(
    tmp_path: Path, task: Path
) -> None:
    lines = [json.loads(line) for line in (task / "prompts.jsonl").read_text().splitlines()]
    endings = {}
    for name, environment in (("own", "answering:Telling"), ("verifiers", "told:make")):
        folder = tmp_path / name
        sets = (
            *settings(folder), "rollout.max_length=33", f"rollout.environment={environment}",
            f"prompts.path={folder / 'tasks.jsonl'}", "rollout.environment_timeout_s=60",
        )  # fmt: skip
        told = "reward=(self.turns == 3 or told % 3 == 0) * (told % 7 / 7), done=self.turns == 3 or told % 3 == 0"
        (folder / "answering.py").write_text(ENVIRONMENT.replace("reward=told % 7 / 7, done=told % 3 == 0", told))
        (folder / "told.py").write_text(VERIFIERS)
        (folder / "prompts").write_text("".join(line["prompt"] + "\n" for line in lines))
        (folder / "tasks.jsonl").write_text(
            "".join(json.dumps({**line, "task": place}) + "\n" for place, line in enumerate(lines))
        )
        with Daemon(folder, *sets, task=task) as daemon:
            if name == "verifiers":
                daemon.wait_step(1)
                for pid in environments_of(daemon.pids()["rollout-0"]):
                    os.kill(pid, signal.SIGKILL)
                daemon.wait_step(2)
                daemon.signal(signal.SIGKILL, "rollout-0")
            endings[name] = daemon.ended()

    assert endings["own"] == endings["verifiers"] and endings["own"][0] == str(STEPS), endings


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise OSError('no device')", r"rollout\.environment: cannot import answering: OSError: no device"),
        pytest.param(
            "class Telling: pass",
            r"rollout\.environment: the Telling of answering:Telling has no method reset",
            marks=pytest.mark.variant,
        ),
        (
            ENVIRONMENT.replace("self.turns += 1", "raise ValueError('broken')"),
            r"rollout\.environment: ValueError: broken \(.*answering\.py:\d+\), prompt .*prompts\.jsonl:\d+",
        ),
    ],
    ids=["import", "method", "step"],
)
def test_an_environment_that_cannot_work_ends_the_start_with_78(
    tmp_path: Path, task: Path, code: str, message: str
) -> None:
    sets = settings(tmp_path)
    (tmp_path / "answering.py").write_text(code)
    with Daemon(tmp_path, *sets, task=task) as daemon:
        assert daemon.wait() == 78, daemon.errors

    assert re.search(message, daemon.errors), daemon.errors


def test_a_check_imports_the_environment(tmp_path: Path) -> None:
    (tmp_path / "answering.py").write_text("class Telling:\n    def __init__(self, size): pass\n")
    (tmp_path / "c.toml").write_text('rewards = []\n[rollout]\nenvironment = "answering:Telling"\n')

    checked = rlhfd("config", "check", "--config", "c.toml", folder=tmp_path)

    assert checked.returncode == 78
    assert "c.toml:3:15: rollout.environment: answering:Telling cannot be called without arguments" in (
        checked.stdout + checked.stderr
    )


def test_held_out_prompts_are_evaluated_in_the_environment(tmp_path: Path, task: Path) -> None:
    sets = (*settings(tmp_path), "rollout.max_turns=2")
    # 1 and 2 eighths.
    code = ENVIRONMENT.replace("reward=told % 7 / 7, done=told % 3 == 0", "reward=self.turns / 8, done=self.turns == 2")
    (tmp_path / "answering.py").write_text(code)
    held_out = tmp_path / "held.jsonl"
    held_out.write_text("".join((task / "prompts.jsonl").read_text().splitlines(keepends=True)[:4]))
    evaluated = (f"evaluation.files=['{held_out}']", "evaluation.every=2", "evaluation.num_generations=2")
    with Daemon(tmp_path, *sets, *evaluated, task=task) as daemon:
        daemon.ended()
    shutil.rmtree(daemon.shm_dir, ignore_errors=True)

    lines = (daemon.run_dir / "evaluations.jsonl").read_text().splitlines()
    rewards = [float(found) for found in re.findall(r'"reward_mean":([\d.]+)', "".join(lines))]
    assert len(lines) == 3 and rewards and set(rewards) == {0.375}, lines
