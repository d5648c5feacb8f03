"""What the comparisons of `analysis.statistics.compare` do on made-up servers whose truth is known, as rows of a table.

Each row counts, over seeded runs, how often a test says what it must not say, or says what it should. Beside the tests
that tailgate uses stand the two that people use: Mann and Whitney's over requests, and a plain bootstrap of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from analysis.judging.checks.statistics import check_autocorrelation, check_cross
from analysis.settings.gate_limits import Method
from analysis.statistics.compare import Comparison, Sample, compare_quantiles, decide
from benchmarks.simulation.scenario import Scenario, run, sample
from benchmarks.simulation.server import Floats
from benchmarks.simulation.table import Row, Tell, over_seeds, told

QUANTILES = (0.5, 0.95, 0.99)
MARGIN = 0.10
ALPHA = 0.05
DRAWS = 999
_REQUEST_DRAWS = 200

# Equal arms. Mirrored arms get the same requests; split ones their own, as from a splitter's coin.
MIRRORED = Scenario()
SPLIT = Scenario(design="split", cox=0.2)
HEAVY = Scenario(rate=8.0, cox=0.2)  # the slots are busy 80 % of the time and queues last for minutes
SEPARATE = Scenario(design="separate", cox=0.2)
LONG_NOISE = Scenario(lasting_s=60.0)
SHORT_S, LONG_S = 600.0, 1200.0


def means(measure: Callable[[int], Floats], count: int, *, processes: int = 1) -> Floats:
    """The mean of what the measurement gives for seeds 0 to count − 1."""
    found = over_seeds(measure, range(count), processes=processes)
    return np.asarray(np.mean(np.array(found, dtype=np.float64), axis=0))


def compared(
    treatment: Sample,
    control: Sample,
    *,
    seed: int,
    paired: bool,
    qs: Sequence[float] = QUANTILES,
    margin: float = MARGIN,
    alpha: float = ALPHA,
    method: Method = "label swap",
) -> list[Comparison]:
    """The comparisons as a run makes them."""
    rng = np.random.default_rng([seed, 1])
    return compare_quantiles(
        treatment, control, qs=qs, margin=margin, alpha=alpha, draws=DRAWS, rng=rng, paired=paired, method=method
    )


def covers(item: Comparison, ratio: float) -> bool:
    """Whether the interval holds the ratio."""
    return (item.low is None or item.low <= ratio) and (item.high is None or item.high >= ratio)


def believed(items: Sequence[Comparison]) -> bool:
    """Whether the checks of the statistics let the comparisons stand."""
    return check_autocorrelation("arm", items).ok and check_cross("arm", items).ok


# --- Measurements: one run each, named at the top level so that processes can share them ------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualArms:
    """1 where the 95 % interval leaves out a ratio of 1, for each quantile, and once more where the checks let it."""

    scenario: Scenario
    method: Method = "label swap"

    def __call__(self, seed: int) -> Floats:
        made = run(self.scenario, np.random.default_rng(seed))
        items = compared(
            sample(made.treatment),
            sample(made.control),
            seed=seed,
            paired=self.scenario.design == "mirrored",
            alpha=ALPHA / 2,
            method=self.method,
        )
        wrong = [not covers(item, 1.0) for item in items]
        stands = [check_autocorrelation("arm", [item]).ok for item in items]
        return np.array([*wrong, *(bad and good for bad, good in zip(wrong, stands, strict=True))], dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTests:
    """1 where Mann and Whitney's test, or a plain bootstrap of requests at p50, p95 and p99, calls arms different."""

    scenario: Scenario

    def __call__(self, seed: int) -> Floats:
        made = run(self.scenario, np.random.default_rng(seed))
        one, other = made.treatment.e2e_ms, made.control.e2e_ms
        wrong = [stats.mannwhitneyu(one, other).pvalue <= ALPHA]
        rng = np.random.default_rng([seed, 2])
        drawn = [
            np.log(np.quantile(values[rng.integers(0, len(values), (_REQUEST_DRAWS, len(values)))], QUANTILES, axis=1))
            for values in (one, other)
        ]
        low, high = np.quantile(drawn[0] - drawn[1], (ALPHA / 2, 1 - ALPHA / 2), axis=1)
        return np.array([*wrong, *((low > 0) | (high < 0))], dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRatio:
    """Of an arm that is slower by a true ratio: whether the 95 % intervals hold it, for each quantile."""

    scenario: Scenario
    ratio: float
    method: Method = "label swap"

    def __call__(self, seed: int) -> Floats:
        made = run(self.scenario, np.random.default_rng(seed))
        treatment, control = sample(made.treatment, ratio=self.ratio), sample(made.control)
        items = compared(treatment, control, seed=seed, paired=True, alpha=ALPHA / 2, method=self.method)
        return np.array([covers(item, self.ratio) for item in items], dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """(PASS, FAIL) of the p99 gate at the margin, after the checks of the statistics."""

    scenario: Scenario
    ratio: float
    method: Method = "label swap"

    def __call__(self, seed: int) -> Floats:
        made = run(self.scenario, np.random.default_rng(seed))
        treatment, control = sample(made.treatment, ratio=self.ratio), sample(made.control)
        paired = self.scenario.design == "mirrored"
        items = decide(compared(treatment, control, seed=seed, paired=paired, qs=(0.99,), method=self.method))
        stands = believed(items)
        return np.array([stands and items[0].verdict == word for word in ("PASS", "FAIL")], dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyOfThree:
    """Whether any of three arms fails a gate that all of them just hold, with Holm's adjustment, and without it."""

    scenario: Scenario

    def __call__(self, seed: int) -> Floats:
        made = run(self.scenario, np.random.default_rng(seed), arms=4)
        items = []
        for arm in (made.treatment, *made.more):
            items += compared(sample(arm), sample(made.control), seed=seed, paired=True, qs=(0.99,), margin=0.0)
        adjusted = any(item.verdict == "FAIL" for item in decide(items))
        return np.array([adjusted, any((item.p_inferior or 1.0) <= ALPHA for item in items)], dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts:
    """Of equal arms that differ by chance after each start: whether intervals over trials leave out 1, and whether
    those of the first trial alone do."""

    scenario: Scenario
    spread: float = 0.03
    trials: int = 6

    def __call__(self, seed: int) -> Floats:
        rng = np.random.default_rng(seed)
        pairs = []
        for trial in range(1, self.trials + 1):
            made = run(self.scenario, rng)
            own = np.exp(self.spread * rng.standard_normal(2))
            pairs.append(
                (
                    sample(made.treatment, ratio=own[0], trial=trial),
                    sample(made.control, ratio=own[1], trial=trial),
                )
            )
        together = [joined(pair[place] for pair in pairs) for place in (0, 1)]
        wrong = []
        for treatment, control in ((together[0], together[1]), pairs[0]):
            items = compared(treatment, control, seed=seed, paired=True, alpha=ALPHA / 2)
            wrong += [not covers(item, 1.0) for item in items]
        return np.array(wrong, dtype=np.float64)


def joined(samples: Iterable[Sample]) -> Sample:
    """The trials as one sample."""
    parts = list(samples)
    return Sample(
        values=np.concatenate([part.values for part in parts]),
        block=np.concatenate([part.block for part in parts]),
        trial=np.concatenate([part.trial for part in parts]),
    )


# --- The table --------------------------------------------------------------------------------------------------------


def calibration_table(seeds: int, *, processes: int = 1, tell: Tell = print) -> list[Row]:
    """All rows, each over `seeds` runs; `tell` is given each as a line as soon as it is known."""
    rows: list[Row] = []

    def add(*found: Row) -> None:
        rows.extend(told(found, tell))

    def measured(measure: Callable[[int], Floats]) -> Floats:
        return means(measure, seeds, processes=processes)

    labels = [f"p{100 * q:g}" for q in QUANTILES]
    for name, scenario in (("mirrored Poisson", MIRRORED), ("split", SPLIT), ("heavy load", HEAVY)):
        wrong = measured(EqualArms(scenario=scenario))
        add(
            *(
                Row(check=f"A/A false positives, {name}, {label}, 600 s", measured=share, runs=seeds, most=0.08)
                for label, share in zip(labels, wrong[:3], strict=True)
            )
        )
        request = measured(RequestTests(scenario=scenario))
        add(Row(check=f"  Mann–Whitney over requests, {name}", measured=request[0], runs=seeds))
        add(
            *(
                Row(check=f"  plain bootstrap of requests, {name}, {label}", measured=share, runs=seeds)
                for label, share in zip(labels, request[1:], strict=True)
            )
        )
    for name, scenario in (("mirrored Poisson", MIRRORED), ("split", SPLIT), ("heavy load", HEAVY)):
        wrong = measured(EqualArms(scenario=scenario, method="block bootstrap"))
        add(
            *(
                Row(check=f"  A/A false positives, block bootstrap, {name}, {label}", measured=share, runs=seeds)
                for label, share in zip(labels, wrong[:3], strict=True)
            )
        )
    for name, scenario in (("separate hosts", SEPARATE), ("noise that lasts a minute", LONG_NOISE)):
        wrong = measured(EqualArms(scenario=scenario))
        add(
            *(
                Row(check=f"  A/A false positives, {name}, {label}{after}", measured=share, runs=seeds)
                for label, share, after in zip(
                    labels * 2, wrong, [""] * 3 + [", after the check of autocorrelation"] * 3, strict=True
                )
            )
        )
    for ratio in (1.0, 1.1, 1.2):
        held = measured(KnownRatio(scenario=MIRRORED, ratio=ratio))
        add(
            *(
                Row(check=f"95 % interval holds {ratio:.1f}, {label}, 600 s", measured=share, runs=seeds, least=0.92)
                for label, share in zip(labels, held, strict=True)
            )
        )
    long = replace(MIRRORED, duration_s=LONG_S)
    for ratio, row in (
        (1.0 + MARGIN, Row(check="false PASS at the margin, 1,200 s", measured=0.0, runs=seeds, most=0.08)),
        (1.0, Row(check="PASS at a ratio of 1.00, 1,200 s", measured=0.0, runs=seeds, least=0.80)),
        (1.2, Row(check="FAIL at a ratio of 1.20, 1,200 s", measured=0.0, runs=seeds, least=0.75)),
    ):
        shares = measured(Verdicts(scenario=long, ratio=ratio))
        add(replace(row, measured=float(shares[1 if row.check.startswith("FAIL") else 0])))
    any_of = measured(AnyOfThree(scenario=MIRRORED))
    add(
        Row(check="any of three arms falsely FAILs, with Holm", measured=any_of[0], runs=seeds, most=0.07),
        Row(check="  the same without Holm", measured=any_of[1], runs=seeds),
    )
    restarts = measured(Restarts(scenario=MIRRORED))
    add(
        *(
            Row(check=f"restarts of 3 %, six trials, {label}", measured=share, runs=seeds, most=0.10)
            for label, share in zip(labels, restarts[:3], strict=True)
        ),
        *(
            Row(check=f"  restarts of 3 %, one trial, {label}", measured=share, runs=seeds)
            for label, share in zip(labels, restarts[3:], strict=True)
        ),
    )
    return rows
