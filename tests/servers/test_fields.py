"""Fields that say their own limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import pytest

from servers.config import CompileConfig
from servers.fields import ConfigError, Range, build, check_fields, override, span_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    count: Annotated[int, Range(1, 8)] = 4
    share: Annotated[float | None, Range(0, 1)] = None
    order: Literal["first", "last"] = "first"
    name: str = ""

    def __post_init__(self) -> None:
        check_fields(self, "queue")


@pytest.mark.parametrize("count", [1, 8])
def test_both_ends_of_a_range_are_allowed(count: int) -> None:
    assert build(Settings, {"count": count, "share": 1}, where="queue").count == count


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"count": 0}, "queue.count is 0: give a value from 1 to 8"),
        ({"share": 1.5}, "queue.share is 1.5: give a value from 0 to 1"),
        ({"share": float("nan")}, "queue.share is nan: give a value from 0 to 1"),
        ({"order": "any"}, "queue.order is 'any': use one of first, last"),
    ],
)
def test_a_value_outside_is_named_with_its_limits(table: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        build(Settings, table, where="queue")
    assert str(refusal.value) == message
    with pytest.raises(ConfigError) as refusal:
        Settings(**table)  # type: ignore[arg-type]
    assert str(refusal.value) == message


def test_a_name_with_dots_may_be_written_as_tables() -> None:
    """As TOML reads it where nobody quoted it."""
    base = CompileConfig(enabled=True, options={"combo_kernels": True})
    changed = override(base, {"options": {"triton": {"enable_pdl": True}, "triton.cudagraphs": False}}, where="compile")
    assert changed.options == {"combo_kernels": True, "triton.enable_pdl": True, "triton.cudagraphs": False}
    with pytest.raises(ConfigError, match=r"compile.options.triton.enable_pdl is \[1\]"):
        override(base, {"options": {"triton": {"enable_pdl": [1]}}}, where="compile")


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90.0), ("90s", 90.0), (" 1.5h ", 5400.0), ("5 m", 300.0), ("2min", 120.0)]
)
def test_a_length_of_time_is_read(text: str, seconds: float) -> None:
    assert span_s(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0s", "-5s", "5d", "nan", "1e3", "٣s", "5 m 3 s", "9" * 5000])
def test_what_is_no_length_of_time_is_none(text: str) -> None:
    assert span_s(text) is None


def test_an_error_is_one_line_whatever_a_name_holds() -> None:
    assert str(ConfigError("traffic.a\nb\u2028c is unknown: remove it")) == "traffic.a b c is unknown: remove it"


def test_a_whole_number_beyond_any_other_is_refused() -> None:
    with pytest.raises(ConfigError, match="is a number of 1329 bits: give one below 1e308"):
        build(Waits, {"wait_s": 10**400}, where="queue")


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    wait_s: float = 0.0
