"""The later of two runs is judged with the earlier as its control: on its records, and on what both machines were."""

from __future__ import annotations

import json
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tailgate.analysis.compare.comparison import chosen_arms, compare_runs, made_run, read_pair
from tailgate.analysis.records.documents import EDITED
from tailgate.analysis.records.joining import RecordedRun, listed_runs, write_run_list
from tailgate.analysis.records.tables import RecordError
from tailgate.analysis.report.brief import brief_of
from tailgate.analysis.summary.model import Summary
from tests.fakes.machines import FakeMachines, referenced, sample
from tests.fakes.runs import EAGER, Compile, FakeArm, FakeRun, write_run

COMPILED = FakeArm(name="compiled", ratio=0.8)
RUN = FakeRun(
    arms=(EAGER, COMPILED),
    trials=2,
    duration_s=240,
    rate=3.0,
    drift=0.01,
    gates={"quantiles": [0.5], "min_blocks": 8},
    slo={"p99_e2e_ms": 5000},
    machines=referenced(python_ms=10.0, read_gb_per_s=20.0),
    environment={"machine": "0123456789ab", "versions": {"torch": "2.11"}},
)
LATER = replace(RUN, seed=2, day=7, environment={"machine": "0123456789ab", "versions": {"torch": "2.12"}})
SHORT = replace(RUN, duration_s=60, trials=1)
UNKNOWN = {"versions": {}}


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("earlier") / "last-week", RUN)


def later(tmp_path: Path, run: FakeRun = LATER, **changes: Any) -> Path:
    arms = (EAGER, replace(COMPILED, **changes))
    return write_run(tmp_path / "this-week", replace(run, arms=arms))


def gates(summary: dict[str, Any]) -> dict[str, str]:
    return {row["gate"]: row["verdict"] for row in summary["gates"]}


def checks(summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["check"]: row for row in summary["validity"] if row["arm"] in (None, "candidate")}


def edited(directory: Path, edit: Any) -> Path:
    for path in directory.glob("trial-*/trial.json"):
        info = json.loads(path.read_text())
        edit(info)
        info.pop("crc32", None)
        path.write_text(json.dumps(info))
    return directory


def test_an_equal_run_of_another_day_passes_and_what_differs_is_listed(baseline: Path, tmp_path: Path) -> None:
    summary = compare_runs(baseline, later(tmp_path))
    assert (summary["overall"], summary["exit_code"]) == ("PASS", 0), summary["headline"]
    assert (summary["control"], summary["name"]) == ("baseline", "compiled of last-week → compiled of this-week")
    assert "versions.torch 2.11 → 2.12" in checks(summary)["what differs"]["reason"]
    assert summary["created"][:10] == "2023-11-23", "the day of the candidate"


def test_a_recompile_and_a_missed_objective_of_the_later_run_fail(baseline: Path, tmp_path: Path) -> None:
    stalled = compare_runs(baseline, later(tmp_path, compiles=(Compile(at_s=100.0, seconds=60.0),)))
    assert {"recompiles", "longest compile stall", "slo p99_e2e_ms"} <= {
        name for name, verdict in gates(stalled).items() if verdict == "FAIL"
    }


def test_what_the_earlier_run_did_fails_no_gate(tmp_path: Path) -> None:
    bad = replace(RUN, arms=(EAGER, replace(COMPILED, compiles=(Compile(at_s=100.0, seconds=2.0),))))
    summary = compare_runs(write_run(tmp_path / "last-week", bad), later(tmp_path))
    assert summary["overall"] == "PASS", summary["headline"]


