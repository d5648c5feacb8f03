"""The services' messages. What they answer over a real wire is tried in test_serve and test_embed."""

from __future__ import annotations

import sys
from array import array

import pytest

from servers.front.service import embed_response
from servers.rpc import inference_pb2


@pytest.mark.parametrize("order", ["little", "big"])
@pytest.mark.parametrize("numbers", [0, 1, 31, 32, 384, 5000])  # 31 × 4 bytes is the most whose length takes one byte
def test_the_bytes_of_a_vector_are_the_values_of_the_answer(
    numbers: int, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sys.byteorder == "little":  # the other way is right on every machine
        monkeypatch.setattr(sys, "byteorder", order)
    vector = array("f", (0.5 * place - 3.0 for place in range(numbers)))
    assert embed_response(vector.tobytes(), 7) == inference_pb2.EmbedResponse(values=vector, tokens=7)
