"""The process of `code`: each thing that docs/rewards.md says it is kept from is tried.

In both ways of isolation, as root and as another user.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.config.rewards import CodeReward
from pipeline.errors import ConfigError, RewardError
from pipeline.rollout.reward import code, sandbox
from pipeline.rollout.reward.code import isolation, passes
from pipeline.rollout.reward.named import named_reward

SCRIPT = Path(sandbox.__file__).read_text()
# An unknown flag: the kernel makes no namespace of it, as one that forbids them.
WITHOUT_NAMESPACES = SCRIPT.replace("unshare(_NEW_NAMESPACES)", "unshare(1)").replace(
    "unshare(_NEW_USER | _NEW_NAMESPACES)", "unshare(1)"
)
# Beside it, system calls that no kernel has.
WITHOUT_EITHER = WITHOUT_NAMESPACES.replace("_LANDLOCK = 444, 445, 446", "_LANDLOCK = 4440, 4450, 4460")
SCRIPTS = {"namespaces": SCRIPT, "Landlock": WITHOUT_NAMESPACES}
OTHER_USER = 64123
TOKEN = "passed"
# Another user reads neither the environment of the tests nor this checkout.
SYSTEM_PYTHON = "/usr/bin/python3"


def answer(script: str, *sources: str, is_root: bool = True, unisolated: bool = False) -> tuple[int, str]:
    """Return the exit code of a sandbox and its output, of this user or of another one."""
    request = {"sources": sources, "token": TOKEN, "cpu_s": 20, "memory_bytes": 512 << 20, "unisolated": unisolated}
    python, user = (sys.executable, None) if is_root else (SYSTEM_PYTHON, OTHER_USER)
    done = subprocess.run(
        [python, "-I", "-S", "-X", "utf8", "-c", script],
        input=json.dumps(request).encode(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd="/", env={},
        user=user, group=user, extra_groups=None if user is None else [], timeout=60, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout.decode()


@pytest.fixture(params=["own user", "other user"])
def is_root(request: pytest.FixtureRequest) -> bool:
    """Whether the sandbox starts as the user of the tests, root in CI; the other one has no rights."""
    is_own = request.param == "own user"
    if not is_own and os.geteuid() != 0:
        pytest.skip("another user is root's to become")
    return is_own


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the sandbox's user, if that is the tests' own."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


# Each raises an OSError, of setrlimit a ValueError, else it has succeeded. In braces are things of the tests.
ATTACKS = """
open({file!r})
open({folder!r} + '/new', 'w')
os.listdir({folder!r})
os.remove({file!r})
os.rename({file!r}, {file!r} + '.new')
os.truncate({file!r}, 0)
os.chmod({file!r}, 0)
os.mkdir({folder!r} + '/new')
os.symlink('/', {folder!r} + '/new')
open('/etc/passwd')
open('/usr/new', 'w')
open('/new', 'w')
os.mkdir('/usr/new')
open('/proc/{parent}/mem', 'rb')
open('/proc/{parent}/environ', 'rb')
open('/proc/self/mem', 'rb')
open('/proc/{victim}/environ', 'rb')
os.kill({victim}, 9)
os.kill(os.getppid(), 9)
os.kill(-1, 9)
os.killpg(0, 9)
os.pidfd_open({victim})
signal.pidfd_send_signal(0, 9)
call(234, {victim}, {victim}, 9)
os.waitpid(-1, 0)
fcntl.fcntl(pipe[0], 8, {victim})
fcntl.fcntl(pipe[0], 10, 9)
fcntl.fcntl(pipe[0], fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
fcntl.fcntl(pipe[0], 15, struct.pack('ii', 1, {victim}))
fcntl.ioctl(pipe[0], 0x8901, struct.pack('i', {victim}))
fcntl.lockf(pipe[0], fcntl.LOCK_EX)
socket.socket()
socket.create_connection(('127.0.0.1', {port}))
socket.socket(socket.AF_UNIX)
socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)
socket.socketpair(socket.AF_INET)
os.fork()
os.posix_spawn('/bin/true', ['true'], {{}})
os.execv('/usr/bin/env', ['env'])
subprocess.run(['/usr/bin/true'])
resource.prlimit({victim}, resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))
os.setpriority(os.PRIO_PROCESS, 0, 5)
os.setuid(0)
os.memfd_create('m')
os.eventfd_write(os.open('/usr', os.O_RDONLY), 1)
os.setxattr('/usr', 'user.x', b'x')
call(463, -100, path, 0, name, argument, 16)
call(101, 16, {victim}, 0, 0)
call(310, {victim}, argument, 1, argument, 1, 0)
call(272, 0x10000000)
call(308, 0, 0)
call(165, 0, path, 0, 32, 0)
call(250, 0, -3, 1)
call(425, 8, argument)
call(321, 0, argument, 16)
call(298, argument, 0, -1, -1, 0)
call(323, 0)
call(157, 4, 1)
call(29, 0, 4096, 0o1600)
call(56, 17, 0, 0, 0, 0)
call(435, argument, 64)
"""
PRELUDE = """
import ctypes, fcntl, os, resource, signal, socket, struct, subprocess
pipe, libc = os.pipe(), ctypes.CDLL(None, use_errno=True)
path, name, argument = (ctypes.create_string_buffer(text, 256) for text in (b'/usr', b'user.x', b''))
def call(number, *arguments):
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), number)
"""
# By their numbers on x86-64; the others have them without numbers.
BY_NUMBER = os.uname().machine == "x86_64"


def guarded(attack: str) -> str:
    return f"try:\n    {attack}\nexcept (OSError, ValueError):\n    pass\nelse:\n    raise SystemExit(1)\n"


@pytest.mark.parametrize("way", SCRIPTS)
def test_what_code_is_kept_from_fails_and_ends_nothing(
    tmp_path: Path, way: str, is_root: bool, victim: subprocess.Popen[bytes]
) -> None:
    tmp_path.chmod(0o755)
    file = tmp_path / "file"
    file.write_text("text")
    file.chmod(0o666)
    with socket.create_server(("127.0.0.1", 0)) as server:
        places = {"victim": victim.pid, "parent": os.getpid(), "port": server.getsockname()[1]}
        lines = ATTACKS.format(**places, file=str(file), folder=str(tmp_path)).split("\n")
        attacks = [line for line in lines if line and (BY_NUMBER or "call(" not in line)]
        assert len(attacks) > 40

        together = answer(SCRIPTS[way], PRELUDE + "".join(map(guarded, attacks)), is_root=is_root)

        # All in one process; one by one only to name those that succeed.
        succeeded = [] if together == (0, TOKEN) else [
            attack for attack in attacks
            if answer(SCRIPTS[way], PRELUDE + guarded(attack), is_root=is_root) != (0, TOKEN)
        ]  # fmt: skip
    assert succeeded == [] and together == (0, TOKEN)
    assert victim.poll() is None
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and file.read_text() == "text"


@pytest.mark.skipif(not BY_NUMBER, reason="numbers of x86-64")
@pytest.mark.parametrize("way", SCRIPTS)
def test_each_system_call_that_is_not_on_the_list_is_refused(way: str, is_root: bool) -> None:
    conditional = {2, 257, 16, 72, 56, 302, 234, 53, 44, 435}
    allowed = {numbers[0] for numbers in sandbox._ALLOWED.values()} | conditional
    # The kernel passes its own probes by each filter: uretprobe and uprobe, which do nothing where there is no probe.
    probes = {335, 336}
    refused = sorted(set(range(512)) - allowed - probes)
    source = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def refused(number):
    return libc.syscall(number, 0, 0, 0, 0, 0, 0) == -1 and ctypes.get_errno() == 1
assert all(map(refused, {refused}))
assert libc.syscall(435, 0, 0) == -1 and ctypes.get_errno() == 38
"""
    assert len(refused) > 380
    assert answer(SCRIPTS[way], source, is_root=is_root) == (0, TOKEN)
    # The test finds a call that is not refused.
    assert answer(SCRIPTS[way], source.replace("[", "[39, ", 1), is_root=is_root)[1] == ""


