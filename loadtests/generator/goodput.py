"""How many requests met every limit, counted as they end. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loadtests.generator.record import RequestRecord


@dataclass(slots=True)
class Tally:
    """Requests of one arm that ended, and those that were good."""

    requests: int = 0
    good: int = 0


@dataclass(slots=True)
class Goodput:
    """Counts by arm under `limits` (ms for each request, by metric)."""

    limits: Mapping[str, float]
    arms: dict[str, Tally] = field(default_factory=dict)
    first_ns: int = 0
    last_ns: int = 0

    def add(self, record: RequestRecord) -> None:
        """Count a request that ended by itself."""
        tally = self.arms.setdefault(record.arm or "", Tally())
        tally.requests += 1
        tally.good += self.is_good(record)
        self._span(record.scheduled_ns, record.end_ns)

    def is_good(self, record: RequestRecord) -> bool:
        """Whether it was answered within every limit. What one token leaves undefined counts as met."""
        return record.ok and all(
            (value := _value(record, name)) is None or value <= limit for name, limit in self.limits.items()
        )

    def merge(self, counts: Mapping[str, Any]) -> None:
        """Add what another load process counted; see `take`."""
        for arm, (requests, good) in counts["arms"].items():
            tally = self.arms.setdefault(arm, Tally())
            tally.requests += requests
            tally.good += good
        if counts["last_ns"]:
            self._span(counts["first_ns"], counts["last_ns"])

    def take(self) -> dict[str, Any]:
        """The counts since the last call, to be sent to the process that sums them up."""
        counts = {
            "arms": {arm: (tally.requests, tally.good) for arm, tally in self.arms.items()},
            "first_ns": self.first_ns,
            "last_ns": self.last_ns,
        }
        self.arms = {}
        return counts

    def lines(self) -> list[str]:
        """What is said at the end, a line for each arm."""
        seconds = (self.last_ns - self.first_ns) / 1e9
        named = ", ".join(f"{name} {limit:g} ms" for name, limit in self.limits.items())
        lines = []
        for arm, tally in sorted(self.arms.items()):
            per_s = tally.good / seconds if seconds > 0 else 0.0
            whose = f" of {arm}" if arm else " where no arm answered" if len(self.arms) > 1 else ""
            lines.append(
                f"goodput{whose}: {per_s:.4g} requests/s; {tally.good} of {tally.requests} requests "
                f"({100 * tally.good / tally.requests:.4g} %) within {named}, in {seconds:.4g} s"
            )
        return lines or [f"goodput: no request ended; limits {named}"]

    def _span(self, first_ns: int, last_ns: int) -> None:
        self.first_ns = min(self.first_ns, first_ns) if self.first_ns else first_ns
        self.last_ns = max(self.last_ns, last_ns)


def _value(record: RequestRecord, metric: str) -> float | None:
    """The metric in ms; None where it is undefined for an answer of one token."""
    if metric == "e2e":
        return record.e2e_ms
    ttft_ms = record.ttft_ms
    if metric == "ttft":
        return float("inf") if ttft_ms is None else ttft_ms
    if record.output_tokens is None or record.token_ns is None or record.output_tokens < 2 or ttft_ms is None:
        return None
    if metric == "tpot":
        return (record.e2e_ms - ttft_ms) / (record.output_tokens - 1)
    gaps = record.token_ns[1:] - record.token_ns[:-1]
    return float(gaps.max()) / 1e6 if len(gaps) else None
