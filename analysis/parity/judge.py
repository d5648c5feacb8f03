"""Whether two arms compute the same: greedy tokens against the control's, logits against a float64 reference.

An arm whose weights are quantised is judged by how well it predicts texts instead: accuracy.py.

Pure decisions over arrays; nothing is run or read here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from analysis.arrays import Floats
from analysis.judging.gates import FAIL, INCONCLUSIVE, PASS
from analysis.judging.verdict import combined
from analysis.parity.accuracy import AccuracyLimits, Texts, judge_accuracy
from analysis.parity.borders import Borders, judge_borders
from analysis.parity.evenness import judge_evenness
from analysis.parity.finding import Finding
from analysis.parity.flips import Answers, Flip, Places, answered, departures, flips_of, largest_share_of_bound
from analysis.parity.measures import (
    EPSILON,
    ERROR_LIMIT,
    LEAST_REQUESTS,
    Matrix,
    Measures,
    Statistic,
    measure,
    median,
    noise_bound,
    p99,
    ratio_interval,
)
from analysis.wording import counted

WORST_LIMIT = 2.0 * ERROR_LIMIT  # a single position is a matter of luck as well
KL_LIMIT = ERROR_LIMIT**2  # a divergence grows with the square of the error


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """What the arms in `quantised` (name: kind) are judged by.

    Without `texts` these are the control's own answers; else the reference's logits for them are `reference`, None
    where there is no float64.
    """

    quantised: Mapping[str, str]
    limits: AccuracyLimits
    texts: Texts | None = None
    reference: Matrix | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmParity:
    """One arm, judged. `figures` are plain numbers for the report."""

    name: str
    verdict: str
    findings: tuple[Finding, ...]
    figures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reasons(self) -> tuple[str, ...]:
        """The reasons of what did not pass, failures first."""
        ordered = sorted(self.findings, key=lambda item: (FAIL, INCONCLUSIVE, PASS).index(item.verdict))
        return tuple(item.reason for item in ordered if item.verdict != PASS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """The outcome: of the control against the reference, of every other arm, and of all together."""

    verdict: str
    control: ArmParity
    arms: tuple[ArmParity, ...]

    def to_dict(self) -> dict[str, Any]:
        """The outcome as JSON can hold it: a number that is not finite becomes null."""
        rows = [asdict(arm) | {"reasons": arm.reasons} for arm in self.arms]
        return {key: _plain(value) for key, value in (asdict(self) | {"arms": rows}).items()}


def judge(
    control: Answers,
    arms: Sequence[Answers],
    reference: Matrix | None,
    *,
    dtype: str,
    prompts: Sequence[int],
    seed: int,
    accuracy: Accuracy | None = None,
    borders: Mapping[str, Borders] | None = None,
    refused: Mapping[str, str] | None = None,
) -> Parity:
    """The parity of `arms` with `control`. `prompts` are the lengths of the prompts, for the reasons' sake; `borders`
    are those of each arm by its name, with what was left unasked. Arms in `refused`, which are not among
    `arms`, refused a request for the reason given: they fail, whatever the control is.

    Without a reference nothing says how far the control itself is from the truth: float32 is judged by its tokens
    alone, and lower precision stays INCONCLUSIVE. Quantised arms are then judged against the control.
    """
    place = Places(lengths=[len(tokens) for tokens in control.tokens], prompts=prompts)
    base = measure(control.logits, reference) if reference is not None else None
    checked = _judge_control(control, base, reference, place, dtype)
    quantised = accuracy.quantised if accuracy is not None else {}
    alike: dict[str, Answers] = {}  # the first arm of each kind of quantised weights
    for arm in arms:
        if arm.name in quantised:
            alike.setdefault(quantised[arm.name], arm)
    judged = tuple(
        _judge_quantised(
            arm, control, base, alike[quantised[arm.name]], reference, place, accuracy, dtype=dtype, seed=seed
        )
        if accuracy is not None and arm.name in quantised
        else _judge_arm(arm, control, base, reference, place, dtype=dtype, seed=seed)
        for arm in arms
    )
    return concluded(checked, judged, borders=borders or {}, refused=refused or {})


def concluded(
    control: ArmParity, arms: Sequence[ArmParity], *, borders: Mapping[str, Borders], refused: Mapping[str, str]
) -> Parity:
    """The outcome of `arms` that are judged by what they compute, once their `borders` are judged too and the `control`
    is believed or not; and of those that `refused`."""
    judged = [_also(arm, judge_borders(arm.name, borders[arm.name])) if arm.name in borders else arm for arm in arms]
    if control.verdict != PASS:
        judged = [_doubted(arm, control) for arm in judged]
    judged += [_judge_refusal(name, reason) for name, reason in refused.items()]
    return Parity(verdict=combined([arm.verdict for arm in judged]), control=control, arms=tuple(judged))


def _judge_refusal(name: str, reason: str) -> ArmParity:
    finding = Finding(name="refused", verdict=FAIL, reason=f"{name} refuses what it is asked: {reason}.")
    return ArmParity(name=name, verdict=FAIL, findings=(finding,))


def _also(arm: ArmParity, finding: Finding) -> ArmParity:
    return replace(arm, verdict=combined([arm.verdict, finding.verdict]), findings=(*arm.findings, finding))


def _judge_control(
    control: Answers, base: Measures | None, reference: Matrix | None, place: Places, dtype: str
) -> ArmParity:
    """The control computes the model that the reference does, as nearly as its dtype lets it."""
    if base is None or reference is None:
        return ArmParity(name=control.name, verdict=PASS, findings=())
    tail = p99(base.error)
    # Half of the dtype's digits may be lost on the way through the layers, and one bit more.
    limit = 2.0 * math.sqrt(EPSILON[dtype])
    ok = tail <= limit and bool(base.finite.all())
    findings = [
        Finding(
            name="control error",
            verdict=PASS if ok else INCONCLUSIVE,
            value=tail,
            limit=limit,
            reason=f"The p99 of the error of {control.name} against float64 is {tail:.2g}, limit {limit:.2g} in {dtype}"
            + ("." if ok else ": it does not compute this model, and is no measure for others."),
        )
    ]
    bound = noise_bound(base, dtype)
    flips = flips_of(control, control, base, bound, reference, place)
    strange = [flip for flip in (*flips, *answered(control, reference, bound, place)) if not flip.explained]
    findings.append(
        Finding(
            name="control flips",
            verdict=INCONCLUSIVE if strange else PASS,
            value=float(len(strange)),
            limit=0.0,
            reason=f"{_worst(strange, place, control.name)}: it does not answer as it computes."
            if strange
            else f"Every token of {control.name} is float64's, or within noise of it.",
        )
    )
    return ArmParity(
        name=control.name,
        verdict=combined([item.verdict for item in findings]),
        findings=tuple(findings),
        figures=_figures(base) | {"flips": len(flips), "flips_unexplained": len(strange)},
    )


def _doubted(arm: ArmParity, control: ArmParity) -> ArmParity:
    """Nothing can be blamed on an arm whose measure is broken."""
    doubt = Finding(name="control", verdict=INCONCLUSIVE, reason=" ".join(control.reasons))
    opened = (replace(item, verdict=INCONCLUSIVE) for item in arm.findings if item.verdict == FAIL)
    kept = (item for item in arm.findings if item.verdict != FAIL)
    return replace(arm, verdict=INCONCLUSIVE, findings=(doubt, *opened, *kept))


def _judge_arm(
    arm: Answers,
    control: Answers,
    base: Measures | None,
    reference: Matrix | None,
    place: Places,
    *,
    dtype: str,
    seed: int,
) -> ArmParity:
    against_control = measure(arm.logits, control.logits)
    left = departures(arm, control)
    figures: dict[str, Any] = {
        "answers": len(control.tokens),
        "answers_same": len(control.tokens) - len(left),
        "positions": len(against_control),
        "divergence_control": _summary(against_control.divergence),
        "flips_control": int((against_control.lead > 0).sum()),
    }
    if base is None or reference is None:
        figures |= {"error_control": _summary(against_control.error)}
        findings = [_finite(arm.name, against_control, place)]
        if dtype == "float32":
            findings.append(_same_tokens(arm, control, left, None, None, place))
        else:
            reason = (
                f"There is no float64 reference, so nothing says whether what separates {arm.name} from {control.name} "
                f"is more than {dtype} costs."
            )
            findings.append(Finding(name="reference", verdict=INCONCLUSIVE, reason=reason))
    else:
        own, bound = measure(arm.logits, reference), noise_bound(base, dtype)
        flips = flips_of(arm, control, own, bound, reference, place)
        figures |= _figures(own) | {
            "flips": sum(flip.lead > 0 for flip in flips),
            "flips_share": largest_share_of_bound(flips),
            "flips_unexplained": sum(not flip.explained for flip in flips),
        }
        findings = [_finite(arm.name, own, place)]
        if dtype == "float32":
            findings.append(_same_tokens(arm, control, left, reference, bound, place))
        findings += _errors(arm.name, own, base, place, np.random.default_rng(seed))
        findings.append(_explained(arm.name, flips, place))
    verdict = combined([item.verdict for item in findings])
    return ArmParity(name=arm.name, verdict=verdict, findings=tuple(findings), figures=figures)


def _judge_quantised(
    arm: Answers,
    control: Answers,
    base: Measures | None,
    alike: Answers,
    reference: Matrix | None,
    place: Places,
    accuracy: Accuracy,
    *,
    dtype: str,
    seed: int,
) -> ArmParity:
    """`alike` is the first arm with weights of the same kind: beside its error, that of another such arm is what its
    policy adds, as that of any arm is beside the control's."""
    against, truth = ("float64", reference) if reference is not None else (control.name, control.logits)
    own = measure(arm.logits, truth)
    left = departures(arm, control)
    figures: dict[str, Any] = {
        "answers": len(control.tokens),
        "answers_same": len(control.tokens) - len(left),
        "positions": len(own),
        "against": against,
        **_figures(own),
    }
    findings = [_finite(arm.name, own, place)]
    if own.finite.all():
        findings.append(_as_computed(arm, left, noise_bound(own, dtype), place))
        findings += judge_evenness(arm.name, own, base, place, dtype)
    if alike is not arm and reference is not None:
        first = measure(alike.logits, truth)
        findings += _errors(arm.name, own, first, place, np.random.default_rng(seed), of=alike.name)
    texts, logits = accuracy.texts, arm.texts
    if texts is None:
        source = f"{control.name}'s own answers to random prompts"
        texts, logits = Texts(tokens=control.tokens, source=source, more="raise parity.prompts"), arm.logits
    else:
        given = accuracy.reference if reference is not None else control.texts
        if logits is None or given is None:
            raise ValueError(f"{arm.name} is judged by texts that it or its reference was not given")
        own, truth = measure(logits, given), given
    judged, more = judge_accuracy(
        arm.name, own, logits, truth, texts, accuracy.limits, against=against, rng=np.random.default_rng(seed)
    )
    verdict = combined([item.verdict for item in (*findings, *judged)])
    return ArmParity(name=arm.name, verdict=verdict, findings=(*findings, *judged), figures=figures | more)


