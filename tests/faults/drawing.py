"""How long a browser takes to draw a report, and how large and how slow one may be."""

from __future__ import annotations

import time
from pathlib import Path

from tests.fakes.browser import Browser

LARGEST_REPORT = 6_000_000  # bytes
LONGEST_DRAWING_S = 2.0


def drawn_s(report: Path, folder: Path, *, times: int = 5) -> list[float]:
    """Seconds from the address to the second frame after all is loaded, each time anew. The browser keeps its own in
    `folder`. Raises RuntimeError where the page complains."""
    took = []
    with Browser(folder) as browser:
        tab = browser.open("data:text/html,")
        for _ in range(times):
            began = time.perf_counter()
            tab.send("Page.navigate", url=report.as_uri())
            tab.wait_for("document.readyState === 'complete' && location.protocol === 'file:'")
            tab.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")
            took.append(round(time.perf_counter() - began, 3))
            if tab.complaints:
                raise RuntimeError(f"the report complains: {tab.complaints}")
            tab.send("Page.navigate", url="data:text/html,")
            tab.wait_for("document.readyState === 'complete' && location.protocol === 'data:'")
    return took
