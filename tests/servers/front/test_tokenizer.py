from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from servers.front.request_limits import STOP_CHARACTERS, STOP_STRINGS
from servers.front.tokenizer import BOS_ID, ByteTokenizer, ModelStream, StopStrings, load_tokenizer


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


@given(
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.text(alphabet="ab", max_size=3), max_size=12),
)
def test_of_several_stop_strings_the_first_to_end_cuts_however_the_text_comes(
    stop: list[str], parts: list[str]
) -> None:
    whole = "".join(parts)
    ends = [(whole.index(item) + len(item), -len(item)) for item in stop if item in whole]
    expected = whole if not ends else whole[: sum(min(ends))]
    stops, shown, met = StopStrings(stop), "", False
    for part in parts:
        text, met = stops.push(part)
        shown += text
        if met:
            break
    assert met == bool(ends)
    assert shown + ("" if met else stops.rest()) == expected


@pytest.mark.parametrize("end", ["y", "y" + "x" * (STOP_CHARACTERS // 2)])
def test_the_most_and_longest_stop_strings_that_are_allowed_cost_next_to_nothing(end: str) -> None:
    started = time.process_time()
    stops = StopStrings(["x" * (STOP_CHARACTERS - len(end) - number) + end for number in range(STOP_STRINGS)])
    for _ in range(1000):
        stops.push("x" * 500)
    assert time.process_time() - started < 15  # comparing every beginning with every ending takes minutes


class Counted:
    """A tokenizer that counts the tokens it is given to decode."""

    def __init__(self) -> None:
        self.decoded = 0
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(alphabet)}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        self._inner = PreTrainedTokenizerFast(tokenizer_object=backend)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._inner(text)["input_ids"]
        return ids

    def decode(self, ids: Sequence[int], **options: bool) -> str:
        self.decoded += len(ids)
        text: str = self._inner.decode(ids, **options)
        return text


TOKENIZER = Counted()


@given(st.text(max_size=40), st.integers(1, 5))
def test_a_models_tokens_give_the_text_that_they_give_together(text: str, at_once: int) -> None:
    ids, stream = TOKENIZER.encode(text), ModelStream(TOKENIZER)
    pieces = [stream.push(ids[start : start + at_once]) for start in range(0, len(ids), at_once)]
    assert "".join(pieces).rstrip("\ufffd") == text.rstrip("\ufffd")


def test_a_token_of_a_long_answer_takes_no_longer_than_that_of_a_short_one() -> None:
    tokenizer = Counted()
    stream = ModelStream(tokenizer)
    ids = tokenizer.encode("né " * 500)
    for token in ids:
        stream.push([token])
    assert tokenizer.decoded < 12 * len(ids)


def test_bytes_that_never_become_a_character_do_not_hold_an_answer_back() -> None:
    tokenizer = Counted()
    broken = tokenizer.encode("é")[1]
    stream = ModelStream(tokenizer)
    shown = "".join(stream.push([broken]) for _ in range(100))
    assert len(shown) > 80
    assert tokenizer.decoded < 50 * 100
