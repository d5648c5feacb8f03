"""Whether first-seen shapes stand where a server stalls or is slow, more often than chance puts them there.

Early in a run nearly every shape is first-seen, so one at the begin of a stall is no evidence. What counts is how
often it happens against how often it would: the share of first-seen shapes among the requests of that time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import ndimage, optimize, stats

from analysis.arrays import Bools, Floats, Ints
from analysis.records.columns import parts
from analysis.records.requests import Requests
from analysis.run.spikes import Windows

_NEAR = 20  # requests of about one time
_BY_LENGTH, _BY_LENGTH_AMONG_OTHERS = 0.05, 0.2
_OTHERS = 2
_MANY = 20
_NEIGHBOURS = 40
_DRAWS = 9999


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shapes:
    """The shape of each request (n,) as one arm pads it, whether its server had not met it before, and how often that
    happened among the requests of that time and of about that length."""

    shape: Ints  # -1 where the prompt's length is unknown
    new: Bools
    share: Floats  # of requests up to four times as short or as long
    share_as_long: Floats  # of requests as long, and up to twice as long
    longer: Floats  # the share of requests of that time, and as new or not, that are shorter


def shapes_of(requests: Requests, arm: str, *, ladder: Sequence[int] = (), lives: Ints | None = None) -> Shapes:
    """The shapes of the arm's requests; those of other arms are unknown (-1) and never new.

    `ladder`: steps up to which the server rounds prompt lengths; longer prompts keep their length. `lives`: from which
    start of the server each request is, what one trial met being known in the next; without it every trial starts anew.
    """
    rows = len(requests)
    own = np.asarray(requests.arm == requests.arms.index(arm)) if arm in requests.arms else np.zeros(rows, np.bool_)
    known = own & (requests.prompt_tokens > 0) & ~requests.broken
    shape = np.where(known, requests.prompt_tokens, -1)
    if len(ladder):
        steps = np.unique(np.asarray(ladder, dtype=np.int64))
        place = np.searchsorted(steps, shape)
        shape = np.where(known & (place < len(steps)), steps[np.minimum(place, len(steps) - 1)], shape)
    new = np.zeros(rows, dtype=np.bool_)
    share, share_as_long, longer = np.zeros(rows), np.zeros(rows), np.full(rows, 0.5)
    everyone = np.flatnonzero(known)
    start = (requests.trial if lives is None else lives)[everyone]
    replica = requests.replica[everyone]
    servers = [(number, name) for number in np.unique(start).tolist() for name in range(-1, len(requests.replicas))]
    for number, name in servers:
        mine = everyone[(start == number) & (replica == name)]
        if not mine.size:
            continue
        mine = mine[np.argsort(requests.start_ns[mine], kind="stable")]
        new[mine[np.unique(shape[mine], return_index=True)[1]]] = True
        share[mine] = _share(shape[mine], new[mine], below=8, above=8)
        share_as_long[mine] = _share(shape[mine], new[mine], below=1, above=4)
        longer[mine] = _longer(shape[mine], new[mine])
    return Shapes(shape=shape, new=new, share=share, share_as_long=share_as_long, longer=longer)


def _share(shape: Ints, new: Bools, *, below: int, above: int) -> Floats:
    """The share of first-seen shapes among requests about as long at each request's time; (n,) in order of time.

    As long is what is `below` quarters of an octave shorter or `above` longer. Shapes run out, so their share falls;
    that it does so steadily is all that is taken for granted.
    """
    share = np.zeros(len(shape))
    # Two bytes each, since all are looked through for every length.
    quarter = np.floor(4.0 * np.log2(np.maximum(shape, 1))).astype(np.int16)
    for number in np.unique(quarter).tolist():
        alike = np.flatnonzero((quarter >= number - below) & (quarter <= number + above))
        fitted = optimize.isotonic_regression(new[alike].astype(np.float64), increasing=False).x
        own = quarter[alike] == number
        share[alike[own]] = fitted[own]
    return share


def _longer(shape: Ints, new: Bools) -> Floats:
    """The share of requests about as early that are shorter, among first-seen ones or among the others; (n,) in order
    of time, ties half."""
    rank = np.empty(len(shape))
    for kind in (new, ~new):
        rows = np.flatnonzero(kind)
        if not rows.size:
            continue
        lengths, last = shape[rows], rows.size - 1
        for part in parts(rows.size):
            own = lengths[part]
            starts = np.clip(np.arange(part.start, part.stop) - _NEAR // 2, 0, max(0, rows.size - _NEAR))
            shorter, equal = np.zeros(own.size), np.zeros(own.size)
            for step in range(_NEAR):
                near = lengths[np.minimum(starts + step, last)]
                shorter += near < own
                equal += near == own
            rank[rows[part]] = shorter / _NEAR + 0.5 * (equal / _NEAR)
    return rank


def chance_of_new(shares: Floats, rows: Ints) -> float:
    """The chance that one of the requests would have a first-seen shape, by the share of such among their like."""
    return float(1.0 - np.prod(1.0 - shares[rows]))


def longest_of(shapes: Shapes, rows: Ints) -> float:
    """How far the longest of the requests stands out among those of its time: uniform from 0 to 1 where lengths have
    no part in it."""
    return float(shapes.longer[rows].max() ** len(rows)) if len(rows) else 0.5


def goes_by_length(ranks: Floats, weights: Floats, *, others: int) -> bool:
    """Whether requests that stalls began with are longer than chance has it.

    `ranks`: one for each stall, uniform where lengths have no part in it; their weighted mean is taken as normal. At
    one in twenty, or at one in five where `others`, stalls without a first-seen shape, show that the arm has other
    reasons to stall.
    """
    spread = math.sqrt(float((weights**2).sum()) / 12.0)
    if spread <= 0.0:
        return False
    level = _BY_LENGTH if others < _OTHERS else _BY_LENGTH_AMONG_OTHERS
    return float(stats.norm.sf(float((weights * (ranks - 0.5)).sum()) / spread)) <= level


def more_than_chance(new: Bools, chances: Floats) -> float:
    """The p-value that so many of the stalls began with a first-seen shape, each with its own chance to.

    The count is Poisson binomial; with equal chances this is the one-sided binomial test. 1.0 for no stall.
    """
    if not new.size or not new.any():
        return 1.0
    return float(stats.poisson_binom.sf(int(new.sum()) - 1, np.clip(chances, 0.0, 1.0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowFirst:
    """Whether a request with a first-seen shape waits longer for its first token than others of its bucket do."""

    first: int  # requests with first-seen shapes that have others to be held against
    others: int
    p_value: float  # one-sided; 1.0 where there is nothing to compare
    excess_ms: float  # median over the first-seen of what they waited beyond their bucket's median; NaN for none


def slow_first(
    requests: Requests, shapes: Shapes, stalls: Windows, *, control: str = "", rng: np.random.Generator
) -> SlowFirst:
    """A rank test within buckets, for compiles that hold up only the request that needs them.

    A bucket holds the requests of one shape; those of shapes that came once or twice are put together by length, an
    eighth of an octave at a time. Within a bucket only neighbours in time are compared, 40 at most, and waits are
    taken relative to the copy's on the arm `control` where there is one, so that drifts of the run do not
    count. Requests that waited in `stalls` are left out: those are explained. The statistic is the sum over buckets of
    the first-seen ranks over (n + 1), as van Elteren weighs them; from 20 first-seen requests on by its normal
    approximation, below by permutation within buckets.
    """
    waits = requests.ttft_ms
    usable = (shapes.shape >= 0) & requests.ok & (waits > 0)
    usable &= ~stalls.touch(requests.start_ns, np.maximum(requests.first_ns, requests.start_ns))
    rows = np.flatnonzero(usable)
    if rows.size < 2 or not shapes.new[rows].any():
        return _NOTHING
    rows = rows[np.argsort(requests.start_ns[rows], kind="stable")]
    values = _relative(requests, rows, control)
    new = shapes.new[rows]
    stratum = _strata(shapes.shape[rows])
    mixed = _mixed(stratum, new)
    rows, values, new, stratum = rows[mixed], values[mixed], new[mixed], stratum[mixed]
    if not new.any():
        return _NOTHING
    order = np.lexsort((values, stratum))
    values, new, waited, stratum = values[order], new[order], waits[rows][order], _dense(stratum[order])
    sizes = np.bincount(stratum)
    scores = _ranks(values, stratum, sizes) / (sizes[stratum] + 1.0)
    firsts = np.bincount(stratum, weights=new)
    means = np.bincount(stratum, weights=scores) / sizes
    surplus = float(scores[new].sum() - (firsts * means).sum())
    if new.sum() >= _MANY:
        spread = np.bincount(stratum, weights=(scores - means[stratum]) ** 2) / np.maximum(sizes - 1, 1)
        variance = float((firsts * (sizes - firsts) / sizes * spread).sum())
        p_value = float(stats.norm.sf(surplus / math.sqrt(variance))) if variance > 0 else 1.0
    else:
        p_value = _permuted(scores, new, stratum, surplus + float((firsts * means).sum()), rng)
    usual = ndimage.median(waited[~new], stratum[~new], np.arange(len(sizes)))
    excess = waited[new] - usual[stratum[new]]
    return SlowFirst(
        first=int(new.sum()), others=int((~new).sum()), p_value=p_value, excess_ms=float(np.median(excess))
    )


_NOTHING = SlowFirst(first=0, others=0, p_value=1.0, excess_ms=math.nan)


def _dense(stratum: Ints) -> Ints:
    """Rising numbers as 0, 1, 2 ..."""
    return np.asarray(np.cumsum(np.diff(stratum, prepend=stratum[:1]) != 0))


def _ranks(values: Floats, stratum: Ints, sizes: Ints) -> Floats:
    """The rank of each value in its stratum, ties sharing theirs; values rise within each stratum."""
    place = np.arange(1.0, len(values) + 1.0) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    tied = np.cumsum(np.append(True, (np.diff(values) != 0) | (np.diff(stratum) != 0))) - 1
    return np.asarray((np.bincount(tied, weights=place) / np.bincount(tied))[tied])


def _relative(requests: Requests, rows: Ints, control: str) -> Floats:
    """Log waits, less those of the copies on the control where nearly all have one."""
    logs = np.log(requests.ttft_ms[rows])
    if control not in requests.arms or requests.arms[requests.arm[rows[0]]] == control:
        return logs
    base = np.flatnonzero(
        (requests.arm == requests.arms.index(control)) & (requests.pair >= 0) & requests.ok & (requests.ttft_ms > 0)
    )
    base = base[np.argsort(requests.pair[base], kind="stable")]
    place = np.minimum(np.searchsorted(requests.pair[base], requests.pair[rows]), max(0, base.size - 1))
    if not base.size:
        return logs
    paired = requests.pair[base[place]] == requests.pair[rows]
    return np.where(paired, logs - np.log(requests.ttft_ms[base[place]]), np.nan) if paired.mean() > 0.9 else logs


def _strata(shape: Ints) -> Ints:
    """A number for each request (n,), in order of time: its bucket and the stretch of 40 of the bucket's requests."""
    _, place, counts = np.unique(shape, return_inverse=True, return_counts=True)
    eighth = (8.0 * np.log2(np.maximum(shape, 1))).astype(np.int64)
    bucket = np.where(counts[place] >= 3, place, len(counts) + eighth)
    order = np.argsort(bucket, kind="stable")
    ordered = bucket[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    within = np.arange(len(ordered)) - np.repeat(starts, np.diff(np.append(starts, len(ordered))))
    result = np.empty(len(shape), dtype=np.int64)
    result[order] = ordered * (len(shape) + 1) + within // _NEIGHBOURS
    return result


def _mixed(stratum: Ints, new: Bools) -> Bools:
    """Which requests are in a stratum that holds both kinds."""
    _, place, sizes = np.unique(stratum, return_inverse=True, return_counts=True)
    firsts = np.bincount(place, weights=new)
    return np.asarray(((firsts > 0) & (firsts < sizes))[place])


def _permuted(scores: Floats, new: Bools, stratum: Ints, seen: float, rng: np.random.Generator) -> float:
    """(b + 1) / (n + 1) of `_DRAWS` shuffles within strata [Phipson and Smyth 2010]."""
    total = np.zeros(_DRAWS)
    for number in range(int(stratum.max()) + 1):
        part = scores[stratum == number]
        count = int(new[stratum == number].sum())
        keys = rng.random((_DRAWS, part.size))
        chosen = np.argpartition(keys, count - 1, axis=1)[:, :count]
        total += part[chosen].sum(axis=1)
    return float((int((total >= seen - 1e-9).sum()) + 1) / (_DRAWS + 1))
