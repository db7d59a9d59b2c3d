"""What a forked child does to itself before it serves: a group of its own, a clean environment, limits.

Runs in the child, before any candidate is read. Each step that held is named, so that the report can say under which rungs of
the isolation ladder a worker ran.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Mapping

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

_libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> bool:
    """Whether the kernel took the option."""
    return _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) == 0


def enter(cwd: str, environment: Mapping[str, str], log_fd: int, keep: tuple[int, ...], *, untrusted: bool) -> list[str]:
    """Turn a fresh fork into a process group of its own with nothing inherited.

    Args:
        cwd: the private, empty folder to work in.
        environment: the whole environment.
        log_fd: where standard output and error go.
        keep: descriptors to keep open; every other one above 2 is closed.
        untrusted: a worker, which also gives up gaining privileges and dumping core.

    Returns:
        The rungs that held, such as `process group` and `clean environment`.
    """
    rungs = ["process group", "clean environment", "empty folder"]
    os.setsid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    _close_all_but(keep)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    os.umask(0o077)
    sys.path[:] = [entry for entry in sys.path if entry not in ("", ".")]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    if untrusted and prctl(PR_SET_NO_NEW_PRIVS, 1):
        rungs.append("no new privileges")
    if not untrusted and prctl(PR_SET_DUMPABLE, 0):
        rungs.append("not dumpable")
    return rungs


def _close_all_but(keep: tuple[int, ...]) -> None:
    kept = sorted({0, 1, 2, *keep})
    top = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if top == resource.RLIM_INFINITY or top > 1 << 20:
        top = 1 << 20
    for low, high in zip(kept, [*kept[1:], top], strict=True):
        os.closerange(low + 1, high)
