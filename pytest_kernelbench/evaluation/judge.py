"""The judge: the trusted child that holds the problem, the secret seeds, the inputs, the weights and the expected outputs.

One per device, kept for all candidates of a problem. It never sees a candidate. It answers pytest's questions with findings; the
verdict is made of them in pytest. Expected outputs and private inputs lie in this process's own memory only; what is shared with
the worker (`tensors.Staging`) holds the worker's copy of the inputs and what it returned.
"""

from __future__ import annotations

import copy
import gc
import socket
from collections.abc import Callable
from typing import Any

import torch

from ..timing.clocks import clock_for
from ..timing.sampling import run_block
from . import compare, tensors
from .device import seed_all, start_device
from .inputs import DTYPES, ProblemFault, ProblemFile, SecretSeeds, map_tensors, one_line, tensors_of
from .protocol import Channel, ChannelClosed
from .tolerance import Tolerance

FP64_LIMIT_NS = 150_000_000
"""A reference slower than this is not run again in fp64, which can take 60 times as long on a GPU."""


def serve(channel_fd: int, fds: list[int], rungs: list[str]) -> None:
    """Answer until the channel closes. `fds[0]` is the shared memory of the host kinds of staging."""
    channel = Channel(socket.socket(fileno=channel_fd))
    judge = Judge(fds[0] if fds else -1)
    while True:
        try:
            message = channel.receive()
        except ChannelClosed:
            return
        try:
            answer = getattr(judge, f"on_{message.pop('op')}")(**message)
        except ProblemFault as fault:
            answer = {"op": "fault", "kind": "problem", "message": str(fault)}
        except torch.OutOfMemoryError as error:
            answer = {"op": "fault", "kind": "memory", "message": one_line(error)}
        except tensors.CudaError as error:
            answer = {"op": "fault", "kind": "cuda", "message": str(error)}
        channel.send(answer)


class _Slot:
    """One place in the staging area with what the judge alone knows of it."""

    def __init__(self) -> None:
        self.inputs: list[Any] = []
        self.seed = 0
        self.expected: Any = None
        self.mutated: list[torch.Tensor] | None = None
        """The input tensors as the reference leaves them, where it changes any."""


