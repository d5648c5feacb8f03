"""Pairs of requests: each request of an arm and its copy on the control, and what does not pair up.

Under a mirrored design both copies are one planned request: due at one instant, with one prompt and one length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tailgate.analysis.arrays import Bools, Ints, indices
from tailgate.analysis.run.run import Run
from tailgate.analysis.statistics.quantiles import quantile

# What a difference in how the load was sent may take: a share of the margin, and what no load process keeps to.
_OF_MARGIN = 0.2
_LEAST_MS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """How the copies of an arm's requests agree with the control's. Counts of pairs, or of rows where they say so."""

    arm: str
    control: str
    pairs: int
    lonely: int  # pairs that one of the two arms has no copy of
    repeated: int  # rows of a pair that its arm already has
    unpaired: int  # rows of either arm that name no pair
    other_instant: int  # scheduled farther apart than matters
    farthest_ms: float
    other_trial: int
    unequal: Mapping[str, int]  # by what was asked for: "prompt tokens", "answer tokens asked for"


def in_pairs(pair: Ints, rows: Ints, base: Ints) -> tuple[Ints, Ints]:
    """Return (rows that have a copy in `base`, their copies); the last copy if there are two."""
    partner = np.full(_size(pair), -1, dtype=np.int32)  # the last place is of rows without a pair
    partner[pair[base]] = base
    partner[-1] = -1
    copies = partner[pair[rows]]
    both = copies >= 0
    return rows[both], copies[both]


def _size(pair: Ints) -> int:
    """Return how many places hold something for each pair, and for rows without one."""
    return int(pair.max(initial=-1)) + 2


def copies_of(run: Run, arm: str, *, allowed_ms: float) -> Copies:
    """Compare the arm's requests with their copies on the control."""
    requests = run.requests
    pair = requests.pair
    arms = [run.of_arm(name) for name in (arm, run.control)]
    present = [_pairs_of(pair, own) for own in arms]
    rows, copies = in_pairs(pair, *map(indices, arms))
    difference_ns = np.zeros(0, dtype=np.int64)
    if run.reported_open_loop is not False:  # the copies of a closed loop start when each arm's own user is free
        timed = requests.scheduled & ~requests.broken
        both = timed[rows] & timed[copies]
        difference_ns = requests.start_ns[rows[both]]
        difference_ns -= requests.start_ns[copies[both]]
        np.abs(difference_ns, out=difference_ns)
    unequal = {"prompt tokens": requests.prompt_tokens, "answer tokens asked for": requests.max_tokens}
    if run.account(arm).external or run.account(run.control).external:
        del unequal["prompt tokens"]  # external servers count with tokenizers of their own
    return Copies(
        arm=arm,
        control=run.control,
        pairs=len(rows),
        lonely=int((present[0] != present[1]).sum()),
        repeated=int(sum((own & (pair >= 0)).sum() - of_arm.sum() for own, of_arm in zip(arms, present, strict=True))),
        unpaired=int(sum((own & (pair < 0)).sum() for own in arms)),
        other_instant=int((difference_ns > allowed_ms * 1e6).sum()),
        farthest_ms=float(difference_ns.max(initial=0)) / 1e6,
        other_trial=int((requests.trial[rows] != requests.trial[copies]).sum()),
        unequal={what: _unequal(tokens, rows, copies) for what, tokens in unequal.items()},
    )


def _pairs_of(pair: Ints, own: Bools) -> Bools:
    """Mask the pairs that the arm's own rows belong to."""
    present = np.zeros(_size(pair), dtype=np.bool_)
    present[pair[own & (pair >= 0)]] = True
    return present


def _unequal(tokens: Ints, rows: Ints, copies: Ints) -> int:
    """Count the rows whose tokens differ from their copies', if both are known."""
    one, other = tokens[rows], tokens[copies]
    return int(((one >= 0) & (other >= 0) & (one != other)).sum())


def matters_ms(run: Run, at: float) -> float:
    """Return the lag between arms that matters: a fifth of the margin on the control's TTFT (E2E if it has none) at the
    quantile `at`, and at least 1 ms."""
    metric = "e2e" if run.embeds else "ttft"
    seen = quantile(run.requests.metric_ms(metric)[run.answered(run.control)], at)
    return _LEAST_MS if math.isnan(seen) else max(_LEAST_MS, _OF_MARGIN * run.limits.margin_of(metric) * seen)


def lag_differences(run: Run, arm: str) -> list[tuple[str, float, float]]:
    """Return (what, ms that the arm's requests lag more than the control's, ms that matter).

    It compares the mean and the gated quantile. Empty if lags are not recorded, or if requests wait for the servers
    before they are sent.
    """
    if run.reported_open_loop is False or run.concurrency:
        return []
    lags = []
    for name in (arm, run.control):
        lag = run.requests.lag_ms(run.of_arm(name) & run.usable)
        lags.append(lag[~np.isnan(lag)])
    own, base = lags
    if not own.size or not base.size:
        return []
    at = run.limits.quantile
    return [
        ("on average", float(own.mean(dtype=np.float64) - base.mean(dtype=np.float64)), matters_ms(run, 0.5)),
        (f"at p{100.0 * at:.10g}", quantile(own, at) - quantile(base, at), matters_ms(run, at)),
    ]
