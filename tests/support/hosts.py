"""A Ray cluster of two hosts: this one, and one in a network namespace with an address and interfaces of its own.

    with TwoHosts() as hosts:
        Daemon(tmp_path, *hosts.settings, ...)
        hosts.cut()

It needs root and `ip`. The head computes nothing, as docs/cluster.md says.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType

from tests.support.daemon import descendants

_HERE, _THERE = "10.213.7.1", "10.213.7.2"
_PORT = 6399
_STORE = ("--object-store-memory=100000000", "--block")


class TwoHosts:
    """This host, with the head, and another one of `cpus` cores, which sees folders in the place of others.

    Args:
        cpus: Cores of the other host.
        sees: A folder that the other host sees, by the folder in whose place it does.
    """

    def __init__(self, *, cpus: int = 2, sees: Mapping[Path, Path] = MappingProxyType({})) -> None:
        self._cpus = cpus
        self._sees = sees
        self._name = f"rlhfd{os.getpid()}"
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings by which a daemon of this host computes on the cluster."""
        return "cluster.engine=ray", f"cluster.address={_HERE}:{_PORT}", "cluster.worker_gpus=0"

    def __enter__(self) -> TwoHosts:
        """Make the network and start Ray on both hosts."""
        # Short: sockets lie in it.
        self._folder = Path(tempfile.mkdtemp(prefix="ray-"))
        self._folder.joinpath("ray").mkdir()
        try:
            self._make_network()
            head = ["--head", f"--port={_PORT}", "--num-cpus=0", "--num-gpus=0", "--include-dashboard=false"]
            self._ray([], [*head, f"--node-ip-address={_HERE}", f"--temp-dir={self._folder / 'ray'}", *_STORE])
            self._start_there()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all processes of both hosts, and the network."""
        for process in self._processes:
            self._end(process)
        for pid in self._ip("netns", "pids", self._name, check=False).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        self._ip("netns", "delete", self._name, check=False)
        self._ip("link", "delete", self._link, check=False)
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _link(self) -> str:
        return f"r{os.getpid()}"

    def cut(self) -> None:
        """Cut the other host off: no packet passes any more."""
        self._ip("link", "set", self._link, "down")

    def join(self) -> None:
        """Let packets pass again, and start Ray on the other host anew: it ends on a host that was cut off."""
        self._ip("link", "set", self._link, "up")
        self._end(self._processes.pop())
        self._start_there()

    def _start_there(self) -> None:
        there = [f"--address={_HERE}:{_PORT}", f"--node-ip-address={_THERE}"]
        cores = [f"--num-cpus={self._cpus}", "--num-gpus=0"]
        # `ip netns exec` has a mount namespace of its own.
        mounts = "".join(f"mount --bind '{seen}' '{place}' && " for place, seen in self._sees.items())
        self._ray(
            ["ip", "netns", "exec", self._name, "sh", "-c", f'{mounts}exec "$@"', "ray"], [*there, *cores, *_STORE]
        )

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        for pid in [process.pid, *descendants(process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()

    def _make_network(self) -> None:
        inside = ["netns", "exec", self._name]
        self._ip("netns", "add", self._name)
        self._ip("link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", self._name)
        self._ip("address", "add", f"{_HERE}/24", "dev", self._link)
        self._ip("link", "set", self._link, "up")
        self._ip(*inside, "ip", "link", "set", "lo", "up")
        self._ip(*inside, "ip", "address", "add", f"{_THERE}/24", "dev", "eth0")
        self._ip(*inside, "ip", "link", "set", "eth0", "up")

    def _ray(self, before: list[str], arguments: list[str]) -> None:
        environment = {
            **os.environ,
            "RAY_TMPDIR": str(self._folder),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
        }
        ray = Path(sys.executable).with_name("ray")
        process = subprocess.Popen(
            [*before, str(ray), "start", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        self._processes.append(process)
        assert process.stdout is not None
        said = b""
        while b"Ray runtime started" not in said:
            line = process.stdout.readline()
            said += line
            if not line:
                raise AssertionError(f"Ray has not started: {said.decode(errors='replace')[-3000:]}")
        # What it says from here on is read by nobody, and is little.

    def _ip(self, *arguments: str, check: bool = True) -> str:
        return subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True).stdout
