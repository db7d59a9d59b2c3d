"""The hash that says whether a stored evaluation is still the one that would be made today."""

from __future__ import annotations

import hashlib
import json

from ..settings import Settings
from ..suite.model import Pair

SCHEMA = 1
_DECISIVE = (
    "device",
    "size",
    "trials",
    "eval_mode",
    "tf32",
    "atol",
    "rtol",
    "min_speedup",
    "baseline",
    "compile_timeout",
    "timeout",
    "time",
    "arch",
)
"""Settings that a verdict depends on; where things lie and what is printed does not matter."""


def fingerprint(pair: Pair, settings: Settings) -> str:
    """SHA-256 over both files' bytes, the dtype and the decisive settings; a missing file counts as empty."""
    parts = [SCHEMA, pair.id, pair.dtype, {name: getattr(settings, name) for name in _DECISIVE}]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode())
    for path in (pair.problem.path, pair.candidate.path):
        try:
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        except OSError:
            digest.update(b"missing")
    return digest.hexdigest()
