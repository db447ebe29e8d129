"""The examples for Slurm and KubeRay, as far as they can run without either."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.daemon import (
    END_TIMEOUT_S,
    SMALL,
    START_TIMEOUT_S,
    clean_environment,
    descendants,
    is_alive,
    task_settings,
    wait_until,
)

ROOT = Path(__file__).parents[2]
SBATCH = ROOT / "examples" / "slurm" / "rlhfd.sbatch"
KUBERAY = ROOT / "examples" / "kuberay"
# In the place of Slurm: each task of a step is a process of this machine, and SIGTERM to a step ends its tasks.
SRUN = """#!/usr/bin/env bash
echo "srun $*" >>"$STAND_IN_LOG"
while [[ $1 == --* ]]; do
    if [[ $1 == --ntasks=* ]]; then tasks=${1#*=}; fi
    shift
done
pids=()
trap 'kill -TERM "${pids[@]}"' TERM
for ((task = 0; task < tasks; task++)); do
    : >"$STAND_IN_LOG.$task"
    "$@" >>"$STAND_IN_LOG.$task" 2>&1 &
    pids+=($!)
    # On one machine two that start at once take the same ports.
    until grep --quiet "Ray runtime started" "$STAND_IN_LOG.$task" || ! kill -0 "${pids[-1]}"; do sleep 0.2; done
done
for pid in "${pids[@]}"; do wait "$pid"; done
wait
"""
SCONTROL = """#!/usr/bin/env bash
[[ "$1 $2 $3" == "show hostnames "* ]] && printf '%s\\n' $(seq -f 'node-%g' 1 3)
"""
# In the place of Ray and of the daemon.
ENDING_HEAD = """#!/usr/bin/env bash
echo "Ray runtime started"
case "$1$2" in
start--head) sleep 1 ;;
start*) exec sleep 60 ;;
esac
"""
DAEMON = """#!/usr/bin/env bash
trap 'kill $!; echo drained; exit 0' TERM
sleep 60 &
wait
"""


def test_the_script_is_bash_and_its_directives_come_before_the_first_command() -> None:
    assert subprocess.run(["bash", "-n", SBATCH], check=False).returncode == 0

    lines = SBATCH.read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    directives = [number for number, line in enumerate(lines) if line.startswith("#SBATCH ")]
    assert len(directives) == 10 and max(directives) < first


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a job with stand-ins for the commands of Slurm."""
    programs = tmp_path / "slurm"
    programs.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        programs.joinpath(name).write_text(text)
        programs.joinpath(name).chmod(0o755)
    job = 1_000_000 + os.getpid()
    yield {
        **clean_environment(),
        "PATH": f"{programs}:{os.environ['PATH']}",
        "STAND_IN_LOG": str(tmp_path / "srun.log"),
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_NODELIST": "node-[1-3]",
        "SLURM_CPUS_PER_TASK": "1",
        "RLHFD_VENV": sys.prefix,
        "ACTORS_PER_NODE": "1",
        "WORKER_GPUS": "0",
        # Ray writes the head's address into its default folder too.
        "RAY_TMPDIR": str(tmp_path / "no-ray"),
    }
    assert not Path(f"/tmp/ray-{job}").exists()


def test_one_node_is_refused_with_the_reason(slurm: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "slurm" / "scontrol").write_text("#!/bin/sh\necho node-1\n")

    done = subprocess.run([SBATCH], env=slurm, capture_output=True, text=True, timeout=60, check=False)

    assert (done.returncode, done.stderr) == (78, "one node has no node for rollouts: sbatch --nodes=2 at least\n")


def test_a_job_whose_head_ends_drains_its_daemon_and_has_failed(slurm: dict[str, str], tmp_path: Path) -> None:
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for name, text in (("ray", ENDING_HEAD), ("rlhfd", DAEMON)):
        bin_folder.joinpath(name).write_text(text)
        bin_folder.joinpath(name).chmod(0o755)
    job = {**slurm, "SLURM_SUBMIT_DIR": str(tmp_path), "RLHFD_VENV": str(tmp_path)}

    done = subprocess.run([SBATCH], env=job, capture_output=True, text=True, timeout=50, check=False)

    assert (done.returncode, done.stderr) == (70, "Ray's head has ended\n"), done.stdout
    assert done.stdout.endswith("drained\n")


