"""pytest's side of its children: the fork server, and a `Child` for every judge and worker.

Knows no torch. Every wait has a deadline or notices that the other side died; `close` leaves nothing running.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import EnvironmentFault
from .protocol import Channel, ChannelClosed, printable

START_LIMIT_S = 120.0
"""A cold import of torch from a network disk takes long; longer than this is a broken machine."""

_PASSED_ON = (
    "PATH",
    "LD_LIBRARY_PATH",
    "LANG",
    "LC_ALL",
    "TZ",
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDA_DEVICE_ORDER",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_CORETYPE",
    "OPENBLAS_L2_SIZE",
    "CC",
    "CXX",
    "NVCC_CCBIN",
    "CPATH",
    "LIBRARY_PATH",
)
"""Variables that a toolchain or a device needs. Everything else, and every secret in it, stays with pytest."""


class ChildDied(ConnectionError):
    """A child is gone. `code` is its exit code, negative for a signal, None when unknown."""

    def __init__(self, code: int | None) -> None:
        super().__init__(describe_exit(code))
        self.code = code


def describe_exit(code: int | None) -> str:
    """`signal 11 (SIGSEGV)`, `exit code 3`."""
    if code is None:
        return "for an unknown reason"
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {-code} ({signal.Signals(-code).name})"
    return f"signal {-code}"


def base_environment() -> dict[str, str]:
    """The allow-listed part of pytest's own environment."""
    kept = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    # Without this a machine whose CUDA_VISIBLE_DEVICES names indices in the driver's "fastest first" order and NVML, which
    # counts by bus, could mean different chips. Where the caller did choose, the caller's order stands.
    if "CUDA_VISIBLE_DEVICES" not in kept:
        kept.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    kept.setdefault("PATH", os.defpath)
    return kept


class BoundedLog:
    """Reads a child's output from a pipe until its end and keeps only the beginning and the end of it."""

    KEPT = 1 << 15

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()
        self._head = b""
        self._tail = b""
        self._thread = threading.Thread(target=self._drain, daemon=True, name="kernelbench-log")
        self._thread.start()

    def _drain(self) -> None:
        while True:
            try:
                data = os.read(self.read_fd, 1 << 16)
            except OSError:
                break
            if not data:
                break
            room = self.KEPT - len(self._head)
            if room > 0:
                self._head += data[:room]
                data = data[room:]
            self._tail = (self._tail + data)[-self.KEPT :]
        os.close(self.read_fd)

    def forked(self) -> None:
        """The child has its copy of the writing end; drop ours, so that its death ends the log."""
        os.close(self.write_fd)

    def text(self, wait_s: float = 0.0) -> str:
        if wait_s:
            self._thread.join(wait_s)
        gap = b"\n[...]\n" if len(self._tail) >= self.KEPT else b""
        return printable((self._head + gap + self._tail).decode(errors="replace"), limit=2 * self.KEPT)


