"""Whether arms compute the same: greedy tokens against the control's, logits against a float64 reference.

Arms with quantised weights compute with other numbers than the control's. They are judged by what they lose on texts,
and by whether their error is even over all sizes. docs/explanation/parity.md derives the limits. Nothing is run or read
here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tailgate.analysis.arrays import Floats, Ints
from tailgate.analysis.judging.gates import FAIL, INCONCLUSIVE
from tailgate.analysis.parity.measures import (
    EPSILON,
    ERROR_LIMIT,
    LEAST_REQUESTS,
    LEAST_TEXTS,
    Matrix,
    Measures,
    Statistic,
    mean_interval,
    measure,
    median,
    noise_bound,
    p99,
    ratio_interval,
)
from tailgate.analysis.parity.outcome import Finding, Parity, concluded, estimated, held_to
from tailgate.analysis.wording import counted

WORST_LIMIT = 2.0 * ERROR_LIMIT  # a single position has no interval
KL_LIMIT = ERROR_LIMIT**2  # a divergence grows with the square of the error
_ERRORS: tuple[tuple[str, str, str, Statistic, float], ...] = (
    ("error", "The median error", "error", median, ERROR_LIMIT),
    ("tail error", "The p99 of the error", "error", p99, ERROR_LIMIT),
    ("divergence", "The mean KL divergence from float64", "divergence", lambda values: float(values.mean()), KL_LIMIT),
)

# Of quantised arms, over the median. A sound arm of int8: 1.6 and 4.7 at most over 40 prompts of 12 tokens or fewer.
PROMPT_LIMIT = 3.0
POSITION_LIMIT = 10.0
# Logits of something else are as far away as they are long. An uneven error below this may come from the weights.
_NONSENSE = 0.5
_LEAST_POSITIONS = 6  # of a prompt, for its median


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What one arm answered, whose weights are `quantised` in that way or not at all ("").

    `tokens` [request][token] are those of its free run. `logits` [positions, vocabulary] are along what all were fed,
    request after request: the control's tokens first, and last, where its weights are quantised, the given texts.
    """

    name: str
    tokens: Sequence[Sequence[int]]
    logits: Matrix
    quantised: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The request and the token of each position, from the `lengths` of continuations and of `prompts`, in tokens."""

    lengths: Sequence[int]
    prompts: Sequence[int]

    @property
    def request(self) -> Ints:
        """The request of each position."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def text(self, position: int) -> str:
        """Name the position, such as "request 3 (prompt of 57 tokens), token 5 of 24"; tokens count from 1."""
        request = int(self.request[position])
        token = position - int(sum(self.lengths[:request])) + 1
        asked = counted(self.prompts[request], "token")
        return f"request {request} (prompt of {asked}), token {token} of {self.lengths[request]}"


@dataclass(frozen=True, kw_only=True)
class Task:
    """What arms are held to: the control, which was not fed the texts, and the `reference`, which has all rows.

    Arms with quantised weights may lose `max_kl` nats a token on texts of these lengths, which come from `source`;
    without any, on what all were fed.
    """

    control: Answers
    reference: Matrix
    place: Places
    dtype: str
    seed: int
    max_kl: float
    source: str
    texts: Sequence[int] = ()

    @cached_property
    def fed(self) -> Matrix:
        """The reference along the control's tokens."""
        return self.reference[: len(self.control.logits)]

    @cached_property
    def base(self) -> Measures:
        """The control's distance from the reference."""
        return measure(self.control.logits, self.fed)


def judge(task: Task, arms: Sequence[Answers], *, refused: Mapping[str, str] | None = None) -> Parity:
    """Judge the parity of `arms` with the control.

    Arms in `refused`, which are not among `arms`, refused a request for the reason given.
    """
    first: dict[str, Answers] = {}  # arm of each kind of quantised weights
    found: dict[str, list[Finding]] = {}
    for arm in arms:
        if arm.quantised:
            found[arm.name] = _judge_quantised(task, arm, first.setdefault(arm.quantised, arm))
        else:
            found[arm.name] = _judge_arm(task, arm)
    return concluded(task.control.name, _judge_control(task), found, refused=refused)


