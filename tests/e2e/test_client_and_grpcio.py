from __future__ import annotations

import pytest

from tests.fakes.grpc_peers import TRAILERS, Kind, grpc_peer
from tests.loadtests.clients.test_client_faults import both


@pytest.mark.parametrize("kind", ["sync", "aio"])
def test_both_clients_tell_the_same_of_a_paced_server(kind: Kind) -> None:
    """Counts and statuses to the last one. Times by the medians of the quietest of four rounds: machines are busy."""
    with grpc_peer(kind, token_s=0.02) as target:
        frames, grpcio, _ = both(target, "paced", streams=20, tokens=15, rounds=4)
    for key in ("connect", "statuses", "tokens", "tags", "ordered"):
        assert frames[key] == grpcio[key], key
    assert frames["connect"] == ""
    assert frames["statuses"] == ["OK"]
    assert frames["tokens"] == [15] * 20
    assert frames["tags"] == list(range(20))
    assert frames["ordered"]
    assert grpcio["trailing"] == [key for key, _ in TRAILERS]
    assert set(frames["trailing"]) - {"grpc-status", "grpc-message"} == set(grpcio["trailing"])
    assert abs(frames["ttft_ms"] - grpcio["ttft_ms"]) < 25, (frames["ttft_ms"], grpcio["ttft_ms"])
    assert abs(frames["itl_ms"] - grpcio["itl_ms"]) < 5, (frames["itl_ms"], grpcio["itl_ms"])
    assert 19 < frames["itl_ms"] < 40
