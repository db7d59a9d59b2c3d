"""`evaluate`: the whole evaluation as one Python call, for reward loops and notebooks."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from .evaluation.pipeline import Evaluator
from .evaluation.results import Evaluation
from .settings import DTYPES, Settings, SettingsError
from .suite.model import Candidate, Pair, Problem


def evaluate(
    problem: str | os.PathLike[str],
    candidate: str | os.PathLike[str],
    *,
    device: str = "auto",
    dtype: str | None = None,
    evaluator: Evaluator | None = None,
    **settings: Any,
) -> Evaluation:
    """Build, check and time one candidate against one problem; the same `Evaluation` as a pytest run's row.

    Args:
        problem: path of a file with `Model`, `get_inputs` and `get_init_inputs`.
        candidate: path of a file with `ModelNew`.
        device: `auto`, `cpu`, `cuda` or `cuda:1` (an index into the visible devices).
        dtype: `fp32`, `fp16` or `bf16`; None for the problem's own.
        evaluator: one to reuse (`pytest_kernelbench.evaluation.pipeline.Evaluator`), which saves 3 s of start a call.
        settings: further fields of `Settings`, such as `trials=5`, `timeout=60.0`, `min_speedup=1.2`, `time=False`.

    Raises:
        SettingsError: for an unknown or senseless setting, or a file that does not exist. Everything else that can go wrong is a
            verdict.
    """
    made = make_settings(device, settings)
    problem_path, candidate_path = _file(problem, "problem"), _file(candidate, "candidate")
    if dtype is not None and dtype not in DTYPES:
        raise SettingsError(f"dtype {dtype!r}: one of {', '.join(DTYPES)} is due")
    pair = Pair(
        problem=Problem(id=problem_path.stem, path=problem_path, level=None, number=None, name=problem_path.stem),
        candidate=Candidate(path=candidate_path, set=candidate_path.parent.name or "candidate"),
        dtype=dtype,
    )
    if evaluator is not None:
        return evaluator.evaluate(pair, made)
    own = Evaluator(made)
    try:
        return own.evaluate(pair)
    finally:
        own.close()


def make_settings(device: str, settings: dict[str, Any]) -> Settings:
    """`Settings` from keyword arguments.

    Raises:
        SettingsError: says which argument and why.
    """
    known = {field.name for field in dataclasses.fields(Settings)} - {"sources", "device"}
    for name in settings:
        if name not in known:
            raise SettingsError(f"evaluate() has no setting {name!r}; it has {', '.join(sorted(known))}")
    name, _, index = device.partition(":")
    if name not in ("auto", "cpu", "cuda") or (index and (name != "cuda" or not index.isdigit())):
        raise SettingsError(f"device {device!r}: auto, cpu, cuda or cuda:N is due")
    if index:
        settings = {**settings, "gpu": (int(index),)}
    return Settings(device=name, sources={key: "argument" for key in settings}, **settings)


def _file(path: str | os.PathLike[str], kind: str) -> Path:
    found = Path(path).absolute()
    if not found.is_file():
        raise SettingsError(f"{kind} {os.fspath(path)}: no such file")
    return found