def _judge_control(task: Task) -> list[Finding]:
    name, base = task.control.name, task.base
    # Half of the dtype's digits may be lost on the way through the layers, and one bit more.
    limit = 2.0 * math.sqrt(EPSILON[task.dtype])
    what = f"The p99 of the error of {name} against float64 in {task.dtype}"
    error = held_to(limit, p99(base.error), "control error", what, beyond=INCONCLUSIVE)
    taken = [*enumerate(base.top), *enumerate(_answered(task.control))]
    bound = noise_bound(base, task.dtype)
    flips = _flips("control flips", name, task.fed, bound, taken, task.place, INCONCLUSIVE)
    return [error, _finite(name, base, task.place, INCONCLUSIVE), flips]


def _judge_arm(task: Task, arm: Answers) -> list[Finding]:
    base, left, own = task.base, _departures(task, arm), measure(arm.logits, task.fed)
    findings = [*_errors(task, arm.name, own, base, "the control"), _finite(arm.name, own, task.place)]
    if task.dtype == "float32":  # in which greedy answers must be equal
        findings.append(_same_tokens(task, arm, left))
    # Up to where an answer leaves the control's both share every token, so the reference answers the same question.
    taken = [*enumerate(own.top), *zip(left, _answered(arm)[left], strict=True)]
    bound = noise_bound(base, task.dtype)
    return [*findings, _flips("flips", arm.name, task.fed, bound, taken, task.place)]


def _judge_quantised(task: Task, arm: Answers, alike: Answers) -> list[Finding]:
    """Judge an arm with quantised weights. What it errs beyond `alike`, the first arm of the kind, its policy adds."""
    place, size = task.place, len(task.fed)
    own, left = measure(arm.logits[:size], task.fed), _departures(task, arm)
    divergence, lengths = own.divergence, task.texts or place.lengths
    if task.texts:
        divergence = measure(arm.logits[size:], task.reference[size:]).divergence
    rng = np.random.default_rng(task.seed)
    findings = [judge_kl(arm.name, divergence, lengths, task.max_kl, source=task.source, rng=rng)]
    findings.append(_finite(arm.name, own, place))
    if own.finite.all():
        # Up to the first token that leaves the control's, the engine must answer what the arm's own logits prefer. The
        # bound is the arm's own: a small difference between two steps may turn a number to the next quantised one.
        request = place.request
        leaves = dict(zip(request[left], left, strict=True))
        taken = [(at, token) for at, token in enumerate(_answered(arm)) if at <= leaves.get(request[at], at)]
        findings.append(_flips("answers", arm.name, arm.logits, noise_bound(own, task.dtype), taken, place))
        findings += judge_evenness(arm.name, own, task.base, place, task.dtype)
    if alike is not arm:
        findings += _errors(task, arm.name, own, measure(alike.logits[:size], task.fed), alike.name)
    return findings


def _departures(task: Task, arm: Answers) -> Ints:
    """Return the positions at which an answer first leaves the control's."""
    others = np.flatnonzero(_answered(arm) != _answered(task.control))
    return others[np.unique(task.place.request[others], return_index=True)[1]]


def _answered(arm: Answers) -> Ints:  # the token of each position
    return np.concatenate([np.asarray(tokens, dtype=np.int64) for tokens in arm.tokens])


def _finite(name: str, measures: Measures, place: Places, beyond: str = FAIL) -> Finding:
    broken = np.flatnonzero(~measures.finite)
    where = f"first at {place.text(int(broken[0]))}" if broken.size else ""
    what = f"The number of positions where {name} computes infinity or no number"
    return held_to(0.0, float(broken.size), "finite", what, where=where, beyond=beyond)


def _same_tokens(task: Task, arm: Answers, left: Ints) -> Finding:
    where, control = "", task.control
    if left.size:
        due, taken = (_answered(item)[left[0]] for item in (control, arm))
        where = f"first at {task.place.text(int(left[0]))}, where {control.name} takes {due} and {arm.name} {taken}"
    what = f"The number of {len(arm.tokens)} greedy answers of {arm.name} in float32 that are not {control.name}'s"
    return held_to(0.0, float(left.size), "tokens", what, where=where)


