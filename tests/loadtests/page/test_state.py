from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.records.documents import write_document
from analysis.records.tables import RecordWriter
from loadtests.page import tails
from loadtests.page.history import History
from loadtests.page.state import RunState, judged_folder
from loadtests.page.tails import DocumentsTail, LinesTail, TableTail
from tests.fakes.live_runs import START_NS, WatchedRun
from tests.fakes.request_rows import append_rows


@pytest.fixture
def run(tmp_path: Path) -> WatchedRun:
    return WatchedRun(folder=tmp_path / "20260101T000000Z-canary")


def told(run: WatchedRun) -> dict[str, Any]:
    state = RunState(run.folder)
    state.refresh()
    whole = state.whole()
    json.dumps(whole, allow_nan=False)
    return whole


def test_compiles_while_serving_are_listed_and_those_of_warm_ups_counted(run: WatchedRun) -> None:
    run.compiled(20.0, phase="warmup", arm="compiled-padded")
    run.at_s = 50
    run.compiled(4.0)
    run.compiled(2.0)
    whole = told(run)
    events = whole["series"]["events"][1]
    assert [(event["arm"], event["seconds"], event["hit"]) for event in events] == [
        ("compiled-naive", 4.0, 12),
        ("compiled-naive", 2.0, 6),
    ]
    assert events[0]["shape"] == "prefill 4×50"
    assert "size mismatch" in events[0]["reason"]
    assert events[0]["at_ns"] == START_NS + 46 * 10**9
    padded, naive = whole["compiles"]["compiled-padded"], whole["compiles"]["compiled-naive"]
    assert (padded["warmup"], padded["warmup_s"], padded["serving"]) == (1, 20.0, 0)
    assert (naive["serving"], naive["serving_s"], naive["longest_s"], naive["hit"]) == (2, 6.0, 4.0, 18)


