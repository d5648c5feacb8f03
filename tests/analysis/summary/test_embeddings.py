"""A run whose requests are answered by vectors: judged and shown by what such requests have."""

from __future__ import annotations

import re
from typing import Any

import pytest

from analysis.judging.judgement import judge
from analysis.records.documents import write_document
from analysis.records.run_records import read_run
from analysis.report.html import html_report
from analysis.report.markdown import markdown_report
from analysis.report.terminal import verdict_table
from analysis.run.run import Run
from analysis.summary.summary import analyze
from tests.fakes.runs import EAGER, Compile, FakeArm, FakeRun, write_run

PADDED = FakeArm(name="padded", ratio=0.8, error_share=0.003)
NAIVE = FakeArm(name="naive", compiles=[Compile(at_s=60, seconds=2)])
RUN = FakeRun(task="embed", arms=(EAGER, PADDED, NAIVE), slo={"p99_e2e_ms": 20_000}, step_kinds=("encode",))
NO_TOKENS = re.compile(r"TTFT|TPOT|ITL|output tokens|energy a token")


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return analyze(write_run(tmp_path_factory.mktemp("embeddings") / "run", RUN))


def gates_of(summary: dict[str, Any], arm: str) -> dict[str, str]:
    return {row["gate"]: row["verdict"] for row in summary["gates"] if row["arm"] == arm}


def test_gates_rest_on_e2e_errors_and_recompiles(summary: dict[str, Any]) -> None:
    padded, naive = gates_of(summary, "padded"), gates_of(summary, "naive")
    assert padded["noninferiority p99_e2e"] == "PASS"
    assert padded["slo p99_e2e_ms"] == "PASS"
    assert padded["recompiles"] == "PASS"
    assert naive["recompiles"] == "FAIL"
    assert not any("ttft" in gate or "itl" in gate for gate in (*padded, *naive))
    assert {row["metric"] for row in summary["comparisons"]} == {"e2e"}
    assert {row["rate"] for row in summary["rates"]} == {"goodput", "requests"}


def test_what_has_no_tokens_has_no_figures_of_them(summary: dict[str, Any]) -> None:
    assert summary["task"] == "embed"
    for arm in summary["arms"]:
        for part in ("metrics", "steady", "cold"):
            assert list(arm[part]) == ["e2e"]
        assert arm["output_tokens"] is None
        assert arm["output_token_rate"] is None
    assert list(summary["distribution"]["metrics"]) == ["e2e"]
    eager, padded, _ = summary["arms"]
    assert (eager["failed"], eager["ok"]) == (0, eager["requests"]), "an answer without tokens has not failed"
    assert 0 < padded["failed"] < 0.01 * padded["requests"]


def test_reports_say_nothing_of_tokens_and_count_sentences(summary: dict[str, Any]) -> None:
    page = html_report(summary)
    shown = page[: page.index("<script")]
    for report in (markdown_report(summary), verdict_table(summary, width=120), shown):
        assert NO_TOKENS.search(report) is None, NO_TOKENS.search(report)
        assert "p99 E2E" in report
    assert "sentences" in markdown_report(summary)
    assert "sentences" in shown


def answers(arm: str, lowest: float) -> dict[str, Any]:
    same, of = (6, 6) if lowest >= 0.999 else (5, 6)
    row = {"arm": arm, "replica": f"{arm}-0", "error": None, "departs": None, "same": same, "of": of}
    return row | {"cosine": lowest, "min_cosine": 0.999}


def test_vectors_are_judged_by_their_cosine(tmp_path: Any) -> None:
    directory = write_run(tmp_path / "run", FakeRun(task="embed", duration_s=90, arms=(EAGER, PADDED, NAIVE)))
    path = directory / "trial-01" / "trial.json"
    facts = read_run(directory).trials[0]
    rows = [answers("eager", 1.0), answers("padded", 0.9995), answers("naive", 0.5)]
    write_document(path, {**facts, "answers": {"dtype": "bfloat16", "prompts": [4] * 6, "replicas": rows}})
    judgement = judge(Run.of(read_run(directory)))
    parity = {gate.arm: gate for gate in judgement.gates if gate.gate == "parity"}
    assert {arm: gate.verdict for arm, gate in parity.items()} == {"padded": "PASS", "naive": "FAIL"}
    assert "0.500000" in parity["naive"].reason
    assert (parity["padded"].value, parity["padded"].limit) == (0.9995, 0.999)
