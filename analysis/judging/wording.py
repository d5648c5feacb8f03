"""How figures read in reasons and advice: digits, shares, lengths of time, lists of faults."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from analysis.nouns import counted
from analysis.records.plain_values import mapping, number, text_of
from analysis.settings.metrics import METRIC_NAMES

_QUANTILE_OF = re.compile(rf"\bp(\d+)(?:_(\d+))?_({'|'.join(METRIC_NAMES)})(?:_ms)?\b")


def gate_label(gate: str) -> str:
    """What a reader calls the gate or the metric: "SLO p99 TTFT" for "slo p99_ttft_ms"."""
    label = _QUANTILE_OF.sub(lambda key: f"p{key[1]}{'.' + key[2] if key[2] else ''} {METRIC_NAMES[key[3]]}", gate)
    for raw, name in (("noninferiority", "non-inferiority"), ("error_pct", "error rate"), ("slo", "SLO")):
        label = re.sub(rf"\b{raw}\b", name, label)
    return label


def digits(value: float, most: int = 3) -> str:
    """The number to `most` digits, and no power of ten where it is large: "0.0123", "119", "4,203"."""
    return f"{value:.{most}g}" if abs(value) < 10**most - 0.5 else f"{value:,.0f}"


def percent(share: float) -> str:
    """The share in percent, three digits: "0.123 %"."""
    return f"{digits(100.0 * share)} %"


def bytes_text(size: float) -> str:
    """The size in the unit a reader thinks in: "604 MiB", "15.2 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1000:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{digits(size)} TiB"


def into_compile(facts: object) -> str:
    """What trial.json says of a compile whose end nobody saw: "12.0 s into a compile for prefill 2x64". Empty where it
    says nothing."""
    row = mapping(facts)
    seconds, shape = number(row.get("seconds")), text_of(row, "shape")
    return "" if seconds is None else f"{seconds:.1f} s into a compile" + (f" for {shape}" if shape else "")


def sentence(faults: Sequence[str]) -> str:
    """The faults as one sentence without its full stop. A device's name at its start (cuda:0) stays as it is."""
    text = "; ".join(faults)
    return text if ":" in text.partition(" ")[0] else text[:1].upper() + text[1:]


def duration_text(seconds: float) -> str:
    """The length in the unit a reader thinks in: "90 seconds", "20 minutes", "3.5 hours"."""
    if seconds < 180:
        return counted(round(seconds), "second")
    if seconds < 2 * 3600:
        return f"{math.ceil(seconds / 60)} minutes"
    return f"{seconds / 3600:.1f} hours"
