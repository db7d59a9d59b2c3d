"""pytest's side of a judge: its questions, and its faults as `Stop`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from ..errors import EnvironmentFault
from .outcome import Record, Stop
from .processes import ChildDied, ForkServer
from .protocol import ProtocolError
from .results import Verdict


class StagingRefused(Exception):
    """CUDA IPC does not work here."""


@dataclasses.dataclass(frozen=True, slots=True)
class JudgeKey:
    """What a judge is good for: candidates of the same problem under the same settings on the same place."""

    problem: str
    source: str
    token: str
    settings: tuple[Any, ...]


class Judge:
    """One judge process.

    Attributes:
        opened: the answer to `open`, once asked.
        memory_fd: shared memory that the host kinds of staging use; workers are given it, too.
    """

    def __init__(self, server: ForkServer, key: JudgeKey, environment: Mapping[str, str], limit_s: float) -> None:
        self.key = key
        self.opened: dict[str, Any] = {}
        self._limit_s = limit_s
        self.memory_fd = os.memfd_create("kernelbench", os.MFD_CLOEXEC)
        try:
            self._child = server.spawn("judge", environment, (self.memory_fd,))
        except BaseException:
            os.close(self.memory_fd)
            raise

    def open(self, record: Record, **what: Any) -> None:
        """Load the problem and test the reference; raises Stop for an invalid problem."""
        self.opened = self.ask({"op": "open", **what})

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The judge's answer.

        Raises:
            Stop: `invalid_problem` when the problem is at fault.
            StagingRefused: when device memory cannot be shared.
        """
        try:
            answer = self._child.ask(message, self._limit_s)
        except ChildDied as death:
            tail = tuple(self._child.log.text(0.5).splitlines()[-4:])
            raise Stop(Verdict.INVALID_PROBLEM, "problem", f"the reference's process died: {death}", tail) from None
        except TimeoutError:
            raise Stop(
                Verdict.INVALID_PROBLEM, "problem", f"the reference is not done within {self._limit_s:g} s (--kb-timeout)"
            ) from None
        except ProtocolError as error:  # our own process: a library wrote to descriptor numbers that it does not own
            raise EnvironmentFault(f"the judge's channel is disturbed: it {error}") from None
        if answer["op"] != "fault":
            return answer
        if answer["kind"] == "cuda":
            raise StagingRefused(answer["message"])
        words = answer["message"]
        if answer["kind"] == "memory":
            words = f"the reference does not fit the device: {words}"
        raise Stop(Verdict.INVALID_PROBLEM, "problem", words)

    def grow(self, size: int) -> None:
        """Make the shared memory at least `size` bytes."""
        if os.fstat(self.memory_fd).st_size < size:
            os.ftruncate(self.memory_fd, size)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._child.kill()
        with contextlib.suppress(OSError):
            os.close(self.memory_fd)