@pytest.mark.parametrize(
    ("slower", "ratio", "verdict", "text"),
    [
        (1.03, 0.8, "PASS", "lower during the candidate's run"),  # far from the margin, whatever 3 % explain
        (1.2, 1.2, "INCONCLUSIVE", "lower during the candidate's run"),
        (1.2, 0.8, "PASS", "lower"),  # equal in spite of a slower machine
        (1 / 1.2, 0.8, "INCONCLUSIVE", "higher during the candidate's run"),
        (1 / 1.2, 1.2, "FAIL", "higher"),  # slower in spite of a faster machine
    ],
)
def test_what_a_machine_of_another_speed_explains_is_open(
    slower: float, ratio: float, verdict: str, text: str, baseline: Path, tmp_path: Path
) -> None:
    machines = referenced(python_ms=10.0 * slower, read_gb_per_s=20.0 / slower)
    candidate = later(tmp_path, replace(LATER, machines=machines), ratio=ratio)
    for trusted in (False, True):  # what was measured counts also where machines are trusted
        summary = compare_runs(baseline, candidate, trust_machines=trusted)
        assert gates(summary)["noninferiority p50_ttft"] == verdict
        assert text in checks(summary)["machine speed"]["reason"]
        remedy = checks(summary)["machine speed"]["remedy"]
        assert verdict != "INCONCLUSIVE" or "again right before" in remedy, "it is one machine"


def test_machines_of_unknown_speed_leave_latency_open_unless_they_are_trusted(tmp_path: Path) -> None:
    blind = [replace(run, machines=None, environment=UNKNOWN) for run in (RUN, LATER)]
    runs = [write_run(tmp_path / str(place), run) for place, run in enumerate(blind)]
    summary = compare_runs(*runs)
    assert gates(summary)["noninferiority p50_ttft"] == "INCONCLUSIVE"
    assert gates(summary)["recompiles"] == "PASS"
    assert "--trust-machines" in checks(summary)["machine speed"]["remedy"]
    assert checks(summary)["machine speed"]["opens"] == ["noninferiority"], "no gate that the runs lack"
    assert compare_runs(*runs, trust_machines=True)["overall"] == "PASS"


def test_references_of_another_card_say_nothing_of_the_arms(tmp_path: Path) -> None:
    def failed(info: dict[str, Any]) -> None:
        for item in info["references"]:
            if item["device"] == "cuda:1":
                item |= {"error": "CUDA out of memory", "matmul_tflops": None}

    watched = replace(SHORT, machines=FakeMachines(swap=False), environment=UNKNOWN)
    whole = write_run(tmp_path / "whole", watched)
    lost = edited(write_run(tmp_path / "lost", replace(watched, seed=2, day=7)), failed)
    assert not checks(compare_runs(whole, lost))["machine speed"]["ok"]
    assert "No reference shows" in checks(compare_runs(whole, lost))["machine speed"]["reason"]


def test_records_that_are_lost_leave_gates_open(baseline: Path, tmp_path: Path) -> None:
    cut = later(tmp_path)
    shutil.rmtree(cut / "trial-02")
    summary = compare_runs(baseline, cut)
    assert summary["overall"] == "INCONCLUSIVE"
    assert "complete" in {name for row in summary["gates"] for name in row["blocked_by"]}
    assert "the candidate's trial 2 missing" in checks(summary)["complete"]["reason"]
    assert summary["design"]["trial_names"]["4"] == "the candidate's trial 2"


def test_a_slower_run_fails_unless_the_given_gates_allow_it(baseline: Path, tmp_path: Path) -> None:
    slower = later(tmp_path, ratio=1.2)
    wide = {"quantiles": [0.5], "margin": 1.0, "min_blocks": 8}
    summary = compare_runs(baseline, slower)
    assert (summary["overall"], summary["exit_code"]) == ("FAIL", 99)
    assert summary["headline"].startswith("candidate must not replace baseline: p50 TTFT is 1.")
    assert gates(summary)["noninferiority p50_e2e"] == "FAIL"
    assert gates(compare_runs(baseline, slower, gates=wide))["noninferiority p50_e2e"] == "PASS"


