from __future__ import annotations

import io
import json
from pathlib import Path

from benchmarks.ledger import Ledger, rounded, table
from benchmarks.measure import paired_ratio, spread


def test_a_row_is_shown_and_kept_at_once(tmp_path: Path) -> None:
    out, stream = tmp_path / "results.jsonl", io.StringIO()
    ledger = Ledger("padded", out=out, stream=stream)
    ledger.add("decode", batch=1, tokens_s=spread([1.0, 2.0, 3.0]), samples=[1.0, 2.0, 3.0])
    ledger.add("quiet", failed="2 recompile while serving")
    kept = [json.loads(line) for line in out.read_text().splitlines()]
    assert kept == ledger.rows
    assert [row["section"] for row in kept] == ["decode", "quiet"]
    assert "batch=1  tokens_s=2 (1–3)" in stream.getvalue()
    assert ledger.failures == ["quiet: 2 recompile while serving"]


def test_a_table_shows_medians_and_intervals_and_leaves_samples_out() -> None:
    pairs = paired_ratio([1.0] * 6, [2.0] * 6)
    text = table(
        [
            {"section": "decode", "arm": "a", "tokens_s": spread([12345.0]), "samples": [12345.0]},
            {"section": "decode", "arm": "b", "ratio": pairs, "none": None},
        ]
    )
    assert "12,345 (12,345–12,345)" in text
    assert "0.5 [0.5–0.5]" in text
    assert "samples" not in text


def test_floats_are_cut_and_the_rest_is_left_alone() -> None:
    assert rounded({"a": [1.23456789, 3], "b": True, "c": None}) == {"a": [1.23457, 3], "b": True, "c": None}


def test_an_attempt_that_breaks_is_a_row_and_no_end() -> None:
    stream = io.StringIO()
    ledger = Ledger("padded", stream=stream)
    with ledger.attempt("decode", batch=4):
        raise RuntimeError("no memory\nand more")
    assert ledger.rows == [{"section": "decode", "arm": "padded", "batch": 4, "failed": "RuntimeError: no memory"}]
    assert "Traceback" in stream.getvalue()


def test_a_goal_may_be_a_floor_or_a_ceiling_and_one_that_is_missed_is_said_so() -> None:
    ledger = Ledger("load", stream=io.StringIO())
    ledger.reach("lag", 4.9, 5.0)
    ledger.reach("lag", 5.1, 5.0)
    ledger.reach("delivered", 0.995, 0.995, at_least=True)
    ledger.reach("delivered", 0.99, 0.995, at_least=True)
    ledger.reach("growth", None, 0.02)
    assert [(row["goal"], row["reached"]) for row in ledger.rows] == [
        ("≤ 5", True),
        ("≤ 5", False),
        ("≥ 0.995", True),
        ("≥ 0.995", False),
    ]
    assert ledger.missed == ["lag is 5.1", "delivered is 0.99"]
    assert not ledger.result("generator", complete=True, about={})["ok"]
