"""How well an arm predicts the same texts as the reference: its perplexity beside the reference's, and the KL between.

This is the test for weights that are quantised differently from the control's. They are other numbers, so that equal
tokens, or an error like the control's, are the wrong test. docs/parity.md says what the limits mean and how sure it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import special

from analysis.arrays import Floats, Ints
from analysis.judging.gates import FAIL, INCONCLUSIVE, PASS
from analysis.parity.finding import Finding
from analysis.parity.measures import Matrix, Measures
from analysis.wording import counted

# Fewer set no limits: with a lognormal spread of 1 between texts, 32 leave out the truth on one side 5 times in 100.
LEAST_TEXTS = 32
_DRAWS = 1999
_CONFIDENCE = 0.95
_POWER = 0.8  # with which the number of texts that is named would decide
_MOST_NAMED = 1_000_000
_ROUNDING = 1e-6  # of a figure: by which sums over copies of one text differ


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyLimits:
    """How much may be lost. `kl` is in nats a token."""

    perplexity_ratio: float
    kl: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """The tokens [text][token] that all arms predicted, in the order in which the rows of their logits stand.

    `source` says whose texts they are, `more` how there can be more of them.
    """

    tokens: Sequence[Sequence[int]]
    source: str
    more: str

    @property
    def counts(self) -> Ints:
        """The tokens of each text."""
        return np.array([len(tokens) for tokens in self.tokens], dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A figure over texts with its 95 % interval, which few texts do not set, nor copies of one. `needed` texts would
    decide it against the limit with a power of .8; None where the figure lies on the limit, or no number would."""

    value: float
    low: float | None
    high: float | None
    needed: int | None


def judge_accuracy(
    name: str,
    measures: Measures,
    logits: Matrix,
    reference: Matrix,
    texts: Texts,
    limits: AccuracyLimits,
    *,
    against: str,
    rng: np.random.Generator,
) -> tuple[list[Finding], dict[str, Any]]:
    """Findings and figures of the arm `name`, whose `measures` are those of `logits` against `reference`, which is
    called `against`. Positions whose token the reference rules out are left out."""
    tokens = np.concatenate([np.asarray(item, dtype=np.int64) for item in texts.tokens])
    own, due = surprisals(logits, tokens), surprisals(reference, tokens)
    known = np.isfinite(due)
    starts = np.concatenate(([0], np.cumsum(texts.counts)[:-1]))
    counts = np.add.reduceat(known.astype(np.float64), starts)
    # A text of which nothing is known weighs nothing.
    lost = np.add.reduceat(np.where(known, own - np.where(known, due, 0.0), 0.0), starts)
    apart = np.add.reduceat(np.where(known, measures.divergence, 0.0), starts)
    total, known_texts = int(counts.sum()), int((counts > 0).sum())
    if not total:
        reason = f"{against} rules out every token of {texts.source}: they are no texts of this model."
        return [Finding(name="perplexity", verdict=INCONCLUSIVE, reason=reason)], {}
    seen = f"{counted(known_texts, 'text')} ({counted(total, 'token')}, {texts.source})"
    perplexity = estimated(lost, counts, limits.perplexity_ratio, rng, of_divergence=False)
    divergence = estimated(apart, counts, limits.kl, rng, of_divergence=True)
    own_perplexity, due_perplexity = (_perplexity(values[known]) for values in (own, due))
    same = "this text" if known_texts == 1 else f"these {known_texts} texts"
    findings = [
        _finding(
            "perplexity",
            f"The perplexity of {name} on {seen} is {own_perplexity:.4g}, {perplexity.value:.5g} times {against}'s",
            perplexity,
            limits.perplexity_ratio,
            texts,
        ),
        _finding(
            "kl",
            f"The mean KL divergence of {name} from {against} on {same} is {divergence.value:.3g} nats a token",
            divergence,
            limits.kl,
            texts,
        ),
    ]
    needed = [
        estimate.needed
        for item, estimate in zip(findings, (perplexity, divergence), strict=True)
        if item.verdict == INCONCLUSIVE and estimate.needed is not None
    ]
    figures = {
        "texts": known_texts,
        "text_tokens": total,
        "text_source": texts.source,
        "perplexity": own_perplexity,
        "perplexity_reference": due_perplexity,
        "texts_needed": max(needed, default=None),
    }
    return findings, figures


