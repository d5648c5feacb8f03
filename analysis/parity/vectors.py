"""Whether encoders compute the same: the cosine of each text's vector with float64's, or else with the control's.

Pure decisions over arrays; nothing is run or read here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from analysis.arrays import Floats
from analysis.judging.gates import FAIL, INCONCLUSIVE, PASS
from analysis.parity.measures import Matrix
from analysis.parity.outcome import ArmParity, Finding, Parity, concluded
from analysis.wording import counted

# The least cosine that is the same direction. Half of the dtype's digits may be lost on the way through the layers, and
# a cosine falls by half of the error's square.
LEAST_COSINE = {"float32": 0.9999, "float16": 0.999, "bfloat16": 0.999}


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """The `vectors` [rows, width] of one arm, a row for each time that a text was in a batch."""

    name: str
    vectors: Matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRows:
    """The text of each row, the size of its batch, and the length of each text in tokens."""

    texts: Sequence[int]
    batches: Sequence[int]
    lengths: Sequence[int]

    def text(self, row: int) -> str:
        """Name the row, such as "text 3 (4 tokens, in a batch of 8)"."""
        text, batch = self.texts[row], self.batches[row]
        company = "alone" if batch == 1 else f"in a batch of {batch}"
        return f"text {text} ({counted(self.lengths[text], 'token')}, {company})"


def cosines(vectors: Matrix, others: Matrix) -> Floats:
    """Return the cosine of each row [rows, width] with the other's.

    Not a number where one of them has no direction: it is zero, or holds infinity or no number. ValueError where
    shapes differ.
    """
    one, two = np.asarray(vectors, dtype=np.float64), np.asarray(others, dtype=np.float64)
    if one.shape != two.shape:
        raise ValueError(f"vectors of shape {one.shape} cannot be compared with those of shape {two.shape}")
    with np.errstate(all="ignore"):
        cosine = (one * two).sum(axis=1) / (np.linalg.norm(one, axis=1) * np.linalg.norm(two, axis=1))
    cosine[~np.isfinite(cosine)] = np.nan
    return np.asarray(cosine, dtype=np.float64)


def judge_vectors(
    control: Embedded,
    arms: Sequence[Embedded],
    reference: Matrix | None,
    *,
    rows: TextRows,
    dtype: str,
    least: float | None = None,
    refused: Mapping[str, str] | None = None,
) -> Parity:
    """Judge the parity of `arms` with `control`. `refused` is as for `judge`.

    `reference` [texts, width] are the vectors of float64; without them the control's are the yardstick. A cosine below
    `least`, by default what the dtype allows, fails. Where the control is not float64's, or gives different texts one
    direction, nothing can be blamed on an arm: INCONCLUSIVE. So it is without any text.
    """
    limit = LEAST_COSINE[dtype] if least is None else least
    if not len(rows.texts):
        empty = Finding(name="texts", verdict=INCONCLUSIVE, reason="No text was embedded: raise parity.prompts.")
        checked, *judged = (ArmParity.of(arm.name, [empty]) for arm in (control, *arms))
        return concluded(checked, judged, refused=refused or {})
    yardstick, name = np.asarray(control.vectors, dtype=np.float64), control.name
    if reference is not None:
        yardstick, name = np.asarray(reference, dtype=np.float64)[list(rows.texts)], "float64"
    checked = _judged(control, yardstick, name, rows, limit, [_distinct(control, rows, limit)], verdict=INCONCLUSIVE)
    judged = [_judged(arm, yardstick, name, rows, limit, [], verdict=FAIL) for arm in arms]
    return concluded(checked, judged, refused=refused or {})


def _judged(
    arm: Embedded, yardstick: Floats, of: str, rows: TextRows, limit: float, others: list[Finding], *, verdict: str
) -> ArmParity:
    """Check that every vector has a direction, and that of the yardstick's; `verdict` where one does not."""
    values = cosines(arm.vectors, yardstick)
    known = ~np.isnan(values)
    lost = np.flatnonzero(~known)
    worst = int(np.nanargmin(values)) if known.any() else 0
    below, least = int((values < limit).sum()), float(values[worst])
    reason = f"The least cosine of {arm.name} with {of} is {least:.6f} at {rows.text(worst)}, limit {limit:g}."
    if lost.size:
        reason = (
            f"{counted(int(lost.size), 'vector')} of {len(values)} of {arm.name} or {of} has no direction, first of "
            f"{rows.text(int(lost[0]))}: it is zero, or no number."
        )
    elif below:
        reason = (
            f"{counted(below, 'vector')} of {len(values)} of {arm.name} point elsewhere than {of}'s, the worst at "
            f"{rows.text(worst)}: cosine {least:.6f}, limit {limit:g}."
        )
    ok = not lost.size and not below
    finding = Finding(name="cosine", verdict=PASS if ok else verdict, value=least, limit=limit, reason=reason)
    middle = float(np.quantile(values[known], 0.5, method="inverted_cdf")) if known.any() else math.nan
    return ArmParity.of(arm.name, [finding, *others], {"cosine": {"least": least, "median": middle}})


def _distinct(control: Embedded, rows: TextRows, limit: float) -> Finding:
    """Check that different texts have different directions: else a vector in the wrong place would go unseen."""
    vectors = np.asarray(control.vectors, dtype=np.float64)
    first = {text: row for row, text in reversed(list(enumerate(rows.texts)))}
    own = vectors[[first[text] for text in sorted(first)]]
    between = cosines(own[:-1], own[1:])
    known = between[~np.isnan(between)]
    middle = float(np.median(known)) if known.size else math.nan
    ok = len(own) < 2 or not middle >= limit
    return Finding(
        name="distinct",
        verdict=PASS if ok else INCONCLUSIVE,
        value=middle,
        limit=limit,
        reason=f"The vectors of different texts differ in {control.name}."
        if ok
        else f"Half of the neighbouring texts have a cosine of {middle:.6f} or more in {control.name}, limit "
        f"{limit:g}: vectors in each other's place would pass, so take weights that tell texts apart.",
    )
