"""What a file of asked answers holds is taken for what it is, or not at all."""

from __future__ import annotations

import json
from typing import Any

import pytest

from analysis.records.asked_answers import AFTER, BEFORE, answers_in, file_name
from analysis.records.documents import parse_json

PROMPT = {"index": 3, "tokens": 9, "max_tokens": 2, "digest": "ab"}
ROW = {"replica": "eager-0", "text": "a b", "pieces": 2, "error": "", "tokens": ["a", " b"], "log_probs": [-0.1, -2]}
FULL = {**ROW, "likeliest": [{"a": -0.1}, {" b": -2, "c": -3}]}


def document(*rows: Any) -> dict[str, Any]:
    return {"prompts": [PROMPT] * len(rows), "answers": {BEFORE: [list(rows), list(rows)]}}


def test_answers_are_read_twice_with_what_was_asked() -> None:
    found = answers_in(document(FULL), BEFORE)
    assert found is not None
    assert found[0] == found[1]
    [answer] = found[0]
    assert (answer.digest, answer.asked, answer.tokens, answer.log_probs) == ("ab", 2, ("a", " b"), (-0.1, -2.0))
    assert answer.likeliest[1] == {" b": -2.0, "c": -3.0}
    assert answers_in(document(FULL), AFTER) is None
    assert file_name("eager") == "answers-eager.json"


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": None},
        {"log_probs": [-0.1]},
        {"log_probs": [-0.1, "x"]},
        {"log_probs": [-0.1, None]},
        {"likeliest": 3},
        {"likeliest": [{}]},
    ],
)
def test_log_probabilities_that_do_not_fit_are_none_and_the_text_stays(change: dict[str, Any]) -> None:
    found = answers_in(document({**FULL, **change}), BEFORE)
    assert found is not None
    [answer] = found[0]
    assert (answer.text, answer.tokens, answer.log_probs, answer.likeliest) == ("a b", (), (), ())


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"prompts": 3, "answers": {BEFORE: [[], []]}},
        {"prompts": [PROMPT], "answers": [1]},
        {"prompts": [PROMPT], "answers": {BEFORE: [[FULL]]}},
        {"prompts": [PROMPT], "answers": {BEFORE: [[FULL], []]}},
        {"prompts": [PROMPT], "answers": {BEFORE: [[FULL], 5]}},
        {"prompts": [PROMPT, PROMPT], "answers": {BEFORE: [[FULL], [FULL]]}},
    ],
)
def test_document_of_another_form_holds_no_answers(content: dict[str, Any]) -> None:
    assert answers_in(content, BEFORE) is None


def test_numbers_that_are_none_do_not_get_past_the_reader() -> None:
    text = json.dumps(document({**FULL, "likeliest": [{"a": float("-inf")}, {}], "pieces": "x"}))
    found = answers_in(parse_json(text), BEFORE)
    assert found is not None
    assert (found[0][0].likeliest, found[0][0].pieces) == (({}, {}), 0)
