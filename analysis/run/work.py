"""What the requests of an arm asked of its server, compared with the control's: shorter answers are not faster ones.

Where lengths are not forced, two servers that do the same work differ by chance alone, in the mean length of answers
and in the share of short ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tailgate.analysis.arrays import Ints, index_parts, indices
from tailgate.analysis.records.plain_values import mapping
from tailgate.analysis.run.pairs import drawn, drawn_pairs
from tailgate.analysis.run.run import Run
from tailgate.analysis.statistics.distributions import hypergeometric_sf
from tailgate.analysis.wording import counted

WORK_TOLERANCE = 0.05  # of mean lengths; a template's few tokens stay below, another tokenizer does not
_SURE_DIFFERENCE = 0.01  # of mean lengths, where chance is excluded
_SURE = 3.29  # standard errors: p = 0.001, two-sided
# Of short answers: one that breaks off is an error, of which gates.max_error_pct takes as many.
_LEAST_SHARE_DIFFERENCE = 0.005
_CHANCE = 0.001
_BINS = 22  # answers of up to 1, 2, 4, ... tokens
_FEWEST = 30  # answers, for what follows from their spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of one arm, and of the control.

    `means` lists (what, the arm's mean, the control's); `other` says in words in what the two had other work.
    """

    arm: str
    control: str
    means: tuple[tuple[str, float, float], ...] = ()
    other: tuple[str, ...] = ()


def work_of(run: Run, arm: str) -> Work:
    """Return the work of the completed requests, by each server's count: of copies of the same requests if there are
    any, else relative to what was planned."""
    requests, control, paired = run.requests, run.control, run.copied
    managed = not run.account(arm).external and not run.account(control).external
    counts = not run.embeds and run.account(arm).counts_tokens and run.account(control).counts_tokens
    other = [text for name in (arm, control) if managed and (text := _not_as_forced(run, name))]
    if run.in_turn and not run.separate:
        # Each got requests of its own, and what is answered past the knee is no fair share of them.
        return Work(arm=arm, control=control, other=tuple(other))
    masks = (run.answered(name) for name in (arm, control))
    own, base = drawn_pairs(run, *masks) if paired else (drawn(run, mask) for mask in masks)
    if not own.size or not base.size:
        return Work(arm=arm, control=control, other=tuple(other))
    answers, requested = requests.output_tokens, requests.max_tokens
    means = []
    planned = bool((requested[own] > 0).all() and (requested[base] > 0).all())
    # Separate runs of ours may have schedules of their own.
    same_traffic = paired or (run.separate and not managed)
    if same_traffic:
        means.append(("prompt tokens", _mean(requests.prompt_tokens[own]), _mean(requests.prompt_tokens[base])))
    if same_traffic and counts:
        means.append(("answer tokens", _mean(answers[own]), _mean(answers[base])))
    elif counts and planned:
        first, second = (100.0 * _mean(answers[rows]) / max(1.0, _mean(requested[rows])) for rows in (own, base))
        means.append(("percent of the planned answer tokens", first, second))
    if run.separate or (managed and not paired):
        other += _planned_differences(run, arm, own, base)
    if counts:
        unit = "token"
        if planned and not paired:
            # Of different requests the shares of what was planned compare, in thousandths.
            answers = 1000 * answers.astype(np.int64) // np.maximum(requested, 1)
            unit = "thousandth of the planned token"
        other += length_differences(arm, control, answers[own], answers[base], paired=paired, unit=unit)
    return Work(arm=arm, control=control, means=tuple(means), other=tuple(other))


def _mean(lengths: Ints) -> float:
    return float(np.maximum(lengths, 0).mean())


def _not_as_forced(run: Run, arm: str) -> str:
    """Describe answers of forced lengths that are not as long as requested; empty if none."""
    if mapping(run.records.experiment.get("traffic")).get("ignore_eos") is not True:
        return ""
    requested, answered = run.requests.max_tokens, run.requests.output_tokens
    rows = run.answered(arm) & (requested > 0)
    wrong = indices(rows & (answered != requested))
    if not wrong.size:
        return ""
    such = f"such as {counted(int(answered[wrong[0]]), 'token')} of {int(requested[wrong[0]])}"
    return f"{wrong.size} of {rows.sum()} answers of {arm} are not as long as asked for, {such}"


