"""Whether arms compute the same: greedy tokens against the control's, logits against a float64 reference.

Arms with quantised weights are judged by how well they predict texts (`quantised`). docs/parity.md derives the limits.
Pure decisions over arrays; nothing is run or read here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from analysis.arrays import Floats
from analysis.judging.gates import FAIL, INCONCLUSIVE, PASS
from analysis.parity.flips import (
    Answers,
    Places,
    departures,
    flips_of,
    largest_share_of_bound,
    taken_flips,
    worst_text,
)
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
from analysis.parity.outcome import ArmParity, Finding, Parity, concluded
from analysis.parity.quantised import Accuracy, Texts, judge_evenness, judge_kl
from analysis.wording import counted

WORST_LIMIT = 2.0 * ERROR_LIMIT  # a single position has no interval
KL_LIMIT = ERROR_LIMIT**2  # a divergence grows with the square of the error
_ERRORS: tuple[tuple[str, str, str, Statistic, float], ...] = (
    ("error", "The typical error", "error", median, ERROR_LIMIT),
    ("tail error", "The p99 of the error", "error", p99, ERROR_LIMIT),
    ("divergence", "The mean KL divergence from float64", "divergence", lambda values: float(values.mean()), KL_LIMIT),
)


def judge(
    control: Answers,
    arms: Sequence[Answers],
    reference: Matrix | None,
    *,
    dtype: str,
    prompts: Sequence[int],
    seed: int,
    accuracy: Accuracy | None = None,
    refused: Mapping[str, str] | None = None,
) -> Parity:
    """Judge the parity of `arms` with `control`.

    `prompts` are the lengths of the prompts, for the reasons. Arms in `refused`, which are not among `arms`, refused a
    request for the reason given. Without a reference, float32 is judged by its tokens alone, lower precision stays
    INCONCLUSIVE, and quantised arms are judged against the control.
    """
    place = Places(lengths=[len(tokens) for tokens in control.tokens], prompts=prompts)
    base = measure(control.logits, reference) if reference is not None else None
    checked = _judge_control(control, base, reference, place, dtype)
    quantised = accuracy.quantised if accuracy is not None else {}
    first: dict[str, Answers] = {}  # arm of each kind of quantised weights
    judged = []
    for arm in arms:
        if accuracy is not None and arm.name in quantised:
            alike = first.setdefault(quantised[arm.name], arm)
            judged.append(
                _judge_quantised(arm, control, base, alike, reference, place, accuracy, dtype=dtype, seed=seed)
            )
        else:
            judged.append(_judge_arm(arm, control, base, reference, place, dtype=dtype, seed=seed))
    return concluded(checked, judged, refused=refused or {})


def _judge_control(
    control: Answers, base: Measures | None, reference: Matrix | None, place: Places, dtype: str
) -> ArmParity:
    """Check that the control computes the reference's model, as nearly as its dtype lets it."""
    if base is None or reference is None:
        return ArmParity(name=control.name, verdict=PASS, findings=())
    tail = p99(base.error)
    # Half of the dtype's digits may be lost on the way through the layers, and one bit more.
    limit = 2.0 * math.sqrt(EPSILON[dtype])
    ok = tail <= limit and bool(base.finite.all())
    seen = f"The p99 of the error of {control.name} against float64 is {tail:.2g}, limit {limit:.2g} in {dtype}"
    error = Finding(
        name="control error",
        verdict=PASS if ok else INCONCLUSIVE,
        value=tail,
        limit=limit,
        reason=seen + ("." if ok else ": it does not compute this model, and is no measure for others."),
    )
    bound = noise_bound(base, dtype)
    flips = flips_of(control, [], base, bound, reference, place)
    answered = enumerate(token for tokens in control.tokens for token in tokens)
    strange = [flip for flip in (*flips, *taken_flips(reference, bound, answered)) if not flip.explained]
    answers = Finding.none_of(
        "control flips",
        len(strange),
        verdict=INCONCLUSIVE,
        fault=f"{worst_text(strange, place)}: {control.name} does not answer as it computes." if strange else "",
        fine=f"Every token of {control.name} is float64's, or within noise of it.",
    )
    figures = _figures(base) | {"flips": len(flips), "flips_unexplained": len(strange)}
    return ArmParity.of(control.name, [error, answers], figures)


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
    left = departures(arm, control)
    own = measure(arm.logits, control.logits if reference is None else reference)
    figures: dict[str, Any] = _equal_answers(control, left)
    findings = [_finite(arm.name, own, place)]
    if base is None or reference is None:
        figures |= {"divergence_control": _summary(own.divergence), "flips_control": int((own.lead > 0).sum())}
        reason = (
            f"There is no float64 reference, so nothing says whether what separates {arm.name} from {control.name} "
            f"is more than {dtype} costs."
        )
        open_ = Finding(name="reference", verdict=INCONCLUSIVE, reason=reason)
        findings.append(_same_tokens(arm, control, left, place) if dtype == "float32" else open_)
    else:
        bound = noise_bound(base, dtype)
        flips = flips_of(arm, left, own, bound, reference, place)
        figures |= _figures(own) | {
            "flips": sum(flip.lead > 0 for flip in flips),
            "flips_share": largest_share_of_bound(flips),
            "flips_unexplained": sum(not flip.explained for flip in flips),
        }
        if dtype == "float32":
            findings.append(_same_tokens(arm, control, left, place, reference, bound))
        findings += _errors(arm.name, own, base, place, np.random.default_rng(seed))
        strange = [flip for flip in flips if not flip.explained]
        fine = f"Noise explains every token of {arm.name} that float64 would not take ({figures['flips']} of them)."
        fault = f"{arm.name}: {worst_text(strange, place)}." if strange else ""
        findings.append(Finding.none_of("flips", len(strange), verdict=FAIL, fault=fault, fine=fine))
    return ArmParity.of(arm.name, findings, figures)


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
    """Judge an arm with quantised weights. `alike` is the first arm with weights of the same kind: what another one
    errs beyond it is what its policy adds."""
    against, truth = ("float64", reference) if reference is not None else (control.name, control.logits)
    own, left = measure(arm.logits, truth), departures(arm, control)
    findings = [_finite(arm.name, own, place)]
    if own.finite.all():
        findings.append(_as_computed(arm, dict(left), noise_bound(own, dtype), place))
        findings += judge_evenness(arm.name, own, base, place, dtype)
    if alike is not arm and reference is not None:
        first = measure(alike.logits, truth)
        findings += _errors(arm.name, own, first, place, np.random.default_rng(seed), of=alike.name)
    figures = _equal_answers(control, left) | _figures(own)
    texts = accuracy.texts
    if texts is None:
        source, more = f"{control.name}'s own answers to random prompts", "raise parity.prompts"
        texts = Texts(lengths=place.lengths, reference=truth, source=source, more=more)
        divergence = own.divergence
    else:
        given = texts.reference if reference is not None else control.texts
        if arm.texts is None or given is None:
            raise ValueError(f"{arm.name} is judged by texts that it or its reference was not given")
        divergence = measure(arm.texts, given).divergence
    kl = judge_kl(arm.name, divergence, texts, accuracy.max_kl, against=against, rng=np.random.default_rng(seed))
    figures |= {"texts": len(texts.lengths), "text_tokens": len(divergence), "text_source": texts.source}
    return ArmParity.of(arm.name, [*findings, kl], figures)


