"""Trees of tensors as plain data, and the memory that judge and worker share.

A *tree* is JSON: `{"t": "tensor", "shape": [...], "dtype": "float32", ...}`, `{"t": "list", "items": [...]}`, scalars. The
tensors' bytes lie in a `Staging` area that the judge owns: device memory opened through CUDA IPC, or shared memory on the CPU,
or shared host memory that both sides copy to and from where CUDA IPC does not work. Nothing secret ever lies in it.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import Any

import torch

ALIGN = 512
"""Bytes; at least what the caching allocator gives, so that vectorised loads see the alignment they are used to."""

_DTYPES = {
    str(item).removeprefix("torch."): item
    for item in vars(torch).values()
    if isinstance(item, torch.dtype)
}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Raises KeyError for a name that is no dtype."""
    return _DTYPES[name]


def aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def describe(value: Any) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """A value as a tree and the tensors in it, in the tree's order.

    Exact types only: a subclass of a tensor, a list or a number may lie about itself and becomes a leaf `other`.
    """
    leaves: list[torch.Tensor] = []
    return _describe(value, leaves, 0), leaves


def _describe(value: Any, leaves: list[torch.Tensor], depth: int) -> dict[str, Any]:
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        if value.layout is not torch.strided or value.device.type == "meta" or value.is_quantized:
            return {"t": "other", "type": f"tensor of layout {value.layout} on {value.device.type}"[:120]}
        leaves.append(value)
        leaf = {
            "t": "tensor",
            "shape": list(value.shape),
            "stride": list(value.stride()),
            "dtype": dtype_name(value.dtype),
            "device": value.device.type,
        }
        if kind is not torch.Tensor:
            leaf["parameter"] = True
        return leaf
    if kind in (list, tuple) and depth < 16:
        return {"t": kind.__name__, "items": [_describe(item, leaves, depth + 1) for item in value]}
    if kind is dict and depth < 16 and all(type(key) in (str, int) for key in value):
        return {
            "t": "dict",
            "keys": list(value),
            "items": [_describe(item, leaves, depth + 1) for item in value.values()],
        }
    if value is None:
        return {"t": "none"}
    if kind is bool or kind is int or kind is str:
        return {"t": kind.__name__, "v": value}
    if kind is float:
        return {"t": "float", "v": value.hex()}
    if kind is torch.dtype:
        return {"t": "dtype", "v": dtype_name(value)}
    if kind is torch.Size:
        return {"t": "size", "v": list(value)}
    return {"t": "other", "type": f"{kind.__module__}.{kind.__qualname__}"[:120]}


def restore(tree: dict[str, Any], tensor: Callable[[dict[str, Any]], torch.Tensor]) -> Any:
    """The value of a tree; `tensor` makes a tensor from its leaf.

    Raises:
        ValueError: for a leaf that has no plain form.
    """
    kind = tree["t"]
    if kind == "tensor":
        return tensor(tree)
    if kind in ("list", "tuple"):
        items = [restore(item, tensor) for item in tree["items"]]
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        return {key: restore(item, tensor) for key, item in zip(tree["keys"], tree["items"], strict=True)}
    if kind == "none":
        return None
    if kind == "float":
        return float.fromhex(tree["v"])
    if kind in ("bool", "int", "str"):
        return tree["v"]
    if kind == "dtype":
        return dtype_of(tree["v"])
    if kind == "size":
        return torch.Size(tree["v"])
    raise ValueError(f"a value of type {tree.get('type', kind)} cannot be handed to another process")


def tensor_leaves(tree: dict[str, Any]) -> list[dict[str, Any]]:
    """The tensor leaves of a tree, in order."""
    if tree["t"] == "tensor":
        return [tree]
    return [leaf for item in tree.get("items", ()) for leaf in tensor_leaves(item)]


def leaf_bytes(leaf: dict[str, Any]) -> int:
    """Bytes of a tensor leaf, packed."""
    count = 1
    for size in leaf["shape"]:
        count *= size
    return count * dtype_of(leaf["dtype"]).itemsize


def layout(tree: dict[str, Any], start: int = 0) -> int:
    """Give every tensor leaf its `offset` from `start` on; returns the offset behind the last one."""
    for leaf in tensor_leaves(tree):
        leaf["offset"] = start
        start += aligned(leaf_bytes(leaf))
    return start


