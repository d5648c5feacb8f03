"""Small files that tell whether they are as they were written, and content that nobody should have written."""

import json
import random

import pytest

from analysis.records.documents import (
    parse_json,
    parse_toml,
    read_document,
    read_rows,
    read_toml,
    vouched_toml,
    write_document,
)

CONTENT = {"trial": 1, "planned": {"eager": 120, "compiled": 120}, "block_s": 30.0, "complete": True, "name": "é"}


def test_what_was_written_is_read(tmp_path):
    write_document(tmp_path / "trial.json", CONTENT, indent=2)
    document = read_document(tmp_path / "trial.json")
    assert (document.content, document.stated, document.problem) == (CONTENT, True, "")
    assert read_document(tmp_path / "none.json") is None


def test_no_change_of_meaning_is_overlooked(tmp_path):
    path = tmp_path / "trial.json"
    write_document(path, CONTENT)
    whole = path.read_bytes()
    rng = random.Random(1)
    for _ in range(300):
        content = bytearray(whole)
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        document = read_document(path)
        assert document.problem or not document.stated or document.content == CONTENT
        if not document.stated and document.content is not None:  # the name of the sum was hit, and nothing else
            assert {key: document.content[key] for key in CONTENT} == CONTENT


def test_a_document_of_others_is_read_and_vouches_for_nothing(tmp_path):
    (tmp_path / "trial.json").write_text(json.dumps(CONTENT))
    document = read_document(tmp_path / "trial.json")
    assert (document.content, document.stated, document.problem) == (CONTENT, False, "")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[1]",
        '{"a": 123456789012345678901234567890}',
        "{",
        '{"a": 1} x',
        "[" * 700_000,
        '{"a":' * 350_000,
        '{"a": ' + "[" * 40 + "]" * 40 + "}",
    ],
    ids=lambda text: text[:12],
)
def test_what_is_no_shallow_table_is_not_readable(tmp_path, text):
    (tmp_path / "trial.json").write_text(text)
    assert read_document(tmp_path / "trial.json").problem == "is not readable JSON"


def test_numbers_that_are_none_are_unknown():
    assert parse_json('{"a": NaN, "b": [Infinity, -Infinity, 1]}') == {"a": None, "b": [None, None, 1]}


def test_half_a_character_is_no_text():
    with pytest.raises(ValueError, match="surrogates"):
        parse_json('{"a": "\\ud800"}')


def test_a_changed_setting_is_noticed_and_still_read(tmp_path):
    path = tmp_path / "experiment.toml"
    path.write_text(vouched_toml('name = "a"\n[gates]\nmax_recompiles = 8\n'))
    assert read_toml(path).problem == ""
    path.write_text(path.read_text().replace("8", "9", 1))
    document = read_toml(path)
    assert document.content["gates"] == {"max_recompiles": 9}
    assert document.problem.startswith("was changed after it was written")
    text = path.read_text().rpartition("# crc32")[0]
    for end, stated in (("", False), ("# edited\n", True)):
        path.write_text(text + end)
        assert (read_toml(path).stated, read_toml(path).problem) == (stated, "")


@pytest.mark.parametrize("text", ["a." * 50_000 + "b = 1", "a = " + "[" * 5000, "a = " + "[" * 40 + "]" * 40])
def test_toml_that_is_too_deep_is_refused_at_once(text):
    with pytest.raises(ValueError, match="32"):
        parse_toml(text)


def test_whole_lines_without_a_table_are_counted_and_a_torn_one_is_not(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n\n\xff\n[]\n' + b"[" * 5000 + b'\n{"a": 2}\n{"a"')
    assert read_rows(path) == ([{"a": 1}, {"a": 2}], 3)
    assert read_rows(tmp_path / "none") == ([], 0)
