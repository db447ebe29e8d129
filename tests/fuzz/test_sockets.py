"""A daemon that trains while all of its sockets receive malformed messages."""

import contextlib
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.daemon import SMALL, Daemon, total

pytestmark = [pytest.mark.fuzz, pytest.mark.integration, pytest.mark.timeout(4200)]

_ROOT = Path(__file__).parents[2]
_SHORT, _SHORT_S = 4_000, 10.0
# The supervisor answers control and HTTP in one loop: some 900 a second each on busy cores.
_FULL, _FULL_S = 1_000_000, 3600.0
_MOST_GROWTH_BYTES = 24 << 20
# Up to 4,096 messages taken ahead, and the allocator; 32 bytes lost a message would be as much.
_MOST_NOISE_BYTES = 16 << 20


def flood(addresses, most, seed, time_s):
    """Have every socket told nonsense at once; return how often each was, and how often a second."""
    with contextlib.ExitStack() as stack:
        senders = {}
        for name, (kind, address) in addresses.items():
            words = (kind, address, str(most), str(seed), str(time_s))
            command = [sys.executable, "-m", "tests.fuzz.sender", *words]
            sender = subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True)
            senders[name] = stack.enter_context(sender)
            stack.callback(sender.kill)
        told, rates = {}, {}
        for name, sender in senders.items():
            output, _ = sender.communicate(timeout=time_s + 120)
            assert sender.returncode == 0, name
            sent, took_s = output.split()
            told[name], rates[name] = int(sent), int(sent) / float(took_s)
    return told, rates


def test_no_socket_can_be_talked_into_a_crash(tmp_path, task, request, say):
    in_full = request.config.getoption("--fuzz")
    most, time_s = (_FULL, _FULL_S) if in_full else (_SHORT, _SHORT_S)
    seed = request.config.getoption("randomly_seed", 0)
    with Daemon(tmp_path, *SMALL, "daemon.progress_timeout_s=0", task=task) as daemon:
        daemon.wait_ready()
        daemon.wait_step(5)
        pids, lines, step = daemon.pids(), daemon.errors.count("\n"), daemon.status()["step"]
        before = daemon.metrics()
        sockets = sorted(path for path in daemon.shm_dir.glob("*.sock") if path.name != "control.sock")
        addresses = {path.name: ("mail", str(path)) for path in sockets}
        addresses |= {
            "control": ("control", str(daemon.shm_dir / "control.sock")),
            "http": ("http", daemon.url.removeprefix("http://")),
        }
        told, memory = dict.fromkeys(addresses, 0), [{name: anonymous_bytes(pid) for name, pid in pids.items()}]

        # Twice: growth in the first half is memory that is reused, growth in the second half is a leak.
        for half in range(2):
            said, rates = flood(addresses, most // 2, 2 * seed + half, time_s / 2)
            told = {name: told[name] + said[name] for name in told}
            mail = told["buffer.sock"]
            daemon.wait_until(lambda mail=mail: heard(daemon, before, "buffer") >= mail, "all mail is read")
            peers = told["trainer-0.sock"] + told["worker-0.sock"]
            daemon.wait_until(lambda peers=peers: heard(daemon, before, "peer") >= peers, "all mail is read")
            daemon.wait_step(daemon.status()["step"] + 3)
            memory.append({name: anonymous_bytes(pid) for name, pid in pids.items()})
            say(f"told {' '.join(f'{name}={told[name]:,} ({rates[name]:,.0f}/s)' for name in told)}")
        after = daemon.metrics()
        grown, again = (
            {name: later[name] - sooner[name] for name in pids} for sooner, later in itertools.pairwise(memory)
        )
        say(
            "; ".join(f"{name} grew by {n >> 10:,} KiB, then by {again[name] >> 10:,} KiB" for name, n in grown.items())
        )

        assert [path.name for path in sockets] == ["buffer.sock", "trainer-0.sock", "worker-0.sock"]
        assert min(told.values()) >= (_FULL if in_full else 100), told
        assert daemon.pids() == pids
        assert total(after, "rlhfd_items_unaccounted") == 0
        refused = total(after, "rlhfd_ipc_drops_total") - total(before, "rlhfd_ipc_drops_total")
        assert refused > sum(told[path.name] for path in sockets) // 4
        assert max(grown.values()) < _MOST_GROWTH_BYTES, grown
        assert max(again.values()) < _MOST_NOISE_BYTES, again
        steps = daemon.status()["step"] - step
        assert daemon.errors.count("\n") - lines < 3 * steps + 30, daemon.errors[-4000:]


def heard(daemon, before, channel):
    now = daemon.metrics()
    labels = {"channel": channel, "direction": "received"}
    return total(now, "rlhfd_ipc_messages_total", **labels) - total(before, "rlhfd_ipc_messages_total", **labels)


def anonymous_bytes(pid):
    """Memory of its own, shared memory and files left out."""
    return int(re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) << 10
