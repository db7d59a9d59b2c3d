"""Comparison of a candidate's outputs with the expected ones: structure before values, in slices, nothing forgiven.

Works in slices, so that comparing needs at most some 500 MB beside the two outputs on a GPU, whatever their size, and stays in
the caches on a CPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

SLICES = {"cpu": 1 << 17, "cuda": 1 << 24}
"""Elements per slice."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How one output differs. `bad` is 0 when it is within the bound."""

    bad: int
    total: int
    max_error: float
    worst: tuple[int, ...] = ()
    """Index of the element that is furthest outside."""
    expected: float = 0.0
    got: float = 0.0
    note: str = ""
    """What kind of difference, where it is not a finite number: NaN, infinity."""


def structure_fault(expected: dict[str, Any], got: dict[str, Any], where: str = "the output") -> str | None:
    """One line that says how the structure differs, or None. Both are trees of `tensors.describe`."""
    if expected["t"] != got["t"]:
        return f"{where} is {_kind(got)}, the reference's is {_kind(expected)}"
    if expected["t"] == "other":
        return f"{where} is {_kind(got)}, which cannot be compared"
    if expected["t"] == "tensor":
        return _tensor_fault(expected, got, where)
    if "items" in expected:
        if len(expected["items"]) != len(got["items"]):
            return f"{where} has {len(got['items'])} items, the reference's has {len(expected['items'])}"
        if expected.get("keys") != got.get("keys"):
            return f"{where} has the keys {str(got.get('keys'))[:80]}, the reference's has {str(expected.get('keys'))[:80]}"
        for number, (one, other) in enumerate(zip(expected["items"], got["items"], strict=True)):
            fault = structure_fault(one, other, f"item {number} of {where}")
            if fault is not None:
                return fault
    elif expected.get("v") != got.get("v") and expected["t"] != "float":
        return f"{where} is {str(got.get('v'))[:60]!r}, the reference's is {str(expected.get('v'))[:60]!r}"
    return None


def _kind(tree: dict[str, Any]) -> str:
    names = {
        "tensor": "a tensor",
        "none": "None",
        "int": "an int",
        "float": "a float",
        "bool": "a bool",
        "str": "a str",
        "size": "a torch.Size",
        "dtype": "a dtype",
    }
    if tree["t"] in ("list", "tuple", "dict"):
        return f"a {tree['t']} of {len(tree['items'])}"
    return names.get(tree["t"], f"an object of type {tree.get('type', tree['t'])}")


def _tensor_fault(expected: dict[str, Any], got: dict[str, Any], where: str) -> str | None:
    if bool(expected.get("parameter")) != bool(got.get("parameter")):
        return f"{where} is a {'Parameter' if got.get('parameter') else 'Tensor'}, the reference's is not"
    for name, word in (("shape", "shape"), ("dtype", "dtype"), ("device", "device")):
        if expected[name] != got[name]:
            return f"{where} has {word} {_show(got[name])}, the reference's has {_show(expected[name])}"
    repeats = [size for size, stride in zip(got["shape"], got["stride"], strict=True) if size > 1 and stride == 0]
    if repeats and got["stride"] != expected["stride"]:
        return f"{where} is an expanded view (stride {_show(got['stride'])}), not {_show(got['shape'])} elements of its own"
    return None


def _show(value: Any) -> str:
    return f"({', '.join(map(str, value))}{',' if len(value) == 1 else ''})" if isinstance(value, list) else str(value)


def compare(expected: torch.Tensor, got: torch.Tensor, atol: float, rtol: float, *, all_errors: bool = True) -> Difference:
    """Compare two tensors of equal shape and dtype on one device.

    Integers and bools must be equal. A NaN in either never passes. An infinity passes where both have the same one.

    Args:
        all_errors: False stops at the first slice with an element outside, when only the yes or no is wanted.
    """
    if expected.numel() == 0:
        return Difference(bad=0, total=0, max_error=0.0)
    left, right = expected.detach().reshape(-1), got.detach().reshape(-1)
    bad, max_error = 0, 0.0
    worst: tuple[float, int] = (-1.0, 0)
    for start, one, other in _slices(left, right):
        quick = _all_close(one, other, atol, rtol)
        if quick is not None:
            max_error = max(max_error, quick)
            continue
        outside, error, badness = _slice(one, other, atol, rtol)
        count = int(outside.sum())
        finite = torch.where(torch.isfinite(error), error, torch.zeros_like(error))
        max_error = max(max_error, float(finite.max()))
        if count:
            bad += count
            top = int(badness.argmax())
            if float(badness[top]) > worst[0]:
                worst = (float(badness[top]), start + top)
            if not all_errors:
                break
    if not bad:
        return Difference(bad=0, total=left.numel(), max_error=max_error)
    want, have = _number(left[worst[1]]), _number(right[worst[1]])
    return Difference(
        bad=bad,
        total=left.numel(),
        max_error=max_error,
        worst=tuple(int(place) for place in torch.unravel_index(torch.tensor(worst[1]), expected.shape)),
        expected=want,
        got=have,
        note="NaN" if have != have else "infinite" if abs(have) == float("inf") else "",
    )