def _as_computed(arm: Answers, left: Sequence[tuple[int, int]], bound: Floats, place: Places) -> Finding:
    """The engine answers with what the arm's logits prefer, as far as its answers are the control's and one further.

    The bound is the arm's own: a small difference between two steps may turn a number to the next that its quantised
    form knows. The leads are within its own logits, so that this bound does not explain them by arithmetic.
    """
    ends = dict(left)
    flips = []
    for request, tokens in enumerate(arm.tokens):
        for token in range(min(len(tokens), ends.get(request, len(tokens)) + 1)):
            position = place.position(request, token)
            row = np.asarray(arm.logits[position], dtype=np.float64)
            lead = float(row.max() - row[tokens[token]])
            flips.append(
                Flip(position=position, token=tokens[token], free=True, lead=lead, bound=float(bound[position]))
            )
    strange = [flip for flip in flips if not flip.explained]
    worst = max(strange, key=lambda flip: flip.lead / flip.bound, default=None)
    return Finding(
        name="answers",
        verdict=FAIL if strange else PASS,
        value=float(len(strange)),
        limit=0.0,
        reason=f"{counted(len(strange), 'token')} of {arm.name}'s answers "
        f"{'is' if len(strange) == 1 else 'are'} not what it computes; worst at "
        f"{place.text(worst.position)}: it takes {worst.token}, and its own logits prefer another by {worst.lead:.3g} "
        f"where noise can turn {worst.bound:.2g}."
        if worst is not None
        else f"Every token of {arm.name} is what its own logits prefer, or within noise of it.",
    )


