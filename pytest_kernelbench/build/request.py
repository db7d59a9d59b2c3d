"""What a candidate asks to be built: sources and flags, checked, and the key that its binary is cached under."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SCHEMA = 1
"""Part of every key; raised when the way of building changes."""

_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_FILE = re.compile(r"[\w][\w.+-]*", re.ASCII)
_SUFFIXES = (".cpp", ".cc", ".cxx", ".c", ".cu")
# Flags that would make the compiler, which runs outside of the worker, load code, or write or read where it should not.
_REFUSED = re.compile(
    r"-fplugin|-wrapper|--?specs|-B|-ccbin|--compiler-bindir|-o$|-o=|--output|@|-save-temps|--keep|--options-file|-optf|-dumpdir"
)
_HEADERS = (".h", ".hpp", ".cuh", ".hxx", ".inl", ".inc")


class BadRequest(ValueError):
    """Something that no compiler should be run on; the message is one line."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One extension: its module name, its sources and flags."""

    name: str
    sources: tuple[tuple[str, str], ...]
    """(file name, text), with the suffix that says which compiler it goes to."""
    cflags: tuple[str, ...] = ()
    cuda_cflags: tuple[str, ...] = ()
    ldflags: tuple[str, ...] = ()
    include_paths: tuple[str, ...] = ()
    with_cuda: bool = False

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Request:
        """A worker's request, checked.

        Raises:
            BadRequest: says what is not accepted.
        """
        name = message["name"]
        if not _NAME.fullmatch(name) or len(name) > 200:
            raise BadRequest(f"extension name {name[:60]!r} is no identifier, which a Python module needs")
        sources = []
        for source in message["sources"]:
            file, text = source.get("file"), source.get("text")
            if not isinstance(file, str) or not isinstance(text, str) or not _FILE.fullmatch(file):
                raise BadRequest(f"source file name {str(file)[:60]!r} is not accepted")
            if not file.endswith(_SUFFIXES):
                raise BadRequest(f"source {file!r} has no suffix of C++ or CUDA ({', '.join(_SUFFIXES)})")
            sources.append((file, text))
        if not sources:
            raise BadRequest(f"extension {name!r} has no sources")
        if len({Path(file).name for file, _ in sources}) != len(sources):
            raise BadRequest(f"extension {name!r} has two sources of the same file name")
        lists: dict[str, tuple[str, ...]] = {}
        for field in ("cflags", "cuda_cflags", "ldflags", "include_paths"):
            flags = tuple(flag.strip() for flag in message[field] if flag.strip())
            for flag in flags:
                if field != "include_paths" and _REFUSED.match(flag):
                    raise BadRequest(f"compiler flag {flag[:60]!r} is not accepted: it loads code or writes elsewhere")
            lists[field] = flags
        return cls(name=name, sources=tuple(sources), with_cuda=message["with_cuda"], **lists)

    def key(self, toolchain: Sequence[str]) -> str:
        """SHA-256 over everything that the binary depends on; `toolchain` names versions, ABI and architecture."""
        digest = hashlib.sha256()
        parts = [SCHEMA, dataclasses.astuple(self), list(toolchain), [_folder_digest(path) for path in self.include_paths]]
        digest.update(json.dumps(parts).encode())
        return digest.hexdigest()


def _folder_digest(folder: str) -> str:
    """Digest of the headers below an include folder that a candidate names, so that an edited header is a miss."""
    digest = hashlib.sha256()
    root = Path(folder)
    for path in sorted(root.rglob("*"))[:5000]:
        if path.suffix in _HEADERS and path.is_file():
            digest.update(str(path.relative_to(root)).encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
