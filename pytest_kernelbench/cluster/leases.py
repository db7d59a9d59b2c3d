"""Devices and compiler slots, leased through file locks so that processes and sessions on one machine share them.

A lock dies with its holder, so a killed run leaves nothing behind. Locks lie on the machine's own disk, where they work, never in
a home folder that may be on NFS. Imports no torch: devices are counted through NVML or `nvidia-smi`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ..settings import Settings, SettingsError

POLL_S = 0.01


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU as NVML counts them: by bus."""

    index: int
    uuid: str
    name: str
    capability: tuple[int, int] | None
    """Compute capability, such as (9, 0)."""
    memory_bytes: int


def list_gpus() -> list[Gpu]:
    """All NVIDIA GPUs of the machine; empty without a driver."""
    for provider in (_from_nvml, _from_smi):
        gpus = provider()
        if gpus is not None:
            return gpus
    return []


def _from_nvml() -> list[Gpu] | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuid, name = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            gpus.append(
                Gpu(
                    index=index,
                    uuid=uuid if isinstance(uuid, str) else uuid.decode(),
                    name=name if isinstance(name, str) else name.decode(),
                    capability=(major, minor),
                    memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                )
            )
        return gpus
    except pynvml.NVMLError:
        return None
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _from_smi() -> list[Gpu] | None:
    query = "--query-gpu=index,uuid,name,compute_cap,memory.total"
    try:
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    gpus = []
    for line in done.stdout.splitlines():
        index, uuid, name, capability, memory = (word.strip() for word in line.split(","))
        major, _, minor = capability.partition(".")
        gpus.append(
            Gpu(
                index=int(index),
                uuid=uuid,
                name=name,
                capability=(int(major), int(minor)) if major.isdigit() and minor.isdigit() else None,
                memory_bytes=int(memory) << 20,
            )
        )
    return gpus


def visible_tokens(gpus: list[Gpu]) -> list[str]:
    """The caller's visible devices, as the words that its own variable uses; HIP's names count where CUDA's is not set."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        value = os.environ.get(name)
        if value is not None:
            tokens = [word.strip() for word in value.split(",") if word.strip()]
            # CUDA ends its list at the first index that means no device.
            return tokens[: tokens.index("-1")] if "-1" in tokens else tokens
    return [str(gpu.index) for gpu in gpus]


def resolve_device(settings: Settings) -> tuple[str, list[str]]:
    """The device to run on and the names of its places: visible GPUs, or `cpu`.

    Raises:
        SettingsError: no GPU where one is asked for, or a `--kb-gpu` that does not exist.
    """
    gpus = list_gpus()
    tokens = visible_tokens(gpus)
    usable = tokens if gpus else []
    if not usable and (settings.device == "cuda" or settings.require_gpu):
        option = "--kb-require-gpu" if settings.require_gpu else "--kb-device=cuda"
        hidden = gpus and "all GPUs are hidden by CUDA_VISIBLE_DEVICES" or "no NVIDIA GPU or driver was found"
        raise SettingsError(f"{option}: {hidden}; run on a machine with a GPU, or with --kb-device=cpu without this option")
    device = settings.device if settings.device != "auto" else ("cuda" if usable else "cpu")
    if settings.gpu:
        # On the CPU the places are whatever the caller names, so that placement can be tried without the hardware.
        for index in settings.gpu:
            if not 0 <= index < len(tokens):
                shown = f"only {len(tokens)} visible (index 0{f' to {len(tokens) - 1}' if len(tokens) > 1 else ''})"
                raise SettingsError(f"--kb-gpu={index}: no such GPU, {shown if tokens else 'none is visible'}")
        return device, [tokens[index] for index in settings.gpu]
    if device == "cpu" and not (tokens and not gpus):
        return device, ["cpu"]
    return device, tokens


def target_arch(settings: Settings) -> str | None:
    """CUDA architecture to build for: `--kb-arch`, or that of the first visible GPU (`9.0a` where the chip has such a variant)."""
    if settings.arch is not None:
        return settings.arch
    gpus = list_gpus()
    tokens = visible_tokens(gpus)
    chosen = [tokens[index] for index in settings.gpu if index < len(tokens)] or tokens
    for gpu in gpus:
        if gpu.capability is not None and chosen and (chosen[0] == str(gpu.index) or gpu.uuid.startswith(chosen[0])):
            major, minor = gpu.capability
            return f"{major}.{minor}{'a' if major >= 9 else ''}"
    return None


def lock_folder() -> Path:
    """A folder on the machine's own disk that every user of it can lock in."""
    for base in ("/tmp", tempfile.gettempdir()):  # noqa: S108 the same for all users, whatever their TMPDIR
        folder = Path(base) / "pytest-kernelbench-locks"
        try:
            folder.mkdir(exist_ok=True)
            with contextlib.suppress(OSError):
                folder.chmod(0o1777)
            if os.access(folder, os.W_OK):
                return folder
        except OSError:
            continue
    raise OSError("no folder for locks can be made in /tmp or TMPDIR")


@dataclasses.dataclass(frozen=True, slots=True)
class Lease:
    """A place held by this process."""

    token: str
    waited_s: float


@contextlib.contextmanager
def lease(tokens: list[str], preferred: int, item: str) -> Iterator[Lease]:
    """Hold one of the places `tokens`, beginning to look at `preferred`; waits as long as it takes.

    No time-out: whoever holds a place is bounded by its own limits, and a dead holder's lock is free.
    """
    from filelock import FileLock, Timeout

    uuids = {str(gpu.index): gpu.uuid for gpu in list_gpus()} if tokens != ["cpu"] else {}
    order = [tokens[(preferred + step) % len(tokens)] for step in range(len(tokens))]
    began = time.monotonic()
    while True:
        for token in order:
            name = uuids.get(token, token).replace("/", "_")
            path = lock_folder() / f"device-{name}.lock"
            lock = FileLock(path, mode=0o666)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue
            try:
                with contextlib.suppress(OSError):
                    path.with_suffix(".holder").write_text(holder(item))
                yield Lease(token, time.monotonic() - began)
            finally:
                lock.release()
            return
        time.sleep(POLL_S)


def holder(item: str) -> str:
    """Who holds a lock, for whoever waits for it."""
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "item": item, "since": time.time()})


def compile_jobs(settings: Settings) -> int:
    """Compilers that may run at once on the machine: `--kb-build-jobs`, or from cores and free memory."""
    if settings.build_jobs is not None:
        return settings.build_jobs
    cores = len(os.sched_getaffinity(0))
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo") as file:
        free = next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))
    # A translation unit with torch's full headers takes up to 3.2 GB.
    return max(1, min(cores, int(free / 3.2e9)))


@contextlib.contextmanager
def compile_slots(jobs: int, wanted: int, deadline: float) -> Iterator[int]:
    """Hold 1 to `wanted` of the machine's `jobs` compiler slots; gives how many.

    Raises:
        TimeoutError: when none was free before `deadline` (`time.monotonic()`).
    """
    from filelock import FileLock, Timeout

    held: list[FileLock] = []
    try:
        while not held:
            for slot in range(jobs):
                if len(held) == wanted:
                    break
                lock = FileLock(lock_folder() / f"compile-{slot}.lock", mode=0o666)
                with contextlib.suppress(Timeout):
                    lock.acquire(timeout=0)
                    held.append(lock)
            if not held:
                if time.monotonic() > deadline:
                    raise TimeoutError
                time.sleep(5 * POLL_S)
        yield len(held)
    finally:
        for lock in held:
            lock.release()
