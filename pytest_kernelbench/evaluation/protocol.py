"""Frames between pytest and its children: four length bytes, then JSON; bounded, schema-checked, never pickled.

The fork server's control channel is a sequenced-packet socket instead (one packet, one message), since it carries file
descriptors. What a worker sends is data: raw claims that pytest bounds and the judge compares, never a verdict.
"""

from __future__ import annotations

import json
import re
import select
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

MAX_FRAME = 8 << 20
"""Largest frame in bytes that is read from anybody; a build request with its sources is the largest honest one."""

_HEADER = struct.Struct("!I")


class ChannelClosed(ConnectionError):
    """The other side is gone."""


class ProtocolError(ValueError):
    """The other side sent what is no message; the text says what."""


def encode(message: Mapping[str, Any]) -> bytes:
    """One frame.

    Raises:
        ValueError: for a message with NaN or infinity, or one larger than `MAX_FRAME`.
    """
    body = json.dumps(message, allow_nan=False, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME:
        raise ValueError(f"message of {len(body)} bytes is larger than the limit of {MAX_FRAME}")
    return _HEADER.pack(len(body)) + body


def decode(body: bytes) -> dict[str, Any]:
    """The message of a frame's body.

    Raises:
        ProtocolError: when it is not a JSON object of finite numbers.
    """
    try:
        message = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON: {str(error)[:80]}") from None
    if not isinstance(message, dict):
        raise ProtocolError(f"not a JSON object but a {type(message).__name__}")
    return message


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


class Channel:
    """A stream socket that carries frames. Not for several threads at once."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()

    @property
    def sock(self) -> socket.socket:
        return self._sock

    def send(self, message: Mapping[str, Any], timeout: float | None = None) -> None:
        """Raises ChannelClosed, or TimeoutError when the other side does not read within `timeout` seconds."""
        self._sock.settimeout(timeout)
        try:
            self._sock.sendall(encode(message))
        except TimeoutError:
            raise
        except OSError as error:
            raise ChannelClosed(str(error)) from None

    def receive(self, timeout: float | None = None) -> dict[str, Any]:
        """The next message.

        Raises:
            TimeoutError: when it did not arrive whole within `timeout` seconds.
            ChannelClosed, ProtocolError: see there.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        header = self._exactly(_HEADER.size, deadline)
        (size,) = _HEADER.unpack(header)
        if size > MAX_FRAME:
            raise ProtocolError(f"announces a frame of {size} bytes; the limit is {MAX_FRAME}")
        return decode(self._exactly(size, deadline))

    def _exactly(self, size: int, deadline: float | None) -> bytes:
        while len(self._buffer) < size:
            if deadline is not None:
                left = deadline - time.monotonic()
                if left <= 0 or not select.select([self._sock], [], [], left)[0]:
                    raise TimeoutError
            self._sock.settimeout(None)
            try:
                data = self._sock.recv(1 << 16)
            except OSError as error:
                raise ChannelClosed(str(error)) from None
            if not data:
                raise ChannelClosed("end of file")
            self._buffer += data
        body = bytes(self._buffer[:size])
        del self._buffer[:size]
        return body

    def close(self) -> None:
        self._sock.close()


# What a worker may answer. A field's spec is a type, (type, smallest, largest), [spec] for a list, or a mapping; `None` in a
# tuple of types allows null. Fields beyond these are refused, so that a schema change cannot pass unnoticed.
_TEXT = (str, 0, 1 << 16)
_NAME = (str, 0, 512)
_COUNT = (int, 0, 1 << 48)
_TREE = dict

WORKER_REPLIES: dict[str, dict[str, Any]] = {
    "ready": {"torch": _NAME, "device": _NAME, "threads": _COUNT, "isolation": [_NAME], "memory": _COUNT},
    "loaded": {"line": _COUNT},
    "constructed": {"state": [_TREE]},
    "done": {},
    "ran": {"calls": [_TREE]},
    "error": {"kind": _NAME, "message": _TEXT, "line": _COUNT, "trace": _TEXT, "call": _COUNT},
    "build": {
        "name": _NAME,
        "sources": [dict],
        "cflags": [_TEXT],
        "cuda_cflags": [_TEXT],
        "ldflags": [_TEXT],
        "include_paths": [_TEXT],
        "with_cuda": bool,
    },
}
WORKER_ERRORS = ("load", "construct", "runtime", "out_of_memory", "cuda", "signature")

CALL_FIELDS: dict[str, Any] = {
    "output": _TREE,
    "bytes": _COUNT,
    "device_ns": (int, 0, 1 << 50),
    "wall_ns": (int, 0, 1 << 50),
}


def check_reply(message: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    """Refuse a worker's message that is not one of the `allowed` kinds in its schema.

    Raises:
        ProtocolError: says what is wrong.
    """
    kind = message.get("op")
    if kind not in allowed:
        raise ProtocolError(f"answers {str(kind)[:40]!r} where {' or '.join(allowed)} is due")
    _check_fields({key: value for key, value in message.items() if key != "op"}, WORKER_REPLIES[str(kind)], str(kind))
    if kind == "ran":
        for call in message["calls"]:
            _check_fields(call, CALL_FIELDS, "call")


def _check_fields(value: Mapping[str, Any], schema: Mapping[str, Any], where: str) -> None:
    if value.keys() != schema.keys():
        odd = sorted(set(value) ^ set(schema))
        raise ProtocolError(f"{where} has other fields than it should: {', '.join(map(str, odd))[:80]}")
    for name, spec in schema.items():
        _check_value(value[name], spec, f"{where}.{name}")


def _check_value(value: Any, spec: Any, where: str) -> None:
    if isinstance(spec, list):
        if not isinstance(value, list) or len(value) > 100_000:
            raise ProtocolError(f"{where} is not a list of bounded length")
        for item in value:
            _check_value(item, spec[0], where)
        return
    kind, low, high = spec if isinstance(spec, tuple) else (spec, None, None)
    # bool is an int to isinstance; a claim of True nanoseconds is no number.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ProtocolError(f"{where} is a {type(value).__name__}, not a {kind.__name__}")
    if low is not None:
        amount = len(value) if kind is str else value
        if not low <= amount <= high:
            raise ProtocolError(f"{where} is out of bounds")


_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str, limit: int = 2000) -> str:
    """Text of a child made safe to print: no control characters or escapes, bounded to `limit` characters."""
    text = _CONTROL.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))
    return text if len(text) <= limit else text[: limit // 2] + "\n[...]\n" + text[-limit // 2 :]
