"""The requirements on one arm, each judged by itself and in plain words: PASS, FAIL or INCONCLUSIVE with a reason.

Gates on latency and errors are estimates, so a run may be too short for them. Gates on compiles are counts of what
happened: they FAIL in a run of any length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.judging.paths import Path
from analysis.judging.rates import RateComparison
from analysis.run.slo import ShareResult
from analysis.settings.gate_limits import CompileBudget
from analysis.settings.metrics import quantile_label
from analysis.settings.slo_targets import SloTarget
from analysis.statistics.compare import Comparison
from analysis.wording import counted, digits, percent

PASS, FAIL, INCONCLUSIVE = "PASS", "FAIL", "INCONCLUSIVE"

# The gates on compiles while serving: name, unit, limit in the budget.
COMPILE_GATES = (
    ("recompiles", "count", "max_recompiles"),
    ("longest stall", "s", "max_stall_s"),
    ("stall per minute", "s", "max_stall_s_per_min"),
    ("requests hit", "pct", "max_requests_hit_pct"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One requirement on one arm."""

    arm: str
    gate: str
    kind: str  # noninferiority | slo | cold | goodput | recompile | error | parity | memory
    value: float | None
    limit: float | None
    unit: str  # ratio | ms | count | s | pct
    verdict: str
    reason: str
    needed_s: float | None = None  # run length that would decide it; None when decided or out of reach
    needed_starts: int | None = None  # trials that it takes for that, where it is more than the run had
    blocked_by: tuple[str, ...] = ()  # checks that forbid to believe it
    caveat: str = ""  # the end of its reason, where failed checks turned its verdict; empty where none did
    allowance: str = ""  # the part of its reason that says what it allows for of what failed checks saw
    low: float | None = None  # limits of a ratio, which a machine may have moved
    high: float | None = None  # of an objective that no request missed, the slowest
    interval: tuple[float | None, float | None] = (None, None)  # of its value; of an SLO, of the percentage that misses
    lasting: tuple[float, float] | None = None  # both, where trials are what it counts and one state may outlast some
    unseen: bool = False  # open because only clients saw the arm
    path: Path | None = None  # how its evidence grew, where it may be looked at while it forms

    @property
    def is_share(self) -> bool:
        """Whether its evidence is on the share of requests that miss or fail, in percent, whatever its value is."""
        return self.path is not None and self.kind in ("slo", "error")

    @property
    def path_unit(self) -> str:
        """The unit of the path, and of its limit; the gate's own where there is no path."""
        return "pct" if self.is_share else self.unit

    @property
    def path_limit(self) -> float | None:
        """The limit in that unit: of an objective the share that may miss it."""
        return self.path.limit if self.path is not None and self.is_share else self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileFacts:
    """What the telemetry says of one arm while it served, or in one part of that time."""

    known: bool
    recompiles: int  # over all trials
    most_in_a_trial: int
    longest_event_s: float
    longest_stall_s: float  # the longest that one request was held up
    stall_s_per_min: float
    requests_hit: int
    requests: int
    trials: int
    kernels: int = 0  # of the recompiles: kernels that a compiler beside torch's made


def noninferiority_gate(
    comparison: Comparison, needed_s: float | None, needed_starts: int | None = None, path: Path | None = None
) -> Gate:
    """The gate that a decided comparison makes."""
    return Gate(
        arm=comparison.arm,
        gate=noninferiority_name(comparison),
        kind="noninferiority",
        value=comparison.ratio,
        limit=1.0 + comparison.margin,
        unit="ratio",
        verdict=comparison.verdict,
        reason=comparison.reason,
        low=comparison.low,
        # The ratio over the run must be within the margin too.
        high=None if comparison.high is None else max(comparison.high, comparison.whole or 0.0),
        interval=(comparison.low, comparison.high),
        lasting=comparison.lasting,
        needed_s=needed_s if comparison.verdict == INCONCLUSIVE else None,
        needed_starts=needed_starts if comparison.verdict == INCONCLUSIVE else None,
        path=path,
    )


