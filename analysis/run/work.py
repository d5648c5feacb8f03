"""What the requests of an arm asked of its server, beside the control's: shorter answers are not faster ones.

Where lengths are forced, an answer has exactly the tokens that were asked for. Elsewhere a server ends its answers
itself, and two that do the same work differ by chance alone: in the mean, in the distribution, and in no way by how
long the request is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from analysis.arrays import Floats, Ints
from analysis.records.plain_values import mapping
from analysis.run.pairs import in_pairs
from analysis.run.run import Run
from analysis.statistics.distributions import hypergeometric_sf
from analysis.wording import counted

WORK_APART = 0.05  # of mean lengths; a template's few tokens stay below, another tokenizer does not
_SURELY_APART = 0.01  # of mean lengths, where chance is excluded
_SURE = 3.29  # standard errors: p = 0.001, two-sided
_SHARE_APART = 0.005  # of short answers: one that breaks off is an error, of which gates.max_error_pct takes as many
_CHANCE = 0.001
ANSWER_BINS = 22  # answers of up to 1, 2, 4, ... tokens
_FEWEST = 30  # answers, for what follows from their spread
_LONGEST = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of one arm beside the control's.

    `means` lists (what, the arm's mean, the control's); `other` says in words in what the two had other work.
    """

    arm: str
    control: str
    means: tuple[tuple[str, float, float], ...] = ()
    other: tuple[str, ...] = ()


def work_of(run: Run, arm: str) -> Work:
    """The work of the completed requests, by each server's count: of copies of the same requests where there are any,
    else against what was planned."""
    requests, control = run.requests, run.control
    ours = not run.account(arm).external and not run.account(control).external
    counted = not run.embeds and run.account(arm).counts_tokens and run.account(control).counts_tokens
    paired = run.copied
    other = [text for name in (arm, control) if ours and (text := _beside_the_plan(run, name))]
    if run.in_turn and not run.separate:
        # Each got requests of its own, and what is answered past the knee is no fair share of them.
        return Work(arm=arm, control=control, other=tuple(other))
    if paired:
        own, base = in_pairs(run, arm, run.usable & requests.ok)
    else:
        own, base = run.answered(arm), run.answered(control)
    means: list[tuple[str, float, float]] = []
    if own.size and base.size:
        sides = (own, base)
        # Runs of our own that are separate may have schedules of their own.
        same = paired or (run.separate and not ours)
        if same:
            means.append(("prompt tokens", _mean(requests.prompt_tokens[own]), _mean(requests.prompt_tokens[base])))
        if same and counted:
            means.append(("answer tokens", _mean(requests.output_tokens[own]), _mean(requests.output_tokens[base])))
        elif counted and _is_planned(run, own, base):
            first, second = (_total(requests.output_tokens[rows]) / _total(requests.max_tokens[rows]) for rows in sides)
            means.append(("percent of the planned answer tokens", 100.0 * first, 100.0 * second))
        if run.separate or (ours and not paired):
            other += _planned_apart(run, arm, own, base)
        if counted:
            other += _answered_apart(run, arm, own, base, paired=paired)
    return Work(arm=arm, control=control, means=tuple(means), other=tuple(other))


def _is_planned(run: Run, own: Ints, base: Ints) -> bool:
    """Whether it is known how many tokens each answer was to have."""
    return bool((run.requests.max_tokens[own] > 0).all() and (run.requests.max_tokens[base] > 0).all())


def _beside_the_plan(run: Run, arm: str) -> str:
    """Which answers of a server whose lengths are forced are not as long as asked for; empty when all are."""
    if mapping(run.records.experiment.get("traffic")).get("ignore_eos") is not True:
        return ""
    requests = run.requests
    rows = run.answered(arm)
    rows = rows[requests.max_tokens[rows] > 0]
    wrong = rows[requests.output_tokens[rows] != requests.max_tokens[rows]]
    if not wrong.size:
        return ""
    first = int(wrong[0])
    return (
        f"{wrong.size} of {rows.size} answers of {arm} are not as long as asked for, such as "
        f"{counted(int(requests.output_tokens[first]), 'token')} of {int(requests.max_tokens[first])}"
    )


def _planned_apart(run: Run, arm: str, own: Ints, base: Ints) -> list[str]:
    """In what the requests of arms that are sent different ones differ: chance deals both the same lengths."""
    differences = []
    # Turns of one session resemble each other.
    units = (run.sessions(arm), run.sessions(run.control))
    for what, column in (("prompts", run.requests.prompt_tokens), ("planned answers", run.requests.max_tokens)):
        share, longer = shifted(column[own], column[base], units=units)
        if share > 2 * WORK_APART:
            differences.append(
                f"{100.0 * share:.0f} % of the {what} of {arm} are {'longer' if longer else 'shorter'} than those of "
                f"{run.control}"
            )
    return differences


