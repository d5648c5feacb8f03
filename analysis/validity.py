"""Whether to believe the gates: conditions without which some of them mean nothing.

A check that fails turns the gates it affects INCONCLUSIVE. Two kinds of FAIL stand all the same, because they are
counts of what happened and no estimate: recompiles while serving, and errors (unless the control failed too, which
points at the test bed).
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
from analysis.gates import FAIL, INCONCLUSIVE, PASS, Gate
from analysis.limits import GateLimits

Floats = npt.NDArray[np.float64]

# Kinds of gates that a check affects.
ESTIMATES = ("noninferiority", "slo")
ALL_KINDS = ("noninferiority", "slo", "recompile", "error")

# Checks that a longer run of the same kind would pass.
LENGTH_CHECKS = frozenset({"blocks", "run length", "tail", "cut requests"})

TAIL_REQUESTS = 5

_MISSING_SLACK = 2  # requests that may be under way when recorders stop
_MISSING_SHARE = 0.001
_RATIO_ALPHA = 0.001  # a sample-ratio alarm is a bug report: rare by chance
_CROSS_ALPHA = 0.25
_SLOWDOWN_LIMIT = 1.10
_WORK_APART = 0.05  # of mean lengths; a template's few tokens stay below, another tokenizer does not
_SLOWDOWN_DRAWS = 499
_FEWEST_DURING = 5


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


def apply_checks(gates: Sequence[Gate], checks: Sequence[Check]) -> list[Gate]:
    """The gates, with every PASS and every estimated FAIL that a failed check forbids turned INCONCLUSIVE."""
    return [_checked(gate, [check for check in checks if not check.ok and _concerns(check, gate)]) for gate in gates]


def _concerns(check: Check, gate: Gate) -> bool:
    # What the load an arm holds rests on is what its objectives rest on.
    kind = "slo" if gate.kind == "goodput" else gate.kind
    return kind in check.affects and check.arm in (None, gate.arm)


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


# The checks


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
    strays = [name for name in counts if name in weights and weights[name] == 0 and counts[name] > 0]
    if strays and names:
        return Check(
            check="sample ratio",
            ok=False,
            value=0.0,
            limit=_RATIO_ALPHA,
            reason=f"{strays[0]} has weight 0 and got {counts[strays[0]]} sessions.",
            affects=("noninferiority", "slo", "error"),
            remedy="Check the splitter's weights, and that no client pins an arm.",
        )
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


def check_open_loop(open_loop: bool | None, scheduled: bool, concurrency: int | None = None) -> Check:
    """Latency counts from a schedule that does not wait for the server."""
    ok = scheduled and open_loop is not False
    reason = "Requests started on schedule, whatever the server did."
    if open_loop is False:
        most = "" if concurrency is None else f", at most {concurrency} requests under way to each arm"
        reason = f"The load waited for the server (closed loop{most}), which hides the tail."
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


def check_comparable(
    arm: str, differences: Sequence[str], *, intended: bool, outside: Mapping[str, str] | None = None
) -> Check:
    """The arm differs from the control in shapes and compile policy alone, or the experiment says that it may.

    `outside` maps those of the two that are external to their kind: of them nothing can be compared.
    """
    ok = (not differences and not outside) or intended
    if outside:
        named = " and ".join(f"{name} ({kind})" for name, kind in outside.items())
        reason = (
            f"{named} {'is' if len(outside) == 1 else 'are'} external: weights, precision, limits, batching and "
            "hardware were not compared, nor the answers" + (", as the experiment intends." if intended else ".")
        )
    elif not differences:
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
        remedy="" if ok else "Make these settings equal, or set compare_models = true if that is the question.",
    )


def check_equal_work(arm: str, control: str, work: Sequence[tuple[str, float, float]]) -> Check:
    """An external arm and the control had prompts and answers of about one length, by each server's own count.

    `work` lists (what, the arm's mean, the control's). Servers count with their own tokenizer and template, and end
    answers when they like: then latencies compare other work.
    """
    apart = max((_apart(mine, theirs) for _, mine, theirs in work), default=0.0)
    means = " and ".join(f"{mine:.4g} to {theirs:.4g} {what}" for what, mine, theirs in work)
    reason = f"{arm} and {control} had on average {means}, by their own count"
    if not work:
        reason = f"Nothing tells how the lengths of what {arm} and {control} had to do compare"
    ok = apart <= _WORK_APART
    return Check(
        check="equal work",
        ok=ok,
        value=100.0 * apart if math.isfinite(apart) else None,
        limit=100.0 * _WORK_APART,
        arm=arm,
        reason=f"{reason}." if ok else f"{reason}: that is other work.",
        affects=("noninferiority",),
        remedy=""
        if ok
        else "Send token ids or give the arm's tokenizer, so that prompts have one length, and length_fields, so that "
        "answers do.",
    )


def _apart(one: float, other: float) -> float:
    low, high = sorted((one, other))
    return 0.0 if low == high else high / low - 1.0 if low > 0 else math.inf


def check_parity(arm: str, measured: Mapping[str, Any]) -> Check:
    """The arm computed what the control does, when both were measured before the traffic."""
    verdict = measured.get("verdict")
    reasons = measured.get("reasons")
    said = " ".join(str(reason) for reason in reasons) if isinstance(reasons, list) else ""
    ok = verdict == PASS
    return Check(
        check="parity",
        ok=ok,
        arm=arm,
        reason=f"{arm} computes what the control does, as nearly as its dtype lets it."
        if ok
        else f"Parity of {arm} is {verdict}: {said}",
        affects=ALL_KINDS,
        remedy="" if ok else "Run `tailgate parity` until it passes.",
    )


def check_answers(arm: str, rows: Sequence[Mapping[str, Any]], *, control: bool) -> Check:
    """After the traffic, the arm's replicas gave the answers that the control's first replica gives.

    Only float32 is judged: in lower precision, rounding may turn a token, and all that follow it. An arm that was
    asked and did not answer is no arm to compare. A control whose replicas disagree spoils every comparison.
    """
    exact = all(row.get("dtype") == "float32" for row in rows)
    silent = [row for row in rows if row.get("error")]
    same = sum(int(row.get("same") or 0) for row in rows)
    asked = sum(int(row.get("of") or 0) for row in rows)
    differ = [row for row in rows if row.get("departs") is not None]
    ok = not silent and not (exact and differ)
    reason = f"{same} of {asked} greedy answers of {arm} are the control's"
    if silent:
        reason = f"{silent[0].get('replica', arm)} did not answer after the traffic: {silent[0].get('error')}"
    elif exact and differ:
        reason += f", first other at {_departure(differ[0])}: in float32 they must be equal"
    elif differ:
        reason += ", which lower precision allows"
    return Check(
        check="answers",
        ok=ok,
        value=float(same),
        limit=float(asked),
        arm=None if control else arm,
        reason=f"{reason}.",
        affects=ALL_KINDS,
        remedy="" if ok else "Run `tailgate parity` on the experiment: it says by how much the arms differ.",
    )


def _departure(row: Mapping[str, Any]) -> str:
    departs, prompts = row.get("departs"), row.get("prompts")
    try:
        question, token = departs  # type: ignore[misc]
        return f"token {token + 1} after a prompt of {prompts[question]} tokens"  # type: ignore[index]
    except (TypeError, ValueError, IndexError):
        return "an unknown place"


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
