"""Whether an arm may be compared with the control at all: one model, one kind of work, one answer."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tailgate.analysis.checks.check import ALL_KINDS, PARITY, Check, Evidence, rule
from tailgate.analysis.judging.gates import PASS
from tailgate.analysis.judging.gates.parity import judge_answers
from tailgate.analysis.records.plain_values import mapping
from tailgate.analysis.run.run import Run
from tailgate.analysis.run.work import WORK_TOLERANCE, TokenTimes, Work, token_times, work_of
from tailgate.analysis.wording import listed, percent

_AT_ONCE_TOLERANCE = 0.05
_SURE = 3.29  # standard errors of a difference of shares: p = 0.001, two-sided


@rule(
    "comparable",
    sees="Arms differ in settings of `model` or `engine` other than `quantisation`. Of an external arm nothing is "
    "known.",
    says="A difference between the arms cannot be attributed to the compiler: {}.",
    remedy="Make these settings equal, or set compare_models = true if that is the question.",
    opens=("noninferiority", "goodput"),
)
def comparable(seen: Evidence) -> Iterator[Check]:
    intended = seen.run.records.experiment.get("compare_models") is True
    for arm in seen.run.treatments:
        yield comparable.found([] if intended else _differences(seen.run, arm), arm=arm)


def _differences(run: Run, arm: str) -> list[str]:
    own, base = run.account(arm), run.account(run.control)
    if external := [account.arm for account in (own, base) if account.external]:
        return [f"{listed(external)}: weights, precision, limits, batching and answers of an external arm are unknown"]
    # An experiment's table, unlike resolved settings, leaves out what is common to all arms, or a default.
    if bool(own.resolved) != bool(base.resolved):
        return [f"it is not recorded how {arm} and the control were configured, since one of them ran in no trial"]
    different = []
    for part in ("model", "engine"):
        values, control = mapping(own.config.get(part)), mapping(base.config.get(part))
        if values and control:
            # quantisation is a treatment, as the policies are
            keys = sorted({*values, *control} - {"quantisation"})
            # cuda:0 and cuda:1 are devices of one kind, cpu and cuda are not
            one, two = ({**its, "device": str(its.get("device")).partition(":")[0]} for its in (values, control))
            different += [f"{part}.{key}" for key in keys if one.get(key) != two.get(key)]
    return [f"{arm} also differs from the control in {', '.join(different)}"] if different else []


@rule(
    "equal work",
    sees=f"Prompts or answers differ in mean length by more than {percent(WORK_TOLERANCE)}; or, beyond chance "
    "(p < 0.001), answers by 1 %, or the share of short ones by 0.5 %; or an answer of forced length has another "
    "length.",
    says="The arms did different work: {}.",
    remedy="Make prompts and answers of one length (traffic.ignore_eos; for an external arm its tokenizer "
    "and length_fields), and find out why an arm answers less or more than asked.",
)
def equal_work(seen: Evidence) -> Iterator[Check]:
    """Servers count with their own tokenizer and template, and end answers on their own: latencies then compare
    different work, and less work is not more speed."""
    for work in [work_of(seen.run, arm) for arm in seen.run.treatments]:
        if work.means or work.other:
            yield equal_work.found([*unequal_means(work), *work.other], arm=work.arm)


def unequal_means(work: Work) -> list[str]:
    """Describe mean lengths if any of them differs too much."""
    if all(max(pair) <= min(pair) * (1.0 + WORK_TOLERANCE) for _, *pair in work.means):
        return []
    means = " and ".join(f"{own:.4g} to {control:.4g} {what}" for what, own, control in work.means)
    return [f"{work.arm} and {work.control} had {means} on average, by their own count"]


@rule(
    "token stream",
    sees=f"Answers of one arm come in one piece more often (by {percent(_AT_ONCE_TOLERANCE)}, beyond chance), or "
    "tokens lack times, and a gate or objective rests on token gaps.",
    says="Gaps between tokens cannot be compared: {}.",
    remedy="Let both servers stream token by token, or judge by TTFT and E2E alone.",
)
def token_stream(seen: Evidence) -> Iterator[Check]:
    run = seen.run
    if not run.embeds:
        judged = {*run.limits.metrics, *(target.metric for target in run.targets)} & {"tpot", "itl", "max_itl"}
        control = token_times(run, run.control)
        for arm in run.treatments:
            yield token_stream.found(gap_faults(token_times(run, arm), control) if judged else [], arm=arm)


def gap_faults(*both: TokenTimes) -> list[str]:
    """Describe tokens without times of their own. An answer that comes in one piece has no ITL and no TPOT."""
    faults = [
        f"{times.untimed} of {times.answers} answers of {times.arm} lack a time for each token"
        for times in both
        if times.untimed
    ]
    shares = [times.at_once / max(1, times.many) for times in both]
    common = sum(times.at_once for times in both) / max(1, sum(times.many for times in both))
    chance = _SURE * math.sqrt(common * (1.0 - common) * sum(1.0 / max(1, times.many) for times in both))
    if max(shares) - min(shares) > max(_AT_ONCE_TOLERANCE, chance):
        pieces = [f"{100.0 * share:.0f} % of {times.arm}" for share, times in zip(shares, both, strict=True)]
        faults.append(f"answers in one piece were {' and '.join(pieces)}")
    return faults


@rule(
    "answers",
    sees="The control's own replicas gave different answers in float32, or one gave none.",
    remedy="Find out why the control's replicas differ, then run again.",
    opens=(*ALL_KINDS, PARITY),
    at_end=True,
)
def answers(seen: Evidence) -> Iterator[Check]:
    """An arm's answers are its gate `parity`. Only float32 must be equal."""
    control, rows = seen.run.control, seen.run.account(seen.run.control).answers
    # A single replica is its own measure.
    if len({row.get("replica") for row in rows}) > 1 or any(row.get("error") for row in rows):
        verdict, reason = judge_answers(control, rows)
        yield answers.found([] if verdict == PASS else [reason.removesuffix(".")])
