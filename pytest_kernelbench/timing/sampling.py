"""One block of calls: the same code for reference and candidate.

A call is measured the same way whether it is a check, a warm-up or a sample, so that a candidate cannot tell them apart.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

from .clocks import CpuClock, CudaClock

def run_block(
    clock: CpuClock | CudaClock,
    calls: Sequence[Callable[[], Any]],
    before: Callable[[int], None],
    after: Callable[[int, Any], None],
    spin_ns: int = 0,
) -> list[tuple[int, int]]:
    """Time every call of a block; `before` and `after` run outside of the measured span.

    Returns:
        (device, host) nanoseconds per call.
    """
    gc.disable()
    try:
        for number, call in enumerate(calls):
            before(number)
            clock.prepare(spin_ns)
            clock.start()
            result = call()
            clock.stop()
            after(number, result)
            del result
        return clock.collect()
    finally:
        gc.enable()
