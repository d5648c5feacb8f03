"""PASS, FAIL or INCONCLUSIVE, with reasons: the gates of each arm, and the checks that say whether to believe them.

An arm passes when every gate passes (intersection-union, Berger 1982). A validity check that fails turns the gates
it affects into INCONCLUSIVE. Two kinds of FAIL stand all the same, because they are counts of what happened and no
estimate: recompiles while serving, and errors (unless the control failed too, which points at the test bed).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from analysis.compare import METRIC_NAMES, Comparison
from analysis.planner import duration_text
from analysis.records import METRICS, RecordError
from analysis.slo import ShareResult, SloTarget

Floats = npt.NDArray[np.float64]

PASS, FAIL, INCONCLUSIVE = "PASS", "FAIL", "INCONCLUSIVE"

ESTIMATES = ("noninferiority", "slo")
ALL_KINDS = ("noninferiority", "slo", "recompile", "error")

_MISSING_SLACK = 2  # requests that may be under way when recorders stop
_MISSING_SHARE = 0.001
_RATIO_ALPHA = 0.001  # a sample-ratio alarm is a bug report: rare by chance
TAIL_REQUESTS = 5
_CROSS_ALPHA = 0.25
_SLOWDOWN_LIMIT = 1.10
_SLOWDOWN_DRAWS = 499
_FEWEST_DURING = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class GateLimits:
    """What the experiment's [gates] table allows."""

    margin: float = 0.10
    metrics: tuple[str, ...] = ("ttft", "e2e")
    quantile: float = 0.99
    alpha: float = 0.05
    max_recompiles: int = 0  # per arm and trial, while serving
    max_stall_s: float = 1.0  # the longest that compiles held up one request
    max_stall_s_per_min: float = 0.5
    max_requests_hit_pct: float = 1.0
    max_error_pct: float = 0.5
    cold_s: float = 30.0
    min_blocks: int = 20
    max_generator_lag_ms: float = 50.0
    draws: int = 9999
    block_s: float = 30.0

    def __post_init__(self) -> None:
        for name in self.metrics:
            if name not in METRICS:
                raise RecordError(f'gates.metrics names "{name}": use {", ".join(METRICS)}')
        for key, low, high in (
            ("margin", 0.0, 10.0),
            ("quantile", 0.01, 0.9999),
            ("alpha", 1e-6, 0.5),
            ("cold_s", 0.0, math.inf),
            ("min_blocks", 2, 1_000_000),
            ("draws", 99, 1_000_000),
            ("block_s", 0.1, 86_400.0),
        ):
            if not low <= getattr(self, key) <= high:
                raise RecordError(f"gates.{key} is {getattr(self, key)}: give a value from {low:g} to {high:g}")

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> GateLimits:
        """The limits in `table`, defaults elsewhere. Values that are no numbers raise RecordError."""
        known: dict[str, Any] = {}
        for key, value in table.items():
            if key == "metrics":
                if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                    raise RecordError(f"gates.metrics is {value!r}: give a list of names")
                known[key] = tuple(value)
            elif key in cls.__dataclass_fields__:
                if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
                    raise RecordError(f"gates.{key} is {value!r}: give a number")
                known[key] = int(value) if key in {"max_recompiles", "min_blocks", "draws"} else float(value)
        return cls(**known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One requirement on one arm."""

    arm: str
    gate: str
    kind: str  # noninferiority | slo | recompile | error
    value: float | None
    limit: float | None
    unit: str  # ratio | ms | count | s | pct
    verdict: str
    reason: str
    needed_s: float | None = None  # run length that would decide it; None when decided or out of reach
    blocked_by: tuple[str, ...] = ()  # checks that forbid to believe it


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One condition without which some gates mean nothing. `arm` None concerns all arms."""

    check: str
    ok: bool
    reason: str
    affects: tuple[str, ...]
    value: float | None = None
    limit: float | None = None
    arm: str | None = None
    remedy: str = ""  # what to change; empty when a longer run is the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileFacts:
    """What the telemetry says of one arm while it served."""

    known: bool
    recompiles: int  # over all trials
    most_in_a_trial: int
    longest_event_s: float
    longest_stall_s: float  # the longest that one request was held up
    stall_s_per_min: float
    requests_hit: int
    requests: int
    trials: int


# Gates


def noninferiority_gate(comparison: Comparison, needed_s: float | None) -> Gate:
    """The gate that a decided comparison makes."""
    return Gate(
        arm=comparison.arm,
        gate=f"noninferiority {quantile_key(comparison.quantile)}_{comparison.metric}",
        kind="noninferiority",
        value=comparison.ratio,
        limit=1.0 + comparison.margin,
        unit="ratio",
        verdict=comparison.verdict,
        reason=comparison.reason,
        needed_s=needed_s if comparison.verdict == INCONCLUSIVE else None,
    )


def quantile_key(q: float) -> str:
    """ "p99" or "p99_9"."""
    return f"p{100.0 * q:.10g}".replace(".", "_")


def slo_gate(arm: str, target: SloTarget, result: ShareResult, value: float, needed_s: float | None) -> Gate:
    """Whether the arm keeps the target, with the count behind it."""
    share = f"{result.missed} of {result.requests} requests"
    sure = f"the true share may lie between {_pct(result.low)} and {_pct(result.high)}"
    if target.quantile is None:
        seen, name = f"{share} failed", f"at most {target.limit:g} % errors"
    else:
        label = f"p{100.0 * target.quantile:.10g} {METRIC_NAMES[target.metric]}"
        seen, name = f"{share} took longer than {target.limit:g} ms", f"{label} within {target.limit:g} ms"
    if not result.requests:
        reason = f"No request to judge {name}."
    else:
        reason = f"{seen}; {name} allows {_pct(result.allowed)}, {sure}."
    return Gate(
        arm=arm,
        gate=f"slo {target.key}",
        kind="slo",
        value=None if math.isnan(value) else value,
        limit=target.limit,
        unit="pct" if target.quantile is None else "ms",
        verdict=result.verdict,
        reason=reason,
        needed_s=needed_s if result.verdict == INCONCLUSIVE else None,
    )


def _pct(share: float) -> str:
    return f"{100.0 * share:.3g} %"


def error_gate(arm: str, result: ShareResult, limit_pct: float, needed_s: float | None) -> Gate:
    """Whether the arm's share of failed requests is surely within the limit."""
    value = 100.0 * result.missed / result.requests if result.requests else None
    if value is None:
        reason = "No request completed or failed, so the error rate is unknown."
    elif result.verdict == INCONCLUSIVE:
        reason = (
            f"{result.missed} of {result.requests} requests failed; so few requests only show that fewer than "
            f"{_pct(result.high)} fail, and the limit is {limit_pct:g} %."
        )
    else:
        reason = f"{result.missed} of {result.requests} requests failed ({value:.3g} %), limit {limit_pct:g} %."
    return Gate(
        arm=arm,
        gate="errors",
        kind="error",
        value=value,
        limit=limit_pct,
        unit="pct",
        verdict=result.verdict,
        reason=reason,
        needed_s=needed_s if result.verdict == INCONCLUSIVE else None,
    )


def death_gate(arm: str, deaths: int) -> Gate:
    """An arm that died under load may not replace one that did not."""
    times = "once" if deaths == 1 else f"{deaths} times"
    reason = f"{arm} died {times} under load." if deaths else f"{arm} stayed up."
    return Gate(
        arm=arm,
        gate="deaths",
        kind="error",
        value=float(deaths),
        limit=0.0,
        unit="count",
        verdict=FAIL if deaths else PASS,
        reason=reason,
    )


def recompile_gates(arm: str, facts: CompileFacts, limits: GateLimits) -> list[Gate]:
    """The four gates on compiles while serving: facts, so they FAIL in a run of any length."""
    per_trial = "" if facts.trials == 1 else f" in one trial, {facts.recompiles} in all"
    hit_pct = 100.0 * facts.requests_hit / facts.requests if facts.requests else 0.0
    waited = f"{facts.requests_hit} of {facts.requests} requests waited"
    count = f"{facts.most_in_a_trial} recompile{'' if facts.most_in_a_trial == 1 else 's'} while serving{per_trial}"
    if facts.most_in_a_trial:
        count += f", longest {facts.longest_event_s:.1f} s, limit {limits.max_recompiles}; {waited}"
    else:
        count += f", limit {limits.max_recompiles}"
    rows: list[tuple[str, float, float, str, str]] = [
        ("recompiles", float(facts.most_in_a_trial), float(limits.max_recompiles), "count", f"{count}."),
        (
            "longest stall",
            facts.longest_stall_s,
            limits.max_stall_s,
            "s",
            f"Compiles held up one request for {facts.longest_stall_s:.2g} s, limit {limits.max_stall_s:g} s.",
        ),
        (
            "stall per minute",
            facts.stall_s_per_min,
            limits.max_stall_s_per_min,
            "s",
            f"Compiles took {facts.stall_s_per_min:.2g} s of each minute, limit {limits.max_stall_s_per_min:g} s.",
        ),
        (
            "requests hit",
            hit_pct,
            limits.max_requests_hit_pct,
            "pct",
            f"{waited} for a compile ({hit_pct:.3g} %), limit {limits.max_requests_hit_pct:g} %.",
        ),
    ]
    gates = []
    for name, value, limit, unit, reason in rows:
        unknown = not facts.known
        undecided = unknown or (facts.requests == 0 and value <= limit)
        gates.append(
            Gate(
                arm=arm,
                gate=name,
                kind="recompile",
                value=None if unknown else value,
                limit=limit,
                unit=unit,
                verdict=INCONCLUSIVE if undecided else verdict_of(value, limit),
                reason="No compile events were recorded for this arm, so nothing is known." if unknown else reason,
            )
        )
    return gates


def verdict_of(value: float, limit: float) -> str:
    """FAIL above the limit, else PASS."""
    return FAIL if value > limit else PASS


# Checks


def check_records(problems: Sequence[str], broken: int, repeated: int) -> Check:
    """Nothing is cut off, unreadable, out of order or there twice."""
    words = list(problems)
    if broken:
        words.append(f"{broken} request{'s have' if broken > 1 else ' has'} times that are missing or run backwards")
    if repeated:
        words.append(f"{repeated} rows repeat a request")
    return Check(
        check="records",
        ok=not words,
        value=float(len(problems) + broken + repeated),
        limit=0.0,
        reason="; ".join(words) + "." if words else "All records are whole.",
        affects=ALL_KINDS,
        remedy="" if not words else "Run again, and let the run end by itself.",
    )


def check_complete(trials: Sequence[Mapping[str, Any]]) -> Check:
    """Every trial ended by itself."""
    stopped = [str(trial.get("trial")) for trial in trials if not trial.get("complete")]
    return Check(
        check="complete",
        ok=not stopped,
        value=float(len(stopped)),
        limit=0.0,
        reason=f"Trial {', '.join(stopped)} was stopped before its end." if stopped else "Every trial ran to its end.",
        affects=ALL_KINDS,
        remedy="Run again, and let the run end by itself." if stopped else "",
    )


def check_counts(counts: Mapping[str, int], planned: Mapping[str, int], *, mirrored: bool) -> Check:
    """Every arm got its requests: each of those planned, and under a mirrored design as many as the others."""
    missing: list[str] = []
    worst = 0
    common = max(counts.values(), default=0) if mirrored else 0
    for arm, count in counts.items():
        expected = max(planned.get(arm, 0), common)
        short = expected - count
        worst = max(worst, short)
        if count == 0:
            missing.append(f"{arm} has no request")
        elif short > _allowed_missing(expected):
            missing.append(f"{arm} has {count} of {expected} requests")
    total = planned.get("*", 0)
    short = total - sum(counts.values())
    if short > _allowed_missing(total):
        missing.append(f"{sum(counts.values())} of {total} planned requests were recorded")
        worst = max(worst, short)
    if not counts:
        missing.append("no arm has requests")
    return Check(
        check="arms",
        ok=not missing,
        value=float(worst),
        limit=float(_allowed_missing(max([common, total, *planned.values()], default=0))),
        reason="; ".join(missing) + "." if missing else "Every arm has its requests.",
        affects=ALL_KINDS,
        remedy="See the logs of the arm and of the load generator." if missing else "",
    )


def _allowed_missing(expected: int) -> int:
    return max(_MISSING_SLACK, int(_MISSING_SHARE * expected))


def check_sample_ratio(counts: Mapping[str, int], weights: Mapping[str, float]) -> Check | None:
    """The splitter sent each arm its share of the sessions (chi-square, p >= 0.001). None where weights do not say."""
    names = [name for name in counts if weights.get(name, 0) > 0]
    total = sum(counts[name] for name in names)
    if len(names) < 2 or total == 0:
        return None
    scale = total / sum(weights[name] for name in names)
    expected = [weights[name] * scale for name in names]
    p_value = float(stats.chisquare([counts[name] for name in names], expected).pvalue)
    got = ", ".join(f"{name} {counts[name]} (expected {want:.0f})" for name, want in zip(names, expected, strict=True))
    ok = p_value >= _RATIO_ALPHA
    return Check(
        check="sample ratio",
        ok=ok,
        value=p_value,
        limit=_RATIO_ALPHA,
        reason=f"Sessions per arm: {got}" + ("." if ok else ": more uneven than chance."),
        affects=("noninferiority", "slo", "error"),
        remedy="" if ok else "Look for requests that one arm loses, and check the splitter's weights.",
    )


def check_deaths(arm: str, deaths: Sequence[Mapping[str, Any]], *, control: bool) -> Check:
    """The arm lived through the run. A control that died spoils every comparison."""
    codes = ", ".join(f"{death.get('replica', arm)} (exit code {death.get('exit_code')})" for death in deaths)
    return Check(
        check="alive",
        ok=not deaths,
        value=float(len(deaths)),
        limit=0.0,
        arm=None if control else arm,
        reason=f"{arm} died under load: {codes}." if deaths else f"{arm} lived through the run.",
        affects=ALL_KINDS if not control else ESTIMATES,
        remedy=f"See the logs of {arm}." if deaths else "",
    )


def check_blocks(arm: str, blocks: int, limits: GateLimits, block_s: float) -> Check:
    """The comparison rests on enough time blocks."""
    ok = blocks >= limits.min_blocks
    return Check(
        check="blocks",
        ok=ok,
        value=float(blocks),
        limit=float(limits.min_blocks),
        arm=arm,
        reason=f"{arm} can be compared over {blocks} steady block{'' if blocks == 1 else 's'} of {block_s:g} s"
        + ("." if ok else f"; {limits.min_blocks} are needed."),
        affects=("noninferiority",),
    )


def check_length(blocks: int, limits: GateLimits, block_s: float) -> Check:
    """The whole run, cold start and compiles included, has enough time blocks to judge SLOs by."""
    ok = blocks >= limits.min_blocks
    return Check(
        check="run length",
        ok=ok,
        value=float(blocks),
        limit=float(limits.min_blocks),
        reason=f"The run has {blocks} block{'' if blocks == 1 else 's'} of {block_s:g} s"
        + ("." if ok else f"; {limits.min_blocks} are needed."),
        affects=("slo",),
    )


def check_tail(arm: str, requests: int, quantile: float) -> Check:
    """Enough requests lie beyond the quantile to speak of it."""
    beyond = requests * (1.0 - quantile)
    ok = beyond >= TAIL_REQUESTS - 1e-9
    return Check(
        check="tail",
        ok=ok,
        value=beyond,
        limit=float(TAIL_REQUESTS),
        arm=arm,
        reason=f"{requests} compared requests put {beyond:.1f} beyond p{100.0 * quantile:.10g}"
        + ("." if ok else f"; {TAIL_REQUESTS} are needed to speak of it."),
        affects=("noninferiority",),
    )


def check_autocorrelation(arm: str, comparisons: Sequence[Comparison]) -> Check:
    """Neighbouring blocks do not resemble each other, as the label swap assumes."""
    worst = max(
        (item for item in comparisons if item.autocorrelation is not None),
        key=lambda item: (item.autocorrelation or 0.0) * math.sqrt(item.blocks),
        default=None,
    )
    if worst is None or worst.autocorrelation is None:
        return Check(
            check="block autocorrelation",
            ok=True,
            arm=arm,
            reason="Too few blocks to tell whether neighbouring blocks resemble each other.",
            affects=("noninferiority",),
        )
    limit = 2.0 / math.sqrt(worst.blocks)
    ok = worst.autocorrelation <= limit
    return Check(
        check="block autocorrelation",
        ok=ok,
        value=worst.autocorrelation,
        limit=limit,
        arm=arm,
        reason=f"The difference to the control in neighbouring blocks correlates by {worst.autocorrelation:.2f}"
        + ("." if ok else f", limit {limit:.2f}: blocks are not separate trials of the difference."),
        affects=("noninferiority",),
        remedy="" if ok else "Set a longer block_s, or run six trials or more.",
    )


def check_cross(arm: str, comparisons: Sequence[Comparison]) -> Check:
    """The exceedance-score test does not contradict what the label swap decided."""
    doubts: list[tuple[float, str]] = []
    for item in comparisons:
        p_value = {PASS: item.cross_p_noninferior, FAIL: item.cross_p_inferior}.get(item.verdict)
        if p_value is not None and p_value > _CROSS_ALPHA:
            doubts.append((p_value, METRIC_NAMES.get(item.metric, item.metric)))
    names = ", ".join(name for _, name in doubts)
    return Check(
        check="cross-check",
        ok=not doubts,
        value=max(doubts)[0] if doubts else None,
        limit=_CROSS_ALPHA,
        arm=arm,
        reason="The second test does not contradict the first."
        if not doubts
        else f"A second test that allows for slow drifts does not support the result on {names}.",
        affects=("noninferiority",),
    )


def check_generator_lag(lag_ms: float | None, limit_ms: float) -> Check:
    """The load generator sent its requests when the schedule said."""
    ok = lag_ms is not None and lag_ms <= limit_ms
    if lag_ms is None:
        reason = "How late requests were sent is not recorded."
    else:
        reason = f"1 % of the requests were sent {lag_ms:.1f} ms late or more, limit {limit_ms:g} ms."
    return Check(
        check="generator lag",
        ok=ok,
        value=lag_ms,
        limit=limit_ms,
        reason=reason,
        affects=ESTIMATES,
        remedy="" if ok else "Give the load generator its own cores or more workers, or lower the rate.",
    )


def check_open_loop(open_loop: bool | None, scheduled: bool) -> Check:
    """Latency counts from a schedule that does not wait for the server."""
    ok = scheduled and open_loop is not False
    reason = "Requests started on schedule, whatever the server did."
    if open_loop is False:
        reason = "The load waited for the server (closed loop), which hides the tail."
    elif not scheduled:
        reason = "Requests carry no scheduled time, so waiting before they were sent may be missing."
    return Check(
        check="open loop",
        ok=ok,
        reason=reason,
        affects=ESTIMATES,
        remedy="" if ok else "Drive the arms by a schedule and record scheduled_ns.",
    )


def check_cut(arm: str, cut: int, requests: int, quantile: float) -> Check:
    """Fewer requests were under way at the end than lie beyond the quantile, so the tail is not among them."""
    share = cut / requests if requests else 0.0
    limit = 1.0 - quantile
    ok = share <= limit + 1e-12
    return Check(
        check="cut requests",
        ok=ok,
        value=100.0 * share,
        limit=100.0 * limit,
        arm=arm,
        reason=f"{cut} of {requests} requests of {arm} were still under way at the end"
        + ("." if ok else f": they could hold all of the slowest {100.0 * limit:.3g} %."),
        affects=ESTIMATES,
        remedy="" if ok else "Let the run drain before it ends, or run longer.",
    )


def check_control_errors(control: str, failed: int, requests: int, limit_pct: float) -> Check:
    """The control itself works: where it fails, the test bed is broken and nothing can be blamed on an arm."""
    share = 100.0 * failed / requests if requests else 0.0
    ok = share <= limit_pct
    return Check(
        check="control errors",
        ok=ok,
        value=share,
        limit=limit_pct,
        reason=f"{failed} of {requests} requests of {control} failed ({share:.3g} %), limit {limit_pct:g} %.",
        affects=("noninferiority", "slo", "error"),
        remedy="" if ok else f"Find out why {control} fails, then run again.",
    )


def check_comparable(arm: str, differences: Sequence[str], *, intended: bool) -> Check:
    """The arm differs from the control in shapes and compile policy alone, or the experiment says that it may."""
    ok = not differences or intended
    if not differences:
        reason = f"{arm} differs from the control in its policy alone."
    else:
        reason = f"{arm} also differs from the control in {', '.join(differences)}" + (
            ", as the experiment intends." if intended else ": a difference cannot be laid to the compiler."
        )
    return Check(
        check="comparable",
        ok=ok,
        value=float(len(differences)),
        limit=0.0,
        arm=arm,
        reason=reason,
        affects=("noninferiority",),
        remedy="" if ok else "Make these settings equal, or set comparable = false to compare whole arms.",
    )


def check_interference(slowdown: float | None, p_value: float | None) -> Check:
    """The control does not slow down while other arms compile."""
    if slowdown is None or p_value is None:
        return Check(
            check="interference",
            ok=True,
            limit=_SLOWDOWN_LIMIT,
            reason="Too few requests of the control fell into compiles of other arms to see interference.",
            affects=ESTIMATES,
        )
    ok = slowdown <= _SLOWDOWN_LIMIT or p_value > 0.05
    return Check(
        check="interference",
        ok=ok,
        value=slowdown,
        limit=_SLOWDOWN_LIMIT,
        reason=f"While other arms compiled, requests of the control took {slowdown:.2f} times as long"
        + (
            ", which is within chance."
            if ok and slowdown > _SLOWDOWN_LIMIT
            else "."
            if ok
            else ": they share a machine."
        ),
        affects=ESTIMATES,
        remedy="" if ok else "Give each arm its own cores or host, or use the switchback design.",
    )


def slowdown_during(
    excess: Floats, start_s: Floats, inside: Floats, *, bin_s: float, rng: np.random.Generator
) -> tuple[float | None, float | None]:
    """How many times longer requests took inside some stretches than outside, and p of no difference.

    `excess` is log(time taken / time expected by length) of requests that started at `start_s` (seconds on a circle
    of len(inside) bins of `bin_s`); `inside` is the share of each bin that lies in the stretches. The null turns the
    stretches around the circle, which keeps how neighbouring requests and stretches depend on each other.
    (None, None) when fewer than five requests started inside or outside.
    """
    bins = len(inside)
    index = np.minimum((start_s / bin_s).astype(np.int64), bins - 1)
    counts = np.bincount(index, minlength=bins).astype(np.float64)
    sums = np.bincount(index, weights=excess, minlength=bins)
    if counts @ inside < _FEWEST_DURING or counts @ (1.0 - inside) < _FEWEST_DURING:
        return None, None

    def effect(weights: Floats) -> float:
        within, without = counts @ weights, counts @ (1.0 - weights)
        if within <= 0 or without <= 0:
            return 0.0
        return float(sums @ weights / within - sums @ (1.0 - weights) / without)

    seen = effect(inside)
    turned = [effect(np.roll(inside, int(turn))) for turn in rng.integers(1, max(bins, 2), size=_SLOWDOWN_DRAWS)]
    as_high = sum(value >= seen - 1e-12 for value in turned)
    return math.exp(seen), (as_high + 1) / (_SLOWDOWN_DRAWS + 1)


# Together


def apply_checks(gates: Sequence[Gate], checks: Sequence[Check]) -> list[Gate]:
    """The gates, with every PASS and every estimated FAIL that a failed check forbids turned INCONCLUSIVE."""
    return [_checked(gate, [check for check in checks if not check.ok and _concerns(check, gate)]) for gate in gates]


def _concerns(check: Check, gate: Gate) -> bool:
    return gate.kind in check.affects and check.arm in (None, gate.arm)


def _checked(gate: Gate, failed: Sequence[Check]) -> Gate:
    if not failed:
        return gate
    blocked = tuple(dict.fromkeys(check.check for check in failed))
    stands = gate.kind == "recompile" or (gate.kind == "error" and "control errors" not in blocked)
    if gate.verdict == FAIL and stands:
        return gate
    if gate.verdict == INCONCLUSIVE:
        return replace(gate, blocked_by=blocked)
    because = " ".join(dict.fromkeys(check.reason for check in failed))
    return replace(
        gate,
        verdict=INCONCLUSIVE,
        blocked_by=blocked,
        reason=f"{gate.reason} That would be a {gate.verdict}, but: {because}",
    )


def combined(verdicts: Sequence[str]) -> str:
    """FAIL if any is, else INCONCLUSIVE if any is or there is none, else PASS."""
    if FAIL in verdicts:
        return FAIL
    return PASS if verdicts and set(verdicts) == {PASS} else INCONCLUSIVE


_KIND_ORDER = {"recompile": 0, "error": 1, "noninferiority": 2, "slo": 3}


def headline(arms: Mapping[str, str], gates: Sequence[Gate], checks: Sequence[Check], control: str) -> str:
    """The outcome in plain words, worst arm first. `arms` maps each judged arm to its verdict."""
    if not arms:
        return f"There is no arm to judge against {control}."
    parts = []
    for arm in sorted(arms, key=lambda name: ((FAIL, INCONCLUSIVE, PASS).index(arms[name]), list(arms).index(name))):
        own = sorted((gate for gate in gates if gate.arm == arm), key=lambda gate: _KIND_ORDER[gate.kind])
        if arms[arm] == FAIL:
            first = next(gate for gate in own if gate.verdict == FAIL)
            parts.append(f"{arm} must not replace {control}: {_clause(first.reason)}.")
        elif arms[arm] == PASS:
            worst = max((gate.value or 0.0 for gate in own if gate.kind == "noninferiority"), default=None)
            slower = "" if worst is None else f" (at most {worst:.2f} times its latency at the tail)"
            parts.append(f"{arm} may replace {control}: every gate passed{slower}.")
        else:
            parts.append(f"This run cannot decide whether {arm} may replace {control}. {_open_reason(own, checks)}")
    return " ".join(parts)


def _clause(reason: str) -> str:
    """The sentence as the second half of another."""
    inner = reason.rstrip(".")
    return inner[0].lower() + inner[1:] if inner.startswith(("Compiles", "No ")) else inner


def _open_reason(gates: Sequence[Gate], checks: Sequence[Check]) -> str:
    open_gates = [gate for gate in gates if gate.verdict == INCONCLUSIVE]
    blocking = {name for gate in open_gates for name in gate.blocked_by}
    arms = {gate.arm for gate in gates}
    # A fault that must be mended says more than that the run was short.
    ranks = {"blocks": 1, "run length": 1, "tail": 2, "cut requests": 2}
    for check in sorted(checks, key=lambda item: ranks.get(item.check, 0)):
        if not check.ok and check.check in blocking and (check.arm is None or check.arm in arms):
            return check.reason
    return open_gates[0].reason if open_gates else "No gate was judged."


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What would decide what is open."""

    needed_s: float | None
    text: str


def advise(gates: Sequence[Gate], checks: Sequence[Check]) -> Advice:
    """How long a run would decide the open gates, and what must change first where length is not the trouble.

    Only of arms that have not failed: what else is open on an arm that failed decides nothing more.
    """
    failed = sorted({gate.arm for gate in gates if gate.verdict == FAIL})
    open_gates = [gate for gate in gates if gate.verdict == INCONCLUSIVE and gate.arm not in failed]
    arms = {gate.arm for gate in open_gates}
    blocking = {name for gate in open_gates for name in gate.blocked_by}
    sentences = list(
        dict.fromkeys(
            check.remedy
            for check in checks
            if not check.ok and check.remedy and check.check in blocking and (check.arm is None or check.arm in arms)
        )
    )
    needed = max((gate.needed_s for gate in open_gates if gate.needed_s is not None), default=None)
    if needed is not None:
        sentences.append(
            f"A run of about {duration_text(needed)} would decide the open gates, if the arms behave as they did here."
        )
    stuck = [gate for gate in open_gates if gate.needed_s is None and not gate.blocked_by]
    if any(gate.kind == "recompile" for gate in stuck):
        sentences.append("Record the compile events of every arm.")
    names = sorted({f"{gate.gate} of {gate.arm}" for gate in stuck if gate.kind != "recompile"})
    if names:
        sentences.append(f"No run of up to a week would decide {', '.join(names)}.")
    if failed:
        sentences.append(f"A longer run will not clear {', '.join(failed)}.")
    return Advice(needed_s=needed, text=" ".join(sentences) or "Nothing is open.")
