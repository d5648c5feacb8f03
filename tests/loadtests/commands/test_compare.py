"""`tailgate compare`: two runs, from the records to exit code and reports."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tailgate.analysis.records.documents import EDITED
from tailgate.analysis.summary.model import Summary
from tests.analysis.compare import test_comparison as comparison
from tests.analysis.compare.test_comparison import COMPILED
from tests.fakes import results
from tests.fakes.results import Sent, in_turn, traffic, write
from tests.fakes.runs import EAGER, SEPARATE_DAYS, Compile, FakeRun, write_run
from tests.loadtests.commands.test_main import refused, run_command

RUN, LATER = (replace(run, duration_s=120, rate=2.0, gates={}) for run in (comparison.RUN, comparison.LATER))


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    return write_run(tmp_path / "last-week", RUN)


@pytest.fixture
def naive(tmp_path: Path) -> Path:
    compiles = (Compile(at_s=100.0, seconds=2.0),)
    return write_run(tmp_path / "this-week", replace(LATER, arms=(EAGER, replace(COMPILED, compiles=compiles))))


def test_a_new_recompile_fails_with_reports_in_the_candidate(baseline: Path, naive: Path, capsys) -> None:
    code, _, out = run_command(capsys, "compare", baseline, naive)
    assert code == 99
    assert "candidate must not replace baseline" in out
    assert "versions.torch 2.11 → 2.12" in out
    assert f"next:tailgateinspect{naive}/experiment.toml--armcompiled" in "".join(out.split())
    folder = naive / "compare"
    assert out.endswith(f"report: {folder / 'report.html'}\n")
    assert {path.name for path in folder.iterdir()} == {"summary.json", "report.html", "report.md", "junit.xml"}
    assert "versions.torch 2.11 → 2.12" in (folder / "report.html").read_text()
    summary = json.loads((folder / "summary.json").read_text())
    assert Summary.of(summary).document() == summary
    assert summary["overall"] == "FAIL"
    failed = [case.get("name") for case in ET.parse(folder / "junit.xml").getroot().iter("testcase") if len(case)]
    assert any("recompiles" in str(name) for name in failed)


def test_an_arm_is_chosen_by_name(baseline: Path, naive: Path, capsys) -> None:
    code, summary, _ = run_command(capsys, "compare", baseline, naive, "--arm", "eager", "--json")
    assert code != 99
    assert [arm["name"] for arm in summary["arms"]] == ["baseline", "candidate"]
    assert 'the candidate has no arm "dark"' in refused(capsys, "compare", baseline, naive, "--arm", "eager=dark")
    assert '--out "/proc" is not writable' in refused(capsys, "compare", baseline, naive, "--out", "/proc/reports")


def test_limits_come_from_the_file(tmp_path: Path, baseline: Path, naive: Path, capsys) -> None:
    limits = tmp_path / "limits.toml"
    limits.write_text("[gates]\nmax_recompiles = 1\nmax_stall_s = 5\n")
    _, summary, _ = run_command(capsys, "compare", baseline, naive, "--limits", limits, "--json")
    judged = {row["gate"]: row["verdict"] for row in summary["gates"]}
    assert (judged["recompiles"], judged["longest compile stall"]) == ("PASS", "PASS")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["none", "{run}"], "none does not exist"),
        (["{run}", "none"], "none does not exist"),
        (["{empty}", "{run}"], "empty is no run directory"),
        (["{run}", "{run}", "--limits", "none.toml"], '--limits "none.toml" cannot be read'),
        (["{run}", "{run}", "--limits", "{empty}.alpha"], "gates.alpha is 2"),
        (["{run}", "{run}", "--limits", "{empty}.slo"], "slo is unknown: use one of gates"),
        (["{run}", "{run}", "--limits", ""], "--limits is empty"),
        (["{run}", "{run}", "--out", ""], "--out is empty"),
        (["{run}", ""], "CANDIDATE is empty"),
        (["/dev/null", "{run}"], "/dev/null is no run directory and no result file"),
    ],
)
def test_what_cannot_be_compared_is_refused(arguments, expected, tmp_path: Path, baseline: Path, capsys) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.alpha").write_text("[gates]\nalpha = 2\n")
    (tmp_path / "empty.slo").write_text("[slo]\np99_e2e_ms = 1\n")
    given = [word.format(run=baseline, empty=tmp_path / "empty") for word in arguments]
    assert expected in refused(capsys, "compare", *given)


JOINED_RUN = FakeRun(name="canary", duration_s=60, rate=2, trials=2, environment={"machine": "aaaaaaaaaaaa"})


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Three runs of one experiment, the last on another machine."""
    machines = ("aaaaaaaaaaaa", "aaaaaaaaaaaa", "bbbbbbbbbbbb")
    return [
        write_run(
            tmp_path / f"run-{day}",
            replace(JOINED_RUN, seed=day + 1, day=day * SEPARATE_DAYS, environment={"machine": machine}),
        )
        for day, machine in enumerate(machines)
    ]