def _answered_apart(run: Run, arm: str, own: Ints, base: Ints, *, paired: bool) -> list[str]:
    """In what the lengths of the answers differ, beyond chance."""
    requests, control = run.requests, run.control
    answers, planned = requests.output_tokens, requests.max_tokens
    if min(own.size, base.size) < _FEWEST:
        return []
    lengths, unit = answers, "token"
    if paired:
        differences = _ratio_apart(arm, control, _paired_ratio(answers, own, base))
    elif _is_planned(run, own, base):
        differences = _ratio_apart(arm, control, _share_ratio(answers, planned, own, base))
        # Of different requests the shares of what was planned compare, in thousandths.
        lengths, unit = 1000 * answers.astype(np.int64) // np.maximum(planned, 1), "thousandth of the planned token"
    else:
        differences = _means_apart(arm, control, *(AnswerLengths.of(answers[rows]) for rows in (own, base)))
    differences += _short_apart(arm, control, *(AnswerLengths.of(lengths[rows]) for rows in (own, base)), unit=unit)
    share, longer = shifted(lengths[own], lengths[base], units=(own.size, base.size))
    if share > WORK_APART:
        differences.append(
            f"{100.0 * share:.0f} % of the answers of {arm} are {'longer' if longer else 'shorter'} than those of "
            f"{control}"
        )
    if paired:
        log_ratio = np.log((answers[own] + 1.0) / (answers[base] + 1.0))
        for what, column in (("prompts", requests.prompt_tokens), ("planned answers", planned)):
            slope = _correlation(log_ratio, np.log(np.maximum(column[base], 0) + 1.0))
            if abs(slope) > max(0.1, _SURE / math.sqrt(own.size)):
                differences.append(
                    f"the longer the {what}, the {'longer' if slope > 0 else 'shorter'} the answers of {arm} beside "
                    f"those of {control} (correlation {slope:.2f})"
                )
    return differences


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLengths:
    """How long answers are: how many there are, the mean and variance of their tokens, how many have `up_to` 1, 2, 4,
    ... tokens, and how many up to 5 % more than that (`near`)."""

    count: int
    mean: float
    variance: float
    up_to: tuple[int, ...]
    near: tuple[int, ...]

    @classmethod
    def of(cls, lengths: Ints) -> AnswerLengths:
        """Those of the lengths, of which there is at least one."""
        ordered, edges = np.sort(lengths), 2 ** np.arange(ANSWER_BINS)
        up_to, near = (np.searchsorted(ordered, edges * by, side="right") for by in (1.0, 1.0 + WORK_APART))
        return cls(
            count=int(lengths.size),
            mean=float(lengths.mean()),
            variance=float(lengths.var()),
            up_to=tuple(up_to.tolist()),
            near=tuple(near.tolist()),
        )


def answer_lengths(run: Run, arm: str) -> AnswerLengths | None:
    """Those of the arm's completed requests; None where they have no tokens, or the server does not count them."""
    rows = run.answered(arm)
    if run.embeds or not run.account(arm).counts_tokens or not rows.size:
        return None
    return AnswerLengths.of(run.requests.output_tokens[rows])


def answers_apart(arm: str, control: str, own: AnswerLengths, base: AnswerLengths) -> list[str]:
    """In what the lengths of answers to different requests differ, beyond chance."""
    if min(own.count, base.count) < _FEWEST:
        return []
    return [*_means_apart(arm, control, own, base), *_short_apart(arm, control, own, base)]


def _means_apart(arm: str, control: str, own: AnswerLengths, base: AnswerLengths) -> list[str]:
    if base.mean <= 0:
        return []
    # The variance of both together: that of the side whose few long answers are missing is too small.
    weight = own.count / (own.count + base.count)
    between = weight * (1.0 - weight) * (own.mean - base.mean) ** 2
    variance = weight * own.variance + (1.0 - weight) * base.variance + between
    error = math.sqrt(variance * (1.0 / own.count + 1.0 / base.count)) / base.mean
    return _ratio_apart(arm, control, (own.mean / base.mean, error))


def _short_apart(arm: str, control: str, own: AnswerLengths, base: AnswerLengths, *, unit: str = "token") -> list[str]:
    """Where one side has surely more short answers, such as break off, than the other has of up to 5 % longer ones.

    Chance is 1 in 1,000, by Fisher's exact test at each of the lengths and Bonferroni over them.
    """
    for (name, side), (other_name, other) in (((arm, own), (control, base)), ((control, base), (arm, own))):
        few, near = np.array(side.up_to), np.array(other.near)
        both, answers = few + near, side.count + other.count
        chance = [
            hypergeometric_sf(int(low) - 1, answers, int(of), side.count) for low, of in zip(few, both, strict=True)
        ]
        place = int(np.argmin(chance))
        tests = int(((both > 0) & (both < answers)).sum())
        share = few[place] / side.count
        if 2 * tests * chance[place] < _CHANCE and share - near[place] / other.count > _SHARE_APART:
            return [
                f"{100.0 * share:.2g} % of the answers of {name} have at most {counted(2**place, unit)}, "
                f"{100.0 * other.up_to[place] / other.count:.2g} % of those of {other_name}"
            ]
    return []


