"""Why a run, or a trial of it, ends before its time."""

from __future__ import annotations


class RunError(RuntimeError):
    """The run itself failed. The message is one line that names the log."""


class StartError(RunError):
    """A replica of `arm` did not become ready."""

    def __init__(self, arm: str, message: str) -> None:
        super().__init__(message)
        self.arm = arm


class StopRequestedError(Exception):
    """The user asked the run to stop."""


class BudgetSpentError(Exception):
    """A search has no time left."""
