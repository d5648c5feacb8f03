"""One table defines every term of the tooltips."""

from __future__ import annotations

import re
from html import unescape

from tailgate.analysis.glossary import DEFINITIONS, GLOSSARY, PATTERN, with_tooltips


def test_every_definition_is_one_sentence() -> None:
    wrong = [text for text in GLOSSARY.values() if not re.fullmatch(r"[^|]+\.", text) or re.search(r"\. [A-Z]", text)]
    assert wrong == []


def test_every_term_is_found_whole_in_either_case_and_number() -> None:
    for term in GLOSSARY.keys() - {"pN"}:
        for shown in (term, term.upper(), f"{term}s"):
            found = re.fullmatch(PATTERN, shown, re.IGNORECASE)
            assert found is not None, shown
            assert found[1].lower() in DEFINITIONS


def test_tooltips_keep_the_text_and_escape_it() -> None:
    shown = str(with_tooltips("non-inferiority p99.9 max ITL <b>"))
    assert re.sub(r"</?abbr[^>]*>", "", shown) == "non-inferiority p99.9 max ITL &lt;b&gt;"
    titles = [unescape(title) for title in re.findall('title="([^"]+)"', shown)]
    assert titles == [GLOSSARY[term] for term in ("non-inferiority", "pN", "max ITL")]
