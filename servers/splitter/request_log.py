"""What Envoy writes of each request that it passes on: lines of JSON in the splitter's request log, read back.

Envoy writes a line when a request comes and one when it ends, and none for copies to a shadow. Both lines of a request
have its start and its connection.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tailgate.servers.metadata import (
    ARM_HEADER,
    FIGURES,
    INFERENCE_SERVICE,
    SESSION_HEADER,
    STATUS_NAMES,
    trailing_key,
    whole_number,
)

# Envoy keeps lines for this long before it writes them; by default it keeps them for 10 s.
FLUSH_MS: Final = 200
_ENDED: Final = "DownstreamEnd"
_LARGEST: Final = 2**63 - 1  # what a column holds
_SINCE: Final = "%COMMON_DURATION(DS_RX_BEG:{}:ns)%"
_ENVOY_STATUS: Final = {"UC": "UNAVAILABLE", "UF": "UNAVAILABLE", "UH": "UNAVAILABLE", "UR": "UNAVAILABLE"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRequest:
    """One request as Envoy saw it. `first_ns` and `end_ns` count from `start_ns`, which is on the host's wall clock.

    `first_ns` is the first byte of the replica's answer, None where none came: the first token, as headers go out with
    it. `end_ns` is the last one, or when the request was given up. Of a request that has come and not `ended` only
    path, start and connection mean anything.
    """

    ended: bool
    connection: int
    arm: str
    session_id: str
    pinned: bool
    replica: str  # by its own name, or by its address where it did not say
    address: str
    path: str
    start_ns: int
    first_ns: int | None
    end_ns: int
    status: str  # as STATUS_NAMES has it; CANCELLED where the client went away
    error: str  # what the replica or Envoy said of a status that is not OK
    figures: Mapping[str, int]  # of FIGURES, those that came

    @property
    def inference(self) -> bool:
        """Whether it asks for what arms are compared by."""
        return self.path.startswith(f"/{INFERENCE_SERVICE}/")


def log_format() -> dict[str, Any]:
    return {
        "event": "%ACCESS_LOG_TYPE%",
        "connection": "%CONNECTION_ID%",
        "arm": "%UPSTREAM_CLUSTER_RAW%",
        "session": f"%REQ({SESSION_HEADER})%",
        "pinned": f"%REQ({ARM_HEADER})%",
        "replica": f"%TRAILER({trailing_key('replica')})%",
        # Errors without an answer come in headers alone.
        "replica_of_headers": f"%RESP({trailing_key('replica')})%",
        "host": "%UPSTREAM_HOST%",
        "path": "%REQ(:path)%",
        "start_s": "%START_TIME(%s.%9f)%",
        "duration_ms": "%DURATION%",
        "first_ns": _SINCE.format("US_RX_BEG"),
        "end_ns": _SINCE.format("US_RX_END"),
        "status": "%GRPC_STATUS_NUMBER%",
        "message": "%TRAILER(grpc-message)%",
        "message_of_headers": "%RESP(grpc-message)%",
        "flags": "%RESPONSE_FLAGS%",
        "details": "%RESPONSE_CODE_DETAILS%",
        "figures": {name: f"%TRAILER({trailing_key(name)})%" for name in FIGURES},
    }


def parse_line(line: str) -> LoggedRequest | None:
    """Return the request of a line; None for one that is torn, as the last of a growing file may be, or holds times
    that no clock has."""
    try:
        row = json.loads(line)
        if "\\ud" in line.lower():  # half a character is none, and cannot be written
            row = json.loads(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace"))
        seconds, _, fraction = str(row["start_s"]).partition(".")
        start_ns = int(seconds) * 1_000_000_000 + int(fraction.ljust(9, "0")[:9])
        end_ns = row.get("end_ns")
        end_ns = int(row["duration_ms"]) * 1_000_000 if end_ns is None else int(end_ns)
        if not 0 <= start_ns <= start_ns + end_ns <= _LARGEST:
            return None
        status, error = _status(row)
        figures = row.get("figures") or {}
        return LoggedRequest(
            ended=row["event"] == _ENDED,
            connection=int(row["connection"] or 0),
            arm=str(row["arm"] or ""),
            session_id=str(row.get("session") or ""),
            pinned=bool(row.get("pinned")),
            replica=str(row.get("replica") or row.get("replica_of_headers") or row.get("host") or ""),
            address=str(row.get("host") or ""),
            path=str(row.get("path") or ""),
            start_ns=start_ns,
            first_ns=whole_number(str(row.get("first_ns"))),
            end_ns=end_ns,
            status=status,
            error=error,
            figures={name: value for name in FIGURES if (value := whole_number(str(figures.get(name)))) is not None},
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _status(row: Mapping[str, Any]) -> tuple[str, str]:
    flags = [flag for flag in str(row.get("flags") or "-").split(",") if flag != "-"]
    message = row.get("message") or row.get("message_of_headers")
    code = whole_number(str(row.get("status")))
    if "DC" in flags or "DR" in flags:
        return "CANCELLED", "the client went away"
    cut = next((_ENVOY_STATUS[flag] for flag in flags if flag in _ENVOY_STATUS), None)
    if cut is not None:
        return cut, str(message or f"Envoy says {','.join(flags)}: {row.get('details')}")
    if code is None:
        return "UNKNOWN", str(message or f"no gRPC status: {row.get('details')}")
    status = STATUS_NAMES[code] if 0 <= code < len(STATUS_NAMES) else "UNKNOWN"
    return status, "" if status == "OK" else str(message or "")
