"""A comparison that may be looked at after every minute: evidence that only counts what could not be luck of any look.

Time is cut into groups of neighbouring blocks. With the treatment's latencies divided by 1 + margin, each group has a
score: how much more often the treatment exceeds the group's own quantile, of both arms, than the control does. Were
the true ratio 1 + margin, swapping the arms would change nothing but the sign of that score, so that its sign is a
fair coin given its size and the past [1]. Then the product over groups of exp(λz) / cosh(λz) is a martingale of mean 1
for every λ, and so is their mean over several λ: it ever exceeds 1 / alpha with a chance of alpha at most [2], however
often one looks. Of positive λ it is evidence of harm, of negative ones of safety. As cosh(x) ≤ exp(x²/2), it is never
less than the exp(λS - λ²S²/2) of de la Peña [1].

Groups that resemble each other are paid for, as decision 0010 does for a fixed test: the logarithm is divided by how
much the variance of the sum exceeds that of independent groups. What lasts longer than a group is seen in the mean log
latency of all requests; the slope of the scores carries it over to the quantile. That is an estimate and no theorem:
`python benchmarks/judging.py sequential` says how often it errs.

Where one arm has far fewer requests, swapping the arms changes more than a sign. There the requests are exchanged
instead: of those of a group that exceed the quantile, the treatment's share is hypergeometric at the margin, and
w^k / E[w^k] of its count k is an e-value for every odds ratio w. That counts each request by itself, so requests that
share their fate are paid for too, by the variance of the scores over groups.

References
----------
[1] de la Peña, V. H. (1999). A general class of exponential inequalities for martingales and ratios.
[2] Ville, J. (1939). Étude critique de la notion de collectif.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats
from scipy.special import logsumexp

from analysis.arrays import Bools, Floats, Ints
from analysis.settings.gate_limits import RESTART_SPREAD
from analysis.statistics.compare import Sample

FEWEST_GROUPS = 5  # before, nothing is known of how groups resemble each other
_ENOUGH = 2.0  # requests of both arms beyond a group's quantile, for it to be closed
_STAKES = np.exp(np.linspace(math.log(0.1), math.log(2.5), 8))  # λ, for scores whose variance is about 1
_LONGEST = 3  # times as many blocks as were asked for, in a jam
_JAM, _FAR = 0.1, 3.0  # in mean log latency, and in median absolute deviations
_LAGS = 4
_DOUBT = 0.5  # standard errors of a correlation that are luck
_SPAN = 0.1  # in log ratio, to either side, over which the slope of the scores is taken
_LEAST_VARIANCE = 0.5
_PRIOR_STARTS = 4.0
_SMALLEST_MS = 1e-3
_BIN = 1e-3  # in log latency
# Log ratios at which limits are looked for.
_STEPS = np.array([0.02, 0.05, 0.1, 0.15, 0.22, 0.3, 0.45, 0.7, 1.0, 1.6])
_TRIED = np.concatenate((-_STEPS[::-1], [0.0], _STEPS))


# Log odds ratios of being slow, where requests are exchanged.
_ODDS = np.array([0.15, 0.3, 0.6, 1.0, 1.6, 2.4])

Outcome = Literal["PASS", "FAIL"]
Exchange = Literal["arms", "requests"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known after each group, of shape (groups,): logarithms of e-values, against a ratio of at most 1 + margin
    (`harm`) and of at least that (`safety`).

    `last_block` is the last block of each group, `payment` what the logarithms were divided by: 1 where groups are
    independent, infinite while there are fewer than FEWEST_GROUPS. `whole` is the ratio of the quantiles of all groups
    so far.
    """

    margin: float
    last_block: Ints
    harm: Floats
    safety: Floats
    payment: Floats
    whole: Floats

    def decision(self, *, alpha: float, gates: int = 1) -> tuple[Outcome, int] | None:
        """The first outcome that stands for good, and the group after which it does; None while there is none.

        FAIL needs the evidence of one of `gates` gates; PASS needs none of that, since all gates must pass, but the
        ratio over the whole so far must lie within the margin too: an arm may be well in most groups and far worse in
        its worst.
        """
        met = []
        outcomes: tuple[tuple[Outcome, Bools], ...] = (
            ("FAIL", self.harm >= math.log(gates / alpha)),
            ("PASS", (self.safety >= -math.log(alpha)) & (self.whole <= 1.0 + self.margin)),
        )
        for outcome, is_reached in outcomes:
            if is_reached.any():
                met.append((int(np.argmax(is_reached)), outcome))
        if not met:
            return None
        group, outcome = min(met)
        return outcome, group


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Both samples cut into groups: the log latencies of each, the last block of each, and its trial."""

    treatment: Sequence[Floats]
    control: Sequence[Floats]
    last_block: Ints
    trial: Ints
    q: float
    restart_spread: float
    exchange: Exchange = "arms"

    def __len__(self) -> int:
        return len(self.last_block)

    def evidence(self, margin: float) -> Evidence:
        """The evidence after each group against a ratio of 1 + margin; empty where there is no group."""
        if not len(self):
            empty = np.zeros(0)
            return Evidence(
                margin=margin, last_block=self.last_block, harm=empty, safety=empty, payment=empty, whole=empty
            )
        anchor = math.log1p(margin)
        scores = np.zeros((3, len(self)))
        differences = np.zeros(len(self))
        by_requests = self.exchange == "requests"
        score = _exchanged if by_requests else _score
        for number, (one, two) in enumerate(zip(self.treatment, self.control, strict=True)):
            differences[number] = one.mean() - two.mean()
            for row, shift in enumerate((0.0, -_SPAN, _SPAN)):
                scores[row, number] = score(one - anchor - shift, two, self.q)
        payment = _payments(scores, differences, self.trial, self.restart_spread, doubt=_DOUBT if by_requests else 0.0)
        if by_requests:
            payment = payment * _design_effects(scores[0])
            tables = [_table(one - anchor, two, self.q) for one, two in zip(self.treatment, self.control, strict=True)]
            harm, safety = (np.array([_bets(table, sign * _ODDS) for table in tables]).T for sign in (1.0, -1.0))
        else:
            stakes = _STAKES[:, None] * scores[0]
            lost = np.logaddexp(stakes, -stakes) - math.log(2.0)  # log cosh
            harm, safety = stakes - lost, -stakes - lost
        return Evidence(
            margin=margin,
            last_block=self.last_block,
            harm=mixed(np.cumsum(harm, axis=1) / payment),
            safety=mixed(np.cumsum(safety, axis=1) / payment),
            payment=payment,
            whole=np.exp(_wholes(self.treatment, self.q) - _wholes(self.control, self.q)),
        )

    def limits(self, *, alpha: float) -> tuple[Floats, Floats]:
        """The limits of the ratio after each group, (groups,) each: one-sided, at level alpha over all looks together.

        A ratio below `low` was refuted by evidence of harm, one above `high` by evidence of safety, at this group or
        before. 0 and infinity where nothing was refuted yet. Between the ratios that are tried, where the evidence
        crosses is taken from a straight line.
        """
        low, high = np.zeros(len(self)), np.full(len(self), math.inf)
        if not len(self):
            return low, high
        tried = [self.evidence(math.expm1(ratio)) for ratio in _TRIED]
        harm = np.array([item.harm for item in tried])
        safety = np.array([item.safety for item in tried])
        for group in range(len(self)):
            reached = _crossing(_TRIED, harm[:, group], -math.log(alpha))
            low[group] = 0.0 if reached is None else math.exp(reached)
            reached = _crossing(-_TRIED[::-1], safety[::-1, group], -math.log(alpha))
            high[group] = math.inf if reached is None else math.exp(-reached)
        return np.maximum.accumulate(low), np.minimum.accumulate(high)


def groups_for(
    treatment: Sample,
    control: Sample,
    *,
    q: float,
    blocks: int,
    restart_spread: float = RESTART_SPREAD,
    exchange: Exchange = "arms",
) -> Groups:
    """The groups of `blocks` blocks or more; none where the samples share no block.

    A group is closed once it holds a few requests beyond its quantile and no jam goes on, in which one piece of luck
    lasts; it never reaches over two trials. Which blocks make a group depends on both arms alike, not on which was
    slow, and nothing depends on what comes later. `exchange` says what is swapped: arms of about equal share, or
    requests of arms of any share. `restart_spread` is the standard deviation of one arm's log latency over starts that
    is taken for granted.
    """
    numbered = _grouped(treatment, control, q=q, least=blocks)
    if numbered is None:
        none = np.zeros(0, dtype=np.int64)
        return Groups(
            treatment=(),
            control=(),
            last_block=none,
            trial=none,
            q=q,
            restart_spread=restart_spread,
            exchange=exchange,
        )
    groups, last_block, trial = numbered
    above, below = (
        _by_group(sample.values, group, len(last_block))
        for sample, group in zip((treatment, control), groups, strict=True)
    )
    return Groups(
        treatment=above,
        control=below,
        last_block=last_block,
        trial=trial,
        q=q,
        restart_spread=restart_spread,
        exchange=exchange,
    )


def _crossing(ratios: Floats, evidence: Floats, needed: float) -> float | None:
    """The largest of the rising `ratios` up to which the evidence is as much as is needed; None where it nowhere is."""
    enough = evidence >= needed
    if not enough[0]:
        return None
    last = len(ratios) - 1 if enough.all() else int(np.argmin(enough)) - 1
    if last + 1 == len(ratios):
        return float(ratios[last])
    share = (evidence[last] - needed) / (evidence[last] - evidence[last + 1])
    return float(ratios[last] + share * (ratios[last + 1] - ratios[last]))


def _grouped(
    treatment: Sample, control: Sample, *, q: float, least: int
) -> tuple[tuple[Ints, Ints], Ints, Ints] | None:
    """The group of each request of both samples (-1: of none), the last block of each group, and its trial."""
    blocks = np.intersect1d(treatment.block, control.block)
    if not blocks.size:
        return None
    counts = np.zeros(len(blocks), dtype=np.int64)
    trial_of_block = np.zeros(len(blocks), dtype=np.int64)
    places = []
    for sample in (treatment, control):
        nearest = np.minimum(np.searchsorted(blocks, sample.block), len(blocks) - 1)
        shared = blocks[nearest] == sample.block
        counts += np.bincount(nearest[shared], minlength=len(blocks))
        trial_of_block[nearest[shared]] = sample.trial[shared]
        places.append(np.where(shared, nearest, -1))
    pooled = np.zeros(len(blocks))
    for sample, known in zip((treatment, control), places, strict=True):
        inside = known >= 0
        pooled += np.bincount(known[inside], np.log(np.maximum(sample.values[inside], _SMALLEST_MS)), len(blocks))
    pooled /= counts
    group = np.full(len(blocks), -1, dtype=np.int64)
    closed, begun, held = 0, 0, 0.0
    ends = []
    for place in range(len(blocks)):
        if place > begun and trial_of_block[place] != trial_of_block[begun]:
            begun, held = place, 0.0  # what a trial left over is no group
        held += float(counts[place]) * (1.0 - q)
        length = place - begun + 1
        if length < least or held < _ENOUGH - 1e-9:
            continue
        if length >= _LONGEST * least or not _is_jammed(pooled[: place + 1]):
            group[begun : place + 1] = closed
            ends.append(place)
            closed, begun, held = closed + 1, place + 1, 0.0
    if not ends:
        return None
    own, other = (np.where(known >= 0, group[known], -1) for known in places)
    return (own, other), blocks[ends], trial_of_block[ends]


def _by_group(values: Floats, group: Ints, groups: int) -> list[Floats]:
    """The log latencies of each group."""
    order = np.argsort(group, kind="stable")
    ends = np.searchsorted(group[order], np.arange(groups + 1))
    logarithms = np.log(np.maximum(values[order], _SMALLEST_MS))
    return [logarithms[ends[number] : ends[number + 1]] for number in range(groups)]


def _wholes(by_group: Sequence[Floats], q: float) -> Floats:
    """The quantile of all log latencies up to each group, to half a bin."""
    binned = [np.floor(item / _BIN).astype(np.int64) for item in by_group]
    lowest = min(int(item.min()) for item in binned)
    counts = np.zeros(max(int(item.max()) for item in binned) - lowest + 1, dtype=np.int64)
    found = []
    for item in binned:
        counts += np.bincount(item - lowest, minlength=len(counts))
        upto = np.cumsum(counts)
        found.append((lowest + int(np.searchsorted(upto, q * upto[-1])) + 0.5) * _BIN)
    return np.array(found)


def _is_jammed(pooled: Floats) -> bool:
    """Whether the last block is far slower than blocks so far were, by the mean log latency of both arms."""
    middle = float(np.median(pooled))
    return float(pooled[-1]) - middle > max(_JAM, _FAR * float(np.median(np.abs(pooled - middle))))


def _score(treatment: Floats, control: Floats, q: float) -> float:
    """By how much more often the treatment exceeds the quantile of both, in standard errors of independent requests.

    Where one arm has more requests, each counts as much less.
    """
    threshold = float(np.quantile(np.concatenate([treatment, control]), q))
    above, below = int((treatment > threshold).sum()), int((control > threshold).sum())
    if not above + below:
        return 0.0
    half = (len(treatment) + len(control)) / 2.0
    return (above * half / len(treatment) - below * half / len(control)) / math.sqrt(above + below)


def _table(treatment: Floats, control: Floats, q: float) -> tuple[int, int, int, int]:
    """(the treatment's requests beyond the quantile of both, all beyond it, the treatment's requests, all)."""
    threshold = float(np.quantile(np.concatenate([treatment, control]), q))
    above = int((treatment > threshold).sum())
    return above, above + int((control > threshold).sum()), len(treatment), len(treatment) + len(control)


def _exchanged(treatment: Floats, control: Floats, q: float) -> float:
    """By how many standard deviations the treatment's share of the slow requests exceeds its share of all."""
    above, slow, own, total = _table(treatment, control, q)
    mean = slow * own / total
    variance = mean * (1.0 - own / total) * (total - slow) / max(1, total - 1)
    return (above - mean) / math.sqrt(variance) if variance > 0 else 0.0