def _flips(
    name: str,
    arm: str,
    logits: Matrix,
    bound: Floats,
    taken: Iterable[tuple[int, int]],
    place: Places,
    beyond: str = FAIL,
) -> Finding:
    """Check that each token `taken` at a position is preferred by `logits`, or behind by what noise can turn."""
    worst, where = 0.0, ""
    for position, token in dict.fromkeys((int(position), int(token)) for position, token in taken):
        row = np.asarray(logits[position], dtype=np.float64)
        share = float(row.max() - row[token]) / float(bound[position])
        share = math.inf if math.isnan(share) else share  # no number explains no token
        if share > worst:
            worst, where = share, f"at {place.text(position)}, where it takes {token}"
    what = f"The largest lead over a token that {arm} takes, as a share of what noise can turn,"
    return held_to(1.0, worst, name, what, where=where, beyond=beyond)


def _errors(task: Task, name: str, own: Measures, base: Measures, of: str) -> Iterator[Finding]:
    """Hold the arm's errors and divergence to those of the yardstick `of`."""
    if not own.finite.all() or not base.finite.all():
        return  # that fails already, and no quantile of infinities means more
    rng, place = np.random.default_rng(task.seed), task.place
    for key, words, column, statistic, limit in _ERRORS:
        values = getattr(own, column)
        value, low, high = ratio_interval(values, getattr(base, column), place.request, statistic, rng)
        ends = (low, high) if len(place.lengths) >= LEAST_REQUESTS else (None, None)
        what = f"{words} of {name}, over that of {of},"
        remedy = f"more parity.prompts decide, {LEAST_REQUESTS} at least"
        yield estimated(limit, value, ends, key, what, remedy=remedy)
    worst, most = int(np.argmax(own.error)), float(base.error.max())
    value = float(own.error[worst]) / most if most > 0 else math.inf
    what = f"The largest error of {name}, over that of {of},"
    yield held_to(WORST_LIMIT, value, "worst error", what, where=f"at {place.text(worst)}")


def judge_kl(
    name: str, divergence: Floats, lengths: Sequence[int], limit: float, *, source: str, rng: np.random.Generator
) -> Finding:
    """Judge the mean KL `divergence` of the arm from float64, in nats at each token of texts of these lengths."""
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))
    counts = np.asarray(lengths, dtype=np.float64)
    value, low, high = mean_interval(np.add.reduceat(divergence, starts), counts, rng)
    what = (
        f"The mean KL divergence of {name} from float64 on {counted(len(counts), 'text')} ({source}), in nats a token,"
    )
    remedy = f"more texts that differ decide, {LEAST_TEXTS} at least (parity.texts, or parity.prompts without it)"
    return estimated(limit, value, (low, high), "kl", what, remedy=remedy)


def judge_evenness(name: str, own: Measures, control: Measures, place: Places, dtype: str) -> Iterator[Finding]:
    """Check that no prompt, and no position, errs much more than is typical of the arm `name`.

    Typical is the median of the arm's own errors, or one rounding of the dtype where that is less. Where the control
    errs more than is typical of it, the arm may in proportion. Prompts of few positions are judged by these alone.
    Errors must be finite.
    """
    prompts = [np.flatnonzero(place.request == number) for number in range(len(place.lengths))]
    prompts = [positions for positions in prompts if len(positions) >= _LEAST_POSITIONS]
    positions = [np.array([position]) for position in range(len(own.error))]
    for kind, groups, limit in (("prompt", prompts, PROMPT_LIMIT), ("position", positions, POSITION_LIMIT)):
        if not groups:
            continue
        errors, base = (np.array([median(every[group]) for group in groups]) for every in (own.error, control.error))
        typical = median(base)
        excess = np.maximum(1.0, base / typical) if typical > 0 else np.ones(len(groups))
        multiples = errors / max(median(errors), EPSILON[dtype]) / excess
        worst = int(np.argmax(multiples))
        yield held_to(
            limit,
            float(multiples[worst]),
            f"worst {kind}",
            f"The error of {name} at its worst {kind}, over its typical one,",
            where=f"at {place.text(int(groups[worst][0]))}",
            beyond=INCONCLUSIVE if errors[worst] < _NONSENSE else FAIL,
        )
