"""The requirements on one arm, a module for each family: what a gate asks, how it is judged and what its reason says.

Gates on latency, errors and goodput are estimates, so a run may be too short for them. Gates on compiles are counts of
what happened: they FAIL in a run of any length. A gate's limit is in `tailgate.analysis.settings.gate_limits`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tailgate.analysis.judging.paths import Path

PASS, FAIL, INCONCLUSIVE = "PASS", "FAIL", "INCONCLUSIVE"


class Question(NamedTuple):
    """What a gate asks, for the reference."""

    gate: str  # its name, or how its name begins
    kind: str
    asks: str
    settings: tuple[str, ...]  # its limits, and when it is asked
    passes: str
    fails: str


_COUNT = ("at most the limit", "above the limit")
# "Surely" means one-sided at `gates.alpha`. What is neither PASS nor FAIL is INCONCLUSIVE.
QUESTIONS = (
    Question(
        "noninferiority",
        "noninferiority",
        "Is a latency quantile of the arm at most a margin above the control's?",
        ("gates.margin", "gates.margins", "gates.metrics", "gates.quantiles"),
        "the upper limit of the ratio is below 1 + margin, and so is the ratio over the whole run",
        "the lower limit is above 1 + margin",
    ),
    Question(
        "slo",
        "slo",
        "Does the arm keep an objective?",
        ("slo.pQ_METRIC_ms", "slo.error_pct"),
        "the share of requests beyond the limit is surely at most what the quantile allows",
        "it is surely more, and at least three requests are beyond",
    ),
    Question(
        "goodput",
        "goodput",
        "In a search for load: does the arm hold as much as the control, less the margin?",
        ("gates.margin", "traffic.arrivals"),
        "by the outer ends of both intervals it holds at least 1 − margin of the control's load",
        "by the outer ends it holds less",
    ),
    Question(
        "errors",
        "error",
        "Are failed requests rare?",
        ("gates.max_error_pct",),
        "the share of failed requests is surely at most the limit",
        "it is surely more, and at least three failed",
    ),
    Question("deaths", "error", "Did every managed replica live? The limit is 0.", (), "none died", "any died"),
    Question(
        "refused",
        "error",
        "Of an arm that refuses what no graph fits: how many requests were refused?",
        ("gates.max_refused_pct", "compile.strict"),
        *_COUNT,
    ),
    Question(
        "recompiles",
        "recompile",
        "How often did the arm compile while serving, in its worst trial? `compile`, `recompile`, `limit_hit` and "
        "`jit` events count.",
        ("gates.max_recompiles",),
        *_COUNT,
    ),
    Question(
        "longest stall",
        "recompile",
        "How long did compiles delay one request at most?",
        ("gates.max_stall_s",),
        *_COUNT,
    ),
    Question(
        "stall per minute",
        "recompile",
        "How many seconds of each minute did a replica compile?",
        ("gates.max_stall_s_per_min",),
        *_COUNT,
    ),
    Question(
        "requests hit", "recompile", "How many requests did compiles delay?", ("gates.max_requests_hit_pct",), *_COUNT
    ),
    Question(
        "eager steps",
        "recompile",
        "Of a compiled arm of which any step ran eagerly: how many did, of the kind of step with the largest share?",
        ("gates.max_eager_steps_pct",),
        *_COUNT,
    ),
    Question(
        "parity",
        "parity",
        "Does the arm compute what the control does, where it was measured, is required or can be judged?",
        ("parity.full", "parity.served", "parity.max_kl", "parity.min_cosine", "parity.max_different"),
        "it was measured and passed; in float32 all answers are the control's; answers of an external arm are the "
        "control's but for `parity.max_different`",
        "it failed, or an answer in float32 differs; answers of an external arm part at surely more than one in four "
        "tokens",
    ),
    Question(
        "memory ratio",
        "memory",
        "If a limit is set: how much more memory does a replica hold at its peak than one of the control?",
        ("gates.max_memory_ratio",),
        "the upper limit of the ratio is at most the limit",
        "the lower limit is above it",
    ),
    Question(
        "ramp",
        "ramp",
        "In a ramp: did the candidate reach all of the traffic?",
        ("ramp.steps",),
        "it was promoted",
        "it was rolled back",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One requirement on one arm."""

    arm: str
    gate: str
    kind: str  # noninferiority | slo | goodput | recompile | error | parity | memory | ramp
    value: float | None
    limit: float | None
    unit: str  # ratio | ms | count | s | pct
    verdict: str
    reason: str
    interval: tuple[float | None, float | None] = (None, None)  # of its value; of an SLO, of the percentage that misses
    needed_s: float | None = None  # run length that would decide it; None when decided or out of reach
    needed_starts: int | None = None  # trials that it takes for that, where it is more than the run had
    blocked_by: tuple[str, ...] = ()  # checks that forbid to believe it
    caveat: str = ""  # the end of its reason, where failed checks turned its verdict; empty where none did
    allowance: str = ""  # the part of its reason that says what it allows for of what failed checks saw
    low: float | None = None  # limits of a ratio, which a machine may have moved
    high: float | None = None  # of an objective that no request missed, the slowest
    lasting: tuple[float, float] | None = None  # both, where trials are what it counts and one state may outlast some
    unseen: bool = False  # open because only clients saw the arm
    path: Path | None = None  # how its evidence grew, where interim analyses decide


def status(low: float | None, high: float | None, limit: float) -> str:
    """Return PASS if all of the interval keeps the limit, FAIL if none of it does, else INCONCLUSIVE.

    A count has its value at both ends. None is an unknown end, which decides nothing.
    """
    if high is not None and high <= limit:
        return PASS
    if low is not None and low > limit:
        return FAIL
    return INCONCLUSIVE


def count_gate(arm: str, name: str, kind: str, value: float | None, limit: float, unit: str, reason: str) -> Gate:
    """Return a gate on what happened, which needs no error bars; INCONCLUSIVE if the value is unknown."""
    return Gate(
        arm=arm,
        gate=name,
        kind=kind,
        value=value,
        limit=limit,
        unit=unit,
        verdict=status(value, value, limit),
        reason=reason,
    )
