"""The commands that the documentation shows."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from docs import generate

ROOT = Path(__file__).resolve().parents[2]
# What a line has to begin with to be taken for a command. A block that begins with one holds nothing else.
PROGRAMS = (
    *("tailgate", "python", "locust", "make", "pip", "kubectl", "podman", "docker", "vllm", "prometheus", "curl"),
    *("check-jsonschema", "nvidia-smi", "sudo", "export", "printf", "echo", "mkdir"),
)
_BLOCK = re.compile(r"^( *)```([\w-]*)\n(.*?)^ *```\n?", re.M | re.S)
_NAMED = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_INDENTED = re.compile(r"^ {4}(?=[a-z])(.+)$", re.M)
_STEP = re.compile(r"^ *(?:- run: )?(tailgate .+)$", re.M)
_PLACEHOLDER = re.compile(r"<([\w' -]+)>")
FIRST, SECOND = "20260101T120000Z-canary", "20260108T120000Z-canary"
PLACED = {"id": FIRST, "run": FIRST, "later": SECOND, "other": SECOND}
_SEPARATORS = frozenset("|&;()")


@dataclass(frozen=True)
class Documented:
    """A line as it stands on a page, its first line there; `named` in a sentence, where words may be left out."""

    page: str
    line: int
    text: str
    named: bool

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def documented() -> list[Documented]:
    """All commands of all pages, in their order; the generated pages come last."""
    paths = [ROOT / "README.md", *sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/**/*.md")])]
    paths.append(ROOT / "benchmarks" / "results" / "README.md")
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}
    texts |= {f"docs/{name}": text for name, text in generate.pages().items() if name.endswith(".md")}
    return [item for page, text in texts.items() for item in commands_in(text, page)]


def commands_in(text: str, page: str) -> Iterator[Documented]:
    """The commands of one page: those of its blocks, then those that stand between them."""

    def at(offset: int) -> int:
        return 1 + text.count("\n", 0, offset)

    between = text
    for block in _BLOCK.finditer(text):
        between = between.replace(block[0], "\n" * block[0].count("\n"), 1)
        if block[2] in ("", "sh"):
            yield from _of_block(block[3], page, at(block.start(3)))
        elif block[2] == "yaml":
            for step in _STEP.finditer(block[3]):
                yield Documented(page, at(block.start(3) + step.start(1)), step[1], False)
    for line in _INDENTED.finditer(between):
        if _begins(line[1]):
            yield Documented(page, 1 + between.count("\n", 0, line.start()), line[1], False)
    for name in _NAMED.finditer(between):
        if _begins(name[1]) and len(name[1].split()) > 1:
            yield Documented(page, 1 + between.count("\n", 0, name.start()), " ".join(name[1].split()), True)


def _begins(line: str) -> bool:
    return line.lstrip(" (").partition(" ")[0] in PROGRAMS and "─" not in line  # or it is a drawing


def _of_block(block: str, page: str, line: int) -> Iterator[Documented]:
    """The lines of a block of commands, or nothing of a block that begins with something else."""
    lines = [(line + index, text.strip()) for index, text in enumerate(block.split("\n"))]
    lines = [(number, text) for number, text in lines if text and not text.startswith("#")]
    if not lines or not _begins(lines[0][1]):
        return
    begun, whole = 0, ""
    for number, text in lines:
        begun, whole = (begun, f"{whole} {text}") if whole else (number, text)
        if whole.endswith("\\"):
            whole = whole[:-1].rstrip()
            continue
        yield Documented(page, begun, whole, False)
        whole = ""


def _placed(found: re.Match[str]) -> str:
    return PLACED.get(found[1], "placeholder")


def commands(text: str) -> list[list[str]]:
    """The words of each program that a line starts, as a shell would read it; what is exported is left out."""
    lexer = shlex.shlex(_PLACEHOLDER.sub(_placed, text), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    parts: list[list[str]] = [[]]
    redirected = False
    for word in lexer:
        if word[0] in _SEPARATORS:
            parts.append([])
        elif word[0] in "<>":
            redirected = True
        elif redirected:
            redirected = False
        else:
            parts[-1].append(word)
    return [part for words in parts if (part := words[words[:1] == ["sudo"] :]) and part[0] != "export"]
