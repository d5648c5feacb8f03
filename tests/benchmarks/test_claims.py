from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.claims import CLAIMS, FIGURES, Claim, Measured, main
from tests.servers.compiler.test_recorder import reset_compiler


@pytest.fixture(autouse=True)
def _own_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_DYNAMO_AUTOMATIC_DYNAMIC_LOCAL_PGO"):
        monkeypatch.setenv(name, "")  # which the command sets
    reset_compiler()
    yield
    reset_compiler()


def test_claims_become_rows_and_a_table_also_where_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    eager, arm = CLAIMS["decode-default"].sides()
    monkeypatch.setitem(CLAIMS, "quantise", Claim("", "s", (eager, replace(arm, attention="no-such"))))
    assert main(["--repeats", "5", "--only", "decode-default,memory,quantise,compile-default"]) == 1
    outcome = json.loads(capsys.readouterr().out)
    rows = {row["claim"]: row for row in outcome["results"]}
    assert outcome["missed"] == ["quantise"]
    assert "no-such" in rows["quantise"]["error"]
    assert rows["memory"]["error"] == "needs a GPU"
    decode, compiled = rows["decode-default"], rows["compile-default"]
    assert [side["arm"] for side in decode["arms"]] == ["eager", "default"]
    assert decode["arms"] == compiled["arms"]  # each is measured once
    assert decode["low"] <= decode["figure"] <= decode["high"]
    assert compiled["figure"] == decode["arms"][1]["compile_s"] > 1.0

    results, page = tmp_path / "claims.json", tmp_path / "page.md"
    results.write_text(json.dumps(outcome))
    page.write_text("# Title\n\n| old |\n| --- |\n\nAfter.\n")
    assert main(["--results", str(results), "--markdown", str(page)]) == 0
    lines = page.read_text().splitlines()
    assert (lines[0], lines[-1], len(lines)) == ("# Title", "After.", len(CLAIMS) + 6)
    (line,) = (line for line in lines if "`decode-default`" in line)
    assert "| 20 to 40 % lower latency | tiny, 2 layers, decode of 1 × 512 tokens: eager " in line
    assert sum("not measured yet" in line for line in lines) == len(CLAIMS) - 4


@pytest.mark.parametrize("name", CLAIMS)
def test_every_claim_has_a_figure_of_its_arms(name: str) -> None:
    claim = CLAIMS[name]
    arms = [Measured(np.full(5, 10.0 - place), 30.0 + place, 16.0) for place in range(len(claim.sides()))]
    assert math.isfinite(FIGURES[claim.unit](*arms))
    assert len({*claim.sides()}) == len(claim.sides())


def test_a_claim_holds_only_if_the_whole_interval_does() -> None:
    claim = CLAIMS["decode-default"]
    assert claim.verdict(21, 39) == "Holds."
    assert claim.verdict(5, 19) == "Does not hold: less than published."
    assert claim.verdict(41, 50) == "Does not hold: more than published."
    assert claim.verdict(19, 21).startswith("Open")
    assert CLAIMS["quantise"].verdict(1, 2) == "No figure is published."
