"""Trace readers: published files load as they are; anything else is refused with file, line, value and remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailgate.loadtests.traffic.traces import Trace, read_trace
from tailgate.servers.complaint import ConfigError
from tests.fakes.processes import refusal

PUBLISHED = Path(__file__).parents[3] / ".." / "shared" / "traces"
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
AZURE_2023 = [
    "2023-11-16 23:59:59.6805900,374,44",
    "2023-11-17 00:00:00.0000001,396,109",
    "2023-11-17 00:00:00.0000001,879,55",
]


def written(folder: Path, text: str, name: str = "trace") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def unread(path: Path) -> str:
    message = refusal(ConfigError, read_trace, path)
    assert str(path) in message
    return message


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("at_end", [0, 1, 3])
def test_azure_rows_are_read_to_the_tenth_of_a_microsecond(tmp_path: Path, newline: str, at_end: int) -> None:
    trace = read_trace(written(tmp_path, newline.join([HEADER, *AZURE_2023]) + newline * at_end))
    assert trace.format == "azure"
    assert trace.offset_ns.tolist() == [0, 319_410_100, 319_410_100]
    assert trace.input_tokens.tolist() == [374, 396, 879]
    assert trace.output_tokens.tolist() == [44, 109, 55]


def mooncake_line(at: float, given_tokens: object = 10, asked_tokens: object = 5, ids: object = (0,)) -> str:
    return json.dumps({"timestamp": at, "input_length": given_tokens, "output_length": asked_tokens, "hash_ids": ids})


@settings(max_examples=30)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 10**6), st.integers(1, 10**6), st.integers(1, 10**6)), min_size=1, max_size=30
    )
)
def test_every_mooncake_row_comes_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int, int]]
) -> None:
    rows = sorted(rows, key=lambda row: row[0])
    lines = [mooncake_line(*row, [*range(-(-row[1] // 512))]) for row in rows]
    trace = read_trace(written(tmp_path_factory.mktemp("t"), "\n".join(lines)))
    assert trace.offset_ns.tolist() == [(row[0] - rows[0][0]) * 1_000_000 for row in rows]
    assert trace.input_tokens.tolist() == [row[1] for row in rows]
    assert trace.output_tokens.tolist() == [row[2] for row in rows]
    assert [len(ids) for ids in trace.blocks.to_pylist()] == [-(-row[1] // 512) for row in rows]


LATE = "2023-11-17 00:00:01.0000000"
BAD_AZURE: list[tuple[str, list[str]]] = [
    (f"{LATE},12", ["Row #4", "12", "correct or remove"]),
    (f"{LATE},12,x", ["Row #4", "'x'", "correct or remove"]),
    (f"{LATE},12,", ["row 4", "has no GeneratedTokens"]),
    (f"{LATE},0,5", ["row 4", "input length is 0", "remove the row"]),
    (f"{LATE},12,-5", ["row 4", "output length is -5"]),
    (f"{LATE},99999999999,5", ["Row #4", "99999999999"]),
    (f"{LATE},{'9' * 5000},5", ["Row #4", "..."]),
    ("2023-11-17 00:00:00.0000000,12,5", ["row 4", "time goes back by 100 ns", "sort the trace"]),
]
BAD_MOONCAKE: list[tuple[str, list[str]]] = [
    ('{"timestamp": 3', ["row 2", "Invalid JSON"]),
    ('{"timestamp": 3, "input_length": 4}', ["row 2", "output_length: Field required"]),
    ('{"timestamp": "3", "input_length": 4, "output_length": 4}', ["row 2", "timestamp: ", "number"]),
    ('{"timestamp": NaN, "input_length": 4, "output_length": 4}', ["row 2", "timestamp: "]),
    (mooncake_line(10**400), ["row 2", "timestamp: "]),
    ("[" * 50_000, ["row 2", "Invalid JSON"]),
    (mooncake_line(3000, 4.5, 4), ["row 2", "input_length: ", "integer"]),
    (mooncake_line(3000, 2**70, 4), ["row 2", "input_length: ", "less than 2147483648"]),
    (mooncake_line(3000, 0, 4, []), ["row 2", "input length is 0", "remove the row"]),
    (mooncake_line(3000, 513, 4, [0, 1, 2]), ["row 2", "3 hash_ids", "2 blocks of 512", "one for each block"]),
    *((mooncake_line(3000, 600, 5, ids), ["row 2", "hash_ids"]) for ids in (["a"], [-1], 7, [True])),
    (mooncake_line(2999, 4, 4), ["row 2", "goes back by 1000000 ns", "sort the trace"]),
]


@pytest.mark.parametrize(
    ("before", "row", "parts"),
    [
        *(("\r\n".join([HEADER, *AZURE_2023, ""]), *case) for case in BAD_AZURE),
        *((mooncake_line(3000) + "\n", *case) for case in BAD_MOONCAKE),
    ],
)
def test_a_bad_row_is_named_with_its_value_and_remedy(tmp_path: Path, before: str, row: str, parts: list[str]) -> None:
    message = unread(written(tmp_path, before + row))
    for part in parts:
        assert part in message
    assert len(message) < 1200


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "is empty"),
        ("\n\n  \n", "is empty"),
        (HEADER + "\n", "Empty CSV file"),
        ("time,prompt,answer\n1,2,3\n", 'begins with "time,prompt,answer", which is no known format'),
    ],
)
def test_empty_and_unknown_files_are_refused(tmp_path: Path, text: str, part: str) -> None:
    message = unread(written(tmp_path, text))
    assert part in message
    assert len(message) < 600


def test_missing_file_directory_and_binary_are_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    found = [unread(tmp_path / name) for name in ("absent.csv", "", "binary")]
    for words, message in zip(("No such file", "cannot be read", "not UTF-8"), found, strict=True):
        assert words in message


def published(name: str) -> Trace:
    path = PUBLISHED / name
    if not path.exists():
        pytest.skip(f"{name} is not here")
    return read_trace(path)


def test_published_traces_load_as_they_are_and_have_the_lengths_of_the_fit() -> None:
    azure = published("AzureLLMInferenceTrace_conv.csv")
    assert (len(azure), azure.input_tokens[0], azure.output_tokens[0]) == (19_366, 374, 44)
    assert azure.offset_ns[-1] / 1e9 == pytest.approx(3501.722, abs=0.001)
    logs = np.log(azure.input_tokens)
    assert (logs.mean(), logs.std()) == pytest.approx((6.633, 0.985), abs=0.001)
    mooncake = published("mooncake_conversation_trace.jsonl")
    assert (len(mooncake), mooncake.input_tokens[0], mooncake.output_tokens[0]) == (12_031, 6758, 500)
    assert mooncake.offset_ns[-1] / 1e9 == pytest.approx(3536.999)


def blocks(at: float, tokens: int, size: int, **more: Any) -> dict[str, Any]:
    ids = [*range(-(-tokens // size))]
    return {"timestamp": at, "input_length": tokens, "output_length": 4, "hash_ids": ids, **more}


@pytest.mark.parametrize(
    ("text", "offsets_s", "inputs", "account"),
    [
        (
            HEADER + "\n2024-05-10 00:00:00.009930+00:00,7,5\n2024-05-10 00:00:00.5+00:00,8,0\n"
            "2024-05-10 00:00:01.009930+00:00,9,5\n",
            [0, 1],
            [7, 9],
            "2 requests in 1 s, read as azure; left out as failed, without an output token: 1",
        ),
        (
            "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2024-10-15T12:00:00.269Z,1,1204,35\n",
            [0],
            [1204],
            "1 request in 0 s, read as azure",
        ),
        (
            "\n".join(map(json.dumps, (blocks(0, 1024, 512), blocks(3000, 1025, 512)))),
            [0, 3],
            [1024, 1025],
            "2 requests in 3 s, read as mooncake",
        ),
    ],
)
def test_the_format_is_known_by_content_and_failed_rows_are_counted(
    tmp_path: Path, text: str, offsets_s: list[float], inputs: list[int], account: str
) -> None:
    path = written(tmp_path, text)
    trace = read_trace(path)
    assert trace.offset_ns.tolist() == [round(at * 1e9) for at in offsets_s]
    assert trace.input_tokens.tolist() == inputs
    assert trace.account == f"{path}: {account}"


def test_a_trace_without_answers_is_refused_where_they_are_needed(tmp_path: Path) -> None:
    path = written(tmp_path, HEADER + "\n2023-11-17 00:00:00,7,0")
    assert "no request with an answer, and 1 without" in unread(path)
    assert read_trace(path, answers=False).output_tokens.tolist() == [0]
