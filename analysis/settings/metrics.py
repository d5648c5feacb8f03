"""The latencies that gates and objectives may name, and what a reader calls them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from tailgate.analysis.records.requests import METRICS
from tailgate.analysis.records.tables import RecordError

# ITL pools the gaps of all requests, so that a share of it is one of gaps; the others have one value a request.
JUDGED_METRICS: Final = (*METRICS, "itl")
METRIC_NAMES: Final[Mapping[str, str]] = {
    "ttft": "TTFT",
    "e2e": "E2E",
    "tpot": "TPOT",
    "itl": "ITL",
    "max_itl": "max ITL",
}
_QUANTILE_OF = re.compile(rf"\bp(\d+)(?:_(\d+))?_({'|'.join(METRIC_NAMES)})(?:_ms)?\b")

# What a request for an embedding has: nothing streams: it has one latency and no tokens.
EMBED: Final = "embed"
EMBED_METRICS: Final = ("e2e",)


def task_of(experiment: Mapping[str, Any]) -> str:
    """Return the task of an experiment's arms: "embed", or by default "generate"."""
    model = experiment.get("model")
    return EMBED if isinstance(model, Mapping) and model.get("task") == EMBED else "generate"


def check_defined(metrics: Iterable[str], task: str, where: str) -> None:
    """Check that requests of this task have all the metrics. The RecordError says `where` the metric is named."""
    for metric in metrics:
        if task == EMBED and metric in METRIC_NAMES and metric not in EMBED_METRICS:
            raise RecordError(
                f'{where} names {metric}, and an embedding has no tokens: with model.task = "embed" use '
                f"{' or '.join(EMBED_METRICS)}"
            )


def quantile_label(metric: str, quantile: float) -> str:
    """Return the quantile's label: "p99 TTFT" for ("ttft", 0.99)."""
    return f"p{100.0 * quantile:.10g} {METRIC_NAMES.get(metric, metric)}"


def gate_label(gate: str) -> str:
    """Return the label of the gate or metric: "SLO p99 TTFT" for "slo p99_ttft_ms"."""
    label = _QUANTILE_OF.sub(lambda key: f"p{key[1]}{'.' + key[2] if key[2] else ''} {METRIC_NAMES[key[3]]}", gate)
    for raw, name in (("noninferiority", "non-inferiority"), ("error_pct", "error rate"), ("slo", "SLO")):
        label = re.sub(rf"\b{raw}\b", name, label)
    return label
