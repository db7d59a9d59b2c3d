"""`torch.utils.cpp_extension.load_inline` and `load` inside a worker: requests to pytest, which builds and caches.

The compilers run outside of the worker. So the candidate cannot write to the cache, the run limit's clock stops meanwhile, and a
failed build is known although the candidate may swallow the exception. The binary is what torch's own functions would build.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

MODULE = "torch.utils.cpp_extension"

Ask = Callable[[dict[str, Any]], dict[str, Any]]


class _Finder(importlib.abc.MetaPathFinder):
    """Replaces the two functions when, and only when, the candidate imports the module that holds them."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._busy = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != MODULE or self._busy:
            return None
        self._busy = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._busy = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            ask = self._ask

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                replace(module, ask)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install(ask: Ask) -> None:
    """Take over both functions wherever the candidate gets them from. `ask` sends a request and gives pytest's answer."""
    lock = threading.Lock()

    def one_at_a_time(request: dict[str, Any]) -> dict[str, Any]:
        with lock:
            return ask(request)

    if MODULE in sys.modules:
        replace(sys.modules[MODULE], one_at_a_time)
    else:
        sys.meta_path.insert(0, _Finder(one_at_a_time))


def replace(module: types.ModuleType, ask: Ask) -> None:
    """Put the intercepting functions in place of torch's."""

    def load_inline(
        name: str,
        cpp_sources: str | Sequence[str],
        cuda_sources: str | Sequence[str] | None = None,
        sycl_sources: Any = None,
        functions: Any = None,
        extra_cflags: Any = None,
        extra_cuda_cflags: Any = None,
        extra_sycl_cflags: Any = None,
        extra_ldflags: Any = None,
        extra_include_paths: Any = None,
        build_directory: Any = None,
        verbose: bool = False,
        with_cuda: bool | None = None,
        with_sycl: bool | None = None,
        is_python_module: bool = True,
        with_pytorch_error_handling: bool = True,
        keep_intermediates: bool = True,
        use_pch: bool = False,
        no_implicit_headers: bool = False,
    ) -> Any:
        if sycl_sources:
            raise RuntimeError("SYCL sources are not supported here")
        cpp = _texts(cpp_sources)
        cuda = _texts(cuda_sources)
        if not no_implicit_headers:
            cpp.insert(0, "#include <torch/extension.h>")
        if functions is not None:
            cpp += _bindings(functions, with_pytorch_error_handling)
        sources = [{"file": "main.cpp", "text": "\n".join(cpp)}]
        if cuda:
            if not no_implicit_headers:
                cuda = ["#include <torch/types.h>", "#include <cuda.h>", "#include <cuda_runtime.h>", *cuda]
            sources.append({"file": "cuda.cu", "text": "\n".join(cuda)})
        return _request(
            ask, name, sources, extra_cflags, extra_cuda_cflags, extra_ldflags, extra_include_paths,
            bool(cuda) if with_cuda is None else with_cuda, is_python_module, [],
        )  # fmt: skip

    def load(
        name: str,
        sources: str | Sequence[str],
        extra_cflags: Any = None,
        extra_cuda_cflags: Any = None,
        extra_sycl_cflags: Any = None,
        extra_ldflags: Any = None,
        extra_include_paths: Any = None,
        build_directory: Any = None,
        verbose: bool = False,
        with_cuda: bool | None = None,
        with_sycl: bool | None = None,
        is_python_module: bool = True,
        is_standalone: bool = False,
        keep_intermediates: bool = True,
    ) -> Any:
        if is_standalone:
            raise RuntimeError("standalone executables are not supported here")
        read, folders = [], []
        for path in [sources] if isinstance(sources, (str, os.PathLike)) else sources:
            with open(path) as file:
                read.append({"file": os.path.basename(path), "text": file.read()})
            folder = os.path.dirname(os.path.abspath(path))
            if folder not in folders:
                folders.append(folder)
        cuda = any(item["file"].endswith(".cu") for item in read)
        return _request(
            ask, name, read, extra_cflags, extra_cuda_cflags, extra_ldflags, extra_include_paths,
            cuda if with_cuda is None else with_cuda, is_python_module, folders,
        )  # fmt: skip

    module.load_inline = load_inline  # type: ignore[attr-defined]
    module.load = load  # type: ignore[attr-defined]


def _texts(sources: str | Sequence[str] | None) -> list[str]:
    if sources is None:
        return []
    return [sources] if isinstance(sources, str) else list(sources)


def _bindings(functions: Any, error_handling: bool) -> list[str]:
    """The pybind11 module that torch's `load_inline` writes for `functions`."""
    if isinstance(functions, str):
        functions = [functions]
    if isinstance(functions, (list, tuple)):
        functions = {name: name for name in functions}
    if not isinstance(functions, dict):
        raise ValueError(f"Expected 'functions' to be a list or dict, but was {type(functions)}")
    lines = ["PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {"]
    for name, text in functions.items():
        target = f"torch::wrap_pybind_function({name})" if error_handling else name
        lines.append(f'm.def("{name}", {target}, "{text}");')
    return [*lines, "}"]


def _request(
    ask: Ask,
    name: str,
    sources: list[dict[str, str]],
    cflags: Any,
    cuda_cflags: Any,
    ldflags: Any,
    include_paths: Any,
    with_cuda: bool,
    is_python_module: bool,
    folders: list[str],
) -> Any:
    answer = ask(
        {
            "op": "build",
            "name": str(name),
            "sources": sources,
            "cflags": _strings(cflags),
            "cuda_cflags": _strings(cuda_cflags),
            "ldflags": _strings(ldflags),
            # A source's own folder is where its quoted includes lie.
            "include_paths": [os.path.abspath(path) for path in [*_strings(include_paths), *folders]],
            "with_cuda": bool(with_cuda),
        }
    )
    if "library" not in answer:
        raise RuntimeError(f"Error building extension '{name}': {answer.get('message', 'no answer')}")
    return load_library(str(name), answer["library"], is_python_module)


def _strings(flags: Any) -> list[str]:
    if flags is None:
        return []
    return [flags] if isinstance(flags, str) else [os.fspath(flag) for flag in flags]


def load_library(name: str, path: str, is_python_module: bool) -> Any:
    """Load a built extension as torch does."""
    if not is_python_module:
        import torch

        torch.ops.load_library(path)
        return path
    loader = importlib.machinery.ExtensionFileLoader(name, path)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def pretend_cuda(capability: tuple[int, int]) -> None:
    """Let code on a machine or in a process without a GPU take the branches that it takes with one.

    For the build stage only: what lies behind `torch.cuda.is_available()` is to be built ahead of the GPU. What then fails for
    want of a device fails after the build that was looked for.
    """
    import torch

    properties = types.SimpleNamespace(
        name="GPU", major=capability[0], minor=capability[1], multi_processor_count=128, total_memory=64 << 30, warp_size=32
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": capability,
        "get_device_name": properties.name,
        "get_device_properties": properties,
        "is_bf16_supported": True,
        "get_arch_list": [f"sm_{capability[0]}{capability[1]}"],
    }
    for name, value in answers.items():
        setattr(torch.cuda, name, lambda *args, _value=value, **kwargs: _value)
