"""Whether encoders compute the same: the cosine of each text's vector with float64's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tailgate.analysis.arrays import Floats
from tailgate.analysis.judging.gates import FAIL, INCONCLUSIVE, PASS
from tailgate.analysis.parity.measures import Matrix
from tailgate.analysis.parity.outcome import Finding, Parity, concluded
from tailgate.analysis.wording import counted

# The least cosine that is the same direction. Half of the dtype's digits may be lost on the way through the layers, and
# a cosine falls by half of the error's square.
LEAST_COSINE = {"float32": 0.9999, "float16": 0.999, "bfloat16": 0.999}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRows:
    """The text of each row of vectors, the size of its batch, and the length of each text in tokens."""

    texts: Sequence[int]
    batches: Sequence[int]
    lengths: Sequence[int]

    def text(self, row: int) -> str:
        """Name the row, such as "text 3 (4 tokens, in a batch of 8)"."""
        text, batch = self.texts[row], self.batches[row]
        company = "alone" if batch == 1 else f"in a batch of {batch}"
        return f"text {text} ({counted(self.lengths[text], 'token')}, {company})"


def cosines(vectors: npt.ArrayLike, others: npt.ArrayLike) -> Floats:
    """Return the cosine of each row [rows, width] with the other's.

    It is -1 where one of them has no direction: it is zero, or holds infinity or no number.
    """
    one, two = np.asarray(vectors, dtype=np.float64), np.asarray(others, dtype=np.float64)
    with np.errstate(all="ignore"):
        cosine = (one * two).sum(axis=1) / (np.linalg.norm(one, axis=1) * np.linalg.norm(two, axis=1))
    return np.where(np.isfinite(cosine), cosine, -1.0)


def judge_vectors(
    control: str,
    vectors: Mapping[str, Matrix],
    reference: Matrix,
    *,
    rows: TextRows,
    limit: float,
    refused: Mapping[str, str] | None = None,
) -> Parity:
    """Judge the `vectors` [rows, width] of each arm, a row for each time that a text was in a batch.

    `reference` [texts, width] are the vectors of float64. A cosine below `limit` fails. Where the control is not
    float64's, or gives different texts one direction, every arm is INCONCLUSIVE. Arms in `refused` refused a text.
    """
    truth = np.asarray(reference, dtype=np.float64)[list(rows.texts)]

    def near(arm: str, beyond: str) -> Finding:
        values = cosines(vectors[arm], truth)
        worst = int(np.argmin(values))
        value, below = float(values[worst]), int((values < limit).sum())
        reason = (
            f"The least cosine of {arm} with float64 is {value:.6f}, limit {limit:g} ({below} of "
            f"{counted(len(values), 'vector')} below it): at {rows.text(worst)}."
        )
        return Finding("cosine", beyond if below else PASS, reason, value=value, limit=limit)

    arms = {arm: [near(arm, FAIL)] for arm in vectors if arm != control}
    checked = [near(control, INCONCLUSIVE), _distinct(vectors[control], rows, limit)]
    return concluded(control, checked, arms, refused=refused)


def _distinct(control: Matrix, rows: TextRows, limit: float) -> Finding:
    """Check that different texts have different directions: else a vector in the wrong place would pass."""
    first = {text: row for row, text in reversed(list(enumerate(rows.texts)))}
    own = control[[first[text] for text in sorted(first)]]
    alike = float(np.median(cosines(own[:-1], own[1:]))) if len(own) > 1 else -1.0
    reason = (
        f"Half of the control's neighbouring texts have a cosine of {alike:.6f} or more with each other, limit "
        f"{limit:g}: take weights that tell texts apart."
    )
    return Finding("distinct", INCONCLUSIVE if alike >= limit else PASS, reason, value=alike, limit=limit)
