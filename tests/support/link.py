"""A switch between hosts that are network namespaces, with a delay and a loss: a program over TAP devices.

    python link.py SEED DELAY_S LOSS TAP...

It makes the devices and prints a line once they exist; they end with it. The n-th one, from 0 on, is the port of the
host with the hardware address 02:00:00:00:00:0n; each frame goes to the port of its destination, or to all others. The
lines ``cut N`` and ``join N`` on its standard input take a port off and on again, and ``lost`` prints the number of
frames that chance has dropped. It ends with its standard input.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import random
import select
import struct
import sys
import time

_MOST_BYTES = 1 << 16
# linux/if_tun.h
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000


def _opened(name: str) -> int:
    """Make a TAP device; return its descriptor."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return descriptor


class _Switch:
    def __init__(self, ports: list[int], delay_s: float, loss: float, rng: random.Random) -> None:
        self._ports = ports
        self._delay_s = delay_s
        self._loss = loss
        self._rng = rng
        self.cut: set[int] = set()
        self.lost = 0
        # In order: the delay is the same for all.
        self._held: collections.deque[tuple[float, int, bytes]] = collections.deque()

    def take(self, port: int) -> None:
        """Take the frames that a host has sent."""
        with contextlib.suppress(BlockingIOError):
            while True:
                frame = os.read(self._ports[port], _MOST_BYTES)
                due_s = time.monotonic() + self._delay_s
                to_all = frame[0] & 1
                for other in range(len(self._ports)) if to_all else (frame[5],):
                    if other != port and other < len(self._ports) and not {port, other} & self.cut:
                        if self._rng.random() < self._loss:
                            self.lost += 1
                        else:
                            self._held.append((due_s, other, frame))

    def give(self) -> float | None:
        """Deliver the frames that are due; return the time until the next one, None if there is none."""
        while self._held:
            due_s, port, frame = self._held[0]
            if (left_s := due_s - time.monotonic()) > 0:
                return left_s
            self._held.popleft()
            # Another host's device may be down, or full: the frame is lost, as on any network.
            with contextlib.suppress(OSError):
                os.write(self._ports[port], frame)
        return None


def main(seed: str, delay_s: str, loss: str, *names: str) -> None:
    """Forward frames until standard input ends."""
    ports = [_opened(name) for name in names]
    switch = _Switch(ports, float(delay_s), float(loss), random.Random(int(seed)))
    poll = select.epoll()
    commands = sys.stdin.fileno()
    for descriptor in (commands, *ports):
        poll.register(descriptor, select.EPOLLIN)
    print("ready", flush=True)  # noqa: T201 - the answer of a program
    while True:
        left_s = switch.give()
        for descriptor, _ in poll.poll(left_s):
            if descriptor != commands:
                switch.take(ports.index(descriptor))
                continue
            words = os.read(commands, 100).decode().split()
            if not words:
                return
            if words[0] == "lost":
                print(switch.lost, flush=True)  # noqa: T201
            else:
                (switch.cut.add if words[0] == "cut" else switch.cut.discard)(int(words[1]))
                print(words[0], flush=True)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
