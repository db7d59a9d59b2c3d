"""What an evaluation says: `Verdict`, `Evaluation` and its parts.

Plain frozen data, JSON both ways (`to_dict`, `from_dict`). This is the only thing that leaves the evaluator, the only thing
the reports read and the row of the results file. Imports nothing but the standard library.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping
from typing import Any

SCHEMA = 1
"""Version of the JSON form; a reader refuses rows of another one."""


class Verdict(str, enum.Enum):
    """The one outcome of a pair, in the order of the stages."""

    INVALID_PROBLEM = "invalid_problem"
    """The reference itself fails, is not deterministic, not finite, does not fit, or a null answer would pass."""
    ENVIRONMENT_ERROR = "environment_error"
    """The machine is at fault: no compiler, wrong CUDA, no such GPU."""
    LOAD_ERROR = "load_error"
    """Syntax error, no `ModelNew`, wrong constructor or `forward` signature, exception at import."""
    COMPILE_ERROR = "compile_error"
    """A compiler failed, also when the candidate swallowed the failure and fell back."""
    RUNTIME_ERROR = "runtime_error"
    """An exception or a CUDA error when it ran."""
    CRASH = "crash"
    """The worker died by a signal or an exit of its own."""
    TIMEOUT = "timeout"
    """The build limit or the run limit was reached."""
    OUT_OF_MEMORY = "out_of_memory"
    """The candidate does not fit where the reference did."""
    WRONG_STRUCTURE = "wrong_structure"
    """Arity, nesting, type, shape, dtype, device or layout of the output differ."""
    WRONG_VALUES = "wrong_values"
    """Outside the tolerance."""
    CHEATING = "cheating"
    """It did what no honest kernel does."""
    UNMEASURED = "unmeasured"
    """Right, but without a time that can be trusted."""
    TOO_SLOW = "too_slow"
    """Right and measured, below the gate on speed."""
    PASSED = "passed"
    """Right and measured."""
    LOST = "lost"
    """Collected and never reported: added by the controller of a run that was killed."""

    @property
    def correct(self) -> bool:
        """Whether the outputs were right (what fast_0 counts)."""
        return self in (Verdict.PASSED, Verdict.TOO_SLOW, Verdict.UNMEASURED)

    @property
    def measured(self) -> bool:
        """Whether there is a speed-up that can be compared with a threshold."""
        return self in (Verdict.PASSED, Verdict.TOO_SLOW)

    @property
    def is_error(self) -> bool:
        """Whether the machine or the problem, not the candidate, is at fault."""
        return self in (Verdict.INVALID_PROBLEM, Verdict.ENVIRONMENT_ERROR)

    @property
    def words(self) -> str:
        """As shown on a screen: spaced capitals."""
        return "NO TIME" if self is Verdict.UNMEASURED else self.value.replace("_", " ").upper()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """What the extensions of a candidate cost to build."""

    extensions: tuple[str, ...] = ()
    """Names of the extensions that the candidate asked for, in that order."""
    seconds: float = 0.0
    """Wall time spent in compilers for this pair; 0 when everything was in the cache."""
    hits: int = 0
    misses: int = 0
    log: str | None = None
    """Path of the whole compiler log of the last build that failed, or else of the last one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """How the outputs compared with the reference's."""

    trials: int
    """Trials whose outputs were right before the verdict fell."""
    rtol: float
    atol: float
    """Absolute bound actually used for output 0, after any scaling."""
    tolerance: str
    """The tolerance in words: values, where they came from and why."""
    max_error: float | None = None
    """Largest absolute difference over all trials and outputs."""
    weights: str = ""
    """Where the candidate's weights came from, in words."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """One side's times per call, in milliseconds."""

    median_ms: float
    min_ms: float
    p10_ms: float
    p90_ms: float
    samples: int

    @property
    def median(self) -> float:
        """Median in seconds."""
        return self.median_ms / 1e3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Both sides' times and the speed-up with its interval."""

    candidate: Times
    reference: Times
    baseline: str
    """What the reference side ran as: `eager`."""
    speedup: float
    """exp of the median of paired log ratios, reference over candidate."""
    interval: tuple[float, float]
    """95 % interval of the speed-up, by order statistics of the pairs."""
    clock: str
    """`cuda events` or `cpu clock`."""

    @property
    def certified(self) -> float:
        """Lower bound of the speed-up: what gates and fast_p compare."""
        return self.interval[0]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result for one pair of a problem and a candidate."""

    id: str
    """The pair's id, `level1/19_ReLU-o1`."""
    problem: str
    """The problem's id, `level1/19_ReLU`."""
    level: int | None
    problem_path: str
    candidate_set: str
    """Name of the candidate set (the folder given to `--kb-candidates`)."""
    candidate_path: str
    sample: int | None = None
    verdict: Verdict
    stage: str
    """Stage reached: `collect`, `problem`, `build`, `check`, `timing`, `gate` or `done`."""
    reason: str = ""
    """One line in plain words; empty when passed."""
    details: tuple[str, ...] = ()
    """Further lines: where, by how much, what to do."""
    line: int | None = None
    """Line of the candidate file that the failure points to."""
    tags: tuple[str, ...] = ()
    build: Build | None = None
    check: Check | None = None
    timing: Timing | None = None
    device: str = ""
    """`cuda` or `cpu`, with the chip's name where known."""
    dtype: str = ""
    size: str = ""
    problem_hash: str = ""
    candidate_hash: str = ""
    fingerprint: str = ""
    """Hash of problem, candidate and every setting that the verdict depends on: what `--kb-resume` compares."""
    isolation: tuple[str, ...] = ()
    """Rungs of the isolation ladder that the worker ran under."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Versions and flags: torch, cuda, gpu, driver, tf32."""
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Wall seconds per stage: `build`, `start`, `check`, `timing`, `wait` (for a device), `total`."""
    output: str = ""
    """The end of what the candidate printed, control characters escaped."""

    @property
    def speedup(self) -> float | None:
        return self.timing.speedup if self.timing is not None else None

    @property
    def correct(self) -> bool:
        return self.verdict.correct

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types only, so that it crosses xdist and fits a JSON line."""
        row = dataclasses.asdict(self)
        row["schema"] = SCHEMA
        row["verdict"] = self.verdict.value
        return _plain(row)  # type: ignore[no-any-return]

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Evaluation:
        """The inverse of `to_dict`.

        Raises:
            ValueError: for a row of another schema version or with missing fields.
        """
        if row.get("schema") != SCHEMA:
            raise ValueError(f"results row has schema {row.get('schema')!r}, this version reads {SCHEMA}")
        known = {field.name for field in dataclasses.fields(cls)}
        values = {key: value for key, value in row.items() if key in known}
        try:
            values["verdict"] = Verdict(values["verdict"])
            values["build"] = _part(Build, values.get("build"))
            values["check"] = _part(Check, values.get("check"))
            timing = values.get("timing")
            if timing is not None:
                timing = dict(timing)
                timing["candidate"] = Times(**timing["candidate"])
                timing["reference"] = Times(**timing["reference"])
                values["timing"] = _part(Timing, timing)
            for name in ("details", "tags", "isolation"):
                values[name] = tuple(values.get(name) or ())
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise ValueError(f"results row is not an evaluation: {error}") from error


def _part(kind: type, value: Any) -> Any:
    if value is None:
        return None
    return kind(**{key: tuple(item) if isinstance(item, list) else item for key, item in value.items()})


def _plain(value: Any) -> Any:
    """JSON types; a float that JSON cannot say (NaN, infinity) becomes None."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
