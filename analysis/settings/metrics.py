"""The latencies that gates and objectives may name, and what a reader calls them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from analysis.records.requests import METRICS

# ITL pools the gaps of all requests, so that a share of it is one of gaps; the others have one value a request.
JUDGED_METRICS: Final = (*METRICS, "itl")
METRIC_NAMES: Final[Mapping[str, str]] = {
    "ttft": "TTFT",
    "e2e": "E2E",
    "tpot": "TPOT",
    "itl": "ITL",
    "max_itl": "max ITL",
}


def quantile_label(metric: str, quantile: float) -> str:
    """What a reader calls the quantile: "p99 TTFT" for ("ttft", 0.99)."""
    return f"p{100.0 * quantile:.10g} {METRIC_NAMES.get(metric, metric)}"
