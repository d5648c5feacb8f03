"""Records that flatter an arm: no PASS may rest on them. Each run would PASS but for the one lie that is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis.records.schemas import REQUESTS
from analysis.records.tables import RecordWriter, read_table
from analysis.summary.summary import analyze
from tests.fakes.runs import FakeRun, write_run

SLO = {"p99_ttft_ms": 2000, "p99_e2e_ms": 6000}
GATES = {"draws": 99, "margin": 0.2, "max_error_pct": 2.0}
HONEST = FakeRun(slo=SLO, gates=GATES, own_drift=0.0)
FORCED = FakeRun(slo=SLO, gates=GATES, own_drift=0.0, ignore_eos=True)

Row = dict[str, Any]


def judged(folder: Path, run: FakeRun, lie: Callable[[int, Row], Row | list[Row]] | None = None) -> dict[str, Any]:
    """The summary of the run after `lie` changed each row of the compiled arm, given its number."""
    write_run(folder, run)
    for trial in sorted(folder.glob("trial-*")):
        path = trial / "requests-0.arrow"
        rows = read_table(path, REQUESTS)[0].to_pylist()
        path.unlink()
        with RecordWriter(path, REQUESTS) as writer:
            for row in rows:
                number = int(row["request_id"].split("-")[1])
                told = lie(number, dict(row)) if lie is not None and row["arm"] == "compiled" else row
                for one in told if isinstance(told, list) else [told]:
                    writer.append(one)
    return analyze(folder)


def failed_checks(summary: dict[str, Any]) -> set[str]:
    return {check["check"] for check in summary["validity"] if not check["ok"]}


def cut_to(row: Row, tokens: int, seconds: float | None = None) -> Row:
    """The answer with its first tokens alone, ended with the last of them or after `seconds`."""
    times = row["token_ns"][:tokens]
    end = row["sent_ns"] + times[-1] if seconds is None else row["sent_ns"] + int(seconds * 1e9)
    return row | {"output_tokens": tokens, "token_ns": times, "end_ns": end}


def at_once(row: Row) -> Row:
    first = row["first_token_ns"] - row["sent_ns"]
    return row | {"token_ns": [first] * row["output_tokens"], "end_ns": row["first_token_ns"]}


EMPTY: Row = {"output_tokens": 0, "token_ns": None, "first_token_ns": None}


def empty(row: Row, **more: Any) -> Row:
    return row | EMPTY | {"end_ns": row["sent_ns"] + 5_000_000} | more


@pytest.mark.parametrize("run", [HONEST, FORCED], ids=["free lengths", "forced lengths"])
def test_honest_records_pass(tmp_path: Path, run: FakeRun) -> None:
    summary = judged(tmp_path, run)
    assert (summary["overall"], failed_checks(summary)) == ("PASS", set())


@pytest.mark.parametrize(
    "lie",
    [
        pytest.param(lambda number, row: empty(row) if number % 5 == 0 else row, id="a fifth empty"),
        pytest.param(lambda number, row: empty(row, error="boom") if number % 5 == 0 else row, id="empty with error"),
        pytest.param(lambda number, row: row | {"error": "out of memory"} if number % 5 == 0 else row, id="an error"),
        pytest.param(
            lambda number, row: row | {"output_tokens": 0} if number % 5 == 0 else row, id="no token but a first time"
        ),
    ],
)
def test_ok_with_nothing_in_it_is_a_failure(tmp_path: Path, lie: Callable[[int, Row], Row]) -> None:
    summary = judged(tmp_path, HONEST, lie)
    arm = next(row for row in summary["arms"] if row["name"] == "compiled")
    assert arm["error_pct"] == pytest.approx(20.0, abs=0.1)
    assert summary["overall"] == "FAIL"


@pytest.mark.parametrize(
    ("design", "ignore_eos"), [("mirrored", False), ("mirrored", True), ("split", False), ("switchback", False)]
)
@pytest.mark.parametrize(
    "lie",
    [
        pytest.param(lambda number, row: cut_to(row, 1) if number % 10 else row, id="nine tenths of one token"),
        pytest.param(lambda number, row: cut_to(row, 1) if number % 10 == 0 else row, id="a tenth of one token"),
        pytest.param(lambda number, row: cut_to(row, max(1, row["output_tokens"] * 9 // 10)), id="a tenth shorter"),
        pytest.param(lambda number, row: row | {"output_tokens": 2 * row["output_tokens"]}, id="twice as long"),
    ],
)
def test_an_arm_that_answers_less_or_more_does_not_pass(
    tmp_path: Path, design: str, ignore_eos: bool, lie: Callable[[int, Row], Row]
) -> None:
    run = FakeRun(slo=SLO, gates=GATES, own_drift=0.0, ignore_eos=ignore_eos, design=design)
    summary = judged(tmp_path, run, lie)
    assert "equal work" in failed_checks(summary)
    for gate in summary["gates"]:
        if gate["kind"] in ("noninferiority", "slo"):
            assert gate["verdict"] == "INCONCLUSIVE"
            assert "equal work" in gate["blocked_by"]


def test_a_mean_that_agrees_does_not_hide_other_lengths(tmp_path: Path) -> None:
    """Every other answer has one token, and the ones between make up for it."""

    def lie(number: int, row: Row) -> Row:
        return row | {"output_tokens": 1 if number % 2 else 2 * row["output_tokens"] - 1}

    summary = judged(tmp_path, HONEST, lie)
    check = next(check for check in summary["validity"] if check["check"] == "equal work")
    assert not check["ok"]
    assert "% of the answers of compiled are" in check["reason"]


def test_one_short_answer_among_forced_ones_is_other_work(tmp_path: Path) -> None:
    summary = judged(tmp_path, FORCED, lambda number, row: cut_to(row, 1) if number == 700 else row)
    assert failed_checks(summary) == {"equal work"}
    reason = next(check["reason"] for check in summary["validity"] if check["check"] == "equal work")
    assert "1 of 3120 answers of compiled are not as long as asked for, such as 1 token of" in reason


def test_a_control_that_answers_less_is_other_work_too(tmp_path: Path) -> None:
    write_run(tmp_path, FORCED)
    path = tmp_path / "trial-01" / "requests-0.arrow"
    rows = read_table(path, REQUESTS)[0].to_pylist()
    path.unlink()
    with RecordWriter(path, REQUESTS) as writer:
        for row in rows:
            writer.append(row | {"output_tokens": row["output_tokens"] + (row["arm"] == "eager")})
    assert "equal work" in failed_checks(analyze(tmp_path))


def test_a_first_token_that_nobody_saw_came_with_the_last(tmp_path: Path) -> None:
    def lie(number: int, row: Row) -> Row:
        return row | {"first_token_ns": None, "token_ns": None} if number % 5 == 0 else row

    summary = judged(tmp_path, HONEST, lie)
    arm = next(row for row in summary["arms"] if row["name"] == "compiled")
    assert arm["error_pct"] == 0
    assert arm["metrics"]["ttft"]["p99_ms"] > 300
    assert summary["overall"] == "FAIL"


def test_a_replica_that_does_not_serve_any_more_after_its_last_answer_does_not_pass(tmp_path: Path) -> None:
    write_run(tmp_path, HONEST)
    path = tmp_path / "trial-01" / "trial.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "final": {"eager-0": {}}}))
    summary = analyze(tmp_path)
    # Whoever does not serve cannot say either how many compiles it counted.
    assert (summary["overall"], failed_checks(summary)) == ("INCONCLUSIVE", {"alive", "event counts"})
    reasons = [check["reason"] for check in summary["validity"] if check["check"] == "alive"]
    assert "compiled-0 did not serve any more when the traffic was over." in reasons


def test_answers_that_the_experiment_asks_for_and_nobody_recorded_do_not_pass(tmp_path: Path) -> None:
    for asked, overall in ((True, "INCONCLUSIVE"), (False, "PASS")):
        summary = judged(tmp_path / str(asked), replace(HONEST, parity={"served": asked}))
        assert summary["overall"] == overall


def shifted(row: Row, ms: float, *names: str) -> Row:
    return row | {name: row[name] + int(ms * 1e6) for name in names}


ALL_TIMES = ("scheduled_ns", "sent_ns", "first_token_ns", "end_ns")


@pytest.mark.parametrize(
    ("lie", "check"),
    [
        pytest.param(lambda number, row: shifted(row, 400, *ALL_TIMES), "pairs", id="400 ms later"),
        pytest.param(lambda number, row: shifted(row, -20, *ALL_TIMES), "pairs", id="20 ms earlier"),
        pytest.param(lambda number, row: shifted(row, 25, "sent_ns"), "lag apart", id="sent later"),
        pytest.param(
            lambda number, row: row | {"prompt_tokens": row["prompt_tokens"] - 1}, "pairs", id="a shorter prompt"
        ),
        pytest.param(lambda number, row: row | {"max_tokens": 100}, "pairs", id="fewer tokens asked for"),
        pytest.param(
            lambda number, row: row | {"pair_id": f"1-{number + 1}"} if number == 9 else row, "pairs", id="a pair twice"
        ),
        pytest.param(
            lambda number, row: [row, row | {"request_id": row["request_id"] + "b"}] if number % 3 == 0 else row,
            "pairs",
            id="a second copy",
        ),
        pytest.param(lambda number, row: [] if number % 50 == 0 else row, "pairs", id="copies missing"),
        pytest.param(
            lambda number, row: row | {"pair_id": f"own-{number}"} if number % 50 == 0 else row,
            "pairs",
            id="no partner",
        ),
        pytest.param(lambda number, row: row | {"pair_id": None} if number % 50 == 0 else row, "pairs", id="no pair"),
    ],
)
def test_copies_that_are_no_copies_do_not_pass(
    tmp_path: Path, lie: Callable[[int, Row], Row | list[Row]], check: str
) -> None:
    summary = judged(tmp_path, HONEST, lie)
    assert check in failed_checks(summary)
    assert summary["overall"] != "PASS"


def test_an_answer_that_ends_before_its_last_token_has_broken_times(tmp_path: Path) -> None:
    def lie(number: int, row: Row) -> Row:
        return row | {"end_ns": row["first_token_ns"] + 1_000_000} if row["output_tokens"] > 4 else row

    summary = judged(tmp_path, HONEST, lie)
    assert "records" in failed_checks(summary)
    assert summary["overall"] != "PASS"


@pytest.mark.parametrize(("metrics", "ok"), [(["ttft", "e2e"], True), (["ttft", "tpot"], False)])
def test_a_server_that_streams_nothing_is_not_judged_by_its_gaps(tmp_path: Path, metrics: list[str], ok: bool) -> None:
    run = FakeRun(gates={**GATES, "metrics": metrics}, own_drift=0.0)
    summary = judged(tmp_path, run, lambda number, row: at_once(row))
    assert ("token stream" not in failed_checks(summary)) is ok
    if not ok:
        assert summary["overall"] != "PASS"


def test_records_without_times_of_tokens_are_not_held_against_an_arm(tmp_path: Path) -> None:
    write_run(tmp_path, HONEST)
    path = tmp_path / "trial-01" / "requests-0.arrow"
    rows = read_table(path, REQUESTS)[0].to_pylist()
    path.unlink()
    with RecordWriter(path, REQUESTS) as writer:
        for row in rows:
            writer.append(row | {"token_ns": None})
    assert analyze(tmp_path)["overall"] == "PASS"
