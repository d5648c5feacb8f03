"""Whether an arm may be compared with the control at all: one model, one kind of work, one answer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from analysis.checks.check import ALL_KINDS, PARITY, Check, Evidence, Rule
from analysis.judging.gates import PASS
from analysis.judging.gates.parity import judge_answers
from analysis.run.work import WORK_APART, TokenTimes, Work, gates_on_gaps, token_times, work_of

_AT_ONCE_APART = 0.05
_SURE = 3.29  # standard errors of a difference of shares: p = 0.001, two-sided


def _comparable(seen: Evidence) -> Iterable[Check]:
    run, intended = seen.run, seen.run.records.experiment.get("compare_models") is True
    for arm in run.treatments:
        accounts = [run.account(name) for name in (arm, run.control)]
        external = {account.arm: str(account.external["kind"]) for account in accounts if account.external}
        weights = run.weights_apart(arm)
        yield comparable(arm, run.differences(arm), intended=intended, external=external, weights=weights)


def comparable(
    arm: str,
    differences: Sequence[str] | None,
    *,
    intended: bool,
    external: Mapping[str, str] | None = None,
    weights: str = "",
) -> Check:
    """The arm differs from the control in shapes, compile policy and how its weights are held (`weights`, where they
    are) alone, or the experiment allows more. `differences` are None where it is unknown how one of them was
    configured. `external` maps those of the two that are external to their kind: of them nothing can be compared."""
    ok = (differences is not None and not differences and not external) or intended
    if external:
        named = " and ".join(f"{name} ({kind})" for name, kind in external.items())
        reason = (
            f"{named} {'is' if len(external) == 1 else 'are'} external: weights, precision, limits, batching and "
            "hardware were not compared, nor the answers" + (", as the experiment intends." if intended else ".")
        )
    elif differences is None:
        reason = f"How {arm} and the control were configured is not recorded of both: no trial of one of them says it."
    elif not differences:
        held = f" and its weights, held as {weights}," if weights else ""
        reason = f"{arm} differs from the control in its policy{held} alone."
    else:
        reason = f"{arm} also differs from the control in {', '.join(differences)}" + (
            ", as the experiment intends." if intended else ": a difference cannot be attributed to the compiler."
        )
    remedy = "Let every arm run in a trial." if differences is None else None
    return COMPARABLE.row(ok, reason, arm=arm, remedy=remedy)


COMPARABLE = Rule(
    name="comparable",
    find=_comparable,
    sound="Every arm differs from the control in its policy alone, or as the experiment intends.",
    remedy="Make these settings equal, or set compare_models = true if that is the question.",
    opens=("noninferiority", "goodput"),
)


def _equal_work(seen: Evidence) -> Iterable[Check]:
    return [equal_work(work_of(seen.run, arm)) for arm in seen.run.treatments]


def equal_work(work: Work) -> Check:
    """The arm and the control did the same work: prompts of one length, and answers as long as each other's.

    Servers count with their own tokenizer and template, and end answers when they like: then latencies compare other
    work, and what does less of it is no faster.
    """
    apart = max((_apart(own, control) for _, own, control in work.means), default=0.0)
    means = " and ".join(f"{own:.4g} to {control:.4g} {what}" for what, own, control in work.means)
    seen = f"{work.arm} and {work.control} had on average {means}, by their own count"
    if not work.means:
        seen = f"The records do not say how the lengths of prompts and answers of {work.arm} and {work.control} compare"
    ok = apart <= WORK_APART and not work.other
    return EQUAL_WORK.row(
        ok,
        f"{'; '.join((seen, *work.other))}{'.' if ok else ': that is other work.'}",
        value=100.0 * apart if math.isfinite(apart) else None,
        limit=100.0 * WORK_APART,
        arm=work.arm,
    )


def _apart(one: float, other: float) -> float:
    low, high = sorted((one, other))
    return 0.0 if low == high else high / low - 1.0 if low > 0 else math.inf


EQUAL_WORK = Rule(
    name="equal work",
    find=_equal_work,
    sound="Prompts and answers of every arm were as long as the control's.",
    remedy="Make prompts and answers of one length (traffic.ignore_eos; for an external arm token ids or its "
    "tokenizer, and length_fields), and find out why an arm answers less or more than asked.",
)


def _token_stream(seen: Evidence) -> Iterable[Check]:
    run = seen.run
    if not run.embeds and run.design != "shadow":
        control, judged = token_times(run, run.control), gates_on_gaps(run)
        yield from (token_stream(token_times(run, arm), control, judged=judged) for arm in run.treatments)


def token_stream(own: TokenTimes, control: TokenTimes, *, judged: bool) -> Check:
    """Both arms' tokens have times of their own, so that gaps between them compare: an answer that comes in one piece
    has no gap and no time per token. `judged`: something is judged by gaps."""
    both = (own, control)
    faults = [
        f"{times.untimed} of {times.answers} answers of {times.arm} have not one time for each token"
        for times in both
        if times.untimed
    ]
    shares = [times.at_once / times.many if times.many else 0.0 for times in both]
    common = sum(times.at_once for times in both) / max(1, sum(times.many for times in both))
    chance = _SURE * math.sqrt(common * (1.0 - common) * sum(1.0 / max(1, times.many) for times in both))
    apart = abs(shares[0] - shares[1])
    if apart > max(_AT_ONCE_APART, chance):
        faults.append(
            f"{100.0 * shares[0]:.0f} % of the answers of {own.arm} came in one piece, {100.0 * shares[1]:.0f} % of "
            f"those of {control.arm}"
        )
    reason = f"{'; '.join(faults)}: gaps between tokens do not compare." if faults else ""
    limit = 100.0 * _AT_ONCE_APART
    return TOKEN_STREAM.row(not (faults and judged), reason, value=100.0 * apart, limit=limit, arm=own.arm)


TOKEN_STREAM = Rule(
    name="token stream",
    find=_token_stream,
    sound="The tokens of all arms have times of their own.",
    remedy="Let both servers stream token by token, or judge by TTFT and E2E alone.",
)


def _answers(seen: Evidence) -> Iterable[Check]:
    """What an arm's own replicas answered is its gate `parity`. As there, only float32 must be equal."""
    control, rows = seen.run.control, seen.run.account(seen.run.control).answers
    # A single replica is its own measure.
    if len({row.get("replica") for row in rows}) > 1 or any(row.get("error") for row in rows):
        verdict, reason = judge_answers(control, rows)
        remedy = f"Find out why the replicas of {control} differ, then run again."
        yield ANSWERS.row(verdict == PASS, reason, remedy=remedy)


ANSWERS = Rule(
    name="answers",
    find=_answers,
    sound="After the traffic, the control's replicas gave one and the same answer.",
    opens=(*ALL_KINDS, PARITY),
    at_end=True,
)
