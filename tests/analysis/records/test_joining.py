"""Several runs read as one: what each trial and request is called, and which runs are refused."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailgate.analysis.records.documents import write_document
from tailgate.analysis.records.joining import joined_search, listed_runs, names_of, write_run_list
from tailgate.analysis.records.run_records import check_runs, read_run
from tailgate.analysis.records.schemas import COMPILE_EVENTS, MACHINES
from tailgate.analysis.records.tables import RecordError, RecordWriter
from tailgate.analysis.run.run import Run
from tests.fakes.processes import refusal
from tests.fakes.request_rows import append_rows
from tests.fakes.runs import EAGER, SEPARATE_DAYS, Compile, FakeArm, FakeRun, write_run

SHORT = FakeRun(duration_s=30, rate=1, trials=2)
COMPILING = FakeArm(name="compiled", compiles=(Compile(at_s=10, seconds=2),))


def runs_in(folder: Path, *runs: FakeRun) -> list[Path]:
    """One run a day, each with a seed of its own."""
    return [
        write_run(folder / f"run-{day}", replace(run, seed=day + 1, day=day * SEPARATE_DAYS))
        for day, run in enumerate(runs)
    ]


def joined(folder: Path, directories: list[Path], *accepted: str) -> Any:
    listed = listed_runs(directories, accepted)
    check_runs(listed)
    write_run_list(folder, listed)
    return read_run(folder)


def not_joined(*directories: Path, accepted: tuple[str, ...] = ()) -> str:
    return refusal(RecordError, lambda: check_runs(listed_runs(directories, accepted)))


def changed(run: Path, old: str, new: str) -> Path:
    text = (run / "experiment.toml").read_text()
    assert old in text
    (run / "experiment.toml").write_text(text.replace(old, new))
    return run


def test_trials_are_numbered_in_order_of_time_whatever_the_order_of_the_runs(tmp_path):
    late, early = runs_in(tmp_path, SHORT, SHORT)[::-1]
    records = joined(tmp_path / "joined", [late, early])
    assert [info["trial"] for info in records.trials] == [1, 2, 3, 4]
    starts = [info["start_ns"] for info in records.trials]
    assert starts == sorted(starts)
    assert [run.name for run in records.runs] == ["run-0", "run-1"]
    assert [dict(run.trials) for run in records.runs] == [{1: 1, 2: 2}, {1: 3, 2: 4}]
    assert np.unique(records.requests.trial).tolist() == [1, 2, 3, 4]
    assert [account["trial"] for account in records.generators] == [1, 2, 3, 4]


def test_trials_of_runs_that_took_turns_are_numbered_by_their_starts(tmp_path):
    one = write_run(tmp_path / "a", replace(SHORT, seed=1))
    other = write_run(tmp_path / "b", replace(SHORT, seed=2, day=1))
    records = joined(tmp_path / "joined", [one, other])
    assert [dict(run.trials) for run in records.runs] == [{1: 1, 2: 3}, {1: 2, 2: 4}]


def test_ids_that_two_runs_share_stay_those_of_two_requests(tmp_path):
    directories = runs_in(tmp_path, SHORT, SHORT)
    alone = read_run(directories[0]).requests
    records = joined(tmp_path / "joined", directories)
    first, second = np.split(records.requests.pair, [len(alone)])
    assert not set(first) & set(second)
    assert len(set(first)) == len(set(second)) == len(set(alone.pair))
    assert Run.of(records).requests.dropped == 0
    assert records.requests.end_ms[: len(alone)].tolist() == alone.end_ms.tolist()


def test_events_keep_to_their_requests(tmp_path):
    run = replace(SHORT, arms=(EAGER, COMPILING), rate=4)
    directories = runs_in(tmp_path, run, run)
    path = directories[1] / "trial-02" / "compile_events.arrow"
    row = {"trial": 2, "arm": "compiled", "replica": "compiled-0", "kind": "recompile", "start_ns": 1, "end_ns": 2}
    named = {**row, "event_id": "2-compiled-0-7", "request_ids": ["2-1-compiled", None]}
    append_rows(path, COMPILE_EVENTS, [named, row])
    records = joined(tmp_path / "joined", directories)
    events = records.events.to_pylist()
    assert {event["trial"] for event in events} == {1, 2, 3, 4}
    assert "2.2-compiled-0-7" in {event["event_id"] for event in events}
    assert events[-1]["event_id"] is None
    assert events[-1]["request_ids"] is None
    assert events[-2]["request_ids"] == ["2-1-compiled", None]
    run = Run.of(records)
    hit = [rows for event, rows in zip(run.events, run.attribution.event_requests, strict=True) if event.request_ids]
    assert [np.unique(run.requests.trial[rows]).tolist() for rows in hit if rows.size] == [[1], [2], [3], [4]]


def test_steps_and_samples_of_machines_follow_their_trial(tmp_path):
    directories = runs_in(tmp_path, SHORT, SHORT)
    for directory in directories:
        with RecordWriter(directory / "trial-02" / "machines.arrow", MACHINES) as writer:
            writer.append({"kind": "host", "name": "run", "at_ns": 5})
    records = joined(tmp_path / "joined", directories)
    assert records.machines.column("trial").to_pylist() == [2, 4]
    assert sorted(set(records.steps.column("trial").to_pylist())) == [1, 2, 3, 4]


def test_problems_name_the_run(tmp_path):
    checksums = replace(SHORT, checksums=True)
    directories = runs_in(tmp_path, checksums, checksums)
    path = directories[1] / "trial-01" / "requests-0.arrow"
    path.write_bytes(path.read_bytes()[:-40])
    problems = joined(tmp_path / "joined", directories).problems
    assert problems == ("run-1/trial-01/requests-0.arrow is cut off at its end",)


def test_of_parity_before_the_traffic_the_worst_counts(tmp_path):
    directories = runs_in(tmp_path, SHORT, SHORT)
    for directory, verdict in zip(directories, ("PASS", "FAIL"), strict=True):
        arms = [{"name": "compiled", "verdict": verdict, "reasons": []}]
        write_document(directory / "parity.json", {"verdict": verdict, "arms": arms})
    parity = joined(tmp_path / "joined", directories).parity
    assert (parity["verdict"], parity["arms"][0]["verdict"]) == ("FAIL", "FAIL")
    (directories[1] / "parity.json").unlink()
    assert read_run(tmp_path / "joined").parity is None, "one run measured nothing"


def test_names_have_as_much_of_the_path_as_tells_runs_apart():
    assert names_of([Path("/x/a/one"), Path("/x/b/two")]) == ["one", "two"]
    assert names_of([Path("/x/a/one"), Path("/x/b/one")]) == ["a/one", "b/one"]


def test_of_searches_an_arm_is_dropped_that_each_dropped():
    slow, late = ({"arm": arm, "reason": f"{arm} was too slow"} for arm in ("compiled", "other"))
    first = {"budget_s": 600.0, "spent_s": 500.0, "stop": "done", "left": [slow, late]}
    second = {**first, "spent_s": 590.0, "stop": "10 s are left", "left": [slow]}
    assert joined_search([first, None]) is None, "one of them is no search"
    assert joined_search([first]) == first
    both = joined_search([first, second])
    assert (both["budget_s"], both["spent_s"], both["left"]) == (1200.0, 1090.0, [slow])
    assert both["stop"] == "done; 10 s are left"
    cut = {"budget_s": 600.0, "stop": "", "left": []}
    both = joined_search([first, cut])
    assert (both["stop"], both["left"]) == ("", [])
    assert "spent_s" not in both


TORCH = replace(SHORT, environment={"versions": {"torch": "2.12.0"}})
TUNED = FakeArm(name="compiled", config={"compile": {"mode": "max-autotune"}})
FLOAT8 = FakeArm(name="compiled", config={"model": {"quantisation": "float8-per-row"}})
QUANTISED = replace(SHORT, arms=(EAGER, FLOAT8), environment={"versions": {"torchao": "0.14"}})


@pytest.mark.parametrize(
    ("first", "other", "said"),
    [
        (SHORT, {"gates": {"margin": 0.2}}, "gates.margin 0.2 (in run-0 not given)"),
        (SHORT, {"slo": {"p99_ttft_ms": 500}}, "slo.p99_ttft_ms 500"),
        (SHORT, {"duration_s": 60}, "traffic.duration_s 60 (in run-0 30)"),
        (SHORT, {"arms": (EAGER, TUNED)}, "arms.compiled.compile.mode max-autotune (in run-0 not given)"),
        (TORCH, {"environment": {"versions": {"torch": "2.13.0"}}}, "versions.torch 2.13.0 (in run-0 2.12.0)"),
        (TORCH, {"environment": {**TORCH.environment, "gpus": ["NVIDIA H200, 580.1"]}}, "gpus NVIDIA H200"),
        (TORCH, {"environment": {"versions": {"torch": "2.12.0", "tailgate": "0.2"}}}, "versions.tailgate 0.2"),
        (QUANTISED, {"environment": {"versions": {"torchao": "0.15"}}}, "versions.torchao 0.15 (in run-0 0.14)"),
    ],
)
def test_a_difference_is_refused_with_both_values_and_the_option_that_allows_it(tmp_path, first, other, said):
    message = not_joined(*runs_in(tmp_path, first, replace(first, **other)))
    assert "since they differ (run-1: " in message
    assert said in message
    assert f"--allow-different {said.split()[0]}" in message


def test_other_arms_can_never_be_joined(tmp_path):
    one, other = runs_in(tmp_path, SHORT, replace(SHORT, arms=(EAGER, FakeArm(name="faster"))))
    said = not_joined(one, other, accepted=("arms",))
    assert said.endswith(
        "(run-1: arms eager, faster (in run-0 compiled, eager)): join runs of one experiment on one kind of machine, "
        "arms must be the same"
    )
    other = write_run(tmp_path / "split", replace(SHORT, seed=9, design="split", day=5 * SEPARATE_DAYS))
    assert "traffic.design split (in run-0 mirrored)" in not_joined(one, other, accepted=("traffic",))


def test_what_is_accepted_is_said_and_counts_as_in_the_first_run(tmp_path):
    directories = runs_in(tmp_path, replace(SHORT, gates={"margin": 0.1}), replace(SHORT, gates={"margin": 0.2}))
    records = joined(tmp_path / "joined", directories, "gates")
    assert records.experiment["gates"]["margin"] == 0.1
    assert records.differences == ("run-1: gates.margin 0.2 (in run-0 0.1)",)


def test_the_environment_of_joined_runs_is_what_they_share(tmp_path):
    one = {"git_commit": "a", "memory_bytes": 32, "versions": {"torch": "2.12.0"}}
    runs = (replace(SHORT, environment=one), replace(SHORT, environment={**one, "memory_bytes": 64}))
    assert joined(tmp_path / "joined", runs_in(tmp_path, *runs)).environment == {
        key: one[key] for key in ("git_commit", "versions")
    }


def test_where_and_how_often_may_differ_and_cards_of_one_kind_are_one(tmp_path):
    card = FakeArm(name="compiled", config={"model": {"device": "cuda:0"}})
    other_card = FakeArm(name="compiled", config={"model": {"device": "cuda:1"}})
    one, other = runs_in(
        tmp_path,
        replace(SHORT, arms=(EAGER, card), environment={"gpus": ["NVIDIA H200, 580.1"], "git_commit": "a"}),
        replace(
            SHORT,
            arms=(EAGER, other_card),
            trials=1,
            environment={"gpus": ["NVIDIA H200, 575.2", "NVIDIA H200, 575.2"], "git_commit": "b"},
        ),
    )
    for run, port in ((one, 1), (other, 2)):
        changed(run, "[traffic]", f'[traffic]\ntrace = "/data/{port}/week.csv"\nmaster_bind = "10.0.0.{port}"')
        changed(run, "[trials]", f"[splitter]\nport = {port}\n[machines]\nsample_s = {port}\n[trials]")
    assert [run.name for run in check_runs(listed_runs([one, other]))] == ["run-0", "run-1"]
    changed(other, "week.csv", "month.csv")
    assert "traffic.trace month.csv (in run-0 week.csv)" in not_joined(one, other)


def test_one_run_given_twice_is_refused_also_as_a_copy(tmp_path):
    one, other = runs_in(tmp_path, SHORT, SHORT)
    copy = Path(shutil.copytree(one, tmp_path / "copy"))
    assert "is given twice" in not_joined(one, one)
    assert "is given twice" in not_joined(one, other / ".." / "run-0")
    for run in (copy, changed(copy, "seed = 1", "seed = 7")):
        assert "run-0 and copy hold the same trial, of one start: leave one out" in not_joined(one, run, other)


def test_bare_tables_and_runs_without_trials_are_refused(tmp_path):
    (one,) = runs_in(tmp_path, SHORT)
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(one / "trial-01" / "requests-0.arrow", bare / "requests.arrow")
    assert not_joined(one, bare) == "bare has no experiment.toml, so what it ran is unknown: give another run"
    shutil.copy(one / "experiment.toml", bare / "experiment.toml")
    assert not_joined(one, bare) == "bare has no trial with a trial.json: give another run"
    (bare / "requests.arrow").unlink()
    assert "bare holds no requests*.arrow" in not_joined(one, bare)


def test_a_list_that_cannot_be_followed_is_refused_in_a_line(tmp_path):
    directories = runs_in(tmp_path, SHORT, SHORT)
    folder = tmp_path / "joined"
    joined(folder, directories)
    path = folder / "runs.json"
    good = path.read_text()
    for content, said in (
        (good.replace("run-1", "run-9"), "is not as it was written"),
        ('{"runs": ["../run-9"]}', "names ../run-9, which is not the directory of one run"),
        ('{"runs": "../run-1"}', "does not name its runs as a list of paths"),
        ('{"runs": []}', "does not name its runs"),
        ('{"runs": ["../joined"]}', "names ../joined, which is not the directory of one run"),
        ("[", "is not readable JSON"),
    ):
        path.write_text(content)
        assert said in refusal(RecordError, read_run, folder)
