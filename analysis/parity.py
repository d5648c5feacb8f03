"""Whether two arms compute the same: greedy tokens against the control's, logits against a float64 reference.

Pure decisions over arrays; nothing is run or read here. All arms were fed the same prompts and the same continuations
(teacher forcing), so row i of every matrix of logits answers the same question. docs/parity.md derives the limits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from analysis.judging.gates import FAIL, INCONCLUSIVE, PASS
from analysis.judging.verdict import combined

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Matrix = npt.NDArray[Any]  # [positions, vocabulary], may be memory-mapped
Statistic = Callable[[Floats], float]

# Distance from 1 to the next number: what one rounding can cost, twice over.
EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}

ERROR_LIMIT = 1.5  # of the control's
WORST_LIMIT = 2.0 * ERROR_LIMIT  # a single position is a matter of luck as well
KL_LIMIT = ERROR_LIMIT**2  # a divergence grows with the square of the error
NOISE_SDS = 4.0
_DRAWS = 999
_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What one arm said: the tokens of its free run for each request, and its logits [positions, vocabulary] along the
    control's tokens, request after request."""

    name: str
    tokens: Sequence[Sequence[int]]
    logits: Matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """How logits differ from a reference, one number a position."""

    error: Floats  # ‖logits − reference‖ / ‖reference‖, Euclidean over the vocabulary
    divergence: Floats  # KL(reference ‖ logits) in nats
    spread: Floats  # standard deviation over the vocabulary of logits − reference
    top: Ints  # the token that the logits prefer
    lead: Floats  # by how much the reference prefers its own token to that one; 0 where they agree
    peak: Floats  # size of the reference's largest logit
    finite: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A token that the reference would not have taken. `free`: of the free run, else along the control's tokens."""

    position: int
    token: int
    free: bool
    lead: float  # by how much the reference prefers its own token
    bound: float  # how much of a lead noise can turn round at that position

    @property
    def explained(self) -> bool:
        """Whether noise of the allowed size can have done it."""
        return self.lead <= self.bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One requirement, judged. `low` and `high` are the interval of `value` where it is an estimate."""

    name: str
    verdict: str
    reason: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    limit: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmParity:
    """What was found of one arm. `figures` are plain numbers for the report."""

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
        plain = _plain({"verdict": self.verdict, "control": asdict(self.control), "arms": rows})
        assert isinstance(plain, dict)
        return plain


def judge(
    control: Answers,
    arms: Sequence[Answers],
    reference: Matrix | None,
    *,
    dtype: str,
    prompts: Sequence[int],
    seed: int,
) -> Parity:
    """The parity of `arms` with `control`. `prompts` are the lengths of the prompts, for the reasons' sake.

    Without a reference nothing says how far the control itself is from the truth: float32 is judged by its tokens
    alone, and lower precision stays INCONCLUSIVE.
    """
    place = Places(lengths=[len(tokens) for tokens in control.tokens], prompts=prompts)
    base = measure(control.logits, reference) if reference is not None else None
    checked = _judge_control(control, base, reference, place, dtype)
    judged = tuple(_judge_arm(arm, control, base, reference, place, dtype=dtype, seed=seed) for arm in arms)
    if checked.verdict != PASS:
        judged = tuple(_doubted(arm, checked) for arm in judged)
    return Parity(verdict=combined([arm.verdict for arm in judged]), control=checked, arms=judged)


# --- Measuring --------------------------------------------------------------------------------------------------------


def measure(logits: Matrix, reference: Matrix) -> Measures:
    """How `logits` differ from `reference`, both [positions, vocabulary], read a row at a time.

    Tokens that the reference rules out (−inf) are left out. Logits that are not finite where the reference is count as
    infinitely wrong.
    """
    rows = [_measure_row(np.asarray(mine, dtype=np.float64), np.asarray(told, dtype=np.float64)) for mine, told in
            zip(logits, reference, strict=True)]  # fmt: skip
    error, divergence, spread, top, lead, peak, finite = (np.array(column) for column in zip(*rows, strict=True))
    return Measures(error=error, divergence=divergence, spread=spread, top=top, lead=lead, peak=peak, finite=finite)


def _measure_row(logits: Floats, reference: Floats) -> tuple[float, float, float, int, float, float, bool]:
    top = int(np.argmax(np.where(np.isnan(logits), -np.inf, logits)))
    best = float(reference.max())
    lead = best - float(reference[top])
    known = np.isfinite(reference)
    if not known.all():
        logits, reference = logits[known], reference[known]
    if not np.isfinite(logits).all():
        return math.inf, math.inf, math.inf, top, lead, abs(best), False
    delta = logits - reference
    size = float(np.linalg.norm(reference))
    error = float(np.linalg.norm(delta)) / size if size else math.inf
    weights = np.exp(reference - best)
    total = float(weights.sum())
    # KL(p ‖ q) = log Σ p·exp(delta − Σ p·delta), in the form that keeps its digits when p and q are close
    offset = delta - float(weights @ delta) / total
    divergence = math.log1p(float(weights @ np.expm1(offset)) / total) if offset.max() < 500.0 else math.inf
    # rounding may take it a hair below the least that a divergence can be
    return error, max(0.0, divergence), float(delta.std()), top, lead, abs(best), True


def noise_bound(control: Measures, dtype: str) -> Floats:
    """By position, the largest lead that noise of the allowed size can turn round.

    A flip needs the errors of two tokens to differ by more than the lead. Were they independent with the control's
    spread s, their difference would have a standard deviation of √2·s. An arm may err ERROR_LIMIT times as much;
    NOISE_SDS standard deviations of that are granted, and one step of the dtype at the size of the largest logit,
    because logits that share a step are equal. A position where the control was lucky counts as a typical one.
    The bound rests on the control's errors alone: by an arm's own errors, every flip would explain itself.
    """
    typical = np.maximum(control.spread, np.median(control.spread))
    step = EPSILON[dtype] * np.exp2(np.floor(np.log2(np.maximum(control.peak, np.finfo(np.float64).tiny))))
    return np.asarray(ERROR_LIMIT * NOISE_SDS * math.sqrt(2.0) * typical + step)


def ratio_interval(
    mine: Floats, theirs: Floats, request: Ints, statistic: Statistic, rng: np.random.Generator
) -> tuple[float, float, float]:
    """statistic(mine) / statistic(theirs), and its 95 % interval by resampling requests with all their positions.

    Positions of a request share a context and so resemble each other; requests are independent. With one request the
    interval has no width, and says nothing. A ratio to nothing is infinite, of nothing to nothing 1.
    """

    def ratio(index: Ints) -> float:
        above, below = statistic(mine[index]), statistic(theirs[index])
        if below > 0:
            return above / below
        return math.inf if above > 0 else 1.0

    groups = [np.flatnonzero(request == number) for number in np.unique(request)]
    draws = [
        ratio(np.concatenate([groups[pick] for pick in rng.integers(0, len(groups), size=len(groups))]))
        for _ in range(_DRAWS)
    ]
    tail = (1.0 - _CONFIDENCE) / 2.0
    # By rank: an infinite draw must not become not-a-number by interpolation.
    low, high = np.quantile(draws, [tail, 1.0 - tail], method="inverted_cdf")
    return ratio(np.arange(len(mine))), float(low), float(high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where a position lies: which request, and which of its tokens."""

    lengths: Sequence[int]  # tokens of each request's continuation
    prompts: Sequence[int]

    @property
    def request(self) -> Ints:
        """The request of each position."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def position(self, request: int, token: int) -> int:
        """Where the logits for that token of that request stand."""
        return int(sum(self.lengths[:request])) + token

    def text(self, position: int) -> str:
        """Such as "request 3 (prompt of 57 tokens), token 5 of 24"; tokens count from 1."""
        request = int(self.request[position])
        token = position - self.position(request, 0) + 1
        return f"request {request} (prompt of {self.prompts[request]} tokens), token {token} of {self.lengths[request]}"


# --- Judging ----------------------------------------------------------------------------------------------------------


def _judge_control(
    control: Answers, base: Measures | None, reference: Matrix | None, place: Places, dtype: str
) -> ArmParity:
    """The control computes the model that the reference does, as nearly as its dtype lets it."""
    if base is None or reference is None:
        return ArmParity(name=control.name, verdict=PASS, findings=())
    tail = _p99(base.error)
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
    flips = _flips(control, control, base, bound, reference, place)
    strange = [flip for flip in (*flips, *_answered(control, reference, bound, place)) if not flip.explained]
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
    departures = _departures(arm, control)
    figures: dict[str, Any] = {
        "answers": len(control.tokens),
        "answers_same": len(control.tokens) - len(departures),
        "positions": len(against_control),
        "divergence_control": _summary(against_control.divergence),
        "flips_control": int((against_control.lead > 0).sum()),
    }
    if base is None or reference is None:
        figures |= {"error_control": _summary(against_control.error)}
        findings = [_finite(arm.name, against_control, place)]
        if dtype == "float32":
            findings.append(_same_tokens(arm, control, departures, None, None, place))
        else:
            findings.append(
                Finding(
                    name="reference",
                    verdict=INCONCLUSIVE,
                    reason=f"There is no float64 reference, so nothing says whether what separates {arm.name} from "
                    f"{control.name} is more than {dtype} costs.",
                )
            )
    else:
        mine = measure(arm.logits, reference)
        bound = noise_bound(base, dtype)
        flips = _flips(arm, control, mine, bound, reference, place)
        figures |= _figures(mine) | {
            "flips": sum(flip.lead > 0 for flip in flips),
            "flips_share": _share_of_bound(flips),
            "flips_unexplained": sum(not flip.explained for flip in flips),
        }
        findings = [_finite(arm.name, mine, place)]
        if dtype == "float32":
            findings.append(_same_tokens(arm, control, departures, reference, bound, place))
        findings += _errors(arm.name, mine, base, place, np.random.default_rng(seed))
        findings.append(_explained(arm.name, flips, place))
    verdict = combined([item.verdict for item in findings])
    return ArmParity(name=arm.name, verdict=verdict, findings=tuple(findings), figures=figures)


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
    departures: Sequence[tuple[int, int]],
    reference: Matrix | None,
    bound: Floats | None,
    place: Places,
) -> Finding:
    """In float32 the greedy answers must be equal; what differs is explained, and fails all the same."""
    total = len(control.tokens)
    if not departures:
        tokens = sum(place.lengths)
        reason = f"All {total} greedy answers ({tokens} tokens) are those of {control.name}."
        return Finding(name="tokens", verdict=PASS, value=0.0, limit=0.0, reason=reason)
    request, token = departures[0]
    position = place.position(request, token)
    theirs, mine = control.tokens[request][token], arm.tokens[request][token]
    leads = [
        f"{control.name}'s logits prefer its own by {_lead(control.logits, position, theirs, mine):.3g}",
        _own(arm, control.name, _lead(arm.logits, position, mine, theirs)),
    ]
    if reference is not None and bound is not None:
        lead = _lead(reference, position, theirs, mine)
        near = abs(lead) <= bound[position]
        leads.append(
            f"float64 prefers {control.name}'s by {lead:.3g} where rounding can turn {bound[position]:.2g}"
            + (": a near tie" if near else ": more than rounding")
        )
    return Finding(
        name="tokens",
        verdict=FAIL,
        value=float(len(departures)),
        limit=0.0,
        reason=f"{len(departures)} of {total} greedy answers of {arm.name} differ, first at {place.text(position)}: "
        f"{control.name} takes {theirs} and {arm.name} {mine}; {'; '.join(leads)}. In float32 they must be equal.",
    )


def _own(arm: Answers, control: str, lead: float) -> str:
    if lead >= 0:
        return f"{arm.name}'s prefer its own by {lead:.3g}"
    return f"{arm.name}'s prefer {control}'s by {-lead:.3g} as well, so it does not answer as it computes"


def _lead(logits: Matrix, position: int, first: int, second: int) -> float:
    return float(logits[position][first]) - float(logits[position][second])


# By rank: an infinite value must not become not-a-number by interpolation.


def _median(values: Floats) -> float:
    return float(np.quantile(values, 0.5, method="inverted_cdf"))


def _p99(values: Floats) -> float:
    return float(np.quantile(values, 0.99, method="inverted_cdf"))


_ERRORS: tuple[tuple[str, str, str, Statistic, float], ...] = (
    ("error", "The typical error", "error", _median, ERROR_LIMIT),
    ("tail error", "The p99 of the error", "error", _p99, ERROR_LIMIT),
    ("divergence", "The mean KL divergence from float64", "divergence", lambda values: float(values.mean()), KL_LIMIT),
)


def _errors(name: str, mine: Measures, base: Measures, place: Places, rng: np.random.Generator) -> Iterator[Finding]:
    if not mine.finite.all():
        return  # said already, and no quantile of infinities says more
    for key, words, column, statistic, limit in _ERRORS:
        values, theirs = getattr(mine, column), getattr(base, column)
        value, low, high = ratio_interval(values, theirs, place.request, statistic, rng)
        verdict = PASS if high <= limit else FAIL if low > limit else INCONCLUSIVE
        yield Finding(
            name=key,
            verdict=verdict,
            value=value,
            low=low,
            high=high,
            limit=limit,
            reason=f"{words} of {name} is {statistic(values):.2g}, {value:.3g} times the control's "
            f"({low:.3g} to {high:.3g}), limit {limit:g}"
            + (": ask for more parity.prompts to decide." if verdict == INCONCLUSIVE else "."),
        )
    worst = int(np.argmax(mine.error))
    value = float(mine.error[worst] / base.error.max()) if base.error.max() > 0 else math.inf
    ok = value <= WORST_LIMIT
    yield Finding(
        name="worst error",
        verdict=PASS if ok else FAIL,
        value=value,
        limit=WORST_LIMIT,
        reason=f"The largest error of {name} is {mine.error[worst]:.2g}, {value:.3g} times the control's largest, "
        f"limit {WORST_LIMIT:g}" + ("." if ok else f": at {place.text(worst)}."),
    )


def _explained(name: str, flips: Sequence[Flip], place: Places) -> Finding:
    strange = [flip for flip in flips if not flip.explained]
    turned = [flip for flip in flips if flip.lead > 0]
    said = f"{name} prefers another token than float64 {len(turned)} times, always within noise"
    return Finding(
        name="flips",
        verdict=FAIL if strange else PASS,
        value=float(len(strange)),
        limit=0.0,
        reason=f"{_worst(strange, place, name)}."
        if strange
        else f"{said} ({_share_of_bound(flips):.2g} of the bound at most)."
        if turned
        else f"{name} prefers float64's token everywhere.",
    )


def _share_of_bound(flips: Sequence[Flip]) -> float:
    return max((flip.lead / flip.bound for flip in flips), default=0.0)


def _worst(strange: Sequence[Flip], place: Places, name: str) -> str:
    if not strange:
        return ""
    worst = max(strange, key=lambda flip: flip.lead / flip.bound)
    times = f"{len(strange)} token{'s' if len(strange) > 1 else ''}"
    where = "in its free run" if worst.free else "along the control's tokens"
    return (
        f"Noise does not explain {times} of {name}; worst {where} at {place.text(worst.position)}: it takes "
        f"{worst.token}, and float64 prefers another by {worst.lead:.3g} where noise can turn {worst.bound:.2g}"
    )


def _flips(
    arm: Answers, control: Answers, mine: Measures, bound: Floats, reference: Matrix, place: Places
) -> list[Flip]:
    """Tokens of the arm that float64 would not have taken, along the control's tokens, and where its own answers first
    leave the control's: up to there they share every token, so the reference still knows the question."""
    flips = [
        Flip(position=int(at), token=int(mine.top[at]), free=False, lead=float(mine.lead[at]), bound=float(bound[at]))
        for at in np.flatnonzero(mine.lead > 0)
    ]
    for request, token in _departures(arm, control):
        position, taken = place.position(request, token), arm.tokens[request][token]
        if taken != mine.top[position]:  # else it is what the logits prefer, and counted
            flips.append(_taken(reference, bound, position, taken))
    return flips


