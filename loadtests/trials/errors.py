"""Why a run ends before its time."""

from __future__ import annotations


class RunError(RuntimeError):
    """The run itself failed. The message is one line that names the log."""


class StopRequestedError(Exception):
    """The user asked the run to stop."""
