"""Let MkDocs build the pages as they are: GitHub shows them too, where links may leave docs/."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?P<text>\[(?:[^\[\]]|\[[^\]]*\])*\])\((?P<path>[^)\s:#]+)(?P<anchor>#[^)\s]*)?\)")
LIST = re.compile(r"^(?![-|#>\s]|\d+\. )(.+)\n(?=- |1\. )", re.M)
FENCE = re.compile(r"(^ *```.*?^ *```$)", re.M | re.S)


def in_site(path: Path) -> str:
    """Return where a file of the repository is in the site: under source/ if docs/ does not hold it."""
    relative = path.relative_to(ROOT).as_posix()
    return relative.removeprefix("docs/") if relative.startswith("docs/") else f"source/{relative}"


def on_config(config: Any) -> None:
    """Add the decisions to the navigation."""
    found = sorted(path.name for path in (ROOT / "docs" / "decisions").glob("*.md"))
    contributing = next(entry["Contributing"] for entry in config.nav if "Contributing" in entry)
    contributing.append({"Decisions": [f"decisions/{name}" for name in found]})


def on_files(files: Any, config: Any) -> None:
    """Add README.md and CHANGELOG.md, whose links are checked too, and the files outside docs/ that pages link."""
    todo = [ROOT / "README.md", ROOT / "CHANGELOG.md"]
    for page in todo:
        files.append(File.generated(config, in_site(page), abs_src_path=str(page)))
    todo += [Path(file.abs_src_path) for file in files.documentation_pages()]
    while todo:
        page = todo.pop()
        for link in LINK.finditer(page.read_text(encoding="utf-8")):
            target = (page.parent / link["path"]).resolve()
            if target.is_file() and not files.get_file_from_path(in_site(target)):
                files.append(File.generated(config, in_site(target), abs_src_path=str(target)))
                todo += [target] if target.suffix == ".md" else []


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links at the site's files, and put the empty line before lists that Python-Markdown needs.

    The link of a folder becomes its text: a folder has no page.
    """
    source = Path(page.file.abs_src_path)

    def pointed(link: re.Match[str]) -> str:
        target = (source.parent / link["path"]).resolve()
        if target.is_dir():
            return link["text"][1:-1]
        if not target.exists():
            return link[0]  # which MkDocs reports
        path = os.path.relpath(in_site(target), os.path.dirname(page.file.src_uri) or ".")  # noqa: PTH120
        return f"{link['text']}({path}{link['anchor'] or ''})"

    parts = FENCE.split(markdown)
    return "".join(
        part if index % 2 else LIST.sub(r"\1\n\n", LINK.sub(pointed, part)) for index, part in enumerate(parts)
    )
