"""The process that has torch imported and CUDA untouched, and forks judges and workers.

It is started clean (`python -I -B`, allow-listed environment, empty folder) by `processes.ForkServer` and holds no secret: no
problem, no seed, no candidate. A fork of it is ready in hundredths of a second, where a new interpreter needs seconds for torch.

Preloads torch and numpy only: importing `torch.utils.cpp_extension`, or anything else that asks torch how many devices there
are, would leave every child with "Cannot re-initialize CUDA in forked subprocess".
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from typing import Any

from . import sandbox

ROLES = ("judge", "worker", "builder")


def main(control_fd: int) -> None:
    """Serve until the control socket closes; then kill every child and leave."""
    control = socket.socket(fileno=control_fd)
    sandbox.prctl(sandbox.PR_SET_CHILD_SUBREAPER, 1)
    _send(control, {"facts": _preload()})
    _Server(control).serve()


def _preload() -> dict[str, Any]:
    try:
        import numpy  # noqa: F401
        import torch

        from . import judge, worker  # noqa: F401
    except BaseException as error:
        return {"error": f"{type(error).__name__}: {error}"}
    pybind = {
        name: getattr(torch._C, f"_PYBIND11_{name}", None) for name in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI")
    }
    return {
        "torch": torch.__version__,
        "git": torch.version.git_version or "",
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cxx11_abi": bool(torch.compiled_with_cxx11_abi()),
        "pybind": {name: value for name, value in pybind.items() if value},
        "folder": os.path.dirname(torch.__file__),
        "arch_list": list(torch._C._cuda_getArchFlags().split()) if hasattr(torch._C, "_cuda_getArchFlags") else [],
        "cuda_untouched": not torch.cuda.is_initialized(),
        "python": sys.version.split()[0],
    }


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        control.send(json.dumps(message).encode())


class _Server:
    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.children: dict[int, int] = {}
        """pid → the id that pytest knows the child by."""

    def serve(self) -> None:
        wake_read, wake_write = os.pipe()
        for fd in (wake_read, wake_write):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is pytest's; it closes the socket when it is done
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        selector = selectors.DefaultSelector()
        selector.register(self.control, selectors.EVENT_READ)
        selector.register(wake_read, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is self.control:
                    if not self._request():
                        self._end()
                        return
                else:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_read, 4096)
            self._reap()

    def _request(self) -> bool:
        try:
            data, fds, _, _ = socket.recv_fds(self.control, 1 << 18, 4)
        except OSError:
            return False
        if not data:
            return False
        message = json.loads(data)
        if message["op"] == "spawn":
            self._spawn(message, fds)
        elif message["op"] == "kill":
            for pid, number in list(self.children.items()):
                if number == message["id"]:
                    _kill_group(pid)
        for fd in fds:
            os.close(fd)
        return True

    def _spawn(self, message: dict[str, Any], fds: list[int]) -> None:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                _child(message, fds)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                # No atexit handlers, no destructors: a candidate may have registered some.
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        self.children[pid] = message["id"]
        _send(self.control, {"id": message["id"], "pid": pid})

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            number = self.children.pop(pid, None)
            if number is None:
                continue  # an orphan of some child, handed to us as its subreaper
            _kill_group(pid)
            self._kill_orphans()
            _send(self.control, {"id": number, "exit": os.waitstatus_to_exitcode(status)})

    def _kill_orphans(self) -> None:
        """Descendants that left their group by setsid come back to us when their parent dies; they are nobody's now."""
        try:
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                pids = [int(word) for word in file.read().split()]
        except OSError:
            return
        for pid in pids:
            if pid not in self.children:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def _end(self) -> None:
        for pid in self.children:
            _kill_group(pid)
        self._kill_orphans()


def _kill_group(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        # A child killed before its setsid() has no group of its own yet.
        os.kill(pid, signal.SIGKILL)


def _child(message: dict[str, Any], fds: list[int]) -> None:
    role = message["role"]
    channel_fd, log_fd, *others = fds
    trusted = role == "judge"
    rungs = sandbox.enter(
        message["cwd"], message["environment"], log_fd, (channel_fd, *others), untrusted=not trusted
    )
    if trusted:
        from .judge import serve
    else:
        from .worker import serve
    serve(channel_fd, others, rungs)