def _finite(name: str, measures: Measures, place: Places) -> Finding:
    broken = np.flatnonzero(~measures.finite)
    return Finding(
        name="finite",
        verdict=FAIL if broken.size else PASS,
        value=float(broken.size),
        limit=0.0,
        reason=f"{name} computes infinity or no number at {broken.size} of {len(measures)} positions, "
        f"first at {place.text(int(broken[0]))}."
        if broken.size
        else f"Every logit of {name} is a number.",
    )


def _same_tokens(
    arm: Answers,
    control: Answers,
    left: Sequence[tuple[int, int]],
    reference: Matrix | None,
    bound: Floats | None,
    place: Places,
) -> Finding:
    """In float32 the greedy answers must be equal; what differs is explained, and fails all the same."""
    total = len(control.tokens)
    if not left:
        tokens = sum(place.lengths)
        reason = f"All {total} greedy answers ({tokens} tokens) are those of {control.name}."
        return Finding(name="tokens", verdict=PASS, value=0.0, limit=0.0, reason=reason)
    request, token = left[0]
    position = place.position(request, token)
    due, taken = control.tokens[request][token], arm.tokens[request][token]
    own_lead = _lead(arm.logits, position, taken, due)
    leads = [
        f"{control.name}'s logits prefer its own by {_lead(control.logits, position, due, taken):.3g}",
        f"{arm.name}'s prefer its own by {own_lead:.3g}"
        if own_lead >= 0
        else f"{arm.name}'s prefer {control.name}'s by {-own_lead:.3g} as well, so it does not answer as it computes",
    ]
    if reference is not None and bound is not None:
        lead = _lead(reference, position, due, taken)
        near = abs(lead) <= bound[position]
        leads.append(
            f"float64 prefers {control.name}'s by {lead:.3g} where rounding can turn {bound[position]:.2g}"
            + (": a near tie" if near else ": more than rounding")
        )
    return Finding(
        name="tokens",
        verdict=FAIL,
        value=float(len(left)),
        limit=0.0,
        reason=f"{len(left)} of {total} greedy answers of {arm.name} differ, first at {place.text(position)}: "
        f"{control.name} takes {due} and {arm.name} {taken}; {'; '.join(leads)}. In float32 they must be equal.",
    )