def test_other_traffic_objectives_or_models_are_refused_with_a_list(baseline: Path, tmp_path: Path) -> None:
    other = later(tmp_path, replace(LATER, slo={"p99_e2e_ms": 4000}, ignore_eos=True))
    with pytest.raises(RecordError) as refused:
        compare_runs(baseline, other)
    assert "traffic.ignore_eos False → True" in str(refused.value)
    assert "slo.p99_e2e_ms 5000 → 4000" in str(refused.value)
    assert "run both with one experiment" in str(refused.value)


def test_runs_of_another_length_are_compared_in_all_but_memory(baseline: Path, tmp_path: Path) -> None:
    longer = later(tmp_path, replace(LATER, duration_s=300))
    summary = compare_runs(baseline, longer)
    assert (summary["overall"], checks(summary)["what differs"]["ok"]) == ("PASS", True), summary["headline"]
    assert "traffic.duration_s 240 → 300" in checks(summary)["what differs"]["reason"]
    limited = compare_runs(baseline, longer, gates={**RUN.gates, "max_memory_ratio": 1.2})
    assert not checks(limited)["what differs"]["ok"]
    assert checks(limited)["what differs"]["opens"] == ["memory"]


def test_of_two_runs_the_shorter_one_is_named_and_one_without_requests_is_refused(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", replace(SHORT, gates={}))
    other = write_run(tmp_path / "other", replace(LATER, gates={}))
    for runs in ((one, other), (other, one)):
        side = "baseline" if runs[0] == one else "candidate"
        summary = compare_runs(*runs, trust_machines=True)
        seen = checks(summary)
        assert all(f"; {side} has " in seen[check]["reason"] for check in ("blocks", "tail")), seen
        assert brief_of(Summary.of(summary)).first_step.endswith("A PASS needs both runs to last about 12 minutes.")
    for path in one.glob("trial-*/requests*"):
        path.unlink()
    with pytest.raises(RecordError, match="one holds no requests"):
        compare_runs(one, other)


def test_a_trial_that_a_decided_run_left_out_is_not_missing(baseline: Path, tmp_path: Path) -> None:
    def decided(info: dict[str, Any]) -> None:
        info["ended"] = "decided after 4.0 minutes (compiled: PASS)"

    cut = write_run(tmp_path / "cut", replace(RUN, seed=3, day=3))
    shutil.rmtree(cut / "trial-02")
    assert checks(compare_runs(edited(cut, decided), later(tmp_path)))["complete"]["ok"]


@pytest.mark.parametrize("changing", [{"arrivals": "piecewise"}, {"length_scales": [[0, 1]]}, {"workload": "trace"}])
def test_runs_of_another_length_are_refused_where_the_load_changes(changing: dict[str, Any], tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "short", SHORT), later(tmp_path, replace(SHORT, seed=2, day=7, duration_s=90))]
    for path in (run / "experiment.toml" for run in runs):
        experiment = tomllib.loads(path.read_text())
        path.write_text(tomli_w.dumps(experiment | {"traffic": experiment["traffic"] | changing}) + EDITED)
    with pytest.raises(RecordError, match=r"differ in traffic\.duration_s 60 → 90: run both"):
        compare_runs(*runs)


def test_a_run_is_not_compared_with_itself_nor_with_a_copy_nor_with_runs_of_several_days(
    baseline: Path, tmp_path: Path
) -> None:
    with pytest.raises(RecordError, match="last-week is the baseline and the candidate"):
        compare_runs(baseline, baseline)
    copied = Path(shutil.copytree(baseline, tmp_path / "copy"))
    with pytest.raises(RecordError, match="last-week and copy hold the same trial"):
        compare_runs(baseline, copied)
    write_run_list(tmp_path / "joined", listed_runs([baseline]))
    with pytest.raises(RecordError, match="is what `analyze` wrote: give the folder of a run"):
        made_run(tmp_path / "joined", tmp_path)


