"""The templates of reports, what shows a value in them, and the brief as Markdown and as JUnit XML.

In JUnit a suite is an arm and a case is a gate. FAIL is a failure, INCONCLUSIVE is skipped with its reason: an error
would say that the test itself broke.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, partial
from importlib.resources import files
from typing import Any

from jinja2 import ChainableUndefined, Environment, FunctionLoader, select_autoescape
from markupsafe import Markup

from tailgate.analysis.glossary import with_tooltips
from tailgate.analysis.records.schemas import EVENT_KINDS
from tailgate.analysis.report import brief, values
from tailgate.analysis.report.values import DASH, text
from tailgate.analysis.settings.metrics import gate_label
from tailgate.analysis.summary.model import Summary
from tailgate.analysis.wording import counted

_PUNCTUATION = re.compile(r"([\\`*_\[\]<>|~])")
_VALUES = (
    *("text", "count", "milliseconds", "figure", "seconds", "span"),
    *("percent", "byte_size", "rate", "ratio", "interval"),
)
_ZERO_WIDTH_SPACE = "\u200b"
_MARKS = {"PASS": "✅ PASS", "FAIL": "❌ FAIL", "INCONCLUSIVE": "❔ INCONCLUSIVE"}


def markdown_report(document: Mapping[str, Any]) -> str:
    """Render report.md for the summary in `document`, ending in one newline."""
    shown = brief.brief_of(Summary.of(document))
    report = environment().get_template("report.md").render(brief=shown)
    return re.sub(r"\n{3,}", "\n\n", report).strip() + "\n"


def junit_xml(document: Mapping[str, Any]) -> str:
    """Render junit.xml for the summary in `document`: a suite for each arm, then one for the checks of the run."""
    summary = Summary.of(document)
    return environment().get_template("junit.xml").render(brief=brief.brief_of(summary), summary=summary)


@cache
def environment() -> Environment:
    """Return the templates of the folder, compiled once a process, with the functions that show values as filters."""
    made = Environment(
        loader=FunctionLoader(template_text),
        autoescape=select_autoescape(disabled_extensions=("md",), default=True, default_for_string=True),
        undefined=ChainableUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    for name in _VALUES:
        made.filters[name] = getattr(values, name)
    for show in (
        *(brief.value_of, brief.limit_of, brief.bounds_of, brief.sentence_of, brief.first_sentence),
        *(prose, code, prose_with_code, html_with_code, with_tooltips),
    ):
        made.filters[show.__name__] = show
    made.filters["label"] = gate_label
    made.filters["mark"] = lambda verdict: _MARKS.get(verdict, "")
    made.filters["kind_label"] = lambda kind: EVENT_KINDS.get(kind, kind)
    made.filters["counted"] = partial(counted, show=values.count)
    return made


def template_text(name: str) -> str:
    """Read a file of the templates folder, also from a package that is not unpacked."""
    return files("tailgate.analysis.report").joinpath("templates", name).read_text(encoding="utf-8")


def prose(value: object) -> str:
    """Show text as written in Markdown: no markup, no HTML, no @mention, on one line."""
    shown = _PUNCTUATION.sub(r"\\\1", " ".join(text(value).split()))
    shown = shown.replace("&", "&amp;").replace("\\<", "&lt;").replace("\\>", "&gt;")
    return shown.replace("@", "@" + _ZERO_WIDTH_SPACE).replace("://", ":" + _ZERO_WIDTH_SPACE + "//")


def code(value: object) -> str:
    """Show text as a code span that fits in a Markdown table cell, without markup; an en dash for nothing."""
    shown = " ".join(text(value).split())
    if shown == DASH:
        return DASH
    longest = max((len(run) for run in re.findall(r"`+", shown)), default=0)
    # In a table a pipe ends the cell even inside code; a backslash hides it, unless another one hides the backslash.
    shown = re.sub(r"\\+(?=\|)", r"\g<0> ", shown).replace("|", "\\|")
    fence = "`" * (longest + 1)
    pad = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def prose_with_code(line: str) -> str:
    """Show prose in Markdown, with text between backticks as code spans."""
    return re.sub(r"`([^`]*)`|[^\s`]([^`]*[^\s`])?", lambda part: code(part[1]) if part[1] else prose(part[0]), line)


def html_with_code(line: str) -> Markup:
    """Show text as HTML, with text between backticks as code."""
    parts = [
        Markup("<code>{}</code>").format(part) if place % 2 else part for place, part in enumerate(line.split("`"))
    ]
    return Markup("").join(parts)
