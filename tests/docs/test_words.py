"""One word per concept, the field's: words that the project does not use, and what to write instead.

Ordinary meanings stay: the floor of a decode step, a test that waited, columns two spaces apart.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("analysis", "benchmarks", "deploy", "docs", "loadtests", "proto", "servers", "tests")
GENERATED = r"docs/gallery/.*\.html"  # of kept records, by `make gallery`
SUFFIXES = (".py", ".md", ".html", ".js", ".toml", ".proto", ".yaml", ".yml")

# A word counts whole, also within a snake_case name.
WORDS = {
    "house|rooms|(?:each|every|a|one|own) room": "architecture, module",
    "beds?|testbeds?": "machine monitor, machines",
    r"(?:an?|each|every|first|last|next|interim) looks?|looked at|looks?(?= ?[=\[.)])": "interim analysis",
    "luck": "start-to-start variance, compile-to-compile variance, chance",
    "told|untold|(?:says?|tells?|states?|said) of (?:it|them)sel(?:f|ves)": "reported, unreported",
    "(?<!its )(?<!their )own[ _]?arms?|somebody else": "managed arm, external arm",
    "from outside|black box": "client-side",
    "beside|counted apart|padding apart": "next to, secondary, separate",
    "stands? still|stood still|held up": "stalled, delayed",
    "foresight|foretell|foretold": "planning, predict",
    "tailgate releases": "tailgate compare",
    r"users' (?:own )?(?:traffic|requests)|traffic of users": "production traffic",
    "stated": "checksums, row counts",
    "payments?|lean|mend(?:s|ed|ing)?|carriers?|pulses?": "deflation, shift, fix, connection, liveness",
    "lanes?": "endpoint",
    "steps of (?:a|the) ladders?": "buckets",
    "whoever|nobody|somebody|thereby|so that it": "name the subject",
}
RULES = [(re.compile(rf"(?<![a-z])(?:{words})(?![a-z])"), instead) for words, instead in WORDS.items()]

EXCEPTIONS = {
    "loadtests/external/asking.py": "house",  # a common word of prompts
    "analysis/report/templates/report.css": "lane",  # of a chart
    "analysis/report/templates/timeline.js": "lanes?",
    "analysis/report/templates/timeline-marks.js": "lanes?",
}


def offenders(name: str) -> list[str]:
    """Return file:line, the word and its replacement for each word in the file that the project does not use."""
    text = (ROOT / name).read_text(encoding="utf-8").lower()
    return [
        f'{name}:{1 + text.count(chr(10), 0, match.start())}: "{match[0]}": {instead}'
        for rule, instead in RULES
        for match in rule.finditer(text)
        if not re.fullmatch(EXCEPTIONS.get(name, "(?!)"), match[0])
    ]


def test_every_file_uses_the_words_of_the_field() -> None:
    paths = [*ROOT.glob("*.*"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*"))]
    names = [str(path.relative_to(ROOT)) for path in paths if path.suffix in SUFFIXES and path != Path(__file__)]
    written = [name for name in names if "_pb2" not in name and not re.fullmatch(GENERATED, name)]
    assert len(written) > 600
    found = [text for name in written for text in offenders(name)]
    assert not found, "\n".join(found)