def runs_in(folder: Path) -> int:
    return len(json.loads((folder / "summary.json").read_text())["joined"]["runs"])


def test_runs_are_judged_as_one_in_a_folder_next_to_the_first(runs, tmp_path, capsys):
    before = {path: path.stat().st_mtime_ns for run in runs for path in run.rglob("*")}
    _, _, out = run_command(capsys, "analyze", *runs)
    assert "(run-0, run-1, run-2)" in " ".join(out.partition("judged together")[2].split())
    folder = Path(out.rpartition("report: ")[2].strip()).parent
    assert folder.parent == tmp_path
    assert folder.name.startswith("joined-")
    assert {path.name for path in folder.iterdir()} == {
        *("runs.json", "summary.json", "report.html", "report.md", "junit.xml")
    }
    assert runs_in(folder) == 3
    assert {path: path.stat().st_mtime_ns for run in runs for path in run.rglob("*")} == before, "no run is touched"
    _, _, again = run_command(capsys, "analyze", *reversed(runs))
    assert again.endswith(f"report: {folder / 'report.html'}\n"), "the same runs have the same folder"


def test_a_run_that_cannot_be_written_is_refused_before_it_is_judged(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tempfile.TemporaryDirectory", Mock(side_effect=PermissionError))
    monkeypatch.setattr("tailgate.loadtests.commands.verdict.judge_run", lambda *_, **__: pytest.fail("it was judged"))
    assert f'--out "{runs[0]}" is not writable: give a folder that is' in refused(capsys, "analyze", runs[0])


def test_what_differs_is_refused_and_can_be_accepted_by_its_key(runs, tmp_path, capsys):
    other = write_run(tmp_path / "other", replace(JOINED_RUN, seed=9, gates={"margin": 0.2}, day=9 * SEPARATE_DAYS))
    folder = tmp_path / "case"
    said = refused(capsys, "analyze", *runs, other, "--out", folder)
    assert "other: gates.margin 0.2 (in run-0 not given)" in said
    assert not folder.exists(), "nothing is written"
    run_command(capsys, "analyze", *runs, other, "--out", folder, "--allow-different", "gates.margin")
    assert runs_in(folder) == 4
    _, again, _ = run_command(capsys, "analyze", folder, "--json")
    assert len(again["joined"]["runs"]) == 4, "what was accepted is kept with the runs"


@pytest.mark.parametrize("keys", ["", ",", "gates.margin,"])
def test_an_empty_key_is_refused_and_the_joined_folder_stays(keys, runs, tmp_path, capsys):
    folder = tmp_path / "case"
    run_command(capsys, "analyze", *runs[:2], "--out", folder)
    listed = (folder / "runs.json").read_text()
    said = refused(capsys, "analyze", folder, runs[2], "--out", folder, "--allow-different", keys)
    assert "--allow-different holds an empty key" in said
    assert (folder / "runs.json").read_text() == listed
    assert "--out is empty" in refused(capsys, "analyze", *runs, "--out", "")


def test_the_outcome_never_goes_into_a_run_nor_over_other_files(runs, tmp_path, capsys):
    assert "lies in the run run-1" in refused(capsys, "analyze", *runs, "--out", runs[1] / "joined")
    assert "lies in the run run-1" in refused(capsys, "analyze", *runs[:2], "--out", runs[1])
    assert "holds other files" in refused(capsys, "analyze", *runs[:2], "--out", runs[2])
    (tmp_path / "file").write_text("")
    assert "is no folder" in refused(capsys, "analyze", *runs, "--out", tmp_path / "file")


def test_bad_runs_are_refused_in_a_line(runs, tmp_path, capsys):
    assert 'run directory "nowhere" does not exist' in refused(capsys, "analyze", runs[0], "nowhere")
    assert "the run run-0 is given twice, again by" in refused(capsys, "analyze", runs[0], runs[0])
    assert "--allow-different is for several run directories" in refused(
        capsys, "analyze", runs[0], "--allow-different", "gates"
    )
    (tmp_path / "empty").mkdir()
    assert 'empty" holds no run: give' in refused(capsys, "analyze", runs[0], tmp_path / "empty")
    (tmp_path / "empty" / "requests.csv").touch()
    alone = refused(capsys, "analyze", tmp_path / "empty", "--out", tmp_path / "x")
    assert "empty holds no requests*.arrow, .parquet or .jsonl: give a run that sent requests" in alone
    assert not (tmp_path / "x").exists()


GATES = "\n[gates]\nquantiles = [0.9]\nmin_blocks = 18\n"


def judged(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, dict]:
    code, summary, _ = run_command(capsys, "analyze", *arguments, "--json")
    assert {**Summary.of(summary).document(), "next": summary["next"]} == summary
    return code, summary


def results_of(folder: Path, *, slower: float = 1.0) -> list[str]:
    """The arguments for the results of two servers, of which the second is slower."""
    return [
        f"{arm}={write(folder / f'{seed}.json', results.vllm(traffic(seed=seed, slower=factor)))}"
        for arm, seed, factor in (("eager", 1, 1.0), ("compiled", 2, slower))
    ]


def vllm_results(folder: Path, one: list[Sent], other: list[Sent]) -> list[str]:
    files = [write(folder / f"{name}.json", results.vllm(own)) for name, own in (("a", one), ("b", other))]
    return [f"eager={files[0]}", f"compiled={files[1]}"]


def judged_with_gates(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> tuple[int, dict]:
    """The run's experiment is edited, as its reader would, and the folder judged again."""
    judged(capsys, *arguments, "--out", folder)
    experiment = folder / "experiment.toml"
    experiment.write_text(experiment.read_text() + GATES + EDITED)
    return judged(capsys, folder)


def checks(summary: dict) -> dict[str, dict]:
    return {row["check"]: row for row in summary["validity"]}


def gates(summary: dict) -> dict[str, dict]:
    return {row["gate"]: row for row in summary["gates"]}


def test_equal_servers_under_a_schedule_pass_and_a_much_slower_one_fails(tmp_path: Path, capsys) -> None:
    code, summary = judged_with_gates(capsys, tmp_path / "run", *results_of(tmp_path))
    assert (code, summary["overall"], summary["control"]) == (0, "PASS", "eager")
    assert summary["design"]["design"] == "separate"
    assert checks(summary)["open loop"]["ok"]
    assert gates(summary)["recompiles"]["reason"].startswith("Clients saw no stall")
    much_slower = results_of(tmp_path, slower=2.0)
    code, summary = judged_with_gates(capsys, tmp_path / "slower", *much_slower)
    assert (code, summary["overall"]) == (99, "FAIL")
    assert gates(summary)["noninferiority p90_ttft"]["verdict"] == "FAIL"
    files = [given.partition("=")[2] for given in much_slower]
    limits = tmp_path / "limits.toml"
    limits.write_text(GATES)
    flags = ["--limits", limits, "--out", tmp_path / "out", "--trust-machines", "--json"]
    code, summary, _ = run_command(capsys, "compare", *files, *flags)
    assert (code, summary["overall"], summary["name"]) == (99, "FAIL", "1 → 2")


def closed(path: Path, seed: int) -> Path:
    return write(path, results.vllm(in_turn(traffic(seed=seed)), request_rate="inf", max_concurrency=2))


def test_stalls_without_another_arm_to_compare_leave_the_gates_open(tmp_path: Path, capsys) -> None:
    calm, stalled = traffic(seed=1), traffic(seed=2)
    for place in range(200, 2600, 200):
        until_s = stalled[place].due_s + 3.0
        held = [other for other in range(place, place + 40) if stalled[other].due_s < until_s]
        for rank, other in enumerate(held, start=1):
            due_s = stalled[other].due_s
            stalled[other] = Sent(due_s=due_s, first_s=until_s - due_s + 0.1 * rank, prompt_tokens=24)
    code, summary = judged(capsys, *vllm_results(tmp_path, calm, stalled), "--out", tmp_path / "run")
    # Its p95 is surely worse. How far p99 may reach, which rests on twelve requests, one run does not say.
    (p95,) = [row for row in summary["comparisons"] if (row["metric"], row["quantile"]) == ("ttft", 0.95)]
    assert p95["low"] > 1.5
    assert (code, summary["overall"]) == (3, "INCONCLUSIVE")
    assert "has no error bars: too few slow requests. Seen: ×" in gates(summary)["noninferiority p99_ttft"]["reason"]
    longest = gates(summary)["longest compile stall"]
    assert longest["verdict"] == "INCONCLUSIVE"
    assert "compiled stalled 20 times, up to 4.29 s, for some or all of its requests" in longest["reason"]


def cut(answers: list[Sent]) -> list[Sent]:
    """Some of the answers break off."""
    return [replace(sent, gaps_s=sent.gaps_s[:1]) if place % 25 == 0 else sent for place, sent in enumerate(answers)]


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (
            traffic(seed=4, tokens=4),
            traffic(seed=6, tokens=6),
            ("6 to 4 answer tokens", "answers of compiled have 1.5 times the tokens of those of eager"),
        ),
        (
            traffic(seed=1, tokens=8),
            cut(traffic(seed=2, tokens=8)),
            ("4.02 % of the answers of compiled have at most 2 tokens, 0 % of those of eager",),
        ),
    ],
    ids=["other lengths", "answers that break off"],
)
def test_other_work_is_no_pass(one: Any, other: Any, words: tuple[str, ...], tmp_path: Path, capsys) -> None:
    code, summary = judged(capsys, *vllm_results(tmp_path, one, other), "--out", tmp_path / "run")
    assert (code, summary["overall"]) == (3, "INCONCLUSIVE")
    assert all(word in checks(summary)["equal work"]["reason"] for word in words)