def noninferiority_name(comparison: Comparison) -> str:
    """The name of the comparison's gate: "noninferiority p99_ttft", "noninferiority p99_9_e2e"."""
    quantile = f"p{100.0 * comparison.quantile:.10g}".replace(".", "_")
    return f"noninferiority {quantile}_{comparison.metric}"


def slo_gate(arm: str, target: SloTarget, result: ShareResult, value: float, needed_s: float | None) -> Gate:
    """Whether the arm keeps the target, with the count behind it."""
    what = "token gaps" if target.metric == "itl" else "requests"
    share = f"{result.missed} of {result.requests} {'cold ' if target.cold else ''}{what}"
    if target.quantile is None:
        seen, name = f"{share} failed", f"a limit of {target.limit:g} % errors"
    else:
        took = f"{target.limit:g} ms or longer" if target.strict else f"longer than {target.limit:g} ms"
        bound = "below" if target.strict else "within"
        seen = f"{share} took {took}"
        name = f"{quantile_label(target.metric, target.quantile)} {bound} {target.limit:g} ms"
    if not result.requests:
        reason = f"No request to judge {name}."
    else:
        reason = f"{seen} ({_limits_of_share(result)}); {name} allows {percent(result.allowed)}{_missing(result)}."
    return Gate(
        arm=arm,
        gate=f"{'cold ' if target.cold else ''}slo {target.key}",
        kind="cold" if target.cold else "slo",
        value=None if math.isnan(value) else value,
        limit=target.limit,
        unit="pct" if target.quantile is None else "ms",
        verdict=result.verdict,
        reason=reason,
        high=None if target.quantile is None else result.slowest_ms,
        interval=_percentages(result),
        needed_s=needed_s if result.verdict == INCONCLUSIVE else None,
    )


def _limits_of_share(result: ShareResult) -> str:
    """Return the share and its one-sided limits, in words."""
    seen = percent(result.missed / result.requests)
    return f"{seen}, error bars {percent(result.low)} to {percent(result.high)}"


def _percentages(result: ShareResult) -> tuple[float, float] | tuple[None, None]:
    """Return the one-sided limits of the share in percent."""
    return (100.0 * result.low, 100.0 * result.high) if result.requests else (None, None)


def _missing(result: ShareResult) -> str:
    """Return what a PASS needs where the limits alone allow it, as the end of a sentence; empty elsewhere."""
    if result.needed_blocks is None:
        return ""
    return f"; a PASS needs {counted(result.needed_blocks, 'block')}, and this run has {result.blocks}"


def goodput_ratio_gate(rate: RateComparison, least: float, needed_s: float | None) -> Gate:
    """Whether the arm surely makes at least `least` times the control's goodput of the same load."""
    verdict = INCONCLUSIVE
    if rate.ratio is None:
        reason = f"Goodput cannot be compared: {rate.obstacle}."
    else:
        seen = f"Goodput is {rate.ratio:.3f} times that of {rate.control}"
        shares = f"{rate.share_pct:.4g} % of the requests are good, {rate.control_share_pct:.4g} % of {rate.control}'s"
        if rate.low is None or rate.high is None:
            reason = f"{seen}; {shares}; there are no limits: {rate.obstacle or 'so few blocks set none'}."
        else:
            verdict = PASS if rate.low >= least else FAIL if rate.high < least else INCONCLUSIVE
            missing = ""
            if verdict == PASS and rate.needed_blocks is not None:
                verdict = INCONCLUSIVE
                missing = f"; a PASS needs {counted(rate.needed_blocks, 'block')}, and this run has {rate.blocks}"
            reason = f"{seen} (between {rate.low:.3f} and {rate.high:.3f}), limit {least:g}; {shares}{missing}."
    return Gate(
        arm=rate.arm,
        gate="goodput ratio",
        kind="goodput",
        value=rate.ratio,
        limit=least,
        unit="ratio",
        verdict=verdict,
        reason=reason,
        interval=(rate.low, rate.high),
        needed_s=needed_s if verdict == INCONCLUSIVE else None,
    )


