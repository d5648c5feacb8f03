"""The brief as Markdown for a pull request: what decides is visible, the rest folded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from analysis.report.brief import DEFINITION, ArmBrief, Brief, CheckLine, brief_of
from analysis.report.values import DASH, text
from analysis.summary.model import Summary

MARKS = {"PASS": "✅ PASS", "FAIL": "❌ FAIL", "INCONCLUSIVE": "❔ INCONCLUSIVE"}
PUNCTUATION = re.compile(r"([\\`*_\[\]<>|~])")
ZERO_WIDTH_SPACE = "\u200b"


def prose(value: object) -> str:
    """Text that Markdown shows as written: no markup, no HTML, no @mention, on one line."""
    shown = PUNCTUATION.sub(r"\\\1", " ".join(text(value).split()))
    shown = shown.replace("&", "&amp;").replace("\\<", "&lt;").replace("\\>", "&gt;")
    return shown.replace("@", "@" + ZERO_WIDTH_SPACE).replace("://", ":" + ZERO_WIDTH_SPACE + "//")


def _with_code(line: str) -> str:
    """Prose in which what stands between backticks is a code span."""
    return "".join(code(part) if place % 2 else _spaced(part) for place, part in enumerate(line.split("`")))


def _spaced(part: str) -> str:
    """The part as prose, with the spaces at its ends."""
    before, after = (" " if part[at : at + 1 or None] == " " else "" for at in (0, -1))
    return f"{before}{prose(part)}{after}" if part.strip() else part


def code(value: object) -> str:
    """Text as a code span that fits in a table cell: nothing in it is markup; an en dash for nothing."""
    shown = " ".join(text(value).split())
    if shown == DASH:
        return DASH
    longest = max((len(run) for run in re.findall(r"`+", shown)), default=0)
    # In a table a pipe ends the cell even inside code; a backslash hides it, unless another one hides the backslash.
    shown = re.sub(r"\\+(?=\|)", r"\g<0> ", shown).replace("|", "\\|")
    fence = "`" * (longest + 1)
    pad = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def table(head: Sequence[str], body: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """A pipe table; the columns in `right` are aligned to the right."""
    rule = ["---:" if column in right else "---" for column in range(len(head))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *body))


def mark(verdict: str) -> str:
    return MARKS.get(verdict, DASH)


def markdown_report(document: Mapping[str, Any]) -> str:
    """The whole report.md for the summary in `document`, ending in one newline."""
    brief = brief_of(Summary.of(document))
    parts = [
        f"## {mark(brief.verdict) if brief.verdict else brief.title} · {prose(brief.name)}",
        prose(brief.headline),
        " ".join(prose(arm.leaning) for arm in brief.treatments if arm.leaning),
        "\n".join(f"- {prose(line)}" for line in brief.answer),
        *(f"**{prose(name)}**: {prose(line)}" for name, line in brief.notes),
        _next(brief),
        _arms(brief.arms),
        DEFINITION if brief.treatments and not brief.answer else "",
        _failed(brief),
        _folded("What to do", [f"- {code(arm)}: {_with_code(line)}" for arm, line in brief.remedies]),
        _folded("What would decide the open gates", [_with_code(brief.decider)] if brief.decider else []),
        _folded("Every gate", [_gates(brief)] if any(arm.gates for arm in brief.arms) else []),
        _folded(*_checks(brief.failed_checks)),
        f"<sub>tailgate · run {code(brief.run_id)} · everything else: report.html</sub>",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _next(brief: Brief) -> str:
    step = code(brief.next) if brief.next else _with_code(brief.first_step)
    return f"Next: {step}" if step else ""


def _arms(arms: Sequence[ArmBrief]) -> str:
    """The figures at a glance, a column an arm."""
    if not arms:
        return "No arm sent a record."
    names = dict.fromkeys(figure.name for arm in arms for figure in arm.figures)
    body = [["verdict", *("control" if arm.control else mark(arm.verdict) for arm in arms)]]
    for name in names:
        figures = [next((figure for figure in arm.figures if figure.name == name), None) for arm in arms]
        body.append([name, *(f"{one.value} {one.note}".strip() if one else DASH for one in figures)])
    return table(["", *(code(arm.name) for arm in arms)], body, right=range(1, 1 + len(arms)))


def _failed(brief: Brief) -> str:
    """Gates that failed, each with its sentence, and how many are open."""
    lines = [
        f"- ❌ {code(arm.name)} **{prose(gate.name)}**: {prose(gate.sentence)}"
        for arm in brief.treatments
        for gate in arm.of("FAIL")
    ]
    for arm in brief.treatments:
        if undecided := arm.of("INCONCLUSIVE"):
            lines.append(f"- ❔ {code(arm.name)} open: {prose(', '.join(gate.name for gate in undecided))}")
    return "\n".join(lines)


def _gates(brief: Brief) -> str:
    body = [
        [
            code(arm.name),
            mark(gate.verdict),
            prose(gate.name),
            gate.value,
            gate.interval,
            gate.limit,
            prose(gate.reason),
        ]
        for arm in brief.arms
        for gate in arm.gates
    ]
    return table(("Arm", "Verdict", "Gate", "Value", "Interval", "Limit", "Reason"), body, right=(3, 4, 5))


def _checks(checks: Sequence[CheckLine]) -> tuple[str, list[str]]:
    """The heading of the failed checks, and a line for each."""
    allowed = all(check.state == "allowed for" for check in checks)
    title = "What the verdict allows for" if allowed else "What limits this run"
    lines = [
        f"- **{prose(check.name)}**: {prose(check.reason)}" + (f" (opens: {prose(check.opens)})" if check.opens else "")
        for check in checks
    ]
    return title, lines


def _folded(title: str, lines: Iterable[str]) -> str:
    content = "\n".join(lines)
    return f"<details><summary>{title}</summary>\n\n{content}\n\n</details>" if content else ""
