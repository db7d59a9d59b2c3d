"""Faults that are neither a candidate's nor a problem's."""

from __future__ import annotations


class EnvironmentFault(RuntimeError):
    """The machine is at fault; the message is one line that says what is wrong and what to do."""
