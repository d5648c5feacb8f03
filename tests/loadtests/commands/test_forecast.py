from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtests.commands.forecast import forecast_text
from loadtests.commands.main import main
from loadtests.commands.trace_forecast import Forecast, forecast
from loadtests.traffic.traces import Trace, read_trace
from servers.fields import ConfigError

LENGTHS = [5, 9, 5, 300, 9, 40, 41, 5, 300, 12]


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    path = tmp_path / "own.csv"
    rows = [f"{second},{length},7" for second, length in enumerate(LENGTHS)]
    path.write_text("\n".join(["time_s,input_tokens,output_tokens", *rows]) + "\n")
    return read_trace(path)


def row(found: dict, policy: str) -> dict:
    return next(item for item in found["policies"] if item["policy"].startswith(policy))


def test_a_policy_without_padding_compiles_and_one_with_padding_does_not(trace: Trace) -> None:
    found = forecast(trace, Forecast(graphs=2, recompile_limit=4))
    assert row(found, "static, no limit")["compiles_while_serving"] == len(set(LENGTHS)) == 6
    limited = row(found, "static, each shape")
    assert limited["compiles_while_serving"] == 4
    assert "after 4, 20% of the steps run eagerly" in limited["note"]  # 41 and 12 of ten
    padded = row(found, "one padded shape")
    assert (padded["compiles_while_serving"], padded["graphs_before_serving"]) == (0, 1)
    assert padded["padded_over_true"] == pytest.approx(10 * 300 / sum(LENGTHS))
    assert row(found, "buckets, best 2")["ladder"] == [41, 300]


def test_the_default_compiles_once_for_a_shape_and_once_for_the_dimension_that_changes(trace: Trace) -> None:
    assert row(forecast(trace, Forecast()), "automatic")["compiles_while_serving"] == 2


def test_batches_bring_shapes_of_their_own_and_pad_to_their_longest(trace: Trace) -> None:
    found = forecast(trace, Forecast(batch=2, window_ms=1000.0))
    assert [shape["name"] for shape in found["shapes"]] == [
        "prompt length",
        "(batch, length), batches of up to 2",
    ]
    pairs = [max(pair) for pair in zip(LENGTHS[::2], LENGTHS[1::2], strict=True)]
    assert row(found, "eager")["padded_over_true"] == pytest.approx(2 * sum(pairs) / sum(LENGTHS))


def test_what_is_over_the_limit_is_left_out_and_counted(trace: Trace) -> None:
    found = forecast(trace, Forecast(max_prompt_tokens=100))
    assert (found["trace"]["requests"], found["trace"]["too_long"]) == (8, 2)
    assert "2 longer than 100 tokens are left out" in forecast_text(found)
    with pytest.raises(ConfigError, match="raise --max-prompt-tokens"):
        forecast(trace, Forecast(max_prompt_tokens=4))


def test_compile_seconds_become_warm_up_and_stalls(trace: Trace) -> None:
    found = forecast(trace, Forecast(compile_s=20, ladder=(64, 512)))
    assert row(found, "buckets, as given")["warm_up_s"] == 40
    assert row(found, "static, no limit")["stalled_s"] == 120
    assert "120 s" in forecast_text(found)


def test_lists_may_have_spaces(trace: Trace, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["forecast", trace.name, "--ladder", "64, 512"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_command_prints_a_table_and_one_json_object(trace: Trace, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["forecast", trace.name, "--graphs", "3"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert any(line.startswith("buckets, best 3") for line in printed)
    assert json.loads(printed[-1])["trace"]["requests"] == 10


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ladder", "5,x"], "argument --ladder: 'x' is no number: give a whole number from 1"),
        (["--ladder", "0,5"], "argument --ladder: '0' is no number: give 1 to 2147483647"),
        (["--ladder", "5" + ",6" * 1024], "argument --ladder: it has 1025 values: give up to 1024"),
        (["--graphs", "0"], "argument --graphs: '0' is no number: give 1 to 1024"),
        *((["--step-ms", text], "argument --step-ms: ") for text in ("", "0", "nan", "10,-1", "inf")),
        (["--ladder", "2"], "no request fits the ladder"),
    ],
)
def test_bad_questions_are_one_line(
    flags: list[str], message: str, trace: Trace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["forecast", trace.name, *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_lengths_that_never_repeat_are_all_new(tmp_path: Path) -> None:
    path = tmp_path / "new.csv"
    rows = "".join(f"{second},{second + 1},1\n" for second in range(50))
    path.write_text("time_s,input_tokens,output_tokens\n" + rows)
    shape = forecast(read_trace(path), Forecast())["shapes"][0]
    assert (shape["next_is_new"], shape["first_tenth_new_share"], shape["last_tenth_new_share"]) == (1.0, 1.0, 1.0)