def _slices(left: torch.Tensor, right: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    step = SLICES.get(left.device.type, SLICES["cuda"])
    for start in range(0, left.numel(), step):
        yield start, left[start : start + step], right[start : start + step]


def _all_close(one: torch.Tensor, other: torch.Tensor, atol: float, rtol: float) -> float | None:
    """The largest error of a slice that is within the bound beyond doubt, or None where it must be looked at closely.

    Single precision suffices for that: the bound is taken a little smaller than it is by more than single precision can be wrong.
    """
    if not (one.is_floating_point() or one.is_complex()):
        return 0.0 if torch.equal(one, other) else None
    if one.dtype is torch.float64 or one.is_complex():
        return None
    left, right = one.to(torch.float32), other.to(torch.float32)
    error = torch.sub(left, right).abs_()
    most = float(error.max())
    if not most < float("inf"):
        return None
    bound = left.abs().mul_(rtol).add_(atol).mul_(1 - 1e-5)
    return most if bool((error <= bound).all()) else None


def _slice(
    one: torch.Tensor, other: torch.Tensor, atol: float, rtol: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(outside of the bound, absolute error, how far outside) of one slice."""
    if not (one.is_floating_point() or one.is_complex()):
        outside = one != other
        error = (one.to(torch.float64) - other.to(torch.float64)).abs()
        return outside, error, outside.to(torch.float64) * (1 + error)
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.to(wide), other.to(wide)
    error = (one - other).abs()
    # Equal infinities have a NaN difference; they are the one case in which equality decides.
    error = torch.where(one == other, torch.zeros_like(error), error)
    bound = atol + rtol * one.abs()
    # Written so that a NaN on either side is outside: a comparison with NaN is false.
    outside = ~(error <= bound) | (torch.isinf(one) & (one != other))
    badness = torch.where(outside, torch.nan_to_num(error - bound, nan=float("inf"), posinf=float("inf")), -1.0)
    return outside, error, badness


def _number(element: torch.Tensor) -> float:
    return float(element.abs()) if element.is_complex() else float(element)


def has_nan(tensor: torch.Tensor) -> bool:
    """Whether any element is NaN, looked at in slices."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    flat = tensor.detach().reshape(-1)
    return any(bool((one != one).any()) for _, one, _ in _slices(flat, flat))


def rms_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Root mean square of the difference over both's finite elements, over sqrt(2): the spread of independent draws."""
    total, count = 0.0, 0
    for _, left, right in _slices(one.detach().reshape(-1), other.detach().reshape(-1)):
        gap = _gap(left, right)
        finite = torch.isfinite(gap)
        total += float(torch.where(finite, gap, torch.zeros_like(gap)).square_().sum())
        count += int(finite.sum())
    return (total / count / 2) ** 0.5 if count else 0.0


def max_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest absolute difference over both's finite elements."""
    most = 0.0
    for _, left, right in _slices(one.detach().reshape(-1), other.detach().reshape(-1)):
        gap = _gap(left, right)
        largest = float(gap.max())
        if not largest < float("inf"):
            largest = float(torch.where(torch.isfinite(gap), gap, torch.zeros_like(gap)).max())
        most = max(most, largest)
    return most


def _gap(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if left.is_complex():
        return (left - right).abs().to(torch.float64)
    return (left.to(torch.float64) - right.to(torch.float64)).abs_()


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contiguous tensors hold the same bytes; NaN equals itself here."""
    left, right = one.detach().reshape(-1).view(torch.uint8), other.detach().reshape(-1).view(torch.uint8)
    size = left.numel() // 8 * 8  # compared eight bytes at a time, which is eight times as fast on a CPU
    return torch.equal(left[:size].view(torch.int64), right[:size].view(torch.int64)) and torch.equal(left[size:], right[size:])