def test_what_cannot_be_judged_is_refused(tmp_path: Path, capsys) -> None:
    one = write(tmp_path / "one.json", results.vllm(traffic(9)))
    summary = {key: value for key, value in results.vllm(traffic(9)).items() if key != "ttfts"}
    alone = write(tmp_path / "alone.json", summary)
    run = tmp_path / "run"
    run.mkdir()
    for words, said in (
        ([f"a={one}"], '"a" is the only arm: give the results of two'),
        ([f"a={one}", str(run)], "names no arm: give each result file as NAME=FILE"),
        ([f"a={one}", f"={one}"], "has no name of an arm in front"),
        ([f"a={one}", "b=none.json"], 'result file "none.json" does not exist'),
        ([f"a={one}", f"b={one}"], "hold the same run"),
        ([f"a={one}", f"b={alone}"], "run it again with --save-result --save-detailed"),
        ([f"a={one}", f"b={alone}", "--out", str(tmp_path)], "exists: give a new --out"),
        ([f"a={one}", f"b={alone}", "--allow-different", "x"], "--allow-different is for several run directories"),
    ):
        assert said in refused(capsys, "analyze", *words)


def test_closed_loops_are_inconclusive_and_another_load_is_not_compared(tmp_path: Path, capsys) -> None:
    one, other = (closed(tmp_path / f"{seed}.json", seed) for seed in (1, 2))
    code, document, _ = run_command(capsys, "compare", one, other, "--json")
    assert (code, document["overall"]) == (3, "INCONCLUSIVE")
    assert "open loop" in gates(document)["noninferiority p99_e2e"]["blocked_by"]
    opened = write(tmp_path / "open.json", results.vllm(traffic(seed=3)))
    assert "traffic.request_rate inf → 4" in refused(capsys, "compare", one, opened)
