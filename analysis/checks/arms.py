"""Whether an arm may be compared with the control at all: one model, one kind of work, one answer."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from tailgate.analysis.checks.check import ALL_KINDS, PARITY, Check, Evidence, Rule
from tailgate.analysis.judging.gates import PASS
from tailgate.analysis.judging.gates.parity import judge_answers
from tailgate.analysis.records.plain_values import mapping
from tailgate.analysis.run.run import Run
from tailgate.analysis.run.work import WORK_TOLERANCE, TokenTimes, Work, gates_on_gaps, token_times, work_of
from tailgate.analysis.wording import listed, percent

_AT_ONCE_TOLERANCE = 0.05
_SURE = 3.29  # standard errors of a difference of shares: p = 0.001, two-sided


def _comparable(seen: Evidence) -> Iterable[Check]:
    run, intended = seen.run, seen.run.records.experiment.get("compare_models") is True
    for arm in run.treatments:
        external = [account.arm for account in map(run.account, (arm, run.control)) if account.external]
        yield comparable(arm, _differences(run, arm), intended=intended, external=external)


def _differences(run: Run, arm: str) -> list[str] | None:
    """Return the keys of model and engine that differ from the control's, except the treatment.

    None if only one of the two has resolved settings: an experiment's table leaves out what is common to all arms, or a
    default.
    """
    own, base = run.account(arm), run.account(run.control)
    if bool(own.resolved) != bool(base.resolved):
        return None
    different = []
    for part in ("model", "engine"):
        values, control = mapping(own.config.get(part)), mapping(base.config.get(part))
        if values and control:
            # quantisation is a treatment, as the policies are
            keys = sorted({*values, *control} - {"quantisation"})
            different += [f"{part}.{key}" for key in keys if not _alike(key, values.get(key), control.get(key))]
    return different


def _alike(key: str, one: Any, other: Any) -> bool:
    """Return whether two arms share a setting: cuda:0 and cuda:1 are devices of one kind, cpu and cuda are not."""
    if key == "device" and isinstance(one, str) and isinstance(other, str):
        return one.partition(":")[0] == other.partition(":")[0]
    return bool(one == other)


def comparable(arm: str, differences: Sequence[str] | None, *, intended: bool, external: Collection[str] = ()) -> Check:
    """Check that the arm differs from the control only in shapes, compile policy and quantisation, or as intended.

    `differences` is None if one of the two has no recorded settings; those of `external` arms are never known.
    """
    faults = [f"{arm} also differs from the control in {', '.join(differences)}"] if differences else []
    if external:
        faults = [
            f"{listed([*external])}: weights, precision, limits, batching and answers of an external arm are unknown"
        ]
    elif differences is None:
        faults = [f"it is not recorded how {arm} and the control were configured, since one of them ran in no trial"]
    return COMPARABLE.found([] if intended else faults, arm=arm)


COMPARABLE = Rule(
    name="comparable",
    sees="Arms differ in settings of `model` or `engine` other than `quantisation`. Of an external arm nothing is "
    "known.",
    find=_comparable,
    says="A difference between the arms cannot be attributed to the compiler: {}.",
    remedy="Make these settings equal, or set compare_models = true if that is the question.",
    opens=("noninferiority", "goodput"),
)


def _equal_work(seen: Evidence) -> Iterable[Check]:
    works = [work_of(seen.run, arm) for arm in seen.run.treatments]
    return [equal_work(work) for work in works if work.means or work.other]


def equal_work(work: Work) -> Check:
    """Check that the arm and the control did equal work: prompts and answers of equal length.

    Servers count with their own tokenizer and template, and end answers on their own: latencies then compare different
    work, and less work is not more speed.
    """
    difference = max((_relative_difference(own, control) for _, own, control in work.means), default=0.0)
    means = " and ".join(f"{own:.4g} to {control:.4g} {what}" for what, own, control in work.means)
    faults = (
        [f"{work.arm} and {work.control} had {means} on average, by their own count"]
        if difference > WORK_TOLERANCE
        else []
    )
    return EQUAL_WORK.found([*faults, *work.other], arm=work.arm)


def _relative_difference(one: float, other: float) -> float:
    low, high = sorted((one, other))
    return 0.0 if low == high else high / low - 1.0 if low > 0 else math.inf


EQUAL_WORK = Rule(
    name="equal work",
    sees=f"Prompts or answers differ in mean length by more than {percent(WORK_TOLERANCE)}; or, beyond chance "
    "(p < 0.001), answers by 1 %, or the share of short ones by 0.5 %; or an answer of forced length has another "
    "length.",
    find=_equal_work,
    says="The arms did different work: {}.",
    remedy="Make prompts and answers of one length (traffic.ignore_eos; for an external arm token ids or its "
    "tokenizer, and length_fields), and find out why an arm answers less or more than asked.",
)


def _token_stream(seen: Evidence) -> Iterable[Check]:
    run = seen.run
    if not run.embeds:
        control, judged = token_times(run, run.control), gates_on_gaps(run)
        yield from (token_stream(token_times(run, arm), control, judged=judged) for arm in run.treatments)


def token_stream(own: TokenTimes, control: TokenTimes, *, judged: bool) -> Check:
    """Check that the tokens of both arms have their own times. An answer that comes in one piece has no ITL and no
    TPOT. `judged`: a gate uses them."""
    both = (own, control)
    faults = [
        f"{times.untimed} of {times.answers} answers of {times.arm} lack a time for each token"
        for times in both
        if times.untimed
    ]
    shares = [times.at_once / max(1, times.many) for times in both]
    common = sum(times.at_once for times in both) / max(1, sum(times.many for times in both))
    chance = _SURE * math.sqrt(common * (1.0 - common) * sum(1.0 / max(1, times.many) for times in both))
    difference = abs(shares[0] - shares[1])
    if difference > max(_AT_ONCE_TOLERANCE, chance):
        pieces = [f"{100.0 * share:.0f} % of {times.arm}" for share, times in zip(shares, both, strict=True)]
        faults.append(f"answers in one piece were {' and '.join(pieces)}")
    return TOKEN_STREAM.found(faults if judged else [], arm=own.arm)


TOKEN_STREAM = Rule(
    name="token stream",
    sees=f"Answers of one arm come in one piece more often (by {percent(_AT_ONCE_TOLERANCE)}, beyond chance), or "
    "tokens lack times, and a gate or objective rests on token gaps.",
    find=_token_stream,
    says="Gaps between tokens cannot be compared: {}.",
    remedy="Let both servers stream token by token, or judge by TTFT and E2E alone.",
)


def _answers(seen: Evidence) -> Iterable[Check]:
    """Compare the answers of the control's own replicas; an arm's are its gate `parity`. Only float32 must be equal."""
    control, rows = seen.run.control, seen.run.account(seen.run.control).answers
    # A single replica is its own measure.
    if len({row.get("replica") for row in rows}) > 1 or any(row.get("error") for row in rows):
        verdict, reason = judge_answers(control, rows)
        yield ANSWERS.found([] if verdict == PASS else [reason.removesuffix(".")])


ANSWERS = Rule(
    name="answers",
    sees="The control's own replicas gave different answers in float32, or one gave none.",
    find=_answers,
    remedy="Find out why the control's replicas differ, then run again.",
    opens=(*ALL_KINDS, PARITY),
    at_end=True,
)
