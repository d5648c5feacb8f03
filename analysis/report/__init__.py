"""What a reader sees of a judged run: HTML, Markdown, JUnit XML and a table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tailgate.analysis.report.html import html_report
from tailgate.analysis.report.rendering import junit_xml, markdown_report
from tailgate.analysis.report.terminal import verdict_table

__all__ = ["html_report", "junit_xml", "markdown_report", "verdict_table", "write_reports"]


def write_reports(summary: Mapping[str, Any], run_dir: Path) -> list[Path]:
    """Write report.html, report.md and junit.xml of `summary` into `run_dir`; return their paths, in that order.

    The same summary gives the same bytes. Raises OSError when `run_dir` cannot be written.
    """
    written = []
    for name, render in (("report.html", html_report), ("report.md", markdown_report), ("junit.xml", junit_xml)):
        path = run_dir / name
        path.write_text(render(summary), encoding="utf-8", newline="\n")
        written.append(path)
    return written
