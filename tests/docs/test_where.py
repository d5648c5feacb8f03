"""Pages name and link what is there."""

import re
from pathlib import Path
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.docs.commands import pages

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


def links_and_anchors(text: str) -> tuple[list[str], set[str]]:
    """Return what a page links, and its anchors: those that it sets, and those that GitHub makes of its headings."""
    links: list[str] = []
    anchors: dict[str, int] = {}
    before: Token | None = None
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        inner = token.children or []
        html = [part.content for part in inner if part.type == "html_inline"]
        anchors |= dict.fromkeys(re.findall(r'<a id="(.+?)">', "".join(html)), 0)
        links += [str(part.attrs[key]) for part in inner for key in ("href", "src") if key in part.attrs]
        if before is not None and before.type == "heading_open":
            title = "".join(part.content for part in inner if part.type in ("text", "code_inline"))
            slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
            anchors[slug] = anchors.get(slug, -1) + 1
            if anchors[slug]:
                anchors[f"{slug}-{anchors[slug]}"] = 0
        before = token
    return links, set(anchors)


def test_anchors_are_those_of_github() -> None:
    text = '<a id="z"></a>k\n'
    text += "# A `b_c`, [d](x.md#y)\n## E 3.2 – f\n## E 3.2 – f\n| t |\n|---|\n| ![g](h.png) |\n```\n# [i](j)\n```\n"
    assert links_and_anchors(text) == (["x.md#y", "h.png"], {"z", "a-b_c-d", "e-32--f", "e-32--f-1"})


def test_every_relative_link_leads_to_a_file_and_an_anchor_that_are_there() -> None:
    read = {path: links_and_anchors(path.read_text(encoding="utf-8")) for path in (*pages(), ROOT / "CHANGELOG.md")}
    dead, relative = [], 0
    for page, (links, _) in read.items():
        for link in links:
            if re.match(r"[a-z]+:", link):
                continue
            relative += 1
            name, _, anchor = unquote(link).partition("#")
            target = (page.parent / name).resolve() if name else page
            if not target.exists() or (anchor and anchor not in read[target][1]):
                dead.append(f"{page.relative_to(ROOT)}: {link}")
    assert dead == []
    assert relative > 300