class Judge:
    """The answers, one `on_` method per question; each gives the answer's plain data."""

    def __init__(self, memory_fd: int) -> None:
        self._memory_fd = memory_fd
        self._seeds = SecretSeeds()
        self._slots: list[_Slot] = []
        self._staging: tensors.Staging | None = None
        self._clock: Any = None

    # ---- the problem ----

    def on_open(
        self,
        *,
        path: str,
        source: str,
        size: str,
        dtype: str | None,
        device: str,
        threads: int,
        tf32: bool | None,
        eval_mode: bool,
        tolerance: dict[str, Any],
    ) -> dict[str, Any]:
        """Load the problem and test the reference against itself.

        Gives what a worker must be told (constructor arguments, seeds, modes) and how large a place in the staging area is.
        """
        self._device = start_device(device, threads, tf32)
        if device == "cuda":
            self._clock = clock_for(self._device)
        self._problem = ProblemFile(source, path, size)
        self._dtype = DTYPES[dtype] if dtype else None
        supported = self._problem.dtypes
        if dtype and supported is not None and dtype not in supported:
            raise ProblemFault(f"the problem's DTYPES are {', '.join(supported)}; {dtype} is not one of them")
        self._eval_mode = eval_mode
        self._init_inputs = self._problem.init_inputs()
        self.on_reweigh()
        self._check_reference(tolerance)
        return {
            "op": "opened",
            "init": _init_tree(self._init_inputs),
            "in_room": self._in_room,
            "out_room": self._out_room,
            "state_room": self._state_room,
            "call_ns": self._call_ns,
            "free_bytes": self._free_bytes(),
            "tolerance": self._words,
            "rtol": self._tolerance.rtol,
            "atol": self._bounds[0] if self._bounds else 0.0,
            "environment": self._environment(),
            "smoke": self._problem.has_sizes,
        }

    def on_peek(self, *, path: str, source: str, size: str) -> dict[str, Any]:
        """The constructor's arguments only, for the build stage, which has no device."""
        problem = ProblemFile(source, path, size)
        return {"op": "peeked", "init": _init_tree(problem.init_inputs())}

    def on_reweigh(self) -> dict[str, Any]:
        """A new model under a new weight seed, which the worker is told, since it constructs its own under the same one."""
        self._model: Any = None
        self._weight_seed = self._seeds()
        torch.manual_seed(self._weight_seed)
        model = self._problem.model(list(self._init_inputs)).to(device=self._device, dtype=self._dtype)
        self._model = model.train(not self._eval_mode)
        state = self._model.state_dict()
        self._state_room = sum(tensors.aligned(item.numel() * item.element_size()) for item in state.values())
        return {"op": "reweighed", "seed": self._weight_seed}

    def _check_reference(self, tolerance: dict[str, Any]) -> None:
        """The reference against itself: runs, gives tensors, no NaN, the same twice, moves, is not met by a null answer."""
        first = self._draw()
        before = [tensor.clone() for tensor in tensors_of(first.inputs)]
        out = self._run(first.inputs, first.seed)
        tree, leaves = tensors.describe(out)
        if not leaves:
            raise ProblemFault("the reference gives no tensor")
        if any(leaf.numel() == 0 for leaf in leaves):
            raise ProblemFault("the reference gives an empty tensor")
        self._expected_tree = tree
        changed = [
            number
            for number, (one, other) in enumerate(zip(before, tensors_of(first.inputs), strict=True))
            if not compare.same_bytes(one, other)
        ]
        self._mutates = set(changed)
        originals = iter(before)
        first.inputs = [map_tensors(value, lambda _: next(originals)) for value in first.inputs]
        leaves = [leaf.detach().clone() if self._mutates else leaf for leaf in leaves]
        if any(compare.has_nan(leaf) for leaf in leaves):
            raise ProblemFault("the reference gives NaN")
        in_tree, _ = tensors.describe(first.inputs)
        self._in_room, self._out_room = tensors.layout(in_tree), tensors.layout(copy.deepcopy(tree))
        clock = clock_for(self._device) if self._clock is None else self._clock
        self._clock = clock
        again: list[Any] = []
        inputs = self._copy_inputs(first.inputs) if self._mutates else first.inputs
        times = run_block(
            clock,
            [lambda: self._model(*inputs)],
            lambda _: seed_all(first.seed),
            lambda _, value: again.append(value),
        )
        self._call_ns = times[0][0]
        second = self._draw()
        other_tree, other = tensors.describe(self._run(self._copy_inputs(second.inputs), second.seed))
        if compare.structure_fault(tree, other_tree) is not None:
            raise ProblemFault(f"two draws give different structures: {compare.structure_fault(tree, other_tree)}")
        self._set_bounds(tolerance, leaves, other, self._rounding(first, leaves))
        repeated = tensors.describe(again[0])[1]
        for number, (one, two) in enumerate(zip(leaves, repeated, strict=True)):
            difference = compare.compare(one, two.detach(), self._bounds[number], self._tolerance.rtol)
            if difference.bad:
                raise ProblemFault(
                    f"the reference is not deterministic: the same input twice differs by {difference.max_error:.3g} "
                    f"in {difference.bad} of {difference.total} elements of output {number}"
                )
        self._refuse_null_answers(leaves, other, tensors_of(second.inputs))

    def _set_bounds(
        self, tolerance: dict[str, Any], one: list[torch.Tensor], other: list[torch.Tensor], rounding: list[float | None]
    ) -> None:
        """The bound of each output; the words are those of output 0."""
        dtype = next((tensors.dtype_name(leaf.dtype) for leaf in one if leaf.is_floating_point()), "int64")
        try:
            self._tolerance = Tolerance.resolve(tolerance, self._problem.tolerance, dtype)
        except ValueError as error:
            raise ProblemFault(str(error)) from None
        self._bounds: list[float] = []
        self._words = ""
        for number, leaf in enumerate(one):
            if not (leaf.is_floating_point() or leaf.is_complex()):
                bound, words = 0.0, "equal (integers)"
            else:
                bound, words = self._tolerance.bound(compare.rms_difference(leaf, other[number]), rounding[number])
            self._bounds.append(bound)
            self._words = self._words or words

    def _rounding(self, slot: _Slot, leaves: list[torch.Tensor]) -> list[float | None]:
        """Largest error of each output against the same model in fp64; None where that cannot be had.

        It covers TF32 in convolutions (torch's default) and long sums alike, by measuring instead of guessing.
        """
        nothing: list[float | None] = [None] * len(leaves)
        if self._device.type == "cuda" and self._call_ns > FP64_LIMIT_NS:
            return nothing
        if not any(leaf.is_floating_point() for leaf in leaves):
            return nothing
        try:
            twin = copy.deepcopy(self._model).double()
            inputs = [map_tensors(value, lambda item: item.double() if item.is_floating_point() else item.clone()) for value in slot.inputs]
            seed_all(slot.seed)
            with torch.no_grad():
                exact = tensors.describe(twin(*inputs))[1]
            if [item.shape for item in exact] != [item.shape for item in leaves]:
                return nothing
            return [
                compare.max_difference(one, other) if other.is_floating_point() else None
                for one, other in zip(exact, leaves, strict=True)
            ]
        except Exception:  # no fp64 kernel, no memory, a dtype spelled out in the model: then without
            return nothing
        finally:
            self._trim()

    def _refuse_null_answers(self, one: list[torch.Tensor], other: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        """A problem whose outputs are met by an answer that does no work measures nothing.

        `one` are the outputs of a first draw, `other` and `inputs` those of a second; the answers for the second are made
        from the first alone, or pass an input through.
        """
        answers: dict[str, Callable[[int], torch.Tensor | None]] = {
            "zeros": lambda number: torch.zeros_like(other[number]),
            "one constant": lambda number: _constant(one[number], other[number]),
            "the last draw's output": lambda number: one[number],
            "its first input": lambda number: _passed_through(inputs, other[number]),
        }
        for name, make in answers.items():
            met = True
            for number, expected in enumerate(other):
                answer = make(number)
                if answer is None or _differs(expected, answer, self._bounds[number], self._tolerance.rtol):
                    met = False
                    break
            if met:
                raise ProblemFault(f"a null answer would pass: {name} is right within the tolerance ({self._words})")

    # ---- staging and calls ----

    def on_stage(self, *, slots: int, kind: str, size: int) -> dict[str, Any]:
        """Open a staging area of `size` bytes with `slots` places."""
        self.on_park()
        if kind == "cuda_ipc":
            self._staging = tensors.ipc_staging(size, self._device)
        else:
            self._staging = tensors.host_staging(kind, self._memory_fd, size, self._device)
        self._slots = [_Slot() for _ in range(slots)]
        return {"op": "staged", "handle": self._staging.handle}

    def on_weights(self, *, state: list[dict[str, Any]]) -> dict[str, Any]:
        """Write the reference's weights that match the candidate's by name, shape and dtype; say which and where."""
        assert self._staging is not None
        ours = self._model.state_dict()
        entries, unmatched, offset = [], [], 0
        for item in state:
            value = ours.get(item["name"])
            if value is None or list(value.shape) != item["shape"] or tensors.dtype_name(value.dtype) != item["dtype"]:
                unmatched.append(item["name"])
                continue
            if value.numel() == 0:
                continue
            self._staging.put(offset, value)
            entries.append({"name": item["name"], "shape": item["shape"], "dtype": item["dtype"], "offset": offset})
            offset += tensors.aligned(value.numel() * value.element_size())
        self._sync()
        names = {item["name"] for item in state}
        left = [name for name in ours if name not in names]
        return {"op": "weights", "entries": entries, "unmatched": unmatched, "left": left, "ours": len(ours)}

    def on_fill(self, *, slots: list[int]) -> dict[str, Any]:
        """Draw contents that nobody has seen into the given places."""
        calls = []
        for number in slots:
            drawn = self._draw()
            self._slots[number] = drawn
            tree, leaves = tensors.describe(drawn.inputs)
            room = tensors.layout(tree, self._in_offset(number))
            if room - self._in_offset(number) > self._in_room:
                raise ProblemFault("get_inputs() gives larger tensors than in its first draw")
            assert self._staging is not None
            for leaf, value in zip(tensors.tensor_leaves(tree), leaves, strict=True):
                self._staging.put(leaf["offset"], value)
            calls.append(
                {"inputs": tree, "seed": drawn.seed, "out": self._in_offset(number) + self._in_room, "room": self._out_room}
            )
        self._sync()
        return {"op": "filled", "calls": calls}

    def on_reference(self, *, slots: list[int], spin_ns: int) -> dict[str, Any]:
        """Run the reference on the places' contents, timed as a candidate is, and keep what it gives."""
        places = [self._slots[number] for number in slots]
        arguments = [self._copy_inputs(place.inputs) if self._mutates else place.inputs for place in places]

        def keep(number: int, value: Any) -> None:
            places[number].expected = value
            if self._mutates:
                places[number].mutated = tensors_of(arguments[number])

        try:
            times = run_block(
                self._clock,
                [lambda given=given: self._model(*given) for given in arguments],
                lambda number: seed_all(places[number].seed),
                keep,
                spin_ns,
            )
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise ProblemFault(f"the reference raises {one_line(error)}") from None
        return {"op": "reference", "times": [list(item) for item in times]}

    def on_compare(self, *, slots: list[int], outputs: list[dict[str, Any]], written: list[int]) -> dict[str, Any]:
        """Compare what the worker left in the places with what is expected; the first finding ends it."""
        most = 0.0
        for turn, number in enumerate(slots):
            finding, error = self._compare(number, outputs[turn], written[turn])
            most = max(most, error)
            if finding is not None:
                return {"op": "compared", "max_error": most, "right": turn, "finding": finding}
        return {"op": "compared", "max_error": most, "right": len(slots), "finding": None}

    def _compare(self, number: int, got: dict[str, Any], written: int) -> tuple[dict[str, Any] | None, float]:
        assert self._staging is not None
        place = self._slots[number]
        expected, leaves = tensors.describe(place.expected)
        fault = compare.structure_fault(expected, got)
        if fault is not None:
            return {"kind": "wrong_structure", "message": fault, "details": []}, 0.0
        layout = copy.deepcopy(expected)
        start = self._in_offset(number) + self._in_room
        if written != tensors.layout(layout, start) - start:
            return {"kind": "protocol", "message": "its outputs have another size than their structure says", "details": []}, 0.0
        most = 0.0
        for index, (leaf, value) in enumerate(zip(tensors.tensor_leaves(layout), leaves, strict=True)):
            if compare.has_nan(value):
                raise ProblemFault(f"the reference gives NaN in output {index} for one of its draws")
            # Copied out first: whatever the worker may still write must not change what is being compared.
            raw = self._staging.raw(leaf["offset"], leaf).to(self._device, copy=True)
            difference = compare.compare(value, raw, self._bounds[index], self._tolerance.rtol)
            most = max(most, difference.max_error)
            if difference.bad:
                return self._wrong(index, value, difference), most
        scalars = _scalar_fault(expected, got, self._bounds[0] if self._bounds else 0.0, self._tolerance.rtol)
        if scalars is not None:
            return {"kind": "wrong_values", "message": scalars, "details": []}, most
        return self._input_fault(number), most

    def _wrong(self, index: int, expected: torch.Tensor, difference: compare.Difference) -> dict[str, Any]:
        share = f"{difference.bad} of {difference.total} elements differ"
        place = ", ".join(map(str, difference.worst))
        kind = f" ({difference.note})" if difference.note else ""
        return {
            "kind": "wrong_values",
            "message": f"{share}{kind}, by up to {difference.max_error:.3g} where {self._bounds[index]:.3g} + "
            f"{self._tolerance.rtol:g} x |expected| is allowed",
            "details": [
                f"output {index}, shape {tuple(expected.shape)} {tensors.dtype_name(expected.dtype)}",
                f"worst element [{place}]: expected {difference.expected:.6g}, got {difference.got:.6g}",
                f"tolerance: {self._words}",
            ],
        }

    def _input_fault(self, number: int) -> dict[str, Any] | None:
        """Whether the candidate changed an input that the reference leaves alone, or not as the reference does."""
        assert self._staging is not None
        place = self._slots[number]
        tree, leaves = tensors.describe(place.inputs)
        tensors.layout(tree, self._in_offset(number))
        for index, (leaf, value) in enumerate(zip(tensors.tensor_leaves(tree), leaves, strict=True)):
            raw = self._staging.raw(leaf["offset"], leaf)
            now = raw if raw.device == value.device else raw.to(value.device)
            if index in self._mutates:
                assert place.mutated is not None
                default = self._tolerance.rtol
                if compare.compare(place.mutated[index], now, self._bounds[0], default).bad:
                    message = f"input {index} is left otherwise than the reference leaves it"
                    return {"kind": "wrong_values", "message": message, "details": []}
            elif not compare.same_bytes(value, now):
                message = f"it changed its input {index}, which the reference leaves alone"
                return {"kind": "wrong_values", "message": message, "details": ["write to a tensor of its own instead"]}
        return None

    def on_park(self) -> dict[str, Any]:
        """Give back all memory that a run needs; the model and the bounds stay."""
        self._slots = []
        if self._staging is not None:
            self._staging.close()
            self._staging = None
        self._trim()
        return {"op": "parked"}

    # ---- small things ----

    def _draw(self) -> _Slot:
        slot = _Slot()
        slot.inputs = self._problem.inputs(self._device, self._dtype, self._seeds())
        slot.seed = self._seeds()
        return slot

    def _run(self, inputs: list[Any], seed: int) -> Any:
        seed_all(seed)
        try:
            with torch.no_grad():
                return self._model(*inputs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise ProblemFault(f"the reference raises {one_line(error)}") from None

    def _copy_inputs(self, inputs: list[Any]) -> list[Any]:
        return [map_tensors(value, lambda tensor: tensor.clone()) for value in inputs]

    def _in_offset(self, number: int) -> int:
        return number * (self._in_room + self._out_room)

    def _sync(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _trim(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _free_bytes(self) -> int:
        if self._device.type == "cuda":
            self._trim()
            return int(torch.cuda.mem_get_info()[0])
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))

    def _environment(self) -> dict[str, str]:
        facts = {"torch": torch.__version__, "threads": str(torch.get_num_threads())}
        if self._device.type == "cuda":
            properties = torch.cuda.get_device_properties(self._device)
            facts |= {
                "gpu": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "cuda": str(torch.version.cuda),
                "cudnn": str(torch.backends.cudnn.version()),
                "tf32_matmul": str(torch.backends.cuda.matmul.allow_tf32),
                "tf32_conv": str(torch.backends.cudnn.allow_tf32),
            }
        return facts


def _differs(expected: torch.Tensor, answer: torch.Tensor, atol: float, rtol: float) -> bool:
    return bool(compare.compare(expected, answer, atol, rtol, all_errors=False).bad)


def _init_tree(values: list[Any]) -> dict[str, Any]:
    """Constructor arguments as plain data.

    Raises:
        ProblemFault: for arguments that have no plain form.
    """
    tree, found = tensors.describe(values)
    try:
        if found:
            raise ValueError("a tensor among the constructor's arguments cannot be handed to a candidate")
        tensors.restore(tree, lambda leaf: torch.empty(0))
    except ValueError as error:
        raise ProblemFault(f"get_init_inputs(): {error}") from None
    return tree


def _constant(one: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The middle of what a first draw gave, everywhere."""
    if one.is_floating_point():
        finite = one[torch.isfinite(one)].to(torch.float64)
        return torch.full_like(like, float(finite.mean()) if finite.numel() else 0.0)
    return torch.full_like(like, one.reshape(-1)[0].item())


def _passed_through(inputs: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor | None:
    for value in inputs:
        if value.shape == like.shape and value.dtype == like.dtype:
            return value
    return None


def _scalar_fault(expected: dict[str, Any], got: dict[str, Any], atol: float, rtol: float) -> str | None:
    """Python floats beside tensors, under the same bound."""
    if expected["t"] == "float":
        want, have = float.fromhex(expected["v"]), float.fromhex(got["v"])
        if want != have and not abs(want - have) <= atol + rtol * abs(want):
            return f"a number is {have:.6g}, {want:.6g} is expected"
        return None
    for one, other in zip(expected.get("items", ()), got.get("items", ()), strict=True):
        fault = _scalar_fault(one, other, atol, rtol)
        if fault is not None:
            return fault
    return None
