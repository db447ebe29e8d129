"""The process in which the reward `code` runs the tests of a row, apart from everything that is not its own.

It is started as a script and imports nothing of this package. It reads ``{"sources", "token", "cpu_s", "memory_bytes",
"unisolated"}`` as JSON from its standard input, isolates itself, executes the sources one after the other in one
module, and writes the token to its standard output if the last one ended without an exception. The module is called
"solution" by the first source, the code of the response, whose ``if __name__ == "__main__":`` does not hold, and
"__main__" by the tests. Without sources it writes the token and the kind of its isolation. Exit code 97 and the token,
then the reason: it could not isolate or limit itself, and nothing was executed.

    this process    files: those of Python's library alone; no other process, network, user
      its child     limits of CPU, memory, files (setrlimit); a list of the system calls that it may make (seccomp)

Isolation is one of two; where the kernel has neither, ``unisolated`` must be true for the sources to run:

    namespaces      of mounts, processes, network, IPC and host names. Its root is an empty file system, into which
                    /usr and Python's library are mounted, read-only. root becomes the user 65534 in them; another
                    user makes a namespace of users first, in which it has no rights.
    Landlock        where no namespaces can be made, as in most containers: no file but those of Python's library can be
                    opened; from Linux 6.12 on no signal leaves it.

Nothing of it can be taken back. The list of system calls is that of a computation: no process is made, no socket but a
pair, no file is written, no owner of a descriptor is set, no other process is signalled, traced or waited for.
"""

import ctypes
import errno
import json
import os
import resource
import signal
import struct
import sys
import types

REFUSED = 97
_NOBODY = 65534
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SECCOMP_MODE_FILTER = 2
_NEW_NAMESPACES = 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000
"""CLONE_NEWNS, CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWIPC and CLONE_NEWUTS."""
_NEW_USER = 0x10000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_MNT_DETACH = 2
# Flags of a mount that a namespace of users may not clear: ST_NOEXEC, ST_NOATIME, ST_NODIRATIME, ST_RELATIME, as MS_*.
_KEPT_FLAGS = {8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}
_NEW_ROOT = "/dev"
"""A folder that exists everywhere, and of which nothing is mounted into the new root."""
_LANDLOCK = 444, 445, 446
_LANDLOCK_ACCESS = (0, 0x1FFF, 0x3FFF, 0x7FFF, 0x7FFF, 0xFFFF)
"""All rights on files that Landlock knows, by the version of its interface."""
_LANDLOCK_READ = 1 << 0 | 1 << 2 | 1 << 3

