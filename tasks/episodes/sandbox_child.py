"""The program of the Python tool's sandbox. It uses only the standard library.

    python -I -S sandbox_child.py CPU_SECONDS MEMORY_BYTES < code

Before it reads the code, it restricts its process as far as the system allows: no network and no other processes
(namespaces), no files but Python's own (Landlock), limits of time, memory and open files. On a system without
namespaces or Landlock an audit hook still refuses such operations, which stops accidents but no attacker. The value of
a last expression is printed, as in an interactive session.
"""

from __future__ import annotations

import ast
import ctypes
import os
import resource
import signal
import struct
import sys
import sysconfig
import traceback
from typing import Any

NEW_USER, NEW_NETWORK, NEW_PROCESSES, NEW_IPC = 0x10000000, 0x40000000, 0x20000000, 0x08000000
"""Flags of unshare(2)."""
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""Numbers of Landlock's system calls, which are the same on all processors."""
READ_RIGHTS = 0b1100
"""Bits of Landlock's rights to read files and to list folders."""
NO_NEW_PRIVILEGES, PARENT_DEATH_SIGNAL = 38, 1
"""Options of prctl(2)."""
MAX_FILES, MAX_PROCESSES = 32, 16
REFUSED_EVENTS = ("socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.kill",
           "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
           "os.chown", "os.putenv", "shutil.", "ctypes.", "pty.")  # fmt: skip
"""Prefixes of audit events that are refused."""


def confine(libc: Any) -> None:
    """Continue in a child process in new namespaces, without network or other processes. The child ends with this
    process."""
    if libc.unshare(NEW_USER | NEW_NETWORK | NEW_PROCESSES | NEW_IPC) != 0:
        return
    pid = os.fork()
    if pid:
        libc.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)  # unshare has reset it
        status = os.waitpid(pid, 0)[1]
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    libc.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)


def hide_files(libc: Any) -> None:
    """Hide all files but Python's own, and make those read-only."""
    version = libc.syscall(CREATE_RULESET, None, 0, 1)
    if version < 1:
        return
    rights = (1 << (13 if version == 1 else 14 if version == 2 else 15)) - 1
    rules = libc.syscall(CREATE_RULESET, struct.pack("<Q", rights), 8, 0)
    if rules < 0:
        return
    stdlib = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), f"{sys.base_prefix}/lib"}
    for folder in (*stdlib, "/usr/lib", "/lib", "/lib64", "/usr/share/zoneinfo"):
        try:
            fd = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        libc.syscall(ADD_RULE, rules, 1, struct.pack("<Qi", READ_RIGHTS, fd), 0)
        os.close(fd)
    libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    libc.syscall(RESTRICT_SELF, rules, 0)
    os.close(rules)


def limit(cpu_seconds: int, memory_bytes: int) -> None:
    """Limit the time, memory, open files and children of this process, and let it write no file."""
    for resource_kind, value in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, MAX_FILES),
        (resource.RLIMIT_NPROC, MAX_PROCESSES),
    ):
        resource.setrlimit(resource_kind, (value, value))


def refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook that refuses operations."""
    if event == "open":
        mode, flags = arguments[1:3]
        if (isinstance(mode, str) and set(mode) & set("wax+")) or (
            isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        ):
            raise PermissionError("files cannot be written here")
    elif event.startswith(REFUSED_EVENTS):
        raise PermissionError(f"{event} is not allowed here")


def run(code: str) -> int:
    """Execute the code, and print the value of its last expression. Returns the exit code."""
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        tree = ast.parse(code, "code")
        last_statement = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "code", "exec"), names)
        if isinstance(last_statement, ast.Expr):
            value = eval(compile(ast.Expression(last_statement.value), "code", "eval"), names)
            if value is not None:
                sys.stdout.write(f"{value!r}\n")
    except SystemExit:
        return 0
    except BaseException as error:  # noqa: BLE001  the tool returns every error as output
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != "code":
            trace = trace.tb_next  # frames of this program would confuse the code's author
        sys.stdout.write("".join(traceback.format_exception(type(error), error, trace)))
        return 1
    return 0


def main() -> None:
    cpu_seconds, memory_bytes = map(int, sys.argv[1:])
    libc = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "linux":
        libc.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
        confine(libc)
        hide_files(libc)
    limit(cpu_seconds, memory_bytes)
    code = sys.stdin.read()
    sys.addaudithook(refuse)
    status = run(code)
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
