"""Several runs read as one: what each trial and request is called, and which runs are refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from analysis.records.documents import write_document
from analysis.records.joining import names_of
from analysis.records.run_list import RunList, listed_runs, write_run_list
from analysis.records.run_records import check_runs, read_run
from analysis.records.schemas import BED
from analysis.records.tables import RecordError, RecordWriter
from tests.fakes.request_rows import row, write_rows
from tests.fakes.runs import DAYS_APART, EAGER, Compile, FakeArm, FakeRun, write_run

SHORT = FakeRun(duration_s=30, rate=1, trials=2)
COMPILING = FakeArm(name="compiled", compiles=(Compile(at_s=10, seconds=2),))


def runs_in(folder: Path, *runs: FakeRun) -> list[Path]:
    """One run a day, each with a seed of its own."""
    return [
        write_run(folder / f"run-{day}", replace(run, seed=day + 1, day=day * DAYS_APART))
        for day, run in enumerate(runs)
    ]


def joined(folder: Path, directories: list[Path], *accepted: str) -> Any:
    listed = listed_runs(directories, accepted)
    check_runs(listed)
    write_run_list(folder, listed)
    return read_run(folder)


def refusal(*directories: Path, accepted: tuple[str, ...] = ()) -> str:
    with pytest.raises(RecordError) as refused:
        check_runs(listed_runs(directories, accepted))
    assert "\n" not in str(refused.value)
    return str(refused.value)


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
    assert [run.documents.name for run in records.runs] == ["run-0", "run-1"]
    assert [dict(run.trials) for run in records.runs] == [{1: 1, 2: 2}, {1: 3, 2: 4}]
    assert sorted(set(records.requests.column("trial").to_pylist())) == [1, 2, 3, 4]
    assert [account["trial"] for account in records.generators] == [1, 2, 3, 4]


def test_runs_that_took_turns_are_numbered_as_their_trials_were_made(tmp_path):
    one = write_run(tmp_path / "a", replace(SHORT, seed=1))
    other = write_run(tmp_path / "b", replace(SHORT, seed=2, day=1))
    records = joined(tmp_path / "joined", [one, other])
    assert [dict(run.trials) for run in records.runs] == [{1: 1, 2: 3}, {1: 2, 2: 4}]


def test_ids_that_two_runs_share_stay_those_of_two_requests(tmp_path):
    directories = runs_in(tmp_path, SHORT, SHORT)
    alone = read_run(directories[0]).requests
    records = joined(tmp_path / "joined", directories)
    for name in ("request_id", "session_id"):
        ids = records.requests.column(name).to_pylist()
        own = alone.column(name).to_pylist()
        assert ids[: len(own)] == [f"1.{text}" for text in own]
        assert ids[len(own) :] == [f"2.{text}" for text in own]
    first, second = np.split(records.requests.column("pair_id").to_numpy(), [alone.num_rows])
    assert not set(first) & set(second)
    assert records.requests.schema.field("request_id").type == pa.string()
    assert records.requests.column("end_ns").to_pylist()[: alone.num_rows] == alone.column("end_ns").to_pylist()


def test_events_keep_to_their_requests_and_to_their_replicas_numbers(tmp_path):
    run = replace(SHORT, arms=(EAGER, COMPILING), rate=4)
    directories = runs_in(tmp_path, run, run)
    path = directories[1] / "trial-02" / "compile_events.arrow"
    row = {"trial": 2, "arm": "compiled", "replica": "compiled-0", "kind": "recompile", "start_ns": 1, "end_ns": 2}
    with RecordWriter(path, read_run(directories[1]).events.schema) as writer:  # type: ignore[union-attr]
        writer.append({**row, "event_id": "2-compiled-0-7", "request_ids": ["2-1-compiled", None]})
        writer.append(row)
    records = joined(tmp_path / "joined", directories)
    events = records.events.to_pylist()
    assert {event["trial"] for event in events} == {1, 2, 3, 4}
    assert "4-compiled-0-7" in {event["event_id"] for event in events}, "a replica's own count can still be followed"
    assert events[-1]["event_id"] is None
    assert events[-1]["request_ids"] is None
    assert events[-2]["request_ids"] == ["2.2-1-compiled", None]
    served = {event["request_ids"][0]: event["trial"] for event in events[:-2] if event["request_ids"]}
    rows = dict(zip(*(records.requests.column(name).to_pylist() for name in ("request_id", "trial")), strict=True))
    assert len(served) == 4
    assert {name: rows[name] for name in served} == served


def test_steps_and_samples_of_machines_follow_their_trial(tmp_path):
    directories = runs_in(tmp_path, SHORT, SHORT)
    for directory in directories:
        with RecordWriter(directory / "trial-02" / "bed.arrow", BED) as writer:
            writer.append({"kind": "host", "name": "run", "at_ns": 5})
    records = joined(tmp_path / "joined", directories)
    assert records.bed.column("trial").to_pylist() == [2, 4]
    assert sorted(set(records.steps.column("trial").to_pylist())) == [1, 2, 3, 4]


def test_a_trial_that_was_planned_and_is_missing_keeps_its_number(tmp_path):
    directories = runs_in(tmp_path, replace(SHORT, trials=3), SHORT)
    shutil.rmtree(directories[0] / "trial-03")
    records = joined(tmp_path / "joined", directories)
    assert records.experiment["trials"]["count"] == 5
    assert [info["trial"] for info in records.trials] == [1, 2, 4, 5]


def test_rows_of_a_trial_that_the_run_does_not_have_stay_without_one(tmp_path):
    directories = runs_in(tmp_path, SHORT, SHORT)
    write_rows(directories[0] / "trial-01" / "requests-1.arrow", [row(1, trial=3)])
    records = joined(tmp_path / "joined", directories)
    assert set(records.requests.column("trial").to_pylist()) - {1, 2, 3, 4} == {5}


def test_problems_name_the_run(tmp_path):
    stated = replace(SHORT, stated=True)
    directories = runs_in(tmp_path, stated, stated)
    path = directories[1] / "trial-01" / "requests-0.arrow"
    path.write_bytes(path.read_bytes()[:-40])
    write_document(directories[0] / "export.json", {"problems": ["trial-01/steps.arrow was damaged"]})
    problems = joined(tmp_path / "joined", directories).problems
    assert problems[0] == "run-0: trial-01/steps.arrow was damaged"
    assert problems[1].startswith("run-1/trial-01/requests-0.arrow is cut off")
    assert len(problems) == 2


def test_the_machine_is_that_of_the_environment_or_of_the_bed_or_unknown(tmp_path):
    directories = runs_in(tmp_path, replace(SHORT, environment={"machine": "0123456789ab"}), SHORT, SHORT)
    path = directories[1] / "trial-01" / "trial.json"
    info = json.loads(path.read_text())
    path.write_text(json.dumps({**info, "bed": {"machines": {"run": {"machine": "ba9876543210"}}}}))
    records = joined(tmp_path / "joined", directories)
    assert [run.documents.machine for run in records.runs] == ["0123456789ab", "ba9876543210", ""]
    assert records.environment["machine"] == "0123456789ab; unknown"


def test_of_numbers_that_differ_from_machine_to_machine_none_is_given(tmp_path):
    small, large = ({"memory_bytes": size, "cpu": {"model": "Xeon", "count": size}} for size in (32, 64))
    records = joined(tmp_path / "joined", runs_in(tmp_path, *(replace(SHORT, environment=it) for it in (small, large))))
    assert records.environment["memory_bytes"] is None
    assert records.environment["cpu"] == {"model": "Xeon", "count": None}


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (["H100, 580"] * 2, ["H100, 580"] * 2, ["H100, 580"] * 2),
        (["H100, 580"], ["H100, 580"] * 2, ["H100, 580"] * 2),
        (["H100, 580"] * 2, ["H100, 575"], ["H100, 580", "H100, 580", "H100, 575"]),
    ],
)
def test_cards_of_a_kind_stay_as_many_as_one_run_has(tmp_path, one, other, both):
    directories = runs_in(tmp_path, *(replace(SHORT, environment={"gpus": gpus}) for gpus in (one, other)))
    assert joined(tmp_path / "joined", directories).environment["gpus"] == both


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


# --- What is refused --------------------------------------------------------------------------------------------------


def test_what_differs_is_listed_with_both_values_and_the_way_out(tmp_path):
    one, other = runs_in(
        tmp_path, SHORT, replace(SHORT, gates={"margin": 0.2}, slo={"p99_ttft_ms": 500}, duration_s=60)
    )
    said = refusal(one, other)
    assert "run-1 differs from run-0 in gates.margin 0.2 (there not given)" in said
    assert "slo.p99_ttft_ms 500" in said
    assert "traffic.duration_s 60 (there 30)" in said
    assert said.endswith("--allow-different gates.margin,slo.p99_ttft_ms,traffic.duration_s")


@pytest.mark.parametrize(
    ("environment", "key"),
    [
        ({"versions": {"torch": "2.13.0"}}, "versions.torch 2.13.0 (there 2.12.0)"),
        ({"versions": {"torch": "2.12.0"}, "gpus": ["NVIDIA H200, 580.1"]}, "gpus NVIDIA H200 (there not given)"),
        ({"versions": {"torch": "2.12.0", "tailgate": "0.2"}}, "versions.tailgate 0.2 (there not given)"),
    ],
)
def test_other_software_and_other_cards_are_refused(tmp_path, environment, key):
    first = replace(SHORT, environment={"versions": {"torch": "2.12.0"}})
    assert key in refusal(*runs_in(tmp_path, first, replace(first, environment=environment)))


def test_an_arm_that_was_resolved_otherwise_is_refused(tmp_path):
    arms = (EAGER, FakeArm(name="compiled", config={"compile": {"enabled": True, "mode": "max-autotune"}}))
    said = refusal(*runs_in(tmp_path, SHORT, replace(SHORT, arms=arms)))
    assert "arms.compiled.compile.mode max-autotune (there not given)" in said


def test_a_run_from_before_there_were_quantised_weights_had_none(tmp_path):
    one, other = runs_in(tmp_path, SHORT, SHORT)
    path = other / "experiment.toml"
    limits = '[parity]\ntexts = "/there/own.jsonl"\nmax_kl = 0.02\n'
    written = path.read_text().replace("[parity]\n", limits)
    assert limits in written
    path.write_text(f'{written}\n[model]\nquantisation = "none"\n')
    assert joined(tmp_path / "joined", [one, other]).runs
    path.write_text(f'{written}\n[model]\nquantisation = "int8-weight-only"\n')
    assert "model.quantisation" in refusal(one, other)


def test_no_pressure_is_the_same_as_none_written(tmp_path):
    one, other = runs_in(tmp_path, SHORT, SHORT)
    written = (other / "experiment.toml").read_text()
    (other / "experiment.toml").write_text(f"{written}\n[pressure]\ncpus = 0\nschedule = []\n")
    check_runs(listed_runs([one, other]))
    (other / "experiment.toml").write_text(f"{written}\n[pressure]\ncpus = 2\n")
    assert "pressure.cpus 2 (there not given)" in refusal(one, other)


def test_other_arms_can_never_be_joined(tmp_path):
    one, other = runs_in(tmp_path, SHORT, replace(SHORT, arms=(EAGER, FakeArm(name="faster"))))
    said = refusal(one, other, accepted=("arms",))
    assert said.endswith(
        "run-1 and run-0 are no trials of one experiment: arms with faster and without compiled, which run-0 has: "
        "leave run-0 out, or run the experiment that it ran"
    )
    other = write_run(tmp_path / "split", replace(SHORT, seed=9, design="split", day=5 * DAYS_APART))
    assert "traffic.design split, there mirrored" in refusal(one, other, accepted=("traffic",))


def test_values_that_begin_alike_are_shown_from_where_they_differ(tmp_path):
    known = ["compile", "recompile", "graph_capture", "autotune", "limit_hit"]
    directories = runs_in(tmp_path, SHORT, SHORT)
    for directory, kinds in zip(directories, (known, [*known, "jit"]), strict=True):
        info = json.loads((directory / "trial-01" / "trial.json").read_text())
        write_document(directory / "trial-01" / "trial.json", {**info, "stalling_kinds": kinds})
    assert "run-1 differs from run-0 in stalling_kinds …limit_hit, jit (there …limit_hit)" in refusal(*directories)
    records = joined(tmp_path / "joined", directories, "stalling_kinds")
    assert records.differences == ("run-1: stalling_kinds …limit_hit, jit, in run-0 …limit_hit",)


@pytest.mark.parametrize("long", ["x" * 60, f"{'x' * 60} {'y' * 60}"])
def test_values_without_a_word_in_which_they_differ_are_shown_from_the_first_other_character(tmp_path, long):
    first = replace(SHORT, environment={"versions": {"torch": f"{long}a"}})
    other = replace(SHORT, environment={"versions": {"torch": f"{long}b"}})
    assert "versions.torch …b (there …a)" in refusal(*runs_in(tmp_path, first, other))


def test_what_is_accepted_is_said_and_counts_as_in_the_first_run(tmp_path):
    directories = runs_in(tmp_path, replace(SHORT, gates={"margin": 0.1}), replace(SHORT, gates={"margin": 0.2}))
    records = joined(tmp_path / "joined", directories, "gates")
    assert records.experiment["gates"]["margin"] == 0.1
    assert records.differences == ("run-1: gates.margin 0.2, in run-0 0.1",)


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
        changed(run, "[trials]", f"[splitter]\nport = {port}\n[bed]\nsample_s = {port}\n[trials]")
    assert [run.name for run in check_runs(listed_runs([one, other]))] == ["run-0", "run-1"]
    changed(other, "week.csv", "month.csv")
    assert "traffic.trace month.csv (there week.csv)" in refusal(one, other)


def test_a_trace_of_one_name_and_another_length_is_refused(tmp_path):
    directories = runs_in(tmp_path, SHORT, SHORT)
    for rows, directory in enumerate(directories):
        path = directory / "trial-01" / "trial.json"
        facts = {"trace": {"format": "azure", "rows_read": 100 + rows}}
        path.write_text(json.dumps({**json.loads(path.read_text()), "prompts": facts}))
    assert "traffic.trace.rows_read 101 (there 100)" in refusal(*directories)


def test_one_run_given_twice_is_refused_also_as_a_copy(tmp_path):
    one, other = runs_in(tmp_path, SHORT, SHORT)
    copy = Path(shutil.copytree(one, tmp_path / "copy"))
    assert "is given twice" in refusal(one, one)
    assert "is given twice" in refusal(one, other / ".." / "run-0")
    assert "run-0 and copy hold the same trial, of one start and seed: leave one out" in refusal(one, copy, other)


def test_bare_tables_and_runs_without_trials_are_refused(tmp_path):
    (one,) = runs_in(tmp_path, SHORT)
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(one / "trial-01" / "requests-0.arrow", bare / "requests.arrow")
    assert refusal(one, bare) == "bare has no experiment.toml, so what it ran is unknown: give another run"
    shutil.copy(one / "experiment.toml", bare / "experiment.toml")
    assert refusal(one, bare) == "bare holds no trial with a trial.json: give another run"
    (bare / "requests.arrow").unlink()
    assert "bare holds no requests*.arrow" in refusal(one, bare)


# --- runs.json --------------------------------------------------------------------------------------------------------


def test_a_folder_that_joins_runs_is_read_as_they_are_and_may_move_with_them(tmp_path):
    directories = runs_in(tmp_path / "here", SHORT, SHORT)
    rows = joined(tmp_path / "here" / "joined", directories).requests.num_rows
    (tmp_path / "here").rename(tmp_path / "there")
    assert read_run(tmp_path / "there" / "joined").requests.num_rows == rows


def test_a_folder_that_joins_runs_stands_for_them_beside_another(tmp_path):
    directories = runs_in(tmp_path, SHORT, SHORT, SHORT)
    joined(tmp_path / "joined", directories[:2], "gates")
    listed = listed_runs([tmp_path / "joined", directories[2]], ("slo",))
    assert [run.resolve() for run in listed.directories] == [run.resolve() for run in directories]
    assert listed.accepted == ("slo", "gates")
    with pytest.raises(RecordError, match=r"run-0 is given twice \(once as .*joined, which joins it, once as"):
        listed_runs([tmp_path / "joined", directories[0]])


def test_a_list_that_cannot_be_followed_is_refused_in_a_line(tmp_path):
    directories = runs_in(tmp_path, SHORT, SHORT)
    folder = tmp_path / "joined"
    joined(folder, directories)
    path = folder / "runs.json"
    good = path.read_text()
    for content, said in (
        (good.replace("run-1", "run-9"), "is not as it was written"),
        ('{"runs": ["../run-9"]}', "names ../run-9, which is not there"),
        ('{"runs": "../run-1"}', "does not name its runs as a list of paths"),
        ('{"runs": []}', "does not name its runs"),
        ('{"runs": ["../joined"]}', "names ../joined, which joins runs itself"),
        ("[", "is not readable JSON"),
    ):
        path.write_text(content)
        with pytest.raises(RecordError) as refused:
            read_run(folder)
        assert said in str(refused.value)
        assert "\n" not in str(refused.value)


def test_a_run_that_is_read_alone_keeps_every_name(tmp_path):
    (run,) = runs_in(tmp_path, SHORT)
    records = read_run(run)
    assert not records.joined
    assert records.directories == (run,)
    assert records.requests.column("request_id")[0].as_py().startswith("1-")
    assert RunList(directories=(run,)).accepted == ()


def test_trials_of_searches_last_as_long_as_these_decide(tmp_path):
    directories = runs_in(tmp_path, SHORT, SHORT)
    trial = directories[1] / "trial-01" / "trial.json"
    write_document(trial, {**json.loads(trial.read_text()), "duration_s": 12.0})
    assert "traffic.duration_s" in refusal(*directories)
    for directory in directories:
        write_document(directory / "frontier.json", {"left": [], "dropped": []})
    assert joined(tmp_path / "joined", directories).joined


def test_an_arm_that_a_run_never_started_is_compared_between_those_that_did(tmp_path):
    directories = runs_in(tmp_path, SHORT, SHORT, SHORT)

    def resolve(directory: Path, **slots: int) -> None:
        for path in directory.glob("trial-*/trial.json"):
            info = json.loads(path.read_text())
            info["arms"] = [
                {**row, "config": {"engine": {"slots": slots[row["name"]]}}}
                for row in info["arms"]
                if row["name"] in slots
            ]
            write_document(path, info)

    control, arm = sorted(
        row["name"] for row in json.loads((directories[0] / "trial-01/trial.json").read_text())["arms"]
    )
    resolve(directories[0], **{control: 8})
    resolve(directories[1], **{control: 8, arm: 8})
    resolve(directories[2], **{control: 8, arm: 8})
    assert joined(tmp_path / "joined", directories).joined
    resolve(directories[2], **{control: 8, arm: 9})
    assert f"arms.{arm}.engine.slots 9" in refusal(*directories)


def test_of_searches_an_arm_is_let_go_that_each_let_go(tmp_path):
    directories = runs_in(tmp_path, SHORT, SHORT)
    slow, late = ({"arm": arm, "reason": f"{arm} was too slow"} for arm in ("compiled", "other"))
    shared = {"budget_s": 600.0, "gated": False, "dropped": []}
    first, second = (directory / "frontier.json" for directory in directories)
    write_document(first, {**shared, "spent_s": 500.0, "stop": "nothing is open", "left": [slow, late]})
    assert joined(tmp_path / "joined", directories).search is None, "one of them is no search"
    write_document(second, {**shared, "spent_s": 590.0, "stop": "10 s are left", "left": [slow]})
    search = joined(tmp_path / "both", directories).search
    assert (search["budget_s"], search["spent_s"]) == (1200.0, 1090.0)
    assert search["stop"] == "run 1: nothing is open; run 2: 10 s are left"
    assert search["left"] == [slow]
    assert search["gated"] is False
    write_document(second, {**shared, "gated": True, "stop": "", "left": []})
    search = joined(tmp_path / "cut", directories).search
    assert (search["gated"], search["stop"], search["left"]) == (True, "", [])
    assert "spent_s" not in search


@pytest.mark.parametrize(
    ("more", "differs"),
    [
        ('[users]\nroute_kind = "GRPCRoute"\n', ""),
        ('[users]\nroute_kind = "HTTPRoute"\n', "users.route_kind"),
        ('[engine]\nmax_wait_ms = 0\n[model]\ntask = "generate"\n', ""),
        ("[engine]\nmax_wait_ms = 5\n", "engine.max_wait_ms"),
        ("[ramp]\nstep_s = 300\nfailure_limit = 0\n", ""),
        ("[engine]\nof_tomorrow = 0\n", "engine.of_tomorrow"),
    ],
)
@pytest.mark.parametrize("newer_first", [False, True])
def test_a_setting_that_a_version_added_is_before_it_what_that_version_did(tmp_path, more, differs, newer_first):
    older, newer = runs_in(tmp_path, SHORT, SHORT)
    if newer_first:
        older, newer = newer, older
    path = newer / "experiment.toml"
    path.write_text(f"{path.read_text()}\n{more}")
    if not differs:
        assert joined(tmp_path / "joined", [older, newer]).runs
    else:
        assert f"--allow-different {differs}" in refusal(older, newer)


def test_of_a_table_that_came_as_a_whole_a_part_is_not_filled_in(tmp_path):
    older, newer = runs_in(tmp_path, SHORT, SHORT)
    for run, more in ((older, ""), (newer, "failure_limit = 0\n")):
        path = run / "experiment.toml"
        path.write_text(f"{path.read_text()}\n[ramp]\nstep_s = 300\n{more}")
    assert "ramp.failure_limit 0 (there not given)" in refusal(older, newer)


def test_an_arm_that_was_resolved_before_a_setting_was_added_had_what_came_before(tmp_path):
    older, newer = runs_in(tmp_path, SHORT, SHORT)

    def resolve(run: Path, **policy: object) -> None:
        for path in run.glob("trial-*/trial.json"):
            info = json.loads(path.read_text())
            for arm in info["arms"]:
                arm["config"] = {**(arm.get("config") or {}), "compile": {"enabled": True, **policy}}
            path.write_text(json.dumps(info))

    resolve(older)
    resolve(newer, strict=False, regions=[])
    check_runs(listed_runs([older, newer]))
    resolve(newer, strict=True)
    assert "compile.strict" in refusal(older, newer)
