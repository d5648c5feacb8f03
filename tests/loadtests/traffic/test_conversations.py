"""Conversations are streamed: published oddities are counted, anything else is refused with its number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.traffic.conversations import Exchange, read_conversations
from servers.fields import ConfigError


def talk(*texts: str, first: str = "human") -> dict[str, Any]:
    roles = ("human", "gpt") if first == "human" else ("gpt", "human")
    return {"id": "x", "conversations": [{"from": roles[i % 2], "value": text} for i, text in enumerate(texts)]}


def written(folder: Path, content: object) -> Path:
    path = folder / "talks.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_questions_come_with_their_answers(tmp_path: Path) -> None:
    found = read_conversations(written(tmp_path, [talk("a", "b", "c", "d"), talk("é\n[{", '"}]')]))
    assert found.kept[0].exchanges == (Exchange("a", "b"), Exchange("c", "d"))
    assert found.kept[1].exchanges == (Exchange("é\n[{", '"}]'),)
    assert (found.read, found.unusable) == (2, 0)


def test_what_published_files_hold_besides_is_left_out_and_counted(tmp_path: Path) -> None:
    content = [
        talk(),
        talk("only a question"),
        talk("an answer first", "then a question", "and its answer", first="gpt"),
        talk("asked", "  "),
        {"conversations": [{"from": "system", "value": "be brief"}, {"from": "user", "value": "hi"},
                           {"from": "assistant", "value": "hello"}]},
    ]  # fmt: skip
    found = read_conversations(written(tmp_path, content))
    assert (found.read, found.unusable) == (5, 3)
    assert found.kept[0].exchanges == (Exchange("then a question", "and its answer"),)
    assert (found.kept[1].system, found.kept[1].exchanges) == ("be brief", (Exchange("hi", "hello"),))


def test_json_lines_read_as_an_array_does(tmp_path: Path) -> None:
    lines = "\n".join(json.dumps(talk(str(n), "answer")) for n in range(5))
    assert len(read_conversations(written(tmp_path, lines + "\n")).kept) == 5


@settings(max_examples=25)
@given(texts=st.lists(st.text(min_size=1).filter(str.strip), min_size=2, max_size=20))
def test_every_text_comes_back(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    texts = [text.encode("utf-8", "replace").decode() for text in texts]
    found = read_conversations(written(tmp_path_factory.mktemp("c"), [talk(*texts)]))
    given_back = [text for exchange in found.kept[0].exchanges for text in (exchange.question, exchange.answer)]
    assert given_back == texts[: len(texts) // 2 * 2]


def test_conversations_longer_than_what_is_read_at_once_are_whole(tmp_path: Path) -> None:
    long = "x" * 3_000_000
    found = read_conversations(written(tmp_path, [talk("a", "b"), talk(long, "short"), talk("c", "d")]))
    assert [conversation.exchanges[0].question for conversation in found.kept] == ["a", long, "c"]


def test_a_sample_is_even_and_the_same_for_equal_seeds(tmp_path: Path) -> None:
    path = written(tmp_path, [talk(str(n), "answer") for n in range(2000)])
    drawn = [
        [int(conversation.exchanges[0].question) for conversation in read_conversations(path, keep=200, seed=seed).kept]
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0] == sorted(drawn[0])
    assert 800 < sum(drawn[0]) / 200 < 1200


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("", ["no question with its answer in 0"]),
        ("[]", ["no question with its answer in 0"]),
        ("[" + json.dumps(talk("a", "b")) + ', {"conversations": [}]', ["conversation 2", "one JSON object"]),
        ("[" + json.dumps(talk("a", "b")), ["conversation 2", "the file ends"]),
        ('[{"conversation', ["conversation 1", "one JSON object"]),
        ("[3]", ["conversation 1", 'a list "conversations"']),
        ('[{"conversations": [{"from": "human"}]}]', ["conversation 1", '"from" and "value"']),
        ('[{"conversations": [["a"]]}]', ["conversation 1", '"from" and "value"']),
        ("plain text", ["conversation 1", "one JSON object"]),
        ("[" * 100_000, ["conversation 1"]),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path: Path, content: str, parts: list[str]) -> None:
    path = written(tmp_path, content)
    with pytest.raises(ConfigError) as refused:
        read_conversations(path)
    message = str(refused.value)
    assert "\n" not in message
    for part in [str(path), *parts]:
        assert part in message


def test_missing_and_binary_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="do not exist"):
        read_conversations(tmp_path / "absent")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_conversations(tmp_path)
    (tmp_path / "binary").write_bytes(b"[\xff\xfe")
    with pytest.raises(ConfigError, match="0xff"):
        read_conversations(tmp_path / "binary")


def test_a_number_that_python_does_not_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="conversation 1: expected whole numbers of 4,300 digits at most"):
        read_conversations(written(tmp_path, '[{"conversations": [], "id": ' + "1" * 5000 + "}]"))
