"""The gallery shows what the kept records say now."""

from __future__ import annotations

import html
import struct

import pytest

from analysis.report.html import html_report
from benchmarks.gallery import GALLERY, HEIGHT, WIDTH, alone, entries, index, outcome, pictures, summary_of

SHOWN = entries()
AGAIN = "run `make gallery` again"


def test_the_index_says_what_the_records_say() -> None:
    assert (GALLERY / "README.md").read_text(encoding="utf-8") == index(), AGAIN


def test_each_kind_of_report_is_shown() -> None:
    outcomes = {entry.name: outcome(entry)["overall"] for entry in SHOWN}
    failed = ("fail", "widening", "planted", "unexplained", "ramp-back")
    assert {outcomes[name] for name in failed} == {"FAIL"}
    assert outcomes["inconclusive"] == outcomes["turns"] == "INCONCLUSIVE"
    assert outcomes["ramp-on"] == outcomes["pass"] == "PASS"
    assert set(outcomes) == {*failed, "inconclusive", "turns", "ramp-on", "pass", "frontier"}


@pytest.mark.parametrize("name", ["fail", "ramp-back"])
def test_a_page_has_the_headline_of_its_records(name: str) -> None:
    entry = next(entry for entry in SHOWN if entry.name == name)
    text = html.unescape(html_report(summary_of(entry)))
    assert outcome(entry)["headline"] in " ".join(text.split())


@pytest.mark.parametrize("name", [name for entry in SHOWN for name in pictures(entry)])
def test_each_picture_is_a_screen_and_small(name: str) -> None:
    content = (GALLERY / name).read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24]) == (WIDTH, HEIGHT)
    assert 20_000 < len(content) <= 200_000  # an empty screen has 5 kB


def test_nothing_else_is_in_the_gallery() -> None:
    shown = {name for entry in SHOWN for name in pictures(entry)}
    assert {path.name for path in GALLERY.iterdir() if path.suffix != ".html"} == {"README.md"} | shown


def test_a_part_of_a_page_is_shown_under_its_head() -> None:
    page = '<head>\n<meta http-equiv="Content-Security-Policy" content="default-src">\n</head>\n<body>'
    hidden = "main > section:not(#looks), footer { display: none }"
    assert alone(page, "looks") == f"<head>\n<style>{hidden}</style>\n</head>\n<body>"