@pytest.mark.parametrize("way", SCRIPTS)
def test_code_has_pythons_library_threads_and_an_event_loop(way: str, is_root: bool) -> None:
    source = """
import asyncio, collections, dataclasses, datetime, decimal, fractions, functools, hashlib, heapq, itertools, json
import math, random, re, sqlite3, statistics, string, threading, time, typing, unittest, zlib
seen = []
thread = threading.Thread(target=lambda: seen.append(1))
thread.start()
thread.join()
async def later():
    await asyncio.sleep(0.001)
    return 1
assert seen == [1] and asyncio.run(later()) == 1
assert sqlite3.connect(':memory:').execute('select 1').fetchone() == (1,)
assert decimal.Decimal(1) / 4 == decimal.Decimal('.25') and random.random() < 1
print('é', flush=True)
"""

    assert answer(SCRIPTS[way], source, is_root=is_root) == (0, TOKEN)


@pytest.mark.parametrize(
    ("source", "tests"),
    [
        ("import typing\nclass A:\n    b: 'A'\n", "assert typing.get_type_hints(A) == {'b': A}"),
        ("class A:\n    b = 1\n", "import pickle\nassert type(pickle.loads(pickle.dumps(A()))) is A"),
        (
            "from __future__ import annotations\nimport dataclasses, typing\n@dataclasses.dataclass\nclass A:\n"
            "    b: int\n    c: typing.ClassVar[int] = 3\n    d: dataclasses.InitVar[int] = 4\n"
            "    def __post_init__(self, d): self.e = d\n",
            "assert [field.name for field in dataclasses.fields(A)] == ['b'] and A(1, 2).e == 2",
        ),
        ("", "import pickle\nclass B: pass\nassert type(pickle.loads(pickle.dumps(B()))) is B"),
        ("a = 1", "from solution import a as b\nfrom __main__ import a as c\nassert b == c == 1"),
    ],
    ids=["hints", "pickle", "dataclass", "pickle of the tests", "imports"],
)
def test_classes_are_found_in_the_module_that_they_name(source: str, tests: str) -> None:
    assert answer(SCRIPT, source, tests) == (0, TOKEN)