# Numbers of system calls on x86-64 and arm64; None where there is none.
_ALLOWED = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "stat": (4, None), "fstat": (5, 80), "lstat": (6, None),
    "poll": (7, None), "lseek": (8, 62), "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215),
    "brk": (12, 214), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "pread64": (17, 67), "readv": (19, 65), "writev": (20, 66), "access": (21, None), "pipe": (22, None),
    "select": (23, None), "sched_yield": (24, 124), "mremap": (25, 216), "madvise": (28, 233), "dup": (32, 23),
    "dup2": (33, None), "pause": (34, None), "nanosleep": (35, 101), "getitimer": (36, 102), "alarm": (37, None),
    "setitimer": (38, 103), "getpid": (39, 172), "recvfrom": (45, 207), "exit": (60, 93), "uname": (63, 160),
    "getcwd": (79, 17), "chdir": (80, 49), "readlink": (89, None), "gettimeofday": (96, 169), "getrlimit": (97, 163),
    "getrusage": (98, 165), "sysinfo": (99, 179), "times": (100, 153), "getuid": (102, 174), "getgid": (104, 176),
    "geteuid": (107, 175), "getegid": (108, 177), "getppid": (110, 173), "getpgrp": (111, None),
    "getgroups": (115, 158), "getresuid": (118, 148), "getresgid": (120, 150), "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132), "statfs": (137, 43),
    "fstatfs": (138, 44), "arch_prctl": (158, None), "gettid": (186, 178), "time": (201, None), "futex": (202, 98),
    "sched_getaffinity": (204, 123), "epoll_create": (213, None), "getdents64": (217, 61),
    "set_tid_address": (218, 96), "restart_syscall": (219, 128), "fadvise64": (221, 223), "clock_gettime": (228, 113),
    "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "exit_group": (231, 94), "epoll_wait": (232, None),
    "epoll_ctl": (233, 21), "newfstatat": (262, 79), "readlinkat": (267, 78), "faccessat": (269, 48),
    "pselect6": (270, 72), "ppoll": (271, 73), "set_robust_list": (273, 99), "epoll_pwait": (281, 22),
    "eventfd2": (290, 19), "epoll_create1": (291, 20), "dup3": (292, 24), "pipe2": (293, 59), "preadv": (295, 69),
    "getcpu": (309, 168), "getrandom": (318, 278), "membarrier": (324, 283), "statx": (332, 291), "rseq": (334, 293),
    "close_range": (436, 436), "faccessat2": (439, 439), "epoll_pwait2": (441, 441), "futex_waitv": (449, 449),
}  # fmt: skip
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CLONE_THREAD = 0x10000
_TERMINAL_SIZE, _IS_TERMINAL = 0x5413, 0x5401
_FIONBIO, _FIONREAD, _FIOCLEX, _FIONCLEX = 0x5421, 0x541B, 0x5451, 0x5450
_DUPLICATE, _GET_FD, _SET_FD, _GET_FLAGS, _SET_FLAGS, _DUPLICATE_CLOSING = 0, 1, 2, 3, 4, 1030
_O_ASYNC = 0x2000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Isolate this process, then execute the sources in a child of it."""
    request = json.loads(sys.stdin.buffer.read())
    answer = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    token = request["token"].encode()
    sources = request["sources"]
    try:
        _die_with_parent()
        isolation = _isolate(unisolated=bool(request.get("unisolated")))
        # The kernel takes it from a process that changes its user.
        _die_with_parent()
        # The first child of a namespace of processes is its first process.
        child = os.fork()
        if child == 0:
            _die_with_parent()
            _limit(request["cpu_s"], request["memory_bytes"])
    except OSError as error:
        # With the token: the source could end its process with this exit code, too.
        os.write(answer, token + str(error).encode())
        os._exit(REFUSED)
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256)
    code = 1
    try:
        # Under both names: pickle, typing and dataclasses look a class up in the module that it names.
        module = sys.modules["solution"] = sys.modules["__main__"] = types.ModuleType("solution")
        for number, source in enumerate(sources):
            module.__name__ = "__main__" if number else "solution"
            # Each with its own imports from `__future__`, which must be its first statements.
            exec(compile(source, f"<source {number}>", "exec", dont_inherit=True), module.__dict__)
        if sources:
            os.write(answer, token)
        else:
            # A module in Python, and one of a shared object: both must be there for the sources.
            import decimal  # noqa: F401

            os.write(answer, token + isolation.encode())
        code = 0
    except ImportError as error:
        if not sources:
            os.write(answer, token + f"isolated, it cannot read Python's library: {error}".encode())
            code = REFUSED
    finally:
        # No atexit of the source, and no thread that it has left.
        os._exit(code)


def _isolate(*, unisolated: bool) -> str:
    """Leave everything but Python's library; return the kind of isolation."""
    why = []
    for kind, way in (("namespaces", _enter_namespaces), ("Landlock", _enter_landlock)):
        try:
            way()
            return kind
        except OSError as error:
            why.append(f"{kind}: {error}")
    if unisolated:
        return "nothing"
    raise OSError("it can be isolated by none of " + ", ".join(why))


def _library() -> list[str]:
    """Return the folders that Python and its extension modules need."""
    folders = ["/usr", "/lib", "/lib64", "/lib32", os.path.join(sys.base_prefix, "lib")]
    return [folder for folder in folders if os.path.isdir(folder)]


