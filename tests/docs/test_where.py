"""Pages name what is there; `make docs` checks their links."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "contributing" / "where.md").read_text(encoding="utf-8")

DESIGN = (ROOT / "docs" / "contributing" / "architecture.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (?:`([\w.]+)/?`)? ?\|([^|]*)\|", re.M)


def test_every_file_that_the_page_names_exists() -> None:
    rows = (line for line in PAGE.splitlines() if line.startswith("| "))
    named = {name for row in rows for name in re.findall(r"`([\w/.-]+/[\w/.-]*)`", row)}
    assert len(named) > 15
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def modules_named(package: str) -> dict[str, set[str]]:
    """Return the modules that the design page names, by layer; "" holds those of the package itself."""
    section = DESIGN.split(f"### {package}:")[1].split("\n##")[0].split("\n\n`benchmarks/`")[0]
    layers: dict[str, set[str]] = {"": set()}
    for layer, modules in ROW.findall(section):
        if layer.endswith(".py"):
            layers[""].add(layer.removesuffix(".py"))
        else:
            layers.setdefault(layer, set()).update(re.findall(r"`(\w+)`", modules))
    return layers


def existing_modules(package: str) -> dict[str, set[str]]:
    layers: dict[str, set[str]] = {"": set()}
    for path in (ROOT / package).rglob("*.py"):
        parts = path.relative_to(ROOT / package).with_suffix("").parts
        if parts[-1] != "__init__" and parts[0] != "rpc":
            layers.setdefault(parts[0] if len(parts) > 1 else "", set()).add(parts[min(1, len(parts) - 1)])
    return layers


def test_the_design_page_names_every_module_under_its_layer() -> None:
    for package in ("loadtests", "servers", "analysis"):
        named, there = modules_named(package), existing_modules(package)
        named[""] -= {"rpc"}
        assert named == there, package