def test_the_main_block_of_the_code_does_not_run_and_those_of_the_tests_do() -> None:
    source = "a = 1\nif __name__ == '__main__':\n    a = int(input())\n"
    block = "if __name__ == '__main__':\n    a += 1\n"

    assert answer(SCRIPT, source, block, block, "assert a == 3") == (0, TOKEN)


def test_the_process_is_the_only_one_of_a_user_without_rights_and_sees_pythons_library_alone(is_root: bool) -> None:
    source = """
import os, sys
assert os.getpid() == 1 and os.getppid() == 0 and os.getuid() == os.geteuid() == os.getgid() == 65534
own = sys.base_prefix.split('/')[1]
assert set(os.listdir('/')) <= {'etc', 'lib', 'lib32', 'lib64', 'usr', own}
assert own == 'usr' or os.listdir(sys.base_prefix) == ['lib']
assert os.listdir('/etc') == ['ld.so.cache'] and set(os.environ) <= {'LC_CTYPE'}
"""

    assert answer(SCRIPT, source, is_root=is_root) == (0, TOKEN)


@pytest.mark.parametrize("way", SCRIPTS)
def test_its_limits_are_those_of_the_request(way: str) -> None:
    source = """
import resource
for limit, most in (('CPU', 20), ('AS', 512 << 20), ('FSIZE', 0), ('CORE', 0), ('NOFILE', 64)):
    assert resource.getrlimit(getattr(resource, 'RLIMIT_' + limit)) == (most, most)
"""

    assert answer(SCRIPTS[way], source) == (0, TOKEN)
    assert answer(SCRIPTS[way], "bytearray(1 << 30)")[1] == ""


@pytest.mark.parametrize("script", [SCRIPT, WITHOUT_NAMESPACES, WITHOUT_EITHER], ids=[*SCRIPTS, "nothing"])
def test_a_process_says_how_it_is_isolated(script: str, is_root: bool, request: pytest.FixtureRequest) -> None:
    kind = next(name for name in (*SCRIPTS, "nothing") if name in request.node.callspec.id)

    assert answer(script, is_root=is_root, unisolated=True) == (0, TOKEN + kind)


def test_code_that_cannot_be_isolated_is_not_run_unless_that_is_accepted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    exit_code, said = answer(WITHOUT_EITHER, "a = 1")
    assert (exit_code, said[:6]) == (sandbox.REFUSED, TOKEN) and "none of namespaces: [Errno 22] unshare" in said
    assert answer(WITHOUT_EITHER, "a = 1", unisolated=True) == (0, TOKEN)
    (tmp_path / "sandbox.py").write_text(WITHOUT_EITHER)
    monkeypatch.setattr(sandbox, "__file__", str(tmp_path / "sandbox.py"))
    code._check_isolation.cache_clear()

    with pytest.raises(ConfigError, match=r"code cannot limit its process on this machine: .*unisolated = true"):
        named_reward(CodeReward(name="code"))
    accepted = named_reward(CodeReward(name="code", unisolated=True))
    assert accepted([], [], response="a = 1", gt_answer="assert a") == 1
    with pytest.raises(RewardError, match="Landlock"):
        passes(["a = 1"], timeout_s=20, memory_bytes=512 << 20)
    code._check_isolation.cache_clear()


def test_without_isolation_the_list_of_system_calls_holds(victim: subprocess.Popen[bytes]) -> None:
    attacks = [f"os.kill({victim.pid}, 9)", "socket.socket()", "os.fork()", f"fcntl.fcntl(pipe[0], 8, {victim.pid})",
               f"open({__file__!r}, 'r+')"]  # fmt: skip

    assert answer(WITHOUT_EITHER, PRELUDE + "".join(map(guarded, attacks)), unisolated=True) == (0, TOKEN)
    assert victim.poll() is None


