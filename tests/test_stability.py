"""What a release of 1 has, later ones of 1 have: settings, flags, exit codes, records, summary.json, the protocol."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.golden.surface import GOLDEN, surface, version

RELEASES = sorted(path.name for path in GOLDEN.glob("stable-1.*.json"))


def lost(before: Any, now: Any, path: str = "") -> Iterator[str]:
    """What of `before` is not `now`, as lines. Tables and lists may grow."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key, value in before.items():
            if key not in now:
                yield f"{path}/{key} is gone"
            else:
                yield from lost(value, now[key], f"{path}/{key}")
    elif isinstance(before, list) and isinstance(now, list) and not path.endswith("/default"):
        yield from (f"{path} has no {item!r}" for item in before if item not in now)
    elif before != now:
        yield f"{path} was {before!r} and is {now!r}"


@pytest.fixture(scope="module")
def now() -> dict[str, Any]:
    return json.loads(json.dumps(surface()))


@pytest.mark.parametrize("release", RELEASES)
def test_nothing_that_a_release_promised_is_gone(release: str, now: dict[str, Any]) -> None:
    before = json.loads((GOLDEN / release).read_text(encoding="utf-8"))
    assert list(lost(before, now)) == []


def test_this_version_has_its_file() -> None:
    assert f"stable-{version()}.json" in RELEASES


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        (("settings", "traffic.rate"), None, "/settings/traffic.rate is gone"),
        (("settings", "gates.margin", "default"), 0.2, "/settings/gates.margin/default was 0.2 and is"),
        (("settings", "traffic.rates", "default"), [1], "/settings/traffic.rates/default was [1] and is []"),
        (("settings", "traffic.design", "choices"), ["both"], "/settings/traffic.design/choices has no 'both'"),
        (("commands", "run"), ["--loud"], "/commands/run has no '--loud'"),
        (("exit_codes", "FAIL"), 4, "/exit_codes/FAIL was 4 and is 99"),
        (("records", "requests", "sent_ns"), "double", "/records/requests/sent_ns was 'double' and is 'int64'"),
        (("summary", "/overall"), '{"type": "string"}', "/summary//overall was"),
        (("protocol", "tailgate.v1.GenerateRequest", "text"), "9: 9", "/protocol/tailgate.v1.GenerateRequest/text was"),
    ],
)
def test_a_loss_is_named(path: tuple[str, ...], value: Any, line: str, now: dict[str, Any]) -> None:
    before: Any = json.loads(json.dumps(now))
    other: Any = json.loads(json.dumps(now))
    table = before if value is not None else other
    for key in path[:-1]:
        table = table[key]
    if value is None:
        del table[path[-1]]
    else:
        table[path[-1]] = value
    (found,) = lost(before, other)
    assert found.startswith(line)


def test_what_is_added_loses_nothing(now: dict[str, Any]) -> None:
    more = json.loads(json.dumps(now))
    more["settings"]["traffic.colour"] = {"type": "str", "default": ""}
    more["settings"]["traffic.design"]["choices"].append("both")
    more["commands"]["run"].append("--loud")
    assert list(lost(now, more)) == []