class Staging:
    """A flat area of bytes that judge and worker both see.

    Attributes:
        kind: `cuda_ipc`, `pinned_host` or `shared_memory`.
        handle: what the other side opens it with, plain data; empty for the kinds that travel as a descriptor.
    """

    def __init__(self, kind: str, flat: torch.Tensor, device: torch.device, handle: str = "", release: Any = None) -> None:
        self.kind = kind
        self.handle = handle
        self._flat = flat
        self._device = device
        self._release = release

    @property
    def size(self) -> int:
        return self._flat.numel()

    def raw(self, offset: int, leaf: dict[str, Any]) -> torch.Tensor:
        """The leaf's bytes in the area itself, as a contiguous tensor of its shape and dtype.

        Raises:
            ValueError: when it does not fit in the area.
        """
        size = leaf_bytes(leaf)
        if not 0 <= offset <= offset + size <= self.size:
            raise ValueError(f"{size} bytes at {offset} lie outside of the area of {self.size} bytes")
        return self._flat[offset : offset + size].view(dtype_of(leaf["dtype"])).view(leaf["shape"])

    def get(self, offset: int, leaf: dict[str, Any]) -> torch.Tensor:
        """The leaf on the device: the area's own memory where it is the device's, else a copy."""
        raw = self.raw(offset, leaf)
        return raw if raw.device.type == self._device.type else raw.to(self._device)

    def put(self, offset: int, value: torch.Tensor) -> None:
        """Write a tensor's elements, packed."""
        leaf = {"shape": list(value.shape), "dtype": dtype_name(value.dtype)}
        self.raw(offset, leaf).copy_(value)

    @property
    def shares_device_memory(self) -> bool:
        return self._flat.device.type == self._device.type

    def close(self) -> None:
        """Give the memory back; no tensor made by `raw` or `get` may be used afterwards."""
        self._flat = torch.empty(0, dtype=torch.uint8)
        if self._release is not None:
            self._release()
            self._release = None


def host_staging(kind: str, fd: int, size: int, device: torch.device) -> Staging:
    """Map a shared-memory descriptor; with `pinned_host` the pages are registered with the device for fast copies."""
    area = mmap.mmap(fd, size)
    flat = torch.frombuffer(area, dtype=torch.uint8)
    if kind == "pinned_host":
        # Registering only makes copies faster; a system that refuses it still works.
        torch.cuda.cudart().cudaHostRegister(flat.data_ptr(), size, 0)
    return Staging(kind, flat, device)


class _IpcHandle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 64)]


class CudaError(RuntimeError):
    """A driver call failed; `code` is the CUresult."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call} failed with CUDA error {code}")
        self.code = code


def _driver(call: str, *arguments: Any) -> None:
    code = getattr(ctypes.CDLL("libcuda.so.1"), call)(*arguments)
    if code:
        raise CudaError(call, code)


def ipc_staging(size: int, device: torch.device) -> Staging:
    """Device memory of its own (not a piece of the caching allocator's) with a handle that another process can open.

    Raises:
        CudaError: without memory, or where CUDA IPC is not supported.
    """
    torch.zeros(1, device=device)  # makes the device's primary context current
    pointer = ctypes.c_uint64()
    _driver("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
    handle = _IpcHandle()
    try:
        _driver("cuIpcGetMemHandle", ctypes.byref(handle), pointer)
    except CudaError:
        _driver("cuMemFree_v2", pointer)
        raise
    raw = ctypes.string_at(ctypes.byref(handle), 64).hex()
    return Staging(
        "cuda_ipc", _from_pointer(pointer.value, size, device), device, raw, lambda: _driver("cuMemFree_v2", pointer)
    )


def open_ipc_staging(handle: str, size: int, device: torch.device) -> Staging:
    """The worker's side of `ipc_staging`."""
    torch.zeros(1, device=device)
    struct = _IpcHandle.from_buffer_copy(bytes.fromhex(handle))
    pointer = ctypes.c_uint64()
    _driver("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), struct, ctypes.c_uint(1))
    return Staging(
        "cuda_ipc", _from_pointer(pointer.value, size, device), device, handle, lambda: _driver("cuIpcCloseMemHandle", pointer)
    )


class _Pointer:
    """Device memory that torch did not allocate, in the form that `torch.as_tensor` wraps without a copy."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
            "strides": None,
        }


def _from_pointer(address: int, size: int, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(_Pointer(address, size), device=device)
