"""docs/where.md is tried: a metric, a gate and a compile event kind are added to a copy of the tree, in those files."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.fakes.summary_schema import faults

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "where.md").read_text(encoding="utf-8")

SCHEMA = "docs/schema/summary-1.schema.json"

Edit = tuple[str, str, str]  # file, what stands there, what stands there then


def files_of(change: str) -> set[str]:
    """The files that the page names for `change`."""
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| {change} |"))
    return set(re.findall(r"`([\w/.-]+)`", row.split("|")[2]))


def test_every_file_that_the_page_names_is_there() -> None:
    named = {
        name
        for line in PAGE.splitlines()
        if line.startswith("| ")
        for name in re.findall(r"`([\w/.-]+/[\w/.-]*)`", line)
    }
    assert len(named) > 15
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what judging needs."""
    for folder in ("analysis", "servers", "tests/fakes", "docs/schema"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def change(tree: Path, edits: Sequence[Edit]) -> None:
    for name, before, after in edits:
        path = tree / name
        text = path.read_text(encoding="utf-8")
        assert text.count(before) == 1, f"{name}: {before}"
        path.write_text(text.replace(before, after), encoding="utf-8")


def judged(tree: Path, run: str) -> tuple[dict[str, object], str]:
    """The summary and the Markdown report of the FakeRun that the expression makes, by the tree's own code."""
    code = f"""
import json
from pathlib import Path
from analysis.report import write_reports
from analysis.summary.summary import analyze, write_summary
from tests.fakes.runs import Compile, EAGER, FakeArm, FakeRun, write_run
from servers.config import STALLING_KINDS
directory = write_run(Path("run"), {run})
for path in directory.glob("trial-*/trial.json"):  # as a trial writes it
    path.write_text(json.dumps(json.loads(path.read_text()) | {{"stalling_kinds": STALLING_KINDS}}))
summary = analyze(directory)
write_summary(summary, directory / "judged.json")  # summary.json is held to the schema of this tree
write_reports(summary, directory)
"""
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads((tree / "run" / "judged.json").read_text())
    assert list(faults(summary, json.loads((tree / SCHEMA).read_text(encoding="utf-8")))) == []
    return summary, (tree / "run" / "report.md").read_text() + (tree / "run" / "report.html").read_text()


def test_a_metric_is_added_in_the_files_that_the_page_names(tree: Path) -> None:
    edits = [
        (
            "analysis/records/requests.py",
            'METRICS = ("ttft", "e2e", "tpot", "max_itl")',
            'METRICS = ("ttft", "e2e", "tpot", "max_itl", "decode")',
        ),
        ("analysis/records/requests.py", "    max_itl_ms: Floats\n", "    max_itl_ms: Floats\n    decode_ms: Floats\n"),
        (
            "analysis/records/requests.py",
            "        max_itl_ms=max_itl,\n",
            "        max_itl_ms=max_itl,\n        decode_ms=e2e - ttft,\n",
        ),
        (
            "analysis/settings/metrics.py",
            '    "max_itl": "max ITL",\n',
            '    "max_itl": "max ITL",\n    "decode": "decode time",\n',
        ),
        (SCHEMA, '"examples": ["ttft", "e2e",', '"examples": ["decode", "ttft", "e2e",'),
    ]
    assert {name for name, _, _ in edits} == files_of("metric (a latency of a request)")
    change(tree, edits)
    summary, report = judged(tree, 'FakeRun(gates={"metrics": ["decode"], "draws": 199}, slo={"p99_decode_ms": 60000})')
    gates = {gate["gate"]: gate for gate in summary["gates"]}  # type: ignore[attr-defined]
    assert gates["noninferiority p99_decode"]["verdict"] == "PASS"
    assert gates["slo p99_decode_ms"]["verdict"] in ("PASS", "INCONCLUSIVE")
    assert "non-inferiority p99 decode time" in report
    assert "| decode time |" in report


def test_a_gate_is_added_in_the_files_that_the_page_names(tree: Path) -> None:
    gate = '''def cut_gate(arm: str, cut: int, most: int) -> Gate:
    """Few enough requests were under way at the end."""
    verdict, reason = (FAIL if cut > most else PASS), f"{cut} requests of {arm} were cut, limit {most}."
    counts = {"value": float(cut), "limit": float(most), "unit": "count"}
    return Gate(arm=arm, gate="cut", kind="error", verdict=verdict, reason=reason, **counts)


def death_gate('''
    edits = [
        (
            "analysis/settings/gate_limits.py",
            "    max_error_pct: ",
            "    max_cut: Annotated[int, Range(0, 1000)] = 0\n    max_error_pct: ",
        ),
        ("analysis/judging/gates.py", "def death_gate(", gate),
        ("analysis/judging/run_gates.py", "    death_gate,\n", "    cut_gate,\n    death_gate,\n"),
        (
            "analysis/judging/run_gates.py",
            "    return [*gates, *death_gates(run, arm)] if run.records.trials else gates\n",
            "    gates.append(cut_gate(arm, int(requests.cut[run.of_arm(arm)].sum()), run.limits.max_cut))\n"
            "    return [*gates, *death_gates(run, arm)] if run.records.trials else gates\n",
        ),
    ]
    assert {name for name, _, _ in edits} == files_of("gate")
    change(tree, edits)
    summary, report = judged(tree, 'FakeRun(gates={"draws": 199, "max_cut": 3})')
    (found,) = [gate for gate in summary["gates"] if gate["gate"] == "cut"]  # type: ignore[attr-defined]
    assert (found["verdict"], found["limit"]) == ("PASS", 3.0)
    assert "requests of compiled were cut, limit 3." in report


def test_a_compile_event_kind_is_added_in_the_files_that_the_page_names(tree: Path) -> None:
    edits = [
        (
            "analysis/records/event_kinds.py",
            '    "autotune": "autotune",\n',
            '    "autotune": "autotune",\n    "relink": "kernel relinking",\n',
        ),
        (
            "servers/config.py",
            '"graph_capture", "autotune", "limit_hit", "jit")',
            '"graph_capture", "autotune", "limit_hit", "jit", "relink")',
        ),
        (SCHEMA, '"graph_capture",\n', '"graph_capture",\n"relink",\n'),
    ]
    measured = {"servers/compiler/recorder.py"}
    assert {name for name, _, _ in edits} | measured == files_of("compile event kind")
    change(tree, edits)
    arms = '(EAGER, FakeArm(name="compiled", compiles=(Compile(at_s=300.0, seconds=4.0, kind="relink"),)))'
    summary, report = judged(tree, f'FakeRun(arms={arms}, gates={{"draws": 199}})')
    (event,) = [event for event in summary["events"] if event["phase"] == "serving"]  # type: ignore[attr-defined]
    assert event["kind"] == "relink"
    assert "kernel relinking" in report
    stalls = [gate for gate in summary["gates"] if gate["gate"] == "longest stall"]  # type: ignore[attr-defined]
    assert stalls[0]["verdict"] == "FAIL"