# Namespaces.


def _enter_namespaces() -> None:
    if os.geteuid() == 0:
        try:
            _call("unshare", _libc.unshare(_NEW_NAMESPACES))
        except PermissionError:
            # A root without rights, as in containers.
            _enter_user_namespace()
            _take_new_root()
        else:
            _take_new_root()
            os.setgroups([])
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    else:
        _enter_user_namespace()
        _take_new_root()
    # Rights within the namespace of users; header of version 3, then three sets of 64 bits.
    header, none = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0)), ctypes.create_string_buffer(24)
    _call("capset", _libc.capset(header, none))


def _enter_user_namespace() -> None:
    user, group = os.geteuid(), os.getegid()
    _call("unshare", _libc.unshare(_NEW_USER | _NEW_NAMESPACES))
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{_NOBODY} {user} 1"),
        ("gid_map", f"{_NOBODY} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _take_new_root() -> None:
    """Make an empty file system with Python's library, read-only, the root of this process."""
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("none", _NEW_ROOT, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    for folder in _library():
        if os.path.islink(folder):
            os.symlink(os.readlink(folder), _NEW_ROOT + folder)
            continue
        os.makedirs(_NEW_ROOT + folder, exist_ok=True)
        if folder == "/usr" or not folder.startswith("/usr/"):
            _mount_read_only(folder, _NEW_ROOT + folder)
    cache = "/etc/ld.so.cache"
    if os.path.exists(cache):
        os.mkdir(f"{_NEW_ROOT}/etc")
        os.close(os.open(_NEW_ROOT + cache, os.O_WRONLY | os.O_CREAT))
        _mount_read_only(cache, _NEW_ROOT + cache)
    os.chdir(_NEW_ROOT)
    # The former root lies over the new one until it is unmounted (pivot_root(2)).
    _call("pivot_root", _libc.syscall(155 if os.uname().machine == "x86_64" else 41, b".", b"."))
    _call("umount2", _libc.umount2(b".", _MNT_DETACH))
    os.chdir("/")
    _mount(None, "/", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)


def _mount_read_only(path: str, target: str) -> None:
    _mount(path, target, None, _MS_BIND | _MS_REC)
    found = os.statvfs(target).f_flag
    kept = sum(flag for known, flag in _KEPT_FLAGS.items() if found & known)
    _mount(None, target, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV | kept)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, options)]
    result = _libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])
    _call(f"mount {target.removeprefix(_NEW_ROOT) or '/'}", result)


# Landlock.


def _enter_landlock() -> None:
    create, add_rule, restrict = _LANDLOCK
    version = _call("Landlock", _libc.syscall(create, None, ctypes.c_size_t(0), 1))
    access = _LANDLOCK_ACCESS[min(version, len(_LANDLOCK_ACCESS) - 1)]
    # Rights on files, on TCP ports (from 4), scopes: abstract sockets and signals (from 6).
    attributes = struct.pack("QQQ", access, 3, 3)[: 8 if version < 4 else 16 if version < 6 else 24]
    rules = _call("Landlock", _libc.syscall(create, attributes, ctypes.c_size_t(len(attributes)), 0))
    for path in _library():
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", access & _LANDLOCK_READ, folder)
        _call("Landlock", _libc.syscall(add_rule, rules, 1, rule, 0))
        os.close(folder)
    _forbid_new_rights()
    _call("Landlock", _libc.syscall(restrict, rules, 0))
    os.close(rules)


# Limits.


def _limit(cpu_s: int, memory_bytes: int) -> None:
    for limit, most in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        resource.setrlimit(limit, (most, most))
    _forbid_new_rights()
    program = _program()
    held = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(held))
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, described)


