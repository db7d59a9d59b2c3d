"""A problem's file made to run: its module, its model, its draws. Used in the judge only.

The file is executed from the text that pytest read and hashed, in a module of its own, so that nothing a candidate defines can
reach its names.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import linecache
import secrets
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class ProblemFault(Exception):
    """The problem is at fault; the message is one line."""


class SecretSeeds:
    """Seeds that nobody outside of this process can know: keyed hashes of a counter under a fresh nonce."""

    def __init__(self) -> None:
        self._nonce = secrets.token_bytes(32)
        self._count = itertools.count()

    def __call__(self) -> int:
        digest = hashlib.blake2b(next(self._count).to_bytes(8, "big"), key=self._nonce, digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1


def load_module(source: str, path: str, name: str) -> types.ModuleType:
    """Execute `source` as the module `name` that says it came from `path`."""
    module = types.ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module  # dataclasses, pickling and TorchScript look their module up by name
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    exec(compile(source, path, "exec"), module.__dict__)  # noqa: S102 that is what a problem is for
    return module


class ProblemFile:
    """The names of a problem file, found and checked.

    Raises:
        ProblemFault: for a file that does not run or lacks a name.
    """

    def __init__(self, source: str, path: str, size: str) -> None:
        try:
            module = load_module(source, path, "kernelbench_problem")
        except BaseException as error:
            raise ProblemFault(f"the problem file fails when it is imported: {one_line(error)}") from None
        for name in ("Model", "get_inputs", "get_init_inputs"):
            if not callable(getattr(module, name, None)):
                kind = "class" if name == "Model" else "function"
                raise ProblemFault(f"the problem file has no {kind} {name}")
        self._module = module
        self._sizes: dict[str, Any] = dict(getattr(module, "SMOKE", {})) if size == "smoke" else {}
        self.has_sizes = bool(self._sizes)
        self.tolerance = getattr(module, "TOLERANCE", None)
        self.dtypes = getattr(module, "DTYPES", None)

    def init_inputs(self) -> list[Any]:
        values = self._call("get_init_inputs")
        if not isinstance(values, (list, tuple)):
            raise ProblemFault(f"get_init_inputs() gives a {type(values).__name__}, not a list")
        return list(values)

    def model(self, init_inputs: list[Any]) -> torch.nn.Module:
        """A new model, constructed on the CPU as KernelBench does; the caller has set the seed."""
        try:
            return self._module.Model(*init_inputs)  # type: ignore[no-any-return]
        except Exception as error:
            raise ProblemFault(f"Model(*get_init_inputs()) raises {one_line(error)}") from None

    def inputs(self, device: torch.device, dtype: torch.dtype | None, seed: int) -> list[Any]:
        """One draw, made on the device; floating tensors cast to `dtype` if it is given, integer and bool ones never."""
        torch.manual_seed(seed)
        with torch.device(device):
            values = self._call("get_inputs")
        if not isinstance(values, (list, tuple)):
            raise ProblemFault(f"get_inputs() gives a {type(values).__name__}, not a list")
        return [map_tensors(value, lambda tensor: _place(tensor, device, dtype)) for value in values]

    def _call(self, name: str) -> Any:
        function: Callable[..., Any] = getattr(self._module, name)
        try:
            accepted = inspect.signature(function).parameters
            keywords = any(item.kind is item.VAR_KEYWORD for item in accepted.values())
            return function(**{key: value for key, value in self._sizes.items() if keywords or key in accepted})
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise ProblemFault(f"{name}() raises {one_line(error)}") from None


def _place(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None) -> torch.Tensor:
    target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(device=device, dtype=target).contiguous()


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same lists, tuples and dicts with every tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list):
        return [map_tensors(item, change) for item in value]
    if isinstance(value, tuple):
        return tuple(map_tensors(item, change) for item in value)
    if isinstance(value, dict):
        return {key: map_tensors(item, change) for key, item in value.items()}
    return value


def tensors_of(values: Iterable[Any]) -> list[torch.Tensor]:
    """All tensors in lists, tuples and dicts, in order."""
    found: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    for value in values:
        map_tensors(value, keep)
    return found


def one_line(error: BaseException) -> str:
    """`ValueError: what it said`, first line only."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__
