"""The worker: the untrusted, disposable child that imports a candidate and runs it.

It holds its copies of inputs and weights and what it gives back: never the problem, an expected output, an input's seed, a
tolerance or how many calls are to come. Everything that it says is a claim. What measures it here (`timing.clocks`) took its
functions from torch before the candidate was imported.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch

from ..timing.clocks import clock_for
from ..timing.sampling import run_block
from . import interception, tensors
from .device import seed_all, start_device
from .inputs import load_module, one_line
from .protocol import Channel, ChannelClosed, printable

MAX_TRACE = 8000


def serve(channel_fd: int, fds: list[int], rungs: list[str]) -> None:
    """Answer until the channel closes. `fds[0]` is the shared memory of the host kinds of staging."""
    # Not inheritable, so that no program that the candidate starts holds the channel open.
    for fd in (channel_fd, *fds):
        os.set_inheritable(fd, False)
    channel = Channel(socket.socket(fileno=channel_fd))
    worker = _Worker(channel, fds[0] if fds else -1, rungs)
    while True:
        try:
            message = channel.receive()
        except ChannelClosed:
            return
        channel.send(worker.answer(message))


class _Fault(Exception):
    """Something of the candidate's failed; becomes an `error` answer."""

    def __init__(self, kind: str, message: str, line: int = 0, trace: str = "", call: int = 0) -> None:
        super().__init__(message)
        self.reply = {
            "op": "error",
            "kind": kind,
            "message": printable(message, 1500),
            "line": line,
            "trace": printable(trace, MAX_TRACE),
            "call": call,
        }


