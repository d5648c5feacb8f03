"""Evidence on a ratio that may be analysed after every minute, with an error that holds over all interim analyses.

The product of exp(λz) / cosh(λz) over the scores z of groups of blocks is a martingale [11, 12]
(docs/explanation/method.md, "Interim analyses"). Where shares are uneven, requests are exchanged instead: w^k / E[w^k]
of a hypergeometric count. Logarithms are divided by how much groups resemble each other (`docs/decisions/0016`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tailgate.analysis.arrays import Bools, Floats, Ints
from tailgate.analysis.settings.gate_limits import RESTART_SPREAD
from tailgate.analysis.statistics.compare import Sample, in_shared_blocks
from tailgate.analysis.statistics.dependence import restart_variance
from tailgate.analysis.statistics.slow_counts import SortedGroups, slow_counts

FEWEST_GROUPS = 5  # before, nothing is known of how groups resemble each other
SEPARATION = 1.2
SEGMENTS = 3  # to a block: what a large effect is seen in
SOONEST_BLOCKS = 6  # that a large effect takes: a disturbance of one arm lasts for less
_ENOUGH, _ENOUGH_SEPARATED = 2.0, 1.0  # requests of both arms beyond a group's quantile, for it to be closed
_STAKES = np.exp(np.linspace(math.log(0.1), math.log(2.5), 8))  # λ, for scores whose variance is about 1
_LONGEST = 3  # times as many blocks as were asked for, in a jam
_JAM, _FAR = 0.1, 3.0  # in mean log latency, and in median absolute deviations
_LAGS = 4
_DOUBT = 0.5  # standard errors of a correlation that chance is granted
_SPAN = 0.1  # in log ratio, to either side, over which the slope of the scores is taken
_LEAST_VARIANCE = 0.5
_BIN = 1e-3  # in log latency
# Log ratios at which limits are searched.
_STEPS = np.array([0.02, 0.05, 0.1, 0.15, 0.22, 0.3, 0.45, 0.7, 1.0, 1.3, 1.6, 2.0, 2.5, 3.0])
_TRIED = np.concatenate((-_STEPS[::-1], [0.0], _STEPS))

Outcome = Literal["PASS", "FAIL"]
Exchange = Literal["arms", "requests"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known of a value after each group of blocks, of shape (groups,): logarithms of e-values, against a value
    of at most `limit` (`harm`) and of at least that (`safety`), which were divided by `deflation`.

    `last_block` is the last block of each group, `value` that of all groups so far. `may_fail` and `may_pass` say after
    which groups an outcome may be reached; a PASS after an `early` one must still be so by all groups, and so must a
    FAIL of effects that are `separated` from the limit.
    """

    limit: float
    last_block: Ints
    value: Floats
    harm: Floats
    safety: Floats
    deflation: Floats
    may_fail: Bools
    may_pass: Bools
    early: Bools
    separated: bool = False

    def safe(self, *, alpha: float) -> Bools:
        """Return after which groups the evidence allows a PASS: an arm may be well in most and far worse over all."""
        return np.asarray((self.safety >= -math.log(alpha)) & (self.value <= self.limit))

    def decision(self, *, alpha: float, gates: int = 1, to_the_end: bool = False) -> tuple[Outcome, int] | None:
        """Return the first outcome, and the group after which it was reached; None while there is none.

        FAIL needs the evidence of one of `gates` gates; PASS needs none of that, since all gates must pass.
        `to_the_end`: what comes after contradicts a PASS by a FAIL or by a last value beyond the limit.
        """
        fails, safe = self.may_fail & (self.harm >= math.log(gates / alpha)), self.safe(alpha=alpha)
        passes = self.may_pass & safe
        if to_the_end and len(safe):
            if fails.any() or self.value[-1] > self.limit:
                passes = np.zeros_like(passes)
            if not safe[-1]:
                passes &= ~self.early
            if self.separated and not fails[-1]:
                fails = np.zeros_like(fails)
        both: tuple[tuple[Outcome, Bools], ...] = (("FAIL", fails), ("PASS", passes))
        decided = [(int(np.argmax(reached)), outcome) for outcome, reached in both if reached.any()]
        return (min(decided)[1], min(decided)[0]) if decided else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Both samples cut into groups: the log latencies of each arm, and what of a comparison no ratio changes.

    Of shape (groups,): `last_block` of each group; `lasting`, the variance for each group so far that the sum of mean
    log latencies has beyond that of independent groups; `whole`, the ratio of the quantiles of all groups so far.
    """

    treatment: SortedGroups
    control: SortedGroups
    last_block: Ints
    lasting: Floats
    whole: Floats
    q: float
    exchange: Exchange
    separation: float  # how many times farther than the margin the nulls lie

    def __len__(self) -> int:
        return len(self.last_block)

    def evidence(self, margin: float) -> Evidence:
        """Return the evidence after each group against a ratio of 1 + margin; empty without groups."""
        bound, separation = math.log1p(margin), math.log(self.separation)
        harm, safety, deflation = self._bets(bound + separation)
        may = np.ones(len(self), dtype=np.bool_)
        if separation:
            _, safety, deflation = self._bets(bound - separation)
            may = np.unique(self.last_block // SEGMENTS, return_inverse=True)[1] + 1 >= SOONEST_BLOCKS
        return Evidence(
            limit=1.0 + margin,
            last_block=self.last_block,
            value=self.whole,
            harm=harm,
            safety=safety,
            deflation=deflation,
            may_fail=may,
            may_pass=may,
            early=np.full(len(self), bool(separation)),
            separated=bool(separation),
        )

    def _bets(self, ratio: float) -> tuple[Floats, Floats, Floats]:
        """Return logarithms of the evidence of harm and of safety at a log ratio, and the deflation, (groups,) each."""
        if not len(self):
            return np.zeros(0), np.zeros(0), np.zeros(0)
        ratios = ratio + np.array([[0.0], [-_SPAN], [_SPAN]])
        place = np.floor(self.q * (self.treatment.sizes + self.control.sizes - 1)).astype(np.int64) + 1
        counts = slow_counts(self.treatment, self.control, ratios, place)
        if self.exchange == "requests":
            scores = counts.by_request()
            deflation: Floats = _deflations(scores, self.lasting) * _design_effects(scores[0])
            harm, safety = counts.at(0).bets()
        else:
            scores = counts.by_arm()
            deflation = _deflations(scores, self.lasting)
            stakes = _STAKES[:, None] * scores[0]
            lost = np.logaddexp(stakes, -stakes) - math.log(2.0)  # log cosh
            harm, safety = stakes - lost, -stakes - lost
        return mixed(np.cumsum(harm, axis=1) / deflation), mixed(np.cumsum(safety, axis=1) / deflation), deflation

    def limits(self, *, alpha: float) -> tuple[float, float]:
        """Return the limits of the ratio by all groups, one-sided at level alpha over all interim analyses.

        Evidence of harm refutes every ratio below the lower one, evidence of safety every ratio above the upper one.
        They are 0 and infinity while nothing is refuted.
        """
        if not len(self):
            return 0.0, math.inf
        tried = [self.evidence(math.expm1(ratio)) for ratio in _TRIED]
        low = _crossing(_TRIED, np.array([item.harm[-1] for item in tried]), -math.log(alpha))
        high = _crossing(-_TRIED[::-1], np.array([item.safety[-1] for item in tried[::-1]]), -math.log(alpha))
        return math.exp(low), math.exp(-high)


def groups_for(
    treatment: Sample,
    control: Sample,
    *,
    q: float,
    blocks: int,
    restart_spread: float = RESTART_SPREAD,
    exchange: Exchange = "arms",
    separation: float = 1.0,
) -> Groups:
    """Group `blocks` blocks or more; without a shared block of both samples there is no group.

    A group closes once it holds a few requests beyond its quantile and no jam goes on; it never spans two trials. Which
    blocks form a group depends on both arms alike, and on nothing that comes later. `exchange` names what is swapped:
    arms of about equal share, or requests of arms of any share. `restart_spread` is the assumed standard deviation of
    one arm's log latency over starts. With `separation` above 1 the evidence is against a ratio that much beyond the
    margin, effects that last longer than a group are not allowed for, and blocks are segments.
    """
    *samples, block, trial = in_shared_blocks(treatment, control)
    arms = [SortedGroups.of(sample.values, sample.block, len(block)) for sample in samples]
    counts = np.sum([blocks.sizes for blocks in arms], axis=0)
    sums = np.sum([blocks.sizes * blocks.means() for blocks in arms], axis=0)
    enough = _ENOUGH if separation == 1.0 else _ENOUGH_SEPARATED
    group = _grouped(counts * (1.0 - q), sums / counts, trial, least=blocks, enough=enough)
    ends = np.flatnonzero((group >= 0) & (np.diff(group, append=-1) != 0))
    number = len(ends)
    one, other = (blocks.joined(group, number) for blocks in arms)
    lasting: Floats = np.zeros(number)
    if separation == 1.0 and number:
        doubt = _DOUBT if exchange == "requests" else 0.0
        lasting = _lasting(one.means() - other.means(), trial[ends], restart_spread, doubt=doubt)
    return Groups(
        treatment=one,
        control=other,
        last_block=block[ends],
        lasting=lasting,
        whole=np.exp(_wholes(one, q) - _wholes(other, q)),
        q=q,
        exchange=exchange,
        separation=separation,
    )


def _crossing(ratios: Floats, evidence: Floats, needed: float) -> float:
    """Return the largest of the ascending `ratios` up to which the evidence suffices; -inf if it nowhere does."""
    enough = evidence >= needed
    if not enough[0]:
        return -math.inf
    if enough.all():
        return float(ratios[-1])
    last = int(np.argmin(enough)) - 1
    share = (evidence[last] - needed) / (evidence[last] - evidence[last + 1])
    return float(ratios[last] + share * (ratios[last + 1] - ratios[last]))


def _grouped(beyond: Floats, pooled: Floats, trial: Ints, *, least: int, enough: float) -> Ints:
    """Return the group of each block, -1 for the rest of a trial.

    Shape (blocks,), as the requests `beyond` the quantile and the `pooled` mean log latency of each.
    """
    group = np.full(len(trial), -1, dtype=np.int64)
    closed, begun, held = 0, 0, 0.0
    for place in range(len(trial)):
        if place > begun and trial[place] != trial[begun]:
            begun, held = place, 0.0
        held += float(beyond[place])
        length = place - begun + 1
        if length < least or held < enough - 1e-9:
            continue
        # In a jam the last block is far slower than those before, by the mean log latency of both arms.
        middle = float(np.median(pooled[: place + 1]))
        spread = float(np.median(np.abs(pooled[: place + 1] - middle)))
        jammed = float(pooled[place]) - middle > max(_JAM, _FAR * spread)
        if length >= _LONGEST * least or not jammed:
            group[begun : place + 1] = closed
            closed, begun, held = closed + 1, place + 1, 0.0
    return group


def _wholes(groups: SortedGroups, q: float) -> Floats:
    """Return the quantile of all log latencies up to each group, to half a bin."""
    binned = [np.floor(part / _BIN).astype(np.int64) for part in groups.parts()]
    lowest = min((int(part[0]) for part in binned), default=0)
    counts = np.zeros(max((int(part[-1]) for part in binned), default=0) - lowest + 1, dtype=np.int64)
    found = []
    for part in binned:
        counts += np.bincount(part - lowest, minlength=len(counts))
        upto = np.cumsum(counts)
        found.append((lowest + int(np.searchsorted(upto, q * upto[-1])) + 0.5) * _BIN)
    return np.array(found)


def _design_effects(scores: Floats) -> Floats:
    """Return the variance of the scores up to each group over that of independent requests, at least 1."""
    seen = np.arange(1, len(scores) + 1)
    around = np.cumsum(scores**2) - np.cumsum(scores) ** 2 / seen
    return np.maximum(1.0, around / np.maximum(1, seen - 1))


def _deflations(scores: Floats, lasting: Floats) -> Floats:
    """Return the divisor of the logarithm of the evidence after each group.

    `scores` are those at a ratio, and at ratios a span below and above it: their slope translates lasting effects from
    mean log latencies to the quantile.
    """
    seen = np.arange(1, len(lasting) + 1)
    slope = np.maximum(0.0, np.cumsum(scores[1] - scores[2]) / seen / (2.0 * _SPAN))
    variance = np.maximum(np.cumsum(scores[0] ** 2) / seen, _LEAST_VARIANCE)
    deflations = 1.0 + slope**2 * lasting / variance + 2.0 * _neighbours(scores[0])
    return np.where(seen < FEWEST_GROUPS, math.inf, deflations)


def _neighbours(scores: Floats) -> Floats:
    """Return the correlation of neighbouring scores after each group, less half of its standard error: in a jam the
    tail may follow one arm for longer than a group."""
    seen = np.arange(1, len(scores) + 1)
    mean = np.cumsum(scores) / seen
    variance = np.cumsum(scores**2) / seen - mean**2
    # of products of neighbours: what taking the mean away from each takes from their sum
    products = np.concatenate(([0.0], np.cumsum(scores[1:] * scores[:-1])))
    products -= mean * (2.0 * seen * mean - scores[0] - scores) - (seen - 1) * mean**2
    alike = np.divide(products / seen, variance, out=np.zeros(len(scores)), where=variance > 1e-12)
    return np.where(variance > 1e-12, np.maximum(0.0, alike + 1.0 / seen - _DOUBT / np.sqrt(seen)), 0.0)


def _lasting(differences: Floats, trial: Ints, restart_spread: float, *, doubt: float = 0.0) -> Floats:
    """Return, after each group, the excess variance per group of the sum of `differences` of mean log latencies over
    that of independent groups; 0 for the first few. Only covariances beyond `doubt` standard errors count."""
    found = np.zeros(len(differences))
    for seen in range(FEWEST_GROUPS, len(differences) + 1):
        rest = differences[:seen] - differences[:seen].mean()
        for lag in range(1, min(_LAGS, seen // 3) + 1):
            # What taking the mean away takes from each covariance is given back.
            shift = float(rest.var()) * (1.0 / seen - doubt / math.sqrt(seen))
            found[seen - 1] += 2.0 * max(0.0, float(rest[lag:] @ rest[:-lag]) / seen + shift)
        found[seen - 1] += _variance_of_starts(differences[:seen], trial[:seen], restart_spread)
    return found


def _variance_of_starts(differences: Floats, trial: Ints, restart_spread: float) -> float:
    """Return the variance, per group, that starts add to the sum over groups (`restart_variance`)."""
    which, sizes = np.unique(trial, return_inverse=True, return_counts=True)[1:]
    means = np.bincount(which, differences) / sizes
    within = float(((differences - means[which]) ** 2).sum()) / max(1, len(differences) - len(means))
    variance = restart_variance(means, np.zeros_like(sizes), within * float((1.0 / sizes).mean()), restart_spread)
    return variance * float((sizes.astype(np.float64) ** 2).sum()) / len(differences)


def mixed(logarithms: Floats) -> Floats:
    """Return the logarithm of the mean over stakes. Shape (stakes, groups) to (groups,)."""
    most = logarithms.max(axis=0)
    return np.asarray(most + np.log(np.exp(logarithms - most).mean(axis=0)))