def _die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _forbid_new_rights() -> None:
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def _prctl(option: int, *arguments: int | bytes) -> None:
    given = [value if isinstance(value, bytes) else ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0)[:4]]
    _call(f"prctl {option}", _libc.prctl(option, *given))


def _call(name: str, result: int) -> int:
    """Return the result of a call of libc; raise an OSError if it has failed."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def _program() -> bytes:
    """Return the filter of system calls of this machine, in classic BPF: 8 bytes an instruction."""
    machine = os.uname().machine
    if machine not in _MACHINES:
        raise OSError(errno.ENOSYS, f"no list of system calls is known for {machine}")
    column, architecture = _MACHINES[machine]

    def instruction(code: int, k: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, k)

    allowed = instruction(_RETURN, _ALLOW)
    denied = instruction(_RETURN, _ERRNO | errno.EPERM)

    def one_of(argument: int, values: list[int]) -> list[bytes]:
        """Allow the call if the low half of an argument is one of some values; fall through otherwise."""
        # struct seccomp_data: the number at 0, the architecture at 4, the low half of argument n at 16 + 8 n.
        tests = [instruction(_LOAD, 16 + 8 * argument)]
        for value in values:
            tests += [instruction(_EQUAL, value, if_false=1), allowed]
        return tests

    def no_bit(argument: int, bits: int) -> list[bytes]:
        return [instruction(_LOAD, 16 + 8 * argument), instruction(_ANY_BIT, bits, if_true=1), allowed]

    def is_zero(argument: int) -> list[bytes]:
        """Fall through to the next test if all of an argument is 0; refuse otherwise."""
        tests = []
        for half in (0, 4):
            tests += [instruction(_LOAD, 16 + 8 * argument + half), instruction(_EQUAL, 0, if_true=1), denied]
        return tests

    flags = [
        instruction(_LOAD, 24),
        instruction(_EQUAL, _SET_FLAGS, if_true=1),
        denied,
        *no_bit(2, _O_ASYNC),
    ]
    commands = [_DUPLICATE, _GET_FD, _SET_FD, _GET_FLAGS, _DUPLICATE_CLOSING]
    with_arguments = {
        (2, None): no_bit(1, _WRITING),  # open
        (257, 56): no_bit(2, _WRITING),  # openat
        (16, 29): one_of(1, [_IS_TERMINAL, _TERMINAL_SIZE, _FIONBIO, _FIONREAD, _FIOCLEX, _FIONCLEX]),  # ioctl
        (72, 25): [*one_of(1, commands), *flags],  # fcntl
        (56, 220): [instruction(_LOAD, 16), instruction(_ANY_BIT, _CLONE_THREAD, if_false=1), allowed],  # clone
        (302, 261): [*is_zero(2), *is_zero(0), allowed],  # prlimit64: the own limits, read
        (234, 131): one_of(0, [os.getpid()]),  # tgkill: the own threads
        (53, 199): one_of(0, [1]),  # socketpair of AF_UNIX: asyncio's own
        (44, 206): [*is_zero(4), allowed],  # sendto without an address
    }
    program = [
        instruction(_LOAD, 4),
        instruction(_EQUAL, architecture, if_true=1),
        instruction(_RETURN, _KILL),
        instruction(_LOAD, 0),
        # Numbers of the x32 interface.
        instruction(_AT_LEAST, 0x40000000, if_false=1),
        instruction(_RETURN, _KILL),
        # clone3: glibc falls back to clone, whose flags can be read here.
        instruction(_EQUAL, 435, if_false=1),
        instruction(_RETURN, _ERRNO | errno.ENOSYS),
    ]
    for numbers in _ALLOWED.values():
        if (number := numbers[column]) is not None:
            program += [instruction(_EQUAL, number, if_false=1), allowed]
    for numbers, tests in with_arguments.items():
        if (number := numbers[column]) is not None:
            program += [instruction(_EQUAL, number, if_false=len(tests) + 1), *tests, denied]
    return b"".join([*program, denied])


if __name__ == "__main__":
    main()