def _lead(logits: Matrix, position: int, first: int, second: int) -> float:
    return float(logits[position][first]) - float(logits[position][second])


_ERRORS: tuple[tuple[str, str, str, Statistic, float], ...] = (
    ("error", "The typical error", "error", median, ERROR_LIMIT),
    ("tail error", "The p99 of the error", "error", p99, ERROR_LIMIT),
    ("divergence", "The mean KL divergence from float64", "divergence", lambda values: float(values.mean()), KL_LIMIT),
)


def _errors(
    name: str, own: Measures, base: Measures, place: Places, rng: np.random.Generator, *, of: str = "the control"
) -> Iterator[Finding]:
    if not own.finite.all() or not base.finite.all():
        return  # whose they are fails by that already, and no quantile of infinities means more
    few = len(place.lengths) < LEAST_REQUESTS
    for key, words, column, statistic, limit in _ERRORS:
        values = getattr(own, column)
        value, low, high = ratio_interval(values, getattr(base, column), place.request, statistic, rng)
        verdict = PASS if high <= limit else FAIL if low > limit else INCONCLUSIVE
        verdict = INCONCLUSIVE if few else verdict
        around = (
            f"({counted(len(place.lengths), 'prompt')} {'sets' if len(place.lengths) == 1 else 'set'} no interval)"
            if few
            else f"({low:.3g} to {high:.3g})"
        )
        yield Finding(
            name=key,
            verdict=verdict,
            value=value,
            low=None if few else low,
            high=None if few else high,
            limit=limit,
            reason=f"{words} of {name} is {statistic(values):.2g}, {value:.3g} times {of}'s "
            f"{around}, limit {limit:g}"
            + (
                f": give parity.prompts = {LEAST_REQUESTS} at least."
                if few
                else ": ask for more parity.prompts to decide."
                if verdict == INCONCLUSIVE
                else "."
            ),
        )
    worst = int(np.argmax(own.error))
    value = float(own.error[worst] / base.error.max()) if base.error.max() > 0 else math.inf
    ok = value <= WORST_LIMIT
    yield Finding(
        name="worst error",
        verdict=PASS if ok else FAIL,
        value=value,
        limit=WORST_LIMIT,
        reason=f"The largest error of {name} is {own.error[worst]:.2g}, {value:.3g} times {of}'s largest, "
        f"limit {WORST_LIMIT:g}" + ("." if ok else f": at {place.text(worst)}."),
    )


def _explained(name: str, flips: Sequence[Flip], place: Places) -> Finding:
    strange = [flip for flip in flips if not flip.explained]
    turned = [flip for flip in flips if flip.lead > 0]
    within = f"{name} prefers another token than float64 {counted(len(turned), 'time')}, always within noise"
    return Finding(
        name="flips",
        verdict=FAIL if strange else PASS,
        value=float(len(strange)),
        limit=0.0,
        reason=f"{_worst(strange, place, name)}."
        if strange
        else f"{within} ({largest_share_of_bound(flips):.2g} of the bound at most)."
        if turned
        else f"{name} prefers float64's token everywhere.",
    )


def _worst(strange: Sequence[Flip], place: Places, name: str) -> str:
    worst = max(strange, key=lambda flip: flip.lead / flip.bound)
    where = "in its free run" if worst.free else "along the control's tokens"
    tokens = counted(len(strange), "token")
    return (
        f"Noise does not explain {tokens} of {name}; worst {where} at {place.text(worst.position)}: it takes "
        f"{worst.token}, and float64 prefers another by {worst.lead:.3g} where noise can turn {worst.bound:.2g}"
    )


def _figures(measures: Measures) -> dict[str, Any]:
    return {"error": _summary(measures.error), "divergence": _summary(measures.divergence)}


def _summary(values: Floats) -> dict[str, float]:
    return {"median": median(values), "mean": float(values.mean()), "p99": p99(values), "max": float(values.max())}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
