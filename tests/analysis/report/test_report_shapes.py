"""The heat map of shapes: counts, shades and marks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from analysis.report.html import html_report
from analysis.report.shapes import SHADES, heat_maps

Summary = dict[str, Any]


def cell(batch: int, length: int, requests: int, **more: Any) -> dict[str, Any]:
    return {"batch": batch, "length": length, "requests": requests, "shapes": 1, "new": None, "compiles": 0} | more


@pytest.fixture
def shaped(demo: Summary) -> Summary:
    """The demo with two arms on common axes, one of which met new shapes and compiled."""
    demo["shapes"] = {
        "batches": [[1, 1], [2, 2]],
        "lengths": [[64, 64], [65, 128]],
        "arms": [
            {"arm": "eager", "requests": 1001, "unknown": 0, "cells": [cell(0, 0, 1000), cell(1, 1, 1)]},
            {
                "arm": "compiled-naive",
                "requests": 12_345,
                "unknown": 3,
                "cells": [
                    cell(0, 1, 12_345, shapes=40, new=39),
                    cell(1, 1, 0, shapes=0, new=0, compiles=2),
                ],
            },
        ],
    }
    return demo


def test_maps_have_common_axes_and_shades(shaped: Summary) -> None:
    eager, naive = heat_maps(shaped)
    assert (eager.arm, naive.arm) == ("eager", "compiled-naive")
    assert eager.lengths == naive.lengths == ("64", "65–128")
    first, last = eager.lines[0][1][0], naive.lines[0][1][1]
    assert first is not None
    assert last is not None
    assert (first.requests, last.requests) == ("1k", "12k")
    assert first.shade < last.shade == SHADES
    assert eager.lines[0][1][1] is None


def test_new_shapes_and_compiles_are_marked_and_said(shaped: Summary) -> None:
    naive = heat_maps(shaped)[1]
    new, compiled = naive.lines[0][1][1], naive.lines[1][1][1]
    assert new is not None
    assert compiled is not None
    assert (new.marks, compiled.marks) == (("new",), ("compiled",))
    assert new.said == "batch 1, length 65–128: 12,345 requests in 40 shapes, 39 first seen while serving"
    assert (compiled.requests, compiled.shade) == ("", 0)
    assert naive.about == (
        "40 shapes of 12,345 requests, 39 of them first seen while serving, 2 compiles while serving, "
        "3 requests without a recorded shape"
    )


def test_the_page_has_a_table_for_each_map(shaped: Summary, read_page: Callable[[str], Any]) -> None:
    page = read_page(html_report(shaped))
    tables = [found for found in page.find("table") if (found.get("class") or "").startswith("heat ")]
    assert [found["class"] for found in tables] == ["heat arm-0", "heat arm-2"]
    assert "39 first seen while serving" in page.text
    assert "#shapes" in {link["href"] for link in page.find("a")}


def test_a_single_request_is_drawn_darkest(demo: Summary) -> None:
    demo["shapes"] = {"batches": [[1, 1]], "lengths": [[8, 8]], "arms": [{"arm": "eager", "cells": [cell(0, 0, 1)]}]}
    drawn = heat_maps(demo)[0].lines[0][1][0]
    assert drawn is not None
    assert drawn.shade == SHADES


@pytest.mark.parametrize("shapes", [None, {}, {"arms": [{"arm": "eager", "cells": [{"batch": None}]}]}])
def test_what_is_not_known_is_not_drawn(demo: Summary, shapes: object) -> None:
    demo["shapes"] = shapes
    assert heat_maps(demo) == []
    assert 'id="shapes"' not in html_report(demo)
