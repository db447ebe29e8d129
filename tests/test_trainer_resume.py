"""A trainer that dies or is stopped goes on as if nothing had happened: the same weights, the same experience."""

import os
import re
import signal
from pathlib import Path

import pytest

from tests.daemon import SMALL, Daemon, task  # noqa: F401 - a fixture

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
ENDED = re.compile(r"training ended: steps=(\d+) weights=(\w+) experiences=(\w+)")
# The embedded model knows too little to score: where every response scores the same, nothing is learned.
SCORE = """
def of_first_token(input_ids, attention_mask, *, response_start, **_):
    return float(input_ids[response_start] % 5)
"""
IN_STEP = (
    *SMALL,
    "buffer.max_staleness=0",
    "trainer.max_steps=6",
    "trainer.critic_warmup_steps=2",
    "daemon.restart_delay_max_s=0.05",
    "daemon.restart_limit=50",
    'rollout.reward_functions=["score:of_first_token"]',
)
# Loaded by Python in every process before all else; only a trainer dies of it, counted over all its lives.
DIES_WHILE_PUBLISHING = """
import os, signal, sys
if any('"role":"trainer"' in word for word in sys.orig_argv):
    import pipeline.weights as weights
    told = weights._fingerprint
    def fingerprint(memory):
        with open({ledger!r}, "a+") as file:
            file.write(".")
        if os.path.getsize({ledger!r}) in {deaths}:
            os.kill(os.getpid(), signal.SIGKILL)
        return told(memory)
    weights._fingerprint = fingerprint
"""


def daemon_in(folder: Path, *sets: str, **options) -> Daemon:
    folder.mkdir(exist_ok=True)
    (folder / "score.py").write_text(SCORE)
    return Daemon(folder, *IN_STEP, *sets, **options)


def ended(daemon: Daemon) -> tuple[str, str, str]:
    """Return steps, fingerprint of the weights and digest of the experience of a run that has ended in order."""
    assert daemon.wait(180.0) == 0, daemon.errors
    return ENDED.findall(daemon.errors)[-1]


@pytest.fixture(scope="module")
def undisturbed(request, tmp_path_factory, task):  # noqa: F811
    """The algorithm's setting, and how a run ends if nobody disturbs it."""
    setting = f"rollout.algorithm={request.param}"
    with daemon_in(tmp_path_factory.mktemp("undisturbed"), setting, task=task) as daemon:
        return setting, ended(daemon)


@pytest.mark.parametrize("undisturbed", ["ppo"], indirect=True)
def test_a_trainer_killed_at_any_moment_ends_with_the_weights_of_an_undisturbed_run(tmp_path, task, undisturbed):  # noqa: F811
    setting, expected = undisturbed

    with daemon_in(tmp_path, setting, task=task) as daemon:
        for step in (2, 4):
            daemon.wait_step(step)
            daemon.signal(signal.SIGKILL, "trainer-0")
        assert ended(daemon) == expected
        assert len(re.findall(r"^\S+ INFO trainer-0 \S+ went on where", daemon.errors, re.MULTILINE)) == 2


@pytest.mark.parametrize("undisturbed", ["grpo"], indirect=True)
def test_a_trainer_killed_while_it_publishes_ends_with_the_weights_of_an_undisturbed_run(tmp_path, task, undisturbed):  # noqa: F811
    setting, expected = undisturbed
    code, ledger = tmp_path / "code", tmp_path / "publishes"
    code.mkdir()
    # Two a publish, the training state's and the weights'; two a restart.
    (code / "sitecustomize.py").write_text(DIES_WHILE_PUBLISHING.format(ledger=str(ledger), deaths={3, 8}))
    path = [str(code), *filter(None, [os.environ.get("PYTHONPATH"), str(Path(__file__).parent.parent)])]

    with daemon_in(tmp_path, setting, task=task, environment={"PYTHONPATH": os.pathsep.join(path)}) as daemon:
        assert ended(daemon) == expected
        assert len(re.findall(r"trainer-0 ended \(killed by signal 9\)", daemon.errors)) == 2
