"""The gallery shows what the kept records say now."""

from __future__ import annotations

import html
import struct

import pytest

from benchmarks.gallery import GALLERY, HEIGHT, WIDTH, Entry, alone, entries, index, outcome, pictures

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


@pytest.mark.parametrize("entry", SHOWN, ids=lambda entry: entry.name)
def test_each_page_has_the_headline_of_its_records(entry: Entry) -> None:
    assert (entry.records / ("runs.json" if entry.joined else "weights.jsonl")).is_file()
    page = GALLERY / f"{entry.name}.html"
    assert page.stat().st_size <= 800_000
    text = html.unescape(page.read_text(encoding="utf-8"))
    assert outcome(entry)["headline"] in " ".join(text.split()), AGAIN


@pytest.mark.parametrize("name", [name for entry in SHOWN for name in pictures(entry)])
def test_each_picture_is_a_screen_and_small(name: str) -> None:
    content = (GALLERY / name).read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24]) == (WIDTH, HEIGHT)
    assert 20_000 < len(content) <= 200_000  # an empty screen has 5 kB


def test_nothing_else_is_in_the_gallery() -> None:
    pages = {f"{entry.name}.html" for entry in SHOWN}
    shown = {name for entry in SHOWN for name in pictures(entry)}
    assert {path.name for path in GALLERY.iterdir()} == {"README.md"} | pages | shown


def test_a_part_of_a_page_is_shown_under_its_head() -> None:
    page = '<head>\n<meta http-equiv="Content-Security-Policy" content="default-src">\n</head>\n<body>'
    hidden = "main > section:not(#looks), footer { display: none }"
    assert alone(page, "looks") == f"<head>\n<style>{hidden}</style>\n</head>\n<body>"
