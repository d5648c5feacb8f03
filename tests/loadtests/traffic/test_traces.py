"""Trace readers: published files load as they are; anything else is refused with file, line, value and remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.traffic.conversations import Exchange, read_conversations
from loadtests.traffic.traces import Trace, read_trace
from servers.fields import ConfigError

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


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        read_trace(path)
    message = str(refused.value)
    assert "\n" not in message
    assert str(path) in message
    return message


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("end", ["", "newline", "blank lines"])
def test_azure_rows_are_read_to_the_tenth_of_a_microsecond(tmp_path: Path, newline: str, end: str) -> None:
    tail = {"": "", "newline": newline, "blank lines": newline * 3}[end]
    trace = read_trace(written(tmp_path, newline.join([HEADER, *AZURE_2023]) + tail))
    assert trace.format == "azure"
    assert trace.offset_ns.tolist() == [0, 319_410_100, 319_410_100]
    assert trace.input_tokens.tolist() == [374, 396, 879]
    assert trace.output_tokens.tolist() == [44, 109, 55]
    assert trace.duration_s == pytest.approx(0.3194101)


def mooncake_line(at: float, given_tokens: object = 10, asked_tokens: object = 5) -> str:
    return json.dumps({"timestamp": at, "input_length": given_tokens, "output_length": asked_tokens, "hash_ids": [0]})


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
    trace = read_trace(written(tmp_path_factory.mktemp("t"), "\n".join(mooncake_line(*row) for row in rows)))
    assert trace.offset_ns.tolist() == [(row[0] - rows[0][0]) * 1_000_000 for row in rows]
    assert trace.input_tokens.tolist() == [row[1] for row in rows]
    assert trace.output_tokens.tolist() == [row[2] for row in rows]


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ("2023-11-17 00:00:01.0000000,12", ["line 5", "12", "correct or remove"]),
        ("2023-11-17 00:00:01.0000000,12,x", ["line 5", "12,x", "correct or remove"]),
        ("2023-11-17 00:00:01.0000000,12,1.5", ["line 5", "12,1.5", "correct or remove"]),
        ("yesterday,12,5", ["line 5", "yesterday", "correct or remove"]),
        ("2023-13-17 00:00:01.0000000,12,5", ["line 5", "2023-13-17", "correct or remove"]),
        ("2023-11-17 00:00:01.0000000,0,5", ["line 5", "input length is 0", "remove the line"]),
        ("2023-11-17 00:00:01.0000000,12,0", ["line 5", "output length is 0", "remove the line"]),
        ("2023-11-17 00:00:01.0000000,12,-5", ["line 5", "output length is -5", "remove the line"]),
        ("2023-11-17 00:00:01.0000000,99999999999,5", ["line 5", "99999999999", "remove the line"]),
        ("2023-11-17 00:00:01.0000000," + "9" * 5000 + ",5", ["line 5", "...", "remove the line"]),
        ("9999-11-17 00:00:01.0000000,12,5", ["line 5", "9999-11-17", "10 years", "remove the line"]),
        (
            "2023-11-17 00:00:00.0000000,12,5",
            ["line 5", "from 2023-11-17 00:00:00.0000001 to 2023-11-17 00:00:00.0000000", "sort the trace"],
        ),
    ],
)
def test_bad_azure_line_is_named_with_its_value_and_remedy(tmp_path: Path, row: str, parts: list[str]) -> None:
    message = refusal(written(tmp_path, "\r\n".join([HEADER, *AZURE_2023, row])))
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ('{"timestamp": 3', ["line 2", "one JSON object"]),
        ("[1, 2]", ["line 2", "one JSON object"]),
        ('{"timestamp": 3, "input_length": 4}', ["line 2", '"output_length"']),
        ('{"timestamp": "3", "input_length": 4, "output_length": 4}', ["line 2", "milliseconds"]),
        ('{"timestamp": NaN, "input_length": 4, "output_length": 4}', ["line 2", "milliseconds"]),
        (mooncake_line(10**400), ["line 2", "milliseconds"]),
        (mooncake_line(10**14), ["line 2", "10 years"]),
        ("[" * 50_000, ["line 2", "one JSON object"]),
        (mooncake_line(3000, 4.5, 4), ["line 2", "input_length"]),
        (mooncake_line(3000, True, 4), ["line 2", "input_length"]),
        (mooncake_line(3000, 0, 4), ["line 2", "input length is 0", "remove the line"]),
        (mooncake_line(3000, 4, 0), ["line 2", "output length is 0", "remove the line"]),
        (mooncake_line(2999, 4, 4), ["line 2", "from 3000 ms to 2999 ms", "sort the trace"]),
    ],
)
def test_bad_mooncake_line_is_named_with_its_value_and_remedy(tmp_path: Path, row: str, parts: list[str]) -> None:
    message = refusal(written(tmp_path, mooncake_line(3000) + "\n" + row + "\n"))
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "is empty"),
        ("\n\n  \n", "is empty"),
        (HEADER + "\n", "no request"),
        ("time,prompt,answer\n1,2,3\n", 'line 1 is "time,prompt,answer", which is no known format'),
        ("x" * 5000, "..."),
    ],
)
def test_empty_and_unknown_files_are_refused(tmp_path: Path, text: str, part: str) -> None:
    message = refusal(written(tmp_path, text))
    assert part in message
    assert len(message) < 600


def test_missing_file_directory_and_binary_are_refused(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "absent.csv")
    assert "cannot be read" in refusal(tmp_path)
    binary = tmp_path / "trace.csv.gz"
    binary.write_bytes(b"\x1f\x8b\x08\x00\xff\xfe")
    assert "not UTF-8" in refusal(binary)


def published(name: str) -> Trace:
    path = PUBLISHED / name
    if not path.exists():
        pytest.skip(f"{name} is not here")
    return read_trace(path)


def test_published_azure_conversation_loads_as_it_is() -> None:
    trace = published("AzureLLMInferenceTrace_conv.csv")
    assert len(trace) == 19_366
    assert trace.duration_s == pytest.approx(3501.722, abs=0.001)
    assert np.rint(np.quantile(trace.input_tokens, [0.5, 0.9, 0.99])).tolist() == pytest.approx(
        [1020, 2734, 4142], abs=1
    )
    assert np.rint(np.quantile(trace.output_tokens, [0.5, 0.9, 0.99])).tolist() == [129, 424, 601]
    logs = np.log(trace.input_tokens)
    assert (logs.mean(), logs.std()) == pytest.approx((6.633, 0.985), abs=0.001)


def test_published_mooncake_conversation_loads_as_it_is() -> None:
    trace = published("mooncake_conversation_trace.jsonl")
    assert len(trace) == 12_031
    assert trace.duration_s == pytest.approx(3536.999)
    assert (trace.input_tokens[0], trace.output_tokens[0]) == (6758, 500)


PLAIN = "time_s,input_tokens,output_tokens"


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ("1,2", ["line 3", "3 values"]),
        ("1,2,3,4", ["line 3", "3 values"]),
        ("x,2,3", ["line 3", "time_s in seconds"]),
        ("1e3,2,3", ["line 3", "time_s in seconds"]),
        ("1,2.5,3", ["line 3", "input_tokens"]),
        ("1,2,x", ["line 3", "output_tokens"]),
        ("1,0,3", ["line 3", "input length is 0", "remove the line"]),
        ("1,2,-3", ["line 3", "output length is -3"]),
        ("0.4,2,3", ["line 3", "from 0.5 s to 0.4 s", "sort the trace"]),
    ],
)
def test_bad_plain_line_is_named_with_its_value_and_remedy(tmp_path: Path, row: str, parts: list[str]) -> None:
    message = refusal(written(tmp_path, f"{PLAIN}\n0.5,10,3\n{row}\n"))
    for part in parts:
        assert part in message


def azure(count: int) -> str:
    """One request a second, its input length its number from 1."""
    return "\n".join([HEADER, *(f"2023-11-17 00:{n // 60:02}:{n % 60:02}.0,{n + 1},5" for n in range(count))])


def test_a_window_past_the_end_still_tells_how_long_the_trace_is(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, azure(10)), start_s=50, end_s=60)
    assert (len(trace), trace.duration_s) == (1, 9.0)


def test_a_line_without_end_is_not_read_whole(tmp_path: Path) -> None:
    assert "break it into lines" in refusal(written(tmp_path, HEADER + "\n" + "1" * (1 << 24)))


def test_a_plain_csv_without_answers_is_refused_where_they_are_needed(tmp_path: Path) -> None:
    assert 'add the column output_tokens, or set model.task = "embed"' in refusal(
        written(tmp_path, "time_s,input_tokens\n0,7")
    )
    assert "output length is 0" in refusal(written(tmp_path, "time_s,input_tokens,output_tokens\n0,7,0"))


def talk(*texts: str, first: str = "human") -> dict[str, Any]:
    roles = ("human", "gpt") if first == "human" else ("gpt", "human")
    return {"id": "x", "conversations": [{"from": roles[i % 2], "value": text} for i, text in enumerate(texts)]}


def written_file(folder: Path, content: object) -> Path:
    path = folder / "talks.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_what_published_files_hold_besides_is_left_out_and_counted(tmp_path: Path) -> None:
    content = [
        talk(),
        talk("only a question"),
        talk("an answer first", "then a question", "and its answer", first="gpt"),
        talk("asked", "  "),
        {"conversations": [{"from": "system", "value": "be brief"}, {"from": "user", "value": "hi"},
                           {"from": "assistant", "value": "hello"}]},
    ]  # fmt: skip
    found = read_conversations(written_file(tmp_path, content))
    assert (found.read, found.unusable) == (5, 3)
    assert found.kept[0].exchanges == (Exchange("then a question", "and its answer"),)
    assert (found.kept[1].system, found.kept[1].exchanges) == ("be brief", (Exchange("hi", "hello"),))


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
    path = written_file(tmp_path, content)
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
        read_conversations(written_file(tmp_path, '[{"conversations": [], "id": ' + "1" * 5000 + "}]"))
