"""Texts by which quantised arms are judged: what is read of each, what is predicted, and what is no text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtests.experiments.reading import from_table
from loadtests.trials.parity_texts import Text, read_texts
from servers.fields import ConfigError


def texts(path: Path, *, tokens: int = 24, **engine: Any) -> list[Text]:
    table = {
        "name": "small",
        "model": {"device": "cpu"},
        "engine": {"max_prompt_tokens": 8, "max_new_tokens": 6, **engine},
        "arms": [
            {"preset": "eager", "control": True},
            {"name": "int8", "preset": "eager", "model": {"quantisation": "int8-weight-only"}},
        ],
        "traffic": {"rate": 1, "duration_s": 10},
        "parity": {"texts": str(path), "tokens": tokens},
    }
    return read_texts(from_table(table))


def test_the_first_half_is_read_and_the_rest_predicted_within_the_engine_s_limits(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(json.dumps([*range(size)]) for size in (2, 5, 10, 40)) + "\n\n")
    assert texts(path) == [
        ([0], [1]),
        ([0, 1, 2], [3, 4]),
        ([0, 1, 2, 3, 4], [5, 6, 7, 8, 9]),
        ([0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13]),
    ]
    assert texts(path, tokens=1)[2] == ([0, 1, 2, 3, 4], [5])


def test_texts_that_are_asked_alike_are_one_text(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text("[1, 2, 3, 4]\n" * 40 + "[1,2,3,4]\n[1, 2, 3, 5]\n")
    assert texts(path) == [([1, 2], [3, 4]), ([1, 2], [3, 5])]
    # the same beginning, read and predicted, of two long texts
    path.write_text("\n".join(json.dumps([*range(20), end]) for end in (7, 8)))
    assert texts(path) == [([*range(8)], [*range(8, 14)])]


@pytest.mark.parametrize("line", ["[7]", "[1, -2]", "[1, 2.0]", "[1, true]", "hello", '{"ids": [1, 2]}', "[" * 100_000])
def test_a_line_that_is_no_text_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text(f"[1, 2, 3]\n{line}\n")
    with pytest.raises(ConfigError, match=r"texts.jsonl\", line 2: give a list of two token ids or more"):
        texts(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read (No such file or directory)"),
        (b"\xff\xfe", "cannot be read (no UTF-8)"),
        (b"\n\n", "has 0 texts: give 1 to 4096"),
        (b"".join(b"[1, %d]\n" % number for number in range(4097)), "has 4097 texts: give 1 to 4096"),
    ],
)
def test_a_file_without_texts_is_refused_in_one_line(content: bytes | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        texts(path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
