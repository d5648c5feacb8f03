"""The page as one HTML file, made of the report's own style, icons and drawing, and of what only a live page needs."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.resources import files

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from tailgate.analysis.glossary import DEFINITIONS, PATTERN, with_tooltips
from tailgate.analysis.records.schemas import EVENT_KINDS
from tailgate.analysis.settings.metrics import METRIC_NAMES

_STYLES = ("report.css", "page.css")
_SCRIPTS = ("plot.js", "state.js", "curves.js", "tiles.js", "sections.js", "page.js")


def template_text(name: str) -> str:
    """Return a template of the page, or else of the report, whose package takes a second to import."""
    own = files("tailgate.loadtests.page").joinpath("templates", name)
    source = own if own.is_file() else files("tailgate.analysis").joinpath("report", "templates", name)
    return source.read_text(encoding="utf-8")


def page() -> tuple[bytes, str]:
    """Return (the page, the Content-Security-Policy to send with it). It holds nothing of any run."""
    environment = Environment(
        loader=FunctionLoader(template_text),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["with_tooltips"] = with_tooltips
    style = "\n".join(map(template_text, _STYLES))
    names = {
        "kinds": dict(EVENT_KINDS),
        "metrics": {key: METRIC_NAMES[key] for key in ("ttft", "e2e")},
        "terms": PATTERN,
        "glossary": DEFINITIONS,
    }
    body = "\n".join(map(template_text, _SCRIPTS))
    script = f'(() => {{\n"use strict";\nconst data = {json.dumps(names)};\n{body}}})();\n'
    text = environment.get_template("page.html").render(style=Markup(style), script=Markup(script))
    policy = (
        f"default-src 'none'; img-src data:; connect-src 'self'; style-src '{_digest(style)}'; "
        f"script-src '{_digest(script)}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), policy


def _digest(source: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
