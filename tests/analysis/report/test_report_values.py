from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.report import values


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0 ms"),
        (0.8412, "0.841 ms"),
        (84.25, "84.2 ms"),
        (845.4, "845 ms"),
        (999.7, "1 s"),
        (8412.3, "8.41 s"),
        (123456, "123 s"),
    ],
)
def test_milliseconds_keep_three_digits_and_turn_to_seconds(value: float, shown: str) -> None:
    assert values.milliseconds(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(90, "90 s"), (120, "120 s"), (125, "2 min 5 s"), (1260, "21 min"), (3600, "1 h"), (5400, "1 h 30 min")],
)
def test_spans_read_in_the_units_that_matter(value: float, shown: str) -> None:
    assert values.span(value) == shown


@pytest.mark.parametrize("nothing", [None, math.nan, math.inf, -math.inf, "", {}, []])
@pytest.mark.parametrize(
    "show",
    [
        values.text,
        values.figure,
        values.count,
        values.milliseconds,
        values.column_ms,
        values.seconds,
        values.span,
        values.percent,
        values.ratio,
        values.rate,
        values.probability,
        values.byte_size,
        values.verdict,
        values.moment,
        values.first_line,
        *(lambda value, unit=unit: values.quantity(value, unit) for unit in (*values.UNITS, None, "parsec")),
    ],
)
def test_nothing_reads_as_a_dash(show: object, nothing: object) -> None:
    assert callable(show)
    assert show(nothing) == "–"


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=1e-3, max_value=1e12))
def test_figures_are_within_half_a_percent(value: float) -> None:
    assert float(values.figure(value).replace(",", "")) == pytest.approx(value, rel=0.0051)


def test_gate_names_read_in_the_fields_terms() -> None:
    assert values.label("noninferiority p99_ttft") == "non-inferiority p99 TTFT"
    assert values.label("slo p99_9_max_itl") == "SLO p99.9 max ITL"
    assert values.metric_label("e2e", 0.999) == "p99.9 E2E"


def test_a_long_line_ends_after_a_word() -> None:
    assert values.first_line("the control compiled nothing", 28) == "the control compiled nothing"
    assert values.first_line("the control, which compiled nothing", 16) == "the control…"
    assert values.first_line("x" * 20, 10) == "x" * 9 + "…"
    assert values.first_line("a " + "x" * 20, 10) == "a " + "x" * 7 + "…"


def test_a_ratio_just_under_its_limit_does_not_look_like_a_tie() -> None:
    assert values.quantity(1.0959, "ratio") != values.quantity(1.1, "ratio")


def test_a_half_open_interval_shows_its_known_end() -> None:
    assert values.interval(0.5, None) == "[0.50, –]"
    assert values.interval(None, None) == "–"


def test_control_characters_never_reach_a_report() -> None:
    assert values.text("\x1b[31mred\x07\ud800") == "[31mred"
    assert values.text("com\u202epiled\u2066") == "compiled"  # would show as another name


@given(
    st.recursive(st.none() | st.floats() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))
)
@settings(max_examples=30)
def test_clean_leaves_only_what_json_can_hold(value: object) -> None:
    def finite(item: object) -> bool:
        if isinstance(item, dict):
            return all(finite(inner) for inner in item.values())
        if isinstance(item, list):
            return all(finite(inner) for inner in item)
        return not isinstance(item, float) or math.isfinite(item)

    assert finite(values.clean(value))