class Child:
    """A judge or a worker: its channel, its output, its end."""

    def __init__(self, server: ForkServer, number: int, role: str, channel: Channel, log: BoundedLog, folder: Path) -> None:
        self._server = server
        self.number = number
        self.role = role
        self.channel = channel
        self.log = log
        self.folder = folder
        self.pid: int | None = None
        self.exit_code: int | None = None
        self.exited = False

    def ask(self, message: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """Send and wait for the answer.

        Raises:
            ChildDied: with its exit code.
            TimeoutError: after `timeout` seconds.
            ProtocolError: for an answer that is none.
        """
        self.send(message, timeout)
        return self.receive(timeout)

    def send(self, message: Mapping[str, Any], timeout: float) -> None:
        try:
            self.channel.send(message, timeout)
        except ChannelClosed:
            raise ChildDied(self._await_exit()) from None

    def receive(self, timeout: float) -> dict[str, Any]:
        try:
            return self.channel.receive(timeout)
        except ChannelClosed:
            raise ChildDied(self._await_exit()) from None

    def _await_exit(self) -> int | None:
        # A worker that closed its channel and lives on is as good as dead: after a moment it is killed.
        self._server.wait_exit(self, 2.0)
        if not self.exited:
            self.kill()
            return None
        return self.exit_code

    def kill(self) -> None:
        """Kill the whole group and forget the folder; returns when it is gone."""
        if not self.exited:
            self._server.kill(self)
        self.channel.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class ForkServer:
    """Starts, and is the only parent of, all children of this pytest process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._children: dict[int, Child] = {}
        self._next = 0
        self._root: Path | None = None
        self._facts: dict[str, Any] | None = None

    def start(self) -> None:
        """Begin to start; does not wait for torch to be imported."""
        if self._process is not None:
            return
        if sys.platform != "linux":
            raise EnvironmentFault(f"pytest-kernelbench runs on Linux only, not on {sys.platform}")
        self._root = Path(tempfile.mkdtemp(prefix="kernelbench-"))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        folder = self._root / "server"
        folder.mkdir()
        environment = base_environment() | {"HOME": str(folder), "TMPDIR": str(folder), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        self._log = BoundedLog()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-B", "-c", _BOOT, json.dumps(import_folders()), str(theirs.fileno())],
            cwd=folder,
            env=environment,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=self._log.write_fd,
            stderr=self._log.write_fd,
            start_new_session=True,
        )
        self._log.forked()
        theirs.close()
        self._control = ours

    @property
    def root(self) -> Path:
        """The private folder of this process's children; removed by `close`."""
        self.start()
        assert self._root is not None
        return self._root

    def facts(self) -> dict[str, Any]:
        """Versions and folders of torch as the server sees them; waits for it to be up.

        Raises:
            EnvironmentFault: when torch cannot be imported.
        """
        self.start()
        deadline = time.monotonic() + START_LIMIT_S
        while self._facts is None:
            if not self._pump(deadline - time.monotonic()):
                self._fail("did not start" if time.monotonic() < deadline else f"was not ready after {START_LIMIT_S:.0f} s")
        if "error" in self._facts:
            raise EnvironmentFault(f"torch cannot be imported in a clean interpreter: {self._facts['error']}")
        return self._facts

    def _fail(self, what: str) -> None:
        text = self._log.text(0.5).strip().splitlines()
        raise EnvironmentFault(f"the fork server {what}{': ' + text[-1] if text else ''}")

    def spawn(self, role: str, environment: Mapping[str, str], fds: tuple[int, ...] = ()) -> Child:
        """Fork a child of `role` in a new private folder. `fds` are passed on after its channel and its log."""
        self.facts()
        assert self._control is not None
        self._next += 1
        folder = self.root / f"{role}-{self._next}"
        (folder / "tmp").mkdir(parents=True)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        log = BoundedLog()
        whole = base_environment() | {"HOME": str(folder), "TMPDIR": str(folder / "tmp")} | dict(environment)
        message = {"op": "spawn", "id": self._next, "role": role, "cwd": str(folder), "environment": whole}
        child = Child(self, self._next, role, Channel(ours), log, folder)
        self._children[self._next] = child
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], [theirs.fileno(), log.write_fd, *fds])
        except OSError:
            self._fail("is gone")
        finally:
            theirs.close()
            log.forked()
        return child

    def kill(self, child: Child) -> None:
        """Kill a child's group and wait until the server has reaped it."""
        self._send({"op": "kill", "id": child.number})
        self.wait_exit(child, 10.0)
        self._children.pop(child.number, None)

    def wait_exit(self, child: Child, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not child.exited and self._pump(deadline - time.monotonic()):
            pass

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._control is not None:
            with contextlib.suppress(OSError):
                self._control.send(json.dumps(message).encode())

    def _pump(self, timeout: float) -> bool:
        """Take one message of the server; False when none came in time or the server is gone."""
        if self._control is None or timeout <= 0:
            return False
        if not select.select([self._control], [], [], timeout)[0]:
            return False
        try:
            data = self._control.recv(1 << 18)
        except OSError:
            data = b""
        if not data:
            for child in self._children.values():
                child.exited = True
            return False
        message = json.loads(data)
        if "facts" in message:
            self._facts = message["facts"]
            return True
        child = self._children.get(message["id"])
        if child is not None:
            if "pid" in message:
                child.pid = message["pid"]
            else:
                child.exited = True
                child.exit_code = message["exit"]
        return True

    def close(self) -> None:
        """Kill everything and remove the folders. Safe to call twice."""
        if self._control is not None:
            self._control.close()  # the server kills its children when this closes
            self._control = None
        if self._process is not None:
            try:
                self._process.wait(5.0)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(OSError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            self._process = None
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
            self._root = None
        self._children.clear()
        self._facts = None


_BOOT = """
import json, sys
folders, package = json.loads(sys.argv[1])
sys.path += [folder for folder in folders if folder not in sys.path]
sys.path.append(package)
from pytest_kernelbench.evaluation import forkserver
if package not in folders:
    sys.path.remove(package)
forkserver.main(int(sys.argv[2]))
"""


def import_folders() -> tuple[list[str], str]:
    """Where the clean interpreter finds torch and what it needs, and the folder that holds this package.

    `python -I` ignores PYTHONPATH and the user's site folder, where torch may be; the folders that really hold the
    libraries are handed over instead. The working folder is never one of them, so that a `torch.py` in it is not found.
    """
    package = str(Path(__file__).resolve().parents[2])
    here = os.path.realpath(os.getcwd())
    search = [entry for entry in sys.path if entry and (os.path.realpath(entry) != here)]
    folders: list[str] = []
    for name in ("torch", "numpy", "triton", "filelock", "typing_extensions", "ninja", "pybind11", "cutlass", "cupy", "tilelang"):
        spec = importlib.machinery.PathFinder.find_spec(name, search)
        if spec is not None and spec.origin is not None:
            folder = str(Path(spec.origin).parent.parent if spec.submodule_search_locations else Path(spec.origin).parent)
            if folder not in folders:
                folders.append(folder)
    return folders, package
