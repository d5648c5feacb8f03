"""Hostile values for every setting that the resolved demo holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from loadtests.experiments.reading import load
from loadtests.experiments.writing import to_table
from servers.complaint import LONGEST
from servers.fields import ConfigError

HOSTILE = ("nan", "-1e300", "1979-05-27", f'"{"x" * 20_000}"', '"a\\u0000b"', "[[1]]", "{a = 1}")


def settings(table: dict[str, Any], where: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        path = f"{where}.{key}".removeprefix(".")
        if isinstance(value, dict) and value:
            yield from settings(value, path)
        elif key != "arms":
            yield path, value


DEMO = to_table(load("demo"))


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: value[:12])
def test_every_number_and_switch_refuses_a_hostile_value_in_one_short_line(value: str) -> None:
    accepted, refusals = [], []
    for key, default in [*settings(DEMO), *settings(DEMO["arms"][1], "arms[1]")]:
        try:
            load("demo", settings=[f"{key}={value}"])
        except ConfigError as error:
            refusals.append(str(error))
        else:
            if isinstance(default, int | float):
                accepted.append(key)
    assert accepted == []
    assert [text for text in refusals if len(text) >= LONGEST + 100 or "\n" in text] == []
