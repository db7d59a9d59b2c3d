"""One call's time on a device: CUDA events on the GPU, the process's monotonic clock on the CPU.

Judge and worker use the same code. It takes every function that it needs from torch's C extension when it is made, which in a
worker is before the candidate is imported, so that a candidate which rebinds `torch.cuda.Event` or `time.perf_counter` changes
nothing here.
"""

from __future__ import annotations

import glob
import time
from typing import Any

import torch

_perf_counter_ns = time.perf_counter_ns

FLUSH_FLOOR_BYTES = 64 << 20
CPU_FLUSH_BYTES = 32 << 20
"""A last-level cache may be larger; fresh contents for every call already make the inputs cold."""


class CpuClock:
    """Wall time of a call that returns when its work is done."""

    name = "cpu clock"

    def __init__(self) -> None:
        self._flush = torch.empty(_cpu_flush_bytes(), dtype=torch.uint8)
        self._zero = torch._C.TensorBase.zero_
        self._begin = 0
        self._times: list[tuple[int, int]] = []

    def prepare(self, spin_ns: int) -> None:
        """Push the last call's data out of the caches. `spin_ns` has no meaning here."""
        self._zero(self._flush)

    def start(self) -> None:
        self._begin = _perf_counter_ns()

    def stop(self) -> None:
        wall = _perf_counter_ns() - self._begin
        self._times.append((wall, wall))

    def collect(self) -> list[tuple[int, int]]:
        """(device, host) nanoseconds of each call since the last collection."""
        times, self._times = self._times, []
        return times

    def guard(self) -> None:
        """Nothing to put right between calls."""

    def synchronize(self) -> None:
        """Nothing runs behind the caller's back."""


def _cpu_flush_bytes() -> int:
    sizes = [CPU_FLUSH_BYTES >> 10]
    for path in glob.glob("/sys/devices/system/cpu/cpu0/cache/index*/size"):
        try:
            with open(path) as file:
                text = file.read().strip()
            sizes.append(int(text.rstrip("KM")) * (1024 if text.endswith("M") else 1))
        except (OSError, ValueError):
            continue
    return min(max(sizes), 2 * CPU_FLUSH_BYTES >> 10) << 10


class CudaClock:
    """Device time between two events on the default stream, with L2 flushed and launches queued ahead of a device spin.

    The spin (`prepare`) keeps the device busy while the host enqueues the call, so that launch latency is not measured; it is
    bounded and needs no host, so a candidate that synchronises cannot deadlock.
    """

    name = "cuda events"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        base = torch._C._CudaEventBase
        self._event = lambda: base(enable_timing=True, blocking=False, interprocess=False)
        self._record, self._elapsed = base.record, base.elapsed_time
        self._zero, self._sum = torch._C.TensorBase.zero_, torch._C.TensorBase.sum
        self._sync, self._spin = torch._C._cuda_synchronize, torch._C._cuda_sleep
        torch.zeros(1, device=device)
        self._stream = torch.cuda.default_stream(device)
        self._set_stream = torch._C._cuda_setStream
        self._stream_id = (self._stream.stream_id, self._stream.device_index, self._stream.device_type)
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
        # Allocated once; int32, so that reading it back is one ordinary reduction.
        self._flush = torch.empty(max(2 * l2, FLUSH_FLOOR_BYTES) // 4, dtype=torch.int32, device=device)
        self._pairs: list[tuple[Any, Any, int]] = []
        self._begin = 0
        self._open: Any = None
        self._cycles_per_ns = self._calibrate()

    def _calibrate(self) -> float:
        cycles = 2_000_000
        for _ in range(2):
            first, last = self._event(), self._event()
            self._record(first, self._stream)
            self._spin(cycles)
            self._record(last, self._stream)
            self._sync()
        return cycles / max(self._elapsed(first, last) * 1e6, 1.0)

    def prepare(self, spin_ns: int) -> None:
        """Flush L2 (written, then read, so that no dirty line is left to be written back on the call's account), then spin."""
        self.guard()
        self._zero(self._flush)
        self._sum(self._flush)
        if spin_ns:
            self._spin(int(spin_ns * self._cycles_per_ns))

    def start(self) -> None:
        self._open = self._event()
        self._record(self._open, self._stream)
        self._begin = _perf_counter_ns()

    def stop(self) -> None:
        wall = _perf_counter_ns() - self._begin
        self.guard()
        end = self._event()
        self._record(end, self._stream)
        self._pairs.append((self._open, end, wall))

    def guard(self) -> None:
        """Make the default stream current again, wherever the call left it."""
        self._set_stream(stream_id=self._stream_id[0], device_index=self._stream_id[1], device_type=self._stream_id[2])

    def collect(self) -> list[tuple[int, int]]:
        """(device, host) nanoseconds of each call since the last collection; host time is that of enqueueing it."""
        self._sync()
        times = [(round(self._elapsed(first, last) * 1e6), wall) for first, last, wall in self._pairs]
        self._pairs = []
        return times

    def synchronize(self) -> None:
        self._sync()


def clock_for(device: torch.device) -> CpuClock | CudaClock:
    """The clock of a device, warmed and calibrated."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()
