"""The shapes in which requests began, as the summary has them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from analysis.run.run import Run
from analysis.run.shape_map import shape_map


def shapes_row(run: Run) -> dict[str, Any]:
    """Axes, and the cells of each arm; empty where no shape is recorded."""
    found = shape_map(run)
    return {} if found is None else asdict(found)