def _planned_differences(run: Run, arm: str, own: Ints, base: Ints) -> list[str]:
    """Describe how the requests of arms that get different ones differ: chance gives both the same lengths.

    It uses the largest distance between two distributions, one of them stretched by 5 %, beyond that of Kolmogorov and
    Smirnov at 1 in 1,000. Turns of one session resemble each other, so sessions are counted.
    """
    chance = 1.95 * math.sqrt(sum(1.0 / max(1, run.sessions(name)) for name in (arm, run.control)))
    found = []
    for what, column in (("prompts", run.requests.prompt_tokens), ("planned answers", run.requests.max_tokens)):
        one, other = (np.maximum(column[rows], 0) for rows in (own, base))
        for word, few, near in (("shorter", one, other), ("longer", other, one)):
            short, others = _short(few, near, np.unique(few))
            share = float((short / few.size - others / near.size).max())
            if share > max(2 * WORK_TOLERANCE, chance):
                found.append(f"{100.0 * share:.0f} % of the {what} of {arm} are {word} than those of {run.control}")
                break
    return found


def _short(few: Ints, near: Ints, edges: Ints) -> tuple[Ints, Ints]:
    """Count for each edge the values of one side up to it, and of the other up to 5 % above it."""
    others = np.searchsorted(np.sort(near), edges * (1.0 + WORK_TOLERANCE), side="right")
    return np.searchsorted(np.sort(few), edges, side="right"), others


def length_differences(
    arm: str, control: str, own: Ints, base: Ints, *, paired: bool = False, unit: str = "token"
) -> list[str]:
    """Describe how the lengths of answers differ beyond chance; with `paired`, `own[i]` answers a copy of `base[i]`."""
    if min(own.size, base.size) < _FEWEST:
        return []
    differences = []
    mean = float(base.mean())
    if mean > 0:
        if paired:
            variance = float(np.subtract(own, base, dtype=np.int64).var()) / own.size
        else:
            # Of both together: the variance of the side whose few long answers are missing is too small.
            variance = float(np.concatenate((own, base)).var()) * (1.0 / own.size + 1.0 / base.size)
        ratio, error = float(own.mean()) / mean, math.sqrt(variance) / mean
        if abs(ratio - 1.0) > max(_SURE_DIFFERENCE, _SURE * error):
            differences.append(
                f"answers of {arm} have {ratio:.3g} times the tokens of those of {control} (standard error {error:.2g})"
            )
    for names, few, near in (((arm, control), own, base), ((control, arm), base, own)):
        if text := _short_answers(names, few, near, unit=unit):
            return [*differences, text]
    return differences


def _short_answers(names: tuple[str, str], few: Ints, near: Ints, *, unit: str) -> str:
    """Describe a sure excess of short answers on the first side over answers up to 5 % longer on the other; else empty.

    Fisher's exact test at 1, 2, 4, ... tokens, with Bonferroni over them.
    """
    edges = 2 ** np.arange(_BINS)
    short, others = _short(few, near, edges)
    both, answers = short + others, few.size + near.size
    chance = [hypergeometric_sf(int(low) - 1, answers, int(of), few.size) for low, of in zip(short, both, strict=True)]
    place = int(np.argmin(chance))
    tests = int(((both > 0) & (both < answers)).sum())
    share = short[place] / few.size
    if 2 * tests * chance[place] >= _CHANCE or share - others[place] / near.size <= _LEAST_SHARE_DIFFERENCE:
        return ""
    return (
        f"{100.0 * share:.3g} % of the answers of {names[0]} have at most {counted(2**place, unit)}, "
        f"{100.0 * float((near <= edges[place]).mean()):.3g} % of those of {names[1]}"
    )


_MANY_TOKENS = 8
_AT_ONCE_MS = 1.0


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """How the tokens of completed answers came. `at_once` are answers of many tokens that came within 1 ms."""

    arm: str
    answers: int
    untimed: int  # not one time for each token: of own servers, which stamp each, another number; of others more
    many: int  # answers of many tokens
    at_once: int


def token_times(run: Run, arm: str) -> TokenTimes:
    """Describe when the arm's tokens came. Nothing is untimed if no arm's records have token times."""
    requests = run.requests
    timed, external = bool((requests.token_times > 0).any()), bool(run.account(arm).external)
    counts = np.zeros(4, dtype=np.int64)
    for rows in index_parts(run.answered(arm)):
        tokens, times = requests.output_tokens[rows], requests.token_times[rows]
        # A chunk of an external server may hold several tokens, and no fewer than one.
        untimed = times > tokens if external else times != tokens
        first_ms, end_ms = requests.first_ms[rows], requests.end_ms[rows]
        many = (tokens >= _MANY_TOKENS) & ~np.isnan(first_ms)
        counts += (len(rows), timed * untimed.sum(), many.sum(), (many & (end_ms - first_ms <= _AT_ONCE_MS)).sum())
    return TokenTimes(arm, *counts.tolist())
