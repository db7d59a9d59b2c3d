"""pytest-kernelbench: GPU-kernel problems as pytest test cases.

Public names: `evaluate` (one problem with one candidate, from Python), `Evaluation` and `Verdict` (its result), `fast_p` (the
score). They are imported when first used, so that the pytest plugin costs nothing when it is not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import evaluate
    from .evaluation.results import Evaluation, Verdict
    from .metrics import fast_p

__all__ = ["Evaluation", "Verdict", "evaluate", "fast_p"]
__version__ = "0.1.0"

_HOMES = {"evaluate": "api", "Evaluation": "evaluation.results", "Verdict": "evaluation.results", "fast_p": "metrics"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
