"""Every setting of an experiment with values that no one should give, read from the resolved demo, so that a new one is
tried from the day it is there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from loadtests.experiments.reading import load
from loadtests.experiments.writing import to_table
from servers.complaint import LONGEST
from servers.fields import ConfigError

HOSTILE = (
    *("nan", "inf", "-1", "1e300", "1e-300", "9223372036854775807", "true", "1979-05-27"),
    *('""', f'"{"x" * 300}"', '"a\\u0000b"', f'"{"x" * 20_000}"', "[]", "[nan]", "[[1]]", "{}", "{a = 1}"),
)


def settings(table: dict[str, Any], where: str = "") -> Iterator[str]:
    for key, value in table.items():
        path = f"{where}.{key}".removeprefix(".")
        if isinstance(value, dict) and value:
            yield from settings(value, path)
        elif key != "arms":
            yield path


DEMO = to_table(load("demo"))


@pytest.mark.parametrize("key", [*settings(DEMO), *settings(DEMO["arms"][1], "arms[1]")])
def test_a_hostile_value_of_a_setting_is_taken_or_refused_in_one_short_line(key: str) -> None:
    refusals = []
    for value in HOSTILE:
        try:
            load("demo", settings=[f"{key}={value}"])
        except ConfigError as error:
            refusals.append(str(error))
    assert all(len(refusal) < LONGEST + 100 and "\n" not in refusal for refusal in refusals)
