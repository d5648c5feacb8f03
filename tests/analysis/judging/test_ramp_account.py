"""What became of a ramp, by its journal and its requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from analysis.judging.judgement import judge
from analysis.judging.ramp_account import ramp_gate, ramp_of
from analysis.records.run_records import read_run
from analysis.records.weight_journal import JOURNAL, WeightChange, append, read_weights
from analysis.report.html import html_report
from analysis.report.looks import words as ramp_words
from analysis.run.run import Run
from analysis.summary.summary import analyze
from tests.fakes.runs import EAGER, SECOND, Compile, FakeArm, FakeRun, start_of, write_run

GATES = {"draws": 99, "sequential": True}
HALF = FakeRun(design="split", duration_s=600, rate=4, gates=GATES)


def change(at_s: float, share: int, action: str, step: int, why: str = "so", **more: int) -> WeightChange:
    weights = {"eager": 100 - share, "compiled": share}
    return WeightChange(
        at_ns=start_of(1) + int(at_s * SECOND), weights=weights, why=why, action=action, step=step, **more
    )


def ramped(path: Path, run: FakeRun, *changes: WeightChange) -> Run:
    directory = write_run(path / "run", run)
    for item in changes:
        append(directory, item)
    return Run.of(read_run(directory))


def gate(run: Run, name: str) -> tuple[str, str]:
    found = next(item for item in judge(run).gates if item.gate == name)
    return found.verdict, found.reason


def test_a_promoted_candidate_passes_the_ramp(tmp_path: Path) -> None:
    run = ramped(tmp_path, HALF, change(0, 50, "start", 3), change(590, 50, "promoted", 4))
    verdict, reason = gate(run, "ramp")
    assert verdict == "PASS"
    assert reason.startswith("It reached all of the traffic; ")


def test_a_rollback_fails_and_counts_who_was_exposed_and_hurt(tmp_path: Path) -> None:
    slow = replace(HALF, arms=(EAGER, FakeArm(name="compiled", compiles=[Compile(at_s=300, seconds=5)])))
    back = change(306, 0, "rollback", 0, why="It compiled.", cause_ns=start_of(1) + 305 * SECOND)
    run = ramped(tmp_path, slow, change(0, 50, "start", 0), back, replace(back, done_ns=back.at_ns + SECOND // 2))
    verdict, reason = gate(run, "ramp")
    assert verdict == "FAIL"
    exposed = int((run.of_arm("compiled") & ~run.requests.broken).sum())
    assert reason.startswith(f"It was rolled back at 1 %: It compiled; {exposed} requests were exposed to it and ")
    assert "and 0 hurt" not in reason


def test_a_rollback_that_no_splitter_took_is_told(tmp_path: Path) -> None:
    back = change(306, 0, "rollback", 0, why="It died.")
    for done_ns, words in (
        (None, "which the splitter had not taken when the run ended"),
        (back.at_ns + 1, "It died; "),
    ):
        path = tmp_path / str(done_ns)
        verdict, reason = gate(ramped(path, HALF, change(0, 50, "start", 0), replace(back, done_ns=done_ns)), "ramp")
        assert verdict == "FAIL"
        assert words in reason


def test_a_step_that_the_end_of_the_run_cut_off_is_not_held_for_what_began_it(tmp_path: Path) -> None:
    begun = change(300, 50, "advance", 2, why="nothing speaks against 25 %")
    _, reason = gate(ramped(tmp_path / "cut", HALF, change(0, 50, "start", 1), begun), "ramp")
    assert reason.startswith("It was held at 25 %: the run ended before that step was decided; ")
    held = change(500, 50, "hold", 2, why="still open after 200 s: so")
    _, reason = gate(ramped(tmp_path / "held", HALF, change(0, 50, "start", 1), begun, held), "ramp")
    assert reason.startswith("It was held at 25 %: still open after 200 s: so; ")


def test_what_was_held_is_open(tmp_path: Path) -> None:
    verdict, reason = gate(ramped(tmp_path, HALF, change(0, 50, "start", 1)), "ramp")
    assert (verdict, reason.startswith("It was held at 5 %")) == ("INCONCLUSIVE", True)


def test_a_share_that_is_not_the_weights_is_seen(tmp_path: Path) -> None:
    for share, ok in ((50, True), (25, False)):
        run = ramped(tmp_path / str(share), HALF, change(0, share, "start", 1))
        check = next(item for item in judge(run).checks if item.check == "sample ratio")
        assert check.ok is ok, check.reason


def test_weights_that_changed_outside_a_ramp_are_no_ramp(tmp_path: Path) -> None:
    outside = replace(change(0, 50, "set", 1), step=None)
    names = {item.gate for item in judge(ramped(tmp_path, HALF, outside)).gates}
    assert "ramp" not in names


def test_the_journal_keeps_the_last_line_of_an_instant_and_no_torn_one(tmp_path: Path) -> None:
    first = change(0, 5, "start", 0)
    append(tmp_path, first)
    append(tmp_path, replace(first, done_ns=7))
    with (tmp_path / JOURNAL).open("a") as file:
        file.write('{"at_ns": 1, "weights": {"a"')
    assert read_weights(tmp_path) == (replace(first, done_ns=7),)
    assert read_weights(tmp_path / "none") == ()


def test_one_request_that_was_exposed_is_one(tmp_path: Path) -> None:
    run = ramped(tmp_path, HALF, change(0, 50, "start", 1))
    account = ramp_of(run)
    assert account is not None
    assert "; 1 request was exposed to it and 0 hurt" in ramp_gate(replace(account, exposed=1, hurt=0)).reason
    assert "; 2 requests were exposed to it and 1 hurt" in ramp_gate(replace(account, exposed=2, hurt=1)).reason
    ramp = {"outcome": "hold", "candidate": "compiled", "reason": "so", "exposed": 1, "hurt": 0}
    assert ramp_words({"ramp": ramp}) == [("Ramp", "compiled was held: so; 1 request exposed, 0 hurt")]


def test_users_have_no_generator_that_lags(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", HALF)
    assert "generator lag" in {check.check for check in judge(Run.of(read_run(directory))).checks}
    experiment = directory / "experiment.toml"
    experiment.write_text(experiment.read_text().replace("[traffic]", '[traffic]\narrivals = "users"') + "\n# edited\n")
    run = Run.of(read_run(directory))
    assert run.generator_lag_ms is None
    assert "generator lag" not in {check.check for check in judge(run).checks}
    summary = analyze(directory)
    assert summary["design"]["generator_lag_p99_ms"] is None
    assert "Generator lag" not in html_report(summary)
