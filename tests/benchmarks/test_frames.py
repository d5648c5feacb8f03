from __future__ import annotations

import pytest
from hpack import Decoder
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import frames


@pytest.mark.parametrize("huffman", [False, True])
@given(recv_ns=st.integers(0, 2**63 - 1), took_ns=st.integers(0, 10**12), tokens=st.integers(0, 10**9))
def test_trailers_say_what_a_tailgate_server_says(huffman: bool, recv_ns: int, took_ns: int, tokens: int) -> None:
    block = frames.Answers(huffman=huffman).trailers(tokens=tokens, recv_ns=recv_ns, end_ns=recv_ns + took_ns)
    fields = dict(Decoder().decode(block))
    assert fields["grpc-status"] == "0"
    assert fields["tailgate-output-tokens"] == str(tokens)
    assert fields["tailgate-recv-ns"] == str(recv_ns)
    assert fields["tailgate-end-ns"] == str(recv_ns + took_ns)
    assert sum(key.startswith("tailgate-") for key in fields) == 14
