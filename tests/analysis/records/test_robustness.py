"""Data that cannot carry a verdict: a reasoned INCONCLUSIVE or an error of one line; no traceback, no PASS."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tailgate.analysis.records.plain_values import number
from tailgate.analysis.records.run_records import read_run
from tailgate.analysis.records.schemas import REQUESTS
from tailgate.analysis.records.tables import RecordError, RecordWriter, read_table
from tailgate.analysis.report import write_reports
from tailgate.analysis.summary.summary import analyze, write_summary
from tests.fakes.processes import refusal
from tests.fakes.request_rows import S
from tests.fakes.runs import FakeRun, write_run

# Limits that a run of a few minutes can meet.
SLO = {"p90_ttft_ms": 2000, "p90_e2e_ms": 9000}
GATES = {"metrics": ["ttft", "e2e"], "quantiles": [0.9], "min_blocks": 8, "max_error_pct": 1.0}


class Base:
    """A run, and its requests to be changed and written again next to the rest of it."""

    def __init__(self, directory, run):
        self.directory = write_run(directory / "base", run)
        self.rows = read_table(self.directory / "trial-01" / "requests-0.arrow", REQUESTS)[0].to_pylist()

    def changed(self, target, edit, form="arrow"):
        """A copy of the run in `target` whose requests are what `edit` makes of them, a list of rows, in `form`."""
        shutil.copytree(self.directory, target)
        (target / "trial-01" / "requests-0.arrow").unlink()
        write_table(target / "trial-01" / f"requests-0.{form}", table_of(edit(self.rows)))
        return target


def table_of(rows):
    return rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows, schema=REQUESTS)


def write_table(path, table):
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    else:
        path.unlink(missing_ok=True)
        with RecordWriter(path, table.schema) as writer:
            for batch in table.to_batches():
                writer.append_batch(batch)


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """A run that passes, so that whatever is done to it could be passed by mistake."""
    return Base(tmp_path_factory.mktemp("long"), FakeRun(slo=SLO, gates=GATES, duration_s=390, rate=2))


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    return Base(tmp_path_factory.mktemp("short"), FakeRun(slo=SLO, gates=GATES, duration_s=60, rate=1))


def test_the_run_that_is_spoilt_below_passes_as_it_is(long, tmp_path):
    assert analyze(long.changed(tmp_path / "run", lambda rows: rows))["overall"] == "PASS"


def every(change, share=1):
    """Each `share`-th row changed by `change`, which takes a row and gives the columns that differ."""
    return lambda rows: [row | (change(row) if place % share == 0 else {}) for place, row in enumerate(rows)]


def tied(row):
    due = row["scheduled_ns"]
    return {"first_token_ns": due + S // 10, "end_ns": due + S, "sent_ns": due, "token_ns": None}


def nan_times(rows):
    """Every fifth end is not a number, as systems write that keep times as floats."""
    table = pa.Table.from_pylist(rows, schema=REQUESTS)
    ends = table.column("end_ns").to_numpy().astype(np.float64)
    ends[::5] = math.nan
    return table.set_column(table.schema.get_field_index("end_ns"), "end_ns", pa.array(ends))


TIMES_OF_A_REQUEST = ("scheduled_ns", "sent_ns", "first_token_ns", "end_ns")
WILD_COLUMNS = (*TIMES_OF_A_REQUEST, "trial", "prompt_tokens")
WILD = (None, 0, -1, 7, -(2**31))
DEGENERATE = {
    "no requests": lambda rows: [],
    "one request": lambda rows: rows[:1],
    "one request an arm": lambda rows: [rows[0], next(row for row in rows if row["arm"] == "compiled")],
    "all ties": every(tied),
    "all failed": every(lambda row: {"status": "UNAVAILABLE", "first_token_ns": None, "token_ns": None}),
    "all cancelled": every(lambda row: {"status": "CANCELLED", "first_token_ns": None, "token_ns": None}),
    "no control": lambda rows: [row for row in rows if row["arm"] == "compiled"],
    "not a number": nan_times,
    "clock goes back": every(lambda row: {"end_ns": row["scheduled_ns"] - S}, 5),
    "clock leaps in the middle": lambda rows: [
        row
        | {name: row[name] + 3600 * S for name in TIMES_OF_A_REQUEST if row["scheduled_ns"] > rows[390]["scheduled_ns"]}
        for row in rows
    ],
    "slow requests of one arm are ramp-up": every(lambda row: {"phase": "rampup"} if row["arm"] == "eager" else {}, 40),
    "clock goes back once": lambda rows: [rows[0] | {"end_ns": rows[0]["scheduled_ns"] - 1}, *rows[1:]],
    "clock leaps once": lambda rows: [
        rows[0] | {name: rows[0][name] + 7 * 10**18 for name in TIMES_OF_A_REQUEST},
        *rows[1:],
    ],
    "tokens go back": every(lambda row: {"token_ns": row["token_ns"][::-1]}, 5),
    "negative latencies": every(
        lambda row: {"first_token_ns": row["scheduled_ns"] - 2 * S, "end_ns": row["scheduled_ns"] - S, "token_ns": None}
    ),
    "only broken times": every(lambda row: {"end_ns": 1}),
    "no times at all": every(lambda row: {"scheduled_ns": None, "sent_ns": None, "end_ns": None}),
    "huge values": every(lambda row: {"end_ns": 2**63 - 1}, 3),
    "least values": every(lambda row: {"scheduled_ns": -(2**63), "first_token_ns": -(2**63)}, 3),
    "one block": lambda rows: [row for row in rows if row["scheduled_ns"] - rows[0]["scheduled_ns"] < 29 * S],
    "no pairs": lambda rows: [row | {"pair_id": None} for row in rows][: len(rows) // 2],
    "duplicate rows": lambda rows: rows + rows,
    "all ramp-up": every(lambda row: {"phase": "rampup"}),
    "zero latency": every(
        lambda row: {"first_token_ns": row["scheduled_ns"], "end_ns": row["scheduled_ns"], "token_ns": None}
    ),
    "wild values": lambda rows: [
        row | {WILD_COLUMNS[place % 6]: WILD[place % 5]} if place % 2 else row for place, row in enumerate(rows)
    ],
    "no first token": every(lambda row: {"first_token_ns": None}),
    "no end": every(lambda row: {"end_ns": None}),
    "no status": every(lambda row: {"status": None}),
    "unheard of status": every(lambda row: {"status": "FINE"}),
}


@pytest.mark.parametrize("name", DEGENERATE)
def test_data_that_cannot_carry_a_verdict_never_pass(name, long, tmp_path):
    summary = analyze(long.changed(tmp_path / "run", DEGENERATE[name]))
    assert summary["overall"] == "INCONCLUSIVE"
    assert not any(arm["verdict"] == "PASS" for arm in summary["arms"])
    assert all(item["reason"] for item in summary["gates"])
    write_summary(summary, tmp_path / "summary.json")
    write_reports(summary, tmp_path)


def test_a_run_without_its_experiment_never_passes(long, tmp_path):
    folder = long.changed(tmp_path / "run", lambda rows: rows)
    (folder / "experiment.toml").unlink()
    summary = analyze(folder)
    assert summary["overall"] == "INCONCLUSIVE"
    assert any(not check["ok"] and "experiment.toml" in check["reason"] for check in summary["validity"])


def test_settings_that_were_cut_at_any_line_or_changed_decide_nothing_until_they_end_with_the_mark(recorded, tmp_path):
    folder = shutil.copytree(recorded, tmp_path / "run")
    path = folder / "experiment.toml"
    lines = path.read_text().splitlines(keepends=True)
    changed = "".join(lines).replace("max_error_pct = 1.0", "max_error_pct = 9.0")
    for text in (*("".join(lines[:size]) for size in range(len(lines))), changed, changed + "[slo]\n"):
        path.write_text(text)
        assert "experiment.toml cannot be read (" in refusal(RecordError, read_run, folder)
    path.write_text(changed)
    assert refusal(RecordError, read_run, folder).endswith(": correct it, and end it with the line # edited")
    path.write_text(f"{changed}# edited\n")
    assert read_run(folder).experiment["gates"]["max_error_pct"] == 9.0


@pytest.mark.parametrize("damage", ["a flipped bit", "nothing left", "cut off"])
@pytest.mark.parametrize("table", ["requests-0", "compile_events", "steps"])
def test_a_damaged_table_never_passes(table, damage, recorded, tmp_path):
    directory = shutil.copytree(recorded, tmp_path / "run")
    path = directory / "trial-01" / f"{table}.arrow"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes({"a flipped bit": content, "nothing left": b"", "cut off": path.read_bytes()[:-60]}[damage])
    summary = analyze(directory)
    assert summary["overall"] == "INCONCLUSIVE"
    assert not any(gate["verdict"] == "PASS" for gate in summary["gates"])
    records = next(row for row in summary["validity"] if row["check"] == "complete")
    assert f"{table}.arrow is " in records["reason"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    run = FakeRun(slo=SLO, gates=GATES, duration_s=390, rate=2, checksums=True)
    directory = write_run(tmp_path_factory.mktemp("recorded") / "run", run)
    assert analyze(directory)["overall"] == "PASS"
    return directory


@pytest.mark.parametrize(
    ("copied", "words"),
    [
        (("trial-01/trial.json", "trial-02/trial.json"), "trial-02/trial.json is of another trial"),
        (("trial-01", "trial-1"), "trial-1/trial.json is of another trial"),
        (("trial-01/generator-0.json", "trial-02/generator-0.json"), "records of trial 2 begin up to 27.8 hours apart"),
        (("other/trial-02/trial.json", "trial-02/trial.json"), "records of trial 2 begin up to 2400.0 hours apart"),
    ],
)
def test_a_file_of_another_trial_never_passes(copied, words, tmp_path):
    run = FakeRun(slo=SLO, gates=GATES, duration_s=200, rate=2, trials=2)
    directory = write_run(tmp_path / "run", run)
    write_run(directory / "other", replace(run, day=100))
    source, target = (directory / name for name in copied)
    shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    reason = next(row["reason"] for row in analyze(directory)["validity"] if row["check"] == "complete")
    assert words in reason


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_a_truncated_file_of_others_is_an_error_or_decides_nothing(form, long, tmp_path):
    directory = long.changed(tmp_path / "run", lambda rows: rows, form)
    path = directory / "trial-01" / f"requests-0.{form}"
    path.write_bytes(path.read_bytes()[:-40])
    if form == "parquet":
        with pytest.raises(RecordError, match=r"requests-0\.parquet cannot be read"):
            analyze(directory)
    else:
        summary = analyze(directory)
        assert summary["overall"] == "INCONCLUSIVE"
        assert any("cut off at its end" in check["reason"] for check in summary["validity"] if not check["ok"])


def test_a_number_fits_a_float():
    assert [number(value) for value in (3, 1e300, 10**400, math.nan, -math.inf, True, "3")] == [3.0, *[None] * 6]


@pytest.mark.parametrize(
    "changes",
    [
        {"duration_s": 1e300},
        {"trial": 2**70, "start_ns": 2**70},
        {"arms": [{}], "deaths": [None], "planned": "x", "block_s": -1},
        {"weights": {"a": "b"}, "startup": [], "answers": True, "design": 0},
    ],
)
def test_no_values_in_trial_json_make_a_traceback(changes, short, tmp_path):
    directory = short.changed(tmp_path / "run", lambda rows: rows)
    change_trial(directory, changes)
    with contextlib.suppress(RecordError):
        assert analyze(directory)["overall"] == "INCONCLUSIVE"


@pytest.mark.parametrize("key", ["start_ns", "arms"])
def test_a_trial_that_does_not_say_when_it_began_or_of_what_never_passes(key, tmp_path):
    directory = write_run(tmp_path / "run", FakeRun(slo=SLO, gates=GATES, duration_s=200, rate=2, trials=2))
    change_trial(directory, {key: None})
    reasons = [check["reason"] for check in analyze(directory)["validity"] if not check["ok"]]
    assert reasons == [f"The records are damaged: trial 1 has no {key} in trial.json."]


def change_trial(directory, changes):
    path = directory / "trial-01" / "trial.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def gate(summary, name):
    return next(item for item in summary["gates"] if (item["arm"], item["gate"]) == ("compiled", name))


def row_of(summary, arm):
    return next(item for item in summary["arms"] if item["name"] == arm)


def some_time_out(rows):
    """One in five of the arm's requests ends by its deadline without a token; its row says that it was over at once."""
    found = []
    for place, row in enumerate(rows):
        lost = row["arm"] == "compiled" and place % 5 == 0
        end = {"status": "DEADLINE_EXCEEDED", "first_token_ns": None, "token_ns": None, "output_tokens": 0}
        found.append(row | end | {"end_ns": row["scheduled_ns"] + 1000} if lost else row)
    return found


def test_a_timeout_counts_at_least_as_its_deadline_at_the_tail_and_is_no_good_request(long, tmp_path):
    directory = long.changed(tmp_path / "run", some_time_out)
    text = (directory / "experiment.toml").read_text().replace("max_error_pct = 1.0", "max_error_pct = 50")
    (directory / "experiment.toml").write_text(text)
    timed_out = analyze(directory)
    # The deadline is 60 s, and one in five puts p90 there. Dropped, or taken as they end, they would pass.
    for metric in ("ttft", "e2e"):
        assert row_of(timed_out, "compiled")["metrics"][metric]["p90_ms"] >= 60_000
        assert gate(timed_out, f"noninferiority p90_{metric}")["value"] > 10
        assert gate(timed_out, f"noninferiority p90_{metric}")["verdict"] != "PASS"
        assert gate(timed_out, f"slo p90_{metric}_ms")["verdict"] == "FAIL"
    good = {arm["name"]: arm["goodput_rps"] for arm in timed_out["arms"]}
    assert good["compiled"] == pytest.approx(0.8 * good["eager"], rel=0.002)
