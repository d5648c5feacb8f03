from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.contest import Cores, Work, run
from benchmarks.lag import stream_figures
from benchmarks.observed import Plan

ANYWHERE = Cores(server=None, load=None)


def plan(mode: str, **fields: object) -> Plan:
    return Plan(mode=mode, address="", out="", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("contestant", ["stock", "bare", "tailgate"])
def test_a_contestant_sees_the_tokens_of_a_few_streams(contestant: str, tmp_path: Path) -> None:
    work = Work(
        plan=plan("streams", streams=5, ramp_s=0.2, tokens=40),
        server=("--tokens-per-s", "20"),
        window_s=0.5,
        settle_s=0.3,
    )
    outcome = run(contestant, work, folder=tmp_path / "run", cores=ANYWHERE)
    figures = stream_figures(outcome.seen, outcome.sent, start_ns=outcome.start_ns, end_ns=outcome.end_ns)
    assert 30 < figures["sent"] <= 55
    assert figures["delivered"] > 0.5
    assert 0 <= figures["p50_lag_ms"] < 1000
    assert outcome.server["refused"] == 0
