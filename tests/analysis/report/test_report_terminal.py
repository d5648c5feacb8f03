from __future__ import annotations

import io
import re
import sys
from typing import Any

import pytest
from rich.cells import cell_len

from analysis.report import verdict_table

Summary = dict[str, Any]


@pytest.mark.parametrize("name", ["demo", "rollout", "hostile", "nulls"])
@pytest.mark.parametrize("width", [60, 100])
def test_no_line_is_wider_than_asked(name: str, width: int, request: pytest.FixtureRequest) -> None:
    shown = verdict_table(request.getfixturevalue(name), width=width)
    assert max(map(cell_len, shown.splitlines())) <= width


@pytest.mark.parametrize("width", [60, 80, 100])
def test_no_figure_of_an_arm_is_cut(demo: Summary, width: int) -> None:
    arms = verdict_table(demo, width=width).split("limited by:")[0]
    for said in ("compiled-padded", "compiled-naive", "longest", "8.03 s", "×68.5", "8.95 s", "69", "? INCONCLUSIVE"):
        assert said in " ".join(arms.split())


def test_what_limits_all_gates_and_what_several_share_stand_once_above_them(sharing: Summary) -> None:
    shown = " ".join(verdict_table(sharing).split())
    shared = sharing["gates"][0]["reason"]
    assert shown.count(shared) == 1
    assert shown.index("limited by: blocks") < shown.index(shared) < shown.index("? INCONCLUSIVE non-inferiority")


def test_what_the_headline_says_is_not_said_again(demo: Summary) -> None:
    demo["headline"] = f"No verdict. {demo['validity'][0]['reason']}"
    demo["validity"][0]["ok"] = False
    assert " ".join(verdict_table(demo).split()).count(demo["validity"][0]["reason"]) == 1


def test_every_arm_and_every_gate_that_did_not_pass_is_named(demo: Summary) -> None:
    shown = verdict_table(demo)
    assert shown.startswith("✘ FAIL  demo\n")
    for said in (
        "eager",
        "compiled-padded",
        "compiled-naive",
        "8.03 s",
        "20.8 s / 0.5 s",
        "limited by: blocks",
        "to decide: ",
    ):
        assert said in shown
    assert "error rate" not in shown


def test_it_is_plain_when_stdout_is_no_terminal(demo: Summary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert "\x1b" not in verdict_table(demo)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_colour_unless_no_color_is_set(demo: Summary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1;31m✘ FAIL" in verdict_table(demo)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in verdict_table(demo)


def test_markup_and_escape_codes_in_a_name_are_shown_or_dropped_but_not_obeyed(demo: Summary) -> None:
    demo["arms"][0]["name"] = "[red]eager[/red]\x1b[2J"
    shown = verdict_table(demo)
    assert "\x1b" not in shown
    assert "[red]eager" in re.sub(r"\s", "", shown)


def test_an_empty_summary_reads_as_a_sentence() -> None:
    shown = verdict_table({})
    assert "This run has no verdict." in shown
    assert "no arm sent a record" in shown
    assert not re.search(r"\b(None|nan)\b", shown)


def test_figures_of_all_traffic_are_told_from_gates_without_stalls_where_a_compile_hit(
    demo: Summary, rollout: Summary
) -> None:
    said = "figures: of all traffic; non-inferiority leaves out what a compile held up"
    assert said in verdict_table(demo)
    assert said not in verdict_table(rollout)


def test_the_table_ends_with_its_last_word(rollout: Summary) -> None:
    assert verdict_table(rollout).splitlines()[-1]


def test_one_request_under_way_is_one(demo: Summary) -> None:
    demo["traffic"] = {"closed_loop": 1, "over_limit": {"input_over": 1, "output_over": 0, "policy": "clip"}}
    shown = " ".join(verdict_table(demo, width=200).split())
    assert "closed loop: 1 request under way to each arm" in shown
    assert "1 prompt and 0 answers were longer: cut to them." in shown


def test_pressure_on_the_machines_stands_below_the_headline(demo: Summary) -> None:
    demo["design"]["pressure"] = "Under pressure: from 60 to 120 s each replica had 2 processors."
    lines = verdict_table(demo, width=200).split("test bed:")[0].splitlines()
    assert lines[-1] == "under pressure: from 60 to 120 s each replica had 2 processors."


def test_what_was_run_and_where_stands_above_the_figures(demo: Summary) -> None:
    head = " ".join(verdict_table(demo).split("compiled-padded  ")[0].split())
    assert "run: design mirrored (open loop) · duration" in head
    assert "generator lag" in head
    assert "machine" in head
