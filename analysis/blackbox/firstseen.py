"""Whether first-seen shapes stand where a server stalls or is slow, more often than chance puts them there.

Early in a run nearly every shape is first-seen, so one at the begin of a stall is no evidence. What counts is how
often it happens against how often it would: the share of first-seen shapes among the requests of that time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import ndimage, optimize, stats

from analysis.arrays import Bools, Codes, Floats, Ints
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
    happened among the requests of that time and of about that length.

    How often is worked out for the requests that it is asked of: only stalls need it, and few requests begin one.
    """

    shape: Codes  # -1 where the prompt's length is unknown
    new: Bools
    servers: tuple[Met, ...]

    def share(self, rows: Ints) -> Floats:
        """Of requests up to four times as short or as long."""
        return self._each(rows, 0.0, lambda server, places: server.share(places, below=8, above=8))

    def share_as_long(self, rows: Ints) -> Floats:
        """Of requests as long, and up to twice as long."""
        return self._each(rows, 0.0, lambda server, places: server.share(places, below=1, above=4))

    def longer(self, rows: Ints) -> Floats:
        """The share of requests of that time, and as new or not, that are shorter."""
        return self._each(rows, 0.5, lambda server, places: server.longer(places))

    def _each(self, rows: Ints, otherwise: float, of_server: Callable[[Met, Ints], Floats]) -> Floats:
        """What `of_server` makes of the places of those rows that its server answered; `otherwise` for the others."""
        values = np.full(len(rows), otherwise)
        for server in self.servers:
            places = server.places(rows)
            if (places >= 0).any():
                values[places >= 0] = of_server(server, places[places >= 0])
        return values


