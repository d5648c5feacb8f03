"""Whether a request met every limit of goodput. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from loadtests.generator.record import RequestRecord


def is_good(record: RequestRecord, limits: Mapping[str, float]) -> bool:
    """Return whether the request was answered within every limit, in ms by metric.

    A metric that an answer of one token leaves undefined counts as met.
    """
    return record.ok and all(
        (value := _value(record, name)) is None or value <= limit for name, limit in limits.items()
    )


def _value(record: RequestRecord, metric: str) -> float | None:
    """Return the metric in ms, None where it is undefined for an answer of one token."""
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