def _answered(arm: Answers, reference: Matrix, bound: Floats, place: Places) -> list[Flip]:
    """Every token of the continuation itself, as a flip of lead 0 or more."""
    return [
        _taken(reference, bound, place.position(request, token), taken)
        for request, tokens in enumerate(arm.tokens)
        for token, taken in enumerate(tokens)
    ]


def _taken(reference: Matrix, bound: Floats, position: int, token: int) -> Flip:
    row = np.asarray(reference[position], dtype=np.float64)
    lead = float(row[np.isfinite(row)].max() - row[token])
    return Flip(position=position, token=int(token), free=True, lead=lead, bound=float(bound[position]))


def _departures(arm: Answers, control: Answers) -> list[tuple[int, int]]:
    """(request, token) where each answer first leaves the control's. An answer that ends early leaves at its end."""
    found = []
    for request, (mine, theirs) in enumerate(zip(arm.tokens, control.tokens, strict=True)):
        if len(mine) != len(theirs):
            raise ValueError(f"{arm.name} answered request {request} with {len(mine)} tokens, not {len(theirs)}")
        first = next((token for token, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1]), None)
        if first is not None:
            found.append((request, first))
    return found


def _figures(measures: Measures) -> dict[str, Any]:
    return {"error": _summary(measures.error), "divergence": _summary(measures.divergence)}


def _summary(values: Floats) -> dict[str, float]:
    return {
        "median": _median(values),
        "mean": float(values.mean()),
        "p99": _p99(values),
        "max": float(values.max()),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