def error_gate(arm: str, result: ShareResult, limit_pct: float, needed_s: float | None) -> Gate:
    """Whether the arm's share of failed requests is surely within the limit."""
    value = 100.0 * result.missed / result.requests if result.requests else None
    if value is None:
        reason = "No request completed or failed, so the error rate is unknown."
    else:
        share = f"{result.missed} of {counted(result.requests, 'request')} failed"
        reason = f"{share} ({_limits_of_share(result)}), limit {limit_pct:g} %{_missing(result)}."
    return Gate(
        arm=arm,
        gate="errors",
        kind="error",
        value=value,
        limit=limit_pct,
        unit="pct",
        verdict=result.verdict,
        reason=reason,
        interval=_percentages(result),
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


def recompile_gates(arm: str, facts: CompileFacts, budget: CompileBudget, *, part: str = "") -> list[Gate]:
    """The four gates on compiles while serving: facts, so they FAIL in a run of any length.

    `part` is "cold" or "steady" where the two have budgets of their own.
    """
    during = {"": "while serving", "cold": "in the cold start", "steady": "past the cold start"}[part]
    per_trial = "" if facts.trials == 1 else f" in one trial, {facts.recompiles} in all"
    hit_pct = 100.0 * facts.requests_hit / facts.requests if facts.requests else 0.0
    waited = f"{facts.requests_hit} of {counted(facts.requests, 'request')} waited"
    longest = f", longest {facts.longest_event_s:.1f} s" if facts.most_in_a_trial else ""
    kernels = f" ({facts.kernels} of them JIT compiles of kernels)" if facts.kernels else ""
    count = f"{counted(facts.most_in_a_trial, 'recompile')} {during}{per_trial}{kernels}{longest}"
    count += f", limit {budget.max_recompiles}"
    count += f"; {waited}" if facts.most_in_a_trial else ""
    held_up = f"one request for {digits(facts.longest_stall_s, 2)} s" if facts.longest_stall_s else "no request"
    took = f"{digits(facts.stall_s_per_min, 2)} s" if facts.stall_s_per_min else "nothing"
    reasons = (
        f"{count}.",
        f"Compiles held up {held_up}, limit {budget.max_stall_s:g} s.",
        f"Compiles took {took} of each minute, limit {budget.max_stall_s_per_min:g} s.",
        f"{waited} for a compile ({hit_pct:.3g} %), limit {budget.max_requests_hit_pct:g} %.",
    )
    values = (float(facts.most_in_a_trial), facts.longest_stall_s, facts.stall_s_per_min, hit_pct)
    gates = []
    for (name, unit, key), value, reason in zip(COMPILE_GATES, values, reasons, strict=True):
        limit = float(getattr(budget, key))
        undecided = not facts.known or (facts.requests == 0 and value <= limit)
        gates.append(
            Gate(
                arm=arm,
                gate=f"cold {name}" if part == "cold" else name,
                kind="recompile",
                value=value if facts.known else None,
                limit=limit,
                unit=unit,
                verdict=INCONCLUSIVE if undecided else FAIL if value > limit else PASS,
                reason=reason if facts.known else "No compile events were recorded for this arm, so nothing is known.",
            )
        )
    return gates


def parity_gate(
    arm: str,
    measured: Mapping[str, Any],
    answers: Sequence[Mapping[str, Any]],
    *,
    required: bool,
    weights_apart: str = "",
) -> Gate:
    """Whether the arm computes what the control does, by whatever was measured of it.

    `measured` is the result of `tailgate parity` before the traffic, which the experiment may require; `answers` what
    each replica answered after it to the prompts that every arm got. In float32 the answers must be equal; in lower
    precision rounding may turn a token, and all that follow it, so that they only show that a replica answers.
    Vectors are held to their cosine with the control's, in every precision and however weights are held. So it
    is where the weights are not held as the control's are, as `weights_apart` then says: such an arm has parity by the
    accuracy that was measured, and by nothing else.
    """
    findings: list[tuple[str, str]] = []
    if measured:
        verdict = str(measured.get("verdict"))
        reasons = measured.get("reasons")
        text = " ".join(str(reason) for reason in reasons) if isinstance(reasons, list) else ""
        findings.append(
            (PASS, _accuracy(measured) or "It computes what the control does, as nearly as its dtype lets it.")
            if verdict == PASS
            else (FAIL if verdict == FAIL else INCONCLUSIVE, f"Parity before the traffic is {verdict}: {text}")
        )
    elif required:
        findings.append((INCONCLUSIVE, "The experiment asks for parity before the traffic, and it was not measured."))
    elif weights_apart and _lowest_cosine(answers) is None:
        reason = f"Its weights are held as {weights_apart}, and what that costs in accuracy was not measured: "
        findings.append((INCONCLUSIVE, f"{reason}set parity.full = true."))
    if answers:
        findings.append(judge_answers(arm, answers, weights_apart=bool(weights_apart)))
    # A FAIL is said before what is open, and both before what passed.
    findings.sort(key=lambda finding: (FAIL, INCONCLUSIVE, PASS).index(finding[0]))
    same, of = _same_answers(answers)
    cosine = _lowest_cosine(answers)
    exact = bool(of) and _is_exact(answers) and not weights_apart and cosine is None
    return Gate(
        arm=arm,
        gate="parity",
        kind="parity",
        value=cosine if cosine is not None else float(of - same) if exact else None,
        limit=float(answers[0].get("min_cosine") or 0.0) if cosine is not None else 0.0 if exact else None,
        unit="count" if cosine is None else "",
        verdict=findings[0][0] if findings else INCONCLUSIVE,
        reason=" ".join(reason for _, reason in findings) or "Nothing was measured of it.",
    )


def _accuracy(measured: Mapping[str, Any]) -> str:
    """What was measured of a quantised arm's accuracy, in sentences; empty for any other."""
    rows = measured.get("findings")
    named = [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []
    return " ".join(str(row.get("reason")) for row in named if row.get("name") == "kl")


def judge_answers(arm: str, rows: Sequence[Mapping[str, Any]], *, weights_apart: bool = False) -> tuple[str, str]:
    """(verdict, reason) of the answers that the arm's replicas gave after the traffic."""
    silent = [row for row in rows if row.get("error")]
    differ = [row for row in rows if row.get("departs") is not None]
    same, of = _same_answers(rows)
    seen = f"{same} of {of} greedy answers of {arm} after the traffic are the control's"
    vectors = _lowest_cosine(rows) is not None
    if _is_exact(rows) and differ and not weights_apart and not vectors:
        return FAIL, f"{seen}, first other at {_departure(differ[0])}: in float32 they must be equal."
    if silent:
        who = silent[0].get("replica", arm)
        return INCONCLUSIVE, f"{who} did not answer after the traffic: {silent[0].get('error')}."
    if not of:
        return INCONCLUSIVE, f"No replica of {arm} was asked after the traffic."
    if (cosine := _lowest_cosine(rows)) is not None:
        limit = float(rows[0].get("min_cosine") or 0.0)
        seen = f"The lowest cosine of a vector of {arm} after the traffic with the control's is {cosine:.6f}"
        return (PASS, f"{seen}.") if cosine >= limit else (FAIL, f"{seen}, and {limit:g} is the least.")
    allowing = "other weights allow" if weights_apart else "lower precision allows"
    return PASS, f"{seen}{f', which {allowing}' if differ else ''}."


def _lowest_cosine(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """The lowest cosine of a vector with the control's; None where tokens were asked for, or nothing came."""
    known = [float(row["cosine"]) for row in rows if isinstance(row.get("cosine"), (int, float))]
    return min(known, default=None)


def _same_answers(rows: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """(those that are the control's, all)."""
    return sum(int(row.get("same") or 0) for row in rows), sum(int(row.get("of") or 0) for row in rows)


def _is_exact(rows: Sequence[Mapping[str, Any]]) -> bool:
    return all(row.get("dtype") == "float32" for row in rows)


def _departure(row: Mapping[str, Any]) -> str:
    departs, prompts = row.get("departs"), row.get("prompts")
    try:
        question, token = departs  # type: ignore[misc]
        return f"token {token + 1} after a prompt of {counted(prompts[question], 'token')}"  # type: ignore[index]
    except (TypeError, ValueError, IndexError):
        return "an unknown place"