def test_a_filter_that_the_kernel_refuses_runs_nothing() -> None:
    script = SCRIPT.replace("_SECCOMP_MODE_FILTER = 2", "_SECCOMP_MODE_FILTER = 99")

    assert answer(script, "a = 1") == (sandbox.REFUSED, f"{TOKEN}[Errno 22] prctl 22: Invalid argument")


def test_python_whose_library_cannot_be_read_is_refused() -> None:
    script = SCRIPT.replace('["/usr", "/lib", "/lib64", "/lib32", os.path.join(sys.base_prefix, "lib")]', '["/lib64"]')

    exit_code, said = answer(script)

    assert exit_code == sandbox.REFUSED and "it cannot read Python's library" in said


def test_code_of_this_machine_is_isolated() -> None:
    assert isolation() in SCRIPTS


@pytest.mark.parametrize(
    "source",
    [
        "import os; os._exit(0)",
        "raise SystemExit(0)",
        # The exit code of a process that could not be limited, whose rows have no reward.
        f"import os; os._exit({sandbox.REFUSED})",
        "import ctypes; ctypes.CDLL(None).syscall(0x40000000 | 39)",
        "import ctypes; ctypes.string_at(0)",
        "import os; os.abort()",
        # Writes to whatever is open: only the token counts.
        "import os\nfor n in range(3, 64):\n try: os.write(n, b'passed')\n except OSError: pass\nos._exit(0)",
    ],
)
def test_code_that_ends_its_process_does_not_pass(source: str) -> None:
    assert not passes([source], timeout_s=20, memory_bytes=512 << 20)


def test_code_that_does_not_end_is_ended() -> None:
    began_s = time.monotonic()

    assert not passes(["while True: pass"], timeout_s=0.5, memory_bytes=512 << 20)
    assert not passes(["import time; time.sleep(60)"], timeout_s=0.5, memory_bytes=512 << 20)
    assert not passes(["import signal\nsignal.alarm(0)\nsignal.pause()"], timeout_s=0.5, memory_bytes=512 << 20)
    assert time.monotonic() - began_s < 20


def test_cpu_seconds_end_it_in_its_namespace_of_processes() -> None:
    """The first process of a namespace ignores signals that others do not."""
    request = {"sources": ["while True: pass"], "token": TOKEN, "cpu_s": 1, "memory_bytes": 512 << 20}

    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", SCRIPT], input=json.dumps(request).encode(), stdout=subprocess.PIPE,
        timeout=60, check=False,
    )  # fmt: skip

    assert done.stdout == b""


@pytest.mark.parametrize("way", SCRIPTS)
def test_code_does_not_outlive_the_process_that_started_it(way: str) -> None:
    request = {"sources": ["import time; time.sleep(60)"], "token": TOKEN, "cpu_s": 5, "memory_bytes": 512 << 20}
    starter = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", SCRIPTS[way]], stdin=subprocess.PIPE, start_new_session=True
    )
    with starter:
        assert starter.stdin is not None
        starter.stdin.write(json.dumps(request).encode())
        starter.stdin.close()
        child = limited_child(starter.pid)

        os.kill(starter.pid, signal.SIGKILL)

    deadline_s = time.monotonic() + 20
    while is_running(child):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.parametrize("way", SCRIPTS)
def test_the_sandbox_does_not_outlive_its_scorer(way: str) -> None:
    request = {"sources": ["import time; time.sleep(30)"], "token": TOKEN, "cpu_s": 5, "memory_bytes": 512 << 20}
    run = "import subprocess, sys; subprocess.run([*sys.argv[2:]], input=sys.argv[1].encode())"
    command = [sys.executable, "-I", "-S", "-c", SCRIPTS[way]]
    with subprocess.Popen([sys.executable, "-c", run, json.dumps(request), *command]) as scorer:
        outer = first_child(scorer.pid)
        child = limited_child(outer)

        os.kill(scorer.pid, signal.SIGKILL)

    deadline_s = time.monotonic() + 10
    while is_running(outer) or is_running(child):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def first_child(parent: int) -> int:
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        if children := Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            return int(children[0])
        time.sleep(0.01)
    raise AssertionError("it has no child")


def limited_child(parent: int) -> int:
    """Return the child of a process once it has its filter of system calls."""
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        if children and "Seccomp:\t2" in Path(f"/proc/{children[0]}/status").read_text():
            return int(children[0])
        time.sleep(0.01)
    raise AssertionError("no child is limited")


def is_running(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False


def test_the_lists_of_both_machines_have_no_number_twice() -> None:
    for column in (0, 1):
        numbers = [pair[column] for pair in sandbox._ALLOWED.values() if pair[column] is not None]
        assert len(numbers) == len(set(numbers)) > 60
    libc = ctypes.CDLL(None)
    assert libc.syscall(sandbox._ALLOWED["getpid"][0 if BY_NUMBER else 1]) == os.getpid()