def documents(*arms: str, control: str = "eager") -> RecordedRun:
    rows = [{"name": arm, "control": arm == control} for arm in arms]
    return RecordedRun(directory=Path("run"), name="run", experiment={"arms": rows})


@pytest.mark.parametrize(
    ("text", "earlier", "now", "chosen"),
    [
        ("", ("eager", "padded"), ("eager", "padded"), ("padded", "padded")),
        ("", ("eager",), ("eager",), ("eager", "eager")),
        ("eager", ("eager", "padded"), ("eager", "padded"), ("eager", "eager")),
        ("padded=buckets", ("eager", "padded"), ("eager", "buckets"), ("padded", "buckets")),
    ],
)
def test_the_arm_is_the_one_that_both_runs_have_or_the_named_one(
    text: str, earlier: tuple[str, ...], now: tuple[str, ...], chosen: tuple[str, str]
) -> None:
    assert chosen_arms(text, documents(*earlier), documents(*now)) == chosen


@pytest.mark.parametrize(
    ("text", "earlier", "now", "said"),
    [
        ("", ("padded",), ("buckets",), "the baseline has padded, the candidate buckets: choose an arm"),
        ("", ("eager", "padded"), ("eager", "buckets"), "the candidate eager, buckets: choose an arm"),
        ("", ("eager", "a", "b"), ("eager", "a", "b"), "the candidate eager, a, b: choose an arm with --arm NAME"),
        ("dark", ("eager", "padded"), ("eager", "padded"), 'the baseline has no arm "dark": use eager, padded'),
        ("padded=dark", ("eager", "padded"), ("eager", "padded"), 'the candidate has no arm "dark"'),
    ],
)
def test_an_arm_that_is_not_one_is_refused(
    text: str, earlier: tuple[str, ...], now: tuple[str, ...], said: str
) -> None:
    with pytest.raises(RecordError, match=said):
        chosen_arms(text, documents(*earlier), documents(*now))


def test_only_the_two_arms_are_read_under_new_names(baseline: Path, tmp_path: Path) -> None:
    run, _, _ = read_pair(baseline, later(tmp_path))
    assert run.arms == ("baseline", "candidate")
    assert [len(run.trials_of(arm)) for arm in run.arms] == [2, 2]
    assert {event.arm for event in run.events} == {"baseline", "candidate"}
    assert run.account("candidate").compiles


@pytest.mark.parametrize(("peak", "verdict"), [(600_000_000, "PASS"), (900_000_000, "FAIL")])
def test_memory_is_compared_over_trials_where_the_gates_ask_for_it(peak: int, verdict: str, tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(place), run) for place, run in enumerate((RUN, LATER))]
    for run, held in zip(runs, (600_000_000, peak), strict=True):
        sample(run, "allocator", "compiled-0", {"memory_bytes": held}, arm="compiled")
    limits = {"max_memory_ratio": 1.2, "min_blocks": 8}
    assert gates(compare_runs(*runs, gates=limits))["memory ratio"] == verdict


def test_a_pause_of_the_host_stays_one_where_one_arm_of_the_run_is_compared(baseline: Path, tmp_path: Path) -> None:
    pause = (Compile(at_s=100.0, seconds=2.0),)
    for name, other in (("one", EAGER), ("both", replace(EAGER, compiles=pause))):
        paused = replace(LATER, arms=(other, replace(COMPILED, compiles=pause)))
        stalls = compare_runs(baseline, write_run(tmp_path / name, paused))["arms"][1]["client_stalls"]
        assert bool(stalls["host"]) == (name == "both")


def test_a_trial_without_the_arm_is_missing(baseline: Path, tmp_path: Path) -> None:
    def without(info: dict[str, Any]) -> None:
        info["arms"] = [row for row in info["arms"] if row["name"] != "compiled" or info["trial"] == 1]

    run, _, _ = read_pair(baseline, edited(later(tmp_path), without))
    assert [len(run.trials_of(arm)) for arm in run.arms] == [2, 1]
