"""Let MkDocs build the pages, whose links may leave docs/, and the reference, which the code writes at each build."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from docs.generate import pages

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
    """Add the generated pages, README.md and CHANGELOG.md, and the files outside docs/ that pages link."""
    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    for page in ("README.md", "CHANGELOG.md"):
        files.append(File.generated(config, f"source/{page}", abs_src_path=str(ROOT / page)))
    todo = list(files.documentation_pages())
    while todo:
        file = todo.pop()
        for link in LINK.finditer(file.content_string):
            target = linked(file, link)
            if target.is_file() and not files.get_file_from_path(in_site(target)):
                added = File.generated(config, in_site(target), abs_src_path=str(target))
                files.append(added)
                todo += [added] if target.suffix == ".md" else []


def linked(file: Any, link: re.Match[str]) -> Path:
    """Return the path in the repository that a link of a page names; of a generated page, as if docs/ held it."""
    source = Path(file.abs_src_path or ROOT / "docs" / file.src_uri)
    return (source.parent / link["path"]).resolve()


def on_page_markdown(markdown: str, page: Any, files: Any, **_: Any) -> str:
    """Point links at the site's files, and put the empty line before lists that Python-Markdown needs.

    The link of a folder becomes its text: a folder has no page.
    """

    def pointed(link: re.Match[str]) -> str:
        target = linked(page.file, link)
        if target.is_dir():
            return link["text"][1:-1]
        if not files.get_file_from_path(in_site(target)):
            return link[0]  # which MkDocs reports
        path = os.path.relpath(in_site(target), os.path.dirname(page.file.src_uri) or ".")  # noqa: PTH120
        return f"{link['text']}({path}{link['anchor'] or ''})"

    parts = FENCE.split(markdown)
    return "".join(
        part if index % 2 else LIST.sub(r"\1\n\n", LINK.sub(pointed, part)) for index, part in enumerate(parts)
    )