@pytest.mark.integration
@pytest.mark.variant
@pytest.mark.needs("ray")
def test_a_job_runs_on_its_nodes_and_a_signal_before_its_end_drains_it(
    tmp_path: Path, task: Path, slurm: dict[str, str]
) -> None:
    settings = (
        *SMALL,
        *task_settings(task),
        f"daemon.state_dir={tmp_path / 'state'}",
        f"daemon.runtime_dir={tmp_path / 'run'}",
        "metrics.port=0",
        "trainer.max_steps=0",
    )
    words = [word for setting in settings for word in ("--set", setting)]
    log = tmp_path / "job.log"
    with log.open("wb") as output:
        job = subprocess.Popen([SBATCH, *words], env=slurm, stdout=output, stderr=subprocess.STDOUT, cwd=tmp_path)
    try:

        def has_trained() -> bool:
            assert job.poll() is None, log.read_text()
            text = log.read_text()
            # The head and a Ray node for each other server of the job; no actor is on the head.
            return (
                len(re.findall(r"^state=ready step=[1-9]", text, re.MULTILINE)) > 0
                and text.count("node joined the cluster: ") == 3
                and len(re.findall(r"rollout-[01] pipeline\.rollout\.ray: rolls out in the cluster", text)) == 2
            )

        wait_until(has_trained, START_TIMEOUT_S, "it trains on all nodes")
        family = descendants(job.pid)
        job.send_signal(signal.SIGTERM)

        assert job.wait(END_TIMEOUT_S) == 0, log.read_text()
    finally:
        if job.poll() is None:
            for pid in [*descendants(job.pid), job.pid]:
                os.kill(pid, signal.SIGKILL)
            job.wait()
    (step,) = Path(slurm["STAND_IN_LOG"]).read_text().splitlines()
    assert step.startswith("srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --exclude=node-1 --no-kill ")
    for pid in family:
        wait_until(lambda pid=pid: not is_alive(pid), END_TIMEOUT_S, "a process of the job ends with it")


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(KUBERAY.joinpath(name).read_text()))


def test_the_manifests_agree_with_each_other_and_with_this_release() -> None:
    (cluster,) = documents("cluster.yaml")
    daemon, service, policy = documents("daemon.yaml")
    (ray,) = re.findall(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    head, (group,) = cluster["spec"]["headGroupSpec"], cluster["spec"]["workerGroupSpecs"]
    pods = [part["template"] for part in (head, group, daemon["spec"])]
    containers = [container for pod in pods for container in pod["spec"]["containers"]]

    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    assert cluster["spec"]["rayVersion"] == ray
    assert len(containers) == 3 and {container["image"] for container in containers} == {"rlhfd-ray"}
    # Ray's parameters are words of a command line.
    assert all(isinstance(value, str) for part in (head, group) for value in part["rayStartParams"].values())
    assert head["rayStartParams"]["num-cpus"] == "0"
    # The operator names the head's service after the cluster.
    (script,) = containers[2]["args"]
    assert f"--address={cluster['metadata']['name']}-head-svc:6379 --num-cpus=0 --num-gpus=0" in script
    gpus = int(containers[1]["resources"]["limits"]["nvidia.com/gpu"]) * group["replicas"]
    assert f"--set rollout.workers={gpus}" in script
    assert daemon["spec"]["serviceName"] == service["metadata"]["name"]
    labels = [pod["metadata"]["labels"] for pod in pods]
    assert all(policy["spec"]["podSelector"]["matchLabels"].items() <= found.items() for found in labels)
    assert daemon["spec"]["selector"]["matchLabels"] == service["spec"]["selector"] == labels[2]
    for pod, container in zip(pods, containers, strict=True):
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        claimed = {one["metadata"]["name"] for one in daemon["spec"]["volumeClaimTemplates"] if pod is pods[2]}
        assert set(mounts) == {volume["name"] for volume in pod["spec"]["volumes"]} | claimed
        # Kubernetes gives a pod 64 MiB of shared memory otherwise.
        assert mounts["shm"] == "/dev/shm"
        assert {"name": "RAY_worker_niceness", "value": "0"} in container["env"]
    # Model, prompts and reward functions are under one path in all pods that load them.
    assert {"/etc/rlhfd"} == {
        mount["mountPath"] for one in containers[1:] for mount in one["volumeMounts"] if mount["name"] == "run"
    }


def test_the_settings_of_the_daemons_pod_are_keys_of_the_configuration() -> None:
    from pipeline.config.load import load

    script = documents("daemon.yaml")[0]["spec"]["template"]["spec"]["containers"][0]["args"][0]
    found = load(None, re.findall(r"--set (\S+)", script), {}).config

    assert (found.cluster.engine, found.cluster.address, found.rollout.workers) == ("ray", "auto", 16)