def _as_computed(arm: Answers, left: Mapping[int, int], bound: Floats, place: Places) -> Finding:
    """Check that the engine answers with what the arm's own logits prefer, up to the first token that leaves the
    control's.

    The bound is the arm's own: a small difference between two steps may turn a number to the next one that its
    quantised form knows. The leads are within its own logits, so that this bound does not explain them by arithmetic.
    """
    taken = [
        (place.position(request, token), tokens[token])
        for request, tokens in enumerate(arm.tokens)
        for token in range(min(len(tokens), left.get(request, len(tokens)) + 1))
    ]
    strange = [flip for flip in taken_flips(arm.logits, bound, taken) if not flip.explained]
    fault = f"The answers of {arm.name} contradict its own logits. {worst_text(strange, place)}." if strange else ""
    fine = f"Every token of {arm.name} is what its own logits prefer, or within noise of it."
    return Finding.none_of("answers", len(strange), verdict=FAIL, fault=fault, fine=fine)


def _finite(name: str, measures: Measures, place: Places) -> Finding:
    broken = np.flatnonzero(~measures.finite)
    where = f"{broken.size} of {len(measures)} positions, first at {place.text(int(broken[0]))}" if broken.size else ""
    return Finding.none_of(
        "finite",
        broken.size,
        verdict=FAIL,
        fault=f"{name} computes infinity or no number at {where}.",
        fine=f"Every logit of {name} is a number.",
    )


