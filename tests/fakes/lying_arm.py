"""The arm without a model, which reports falsely: --lie REPLICA=LIE in addition to the flags of tests/fakes/arm.py."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import Any, Literal, get_args

import grpc

from tailgate.servers.clock import now_ns
from tailgate.servers.rpc import inference_pb2, telemetry_pb2
from tests.fakes.arm import Arm, FirstStep, main

Lie = Literal[
    "more tokens than came",  # output-tokens in the trailers
    "every token twice",
    "one token of all",  # and the trailers say that all were sent
    "nothing at once",  # OK, without a token
    "no trailers",
    "late trailers",
    "times that go backwards",  # in the trailers
    "another name",
    "compiles twice",
    "compiles lost",  # and counted all the same
    "compiles from the future",
    "compiles of negative length",
    "steps that go backwards",
]
LIES: tuple[Lie, ...] = get_args(Lie)
LATE_S = 2.0
_HOUR_NS = 3_600_000_000_000
_lies: dict[str, str] = {}


class LyingArm(Arm):
    @property
    def lie(self) -> str:
        """The lie; empty for a replica that reports truly."""
        return _lies.get(self.replica, "")

    def publish(self, event: telemetry_pb2.TelemetryEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "compile":
            if self.lie == "compiles lost":
                return
            if self.lie == "compiles from the future":
                event.compile.start_ns += _HOUR_NS
                event.compile.end_ns += _HOUR_NS
            if self.lie == "compiles of negative length":
                event.compile.start_ns, event.compile.end_ns = event.compile.end_ns, event.compile.start_ns
            if self.lie == "compiles twice":
                super().publish(event)
        if kind == "under_way" and self.lie == "compiles lost":
            return
        if kind == "steps" and self.lie == "steps that go backwards":
            for record in event.steps.records:
                record.step_id = 1_000_000 - record.step_id
                record.start_ns, record.end_ns = record.end_ns - _HOUR_NS, record.start_ns - _HOUR_NS
        super().publish(event)

    def trail(self, context: grpc.ServicerContext, step: FirstStep, request_id: str, **trailers: Any) -> None:
        if self.lie == "no trailers":
            return
        if self.lie == "late trailers":
            time.sleep(LATE_S)
        if self.lie == "more tokens than came":
            trailers["tokens"] += 5
        if self.lie == "times that go backwards":
            trailers["received"], trailers["end"] = trailers["end"] + _HOUR_NS, trailers["received"] - _HOUR_NS
        super().trail(context, step, request_id, **trailers)

    def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateChunk]:
        if self.lie == "nothing at once":
            at_ns = now_ns()
            step = FirstStep(batch=0, start_ns=at_ns, end_ns=at_ns, stall_ns=0, length=len(request.token_ids.ids))
            self.trail(context, step, request.request_id, received=at_ns, end=at_ns, tokens=request.max_tokens)
            return
        for number, chunk in enumerate(super().Generate(request, context)):
            if self.lie == "one token of all" and number:
                continue
            yield chunk
            if self.lie == "every token twice":
                yield chunk

    def Snapshot(  # noqa: N802
        self, request: telemetry_pb2.SnapshotRequest, context: grpc.ServicerContext
    ) -> telemetry_pb2.SnapshotResponse:
        said = super().Snapshot(request, context)
        if self.lie == "another name":
            said.arm, said.replica = "eager", "eager-0"
        return said


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--lie", action="append", default=[], metavar="REPLICA=LIE")
    known, sys.argv[1:] = parser.parse_known_args()
    _lies.update(item.split("=", 1) for item in known.lie)
    assert set(_lies.values()) <= set(LIES), f"a lie is one of {', '.join(LIES)}"
    main(LyingArm)
