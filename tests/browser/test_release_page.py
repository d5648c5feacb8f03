from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from analysis.report.release import (
    write_release_reports,
)
from tests.analysis.report.conftest import BROWSER
from tests.analysis.report.test_release import compared


@pytest.mark.skipif(BROWSER is None, reason="no page was tested, because Chromium is absent: apt-get install chromium")
def test_page_opens_in_a_browser_without_a_complaint(tmp_path: Path) -> None:
    page = write_release_reports(compared(), tmp_path / "out")
    assert BROWSER is not None
    ran = subprocess.run(
        [
            *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
            *("--disable-background-networking", "--enable-logging=stderr", "--v=0", "--dump-dom"),
            *(f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in ran.stderr, ran.stderr
    assert "trend-new" in ran.stdout
