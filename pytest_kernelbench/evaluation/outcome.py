"""How a pair's evaluation comes to its end: `Stop` carries a verdict up, `Record` gathers what the `Evaluation` will say.

The only place where a verdict is made. In the pytest process; no torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from pathlib import Path
from typing import Any

from ..settings import Settings
from ..suite.model import Pair
from .fingerprint import fingerprint
from .processes import describe_exit
from .protocol import printable
from .results import Build, Check, Evaluation, Timing, Verdict


class Stop(Exception):
    """The evaluation ends here, with this verdict."""

    def __init__(
        self, verdict: Verdict, stage: str, reason: str, details: tuple[str, ...] = (), line: int | None = None
    ) -> None:
        super().__init__(reason)
        self.verdict = verdict
        self.stage = stage
        self.reason = reason
        self.details = details
        self.line = line


@dataclasses.dataclass(slots=True, kw_only=True)
class Record:
    """What is known of a pair so far."""

    pair: Pair
    settings: Settings
    device: str = ""
    size: str = ""
    stage: str = "collect"
    problem_source: str = ""
    candidate_source: str = ""
    model_line: int = 0
    extensions: dict[str, bool] = dataclasses.field(default_factory=dict)
    """Library path → whether it was in the cache when first asked for."""
    extension_names: list[str] = dataclasses.field(default_factory=list)
    build_seconds: float = 0.0
    build_log: str | None = None
    compile_failure: str | None = None
    check: Check | None = None
    timing: Timing | None = None
    isolation: tuple[str, ...] = ()
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    tags: list[str] = dataclasses.field(default_factory=list)
    output: str = ""
    began: float = dataclasses.field(default_factory=time.monotonic)

    def read(self) -> None:
        """Read both files, once; this text is what runs and what is hashed.

        Raises:
            Stop: for a file that cannot be read.
        """
        self.problem_source = _read(self.pair.problem.path, Verdict.INVALID_PROBLEM, "problem")
        self.candidate_source = _read(self.pair.candidate.path, Verdict.LOAD_ERROR, "build")

    def spent(self, stage: str, began: float) -> None:
        """Add the time since `began` to a stage's seconds."""
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.monotonic() - began

    def evaluation(self, stop: Stop) -> Evaluation:
        pair = self.pair
        self.seconds["total"] = time.monotonic() - self.began
        build = None
        if self.extension_names:
            hits = sum(self.extensions.values())
            build = Build(
                extensions=tuple(self.extension_names),
                seconds=round(self.build_seconds, 3),
                hits=hits,
                misses=len(self.extensions) - hits,
                log=self.build_log,
            )
        return Evaluation(
            id=pair.id,
            problem=pair.problem.id,
            level=pair.problem.level,
            problem_path=str(pair.problem.path),
            candidate_set=pair.candidate.set,
            candidate_path=str(pair.candidate.path),
            sample=pair.candidate.sample,
            verdict=stop.verdict,
            stage=stop.stage,
            reason=printable(" ".join(stop.reason.split()), 600),
            details=tuple(printable(line, 1000) for line in stop.details),
            line=stop.line or self.model_line or None,
            tags=tuple(self.tags),
            build=build,
            check=self.check,
            timing=self.timing,
            device=self.device,
            dtype=pair.dtype or "",
            size=self.size,
            problem_hash=_hash(self.problem_source),
            candidate_hash=_hash(self.candidate_source),
            fingerprint=fingerprint(pair, self.settings),
            isolation=self.isolation,
            environment=self.environment,
            seconds={name: round(value, 4) for name, value in self.seconds.items()},
            output=self.output,
        )


def _read(path: Path, verdict: Verdict, stage: str) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise Stop(verdict, stage, f"the file cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise Stop(verdict, stage, f"the file is not UTF-8 text (byte {error.start})") from None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest() if text else ""


ERROR_VERDICTS: dict[str, tuple[Verdict, str]] = {
    "load": (Verdict.LOAD_ERROR, "build"),
    "construct": (Verdict.LOAD_ERROR, "build"),
    "signature": (Verdict.LOAD_ERROR, "build"),
    "runtime": (Verdict.RUNTIME_ERROR, "check"),
    "cuda": (Verdict.RUNTIME_ERROR, "check"),
    "out_of_memory": (Verdict.OUT_OF_MEMORY, "check"),
}
"""What a worker's `error` of a kind means."""

FINDING_VERDICTS = {
    "wrong_structure": Verdict.WRONG_STRUCTURE,
    "wrong_values": Verdict.WRONG_VALUES,
    "protocol": Verdict.CHEATING,
}
"""What a judge's finding means."""


def from_error(reply: dict[str, Any]) -> Stop:
    """The end that a worker's `error` answer makes."""
    verdict, stage = ERROR_VERDICTS.get(reply["kind"], (Verdict.CHEATING, "check"))
    trace = tuple(reply["trace"].rstrip().splitlines()[-12:])
    return Stop(verdict, stage, reply["message"], trace, reply["line"] or None)


def from_exit(code: int | None, stage: str, output: str) -> Stop:
    """The end that a dead worker makes."""
    tail = tuple(line for line in output.splitlines()[-6:] if line.strip())
    return Stop(Verdict.CRASH, stage, f"its process died: {describe_exit(code)}", tail)
