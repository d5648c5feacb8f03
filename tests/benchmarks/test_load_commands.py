from __future__ import annotations

import json

import pytest

from benchmarks import generator


def test_the_whole_of_a_small_benchmark_is_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    code = generator.main(["open", "--contestants", "bare", "--rates", "50", "--window", "1", "--repeats", "2"])
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert out.count("\n") == 1
    assert code == 0
    assert result["ok"]
    (row,) = [row for row in result["results"] if row["section"] == "open"]
    assert row["contestant"] == "bare"
    assert row["p99_own_ms"]["n"] == 2
    assert "50 requests/s" in err
