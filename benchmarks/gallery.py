"""Write docs/gallery: reports of kept runs, a picture of the first screen of each, and an index.

    python benchmarks/gallery.py            # all of docs/gallery, which needs Chromium
    python benchmarks/gallery.py ramp-back  # the page and the pictures of one entry

The pages are not tracked; the index and its pictures are. Headline and verdict come from the kept verdict of a case,
which a test judges again, or from the kept summary of a ramp.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.report.html import html_report
from analysis.summary.summary import analyze
from analysis.wording import counted
from benchmarks.case import archive_of, verdict_file
from benchmarks.kept import unpack

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
GALLERY = ROOT / "docs" / "gallery"
WIDTH, HEIGHT = 1280, 900
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_PATIENCE_S = 60.0
_POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>\n')


@dataclass(frozen=True)
class Entry:
    """One report: `asked` says what the run was for. Of a ramp `experiment` and `machine` are told here, as only a part
    of its summary was kept."""

    name: str
    title: str
    asked: str
    records: Path
    experiment: str = ""
    machine: str = ""

    @property
    def is_case(self) -> bool:
        """Whether the records of its runs are kept, so that they can be judged again."""
        return self.records.is_file()


def entries() -> list[Entry]:
    """What the gallery shows, in its order."""
    return [
        Entry(
            "pass",
            "PASS",
            "May compiled-bucketed replace eager, a card each, the shapes of Llama-3-8B in bfloat16? Six trials of "
            "three runs, on three machines.",
            archive_of("ab"),
        ),
        Entry(
            "fail",
            "FAIL",
            "May torch.compile with its defaults replace eager, a card each, the shapes of Llama-3-8B in bfloat16, "
            "after a warm-up with prompts of eight lengths?",
            archive_of("naive"),
        ),
        Entry(
            "widening",
            "FAIL in mid-run",
            "Eager, compiled-bucketed, compiled-dynamic and torch.compile's defaults, a card each, the shapes of "
            "Llama-3-8B in bfloat16, under lengths that are an eighth of a conversation's for two minutes and then "
            "whole: what compiles, and when?",
            archive_of("widening"),
        ),
        Entry(
            "planted",
            "FAIL by latency",
            "Eager beside three copies of it whose engine steps last 5, 10 and 20 % longer, a card each, the shapes of "
            "Llama-3-8B in bfloat16: which are found in six trials?",
            archive_of("planted-decode-h200"),
        ),
        Entry(
            "unexplained",
            "A stall that no compile explains",
            "Eager beside one that stands still for two seconds once in a trial, one that holds 1.3 times its memory, "
            "and one in which nothing is planted: which are found in three trials?",
            archive_of("planted-others"),
        ),
        Entry(
            "turns",
            "Two PASS, one is open",
            "Eager, compiled-padded, compiled-bucketed and compiled-dynamic taking turns of 10 s on one card, the "
            "shapes of Llama-3.2-1B in bfloat16: which may replace eager where there is one card?",
            archive_of("turns"),
        ),
        Entry(
            "inconclusive",
            "INCONCLUSIVE",
            "Eager against itself, a card each, the shapes of Llama-3-8B in bfloat16: does the judge see what is not "
            "there? Six trials of two runs, on two machines.",
            archive_of("aa"),
        ),
        Entry(
            "ramp-on",
            "A ramp that goes on",
            "Users' own traffic, 15 requests/s: may compiled-bucketed have 5, 25, 50 and 100 % of it, step by step, "
            "the shapes of Llama-3.2-1B in bfloat16?",
            RESULTS / "h100-users-ramp" / "bucketed",
            experiment="case-ramp",
            machine="2 NVIDIA H100s of one host, 32 processors",
        ),
        Entry(
            "ramp-back",
            "A ramp that goes back",
            "The same traffic and servers, and torch.compile with its defaults as the candidate.",
            RESULTS / "h100-users-ramp" / "naive",
            experiment="case-ramp",
            machine="2 NVIDIA H100s of one host, 32 processors",
        ),
        Entry(
            "frontier",
            "A frontier",
            "Which of six policies holds which load on one card with a p99 TTFT of 500 ms, the shapes of Llama-3-8B in "
            "bfloat16, the lengths of the Azure conversation trace?",
            archive_of("frontier"),
        ),
    ]


def outcome(entry: Entry) -> dict[str, Any]:
    """Overall verdict, headline and trials, as they were kept."""
    file = verdict_file(entry.records) if entry.is_case else entry.records / "summary.json"
    kept = json.loads(file.read_text(encoding="utf-8"))
    trials = kept["trials"] if entry.is_case else kept["design"]["trials"]
    return {"overall": kept["overall"], "headline": kept["headline"], "trials": trials}


def summary_of(entry: Entry) -> dict[str, Any]:
    """The summary of its records, or what was kept of it."""
    if entry.is_case:
        return analyze(unpack(entry.records))
    kept: dict[str, Any] = json.loads((entry.records / "summary.json").read_text(encoding="utf-8"))
    return {"name": entry.experiment, "run_id": entry.records.name, **kept}


def machine(entry: Entry) -> str:
    """The cards that the arms of its runs had, and how many processors were beside them."""
    if entry.machine:
        return entry.machine
    seen = []
    for file in sorted(unpack(entry.records).glob("*/environment.json")):
        environment = json.loads(file.read_text(encoding="utf-8"))
        experiment = tomllib.loads((file.parent / "experiment.toml").read_text(encoding="utf-8"))
        default = experiment["model"].get("device", "cpu")
        devices = {arm.get("model", {}).get("device", default) for arm in experiment["arms"]} - {"cpu"}
        cards = [f"{len(devices)} {environment['gpus'][0].split(',')[0]}"] if devices and environment["gpus"] else []
        seen.append(", ".join([*cards, f"{environment['cpu']['usable']} processors"]))
    return "; ".join(dict.fromkeys(seen))


def command(entry: Entry) -> str:
    """What makes its report again."""
    return f"python benchmarks/gallery.py {entry.name}"


def pictures(entry: Entry) -> dict[str, str]:
    """Its pictures: of the first screen, and of a part of the page where one is named."""
    first = {f"{entry.name}.png": ""}
    return first if entry.is_case else first | {f"{entry.name}-weights.png": "weights"}


def index() -> str:
    """The text of docs/gallery/README.md."""
    parts = [
        "# Gallery",
        "Reports of real runs. Each picture shows the first screen of a page. `make gallery` writes the pages to this "
        "folder from [the kept records](../../benchmarks/results/README.md), as single HTML files; [reading a "
        "report](../reading-a-report.md) explains each part. Of the ramps only the gates, the ramp and the figures of "
        "the arms were kept; their pages leave the rest open.",
    ]
    for entry in entries():
        parts.append(f"## {entry.title}")
        found = outcome(entry)
        count = counted(found["trials"], "trial")
        parts += [
            entry.asked,
            f"> **{found['overall']}.** {found['headline']}",
            f"{count}; {machine(entry)}. [The records](../../{entry.records.relative_to(ROOT)}), and "
            "the command that makes the page:",
            f"```\n{command(entry)}\n```",
            *(f"![{_shown(entry, part)}]({name})" for name, part in pictures(entry).items()),
        ]
    return "\n\n".join(parts) + "\n"


def _shown(entry: Entry, part: str) -> str:
    return f"{entry.title}: {'the share of the candidate over time' if part else 'the first screen of the report'}"


def alone(page: str, part: str) -> str:
    """The page with one of its parts alone under its head, unfolded, so that a first screen shows it. The policy goes:
    it allows no style but the page's own."""
    hidden = f"main > :not(#{part}), footer {{ display: none }}"
    page = page.replace(f'<details class="section" id="{part}">', f'<details class="section" id="{part}" open>')
    return _POLICY.sub("", page).replace("</head>", f"<style>{hidden}</style>\n</head>", 1)


