"""Engines that say that they are warm, in the place of a replica's own: `python -m tests.fakes.engine HOW …`.

HOW is `answers` (every answer comes whole; one of more than 1,000 tokens stalls after its first), `short` (every
answer lacks its last token) or `mute` (nothing comes). What follows is the command line of `python -m
tailgate.servers.front.serve`. For tests of the front alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection

from tailgate.servers.clock import now_ns
from tailgate.servers.engine.messages import Finished, Shutdown, StepOutput, Submit
from tailgate.servers.front import serve
from tailgate.servers.rpc.telemetry_pb2 import SnapshotResponse


def serve_engine(connections: Sequence[Connection], table: dict[str, object], cache_dir: str, *, how: str) -> None:
    del table, cache_dir
    (connection,) = connections
    connection.send([SnapshotResponse(vocab_size=259, device="cpu", dtype="float32", startup_ns={"load": 1})])
    while not isinstance(message := connection.recv(), Shutdown):
        if isinstance(message, Submit) and how == "answers":
            over = [Finished(request_id=message.request_id, status="OK", reason="length")]
            tokens = [(message.request_id, 3)] * message.max_tokens
            whole = message.max_tokens <= 1000
            connection.send(
                [StepOutput(emit_ns=now_ns(), tokens=tokens if whole else tokens[:1], finished=over if whole else [])]
            )
        elif isinstance(message, Submit) and how == "short":
            over = Finished(request_id=message.request_id, status="OK", reason="length")
            connection.send([StepOutput(emit_ns=now_ns(), tokens=[(message.request_id, 3)], finished=[over])])


if __name__ == "__main__":
    serve.serve_engine = partial(serve_engine, how=sys.argv[1])
    sys.exit(serve.main(sys.argv[2:]))