def test_one_failed_arm_decides_and_all_must_pass(run: WatchedRun) -> None:
    run.minutes(1, decided=True)
    assert told(run)["now"]["decided"] == "FAIL"
    for last, decided in (("PASS", "PASS"), (None, None)):
        decisions = dict(zip(run.arms[1:], ("PASS", last), strict=True))
        line = {"number": 3, "seconds": 180.0, "arms": {arm: {"decision": each} for arm, each in decisions.items()}}
        with (run.folder / "interim.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        assert told(run)["now"]["decided"] == decided


def test_a_preview_decides_nothing(run: WatchedRun) -> None:
    run.minutes(1, decided=True)
    (run.folder / "interim.jsonl").rename(run.folder / "preview.jsonl")
    state = told(run)
    assert state["now"]["decided"] is None
    assert (state["look"]["sequential"], state["look"]["decides"]) == (True, False)
    assert {arm["decision"] for arm in state["look"]["arms"].values()} == {None}
    assert {gate["decided_s"] for gate in state["look"]["gates"]} == {None}
    assert {gate["verdict"] for gate in state["look"]["gates"]} == {"PASS", "FAIL"}


@pytest.mark.parametrize(
    ("gates", "phase", "wanted"),
    [
        ("", "traffic", True),
        ("sequential = false", "traffic", True),
        ("sequential = true", "traffic", False),
        ("", "stopping", False),
    ],
)
def test_a_preview_is_for_traffic_of_a_run_that_is_judged_at_its_end(
    run: WatchedRun, gates: str, phase: str, wanted: bool
) -> None:
    (run.folder / "experiment.toml").write_text(f"[gates]\n{gates}\n")
    run.status(phase)
    state = RunState(run.folder)
    state.refresh()
    assert state.wants_preview == wanted


def test_a_phase_is_part_of_a_state(run: WatchedRun) -> None:
    phases = ("measuring the machines", "traffic", "waiting for the last answers", "judging", "stopping")
    states = []
    for phase in phases:
        run.status(phase)
        states.append(told(run)["now"]["state"])
    assert states == ["starting", "load", "load", "judging", "closing"]
    run.minutes(1)
    run.status("measuring the machines")
    assert told(run)["now"]["state"] == "closing"


def test_the_share_of_a_processor_counter_has_a_value_from_its_second_sample_on(run: WatchedRun) -> None:
    run.second()
    run.second()
    first, second = (sample["things"]["run"]["steal_pct"] for sample in told(run)["series"]["machines"][1])
    assert (first, second) == (None, pytest.approx(0.1, abs=0.05))


def test_weights_are_steps(run: WatchedRun) -> None:
    line = {"at_ns": START_NS, "weights": {"eager": 90, "compiled-padded": 10, "x": "y"}, "why": "it passed"}
    (run.folder / "weights.jsonl").write_text(json.dumps(line) + "\n")
    weights = {"eager": 90.0, "compiled-padded": 10.0, "x": None}
    assert told(run)["series"]["weights"][1] == [{"at_ns": START_NS, "weights": weights, "why": "it passed"}]


def test_a_report_may_lie_beside_the_run_and_nowhere_else(run: WatchedRun) -> None:
    joined = run.folder.parent / f"{run.folder.name}-joined"
    joined.mkdir()
    (joined / "report.html").write_text("the joined one")
    run.status("judging", ended={"complete": True, "judged": joined.name})
    assert judged_folder(run.folder) == joined
    state = RunState(run.folder)
    state.refresh()
    assert state.whole()["now"]["ended"]["report"]
    for name in ("", ".", "..", "../x", "a/b", "/etc", "x\0", 3, None):
        run.status("judging", ended={"complete": True, "judged": name})
        assert judged_folder(run.folder) == run.folder, name


def test_an_arm_of_a_search_that_ran_without_a_judged_step_was_tried(run: WatchedRun) -> None:
    run.search(1, "eager")
    run.search(1, "compiled-padded")
    assert [arm["standing"] for arm in told(run)["search"]["held"]] == ["waits", "tried now", "not tried yet"]
    run.search(1, stop="the budget was spent")
    assert [arm["standing"] for arm in told(run)["search"]["held"]] == ["tried", "tried", "not tried"]


@pytest.mark.parametrize("content", [None, 3, "x", [], [[]], {"a": {"b": []}}, float("1e308"), -1, True])
def test_files_of_any_content_raise_nothing(run: WatchedRun, content: Any) -> None:
    keys = ("phase", "detail", "trial", "trials", "replicas", "load", "notes", "at_ns", "ended", "planned")
    write_document(run.folder / "status.json", dict.fromkeys(keys, content))
    keys = ("look", "seconds", "arms", "gates", "checks", "groups", "sequential")
    gate = dict.fromkeys(("arm", "gate", "value", "low", "limit", "verdict", "reason"), content)
    lines = [dict.fromkeys(keys, content), {"gates": [gate], "checks": [gate], "arms": {"a": content}}]
    lines += [dict.fromkeys(("arms", "rates", "held", "trial", "spent_s", "stop"), content)]
    held = dict.fromkeys(("arm", "low_rps", "seen_rps", "high_rps", "starts", "steps", "left"), content)
    lines += [{"arms": [content], "rates": [content], "held": [held, content]}]
    for name in ("interim.jsonl", "load.jsonl", "weights.jsonl", "search.jsonl"):
        (run.folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run.folder / "experiment.toml").write_text("[[")
    (run.folder / "trial-x").mkdir()
    told(run)


def test_what_would_turn_or_drive_a_terminal_is_left_out(run: WatchedRun) -> None:
    run.notes = ["a\x1b[2Jb\u202ec", "d" * 9000]
    run.status()
    notes = told(run)["notes"]
    assert notes[0] == "a[2Jbc"
    assert len(notes[1]) == 2000


SCHEMA = pa.schema([("name", pa.string()), ("n", pa.int64()), ("more", pa.string())])


def test_only_whole_lines_are_read_and_each_once(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    tail = LinesTail(file)
    assert list(tail.new()) == []
    file.write_bytes(b"a\nb\nhal")
    assert list(tail.new()) == [b"a", b"b"]
    assert list(tail.new()) == []
    with file.open("ab") as more:
        more.write(b"f\nc\n")
    assert list(tail.new()) == [b"half", b"c"]


def test_a_replaced_file_is_read_again_and_a_line_longer_than_any_of_ours_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tails, "_AT_ONCE", 64)
    monkeypatch.setattr(tails, "_LONGEST_LINE", 32)
    file = tmp_path / "lines"
    file.write_bytes(b"a\n")
    tail = LinesTail(file)
    assert (list(tail.new()), tail.restarts) == ([b"a"], 0)
    (tmp_path / "other").write_bytes(b"b\n" + b"x" * 200 + b"\nlast\n")
    (tmp_path / "other").replace(file)
    read = [line for _ in range(9) for line in tail.new()]
    assert (read[0], read[-1], tail.restarts) == (b"b", b"last", 1)


def test_rows_of_a_growing_table_come_once_and_again_after_a_new_start(tmp_path: Path) -> None:
    file = tmp_path / "events.arrow"
    tail, newest = TableTail(file, {"n"}), TableTail(file, {"n"}, newest_only=True)
    with RecordWriter(file, SCHEMA) as writer:
        for number in range(2):
            writer.append(row(number))
            writer.flush()
            assert tail.new() == [{"n": number}]
            assert tail.new() == []
        assert newest.new() == [{"n": 1}]
    append_rows(tmp_path / "ended.arrow", SCHEMA, [row(0), row(1), row(7)])
    (tmp_path / "ended.arrow").replace(file)
    assert tail.new() == [{"n": 0}, {"n": 1}, {"n": 7}]


def test_documents_are_tables_of_json_alone(tmp_path: Path) -> None:
    file = tmp_path / "interim.jsonl"
    deep = "[" * 100_000
    file.write_text(f'{{"look": 1, "value": NaN}}\nnull\n[1]\n{{"torn\n{deep}\n\n{json.dumps({"look": 2})}\n')
    assert list(DocumentsTail(file).new()) == [{"look": 1, "value": None}, {"look": 2}]


def row(number: int) -> dict[str, object]:
    return {"name": f"row {number}", "n": number, "more": "x" * 1000}


def test_damage_shows_less_and_raises_nothing(tmp_path: Path) -> None:
    file = tmp_path / "events.arrow"
    with RecordWriter(file, SCHEMA) as writer:
        for number in range(2):
            writer.append(row(number))
            writer.flush()
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert TableTail(file, {"n"}).new() in ([], [{"n": 0}])
    file.write_bytes(b"\0" * len(whole))
    assert TableTail(file, {"n"}).new() == []
    file.unlink()
    assert TableTail(file, {"n"}).new() == []


def test_a_batch_that_is_being_written_comes_when_it_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "events.arrow"
    with RecordWriter(file, SCHEMA) as writer:
        for number in range(3):
            writer.append(row(number))
            writer.flush()
    whole = file.read_bytes()
    file.write_bytes(b"")
    tail, seen = TableTail(file, {"n"}), []
    for size in range(0, len(whole), 97):
        with file.open("ab") as growing:
            growing.write(whole[size : size + 97])
        seen += tail.new()
    assert seen == [{"n": 0}, {"n": 1}, {"n": 2}]


def items(numbers: range) -> list[dict[str, int]]:
    return [{"n": number} for number in numbers]


@given(st.lists(st.integers(0, 9), max_size=60), st.booleans(), st.integers(4, 12))
def test_changes_replayed_are_the_history(steps: list[int], newest: bool, most: int) -> None:
    history = History(most, newest=newest)
    replayed: list[dict[str, int]] = []
    at = 0
    for step in steps:
        history.add(items(range(at, at + step)))
        at += step
        change = history.take_changes()
        assert (change is None) == (step == 0)
        if change is not None:
            replayed[change[0] :] = change[1]
        assert replayed == history.items


def test_of_events_the_newest_are_kept() -> None:
    history = History(8, newest=True)
    history.add(items(range(21)))
    assert history.items[-1] == {"n": 20}
    assert [item["n"] for item in history.items] == list(range(21 - len(history.items), 21))
