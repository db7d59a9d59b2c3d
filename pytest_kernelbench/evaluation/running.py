"""pytest's side of one candidate's worker: questions under the run limit, builds under their own, faults as `Stop`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

from ..build.cache import BuildCache, BuildTimeout, CompileFailed
from ..build.request import BadRequest, Request
from ..build.toolchain import Toolchain
from .outcome import Record, Stop, from_error, from_exit
from .processes import Child, ChildDied, ForkServer
from .protocol import ProtocolError, check_reply, printable
from .results import Verdict

OUTPUT_KEPT = 4000


class Worker:
    """A worker or, in the build stage, a builder.

    The run limit counts only the time spent waiting for this process; builds and everything else stop its clock.
    """

    def __init__(
        self,
        server: ForkServer,
        record: Record,
        cache: BuildCache,
        toolchain: Toolchain,
        environment: Mapping[str, str],
        fds: tuple[int, ...] = (),
        role: str = "worker",
    ) -> None:
        self._record = record
        self._cache = cache
        self._toolchain = toolchain
        self._left_s = record.settings.timeout
        self._child: Child = server.spawn(role, environment, fds)

    def ask(self, message: Mapping[str, Any], *kinds: str) -> dict[str, Any]:
        """The answer, which is one of `kinds`.

        Raises:
            Stop: for an error, a death, a limit, or an answer that is none.
        """
        self.send(message)
        return self.answer(*kinds)

    def send(self, message: Mapping[str, Any]) -> None:
        try:
            self._child.send(message, max(0.1, self._left_s))
        except ChildDied as death:
            raise self._dead(death) from None
        except TimeoutError:
            raise self._late() from None

    def answer(self, *kinds: str) -> dict[str, Any]:
        """The answer to what was sent; serves the builds that the candidate asks for meanwhile."""
        while True:
            reply = self._receive(*kinds)
            if reply["op"] != "build":
                break
            self.send(self._serve_build(reply))
        failure = self._record.compile_failure
        if failure is not None:
            # Whatever the candidate made of it: a kernel that does not build is not tested by its fall-back.
            swallowed = reply["op"] != "error"
            details = (f"compiler log: {self._record.build_log}",) if self._record.build_log else ()
            if swallowed:
                details += ("the candidate went on without it",)
            raise Stop(Verdict.COMPILE_ERROR, "build", failure, details)
        if reply["op"] == "error":
            raise from_error(reply)
        return reply

    def _receive(self, *kinds: str) -> dict[str, Any]:
        began = time.monotonic()
        try:
            reply = self._child.receive(max(0.001, self._left_s))
            check_reply(reply, (*kinds, "error", "build"))
        except ChildDied as death:
            raise self._dead(death) from None
        except TimeoutError:
            raise self._late() from None
        except ProtocolError as error:
            raise Stop(
                Verdict.CHEATING, self._record.stage, f"its process wrote to the harness's channel what is no answer: it {error}"
            ) from None
        finally:
            self._left_s -= time.monotonic() - began
        return reply

    def _dead(self, death: ChildDied) -> Stop:
        return from_exit(death.code, self._record.stage, self._child.log.text(0.5))

    def _late(self) -> Stop:
        limit = self._record.settings.timeout
        return Stop(
            Verdict.TIMEOUT, self._record.stage, f"not done within the run limit of {limit:g} s (--kb-timeout)"
        )

    def _serve_build(self, message: Mapping[str, Any]) -> dict[str, Any]:
        record = self._record
        began = time.monotonic()
        name = str(message["name"])[:200]
        if name not in record.extension_names:
            record.extension_names.append(name)
        limit = record.settings.compile_timeout
        try:
            request = Request.from_message(message)
            built = self._cache.get(request, self._toolchain, began + max(0.0, limit - record.seconds.get("build", 0.0)))
        except BadRequest as error:
            record.compile_failure = record.compile_failure or printable(str(error), 500)
            return {"op": "failed", "message": record.compile_failure}
        except CompileFailed as error:
            if record.compile_failure is None:
                record.compile_failure = f"{name}: {printable(str(error), 500)}"
                record.build_log = str(error.log)
            return {"op": "failed", "message": f"{name}: {printable(str(error), 500)}"}
        except BuildTimeout as error:
            raise Stop(Verdict.TIMEOUT, "build", f"not built within {limit:g} s (--kb-compile-timeout): {error}") from None
        finally:
            record.spent("build", began)
        library = str(built.library)
        if library not in record.extensions:
            record.extensions[library] = built.hit
            record.build_seconds += built.seconds
        record.build_log = record.build_log or str(built.log)
        return {"op": "built", "library": library}

    def close(self) -> None:
        """Kill the worker with everything that it started; keep the end of what it printed."""
        with contextlib.suppress(Exception):
            self._child.kill()
        text = self._child.log.text(0.5).strip()
        if text:
            self._record.output = text[-OUTPUT_KEPT:]
