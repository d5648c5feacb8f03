"""What the gRPC front and the engine process say to each other over their pipe, besides messages of telemetry.proto.

The engine is warm when it sends the part of a `SnapshotResponse` that it knows. Dataclasses with slots would take twice
as long to pickle.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tailgate.servers.rpc.telemetry_pb2 import StepRecord


@dataclass(kw_only=True)
class Submit:
    """A checked request for the engine. Times are ns since the epoch.

    Its `request_id` is the engine's own, unlike that of any other request; its client calls it by its `name`.
    """

    request_id: str
    prompt: list[int]
    max_tokens: int
    recv_ns: int
    deadline_ns: int = 0  # 0 = none
    ignore_eos: bool = False
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class Cancel:
    """The client has gone: free the request's slot at the next step."""

    request_id: str


@dataclass(frozen=True, kw_only=True)
class Shutdown:
    """End the engine process."""


@dataclass(kw_only=True)
class Timing:
    """Where a request's time went, for its trailing metadata. Durations in ns."""

    queue_ns: int = 0
    prefill_ns: int = 0
    decode_ns: int = 0
    compile_stall_ns: int = 0
    batch_id: int = -1
    batch_size: int = 0
    padded_batch: int = 0
    padded_length: int = 0


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A request is over. `status` is a gRPC status name; `reason` is length, stop or embedded when it is OK, and
    embedded where the vector has no direction. vector: float32 numbers in the machine's byte order."""

    request_id: str
    status: str
    reason: str = ""
    message: str = ""
    vector: bytes = b""
    timing: Timing = field(default_factory=Timing)


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What one step produced: (request id, token) pairs, the requests that ended, and the step itself."""

    emit_ns: int
    tokens: list[tuple[str, int]] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    step: StepRecord | None = None

    def divided(self, frontends: int) -> list[StepOutput]:
        """Return what each frontend gets, by the remainder of its requests' ids; the first gets the step too."""
        if frontends == 1:
            return [self]
        parts = [StepOutput(emit_ns=self.emit_ns, step=None if part else self.step) for part in range(frontends)]
        for request_id, token in self.tokens:
            parts[int(request_id) % frontends].tokens.append((request_id, token))
        for finished in self.finished:
            parts[int(finished.request_id) % frontends].finished.append(finished)
        return parts


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a further frontend reports to the first; `counts` has requests by status, and tokens under ""."""

    number: int
    port: int
    has_answered: bool = False
    has_drained: bool = False
    in_flight: int = 0
    counts: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, kw_only=True)
class BlindSpots:
    """What of compilers this replica cannot see, in sentences; sent when there is a new one."""

    texts: tuple[str, ...]
