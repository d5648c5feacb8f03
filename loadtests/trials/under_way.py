"""Compiles that go on at replicas which serve, and which of them have gone on for too long."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from analysis.run.spikes import RECOMPILE_KINDS


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


def stalls(compiles: Iterable[UnderWay], *, arm: str, limit_s: float, at_ns: int) -> list[tuple[int, str]]:
    """Those of the arm that have gone on for `limit_s`: when they had, and what to say of each.

    Of the kinds that count as a recompile once they have ended, so that the same compile is there before and after.
    """
    found = []
    for compile in compiles:
        reached_ns = compile.start_ns + round(limit_s * 1e9)
        if compile.arm == arm and compile.kind in RECOMPILE_KINDS and reached_ns <= at_ns:
            shape = f" for {compile.shape}" if compile.shape else ""
            text = f"{arm} has been compiling for {compile.seconds(at_ns):.1f} s while serving{shape}"
            found.append((reached_ns, text))
    return found
