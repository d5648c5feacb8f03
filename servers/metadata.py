"""Names that clients, splitter and servers share on the wire: the service, request headers and trailing metadata.

`proto/tailgate/v1/inference.proto` lists what each one holds.
"""

from __future__ import annotations

import re
from typing import Final

INFERENCE_SERVICE = "tailgate.v1.Inference"

# Request headers. The splitter answers with the first one as well: the arm that it chose.
ARM_HEADER = "x-tailgate-arm"
SESSION_HEADER = "x-tailgate-session"

# The whole numbers of a replica's trailing metadata: a request's timing, then what the front knows.
TIMING: Final = (
    *("queue_ns", "prefill_ns", "decode_ns", "compile_stall_ns"),
    *("batch_id", "batch_size", "padded_batch", "padded_length"),
)
FIGURES: Final = (*TIMING, "prompt_tokens", "output_tokens", "recv_ns", "end_ns")

# How a call ended, by the number of its gRPC status.
STATUS_NAMES: Final = (
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
)


def trailing_key(field: str) -> str:
    """Return the key of `field` in a replica's trailing metadata: "tailgate-queue-ns" for queue_ns."""
    return f"tailgate-{field.replace('_', '-')}"


def whole_number(text: str | None) -> int | None:
    """Return the integer in a metadata value; None for other text or beyond 64 bits, which no column holds."""
    if text is None or not _WHOLE.fullmatch(text):
        return None
    value = int(text)
    return value if -(2**63) <= value < 2**63 else None


_WHOLE: Final = re.compile(r"-?[0-9]{1,19}")  # Python itself refuses to read 4,301 digits
