"""What the comparisons of `analysis.statistics.compare` do on made-up servers whose truth is known, as rows of a table.

Each row counts, over seeded runs, how often a test says what it must not say, or says what it should. Beside the tests
that tailgate uses stand the two that people use: Mann and Whitney's over requests, and a plain bootstrap of requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from scipy import stats

from analysis.arrays import Floats
from analysis.checks.data import autocorrelation
from analysis.statistics.compare import Comparison, Sample, compare, decide
from benchmarks.simulation.scenario import Scenario, joined, run, sample
from benchmarks.simulation.table import Table

QUANTILES = (0.5, 0.95, 0.99)
MARGIN = 0.10
ALPHA = 0.05
_REQUEST_DRAWS = 200

# Equal arms. Mirrored arms get the same requests; split ones their own, as from a splitter's coin.
MIRRORED = Scenario()
SPLIT = Scenario(design="split", cox=0.2)
HEAVY = Scenario(rate=8.0, cox=0.2)  # the slots are busy 80 % of the time and queues last for minutes
SEPARATE = Scenario(design="separate", cox=0.2)
LONG_NOISE = Scenario(lasting_s=60.0)
LONG_S = 1200.0


def compared(
    treatment: Sample,
    control: Sample,
    *,
    qs: Sequence[float] = QUANTILES,
    margin: float = MARGIN,
    alpha: float = ALPHA,
) -> list[Comparison]:
    """The comparisons as a run makes them."""
    return compare(treatment, control, qs=qs, margin=margin, alpha=alpha)


def covers(item: Comparison, ratio: float) -> bool:
    """Whether the interval holds the ratio."""
    return (item.low is None or item.low <= ratio) and (item.high is None or item.high >= ratio)


def believed(items: Sequence[Comparison]) -> bool:
    """Whether the checks of the statistics let the comparisons stand."""
    return all(check.ok for check in autocorrelation("arm", items))


# --- Measurements: one run each, named at the top level so that processes can share them ------------------------------


def equal_arms(scenario: Scenario, seed: int) -> Floats:
    """1 where the 95 % interval leaves out a ratio of 1, for each quantile, and once more where the checks let it."""
    made = run(scenario, np.random.default_rng(seed))
    items = compared(sample(made.treatment), sample(made.control), alpha=ALPHA / 2)
    wrong = [not covers(item, 1.0) for item in items]
    stands = [believed([item]) for item in items]
    return np.array([*wrong, *(bad and good for bad, good in zip(wrong, stands, strict=True))], dtype=np.float64)


def request_tests(scenario: Scenario, seed: int) -> Floats:
    """1 where Mann and Whitney's test, or a plain bootstrap of requests at p50, p95 and p99, calls arms different."""
    made = run(scenario, np.random.default_rng(seed))
    one, other = made.treatment.e2e_ms, made.control.e2e_ms
    wrong = [stats.mannwhitneyu(one, other).pvalue <= ALPHA]
    rng = np.random.default_rng([seed, 2])
    drawn = [
        np.log(np.quantile(values[rng.integers(0, len(values), (_REQUEST_DRAWS, len(values)))], QUANTILES, axis=1))
        for values in (one, other)
    ]
    low, high = np.quantile(drawn[0] - drawn[1], (ALPHA / 2, 1 - ALPHA / 2), axis=1)
    return np.array([*wrong, *((low > 0) | (high < 0))], dtype=np.float64)


def known_ratio(scenario: Scenario, ratio: float, seed: int) -> Floats:
    """Of an arm that is slower by a true ratio: whether the 95 % intervals hold it, for each quantile."""
    made = run(scenario, np.random.default_rng(seed))
    treatment, control = sample(made.treatment, ratio=ratio), sample(made.control)
    items = compared(treatment, control, alpha=ALPHA / 2)
    return np.array([covers(item, ratio) for item in items], dtype=np.float64)


def verdicts(scenario: Scenario, ratio: float, seed: int) -> Floats:
    """(PASS, FAIL) of the p99 gate at the margin, after the checks of the statistics."""
    made = run(scenario, np.random.default_rng(seed))
    treatment, control = sample(made.treatment, ratio=ratio), sample(made.control)
    items = decide(compared(treatment, control, qs=(0.99,)))
    stands = believed(items)
    return np.array([stands and items[0].verdict == word for word in ("PASS", "FAIL")], dtype=np.float64)


