"""What a compiler's log says: the first error, and whether the machine rather than the source is at fault."""

from __future__ import annotations

import re

_ERRORS = (
    re.compile(r"^(?:.*[:(]\d+[:)].*)?\b(?:fatal )?error\b\s*(?:#\d+\S*)?:.*", re.IGNORECASE),
    re.compile(r".*undefined reference to .*|.*cannot find -l\S+.*|.*multiple definition of .*"),
    re.compile(r"^(?:ptxas|nvlink|nvcc|ld|collect2|cc1plus|cudafe\+\+)\b.*(?:error|fatal).*", re.IGNORECASE),
)
_MACHINE = (
    re.compile(r"no space left on device", re.IGNORECASE),
    re.compile(r"killed signal terminated program|internal compiler error: killed|\bKilled\b", re.IGNORECASE),
    re.compile(r"cannot execute|error while loading shared libraries|unsupported GNU version|virtual memory exhausted", re.I),
)


def first_error(log: str) -> str:
    """The first line that states an error, without the build folder's path; the last line where none does."""
    lines = [line.strip() for line in log.splitlines() if line.strip() and not line.startswith("$ ")]
    for pattern in _ERRORS:
        for line in lines:
            if pattern.match(line):
                return line[:400]
    return lines[-1][:400] if lines else "the compiler failed without a word"


def machine_fault(log: str) -> str | None:
    """The line that shows the machine to be at fault (disk full, compiler killed, broken installation), if there is one."""
    for line in log.splitlines():
        if not line.startswith("$ ") and any(pattern.search(line) for pattern in _MACHINE):
            return line.strip()[:300]
    return None