def surprisals(logits: Matrix, tokens: Ints) -> Floats:
    """−log p of each row's token, in nats: infinite where the row rules it out or is no distribution."""
    return np.array(
        [_surprisal(np.asarray(row, dtype=np.float64), token) for row, token in zip(logits, tokens, strict=True)]
    )


def _surprisal(row: Floats, token: int) -> float:
    best = float(row.max())
    if not math.isfinite(best):  # also where a logit is no number
        return math.inf
    return float(np.log(np.exp(row - best).sum()) + best - row[token])


def _perplexity(values: Floats) -> float:
    return float(np.exp(min(700.0, float(values.mean()))))


def estimated(sums: Floats, counts: Floats, limit: float, rng: np.random.Generator, *, of_divergence: bool) -> Estimate:
    """Per token, over all texts: the mean of `sums` (of a divergence), else its exponential (a ratio of perplexities).

    `sums` [texts] add up a text's tokens, of which it has `counts`. Tokens of a text share a context and resemble each
    other, so that the unit is the text. The interval is the bootstrap-t of the ratio estimator, on the log scale
    because divergences are skewed (Efron & Tibshirani 1993, chapter 12); fewer than LEAST_TEXTS set none, and texts
    without a token count for none of them. Where nothing is lost at all, as by equal arms, the interval has no width;
    texts that lose the same but for rounding are copies of one, which sets none. An infinite sum makes all infinite.
    """
    sums, counts = sums[counts > 0], counts[counts > 0]
    texts = len(sums)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        centre, error = _on_log_scale(sums, counts, of_divergence)
        value = float(np.exp(centre))
        if texts < LEAST_TEXTS:
            return Estimate(value=value, low=None, high=None, needed=LEAST_TEXTS)
        if not error > _ROUNDING * (1.0 if of_divergence else abs(centre)):
            sure = not np.any(sums) or math.isinf(value)
            return Estimate(value=value, low=value if sure else None, high=value if sure else None, needed=None)
        picks = rng.integers(0, texts, size=(_DRAWS, texts))
        centres, errors = _on_log_scale(sums[picks], counts[picks], of_divergence)
        scaled = (centres - centre) / errors
        tail = (1.0 - _CONFIDENCE) / 2.0
        least, most = np.quantile(scaled[np.isfinite(scaled)], [tail, 1.0 - tail])
        low, high = float(np.exp(centre - most * error)), float(np.exp(centre - least * error))
        gap = abs(math.log(limit) - float(centre))
        sds = float(special.ndtri(1.0 - tail) + special.ndtri(_POWER)) * float(error)
        needed = max(LEAST_TEXTS, math.ceil(min(texts * (sds / gap) ** 2, 1e15))) if gap > 0 else None
    return Estimate(value=value, low=low, high=high, needed=needed)


def _on_log_scale(sums: Floats, counts: Floats, of_divergence: bool) -> tuple[Any, Any]:
    """(the logarithm of the figure, its standard error) for each row of texts, by linearising the ratio."""
    texts, tokens = sums.shape[-1], counts.sum(axis=-1)
    mean = sums.sum(axis=-1) / tokens
    rest = sums - mean[..., None] * counts
    error = np.sqrt(texts / np.float64(texts - 1) * (rest**2).sum(axis=-1)) / tokens
    return (np.log(mean), error / mean) if of_divergence else (mean, error)


def _finding(name: str, seen: str, estimate: Estimate, limit: float, texts: Texts) -> Finding:
    few = estimate.low is None or estimate.high is None
    verdict = INCONCLUSIVE
    if estimate.low is not None and estimate.high is not None:
        verdict = PASS if estimate.high <= limit else FAIL if estimate.low > limit else INCONCLUSIVE
    around = "" if few else f" ({estimate.low:.5g} to {estimate.high:.5g})"
    rest = "."
    if few and estimate.needed is None:
        rest = f"; they all lose exactly the same, as copies of one text do, which set no interval: {texts.more}."
    elif few:
        rest = f"; so few set no interval: {texts.more}, at least {LEAST_TEXTS}."
    elif verdict == INCONCLUSIVE:
        rest = f": {texts.more}, {_number(estimate.needed)} to decide."
    return Finding(
        name=name,
        verdict=verdict,
        value=estimate.value,
        low=estimate.low,
        high=estimate.high,
        limit=limit,
        reason=f"{seen}{around}, limit {limit:g}{rest}",
    )


def _number(needed: int | None) -> str:
    if needed is None or needed > _MOST_NAMED:
        return "more than a million"
    return f"about {needed}"
