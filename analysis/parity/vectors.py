"""Whether encoders compute the same: the cosine of each text's vector with the control's and with a float64 reference.

Pure decisions over arrays; nothing is run or read here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.arrays import Floats
from analysis.judging.gates import FAIL, INCONCLUSIVE, PASS
from analysis.judging.verdict import combined
from analysis.parity.borders import Borders
from analysis.parity.finding import Finding
from analysis.parity.judge import ArmParity, Parity, concluded
from analysis.parity.measures import Matrix
from analysis.wording import counted

# The least cosine that is the same direction. Half of the dtype's digits may be lost on the way through the layers, and
# a cosine falls by half of the error's square.
LEAST_COSINE = {"float32": 0.9999, "float16": 0.999, "bfloat16": 0.999}


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """What one arm made of the texts: `vectors` [rows, width], a row for each time that a text was in a batch."""

    name: str
    vectors: Matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRows:
    """Which text each row is of, the size of its batch, and the length of each text in tokens."""

    texts: Sequence[int]
    batches: Sequence[int]
    lengths: Sequence[int]

    def text(self, row: int) -> str:
        """The row in words."""
        text, batch = self.texts[row], self.batches[row]
        company = "alone" if batch == 1 else f"in a batch of {batch}"
        return f"text {text} ({counted(self.lengths[text], 'token')}, {company})"


def cosines(vectors: Matrix, others: Matrix) -> Floats:
    """The cosine of each row [rows, width] with the other's. Not a number where one of them has no direction: it is
    zero, or holds infinity or no number. No rows give no cosines."""
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
    borders: Mapping[str, Borders] | None = None,
    refused: Mapping[str, str] | None = None,
) -> Parity:
    """The parity of `arms` with `control`. `reference` [texts, width] are the vectors of float64, None without them.
    `borders` and `refused` are as for `judge`.

    A cosine below `least` fails; None is what the dtype allows. Where the control is not float64's, or gives different
    texts one direction, nothing can be blamed on an arm: INCONCLUSIVE. So it is without any text.
    """
    limit = LEAST_COSINE[dtype] if least is None else least
    true = np.asarray(reference, dtype=np.float64)[list(rows.texts)] if reference is not None else None
    if not len(rows.texts):
        empty = Finding(name="texts", verdict=INCONCLUSIVE, reason="No text was embedded: raise parity.prompts.")
        return Parity(
            verdict=INCONCLUSIVE,
            control=ArmParity(name=control.name, verdict=INCONCLUSIVE, findings=(empty,)),
            arms=tuple(ArmParity(name=arm.name, verdict=INCONCLUSIVE, findings=(empty,)) for arm in arms),
        )
    checked = _judge_control(control, true, rows, limit)
    judged = [_judge_arm(arm, control, true, rows, limit) for arm in arms]
    return concluded(checked, judged, borders=borders or {}, refused=refused or {})


def _judge_control(control: Embedded, true: Matrix | None, rows: TextRows, limit: float) -> ArmParity:
    findings = [_directed(control, rows, INCONCLUSIVE), _distinct(control, rows, limit)]
    figures: dict[str, Any] = {}
    if true is not None:
        own = cosines(control.vectors, true)
        findings.append(_alike("float64", control.name, "float64", own, rows, limit, INCONCLUSIVE))
        figures = {"cosine": _summary(own)}
    verdict = combined([item.verdict for item in findings])
    return ArmParity(name=control.name, verdict=verdict, findings=tuple(findings), figures=figures)


def _judge_arm(arm: Embedded, control: Embedded, true: Matrix | None, rows: TextRows, limit: float) -> ArmParity:
    beside = cosines(arm.vectors, control.vectors)
    findings = [
        _directed(arm, rows, FAIL),
        _alike("control", arm.name, control.name, beside, rows, limit, FAIL),
    ]
    figures: dict[str, Any] = {"rows": len(rows.texts), "cosine_control": _summary(beside)}
    if true is not None:
        own = cosines(arm.vectors, true)
        findings.append(_alike("float64", arm.name, "float64", own, rows, limit, FAIL))
        figures["cosine"] = _summary(own)
    verdict = combined([item.verdict for item in findings])
    return ArmParity(name=arm.name, verdict=verdict, findings=tuple(findings), figures=figures)


def _directed(arm: Embedded, rows: TextRows, verdict: str) -> Finding:
    """Every vector has a direction."""
    lost = np.flatnonzero(np.isnan(cosines(arm.vectors, arm.vectors)))
    return Finding(
        name="finite",
        verdict=verdict if lost.size else PASS,
        value=float(lost.size),
        limit=0.0,
        reason=f"{arm.name} gives no direction to {counted(int(lost.size), 'vector')} of {len(rows.texts)}, first to "
        f"{rows.text(int(lost[0]))}: it is zero, or no number."
        if lost.size
        else f"Every vector of {arm.name} has a direction.",
    )


def _distinct(control: Embedded, rows: TextRows, limit: float) -> Finding:
    """Different texts have different directions: else a vector in the wrong place would go unseen."""
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


def _alike(name: str, arm: str, other: str, values: Floats, rows: TextRows, limit: float, otherwise: str) -> Finding:
    """Every vector points where the other's does."""
    known = ~np.isnan(values)
    worst = int(np.nanargmin(values)) if known.any() else 0
    apart = int((values < limit).sum())
    ok = bool(known.all()) and not apart
    least = float(values[worst])
    reason = f"The least cosine of {arm} with {other} is {least:.6f} at {rows.text(worst)}, limit {limit:g}."
    if apart:
        reason = (
            f"{counted(apart, 'vector')} of {len(values)} of {arm} are off {other}'s, the most at {rows.text(worst)}: "
            f"cosine {least:.6f}, limit {limit:g}."
        )
    elif not ok:
        reason = f"{counted(int((~known).sum()), 'vector')} of {arm} cannot be compared with {other}'s: no direction."
    return Finding(name=name, verdict=PASS if ok else otherwise, value=least, limit=limit, reason=reason)


def _summary(values: Floats) -> Mapping[str, float]:
    """By rank, those without a number left out."""
    known = values[~np.isnan(values)]
    if not known.size:
        return {"least": math.nan, "median": math.nan}
    return {"least": float(known.min()), "median": float(np.quantile(known, 0.5, method="inverted_cdf"))}
