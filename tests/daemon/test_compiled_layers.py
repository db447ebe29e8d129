"""A run with compiled layers: the same bits from start to start, no process beside it, no end without a compiler."""

import re
import signal

import pytest
from safetensors.torch import load_file

from tests.support.daemon import SMALL, Daemon, descendants, loaded_first, only_run, telling_reward

pytestmark = pytest.mark.integration
STEPS = 4
COMPILED = re.compile(r"layers are compiled: model=(\w+) layers=1 graphs=[01] seconds=[\d.]+")
SETTINGS = (
    *SMALL, "model.compile=true", f"trainer.max_steps={STEPS}", "buffer.max_staleness=0", "rollout.log_probs=worker",
    # Other passes are not compiled on a CPU.
    "trainer.packing=false", "trainer.shared_prefix=false", "daemon.restart_delay_s=0.0002",
)  # fmt: skip
# As the variable CXX, which torch reads once, as it is imported.
WITHOUT_A_COMPILER = """
def change_torch__inductor_config(module):
    module.cpp.cxx = (None, "none")
"""
HOMELESS = {"HOME": "/dev/null/none", "XDG_CACHE_HOME": "/dev/null/none"}


def test_without_a_compiler_a_run_is_that_of_the_models_as_they_are(tmp_path, task):
    settings = (*SETTINGS, "trainer.max_steps=2", *telling_reward(tmp_path))
    with Daemon(tmp_path, *settings, task=task, environment=loaded_first(tmp_path, WITHOUT_A_COMPILER)) as daemon:
        assert daemon.ended()[0] == "2"

    lines = re.findall(r"layers are .*compiled.*", daemon.errors)
    # The actor's of trainer and worker, and the reference's.
    assert len(lines) == 3
    reason = "layers are not compiled: model=LlamaForCausalLM reason=InvalidCxxCompiler"
    assert all(reason in line for line in lines), lines


@pytest.mark.variant
@pytest.mark.timeout(900)
def test_a_compiled_run_whose_trainer_and_worker_die_has_the_bits_of_one_that_is_left_alone(tmp_path, task):
    found, weights = {}, {}
    for name, killed in (("alone", ()), ("killed", ("trainer-0", "rollout-0"))):
        folder = tmp_path / name
        folder.mkdir()
        # The second run begins with the code of the first one. Empty: torch may have set it in this process.
        (kept,) = (tmp_path / "alone").glob("state/compiled/torch-*/inductor") if killed else ("",)
        environment = {**HOMELESS, "TORCHINDUCTOR_CACHE_DIR": str(kept)}
        settings = (*SETTINGS, *telling_reward(folder, pause_s=0.01))
        with Daemon(folder, *settings, task=task, environment=environment) as daemon:
            daemon.wait_ready()
            for role in killed:
                daemon.wait_step(daemon.status()["step"] + 1)
                pid = daemon.pids()[role]
                assert not descendants(daemon.pids()["trainer-0"]), "a process compiles beside it"
                daemon.signal(signal.SIGKILL, role)
                daemon.wait_replaced(role, pid)
            found[name] = daemon.ended()
        # A role that starts again compiles again, from the code on disk.
        lines = re.findall(r"layers are .*compiled.*", daemon.errors)
        assert len(lines) == (6 if killed else 3), lines
        assert all(COMPILED.fullmatch(line) for line in lines), lines
        assert "some passes are not compiled" not in daemon.errors
        checkpoint = only_run(folder / "state") / "checkpoints" / f"step-{STEPS:06d}"
        weights[name] = load_file(checkpoint / "model.safetensors")

    before = load_file(task / "model" / "model.safetensors")
    assert found["alone"] == found["killed"]
    assert sum((weights["alone"][name] - before[name]).norm() ** 2 for name in before) ** 0.5 > 0.001
    assert all((weights["killed"][name] == weights["alone"][name]).all() for name in before)
