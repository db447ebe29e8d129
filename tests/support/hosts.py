"""A Ray cluster of several hosts: this one, and others in network namespaces, each with an address of its own.

    with Hosts((2, 2), delay_s=0.005, loss=0.005) as hosts:
        Daemon(tmp_path, *hosts.settings, ...)
        hosts.cut(1)

The hosts are joined by a switch of ours (`tests.support.link`), which may delay and lose frames. A host of a namespace
has a /dev/shm of its own. It needs root and `ip`. The head computes nothing, as docs/cluster.md says.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import NamedTuple

from tests.support.daemon import descendants, is_alive, wait_until
from tests.support.ray_cluster import TOO_SLOW

_LINK = Path(__file__).with_name("link.py")
_STORE = ("--object-store-memory=100000000", "--block")
# Of a data centre, where frames have 9,000 bytes.
_FRAME_BYTES = 9000
_END_TIMEOUT_S = 120.0


class Carried(NamedTuple):
    """Bytes that a host has received and sent, with the headers of all layers."""

    received: int
    sent: int


class Hosts:
    """This host, with the head, and others, which are numbered from 1 on.

    Args:
        cpus: Cores of each other host.
        delay_s: Time that a frame takes from host to host.
        loss: Share of frames that do not arrive.
        seed: Of the frames that are lost.
        sees: A folder that the other hosts see, by the folder in whose place they do.
        ray: Whether Ray is started.
    """

    def __init__(
        self,
        cpus: Sequence[int] = (2,),
        *,
        delay_s: float = 0.0,
        loss: float = 0.0,
        seed: int = 0,
        sees: Mapping[Path, Path] = MappingProxyType({}),
        ray: bool = True,
    ) -> None:
        self._cpus = cpus
        self._link_arguments = (str(seed), str(delay_s), str(loss))
        self._sees = sees
        self._has_ray = ray
        # Test sessions beside this one have other networks. Above that of the loopback interface: of two ranks gloo has
        # the one with the larger address connect to the other one, whose address must be one of the network then.
        self._network = f"198.18.{os.getpid() % 256}"
        self._rays: dict[int, subprocess.Popen[bytes]] = {}
        self._link: subprocess.Popen[str] | None = None

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings by which a daemon of this host computes on the cluster."""
        return "cluster.engine=ray", f"cluster.address={self.address(0)}:{self._port}", "cluster.worker_gpus=0"

    @property
    def numbers(self) -> range:
        """The numbers of the other hosts."""
        return range(1, len(self._cpus) + 1)

    def address(self, host: int) -> str:
        """Return the address of a host; that of this one is number 0."""
        return f"{self._network}.{host + 1}"

    def __enter__(self) -> Hosts:
        """Make the network, and start Ray on all hosts."""
        # Short: sockets lie in it.
        self._folder = Path(tempfile.mkdtemp(prefix="ray-"))
        for name in ("ray", "tmp"):
            self._folder.joinpath(name).mkdir()
        try:
            self._make_network()
            if self._has_ray:
                with socket.socket() as free:
                    free.bind((self.address(0), 0))
                    self._port = free.getsockname()[1]
                for host in (0, *self.numbers):
                    self._start_ray(host)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all processes of all hosts, and the network."""
        for host in [*self._rays]:
            self._end_ray(host)
        for host in self.numbers:
            for pid in self._pids(host):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        # The devices end with the switch, before the places in which they are.
        if self._link is not None:
            self._link.communicate(timeout=_END_TIMEOUT_S)
        for host in self.numbers:
            self._ip("netns", "delete", self._name(host), check=False)
        shutil.rmtree(self._folder, ignore_errors=True)

    # The network.

    def cut(self, host: int) -> None:
        """Cut another host off: no frame from it or to it passes any more."""
        self._told(f"cut {host}")

    def join(self, host: int) -> None:
        """Let frames pass again; Ray, which ends by itself on a host that was cut off, is started there anew."""
        self._told(f"join {host}")
        wait_until(lambda: not self._pids(host), _END_TIMEOUT_S, f"Ray and all of its actors end on host {host}")
        self._end_ray(host)
        self._start_ray(host)

    def lose(self, host: int) -> None:
        """Kill all processes of another host, as when its power fails, and have it come back."""
        self._end_all(host)
        self._start_ray(host)

    def lose_the_head(self) -> None:
        """Kill all processes of Ray on this host, and what the cluster knew with them; the daemon goes on."""
        self._end_ray(0)

    def begin_again(self) -> None:
        """Start the head, and Ray on the other hosts anew: Ray ends by itself there a minute after the head."""
        for host in self.numbers:
            self._end_all(host)
        for host in (0, *self.numbers):
            self._start_ray(host)

    def lost_frames(self) -> int:
        """Return the number of frames that have been lost by chance."""
        return int(self._told("lost"))

    def carried(self, host: int) -> Carried:
        """Return the bytes that another host has received and sent since its start."""
        counts = f"cat /sys/class/net/{self._device(host)}/statistics/[rt]x_bytes"
        received, sent = self.run(host, "sh", "-c", counts).split()
        return Carried(int(received), int(sent))

    def command(self, host: int, *words: str) -> list[str]:
        """Return the command that runs a program on a host."""
        return [*(() if host == 0 else ("ip", "netns", "exec", self._name(host))), *words]

    def run(self, host: int, *words: str) -> str:
        """Run a program on a host to its end; return its standard output."""
        return subprocess.run(self.command(host, *words), check=True, capture_output=True, text=True).stdout

    # What is there.

    def processes(self, *titles: str) -> list[int]:
        """Return the processes of the cluster whose titles begin with one of these, on all hosts."""
        pids = [*descendants(self._rays[0].pid), *(pid for host in self.numbers for pid in self._pids(host))]
        return [pid for pid in pids if _title(pid).startswith(titles) and is_alive(pid)]

    def places(self, title: str) -> list[int]:
        """Return the numbers of the other hosts that have a process whose title begins so."""
        return [host for host in self.numbers if any(_title(pid).startswith(title) for pid in self._pids(host))]

    def left(self) -> list[str]:
        """Return what a run has left: actors, the processes that these have started, files in memory and elsewhere."""
        titles = ("ray::_RolloutActor", "ray::_RankActor", "ray::WeightsHolder", "ray::WeightsRelay", "rlhfd: ")
        shared = [Path(f"/proc/{self._rays[host].pid}/root/dev/shm") for host in self.numbers]
        return [
            *(f"process {pid}: {_title(pid)}" for pid in self.processes(*titles)),
            *(str(path) for folder in (*shared, self._folder / "tmp") for path in folder.glob("*rlhfd*")),
        ]

    def _name(self, host: int) -> str:
        return f"rlhfd{os.getpid()}-{host}"

    def _device(self, host: int) -> str:
        return f"r{os.getpid()}-{host}"

    def _pids(self, host: int) -> list[int]:
        return [int(pid) for pid in self._ip("netns", "pids", self._name(host), check=False).split()]

    def _make_network(self) -> None:
        devices = [self._device(host) for host in (0, *self.numbers)]
        self._link = subprocess.Popen(
            [sys.executable, "-I", str(_LINK), *self._link_arguments, *devices],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()
        for host, device in enumerate(devices):
            inside: tuple[str, ...] = ()
            if host:
                inside = ("-n", self._name(host))
                self._ip("netns", "add", self._name(host))
                self._ip("link", "set", device, "netns", self._name(host))
                self._ip(*inside, "link", "set", "lo", "up")
            hardware = f"02:00:00:00:00:{host:02x}"
            self._ip(*inside, "link", "set", device, "address", hardware, "mtu", str(_FRAME_BYTES))
            self._ip(*inside, "address", "add", f"{self.address(host)}/24", "dev", device)
            self._ip(*inside, "link", "set", device, "up")

    def _told(self, command: str) -> str:
        """Tell the switch something; return its answer."""
        assert self._link is not None and self._link.stdin is not None
        self._link.stdin.write(f"{command}\n")
        self._link.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self._link is not None and self._link.stdout is not None
        answer = self._link.stdout.readline().strip()
        assert answer, "the switch has ended"
        return answer

    def _ip(self, *arguments: str, check: bool = True) -> str:
        return subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True).stdout

    # Ray.

    def _start_ray(self, host: int, *, again: bool = True) -> None:
        address = f"--node-ip-address={self.address(host)}"
        if host == 0:
            arguments = ["--head", f"--port={self._port}", "--num-cpus=0", "--include-dashboard=false"]
            arguments.append(f"--temp-dir={self._folder / 'ray'}")
            before = []
        else:
            arguments = [f"--address={self.address(0)}:{self._port}", f"--num-cpus={self._cpus[host - 1]}"]
            # `ip netns exec` has a mount namespace of its own.
            mounts = "mount -t tmpfs tmpfs /dev/shm && "
            mounts += "".join(f"mount --bind '{seen}' '{place}' && " for place, seen in self._sees.items())
            before = self.command(host, "sh", "-c", f'{mounts}exec "$@"', "ray")
        ray = Path(sys.executable).with_name("ray")
        process = subprocess.Popen(
            [*before, str(ray), "start", *arguments, address, "--num-gpus=0", *_STORE],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                "RAY_TMPDIR": str(self._folder),
                "TMPDIR": str(self._folder / "tmp"),
                # A token in the home folder would have the head ask the other hosts for it.
                "RAY_AUTH_MODE": "disabled",
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_worker_niceness": "0",
            },
            start_new_session=True,
        )
        self._rays[host] = process
        assert process.stdout is not None
        said = b""
        while b"Ray runtime started" not in said:
            line = process.stdout.readline()
            said += line
            if not line and again and TOO_SLOW.encode() in said:
                self._end_all(host)
                return self._start_ray(host, again=False)
            if not line:
                raise AssertionError(f"Ray has not started: {said.decode(errors='replace')[-3000:]}")
        # What it says from here on is read by nobody, and is little.

    def _end_all(self, host: int) -> None:
        for pid in self._pids(host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not self._pids(host), _END_TIMEOUT_S, f"all processes of host {host} end")
        self._end_ray(host)

    def _end_ray(self, host: int) -> None:
        process = self._rays.pop(host)
        for pid in [process.pid, *descendants(process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _title(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return ""
