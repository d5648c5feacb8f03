from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from servers.tokenizer import BOS_ID, ByteTokenizer, StopStrings, load_tokenizer


@given(st.text(max_size=40))
def test_bytes_come_back_as_the_text_they_were(text: str) -> None:
    tokenizer = load_tokenizer("random:tiny")
    assert isinstance(tokenizer, ByteTokenizer)
    ids = tokenizer.encode(text)
    assert ids[0] == BOS_ID
    stream = tokenizer.stream()
    assert "".join(stream.push([token]) for token in ids) == text


def test_half_a_character_is_held_back() -> None:
    tokenizer = ByteTokenizer()
    stream = tokenizer.stream()
    first, *rest = tokenizer.encode("é")[1:]
    assert stream.push([first]) == ""
    assert stream.push(rest) == "é"


def test_a_stop_string_is_found_across_chunks_and_cut() -> None:
    stops = StopStrings(["END"])
    assert stops.push("so E") == ("so ", False)
    assert stops.push("N") == ("", False)
    assert stops.push("Dx") == ("", True)


def test_a_false_beginning_is_given_back() -> None:
    stops = StopStrings(["END"])
    assert stops.push("E") == ("", False)
    assert stops.push("at") == ("Eat", False)
    assert stops.push("E") == ("", False)
    assert stops.rest() == "E"


@given(st.lists(st.text(alphabet="ab", max_size=3), max_size=12), st.text(alphabet="ab", min_size=1, max_size=3))
def test_stop_strings_never_let_the_stop_through_and_lose_nothing(parts: list[str], stop: str) -> None:
    whole = "".join(parts)
    stops = StopStrings([stop])
    shown = ""
    for part in parts:
        text, met = stops.push(part)
        shown += text
        if met:
            assert shown == whole[: whole.index(stop)]
            return
    assert stop not in whole
    assert shown + stops.rest() == whole
