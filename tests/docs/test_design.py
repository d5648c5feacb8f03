"""docs/design.md names every room, under its floor, and none that is not there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (?:`([\w.]+)/?`)? ?\|([^|]*)\|", re.M)


def rooms_named(package: str) -> dict[str, set[str]]:
    """Rooms by floor, as the page's table of the package names them; "" holds those of the package itself."""
    section = PAGE.split(f"### {package}:")[1].split("\n##")[0].split("\n\n`benchmarks/`")[0]
    floors: dict[str, set[str]] = {"": set()}
    for floor, rooms in ROW.findall(section):
        if floor.endswith(".py"):
            floors[""].add(floor.removesuffix(".py"))
        else:
            floors.setdefault(floor, set()).update(re.findall(r"`(\w+)`", rooms))
    return floors


def rooms_there(package: str) -> dict[str, set[str]]:
    floors: dict[str, set[str]] = {"": set()}
    for path in (ROOT / package).rglob("*.py"):
        parts = path.relative_to(ROOT / package).with_suffix("").parts
        if parts[-1] != "__init__" and parts[0] != "rpc":
            floors.setdefault(parts[0] if len(parts) > 1 else "", set()).add(parts[min(1, len(parts) - 1)])
    return floors


def test_every_room_is_named_under_its_floor() -> None:
    for package in ("loadtests", "servers", "analysis"):
        named, there = rooms_named(package), rooms_there(package)
        named[""] -= {"rpc"}
        assert named == there, package
