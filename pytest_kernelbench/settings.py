"""`Settings`: everything that an evaluation can be told, validated, each value with its source.

Knows neither pytest nor torch. `options.py` builds it from pytest's options, `evaluate()` from keyword arguments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DTYPES = ("fp32", "fp16", "bf16")


class SettingsError(ValueError):
    """A setting that makes no sense; the message is one line that names the option and the remedy."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Resolved settings of a run."""

    problems: Path | None = None
    """Folder of problems; None for the suite shipped with the package."""
    levels: tuple[int, ...] = ()
    """Levels to run; empty for all."""
    problem_filter: tuple[str, ...] = ()
    """Terms of `--kb-problem`, as given: `1/19`, `2/40-50`, `level1/19_ReLU`."""
    candidates: tuple[Path, ...] = ()
    device: str = "auto"
    """`auto`, `cuda` or `cpu`."""
    gpu: tuple[int, ...] = ()
    """Indices into the caller's visible devices; empty for all."""
    size: str = "auto"
    """`auto` (full on CUDA, smoke on the CPU), `full` or `smoke`."""
    dtypes: tuple[str, ...] = ()
    """A further axis of pairs; empty for the problem's own."""
    trials: int = 5
    eval_mode: bool = False
    tf32: bool | None = None
    """None keeps torch's defaults."""
    atol: float | None = None
    rtol: float | None = None
    min_speedup: float | None = None
    fast_p: tuple[float, ...] = (0.0, 0.5, 0.8, 1.0, 1.5, 2.0)
    baseline: str = "eager"
    build_dir: Path | None = None
    """None for the user's cache folder."""
    build_jobs: int | None = None
    arch: str | None = None
    """CUDA architecture to build for, `9.0a`; None for the target device's."""
    compile_timeout: float = 300.0
    """Seconds for all builds of one pair."""
    timeout: float = 120.0
    """Seconds for everything else of one pair, waiting for a device not counted."""
    results: Path | None = None
    resume: bool = False
    require_gpu: bool = False
    time: bool = True
    """False stops after the check; a right candidate is then `unmeasured`."""
    staging: str = "auto"
    """How tensors reach the worker: `auto`, `cuda_ipc`, `pinned_host`, `shared_memory`."""
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Where a value came from, by field name: `--kb-atol`, `kb_atol (ini)`, `marker`; missing for a default."""

    def replace(self, **changes: Any) -> Settings:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def source(self, name: str) -> str:
        """Where the value of a field came from; `default` when nobody set it."""
        return self.sources.get(name, "default")