class _Worker:
    def __init__(self, channel: Channel, memory_fd: int, rungs: list[str]) -> None:
        self._channel = channel
        self._memory_fd = memory_fd
        self._rungs = rungs
        self._staging: tensors.Staging | None = None
        self._model: Any = None
        self._path = ""
        self._output_sizes: list[int] = []
        self._device = torch.device("cpu")
        self._dtype: torch.dtype | None = None
        self._eval_mode = False

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            reply = getattr(self, f"on_{message.pop('op')}")(**message)
        except _Fault as fault:
            reply = fault.reply
        except tensors.CudaError as error:
            reply = _Fault("cuda", str(error)).reply
        return reply  # type: ignore[no-any-return]

    # ---- questions ----

    def on_start(
        self, *, device: str, threads: int, tf32: bool | None, dtype: str | None, eval_mode: bool, pretend: list[int] | None
    ) -> dict[str, Any]:
        """Make ready to compute. `pretend` is the compute capability to pretend, in the build stage."""
        self._device = start_device("cpu" if pretend else device, threads, tf32)
        self._dtype = None if dtype is None else tensors.dtype_of(dtype)
        self._eval_mode = eval_mode
        interception.install(self._build)
        if pretend:
            interception.pretend_cuda((pretend[0], pretend[1]))
            memory = 0
        else:
            self._clock = clock_for(self._device)
            memory = torch.cuda.mem_get_info()[0] if self._device.type == "cuda" else 0
        return {
            "op": "ready",
            "torch": torch.__version__,
            "device": self._device.type,
            "threads": torch.get_num_threads(),
            "isolation": self._rungs,
            "memory": memory,
        }

    def on_attach(self, *, kind: str, size: int, handle: str) -> dict[str, Any]:
        """Open the staging area."""
        if kind == "cuda_ipc":
            self._staging = tensors.open_ipc_staging(handle, size, self._device)
        else:
            self._staging = tensors.host_staging(kind, self._memory_fd, size, self._device)
        return {"op": "done"}

    def on_load(self, *, path: str, source: str) -> dict[str, Any]:
        """Execute the candidate's file and find `ModelNew`."""
        self._path = path
        if source.lstrip().startswith("```"):
            raise _Fault("load", "the file is Markdown, not Python: it begins with a code fence; keep the code only", 1)
        try:
            compile(source, path, "exec")
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None) or 0
            raise _Fault("load", f"syntax error: {getattr(error, 'msg', error)} (line {line})", line) from None
        try:
            self._module = load_module(source, path, "kernelbench_candidate")
        except BaseException as error:
            raise self._fault(error, "load", "exception at import: ") from None
        model = getattr(self._module, "ModelNew", None)
        if not isinstance(model, type):
            raise _Fault("load", "the file defines no class ModelNew", 0)
        return {"op": "loaded", "line": _first_line(model)}

    def on_construct(self, *, init: dict[str, Any], seed: int) -> dict[str, Any]:
        """A new ModelNew under the weight seed, moved to the device; tells its parameters and buffers."""
        self._model = None
        gc.collect()
        arguments = tensors.restore(init, lambda leaf: torch.empty(0))
        kind = self._module.ModelNew
        seed_all(seed)
        try:
            model = kind(*arguments)
            if isinstance(model, torch.nn.Module):
                model = model.to(device=self._device, dtype=self._dtype).train(not self._eval_mode)
        except BaseException as error:
            message = _signature_fault(kind.__init__, error, [None, *arguments], "ModelNew.__init__")
            if message is not None:
                raise _Fault("signature", message, _first_line(kind.__init__)) from None
            raise self._fault(error, "construct", "exception in ModelNew(): ") from None
        self._model = model
        state = model.state_dict() if isinstance(model, torch.nn.Module) else {}
        return {
            "op": "constructed",
            "state": [
                {"name": name, "shape": list(value.shape), "dtype": tensors.dtype_name(value.dtype)}
                for name, value in state.items()
                if isinstance(value, torch.Tensor)
            ],
        }

    def on_weights(self, *, entries: list[dict[str, Any]]) -> dict[str, Any]:
        """Copy weights from the staging area into the model."""
        assert self._staging is not None
        try:
            state = self._model.state_dict()
            for entry in entries:
                state[entry["name"]].data.copy_(self._staging.get(entry["offset"], entry))
            self._clock.synchronize()
        except BaseException as error:
            raise self._fault(error, "construct", "its weights cannot be written: ") from None
        return {"op": "done"}

    def on_run(self, *, calls: list[dict[str, Any]], spin_ns: int) -> dict[str, Any]:
        """Run the calls one after the other; each call's outputs go to its place in the staging area at once.

        Before a candidate is loaded the same block is run without one, which gives what the block costs by itself.
        """
        assert self._staging is not None
        staging, model = self._staging, self._model
        arguments = [tensors.restore(call["inputs"], lambda leaf: staging.get(leaf["offset"], leaf)) for call in calls]
        if model is None:
            empty = [torch.empty(call["room"], dtype=torch.uint8, device=self._device) for call in calls]
            functions: list[Callable[[], Any]] = [lambda value=value: value for value in empty]
        else:
            functions = [lambda given=given: model(*given) for given in arguments]
        outputs: list[dict[str, Any]] = []

        def before(number: int) -> None:
            self._poison()
            seed_all(calls[number]["seed"])

        def after(number: int, value: Any) -> None:
            outputs.append(self._store(value, calls[number]))

        try:
            times = run_block(self._clock, functions, before, after, spin_ns)
        except BaseException as error:
            forward = getattr(type(model), "forward", None)
            message = _signature_fault(forward, error, [None, *arguments[len(outputs)]], "ModelNew.forward") if forward else None
            if message is not None:
                raise _Fault("signature", message, _first_line(forward)) from None
            raise self._fault(error, "runtime", "", len(outputs)) from None
        if not staging.shares_device_memory:
            for call, given in zip(calls, arguments, strict=True):
                for leaf, value in zip(tensors.tensor_leaves(call["inputs"]), tensors.describe(given)[1], strict=True):
                    staging.put(leaf["offset"], value)
        return {
            "op": "ran",
            "calls": [
                {**output, "device_ns": device, "wall_ns": host}
                for output, (device, host) in zip(outputs, times, strict=True)
            ],
        }

    # ---- parts ----

    def _store(self, value: Any, call: dict[str, Any]) -> dict[str, Any]:
        tree, leaves = tensors.describe(value)
        start = call["out"]
        size = tensors.layout(tree, start) - start
        if size <= call["room"]:
            for leaf, item in zip(tensors.tensor_leaves(tree), leaves, strict=True):
                assert self._staging is not None
                self._staging.put(leaf["offset"], item)
            self._output_sizes = [item.numel() * item.element_size() for item in leaves if item.device.type == self._device.type]
        return {"output": tree, "bytes": size}

    def _poison(self) -> None:
        """Leave NaN where the allocator will next give out memory of the outputs' sizes, so that an output which nobody wrote
        cannot hold a right answer of an earlier call."""
        blocks = [torch.empty(size, dtype=torch.uint8, device=self._device).fill_(0xFF) for size in self._output_sizes]
        del blocks

    def _build(self, request: dict[str, Any]) -> dict[str, Any]:
        self._channel.send(request)
        return self._channel.receive()

    def _fault(self, error: BaseException, kind: str, prefix: str, call: int = 0) -> _Fault:
        text = str(error)
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "out of memory" in text.lower():
            kind = "out_of_memory"
        elif kind == "runtime" and ("CUDA error" in text or type(error).__name__ == "AcceleratorError"):
            kind = "cuda"
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == self._path]
        line = frames[-1].lineno or 0 if frames else 0
        own = self._own_trace(error)
        return _Fault(kind, prefix + one_line(error), line, own, call)

    def _own_trace(self, error: BaseException) -> str:
        """The traceback from the candidate's first frame on; the frames above it are the harness's."""
        frames = list(traceback.extract_tb(error.__traceback__))
        first = next((place for place, frame in enumerate(frames) if frame.filename == self._path), len(frames))
        lines = traceback.format_list(frames[first:]) + traceback.format_exception_only(type(error), error)
        return "".join(lines)


def _first_line(thing: Any) -> int:
    with contextlib.suppress(Exception):
        return int(inspect.getsourcelines(thing)[1])
    return 0


def _signature_fault(function: Any, error: BaseException, arguments: list[Any], name: str) -> str | None:
    """Whether a TypeError means that the function does not take these arguments; says what it takes."""
    if not isinstance(error, TypeError):
        return None
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*arguments)
    except TypeError as mismatch:
        return f"{name}{signature} does not take the problem's {len(arguments) - 1} arguments: {mismatch}"
    return None