def _same_tokens(
    arm: Answers,
    control: Answers,
    left: Sequence[tuple[int, int]],
    place: Places,
    reference: Matrix | None = None,
    bound: Floats | None = None,
) -> Finding:
    """Check that greedy answers are equal, as they must be in float32. The reason tells a near tie from a fault."""
    fault = ""
    if left:
        request, token = left[0]
        at = place.position(request, token)
        due, taken = control.tokens[request][token], arm.tokens[request][token]
        fault = (
            f"{len(left)} of {len(control.tokens)} greedy answers of {arm.name} differ, first at {place.text(at)}: "
            f"{control.name} takes {due} and {arm.name} {taken}. In float32 they must be equal."
        )
        if reference is not None and bound is not None:
            lead = float(reference[at][due]) - float(reference[at][taken])
            kind = "a near tie" if abs(lead) <= bound[at] else "more than rounding"
            fault += f" Float64 prefers {control.name}'s by {lead:.3g}, rounding can turn {bound[at]:.2g}: {kind}."
    fine = f"All {len(control.tokens)} greedy answers ({sum(place.lengths)} tokens) are those of {control.name}."
    return Finding.none_of("tokens", len(left), verdict=FAIL, fault=fault, fine=fine)


def _errors(
    name: str, own: Measures, base: Measures, place: Places, rng: np.random.Generator, *, of: str = "the control"
) -> Iterator[Finding]:
    """Hold the arm's errors and divergence to those of the yardstick `of`."""
    if not own.finite.all() or not base.finite.all():
        return  # that fails already, and no quantile of infinities means more
    prompts = len(place.lengths)
    few = prompts < LEAST_REQUESTS
    for key, words, column, statistic, limit in _ERRORS:
        values = getattr(own, column)
        value, low, high = ratio_interval(values, getattr(base, column), place.request, statistic, rng)
        verdict = PASS if high <= limit else FAIL if low > limit else INCONCLUSIVE
        around, remedy = f"({low:.3g} to {high:.3g})", "."
        if few:
            verdict, around = (
                INCONCLUSIVE,
                f"({counted(prompts, 'prompt')} {'sets' if prompts == 1 else 'set'} no interval)",
            )
            remedy = f": give parity.prompts = {LEAST_REQUESTS} at least."
        elif verdict == INCONCLUSIVE:
            remedy = ": ask for more parity.prompts to decide."
        yield Finding(
            name=key,
            verdict=verdict,
            value=value,
            low=None if few else low,
            high=None if few else high,
            limit=limit,
            reason=f"{words} of {name} is {statistic(values):.2g}, {value:.3g} times {of}'s {around}, "
            f"limit {limit:g}{remedy}",
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


def _equal_answers(control: Answers, left: Sequence[tuple[int, int]]) -> dict[str, int]:
    return {"answers": len(control.tokens), "answers_same": len(control.tokens) - len(left)}


def _figures(measures: Measures) -> dict[str, Any]:
    return {"error": _summary(measures.error), "divergence": _summary(measures.divergence)}


def _summary(values: Floats) -> dict[str, float]:
    return {"median": median(values), "mean": float(values.mean()), "p99": p99(values), "max": float(values.max())}
