"""Pages name and link what is there; the changes that docs/where.md describes are tried in a copy."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.docs.commands import pages

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "where.md").read_text(encoding="utf-8")

DESIGN = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (?:`([\w.]+)/?`)? ?\|([^|]*)\|", re.M)

Edit = tuple[str, str, str]  # file, old text, new text


GATE = '''def cut_gate(run: Run, arm: str) -> Gate:
    """Few enough requests were under way at the end."""
    cut, most = float(run.requests.cut[run.of_arm(arm)].sum()), float(run.limits.max_cut)
    reason = f"{cut:.0f} requests of {arm} were cut, limit {most:.0f}."
    return count_gate(arm, "cut", "error", cut, most, "count", reason)


def death_gates('''


def files_of(change: str) -> set[str]:
    """Return the files that the page names for `change`."""
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| {change} |"))
    return set(re.findall(r"`([\w/.-]+)`", row.split("|")[2]))


def test_every_file_that_the_page_names_exists() -> None:
    rows = (line for line in PAGE.splitlines() if line.startswith("| "))
    named = {name for row in rows for name in re.findall(r"`([\w/.-]+/[\w/.-]*)`", row)}
    assert len(named) > 15
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what judging needs."""
    for folder in ("analysis", "servers", "tests/fakes"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def change(tree: Path, edits: Sequence[Edit]) -> None:
    for name, before, after in edits:
        path = tree / name
        text = path.read_text(encoding="utf-8")
        assert text.count(before) == 1, f"{name}: {before}"
        path.write_text(text.replace(before, after), encoding="utf-8")


def judged(tree: Path, run: str) -> tuple[dict[str, Any], str]:
    """Return the summary and the reports of the FakeRun that the expression makes, by the tree's own code."""
    code = f"""
import json
from pathlib import Path
from analysis.report import write_reports
from analysis.summary.summary import analyze, write_summary
from tests.fakes.runs import Compile, EAGER, FakeArm, FakeRun, write_run
directory = write_run(Path("run"), {run})
summary = analyze(directory)
write_summary(summary, directory / "judged.json")
write_reports(summary, directory)
"""
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads((tree / "run" / "judged.json").read_text())
    return summary, (tree / "run" / "report.md").read_text() + (tree / "run" / "report.html").read_text()


def test_a_metric_a_gate_and_an_event_kind_are_added_in_the_files_that_the_page_names(tree: Path) -> None:
    requests, gates = "analysis/records/requests.py", "analysis/judging/gates/objectives.py"
    metrics = '("ttft", "e2e", "tpot", "max_itl"'
    metric = [
        (requests, f"METRICS = {metrics})", f'METRICS = {metrics}, "decode")'),
        (requests, "    max_itl_ms: Latencies\n", "    max_itl_ms: Latencies\n    decode_ms: Latencies\n"),
        (requests, '"max_itl_ms": max_itl}', '"max_itl_ms": max_itl, "decode_ms": e2e - ttft}'),
        (
            "analysis/settings/metrics.py",
            '    "max_itl": "max ITL",\n',
            '    "max_itl": "M",\n    "decode": "decode time",\n',
        ),
    ]
    limit = "    max_cut: int = Field(default=0, ge=0, le=1000)\n    max_error_pct: "
    deaths = "    return [gate, *death_gates(run, arm)] if run.records.trials else [gate]\n"
    cut = "    return [gate, cut_gate(run, arm), *death_gates(run, arm)] if run.records.trials else [gate]\n"
    gate = [
        ("analysis/settings/gate_limits.py", "    max_error_pct: ", limit),
        (gates, "def death_gates(", GATE),
        (gates, deaths, cut),
    ]
    last = '"limit_hit", "jit"'
    kind = [
        (
            "analysis/records/schemas.py",
            '    "autotune": "autotune",\n',
            '    "autotune": "a",\n    "relink": "relinking",\n',
        ),
        ("servers/config.py", f"{last})", f'{last}, "relink")'),
    ]
    assert {name for name, _, _ in metric} == files_of("metric (a latency of a request)")
    assert {name for name, _, _ in gate} == files_of("gate")
    assert {name for name, _, _ in kind} | {"servers/compiler/recorder.py"} == files_of("compile event kind")
    change(tree, [*metric, *gate, *kind])
    arms = '(EAGER, FakeArm(name="compiled", compiles=(Compile(at_s=300.0, seconds=4.0, kind="relink"),)))'
    limits = 'gates={"metrics": ["decode"], "max_cut": 3}, slo={"p99_decode_ms": 60000}'
    summary, report = judged(tree, f"FakeRun(arms={arms}, {limits})")
    judged_gates = {gate["gate"]: gate for gate in summary["gates"]}
    assert judged_gates["noninferiority p99_decode"]["value"] is not None
    assert judged_gates["slo p99_decode_ms"]["verdict"] in ("PASS", "INCONCLUSIVE")
    assert (judged_gates["cut"]["verdict"], judged_gates["cut"]["limit"]) == ("PASS", 3.0)
    assert judged_gates["longest stall"]["verdict"] == "FAIL"
    assert [event["kind"] for event in summary["events"]] == ["relink"]
    for shown in ('<th scope="row">decode time</th>', "requests of compiled were cut, limit 3.", "relinking"):
        assert shown in report


def modules_named(package: str) -> dict[str, set[str]]:
    """Return the modules that the design page names, by layer; "" holds those of the package itself."""
    section = DESIGN.split(f"### {package}:")[1].split("\n##")[0].split("\n\n`benchmarks/`")[0]
    layers: dict[str, set[str]] = {"": set()}
    for layer, modules in ROW.findall(section):
        if layer.endswith(".py"):
            layers[""].add(layer.removesuffix(".py"))
        else:
            layers.setdefault(layer, set()).update(re.findall(r"`(\w+)`", modules))
    return layers


def modules_there(package: str) -> dict[str, set[str]]:
    layers: dict[str, set[str]] = {"": set()}
    for path in (ROOT / package).rglob("*.py"):
        parts = path.relative_to(ROOT / package).with_suffix("").parts
        if parts[-1] != "__init__" and parts[0] != "rpc":
            layers.setdefault(parts[0] if len(parts) > 1 else "", set()).add(parts[min(1, len(parts) - 1)])
    return layers


def test_the_design_page_names_every_module_under_its_layer() -> None:
    for package in ("loadtests", "servers", "analysis"):
        named, there = modules_named(package), modules_there(package)
        named[""] -= {"rpc"}
        assert named == there, package


def links_and_anchors(text: str) -> tuple[list[str], set[str]]:
    """Return what a page links, and its anchors: those that it sets, and those that GitHub makes of its headings."""
    links: list[str] = []
    anchors: dict[str, int] = {}
    before: Token | None = None
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        inner = token.children or []
        html = [part.content for part in inner if part.type == "html_inline"]
        anchors |= dict.fromkeys(re.findall(r'<a id="(.+?)">', "".join(html)), 0)
        links += [str(part.attrs[key]) for part in inner for key in ("href", "src") if key in part.attrs]
        if before is not None and before.type == "heading_open":
            title = "".join(part.content for part in inner if part.type in ("text", "code_inline"))
            slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
            anchors[slug] = anchors.get(slug, -1) + 1
            if anchors[slug]:
                anchors[f"{slug}-{anchors[slug]}"] = 0
        before = token
    return links, set(anchors)


def test_anchors_are_those_of_github() -> None:
    text = '<a id="z"></a>k\n'
    text += "# A `b_c`, [d](x.md#y)\n## E 3.2 – f\n## E 3.2 – f\n| t |\n|---|\n| ![g](h.png) |\n```\n# [i](j)\n```\n"
    assert links_and_anchors(text) == (["x.md#y", "h.png"], {"z", "a-b_c-d", "e-32--f", "e-32--f-1"})


def test_every_relative_link_leads_to_a_file_and_an_anchor_that_are_there() -> None:
    read = {path: links_and_anchors(path.read_text(encoding="utf-8")) for path in (*pages(), ROOT / "CHANGELOG.md")}
    dead, relative = [], 0
    for page, (links, _) in read.items():
        for link in links:
            if re.match(r"[a-z]+:", link):
                continue
            relative += 1
            name, _, anchor = unquote(link).partition("#")
            target = (page.parent / name).resolve() if name else page
            if not target.exists() or (anchor and anchor not in read[target][1]):
                dead.append(f"{page.relative_to(ROOT)}: {link}")
    assert dead == []
    assert relative > 300
