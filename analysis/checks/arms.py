"""Whether an arm may be compared with the control at all: one model, one kind of work, one answer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from analysis.gates import PASS, judge_answers
from analysis.validity import ALL_KINDS, PARITY, Check

_WORK_APART = 0.05  # of mean lengths; a template's few tokens stay below, another tokenizer does not


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
        affects=("noninferiority", "goodput"),
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
        affects=("noninferiority", "goodput"),
        remedy=""
        if ok
        else "Send token ids or give the arm's tokenizer, so that prompts have one length, and length_fields, so that "
        "answers do.",
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
        remedy="" if verdict == PASS else f"Find out why the replicas of {control} differ, then run again.",
    )