@dataclass(frozen=True, kw_only=True, eq=False)
class Met:
    """What one server met: its requests in order of time, each with its place from 0."""

    rows: Ints
    shape: Codes  # (places,)
    new: Ints  # the places of first-seen shapes, rising

    def places(self, rows: Ints) -> Ints:
        """The place of each of the rows, -1 for those of others."""
        found = np.full(len(rows), -1, dtype=np.int64)
        if not len(rows):
            return found
        if self._rising:
            place = np.minimum(np.searchsorted(self.rows, rows), len(self.rows) - 1)
            return np.where(self.rows[place] == rows, place, -1)
        order = np.argsort(rows, kind="stable")
        place = np.searchsorted(rows, self.rows, sorter=order)
        own = np.flatnonzero(rows[order[np.minimum(place, len(rows) - 1)]] == self.rows)
        for which in own.tolist():
            found[rows == self.rows[which]] = which
        return found

    @cached_property
    def _rising(self) -> bool:
        return bool((np.diff(self.rows) >= 0).all())

    def share(self, places: Ints, *, below: int, above: int) -> Floats:
        """The share of first-seen shapes among requests about as long at the time of each of the places.

        As long is what is `below` quarters of an octave shorter or `above` longer. Shapes run out, so their share
        falls; that it does so steadily is all that is taken for granted.
        """
        share = np.zeros(len(places))
        quarter = _quarter(self.shape[places])
        for number in np.unique(quarter).tolist():
            if (number, below, above) not in self._fits:
                self._fits[number, below, above] = self._fit(_least(number - below), _least(number + above + 1))
            begins, fitted = self._fits[number, below, above]
            own = quarter == number
            share[own] = fitted[np.searchsorted(begins, places[own], side="right") - 1]
        return share

    @cached_property
    def _fits(self) -> dict[tuple[int, int, int], tuple[Ints, Floats]]:
        return {}

    def _fit(self, shortest: int, beyond: int) -> tuple[Ints, Floats]:
        """Where each stretch of one share begins, and that share, among shapes from `shortest` to below `beyond`."""
        lengths = self.shape[self.new]
        new = self.new[(lengths >= shortest) & (lengths < beyond)]
        own = (self.shape >= shortest) & (self.shape < beyond)
        before, alike = np.cumsum(own)[new] - 1, int(np.count_nonzero(own))
        # Those between two first-seen shapes are alike: they weigh as many as they are.
        weights = np.ones(2 * len(new) + 1)
        weights[::2] = np.diff(np.concatenate(([-1], before, [alike]))) - 1
        begins = np.zeros(len(weights), dtype=np.int64)
        begins[1::2], begins[2::2] = new, new + 1
        seen = (np.arange(len(weights)) % 2).astype(np.float64)
        some = weights > 0
        return begins[some], optimize.isotonic_regression(seen[some], weights=weights[some], increasing=False).x

    def longer(self, places: Ints) -> Floats:
        """The share of requests about as early that are shorter, among first-seen ones or among the others; ties
        half."""
        rank = np.empty(len(places))
        met = np.searchsorted(self.new, places)
        new = self.new[np.minimum(met, len(self.new) - 1)] == places
        between = self.new - np.arange(len(self.new))  # others that came before each first-seen one
        for kind, index, size in ((new, met, len(self.new)), (~new, places - met, len(self.shape) - len(self.new))):
            starts = np.clip(index[kind] - _NEAR // 2, 0, max(0, size - _NEAR))
            lengths = self.shape[places[kind]]
            shorter, equal = np.zeros(len(lengths)), np.zeros(len(lengths))
            for step in range(_NEAR):
                which = np.minimum(starts + step, size - 1)
                near = self.shape[
                    self.new[which] if kind is new else which + np.searchsorted(between, which, side="right")
                ]
                shorter += near < lengths
                equal += near == lengths
            rank[kind] = shorter / _NEAR + 0.5 * (equal / _NEAR)
        return rank


def _quarter(shape: Codes) -> Ints:
    """Quarters of an octave up to the shape."""
    return np.floor(4.0 * np.log2(np.maximum(shape, 1))).astype(np.int64)


def _least(quarter: int) -> int:
    """The least shape of so many quarters of an octave."""
    if quarter <= 0:
        return 0
    shape = round(math.exp2(quarter / 4.0))
    return next(near for near in (shape - 1, shape, shape + 1, shape + 2) if _quarter(np.array([near]))[0] >= quarter)


def shapes_of(requests: Requests, arm: str, *, ladder: Sequence[int] = (), lives: Ints | None = None) -> Shapes:
    """The shapes of the arm's requests; those of other arms are unknown (-1) and never new.

    `ladder`: steps up to which the server rounds prompt lengths; longer prompts keep their length. `lives`: from which
    start of the server each request is, what one trial met being known in the next; without it every trial starts anew.
    """
    known = requests.of_arm(arm) & (requests.prompt_tokens > 0) & ~requests.broken
    tokens = requests.prompt_tokens
    steps = np.unique(np.asarray(ladder, dtype=np.int64))
    place = np.searchsorted(steps, tokens)
    rounded = steps[np.minimum(place, len(steps) - 1)] if len(steps) else tokens
    shape = np.where(known, np.where(place < len(steps), rounded, tokens), -1).astype(tokens.dtype)
    new = np.zeros(len(requests), dtype=np.bool_)
    everyone = np.flatnonzero(known)
    start = (requests.trial if lives is None else lives)[everyone]
    replica = requests.replica[everyone]
    servers = []
    for number in np.unique(start).tolist():
        for name in range(-1, len(requests.replicas)):
            mine = everyone[(start == number) & (replica == name)]
            if mine.size:
                mine = mine[np.argsort(requests.start_ns[mine], kind="stable")]
                shapes = shape[mine]
                first = _first_of_each(shapes)
                new[mine[first]] = True
                servers.append(Met(rows=mine, shape=shapes, new=np.sort(first)))
    return Shapes(shape=shape, new=new, servers=tuple(servers))


def _first_of_each(shape: Codes) -> Ints:
    """Where each shape comes first."""
    most = int(shape.max())
    if most > len(shape):
        return np.unique(shape, return_index=True)[1]
    first = np.full(most + 1, -1, dtype=np.int64)
    # Of several that are written to one place the last stays, and so the first from behind.
    first[shape[::-1]] = np.arange(len(shape))[::-1]
    return first[first >= 0]


def chance_of_new(shares: Floats) -> float:
    """The chance that one of the requests would have a first-seen shape, by the share of such among their like."""
    return float(1.0 - np.prod(1.0 - shares))


def longest_of(shapes: Shapes, rows: Ints) -> float:
    """How far the longest of the requests stands out among those of its time: uniform from 0 to 1 where lengths have
    no part in it."""
    return float(shapes.longer(rows).max() ** len(rows)) if len(rows) else 0.5


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
    if stalls.start_ns.size:
        start = requests.start_ns
        usable &= ~stalls.touch(start, np.maximum(requests.first_ns, start))
    rows = np.flatnonzero(usable)
    if rows.size < 2 or not shapes.new[rows].any():
        return _NOTHING
    rows = rows[np.argsort(requests.start_ns[rows], kind="stable")]
    stratum = _strata(shapes.shape[rows])
    # Few strata hold a first-seen shape: the others, nearly all, tell nothing.
    told = np.unique(stratum[shapes.new[rows]])
    beside = np.flatnonzero(np.isin(stratum, told))
    known = _relative(requests, rows, rows[beside], control)
    rows, stratum = rows[beside], stratum[beside]
    new = shapes.new[rows]
    mixed = _mixed(stratum, new)
    rows, values, new, stratum = rows[mixed], known[mixed], new[mixed], stratum[mixed]
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


def _relative(requests: Requests, rows: Ints, some: Ints, control: str) -> Floats:
    """Log waits of `some` of the rows, less those of the copies on the control where nearly all rows have one."""
    logs = np.log(requests.ttft_ms[some])
    if control not in requests.arms or requests.arms[requests.arm[rows[0]]] == control:
        return logs
    pair = requests.pair
    copies = requests.of_arm(control) & (pair >= 0) & requests.ok & (requests.ttft_ms > 0)
    known = np.zeros(int(pair.max()) + 2, dtype=np.bool_)  # the last place is that of no pair
    near = np.zeros_like(known)
    near[pair[some]] = True
    known[pair[copies]] = True
    copies &= near[pair]
    if np.count_nonzero(known[pair[rows]]) <= 0.9 * len(rows):
        return logs
    base = np.flatnonzero(copies)
    base = base[np.argsort(pair[base], kind="stable")]
    place = np.minimum(np.searchsorted(pair[base], pair[some]), max(0, base.size - 1))
    if not base.size:
        return np.full(len(some), np.nan)
    return np.where(pair[base[place]] == pair[some], logs - np.log(requests.ttft_ms[base[place]]), np.nan)


def _strata(shape: Codes) -> Ints:
    """A number for each request (n,), in order of time: its bucket and the stretch of 40 of the bucket's requests."""
    distinct, counts = _counts(shape)
    bucket_of = np.where(
        counts >= 3, np.arange(len(distinct)), len(distinct) + (8.0 * np.log2(np.maximum(distinct, 1))).astype(np.int64)
    )
    stratum = np.empty(len(shape), dtype=np.int64)
    bucket = bucket_of[np.searchsorted(distinct, shape)]
    order = np.argsort(bucket, kind="stable")
    ordered = bucket[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    lengths = np.diff(np.append(starts, len(ordered)))
    within = np.arange(len(ordered)) - np.repeat(starts, lengths)
    stratum[order] = ordered * (len(shape) + 1) + within // _NEIGHBOURS
    return stratum


def _counts(shape: Codes) -> tuple[Ints, Ints]:
    """The distinct shapes, rising, and how often each comes."""
    most = int(shape.max())
    if most > len(shape):
        return np.unique(shape, return_counts=True)
    counts = np.bincount(shape)
    distinct = np.flatnonzero(counts)
    return distinct, counts[distinct]


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
