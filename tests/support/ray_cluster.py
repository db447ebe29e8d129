"""A Ray cluster of several machines, each of them a few processes of this one.

    with RayCluster() as cluster:
        Daemon(tmp_path, *cluster.settings, ...)
        cluster.lose_a_machine()

It runs in a process of its own: pytest's is left without Ray's threads, and a cluster ends with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from types import TracebackType

# Whatever its temporary folder, Ray writes the head's address into its default one too, which it does not make.
_PROGRAM = """
import os, shutil, sys, tempfile
parent = tempfile.mkdtemp(prefix="ray-")  # short: sockets lie in it
os.environ["RAY_TMPDIR"] = parent  # read by Ray: its default folder is the folder "ray" in it
folder = os.path.join(parent, "ray")
os.mkdir(folder)
from ray.cluster_utils import Cluster
store = {"object_store_memory": 100 << 20}
head = {"num_cpus": 0, "include_dashboard": False, "temp_dir": folder, **store}
cluster = Cluster(initialize_head=True, head_node_args=head)
machines = [cluster.add_node(num_cpus=int(cpus), num_gpus=0, **store) for cpus in sys.argv[1:]]
print(cluster.address, flush=True)
for line in sys.stdin:
    lost = machines.pop()
    cluster.remove_node(lost, allow_graceful=False)
    print(lost.node_id, flush=True)
cluster.shutdown()
shutil.rmtree(parent, ignore_errors=True)
"""

TOO_SLOW = "timed out during startup"
"""Ray's error where a machine of its cluster is not up within 30 s, which no setting changes: others are busy."""


class RayCluster:
    """A head, which computes nothing, and a machine for each entry of `cpus`."""

    def __init__(self, cpus: Sequence[int] = (2,)) -> None:
        self._cpus = cpus
        self.address = ""

    def __enter__(self) -> RayCluster:
        """Start it."""
        try:
            return self._started()
        except AssertionError as error:
            if TOO_SLOW not in str(error):
                raise
        return self._started()

    def _started(self) -> RayCluster:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed at the end of the cluster
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *map(str, self._cpus)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            # Actors have a niceness of 15 else: beside other tests they would get hardly any time.
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"},
        )
        try:
            self.address = self._said()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all its processes."""
        self._process.communicate(timeout=60.0)
        self._errors.close()

    @property
    def pid(self) -> int:
        """The process that all of the cluster's are children of."""
        return self._process.pid

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings by which a daemon's workers compute on it."""
        return "cluster.engine=ray", f"cluster.address={self.address}", "cluster.worker_gpus=0"

    def lose_a_machine(self) -> None:
        """Kill all processes of the machine that came last."""
        assert self._process.stdin is not None
        self._process.stdin.write("lose\n")
        self._process.stdin.flush()
        self._said()

    def _said(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            self._errors.seek(0)
            raise AssertionError(f"the cluster has died: {self._errors.read()[-4000:]}")
        return line
