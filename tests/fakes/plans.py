"""A pilot run to plan from, and how to find a row of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fakes.runs import FakeRun, write_run

GATES = {"draws": 99}


def row(plan: dict[str, Any], what: str) -> dict[str, Any]:
    (found,) = [item for item in plan["rows"] if item["what"] == what]
    return found


@pytest.fixture(scope="module")
def pilot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = FakeRun(duration_s=660, rate=2.0, gates=GATES, slo={"p99_ttft_ms": 2000})
    return write_run(tmp_path_factory.mktemp("pilot") / "run", run)
