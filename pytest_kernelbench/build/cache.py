"""The build cache: content-addressed, locked by the operating system, published by a rename.

    <root>/<key>/<name>.so, build.log, entry.json        a finished build, never changed afterwards
    <root>/work/<key>-<pid>-<random>/                    a build under way, private to its process
    <root>/locks/<key>.lock                              held while an entry is built

A lock dies with its holder and an unfinished build has another name, so a killed run leaves nothing that a later one could wait
for or mistake for a binary. Failures are not kept: a repaired machine or a raised limit must be able to succeed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import time
from pathlib import Path

from ..cluster.leases import compile_slots, holder
from ..errors import EnvironmentFault
from .diagnostics import first_error, machine_fault
from .request import Request
from .toolchain import Toolchain, python_command

DRIVER = Path(__file__).with_name("driver.py")
STALE_S = 24 * 3600.0


class CompileFailed(Exception):
    """A compiler refused the source. `log` is the whole log's path."""

    def __init__(self, message: str, log: Path) -> None:
        super().__init__(message)
        self.log = log


class BuildTimeout(Exception):
    """The limit on builds was reached; the message says doing what."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A binary that may be loaded."""

    library: Path
    log: Path
    seconds: float
    """Wall time of the compilers; 0 on a hit."""
    hit: bool


class BuildCache:
    """Builds of one machine's users below `root`.

    Raises:
        EnvironmentFault: when `root` cannot be written to.
    """

    def __init__(self, root: Path, jobs: int) -> None:
        self.root = root
        self._jobs = jobs
        try:
            for name in ("locks", "work", "logs"):
                (root / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EnvironmentFault(f"the build folder {root} cannot be used: {error.strerror}; choose one with --kb-build-dir")
        self._sweep()

    def get(self, request: Request, toolchain: Toolchain, deadline: float) -> Built:
        """The request's binary, built unless it is there.

        Args:
            deadline: `time.monotonic()` at which to give up.

        Raises:
            CompileFailed, BuildTimeout, EnvironmentFault: see there.
        """
        from filelock import FileLock, Timeout

        key = request.key(toolchain.identity(request))
        found = self._find(key, request.name)
        if found is not None:
            return found
        lock_path = self.root / "locks" / f"{key}.lock"
        lock = FileLock(lock_path, mode=0o666)
        try:
            lock.acquire(timeout=max(0.0, deadline - time.monotonic()), poll_interval=0.05)
        except Timeout:
            raise BuildTimeout(f"waiting for {_holder(lock_path)}, which builds the same extension ({lock_path})") from None
        except OSError as error:
            raise EnvironmentFault(
                f"locks do not work in the build folder {self.root}: {error.strerror}; choose another with --kb-build-dir"
            ) from None
        try:
            found = self._find(key, request.name)
            if found is not None:
                return found
            with contextlib.suppress(OSError):
                lock_path.with_suffix(".holder").write_text(holder(request.name))
            return self._build(key, request, toolchain, deadline)
        finally:
            lock.release()

    def _find(self, key: str, name: str) -> Built | None:
        folder = self.root / key
        library = folder / f"{name}.so"
        try:
            entry = json.loads((folder / "entry.json").read_text())
            # A truncated or altered binary (full disk, other hands) must be a miss, never loaded.
            if entry["sha256"] != hashlib.sha256(library.read_bytes()).hexdigest():
                raise ValueError
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError):
            # Said and set aside rather than removed: another process may be about to load it.
            with contextlib.suppress(OSError):
                folder.rename(self.root / "work" / f"damaged-{key}-{secrets.token_hex(4)}")
            return None
        with contextlib.suppress(OSError):
            os.utime(folder / "entry.json")
        return Built(library=library, log=folder / "build.log", seconds=0.0, hit=True)

    def _build(self, key: str, request: Request, toolchain: Toolchain, deadline: float) -> Built:
        folder = self.root / "work" / f"{key[:24]}-{os.getpid()}-{secrets.token_hex(4)}"
        folder.mkdir()
        try:
            for file, text in request.sources:
                (folder / file).write_text(text)
            stages = toolchain.stages(request)
            log = folder / "build.log"
            try:
                with compile_slots(self._jobs, len(stages[0]), deadline) as jobs:
                    began = time.monotonic()
                    status = _run(folder, {"stages": stages, "jobs": jobs, "log": str(log)}, deadline)
                    seconds = time.monotonic() - began
            except TimeoutError:
                raise BuildTimeout(f"waiting for one of {self._jobs} compiler slots of this machine") from None
            text = log.read_text(errors="replace") if log.exists() else ""
            if status is None:
                raise BuildTimeout(f"compiling {request.name}")
            if status:
                raise self._failure(key, status, text, request)
            library = folder / f"{request.name}.so"
            entry = {
                "name": request.name,
                "sha256": hashlib.sha256(library.read_bytes()).hexdigest(),
                "seconds": round(seconds, 3),
                "toolchain": toolchain.identity(request),
            }
            for leftover in folder.glob("*.o"):
                leftover.unlink()
            (folder / "entry.json").write_text(json.dumps(entry, indent=1))
            final = self.root / key
            with contextlib.suppress(OSError):
                folder.rename(final)  # fails when another host without our lock was first: then its entry stands
            if not (final / library.name).exists():
                raise EnvironmentFault(f"the finished build could not be put at {final}; is the disk full?")
            return Built(library=final / library.name, log=final / "build.log", seconds=seconds, hit=False)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _failure(self, key: str, status: int, text: str, request: Request) -> Exception:
        path = self.root / "logs" / f"{request.name[:40]}-{key[:16]}.log"
        path.write_text(text)
        fault = machine_fault(text)
        if fault is not None or status not in (1,):
            return EnvironmentFault(f"building {request.name} failed through the machine's fault: {fault or text.strip()[-200:]}")
        return CompileFailed(first_error(text), path)

    def _sweep(self) -> None:
        """Remove what killed runs left; a build never takes a day."""
        for path in (self.root / "work").iterdir():
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > STALE_S:
                    shutil.rmtree(path, ignore_errors=True)


def _holder(lock_path: Path) -> str:
    try:
        who = json.loads(lock_path.with_suffix(".holder").read_text())
        return f"process {who['pid']} on {who['host']}"
    except (OSError, ValueError, KeyError):
        return "another process"


def _run(folder: Path, plan: dict[str, object], deadline: float) -> int | None:
    """The driver's exit status; None when the deadline came first. Ctrl-C kills the compilers, too."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    environment["TMPDIR"] = str(folder)
    process = subprocess.Popen(
        [*python_command(), str(DRIVER), json.dumps(plan)],
        cwd=folder,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()