def picture(browser: str, page: str, file: Path) -> None:
    """`file` shows the page as a window of that size does."""
    with tempfile.TemporaryDirectory() as folder:
        shown = Path(folder) / "page.html"
        shown.write_text(page, encoding="utf-8")
        file.unlink(missing_ok=True)
        done = subprocess.run(
            [
                *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"),
                *(f"--user-data-dir={folder}/profile", f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={file}"),
                shown.as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=False,
        )
    if done.returncode or not file.is_file():
        raise RuntimeError(f"{browser} took no picture of {file.stem}: {done.stderr.strip()[-500:]}")


def write(entry: Entry, folder: Path, browser: str) -> None:
    """The page of the entry and its pictures stand in `folder`."""
    page = html_report(summary_of(entry))
    (folder / f"{entry.name}.html").write_text(page, encoding="utf-8", newline="\n")
    for name, part in pictures(entry).items():
        picture(browser, alone(page, part) if part else page, (folder / name).resolve())


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/gallery.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [entry.name for entry in entries()]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}: all where none is given")
    parser.add_argument("--out", type=Path, default=GALLERY, help="the folder (default: docs/gallery)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The gallery is written, or of it what was named; the exit code."""
    options = parser().parse_args(arguments)
    shown = {entry.name: entry for entry in entries()}
    if unknown := sorted(set(options.names) - set(shown)):
        parser().error(f'"{unknown[0]}" is not in the gallery: use {", ".join(shown)}')
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
        parser().error(f"no browser takes the pictures: install one of {', '.join(_BROWSERS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names or shown:
        write(shown[name], options.out, browser)
        print(options.out / f"{name}.html", flush=True)
    if not options.names:
        (options.out / "README.md").write_text(index(), encoding="utf-8", newline="\n")
        print(options.out / "README.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
