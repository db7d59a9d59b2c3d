"""Speed-up and its interval from paired blocks. Standard library only.

The unit is the block: ln of the reference's time over the candidate's, each summed over the block's calls, because a candidate
could shift work between the calls of one block but not between blocks (contents of the next block do not exist yet).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

PROCESS_MARGIN = {"cuda": 0.015, "cpu": 0.03}
"""Widening of the interval, relative, for what pairing cannot see: two processes on one device differ by up to this much with
the very same model (memory placement, clocks; 14 models on an H200 lay within 1.4 %)."""

MIN_BLOCKS = 6
"""Fewer blocks than this have no 95 % interval by order statistics: 2 * 0.5**5 > 0.05."""


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def quantile(values: Sequence[float], q: float) -> float:
    """Linear interpolation between order statistics, as numpy's default."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def rank_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Distribution-free interval of the median by order statistics.

    With k the largest rank such that P[Bin(n, 1/2) <= k - 1] <= (1 - confidence) / 2 the interval is
    [x_(k), x_(n - k + 1)]; Hoefler and Belli, SC'15, recommend it for performance data.

    Raises:
        ValueError: with fewer than `MIN_BLOCKS` values, which have no such interval.
    """
    n = len(values)
    if n < MIN_BLOCKS:
        raise ValueError(f"{n} values have no {confidence:.0%} interval; at least {MIN_BLOCKS} are needed")
    ordered = sorted(values)
    tail, k = 0.0, 0
    while True:
        tail += math.comb(n, k) * 0.5**n
        if tail > (1 - confidence) / 2:
            break
        k += 1
    return ordered[k - 1], ordered[n - k]


def speedup(log_ratios: Sequence[float], margin: float) -> tuple[float, tuple[float, float]]:
    """(speed-up, interval) of paired ln(reference / candidate); `margin` widens the interval relatively."""
    low, high = rank_interval(log_ratios)
    return math.exp(median(log_ratios)), (math.exp(low) * (1 - margin), math.exp(high) * (1 + margin))


def half_width(log_ratios: Sequence[float]) -> float:
    """Half of the interval's width in ln units, before any margin."""
    low, high = rank_interval(log_ratios)
    return (high - low) / 2