def _ratio_apart(arm: str, control: str, apart: tuple[float, float] | None) -> list[str]:
    """In words that the ratio of tokens differs from 1 beyond its standard error."""
    if apart is None or abs(apart[0] - 1.0) <= max(_SURELY_APART, _SURE * apart[1]):
        return []
    ratio, error = apart
    return [f"answers of {arm} have {ratio:.3g} times the tokens of those of {control} (standard error {error:.2g})"]


def _paired_ratio(answers: Ints, own: Ints, base: Ints) -> tuple[float, float] | None:
    """(total of the arm over that of the copies, its standard error); None when nothing was answered."""
    total = float(answers[base].sum())
    if not total:
        return None
    difference = answers[own].astype(np.float64) - answers[base]
    return 1.0 + float(difference.sum()) / total, float(difference.std()) * math.sqrt(own.size) / total


def _share_ratio(answers: Ints, planned: Ints, own: Ints, base: Ints) -> tuple[float, float] | None:
    """(share of the planned tokens over the control's, its standard error), linearised; None when a share is 0."""
    shares, variance = [], 0.0
    for rows in (own, base):
        tokens = np.maximum(planned[rows], 0).astype(np.float64)
        total, made = float(tokens.sum()), float(answers[rows].sum())
        if not total or not made:
            return None
        shares.append(made / total)
        variance += float(((answers[rows] - shares[-1] * tokens) ** 2).sum()) / made**2
    ratio = shares[0] / shares[1]
    return ratio, ratio * math.sqrt(variance)


def shifted(own: Ints, base: Ints, *, units: tuple[int, int]) -> tuple[float, bool]:
    """(the share of lengths by which one side is longer by more than 5 %, whether it is the first); 0 within chance.

    The largest distance between the two distributions, one of them stretched by 5 %; chance is that of Kolmogorov
    and Smirnov (1 in 1,000) for as many independent lengths as `units` says. (0, False) of an empty side.
    """
    if not own.size or not base.size:
        return 0.0, False
    first, second = (_distribution(np.clip(lengths, 0, _LONGEST)) for lengths in (own, base))
    size = max(first.size, second.size)
    lengths = np.arange(size)
    stretched = np.minimum((lengths * (1.0 + WORK_APART)).astype(np.int64), size - 1)
    first, second = (np.append(own, np.ones(size - own.size)) for own in (first, second))
    shorter, longer = float((first - second[stretched]).max()), float((second - first[stretched]).max())
    chance = 1.95 * math.sqrt(sum(1.0 / max(1, count) for count in units))
    share = max(shorter, longer)
    return (share, longer > shorter) if share > chance else (0.0, False)


def _distribution(lengths: Ints) -> Floats:
    return np.asarray(np.cumsum(np.bincount(lengths)) / lengths.size)


def _correlation(one: Floats, other: Floats) -> float:
    spread = float(one.std() * other.std())
    return float(((one - one.mean()) * (other - other.mean())).mean()) / spread if spread > 1e-12 else 0.0


def _mean(lengths: Ints) -> float:
    return float(np.maximum(lengths, 0).mean())


def _total(lengths: Ints) -> float:
    return max(1.0, float(np.maximum(lengths, 0).sum()))


# --- Times of tokens --------------------------------------------------------------------------------------------------

# What is read from the gaps between tokens.
GAP_METRICS = frozenset({"tpot", "itl", "max_itl"})
_MANY_TOKENS = 8
_AT_ONCE_NS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTimes:
    """How the tokens of completed answers came. `at_once` are answers of many tokens that came within 1 ms."""

    arm: str
    answers: int
    untimed: int  # not one time for each token: of own servers, which stamp each, another number; of others more
    many: int  # answers of many tokens
    at_once: int


def token_times(run: Run, arm: str) -> TokenTimes:
    """How the arm's tokens came. Nothing is untimed where no arm's records have times of tokens."""
    requests = run.requests
    rows = run.answered(arm)
    tokens, times = requests.output_tokens[rows], requests.token_times[rows]
    # A chunk of an external server may hold several tokens, and no fewer than one.
    untimed = times > tokens if run.account(arm).external else times != tokens
    timed = bool((requests.token_times > 0).any())
    many = (tokens >= _MANY_TOKENS) & (requests.first_ns[rows] > 0)
    at_once = many & (requests.end_ns[rows] - requests.first_ns[rows] <= _AT_ONCE_NS)
    return TokenTimes(
        arm=arm,
        answers=int(rows.size),
        untimed=int(untimed.sum()) if timed else 0,
        many=int(many.sum()),
        at_once=int(at_once.sum()),
    )


def gates_on_gaps(run: Run) -> bool:
    """Whether anything is judged by the gaps between tokens."""
    targets = (*run.targets, *run.cold_targets, *run.goodput_targets)
    return bool(GAP_METRICS & {*run.limits.metrics, *(target.metric for target in targets)})
