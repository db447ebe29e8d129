"""Processes for the tests of the replay buffer, forked from one that has torch loaded: cheap to start and to kill.

crew = Crew()
pid = crew.start("produce", path=..., first=0, count=100)
crew.wait(pid, "done")
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import time


class Crew:
    """The test's side: starts members and reads their events."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.support.replay_crew"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._rest = b""
        self.said = {}

    def start(self, role, **arguments):
        """Fork a member and return its pid."""
        before = set(self.said)
        self._process.stdin.write(json.dumps([role, arguments]).encode() + b"\n")
        while not (new := set(self.said) - before):
            self._listen(time.monotonic() + 60)
        return new.pop()

    def wait(self, pid, event, *, count=1, timeout_s=60.0):
        """Return the values of an event once a member has reported it so many times."""
        deadline = time.monotonic() + timeout_s
        while len(found := self.heard(pid, event)) < count:
            self._listen(deadline)
        return found

    def heard(self, pid, event):
        """Return the values of an event so far."""
        return [value for name, value in self.said.get(pid, []) if name == event]

    def kill(self, pid):
        """Kill a member and read all that it reported before."""
        descriptor = os.pidfd_open(pid)
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        assert select.select([descriptor], [], [], 30)[0]
        os.close(descriptor)
        while select.select([self._process.stdout], [], [], 0)[0]:
            self._listen(time.monotonic() + 1)

    def _listen(self, deadline):
        ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"nothing more was said: { {pid: said[-3:] for pid, said in self.said.items()} }"
        data = os.read(self._process.stdout.fileno(), 1 << 16)
        assert data, "the crew has ended"
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            pid, event, value = json.loads(line)
            self.said.setdefault(pid, []).append((event, value))

    def close(self):
        """End the crew; members that the test left alive are a leak of the test."""
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(60)


def say(event, value=None):
    os.write(1, json.dumps([os.getpid(), event, value]).encode() + b"\n")


def numbered(numbers):
    """Return rows with their number in every field: ragged, padded on both sides as a maker's are."""
    import torch

    from pipeline.experience.types import Experience

    ids = torch.tensor(list(numbers))
    prompts, responses = ids % 3 + 1, ids % 4 + 1
    columns = torch.arange(7)
    attention = (columns >= 3 - prompts[:, None]) & (columns < 3 + responses[:, None])
    action_mask = attention[:, 3:]
    per_action = ids[:, None] * action_mask.float()
    return Experience(
        sequences=ids[:, None] * attention, action_log_probs=per_action, values=per_action, reward=ids.float(),
        attention_mask=attention.long(), action_mask=action_mask, info={"number": ids.clone()},
    )  # fmt: skip


def numbers_of(experience):
    """Return the numbers of rows, after a check that all fields agree."""
    import torch

    ids = experience.info["number"]
    assert torch.equal(experience.reward, ids.float())
    assert torch.equal(experience.attention_mask.sum(1), ids % 3 + 1 + ids % 4 + 1)
    assert torch.equal(experience.action_mask.sum(1), ids % 4 + 1)
    assert torch.equal(experience.sequences, ids[:, None] * experience.attention_mask)
    assert torch.equal(experience.values, ids[:, None] * experience.action_mask.float())
    assert torch.equal(experience.action_log_probs, experience.values)
    return ids.tolist()


def attach(path, **options):
    from pipeline.replay.buffer import DetachedReplayBuffer

    return DetachedReplayBuffer.attach(path, **options)


def produce(path, first, count, rows=3):
    """Append `count` rows from number `first` on, some at a time."""
    buffer = attach(path)
    for start in range(first, first + count, rows):
        batch = range(start, min(start + rows, first + count))
        buffer.append(numbered(batch))
        say("appended", [*batch])


def consume(path, fork_first=False):
    """Take batches until the buffer is closed."""
    buffer = attach(path)
    for experience in buffer:
        say("batch", numbers_of(experience))


def hang_in_append(path, number):
    """Stop for good with the rows half written."""
    from pipeline.experience import codec

    write = codec.Encoding.write

    def half(encoding, memory):
        write(encoding, memory)
        memory[len(memory) // 2 :] = bytes(len(memory) - len(memory) // 2)
        say("writing")
        signal.pause()

    codec.Encoding.write = half
    attach(path).append(numbered([number]))


def hang_in_sample(path):
    """Stop for good with the batch half copied."""
    from pipeline.experience import codec

    gather = codec.gather_padded

    def half(parts, **options):
        say("holding", numbers_of(gather(parts, **options)))
        signal.pause()

    codec.gather_padded = half
    attach(path).sample()


def wait_for(path, call):
    """Report the end of a call that has to wait."""
    from pipeline.errors import RlhfdError

    buffer = attach(path)
    say("waiting", buffer.stats().ready)
    try:
        buffer.sample() if call == "sample" else buffer.append(numbered([1]))
    except RlhfdError as error:
        say("error", [type(error).__name__, str(error)])


def own(sample_batch_size, ends=False):
    """Make a buffer, and hold it until killed or end without closing it."""
    from pipeline.replay.buffer import DetachedReplayBuffer

    buffer = DetachedReplayBuffer(sample_batch_size, arena_bytes=1 << 20)
    buffer.append(numbered([7]))
    say("made", [str(buffer.path), buffer._server.pid])
    # As at the end of the interpreter.
    atexit._run_exitfuncs() if ends else signal.pause()


def fork_and_append(path, first):
    """Append, fork, and append from both."""
    buffer = attach(path)
    buffer.append(numbered([first]))
    child = os.fork()
    for number in range(first + (1 if child else 11), first + (11 if child else 21)):
        buffer.append(numbered([number]))
    if not child:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def fork_and_hang_in_append(path):
    """Fork in the middle of an append, and stop both for good."""
    from pipeline.experience import codec

    def fork(encoding, memory):
        if child := os.fork():
            say("forked", child)
            say("writing")
        signal.pause()

    codec.Encoding.write = fork
    attach(path).append(numbered([5]))


def use_pickled(pickled, number):
    """Use a buffer that came pickled."""
    buffer = pickle.loads(bytes.fromhex(pickled))
    buffer.append(numbered([number]))
    say("options", [buffer.sample_batch_size, buffer.limit, buffer.timeout_s])
    buffer.close()


def main():
    import torch

    import pipeline.replay.buffer  # noqa: F401

    torch.set_num_threads(1)
    # No process waits for a member that ended.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        role, arguments = json.loads(line)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(0)
            say("born")
            globals()[role](**arguments)
            say("done")
            # The interpreter takes seconds to put torch away.
            os._exit(0)


if __name__ == "__main__":
    main()