def any_of_three(scenario: Scenario, seed: int) -> Floats:
    """Whether any of three arms fails a gate that all of them just hold, with Holm's adjustment, and without it."""
    made = run(scenario, np.random.default_rng(seed), arms=4)
    items = []
    for arm in (made.treatment, *made.more):
        items += compared(sample(arm), sample(made.control), qs=(0.99,), margin=0.0)
    adjusted = any(item.verdict == "FAIL" for item in decide(items))
    return np.array([adjusted, any((item.p_inferior or 1.0) <= ALPHA for item in items)], dtype=np.float64)


def restarts(scenario: Scenario, seed: int, *, spread: float = 0.03, trials: int = 6) -> Floats:
    """Of equal arms that differ by chance after each start: whether intervals over trials leave out 1, and whether
    those of the first trial alone do."""
    rng = np.random.default_rng(seed)
    pairs = []
    for trial in range(1, trials + 1):
        made = run(scenario, rng)
        own = np.exp(spread * rng.standard_normal(2))
        pairs.append(
            (sample(made.treatment, ratio=own[0], trial=trial), sample(made.control, ratio=own[1], trial=trial))
        )
    together = [joined(pair[place] for pair in pairs) for place in (0, 1)]
    wrong = []
    for treatment, control in ((together[0], together[1]), pairs[0]):
        items = compared(treatment, control, alpha=ALPHA / 2)
        wrong += [not covers(item, 1.0) for item in items]
    return np.array(wrong, dtype=np.float64)


# --- The table --------------------------------------------------------------------------------------------------------


def calibration_table(table: Table) -> None:
    """All rows."""
    labels = [f"p{100 * q:g}" for q in QUANTILES]
    for name, scenario in (("mirrored Poisson", MIRRORED), ("split", SPLIT), ("heavy load", HEAVY)):
        wrong = table.means(partial(equal_arms, scenario))
        for label, share in zip(labels, wrong[:3], strict=True):
            table.add(f"A/A false positives, {name}, {label}, 600 s", share, most=0.08)
        request = table.means(partial(request_tests, scenario))
        table.add(f"  Mann–Whitney over requests, {name}", request[0])
        for label, share in zip(labels, request[1:], strict=True):
            table.add(f"  plain bootstrap of requests, {name}, {label}", share)
    for name, scenario in (("separate hosts", SEPARATE), ("noise that lasts a minute", LONG_NOISE)):
        wrong = table.means(partial(equal_arms, scenario))
        after = [""] * 3 + [", after the check of autocorrelation"] * 3
        for label, share, checked in zip(labels * 2, wrong, after, strict=True):
            table.add(f"  A/A false positives, {name}, {label}{checked}", share)
    for ratio in (1.0, 1.1, 1.2):
        held = table.means(partial(known_ratio, MIRRORED, ratio))
        for label, share in zip(labels, held, strict=True):
            table.add(f"95 % interval holds {ratio:.1f}, {label}, 600 s", share, least=0.92)
    long = replace(MIRRORED, duration_s=LONG_S)
    at_margin, equal, slow = (table.means(partial(verdicts, long, ratio)) for ratio in (1.0 + MARGIN, 1.0, 1.2))
    table.add("false PASS at the margin, 1,200 s", at_margin[0], most=0.08)
    table.add("PASS at a ratio of 1.00, 1,200 s", equal[0], least=0.80)
    table.add("FAIL at a ratio of 1.20, 1,200 s", slow[1], least=0.75)
    any_of = table.means(partial(any_of_three, MIRRORED))
    table.add("any of three arms falsely FAILs, with Holm", any_of[0], most=0.07)
    table.add("  the same without Holm", any_of[1])
    lucky = table.means(partial(restarts, MIRRORED))
    for label, share in zip(labels, lucky[:3], strict=True):
        table.add(f"restarts of 3 %, six trials, {label}", share, most=0.10)
    for label, share in zip(labels, lucky[3:], strict=True):
        table.add(f"  restarts of 3 %, one trial, {label}", share)
