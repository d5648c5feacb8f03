"""Compiles that go on at replicas which serve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from analysis.judging.alarms import ServedCompile


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderWay:
    """What a replica that serves has been compiling since `start_ns`. Which requests wait, its event says at its end.

    `kind` is compile, whichever it turns out to be, or graph_capture.
    """

    arm: str
    replica: str
    kind: str
    start_ns: int
    shape: str = ""
    batch_id: int = -1

    def seconds(self, at_ns: int) -> float:
        """How long it has gone on."""
        return max(0.0, (at_ns - self.start_ns) / 1e9)

    def facts(self, at_ns: int) -> dict[str, Any]:
        """What trial.json says of a compile whose end nobody saw."""
        return {"start_ns": self.start_ns, "seconds": self.seconds(at_ns), "shape": self.shape}

    def text(self, at_ns: int) -> str:
        """Such as "compiling for 12 s (prefill 2x64)"."""
        return f"compiling for {self.seconds(at_ns):.0f} s" + (f" ({self.shape})" if self.shape else "")

    def so_far(self, at_ns: int) -> ServedCompile:
        """The part of it that has passed."""
        return ServedCompile(
            arm=self.arm,
            replica=self.replica,
            kind=self.kind,
            seconds=self.seconds(at_ns),
            end_ns=at_ns,
            shape=self.shape,
            over=False,
        )
