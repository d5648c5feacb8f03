"""An arm without telemetry is judged by what shows outside, and the rest is said to be unknown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.judging.checks.arms import check_comparable, check_equal_work
from analysis.records.schemas import REQUESTS
from analysis.records.tables import RecordWriter, read_table
from analysis.report import write_reports
from analysis.report.terminal import verdict_table
from analysis.run.work import Work
from analysis.summary.summary import analyze
from tests.fakes.runs import EAGER, Compile, FakeArm, FakeRun, write_run

RECOMPILE_GATES = ("recompiles", "longest stall", "stall per minute", "requests hit")
PROBE = {"asked": 8, "chunks": 8, "tokens": 8, "prompt_tokens": 9, "streams": True, "seconds": 0.1}


def external_run(
    folder: Path, *arms: str, probe: dict[str, Any] | None = None, tokens_per_chunk: int = 1, **settings: Any
) -> dict[str, Any]:
    """The summary of a run whose `arms` are external: no configuration, no telemetry, no server columns."""
    run = FakeRun(
        arms=(EAGER, FakeArm(name="vllm", enabled=False), FakeArm(name="own", compiles=[Compile(at_s=400, seconds=3)])),
        **{"compare_models": True, **settings},
    )
    write_run(folder, run)
    for trial in folder.glob("trial-*"):
        facts = json.loads((trial / "trial.json").read_text())
        for row in facts["arms"]:
            row["kind"] = "tailgate"
            if row["name"] in arms:
                del row["config"]
                row |= {"kind": "openai", "probe": [probe or PROBE]}
                row["external"] = {"address": "http://10.0.0.7:8000/v1", "model_name": "llama"}
                facts["startup"].pop(row["name"], None)
        facts["deaths"] = []
        (trial / "trial.json").write_text(json.dumps(facts))
        rows = read_table(trial / "requests-0.arrow", REQUESTS)[0].to_pylist()
        (trial / "requests-0.arrow").unlink()
        with RecordWriter(trial / "requests-0.arrow", REQUESTS) as writer:
            for row in rows:
                row["max_tokens"] = row["output_tokens"]
                if row["arm"] in arms and row["token_ns"]:
                    row["token_ns"] = row["token_ns"][::tokens_per_chunk]
                writer.append(row)
    return analyze(folder)


def gates(summary: dict[str, Any], arm: str) -> dict[str, dict[str, Any]]:
    return {gate["gate"]: gate for gate in summary["gates"] if gate["arm"] == arm}


def checks(summary: dict[str, Any], arm: str | None = None) -> dict[str, dict[str, Any]]:
    return {check["check"]: check for check in summary["validity"] if check["arm"] in (None, arm)}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("external")
    return folder, external_run(folder, "vllm")


def test_compiles_of_an_arm_without_telemetry_are_judged_from_outside(mixed: tuple[Path, dict[str, Any]]) -> None:
    found = gates(mixed[1], "vllm")
    for name in RECOMPILE_GATES:
        assert (found[name]["verdict"], found[name]["value"]) == ("PASS", 0.0)
        assert "Seen from outside: no stall from" in found[name]["reason"]
        assert "shorter ones do not show" in found[name]["reason"]
    own = gates(mixed[1], "own")
    assert own["recompiles"]["verdict"] == "FAIL"


def test_what_shows_outside_is_judged_as_ever(mixed: tuple[Path, dict[str, Any]]) -> None:
    found = gates(mixed[1], "vllm")
    assert found["errors"]["verdict"] == "PASS"
    assert found["noninferiority p99_ttft"]["value"] is not None
    assert "deaths" not in found
    assert "deaths" in gates(mixed[1], "own")
    arm = next(row for row in mixed[1]["arms"] if row["name"] == "vllm")
    assert arm["verdict"] == "PASS"
    assert arm["metrics"]["ttft"]["p99_ms"] > 0


def test_sections_of_an_arm_without_telemetry_are_empty_and_not_zero(mixed: tuple[Path, dict[str, Any]]) -> None:
    arm = next(row for row in mixed[1]["arms"] if row["name"] == "vllm")
    own = next(row for row in mixed[1]["arms"] if row["name"] == "own")
    assert arm["compile"].keys() == own["compile"].keys()
    assert set(arm["compile"].values()) == {None}
    assert set(arm["padding"].values()) == {None}
    assert arm["startup"].pop("slowest") == []
    assert arm["startup"].pop("memory_bytes") == {}
    assert set(arm["startup"].values()) == {None}
    assert own["external"] is None


def test_comparison_says_what_was_not_compared(mixed: tuple[Path, dict[str, Any]]) -> None:
    comparable = checks(mixed[1], "vllm")["comparable"]
    assert comparable["ok"]
    assert "vllm (openai) is external: weights, precision" in comparable["reason"]
    assert "policy alone" in checks(mixed[1], "own")["comparable"]["reason"]
    assert checks(mixed[1], "own")["equal work"]["ok"]


def test_unsaid_comparison_with_an_external_arm_opens_the_gates(tmp_path: Path) -> None:
    summary = external_run(tmp_path, "vllm", compare_models=False, duration_s=90.0)
    assert not checks(summary, "vllm")["comparable"]["ok"]
    assert gates(summary, "vllm")["noninferiority p99_ttft"]["verdict"] == "INCONCLUSIVE"


def test_reports_name_the_external_arm_and_what_is_unknown(mixed: tuple[Path, dict[str, Any]]) -> None:
    folder, summary = mixed
    write_reports(summary, folder)
    markdown, html = (folder / "report.md").read_text(), (folder / "report.html").read_text()
    for report in (markdown, html, verdict_table(summary)):
        assert "Tailgate did not start it" in " ".join(report.split())
    for report in (markdown, html):
        assert "External arms: what was not checked" in report
    assert "openai at http://10.0.0.7:8000/v1, model llama" in html
    assert "external, openai" in html


def test_an_external_control_gives_reports_too(tmp_path: Path) -> None:
    summary = external_run(tmp_path, "eager", "vllm", "own", duration_s=90.0)
    write_reports(summary, tmp_path)
    assert "Tailgate started none of the arms" in (tmp_path / "report.html").read_text()
    assert "Start-up cost" not in (tmp_path / "report.md").read_text()
    named = checks(summary, "vllm")["comparable"]["reason"]
    assert "vllm (openai) and eager (openai) are external" in named
    assert all("Seen from outside" in gates(summary, "own")[name]["reason"] for name in RECOMPILE_GATES)


def test_chunks_of_several_tokens_are_said(tmp_path: Path) -> None:
    summary = external_run(tmp_path, "vllm", tokens_per_chunk=4, duration_s=90.0)
    arm = next(row for row in summary["arms"] if row["name"] == "vllm")
    assert any("ITL is per chunk" in note for note in arm["external"]["notes"])
    assert arm["external"]["chunks"] < arm["output_tokens"] / 2


def test_uncounted_tokens_and_missing_streams_are_said(tmp_path: Path) -> None:
    summary = external_run(tmp_path, "vllm", probe={**PROBE, "tokens": None, "streams": False}, duration_s=90.0)
    notes = " ".join(next(row for row in summary["arms"] if row["name"] == "vllm")["external"]["notes"])
    assert "does not count its tokens" in notes
    assert "does not stream" in notes
    # pieces of text are no tokens, and are not compared as such
    assert "answer tokens" not in checks(summary, "vllm")["equal work"]["reason"]


def work(*means: tuple[str, float, float]) -> Work:
    return Work(arm="vllm", control="eager", means=means)


def test_other_work_opens_the_comparison() -> None:
    same = check_equal_work(work(("prompt tokens", 100.0, 102.0), ("answer tokens", 20.0, 20.5)))
    assert same.ok
    template = check_equal_work(work(("prompt tokens", 120.0, 100.0), ("answer tokens", 20.0, 20.0)))
    assert not template.ok
    assert template.value == pytest.approx(20.0)
    assert "120 to 100 prompt tokens and 20 to 20 answer tokens, by their own count: that is other work" in (
        template.reason
    )
    assert {"noninferiority", "slo", "cold"} <= set(template.affects)
    short = check_equal_work(work(("answer tokens", 0.0, 20.0)))
    assert (short.ok, short.value) == (False, None)
    assert check_equal_work(work()).ok


def test_work_is_compared_request_by_request_where_arms_share_them(
    mixed: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    paired = checks(mixed[1], "vllm")["equal work"]
    assert (paired["ok"], paired["value"]) == (True, 0.0)
    # Arms that take turns meet other requests: only the share of what was planned can be compared.
    turns = checks(external_run(tmp_path, "vllm", design="switchback", duration_s=300.0), "vllm")["equal work"]
    assert "percent of the planned answer tokens" in turns["reason"]
    assert turns["ok"]


def test_nothing_is_said_to_be_equal_of_two_external_arms() -> None:
    check = check_comparable("b", [], intended=True, outside={"b": "oip", "a": "openai"})
    assert check.ok
    assert "b (oip) and a (openai) are external" in check.reason
    assert "policy alone" not in check.reason
