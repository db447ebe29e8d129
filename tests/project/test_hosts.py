"""The hosts of the tests: a network that delays and loses frames as told, and that can be cut."""

from __future__ import annotations

import subprocess

import pytest

from tests.support.hosts import Hosts

# With its users, which are variants: it needs root and /dev/net/tun.
pytestmark = [pytest.mark.variant, pytest.mark.needs("ip")]
DELAY_S, LOSS, SENT = 0.02, 0.2, 400
# Datagrams come back once they have been sent; their number is the argument.
ECHO = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as there:
    there.bind((sys.argv[1], 7))
    print(flush=True)
    while True:
        there.sendto(*there.recvfrom(100))
"""
ASK = """
import socket, sys, time
address, asked, pause_s = (sys.argv[1], 7), int(sys.argv[2]), 0.001
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as here:
    here.settimeout(float(sys.argv[3]))
    times = []
    for number in range(asked):
        here.sendto(str(time.monotonic()).encode(), address)
        time.sleep(pause_s)
    try:
        while len(times) < asked:
            sent = float(here.recv(100))
            times.append(time.monotonic() - sent)
    except TimeoutError:
        pass
print(len(times), min(times, default=0.0))
"""


@pytest.fixture
def hosts():
    with Hosts((1, 1), delay_s=DELAY_S, loss=LOSS, ray=False) as hosts:
        yield hosts


@pytest.fixture
def echo(hosts):
    command = hosts.command(2, "python3", "-c", ECHO, hosts.address(2))
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"\n"
        yield
        process.kill()


def asked(hosts, asked=SENT, *, wait_s=1.0):
    """The answers that come back to host 1, and the shortest time of one."""
    answers, shortest_s = hosts.run(1, "python3", "-c", ASK, hosts.address(2), str(asked), str(wait_s)).split()
    return int(answers), float(shortest_s)


def test_frames_are_late_and_some_are_lost_and_none_passes_a_cut(hosts, echo):
    answers, _ = asked(hosts)
    lost = hosts.lost_frames()

    # A frame each way. ARP's frames are few.
    assert SENT * ((1 - LOSS) ** 2 - 0.1) < answers < SENT * ((1 - LOSS) ** 2 + 0.1)
    assert SENT - answers - 20 < lost < SENT - answers + 20
    # The first answers wait for ARP; those of a moment ago are not in the way of these.
    _, shortest_s = asked(hosts, 20)
    assert 2 * DELAY_S <= shortest_s < 2 * DELAY_S + 0.5
    assert hosts.carried(2).received > SENT * (1 - LOSS - 0.1) * 42

    hosts.cut(2)

    before = hosts.carried(2).received
    assert asked(hosts, 20, wait_s=0.2) == (0, 0.0)
    assert hosts.carried(2).received == before
