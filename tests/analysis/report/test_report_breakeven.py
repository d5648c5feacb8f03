from __future__ import annotations

from typing import Any

from analysis.foresight.costs import Capacity, Span, Start, break_even_rows, weigh
from analysis.report.breakeven import payoffs
from analysis.report.html import html_report
from analysis.report.markdown import markdown_report
from analysis.settings.rollout import Rollout


def summary(load: float | None) -> dict[str, Any]:
    rollout = Rollout(load_rps=load)
    start = Start(serving_s=304.0, warmup_s=300.0, memory_bytes=2.0**30)
    control = Capacity(source="search", rps=Span(low=7.0, seen=8.0, high=10.0), trials=2)
    new = Capacity(source="search", rps=Span(low=9.0, seen=16.0, high=20.0), trials=2)
    rows = [
        weigh("eager", own=control, control=None, start=Start(), rollout=rollout, verdict=None),
        weigh("<new>", own=new, control=control, start=start, rollout=rollout, verdict="PASS"),
    ]
    return {"name": "search", "overall": "PASS", "break_even": break_even_rows(rows, rollout)}


def test_ranges_read_as_seen_with_their_limits() -> None:
    weighed = payoffs(summary(200.0))
    assert weighed.arms == ("eager", "<new>")
    eager, new = ({row.name: row.values[place] for row in weighed.figures} for place in (0, 1))
    assert (new["replica holds, requests/s"], new["GPUs"]) == ("16 (9 to 20)", "13 (10 to 23)")
    assert (new["start"], new["device memory of a replica"]) == ("304 s", "1 GiB")
    assert new["pays after"] == "5 min 29 s (2 min 40 s to never)"
    assert (eager["GPUs saved"], eager["pays after"], eager["or after requests"]) == ("–", "–", "–")
    assert "GPU-seconds saved a request" in {row.name for row in payoffs(summary(None)).figures}


def test_costs_are_shown_where_there_is_a_price() -> None:
    priced = Rollout(load_rps=200.0, gpu_hour_price=3.6, currency="EUR")
    held = Capacity(source="search", rps=Span(low=9.0, seen=16.0, high=20.0), trials=2)
    row = weigh("eager", own=held, control=None, start=Start(), rollout=priced, verdict=None, tokens=100.0)
    shown = {item.name: item.values for item in payoffs({"break_even": break_even_rows([row], priced)}).figures}
    assert shown["1,000 requests cost, EUR"] == ("0.065 (0.05 to 0.115)",)
    assert shown["a million tokens cost, EUR"] == ("0.65 (0.5 to 1.15)",)
    assert not any("cost," in item.name and "EUR" in item.name for item in payoffs(summary(200.0)).figures)


def test_reports_show_it_and_stay_silent_without_it() -> None:
    markdown, html = markdown_report(summary(200.0)), html_report(summary(200.0))
    assert "### When it pays" in markdown
    assert 'id="pays"' in html
    assert "&lt;new&gt;" in html
    assert "<new>" not in html
    assert payoffs({}).arms == ()
    assert "When it pays" not in markdown_report({"name": "plain"})
    assert 'id="pays"' not in html_report({"name": "plain"})
