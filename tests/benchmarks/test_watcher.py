from __future__ import annotations

import math
from pathlib import Path

import pytest

from analysis.records.documents import write_document
from analysis.records.schemas import STEPS
from analysis.records.tables import RecordWriter
from benchmarks.watcher import measured, ratios


def test_a_trial_gives_the_generators_lag_and_each_arms_median_decode_step(tmp_path: Path) -> None:
    write_document(tmp_path / "generator-0.json", {"lag_ms": {"p99": 3.0}, "loop_lag_ms": {"p99": 7.0}})
    with RecordWriter(tmp_path / "steps.arrow", STEPS) as writer:
        for kind, took_ms in (("prefill", 90), ("decode", 2), ("decode", 4), ("decode", 50)):
            writer.append({"arm": "eager", "kind": kind, "start_ns": 10**9, "end_ns": 10**9 + took_ms * 10**6})
    assert measured(tmp_path) == {"lag p99": 3.0, "loop lag p99": 7.0, "decode step eager": 4.0}


def test_ratios_are_over_pairs_and_their_interval_over_the_pairs_spread() -> None:
    pairs = [({"lag": 2.0, "gone": 1.0}, {"lag": 1.0}), ({"lag": 1.0, "gone": 0.0}, {"lag": 2.0, "gone": 1.0})]
    (name, row), *others = ratios(pairs).items()
    assert (name, others) == ("lag", [])
    assert row["ratio"] == pytest.approx(1.0)
    assert row["low"] is not None
    # two pairs: mean 0, deviation log(2) * sqrt(2), t of one degree of freedom 12.706
    assert math.log(row["low"]) == pytest.approx(-12.7062 * math.log(2), rel=1e-4)


def test_one_pair_has_no_interval() -> None:
    assert ratios([({"lag": 3.0}, {"lag": 2.0})]) == {"lag": {"ratio": pytest.approx(1.5), "low": None, "high": None}}