def _bets(table: tuple[int, int, int, int], odds: Floats) -> Floats:
    """The logarithm of the e-value of each log odds ratio: w^k / E[w^k], k hypergeometric."""
    above, slow, own, total = table
    counts = np.arange(max(0, slow + own - total), min(slow, own) + 1)
    chances = stats.hypergeom.logpmf(counts, total, slow, own)
    expected = logsumexp(chances[None, :] + odds[:, None] * counts[None, :], axis=1)
    return np.asarray(odds * above - expected)


def _design_effects(scores: Floats) -> Floats:
    """After each group: the variance of the scores so far, around their mean, over that of independent requests; at
    least 1."""
    seen = np.arange(1, len(scores) + 1)
    around = np.cumsum(scores**2) - np.cumsum(scores) ** 2 / seen
    return np.maximum(1.0, around / np.maximum(1, seen - 1))


def _payments(scores: Floats, differences: Floats, trial: Ints, restart_spread: float, *, doubt: float = 0.0) -> Floats:
    """What the logarithm of the evidence is divided by after each group.

    `scores` are those at the margin, and of ratios a span below and above it. Where the means of groups are of few
    requests, their covariances are mostly luck: only what exceeds `doubt` standard errors is paid for.
    """
    payments = np.full(len(differences), math.inf)
    for seen in range(FEWEST_GROUPS, len(differences) + 1):
        slope = max(0.0, float((scores[1, :seen] - scores[2, :seen]).mean()) / (2.0 * _SPAN))
        variance = max(float((scores[0, :seen] ** 2).mean()), _LEAST_VARIANCE)
        rest = differences[:seen] - differences[:seen].mean()
        lasting = 0.0
        for lag in range(1, min(_LAGS, seen // 3) + 1):
            # what taking the mean away takes from each covariance is given back
            luck = float(rest.var()) * (1.0 / seen - doubt / math.sqrt(seen))
            lasting += 2.0 * max(0.0, float(rest[lag:] @ rest[:-lag]) / seen + luck)
        lasting += _luck_of_starts(differences[:seen], trial[:seen], restart_spread)
        payments[seen - 1] = 1.0 + slope**2 * lasting / variance + 2.0 * _neighbours(scores[0, :seen])
    return payments


def _neighbours(scores: Floats) -> float:
    """How much neighbouring scores resemble each other, by their correlation less half of its standard error: in a jam
    the tail may go with one arm for longer than a group, and the mean of all requests does not show it."""
    rest = scores - scores.mean()
    variance = float(rest.var())
    if not variance > 0:
        return 0.0
    count = len(scores)
    return max(0.0, float(rest[1:] @ rest[:-1]) / count / variance + 1.0 / count - _DOUBT / math.sqrt(count))


def _luck_of_starts(differences: Floats, trial: Ints, restart_spread: float) -> float:
    """The variance that starts add to the sum over groups, for each group: what is taken for granted of a start, which
    counts as four starts, and what the starts so far say."""
    which, sizes = np.unique(trial, return_inverse=True, return_counts=True)[1:]
    means = np.bincount(which, differences) / sizes
    variance, degrees = 2.0 * restart_spread**2, len(means) - 1
    if degrees:
        within = float(((differences - means[which]) ** 2).sum()) / max(1, len(differences) - len(means))
        between = max(0.0, float(means.var(ddof=1)) - within * float((1.0 / sizes).mean()))
        variance = (_PRIOR_STARTS * variance + degrees * between) / (_PRIOR_STARTS + degrees)
    return variance * float((sizes.astype(np.float64) ** 2).sum()) / len(differences)


def mixed(logarithms: Floats) -> Floats:
    """The logarithm of the mean over stakes. Shape (stakes, groups) to (groups,)."""
    most = logarithms.max(axis=0)
    return np.asarray(most + np.log(np.exp(logarithms - most).mean(axis=0)))
