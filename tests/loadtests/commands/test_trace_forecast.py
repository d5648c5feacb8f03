"""What the lengths of a trace mean for each compile policy."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from tailgate.loadtests.commands.main import main
from tailgate.loadtests.commands.trace_forecast import best_ladder, forecast, forecast_text
from tailgate.loadtests.traffic.traces import Trace, read_trace
from tailgate.servers.complaint import ConfigError
from tests.loadtests.commands.test_main import refused

LENGTHS = [5, 9, 5, 300, 9, 40, 41, 5, 300, 12]


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    path = tmp_path / "own.csv"
    rows = [f"2023-11-16 18:15:{second:02}.0,{length},7" for second, length in enumerate(LENGTHS)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return read_trace(path)


def test_a_ladder_pads_each_prompt_to_its_bucket(trace: Trace) -> None:
    found = forecast(trace)
    assert found["distinct"] == 6
    padded = {row["name"]: row["padded_over_true"] for row in found["ladders"]}
    assert padded["one length"] == pytest.approx(10 * 300 / sum(LENGTHS))
    assert padded["best 8"] == 1.0 < padded["default"]


@pytest.mark.parametrize("buckets", [1, 2, 3, 9])
def test_the_best_ladder_pads_least_of_all(buckets: int) -> None:
    lengths, last = np.array(LENGTHS), 320

    def padded(ladder: tuple[int, ...]) -> int:
        return int(np.array(ladder)[np.searchsorted(ladder, lengths)].sum())

    others = combinations(sorted(set(LENGTHS)), min(buckets, len(set(LENGTHS)) + 1) - 1)
    ladder = best_ladder(lengths, buckets, last)
    assert ladder[-1] == last
    assert padded(ladder) == min(padded((*other, last)) for other in others)


def test_what_is_over_the_limit_is_left_out_and_counted(trace: Trace) -> None:
    found = forecast(trace, max_prompt_tokens=100)
    assert (found["requests"], found["too_long"]) == (8, 2)
    assert "left out: 2 prompts of over 100 tokens" in forecast_text(found)
    with pytest.raises(ConfigError, match="raise --max-prompt-tokens"):
        forecast(trace, max_prompt_tokens=4)


def test_the_command_begins_with_what_was_read(trace: Trace, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--trace", trace.name]) == 0
    assert capsys.readouterr().out.startswith(trace.account)


def test_what_describes_an_arm_is_refused(trace: Trace, capsys: pytest.CaptureFixture[str]) -> None:
    assert "eager has no effect with --trace" in refused(capsys, "inspect", "--trace", trace.name, "--arm", "eager")
    assert "name one with --arm, or a trace with --trace" in refused(capsys, "inspect")
