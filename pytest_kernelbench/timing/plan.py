"""How many calls make a block, how many blocks make a measurement, and whether the claims fit the clock outside.

Runs in the pytest process: no torch here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from . import statistics

BLOCK_NS = 5_000_000
"""Length aimed at for one side's block: long against the turn between the processes (0.3 to 1 ms), short against drift."""

MAX_CALLS = 20
MAX_SPIN_NS = 2_000_000


def calls_per_block(call_ns: float, most: int) -> int:
    """How many calls of `call_ns` make a block, at most `most` (what the staging area holds)."""
    return max(1, min(MAX_CALLS, most, round(BLOCK_NS / max(call_ns, 1.0))))


def spin_for(host_ns: Sequence[int]) -> int:
    """Device spin that covers the host's time to enqueue a call: 1.5 times the slowest seen, bounded."""
    return min(MAX_SPIN_NS, int(1.5 * max(host_ns))) if host_ns else 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """When a measurement begins and ends."""

    warm_ns: int
    """Work per side before the first sample; clocks of an idle GPU take this long to rise (triton issue 2306)."""
    warm_blocks: int
    min_blocks: int
    max_blocks: int
    half_width: float
    """Of the interval, relative: precise enough to stop."""
    budget_s: float
    """Wall time after which no further block is begun."""


PLANS = {
    "cuda": Plan(warm_ns=150_000_000, warm_blocks=3, min_blocks=16, max_blocks=100, half_width=0.004, budget_s=3.0),
    "cpu": Plan(warm_ns=20_000_000, warm_blocks=2, min_blocks=8, max_blocks=40, half_width=0.01, budget_s=6.0),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One pair of blocks on the same contents."""

    reference_ns: tuple[int, ...]
    candidate_ns: tuple[int, ...]
    wall_ns: int
    """pytest's clock around the candidate's block."""
    spin_ns: int
    """Device spin per call that was ordered for the candidate."""


def hidden_ns(blocks: Sequence[Block], overhead_ns: float) -> float:
    """Time per call that passed on the clock outside and that neither the claims nor the harness's own work explains.

    Args:
        overhead_ns: what the same block costs without a candidate.
    """
    left = [
        (block.wall_ns - sum(block.candidate_ns) - block.spin_ns * len(block.candidate_ns) - overhead_ns)
        / len(block.candidate_ns)
        for block in blocks
    ]
    return statistics.median(left)


HIDDEN_FLOOR_NS = {"cuda": 500_000, "cpu": 2_000_000}
"""Less than this per call is the operating system's doing: the turn between processes, page faults."""


def contradiction(blocks: Sequence[Block], overhead_ns: float, device: str) -> str | None:
    """One line when the clock outside contradicts the claimed times."""
    claimed = statistics.median([sum(block.candidate_ns) / len(block.candidate_ns) for block in blocks])
    hidden = hidden_ns(blocks, overhead_ns)
    if hidden > max(0.5 * claimed, HIDDEN_FLOOR_NS[device]):
        return (
            f"it claims {claimed / 1e6:.3f} ms a call, but {(claimed + hidden) / 1e6:.3f} ms passed on the clock outside: "
            "work escapes the measurement"
        )
    return None
