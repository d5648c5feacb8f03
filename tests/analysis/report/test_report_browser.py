"""The page in a real browser: charts draw, nothing breaks, hostile text does nothing. Skipped where there is none."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from analysis.report.html import html_report

Summary = dict[str, Any]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--enable-logging=stderr", "--v=0", "--virtual-time-budget=3000", "--dump-dom"),
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on the path")


@pytest.fixture
def opened(tmp_path: Path, read_page: Callable[[str], Any]) -> Callable[[Summary], Any]:
    def open_page(summary: Summary) -> Any:
        file = tmp_path / "report.html"
        file.write_text(html_report(summary), encoding="utf-8")
        assert BROWSER is not None
        ran = subprocess.run(
            [BROWSER, *QUIET, f"--user-data-dir={tmp_path / 'profile'}", file.as_uri()],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert "CONSOLE" not in ran.stderr, ran.stderr
        return read_page(ran.stdout)

    return open_page


def test_every_chart_draws_without_an_error(demo: Summary, opened: Callable[[Summary], Any]) -> None:
    page = opened(demo)
    assert page.find("html", data_ready="yes")
    assert page.find("p", class_="broken") == []
    assert len(page.find("svg", class_="plot")) == 4
    bars = [
        found for found in page.find("g", role="button") if "recompile of compiled-naive" in (found["aria-label"] or "")
    ]
    assert len(bars) == len(demo["events"])
    assert [bar["tabindex"] for bar in bars] == ["0"] + ["-1"] * (len(bars) - 1)


def test_hostile_text_runs_nothing_in_a_browser(hostile: Summary, opened: Callable[[Summary], Any]) -> None:
    page = opened(hostile)
    assert page.find("html", data_ready="yes")
    assert page.find("p", class_="broken") == []
    assert page.find("img") == []
    assert len(page.find("script")) == 2
    assert page.text.startswith("FAIL · </script>")  # The title is the summary's own, not "pwned".


@pytest.mark.parametrize("emptied", [True, False])
def test_charts_without_data_say_so(nulls: Summary, emptied: bool, opened: Callable[[Summary], Any]) -> None:
    page = opened({} if emptied else nulls)
    assert page.find("html", data_ready="yes")
    assert page.find("p", class_="broken") == []
    assert "NaN" not in page.text
    assert "No arm was compared with the control." in page.text
