"""What quantised weights lose: KL on texts, and whether the error is even over all sizes.

Quantised weights are other numbers than the control's, so neither equal tokens nor an error like the control's is the
right test. A mean over texts does not see one prompt of many, so the arm's own typical error is the yardstick of its
worst: what fewer bits cost is about the same at every size, and nonsense at one size is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from analysis.arrays import Floats
from analysis.judging.gates import FAIL, INCONCLUSIVE, PASS
from analysis.parity.flips import Places
from analysis.parity.measures import EPSILON, Matrix, Measures, median
from analysis.parity.outcome import Finding
from analysis.wording import counted

# Fewer set no limits: with a lognormal spread of 1 between texts, 32 leave out the truth on one side 5 times in 100.
LEAST_TEXTS = 32
_DRAWS = 1999
_TAIL = 0.025  # on either side of an interval
_ROUNDING = 1e-6  # of a figure: by which sums over copies of one text differ

# A sound arm of int8: 1.6 and 4.7 at most over 40 prompts of 12 tokens or fewer, random weights.
PROMPT_LIMIT = 3.0
POSITION_LIMIT = 10.0
# Logits of something else are as far away as they are long. An uneven error below this may come from the weights.
_NONSENSE = 0.5
_LEAST_POSITIONS = 6  # of a prompt, for its median


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """Texts that all arms predicted: the `lengths` of each in tokens, and the `reference`'s logits, row after row.

    `source` names the texts, `more` says how to get more of them.
    """

    lengths: Sequence[int]
    reference: Matrix | None
    source: str
    more: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """The arms in `quantised` (name: kind) may lose `max_kl` nats a token.

    Without `texts` it is measured on the control's own answers.
    """

    quantised: Mapping[str, str]
    max_kl: float
    texts: Texts | None = None


def judge_kl(
    name: str, divergence: Floats, texts: Texts, limit: float, *, against: str, rng: np.random.Generator
) -> Finding:
    """Judge the mean KL `divergence` of the arm `name` from the reference, in nats at each token of the texts."""
    counts = np.asarray(texts.lengths, dtype=np.float64)
    starts = np.concatenate(([0], np.cumsum(texts.lengths)[:-1]))
    value, low, high = mean_interval(np.add.reduceat(divergence, starts), counts, rng)
    seen = (
        f"The mean KL divergence of {name} from {against} on {counted(len(counts), 'text')} "
        f"({counted(len(divergence), 'token')}, {texts.source}) is {value:.3g} nats a token"
    )
    verdict, around, rest = INCONCLUSIVE, "", f": {texts.more}."
    if low is not None and high is not None:
        verdict = PASS if high <= limit else FAIL if low > limit else INCONCLUSIVE
        around, rest = f" ({low:.5g} to {high:.5g})", "." if verdict != INCONCLUSIVE else rest
    elif len(counts) < LEAST_TEXTS:
        rest = f"; so few set no interval: {texts.more}, at least {LEAST_TEXTS}."
    else:
        rest = f"; they all lose exactly the same, as copies of one text do, which set no interval: {texts.more}."
    return Finding(
        name="kl",
        verdict=verdict,
        value=value,
        low=low,
        high=high,
        limit=limit,
        reason=f"{seen}{around}, limit {limit:g}{rest}",
    )


def mean_interval(sums: Floats, counts: Floats, rng: np.random.Generator) -> tuple[float, float | None, float | None]:
    """Return the mean per token and its 95 % interval. `sums` [texts] add up a text's tokens, of which it has `counts`.

    The unit is the text, since its tokens share a context. The interval is the bootstrap-t of the ratio estimator on
    the log scale (Efron & Tibshirani 1993, chapter 12). Fewer than LEAST_TEXTS, and texts that all lose the same but
    for rounding, set none. Where nothing is lost at all it has no width. An infinite sum makes everything infinite.
    """
    texts = len(sums)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        mean, error = _relative_error(sums, counts)
        value = float(mean)
        if texts < LEAST_TEXTS:
            return value, None, None
        if not error > _ROUNDING:
            end = value if not np.any(sums) or not np.isfinite(value) else None
            return value, end, end
        picks = rng.integers(0, texts, size=(_DRAWS, texts))
        means, errors = _relative_error(sums[picks], counts[picks])
        scaled = (np.log(means) - np.log(mean)) / errors
        least, most = np.quantile(scaled[np.isfinite(scaled)], [_TAIL, 1.0 - _TAIL])
        return value, float(mean * np.exp(-most * error)), float(mean * np.exp(-least * error))


def _relative_error(sums: Floats, counts: Floats) -> tuple[Floats, Floats]:
    """(the mean per token, its standard error over itself) for each row of texts, by linearising the ratio."""
    texts, tokens = sums.shape[-1], counts.sum(axis=-1)
    mean = sums.sum(axis=-1) / tokens
    rest = sums - mean[..., None] * counts
    error = np.sqrt(texts / np.float64(texts - 1) * (rest**2).sum(axis=-1)) / tokens
    return mean, error / mean


def judge_evenness(name: str, own: Measures, control: Measures | None, place: Places, dtype: str) -> Iterator[Finding]:
    """Check that no prompt, and no position, errs much more than is typical of the arm `name`.

    Typical is the median of the arm's own errors over all positions, or one rounding of the dtype where that is less.
    Where the control errs more than is typical of it, the arm may in proportion; `control` is None without a float64
    reference. Prompts of few positions are judged by these alone. Errors must be finite.
    """
    calm = control.error if control is not None and np.isfinite(control.error).all() else np.ones(len(own))
    prompts = [np.flatnonzero(place.request == number) for number in range(len(place.lengths))]
    prompts = [positions for positions in prompts if len(positions) >= _LEAST_POSITIONS]
    if prompts:
        errors, calm_errors = (np.array([median(every[at]) for at in prompts]) for every in (own.error, calm))
        multiples = _multiples(errors, calm_errors, dtype)
        worst = int(np.argmax(multiples))
        request = int(place.request[prompts[worst][0]])
        seen = (
            f"The typical error of {name} at request {request} (prompt of {counted(place.prompts[request], 'token')})"
        )
        yield _evenness("worst prompt", seen, multiples[worst], PROMPT_LIMIT, errors[worst])
    multiples = _multiples(own.error, calm, dtype)
    worst = int(np.argmax(multiples))
    seen = f"The error of {name} at {place.text(worst)}"
    yield _evenness("worst position", seen, multiples[worst], POSITION_LIMIT, own.error[worst])


def _multiples(errors: Floats, control: Floats, dtype: str) -> Floats:
    """Each error as a multiple of the typical one, and of the control's own excess there."""
    calm = median(control)
    excess = np.maximum(1.0, control / calm) if calm > 0 else np.ones(len(errors))
    return np.asarray(errors / max(median(errors), EPSILON[dtype]) / excess)


def _evenness(name: str, seen: str, value: float, limit: float, error: float) -> Finding:
    ok = float(value) <= limit  # False of no number
    return Finding(
        name=name,
        verdict=PASS if ok else INCONCLUSIVE if error < _NONSENSE else FAIL,
        value=float(value),
        limit=limit,
        reason=f"{seen} is {value:.3g} times what is typical of it, and no other is more, limit {limit:g}"
        + ("." if ok else ": what runs at that size may compute something else."),
    )
