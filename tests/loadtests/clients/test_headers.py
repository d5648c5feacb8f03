"""The header decoder against the hpack library's encoder and decoder."""

from __future__ import annotations

import hpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.clients.headers import HeaderDecoder, HeaderError

LARGEST = 65_536
NAMES = st.sampled_from([":status", "content-type", "grpc-status", "tailgate-end-ns", "date", "x", "x-" + "n" * 150])
VALUES = st.one_of(
    st.sampled_from(["", "0", "200", "application/grpc", "1795288083056915310"]),
    st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=40),
    st.text("0123456789", min_size=100, max_size=300),
    st.text(st.characters(min_codepoint=0, max_codepoint=0xFF), max_size=20),
)
FIELD = st.tuples(NAMES, VALUES)


def joined(fields: list[tuple[bytes, bytes]]) -> dict[str, str]:
    table: dict[str, str] = {}
    for key, value in fields:
        name, text = key.decode("latin-1"), value.decode("latin-1")
        table[name] = f"{table[name]},{text}" if name in table else text
    return table


@given(
    blocks=st.lists(
        st.tuples(st.lists(st.tuples(FIELD, st.booleans()), max_size=12), st.booleans(), st.integers(0, 4096)),
        max_size=8,
    )
)
def test_whatever_hpack_encodes_comes_back(
    blocks: list[tuple[list[tuple[tuple[str, str], bool]], bool, int]],
) -> None:
    """Indexed or never indexed, Huffman coded or not, with a table that grows and shrinks between blocks."""
    encoder, decoder = hpack.Encoder(), HeaderDecoder(largest_list=LARGEST)
    for fields, huffman, table_size in blocks:
        raw = [(name.encode(), value.encode("latin-1"), never) for (name, value), never in fields]
        encoder.header_table_size = table_size
        block = encoder.encode(raw, huffman=huffman)
        assert decoder.decode(block) == joined([(name, value) for name, value, _ in raw])


def agree(blocks: list[bytes]) -> None:
    """Both decoders find the same fields, or both an error."""
    theirs, ours = hpack.Decoder(max_header_list_size=1 << 30), HeaderDecoder(largest_list=1 << 30)
    for block in blocks:
        try:
            expected = joined([(bytes(key), bytes(value)) for key, value in theirs.decode(block, raw=True)])
        except (hpack.HPACKError, IndexError):
            with pytest.raises(HeaderError):
                ours.decode(block)
            return
        assert ours.decode(block) == expected


@settings(max_examples=300)
@given(blocks=st.lists(st.binary(max_size=60), max_size=4))
def test_any_bytes_mean_what_they_mean_to_hpack(blocks: list[bytes]) -> None:
    agree(blocks)


@settings(max_examples=300)
@given(
    fields=st.lists(FIELD, min_size=1, max_size=6), cut=st.floats(0, 1), flip=st.integers(0, 7), huffman=st.booleans()
)
def test_a_damaged_block_means_what_it_means_to_hpack(
    fields: list[tuple[str, str]], cut: float, flip: int, huffman: bool
) -> None:
    block = bytearray(hpack.Encoder().encode([(k.encode(), v.encode("latin-1")) for k, v in fields], huffman=huffman))
    place = min(len(block) - 1, int(cut * len(block)))
    block[place] ^= 1 << flip
    agree([bytes(block)])
    agree([bytes(block[:place])])


def test_entries_leave_the_table_when_it_is_full() -> None:
    encoder, decoder = hpack.Encoder(), HeaderDecoder(largest_list=LARGEST)
    for number in range(300):
        fields = [("x-fixed", "a" * 50), (f"x-{number}", "v" * 300)]
        assert decoder.decode(encoder.encode(fields)) == dict(fields)
    assert 3500 < decoder.table_size <= 4096


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (b"\x80", "index 0"),
        (b"\xbe", "names an entry that is not there"),
        (b"\x3f\xe2\x1f", "the limit is 4096"),
        (b"\x82\x20", "after the first field"),
        (b"\x00\x05abc", "over the end"),
        (b"\x00\x01a\x05b", "over the end"),
        (b"\xff\xff\xff\xff\xff\xff\xff\x7f", "too large"),
        (b"\x00\x01a\x84\xff\xff\xff\xff", "end-of-string"),
        (b"\x00\x01a\x81\x00", "inside a code"),
    ],
)
def test_a_block_that_breaks_the_rules_says_which(block: bytes, text: str) -> None:
    with pytest.raises(HeaderError, match=text):
        HeaderDecoder(largest_list=LARGEST).decode(block)


def test_a_list_that_grows_out_of_one_table_entry_is_stopped() -> None:
    decoder = HeaderDecoder(largest_list=10_000)
    decoder.decode(b"\x40\x01a\x7f\xa1\x1e" + b"v" * 4_000)  # an entry of 4,033 bytes, and one byte asks for it
    assert len(decoder.decode(b"\xbe" * 2)["a"]) == 8_001
    with pytest.raises(HeaderError, match="more than 10000 bytes"):
        decoder.decode(b"\xbe" * 3)
