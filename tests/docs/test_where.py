"""Pages of contributors name what is there; `make docs` checks their links."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "contributing"


def test_every_file_that_the_page_names_exists() -> None:
    rows = (line for line in (PAGES / "where.md").read_text(encoding="utf-8").splitlines() if line.startswith("| "))
    named = {name for row in rows for name in re.findall(r"`([\w/.-]+/[\w/.-]*)`", row)}
    assert len(named) > 15
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_the_architecture_names_every_layer() -> None:
    text = (PAGES / "architecture.md").read_text(encoding="utf-8")
    for package in ("loadtests", "servers", "analysis"):
        section = text.split(f"### {package}:")[1].split("\n## ")[0].split("\n### ")[0]
        named = {
            name.rstrip("/")
            for row in re.findall(r"^\| (`.*?) \|", section, re.M)
            for name in re.findall(r"`(.+?)`", row)
        }
        paths = [path for path in (ROOT / package).iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
        there = {path.name if path.name in ("chat.py", "embed.py") else path.stem for path in paths} - {"__init__"}
        assert named == there, package
