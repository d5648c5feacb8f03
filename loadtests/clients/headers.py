"""Header blocks (HPACK, RFC 7541) for a busy client: straight to a dictionary, without an object for each field.

The hpack library keeps the tables and brings the Huffman code, and the tests hold this decoder against its encoder and
its decoder. Decoding is done here because it was nine tenths of what a short request cost, see
docs/decisions/0003-http2-client.md.
"""

from __future__ import annotations

from typing import Final

from hpack.exceptions import InvalidTableIndex
from hpack.huffman_table import HUFFMAN_COMPLETE, HUFFMAN_EMIT_SYMBOL, HUFFMAN_FAIL, HUFFMAN_TABLE
from hpack.table import HeaderTable

LARGEST_TABLE: Final = 4096  # bytes; SETTINGS_HEADER_TABLE_SIZE, whose default this client never changes
_OVERHEAD: Final = 32  # bytes that RFC 7541, 4.1 adds to each entry's size
_LARGEST_INTEGER: Final = 2**31 - 1


class HeaderError(Exception):
    """A header block cannot be decoded; what the peer compresses after it cannot be either."""


class HeaderDecoder:
    """The compression state of one direction of a connection. Every block must pass through it, in order."""

    def __init__(self, *, largest_list: int) -> None:
        self.table = HeaderTable()
        self._largest_list = largest_list  # bytes of all fields of a block, counted as RFC 9113, 6.5.2 says

    def decode(self, block: bytes) -> dict[str, str]:
        """Return the fields by name, bytes as Latin-1; commas join the values of a name that comes more than once."""
        fields: dict[str, str] = {}
        # One decode for the whole block: a slice of a str is cheaper than a slice of bytes and its decode.
        text = block.decode("latin-1")
        entry = self.table.get_by_index
        position, end = 0, len(block)
        # Fields that come from the table cost the peer one byte each: they are what could grow without end.
        left = self._largest_list
        try:
            while position < end:
                first = block[position]
                if first == 0 and (length := block[position + 1]) < 0x7F:
                    # A new name, not kept: all that gRPC's own servers send as trailing metadata.
                    start = position + 2
                    position = start + length
                    name = text[start:position]
                    length = block[position]
                    start = position + 1
                    if length < 0x7F:
                        position = start + length
                        value = text[start:position]
                    else:
                        value, position = _string(block, text, start, length)
                elif first >= 0x80:
                    index = first & 0x7F
                    position += 1
                    if index == 0x7F:
                        index, position = _integer(block, position, index)
                    raw_name, raw_value = entry(index)
                    name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
                    left -= len(name) + len(value) + _OVERHEAD
                    if left < 0:
                        raise HeaderError(f"a header list has more than {self._largest_list} bytes")
                elif 0x20 <= first < 0x40:
                    if fields:
                        raise HeaderError("the table's size changes after the first field")
                    size = first & 0x1F
                    position += 1
                    if size == 0x1F:
                        size, position = _integer(block, position, size)
                    if size > LARGEST_TABLE:
                        raise HeaderError(f"the table would have {size} bytes; the limit is {LARGEST_TABLE}")
                    self.table.maxsize = size
                    continue
                else:
                    name, value, position = self._literal(block, text, position, first)
                    if first >= 0x40:
                        self.table.add(name.encode("latin-1"), value.encode("latin-1"))
                fields[name] = f"{fields[name]},{value}" if name in fields else value
        except (IndexError, InvalidTableIndex):
            raise HeaderError("a field runs over the end of its block, or names an entry that is not there") from None
        if position > end:
            raise HeaderError("a field runs over the end of its block")
        return fields

    def _literal(self, block: bytes, text: str, position: int, first: int) -> tuple[str, str, int]:
        """Return (name, value, where the field ends) of the literal whose first byte, `first`, is at `position`."""
        mask = 0x3F if first >= 0x40 else 0x0F
        index = first & mask
        position += 1
        if index == mask:
            index, position = _integer(block, position, index)
        if index:
            name = self.table.get_by_index(index)[0].decode("latin-1")
        else:
            name, position = _string(block, text, position + 1, block[position])
        value, position = _string(block, text, position + 1, block[position])
        return name, value, position


def _integer(block: bytes, position: int, value: int) -> tuple[int, int]:
    """Return the number that goes on at `position` after a full prefix `value` (RFC 7541, 5.1), and where it ends."""
    shift = 0
    while True:
        byte = block[position]
        position += 1
        value += (byte & 0x7F) << shift
        shift += 7
        if value > _LARGEST_INTEGER or shift > 35:
            raise HeaderError("a number is too large")
        if byte < 0x80:
            return value, position


def _string(block: bytes, text: str, start: int, length: int) -> tuple[str, int]:
    """Return the string that starts at `start`, after its first length byte `length`, and where it ends."""
    size = length & 0x7F
    if size == 0x7F:
        size, start = _integer(block, start, size)
    end = start + size
    return (_huffman(block[start:end]) if length & 0x80 else text[start:end]), end


# --- Huffman ----------------------------------------------------------------------------------------------------------

# What one byte does in a state of the code's automaton, filled as bytes come: state << 8 | byte -> (next state << 8,
# symbols). At most 65,536.
_STEPS: Final[dict[int, tuple[int, str]]] = {}
# RFC 7541, 5.2: what is left over is less than a byte of the end-of-string code, which is all ones.
_ENDS: Final = frozenset(state << 8 for state, flags, _ in HUFFMAN_TABLE if flags & HUFFMAN_COMPLETE)


def _fill(key: int) -> None:
    state, symbols = key >> 8, ""
    for nibble in (key >> 4 & 0xF, key & 0xF):
        state, flags, symbol = HUFFMAN_TABLE[state << 4 | nibble]
        if flags & HUFFMAN_FAIL:
            raise HeaderError("a Huffman-coded string holds the end-of-string code")
        if flags & HUFFMAN_EMIT_SYMBOL:
            symbols += chr(symbol)
    _STEPS[key] = (state << 8, symbols)


def _huffman(coded: bytes) -> str:
    steps = _STEPS
    while True:
        state, out = 0, ""
        try:
            for byte in coded:
                state, symbols = steps[state | byte]
                out += symbols
        except KeyError as missing:
            _fill(missing.args[0])
            continue
        if state not in _ENDS:
            raise HeaderError("a Huffman-coded string ends inside a code")
        return out
