"""What shows of an arm from outside, as a row of the summary."""

from __future__ import annotations

import math
from typing import Any

from analysis.blackbox.agreement import agreement_of, is_explained
from analysis.blackbox.stalls import COMPILE, HOST, PART, UNKNOWN, WORK, Stall
from analysis.blackbox.view import Outside
from analysis.run.run import Run

_MOST_STALLS = 100
_COUNTS = {"compiles": COMPILE, "unexplained": UNKNOWN, "host": HOST, "work": WORK, "part": PART}


def outside_row(run: Run, outside: Outside) -> dict[str, Any]:
    """The arm's stalls by cause, how well it could be watched, and the agreement with its telemetry where there is any.

    Of the stalls, the longest hundred.
    """
    longest = sorted(outside.stalls, key=lambda stall: (-stall.seconds, stall.trial, stall.start_ns))[:_MOST_STALLS]
    return {
        **{name: len(outside.of_cause(cause)) for name, cause in _COUNTS.items()},
        "p_value": outside.p_value,
        "detectable_s": outside.detectable_s,
        "witnesses": outside.witnesses,
        "silences": sum(watch.silences for watch in outside.watches),
        "first_seen": {
            "requests": outside.slow.first,
            "others": outside.slow.others,
            "excess_ms": outside.slow.excess_ms,
            "p_value": outside.slow.p_value if outside.slow.first else None,
        },
        "agreement": _agreement(run, outside),
        "stalls": [_stall_row(run, stall) for stall in longest],
    }


def _agreement(run: Run, outside: Outside) -> dict[str, Any] | None:
    """None where the arm has no telemetry to agree with."""
    if run.account(outside.arm).external or not any(event.arm == outside.arm for event in run.events):
        return None
    hits = [int(rows.size) for rows in run.attribution.event_requests]
    agreement = agreement_of(outside, run.events, hits)
    keys = ("telemetry", "seen", "called", "missed", "extra", "onset_error_ms")
    return {key: getattr(agreement, key) for key in keys}


def _stall_row(run: Run, stall: Stall) -> dict[str, Any]:
    return {
        "trial": stall.trial,
        "replica": stall.replica,
        "start_ns": stall.start_ns,
        "end_ns": stall.end_ns,
        "offset_s": run.offset_s(stall.trial, stall.start_ns),
        "seconds": stall.seconds,
        "cause": stall.cause,
        "requests": int(stall.requests.size),
        "shape": stall.shape if stall.shape > 0 else None,
        "trigger": run.requests.request_ids[stall.trigger].as_py() if stall.trigger >= 0 else None,
        "chance": stall.chance if math.isfinite(stall.chance) else None,
        "chance_first_seen": stall.chance_new,
        "explained": None if run.account(stall.arm).external else is_explained(stall, run.events),
        "work_s": stall.work_s if math.isfinite(stall.work_s) else None,
    }
