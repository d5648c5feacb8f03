"""Whether an arm may be compared with the control at all: one model, one kind of work, one answer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from analysis.judging.gates import PASS
from analysis.judging.gates.parity import judge_answers
from analysis.judging.validity import ALL_KINDS, ESTIMATES, PARITY, Check
from analysis.run.work import WORK_APART, TokenTimes, Work


def check_comparable(
    arm: str,
    differences: Sequence[str] | None,
    *,
    intended: bool,
    outside: Mapping[str, str] | None = None,
    weights_apart: str = "",
) -> Check:
    """The arm differs from the control in shapes, compile policy and how its weights are held (`weights_apart`, where
    they are) alone, or the experiment allows more. `differences` are None where it is not known how one of them was
    configured.

    `outside` maps those of the two that are external to their kind: of them nothing can be compared.
    """
    ok = (differences is not None and not differences and not outside) or intended
    if outside:
        named = " and ".join(f"{name} ({kind})" for name, kind in outside.items())
        reason = (
            f"{named} {'is' if len(outside) == 1 else 'are'} external: weights, precision, limits, batching and "
            "hardware were not compared, nor the answers" + (", as the experiment intends." if intended else ".")
        )
    elif differences is None:
        reason = f"How {arm} and the control were configured is not recorded of both: no trial of one of them says it."
    elif not differences:
        weights = f" and its weights, held as {weights_apart}," if weights_apart else ""
        reason = f"{arm} differs from the control in its policy{weights} alone."
    else:
        reason = f"{arm} also differs from the control in {', '.join(differences)}" + (
            ", as the experiment intends." if intended else ": a difference cannot be laid to the compiler."
        )
    return Check(
        check="comparable",
        ok=ok,
        value=float(len(differences or ())),
        limit=0.0,
        arm=arm,
        reason=reason,
        affects=("noninferiority", "goodput"),
        remedy="Let every arm run in a trial."
        if differences is None
        else "Make these settings equal, or set compare_models = true if that is the question.",
    )


def check_equal_work(work: Work) -> Check:
    """The arm and the control did the same work: prompts of one length, and answers as long as each other's.

    Servers count with their own tokenizer and template, and end answers when they like: then latencies compare other
    work, and what does less of it is no faster.
    """
    apart = max((_apart(own, control) for _, own, control in work.means), default=0.0)
    means = " and ".join(f"{own:.4g} to {control:.4g} {what}" for what, own, control in work.means)
    seen = f"{work.arm} and {work.control} had on average {means}, by their own count"
    if not work.means:
        seen = f"Nothing tells how the lengths of what {work.arm} and {work.control} had to do compare"
    ok = apart <= WORK_APART and not work.other
    reason = "; ".join((seen, *work.other))
    return Check(
        check="equal work",
        ok=ok,
        value=100.0 * apart if math.isfinite(apart) else None,
        limit=100.0 * WORK_APART,
        arm=work.arm,
        reason=f"{reason}." if ok else f"{reason}: that is other work.",
        affects=ESTIMATES,
        remedy="Make prompts and answers of one length (traffic.ignore_eos; for an external arm token ids or its "
        "tokenizer, and length_fields), and find out why an arm answers less or more than asked.",
    )


_AT_ONCE_APART = 0.05
_SURE = 3.29  # standard errors of a difference of shares: p = 0.001, two-sided


def check_token_stream(own: TokenTimes, control: TokenTimes, *, judged: bool) -> Check:
    """Both arms' tokens have times of their own, so that gaps between them compare.

    An answer that comes in one piece has no gap and no time per token. `judged`: something is judged by gaps.
    """
    both = (own, control)
    faults = [
        f"{times.untimed} of {times.answers} answers of {times.arm} have not one time for each token"
        for times in both
        if times.untimed
    ]
    shares = [times.at_once / times.many if times.many else 0.0 for times in both]
    common = sum(times.at_once for times in both) / max(1, sum(times.many for times in both))
    chance = _SURE * math.sqrt(common * (1.0 - common) * sum(1.0 / max(1, times.many) for times in both))
    if abs(shares[0] - shares[1]) > max(_AT_ONCE_APART, chance):
        faults.append(
            f"{100.0 * shares[0]:.0f} % of the answers of {own.arm} came in one piece, {100.0 * shares[1]:.0f} % of "
            f"those of {control.arm}"
        )
    return Check(
        check="token stream",
        ok=not (faults and judged),
        value=100.0 * abs(shares[0] - shares[1]),
        limit=100.0 * _AT_ONCE_APART,
        arm=own.arm,
        reason=f"{'; '.join(faults)}: gaps between tokens do not compare."
        if faults
        else "The tokens of both arms have times of their own.",
        affects=ESTIMATES,
        remedy="Let both servers stream token by token, or judge by TTFT and E2E alone.",
    )


def _apart(one: float, other: float) -> float:
    low, high = sorted((one, other))
    return 0.0 if low == high else high / low - 1.0 if low > 0 else math.inf


def check_answers(control: str, rows: Sequence[Mapping[str, Any]]) -> Check:
    """After the traffic, the control's replicas gave one and the same answer: else nothing can be held to it.

    What an arm's own replicas answered is its gate `parity`. As there, only float32 must be equal.
    """
    verdict, reason = judge_answers(control, rows)
    return Check(
        check="answers",
        ok=verdict == PASS,
        value=float(sum(int(row.get("same") or 0) for row in rows)),
        limit=float(sum(int(row.get("of") or 0) for row in rows)),
        reason=reason,
        affects=(*ALL_KINDS, PARITY),
        remedy=f"Find out why the replicas of {control} differ, then run again.",
    )
