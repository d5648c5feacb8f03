"""The golden summaries, one that is hostile, and a reader of HTML."""

from __future__ import annotations

from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from tailgate.analysis.summary.model import Summary
from tests.golden.recorded import golden

HOSTILE = (
    '</script><script>document.title="pwned"</script><img src=x onerror=document.title="pwned">"\'`|*_[a](javascript:1)'
)


@pytest.fixture
def demo() -> dict[str, Any]:
    return golden("demo")


@pytest.fixture
def rollout() -> dict[str, Any]:
    return golden("rollout")


def changed(value: Any, change: Callable[[Any], Any], *, keys: bool = False) -> Any:
    """`value` with each of its innermost values changed, and its keys too if asked for."""
    if isinstance(value, dict):
        return {change(key) if keys else key: changed(item, change, keys=keys) for key, item in value.items()}
    return [changed(item, change, keys=keys) for item in value] if isinstance(value, list) else change(value)


@pytest.fixture
def hostile(demo: dict[str, Any]) -> dict[str, Any]:
    """The demo with markup as an arm's name, as guard reasons, shapes, request ids, gate reasons and the run's name."""
    naive = "compiled-naive"
    summary = changed(demo, lambda item: item.replace(naive, HOSTILE) if isinstance(item, str) else item, keys=True)
    summary["name"] = summary["headline"] = HOSTILE
    for event in summary["events"]:
        event["reason"] = event["shape"] = event["kind"] = HOSTILE
    for row in (*summary["gates"], *summary["validity"]):
        row["reason"] = HOSTILE
    summary["environment"] = {"python": HOSTILE, f"versions.{HOSTILE}": HOSTILE}
    return summary


@pytest.fixture
def nulls(demo: dict[str, Any]) -> dict[str, Any]:
    """The demo with null for every number that may be unknown."""

    def unknown(model: type[BaseModel], row: dict[str, Any]) -> dict[str, Any]:
        return {key: emptied(model.model_fields.get(key), value) for key, value in row.items()}

    def emptied(field: Any, value: Any) -> Any:
        if field is None or field.annotation in (float | None, int | None):
            return None if field else value
        (part, *_) = (kind for kind in (*get_args(field.annotation), None) if kind is None or is_row(kind))
        return [unknown(part, row) for row in value] if part and isinstance(value, list) else value

    def is_row(kind: object) -> bool:
        return isinstance(kind, type) and issubclass(kind, BaseModel)

    return unknown(Summary, demo)


class Page(HTMLParser):
    """Start tags with their attributes, scripts, and all text outside style and script."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in {"script", "style"}:
            self.inside = tag
            self.scripts += [""] if tag == "script" else []

    def handle_endtag(self, tag: str) -> None:
        self.inside = "" if tag == self.inside else self.inside

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            self.scripts[-1] += data
        elif not self.inside:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def find(self, tag: str, **attributes: str) -> list[dict[str, str | None]]:
        wanted = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
        return [found for name, found in self.tags if name == tag and wanted.items() <= found.items()]


@pytest.fixture
def read_page() -> Any:
    def read(source: str) -> Page:
        page = Page()
        page.feed(source)
        page.close()
        return page

    return read
