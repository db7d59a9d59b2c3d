"""The bound that outputs are held to: its values, where they came from and why.

|out - expected| <= atol + rtol * |expected|, every element, no ratio of elements forgiven. By default `atol` is a fraction of the
output's spread over draws, since a plain number lets zeros pass where outputs are small (11 of KernelBench's 250 tasks). Both
default fractions are KernelBench's own numbers per dtype (1e-4 for fp32, 1e-2 for half types).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

DEFAULTS = {"float64": 1e-6, "float32": 1e-4, "float16": 1e-2, "bfloat16": 1e-2}
ROUNDING_FACTOR = 4.0
"""How many of the reference's own rounding errors (against fp64) a candidate may be off: its own, the reference's, and room."""

_SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """The bound of one run, before it is applied to an output."""

    rtol: float
    rtol_source: str
    atol: float
    atol_source: str
    absolute: bool
    """Whether `atol` is a plain number (somebody gave one) rather than a fraction of the spread."""

    @classmethod
    def resolve(cls, settings: Mapping[str, Any], problem: Any, dtype: str) -> Tolerance:
        """Command line over marker over problem over ini over the dtype's default.

        Args:
            settings: `atol`, `rtol` (None when not set) and `atol_source`, `rtol_source`.
            problem: the problem's `TOLERANCE`: a number, or numbers by `fp32`, `fp16`, `bf16`; None without.
            dtype: torch's name of the output's dtype.

        Raises:
            ValueError: when the problem's `TOLERANCE` is no such thing.
        """
        short = _SHORT.get(dtype, dtype)
        value = problem.get(short) if isinstance(problem, Mapping) else problem
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0):
            raise ValueError(f"TOLERANCE of the problem is {value!r}; a positive number or numbers by fp32, fp16, bf16 is due")
        chosen: dict[str, tuple[float, str, bool]] = {}
        for name in ("atol", "rtol"):
            given, source = settings[name], settings[f"{name}_source"]
            if given is not None and not (source.endswith("(ini)") and value is not None):
                chosen[name] = (float(given), source, True)
            elif value is not None:
                chosen[name] = (float(value), "the problem's TOLERANCE", False)
            else:
                chosen[name] = (DEFAULTS.get(dtype, 0.0), f"default for {short}", False)
        return cls(
            rtol=chosen["rtol"][0],
            rtol_source=chosen["rtol"][1],
            atol=chosen["atol"][0],
            atol_source=chosen["atol"][1],
            absolute=chosen["atol"][2],
        )

    def bound(self, spread: float, rounding: float | None) -> tuple[float, str]:
        """`atol` as a plain number for one output, and the whole tolerance in words.

        Args:
            spread: root mean square of the output's change between two draws.
            rounding: largest difference between the reference and its fp64 twin; None when not measured.
        """
        rtol = f"rtol {self.rtol:g} ({self.rtol_source})"
        if self.absolute:
            return self.atol, f"{rtol}, atol {self.atol:g} ({self.atol_source})"
        scaled = self.atol * spread
        if rounding is not None and ROUNDING_FACTOR * rounding > scaled:
            widened = ROUNDING_FACTOR * rounding
            return widened, (
                f"{rtol}, atol {widened:.3g} ({ROUNDING_FACTOR:g} x the reference's own rounding error of {rounding:.3g} "
                f"against fp64, which is more than {self.atol:g} x the spread of {spread:.3g})"
            )
        return scaled, f"{rtol}, atol {scaled:.3g} ({self.atol:g} x the output's spread of {spread:.3g}, {self.atol_source})"
