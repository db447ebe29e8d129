"""The process in which the reward `code` runs the tests of a row: limited, without files to write and without network.

It is started as a script and imports nothing of this package. It reads ``{"source", "token", "cpu_s", "memory_bytes"}``
as JSON from its standard input, limits itself, executes the source, and writes the token to its standard output if the
source ended without an exception. Exit code 97 and the token, then the reason: it could not limit itself, and nothing
was executed.

Limits hold for the process and cannot be taken back: CPU seconds and memory (setrlimit), and a filter of system calls
(seccomp), by which no process is started, no socket is made, no file is written, renamed or removed, and no other
process is signalled or traced. Files can be read.
"""

import ctypes
import json
import os
import resource
import signal
import struct
import sys

REFUSED = 97
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SECCOMP_MODE_FILTER = 2
_AUDIT_ARCH_X86_64 = 0xC000003E
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CLONE_THREAD = 0x10000
_OPEN, _OPENAT, _CLONE, _CLONE3 = 2, 257, 56, 435
# By their numbers on x86-64 Linux (arch/x86/entry/syscalls/syscall_64.tbl).
_DENIED = (
    29, 30, 31, 64, 65, 66, 68, 69, 70, 71, 220, 240, 241,  # shared memory, semaphores and message queues
    41, 42, 44, 46, 49, 50, 53, 288, 299, 307,  # socket, connect, sendto, sendmsg, bind, listen, socketpair, ...
    57, 58, 59, 322,  # fork, vfork, execve, execveat
    62, 129, 200, 234, 297, 424, 434, 438,  # kill and its relatives, pidfd_open, pidfd_getfd
    76, 77, 82, 83, 84, 85, 86, 87, 88, 90, 91, 92, 93, 94, 132, 133,  # truncate, rename, mkdir, unlink, chmod, ...
    101, 310, 311, 440,  # ptrace, process_vm_readv, process_vm_writev, process_madvise
    155, 161, 165, 166, 169, 175, 176, 188, 189, 190, 197, 198, 199,  # pivot_root, chroot, mount, reboot, xattr, ...
    235, 258, 259, 260, 261, 263, 264, 265, 266, 268, 280, 285, 316,  # the forms of these with a directory
    272, 308, 246, 250, 248, 249, 298, 313, 320, 321, 323,  # unshare, setns, kexec, keys, perf, modules, bpf, ...
    141, 142, 144, 203, 251, 314,  # setpriority, scheduling and affinity of other processes
    157, 160, 303, 304,  # prctl, setrlimit, name_to_handle_at, open_by_handle_at
    159, 163, 164, 167, 168, 170, 171, 172, 173, 227, 305,  # acct, clocks, swap, host names, ports
    302, 425, 426, 427, 428, 429, 430, 431, 432, 437, 442, 452,  # prlimit64, io_uring, mounts, openat2, fchmodat2
)  # fmt: skip


def main() -> None:
    """Limit this process, then execute the source."""
    request = json.loads(sys.stdin.buffer.read())
    answer = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    try:
        _limit(request["cpu_s"], request["memory_bytes"])
    except OSError as error:
        # With the token: the source could end its process with this exit code, too.
        os.write(answer, (request["token"] + str(error)).encode())
        os._exit(REFUSED)
    code = 1
    try:
        exec(compile(request["source"], "<tests>", "exec"), {"__name__": "__main__"})
        os.write(answer, request["token"].encode())
        code = 0
    finally:
        # No atexit of the source, and no thread that it has left.
        os._exit(code)


def _limit(cpu_s: int, memory_bytes: int) -> None:
    for limit, most in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        resource.setrlimit(limit, (most, most))
    libc = ctypes.CDLL(None, use_errno=True)
    program = _program()
    held = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(held))
    for arguments in (
        (_PR_SET_PDEATHSIG, signal.SIGKILL, 0),
        (_PR_SET_NO_NEW_PRIVS, 1, 0),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, described),
    ):
        given = [value if isinstance(value, bytes) else ctypes.c_ulong(value) for value in arguments]
        if libc.prctl(arguments[0], *given[1:], ctypes.c_ulong(0), ctypes.c_ulong(0)):
            raise OSError(ctypes.get_errno(), f"prctl {arguments[0]}: {os.strerror(ctypes.get_errno())}")


def _program() -> bytes:
    """Return the filter of system calls, in classic BPF: 8 bytes an instruction."""

    def instruction(code: int, k: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, k)

    denied = instruction(_RETURN, _ERRNO | _EPERM)
    # struct seccomp_data: the number at 0, the architecture at 4, the low half of argument n at 16 + 8 n.
    program = [
        instruction(_LOAD, 4),
        instruction(_EQUAL, _AUDIT_ARCH_X86_64, if_true=1),
        instruction(_RETURN, _KILL),
        instruction(_LOAD, 0),
        # Numbers of the x32 interface.
        instruction(_AT_LEAST, 0x40000000, if_false=1),
        instruction(_RETURN, _KILL),
        # glibc falls back to clone, whose flags can be read here.
        instruction(_EQUAL, _CLONE3, if_false=1),
        instruction(_RETURN, _ERRNO | _ENOSYS),
    ]
    for number in sorted(_DENIED):
        program += [instruction(_EQUAL, number, if_false=1), denied]
    for number, argument, bits, denied_if_set in (
        (_OPEN, 1, _WRITING, True),
        (_OPENAT, 2, _WRITING, True),
        (_CLONE, 0, _CLONE_THREAD, False),
    ):
        program += [
            instruction(_EQUAL, number, if_false=4),
            instruction(_LOAD, 16 + 8 * argument),
            instruction(_ANY_BIT, bits, if_true=0 if denied_if_set else 1, if_false=1 if denied_if_set else 0),
            denied,
            instruction(_RETURN, _ALLOW),
        ]
    program.append(instruction(_RETURN, _ALLOW))
    return b"".join(program)


if __name__ == "__main__":
    main()
