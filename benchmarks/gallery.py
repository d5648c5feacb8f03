"""Write docs/gallery: reports of kept runs, and a picture of the first screen of each.

    python benchmarks/gallery.py            # all pages and pictures, which needs Chromium
    python benchmarks/gallery.py ramp-back  # the page and the pictures of one

The pages are not tracked; the pictures are, and docs/gallery/README.md, which a test holds to the kept verdicts.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.case import archive_of, verdict_file
from benchmarks.kept import ROOT, unpack
from tailgate.analysis.report.html import html_report
from tailgate.analysis.summary.summary import analyze

GALLERY = ROOT / "docs" / "gallery"
RAMPS = ROOT / "benchmarks" / "results" / "h100-users-ramp"
WIDTH, HEIGHT = 1280, 900
# The records behind each page: the runs of a case, or the part of a ramp's summary that was kept.
PAGES: Mapping[str, Path] = {
    "pass": archive_of("ab"),
    "fail": archive_of("naive"),
    "widening": archive_of("widening"),
    "planted": archive_of("planted-decode-h200"),
    "unexplained": archive_of("planted-others"),
    "turns": archive_of("turns"),
    "inconclusive": archive_of("aa"),
    "ramp-on": RAMPS / "bucketed",
    "ramp-back": RAMPS / "naive",
    "frontier": archive_of("frontier"),
}
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_PATIENCE_S = 60.0
_POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>\n')


def kept(name: str) -> dict[str, Any]:
    """Return the stored verdict on a page's records, with its headline."""
    records = PAGES[name]
    file = verdict_file(records) if records.is_file() else records / "summary.json"
    outcome: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return outcome


def summary_of(name: str) -> dict[str, Any]:
    """Return the summary of a page's records, or what is stored of it."""
    records = PAGES[name]
    if records.is_file():
        return analyze(unpack(records))
    return {"name": "case-ramp", "run_id": records.name, **kept(name)}


def pictures(name: str) -> dict[str, str]:
    """Return the pictures of a page: of its first screen, and of a ramp's weights."""
    return {f"{name}.png": "", **({} if PAGES[name].is_file() else {f"{name}-weights.png": "weights"})}


def alone(page: str, part: str) -> str:
    """Return the page with one unfolded part alone under its head, so that a first screen shows it.

    It drops the policy, which allows only the page's own style.
    """
    hidden = f"main > :not(#{part}), footer {{ display: none }}"
    page = page.replace(f'<details class="section" id="{part}">', f'<details class="section" id="{part}" open>')
    return _POLICY.sub("", page).replace("</head>", f"<style>{hidden}</style>\n</head>", 1)


def picture(browser: str, page: str, file: Path) -> None:
    """Write a picture of the page in a window to `file`."""
    with tempfile.TemporaryDirectory() as folder:
        shown = Path(folder) / "page.html"
        shown.write_text(page, encoding="utf-8")
        file.unlink(missing_ok=True)
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
        command += [f"--user-data-dir={folder}/profile", f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={file}"]
        done = subprocess.run(
            [*command, shown.as_uri()], capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
    if done.returncode or not file.is_file():
        raise RuntimeError(f"{browser} took no picture of {file.stem}: {done.stderr.strip()[-500:]}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages and pictures, all or those that were named; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/gallery.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=[*PAGES, []], metavar="NAME", help=f"of {', '.join(PAGES)}")
    parser.add_argument("--out", type=Path, default=GALLERY, help="the folder (default: docs/gallery)")
    options = parser.parse_args(arguments)
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
        parser.error(f"no browser takes the pictures: install one of {', '.join(_BROWSERS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names or PAGES:
        page = html_report(summary_of(name))
        (options.out / f"{name}.html").write_text(page, encoding="utf-8", newline="\n")
        for file, part in pictures(name).items():
            picture(browser, alone(page, part) if part else page, (options.out / file).resolve())
        print(options.out / f"{name}.html", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
