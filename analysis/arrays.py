"""The kinds of NumPy arrays that analysis counts with."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Codes = npt.NDArray[np.signedinteger[Any]]  # whole numbers that are small, most held in 32 bits
