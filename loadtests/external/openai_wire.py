"""What goes over the wire to and from an OpenAI-compatible server: request bodies, server-sent events, errors.

The load generator and the readiness check read the same bytes by the same rules. Interfaces: the OpenAI API reference
(completions, chat completions, streaming) and, for the event stream, the HTML standard, section 9.2 "Server-sent
events".
"""

from __future__ import annotations

import json
from http.client import HTTPResponse
from typing import Any, Final, NamedTuple

from tailgate.loadtests.external.addresses import Address
from tailgate.loadtests.external.arms import OpenAiOptions
from tailgate.loadtests.external.asking import Asking

DONE: Final = b"[DONE]"
LARGEST_EVENT: Final = 4 * 1024 * 1024
MOST_TOKENS: Final = 1 << 20  # of an answer: each has its time, eight bytes
LARGEST_ERROR: Final = 64 * 1024  # bytes of a body that is no event stream

# How a server says that an answer is whole: OpenAI's, TGI's and Anthropic-like names. Others say that it broke off.
_WHOLE: Final = frozenset(
    {"stop", "length", "tool_calls", "function_call", "eos", "eos_token", "stop_sequence", "end_turn", "max_tokens"}
)


# gRPC's names, so that all arms fail in the same words. Codes not listed go by their hundreds.
_HTTP_STATUS: Final = {
    3: "FAILED_PRECONDITION",
    4: "INVALID_ARGUMENT",
    5: "INTERNAL",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    429: "RESOURCE_EXHAUSTED",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
    529: "RESOURCE_EXHAUSTED",  # "overloaded", in use though not standardised
}


def request_path(options: OpenAiOptions, address: Address) -> str:
    """Return the path of the endpoint below the address's own, such as /v1/completions."""
    return f"{address.path}/{'chat/completions' if options.endpoint == 'chat' else 'completions'}"


def request_body(options: OpenAiOptions, model: str, asking: Asking) -> bytes:
    """Return one streaming request as JSON. A chat takes the prompt as its one message."""
    body: dict[str, Any] = {"model": model, "stream": True, **asking.fields(options)}
    if options.endpoint == "completions":
        body["prompt"] = asking.prompt
    else:
        body["messages"] = [{"role": "user", "content": asking.prompt}]
    if options.usage != "off":
        each = {"continuous_usage_stats": True} if options.usage == "each" else {}
        body["stream_options"] = {"include_usage": True, **each}
    return json.dumps(body, separators=(",", ":")).encode()


class EventStream:
    """The data of server-sent events, whatever pieces the bytes come in.

    Lines end with LF or CR LF; an event ends with an empty line. Comments, events without data and fields other than
    `data` and `event` are skipped. The data of an event named "error" is returned as an object with the key `error`.
    """

    def __init__(self) -> None:
        self._line = b""  # begun and not ended
        self._data: list[bytes] = []
        self._is_error = False  # the event's name is "error"

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of each event that this piece completes. Raises ValueError for one of more than 4 MiB."""
        events: list[bytes] = []
        *lines, self._line = (self._line + piece).split(b"\n")
        data = self._data
        for line in lines:
            line = line.removesuffix(b"\r")
            # The usual line first; a field without a colon or with another name says nothing here.
            if line.startswith(b"data:"):
                data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif line.startswith(b"event:"):
                self._is_error = line[6:].strip() == b"error"
            elif not line and data:
                event = b"\n".join(data)
                data.clear()
                if event.strip():
                    events.append(_as_error(event) if self._is_error else event)
                self._is_error = False
        if len(self._line) + sum(map(len, data)) > LARGEST_EVENT:
            raise ValueError(f"an event has more than {LARGEST_EVENT} bytes")
        return events


def _as_error(data: bytes) -> bytes:
    """Return the data of an event named "error" as an object with the key `error`, whose code gives the status."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        content = data.decode("utf-8", "replace")
    is_error = isinstance(content, dict) and content.get("error") is not None
    return data if is_error else json.dumps({"error": content or "the server sent an error event"}).encode()


class Chunk(NamedTuple):
    """What one event says. Counts are the server's own, None where not given."""

    text: str = ""
    answers: bool = False  # it carries some of the answer: text or a tool call
    ended: bool = False  # it gives a finish_reason
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    failed: tuple[str, str] | None = None  # (status, message)


def read_event(data: bytes) -> Chunk:
    """Return the meaning of an event's data, which is not the end mark. Raises ValueError when it is no object."""
    event = json.loads(data)
    if type(event) is not dict:
        raise ValueError(f"an event is no JSON object: {data[:80]!r}")
    choices = event.get("choices")
    usage = event.get("usage")
    if (event.get("error") is not None or (not choices and usage is None)) and (failed := _error_in(event)) is not None:
        return Chunk(failed=failed)
    text, answers, ended = "", False, False
    if choices:
        choice = choices[0]
        reason = choice.get("finish_reason")
        ended = reason is not None and reason != ""
        if ended and reason not in _WHOLE:
            why = json.dumps(reason, ensure_ascii=False)
            return Chunk(failed=("ABORTED", f"the server broke the answer off: finish_reason {why}"))
        delta = choice.get("delta")
        if delta is None:
            text = str(choice.get("text") or "")
        else:
            thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
            text = f"{thought}{delta.get('content') or ''}"
        answers = bool(text) or (delta is not None and bool(delta.get("tool_calls")))
    tokens = _count(usage, "completion_tokens")
    if tokens is not None and tokens > MOST_TOKENS:
        many = f"the server counts {tokens} tokens in its answer; the limit is {MOST_TOKENS}"
        return Chunk(failed=("INTERNAL", many))
    return Chunk(text, answers, ended, tokens, _count(usage, "prompt_tokens"))


def _count(usage: Any, key: str) -> int | None:
    value = usage.get(key) if isinstance(usage, dict) else None
    return value if type(value) is int and value >= 0 else None


def http_status_name(code: int) -> str:
    """Return the gRPC status that an HTTP status other than 2xx stands for."""
    return _HTTP_STATUS.get(code) or _HTTP_STATUS.get(code // 100, "UNKNOWN")


def _error_in(event: dict[str, Any]) -> tuple[str, str] | None:
    """Return (status, message) of an error object inside a stream; None when it is none."""
    error = event.get("error")
    if error is None and (event.get("object") == "error" or ("message" in event and event.keys() & {"code", "type"})):
        error = event
    if error is None:
        return None
    table = error if isinstance(error, dict) else {"message": error}
    message = table.get("message") or table.get("detail") or table
    code = _http_code(table.get("code")) or _http_code(table.get("status"))
    status = "INTERNAL" if code is None else http_status_name(code)
    return status, message if isinstance(message, str) else json.dumps(message)


def _http_code(value: Any) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    return value if type(value) is int and 400 <= value < 600 else None


def error_of_answer(answer: HTTPResponse) -> tuple[str, str] | None:
    """Return (status, message) of an HTTP answer whose headers have come; None for an event stream."""
    kind, encoding = answer.getheader("content-type", ""), answer.getheader("content-encoding", "")
    if encoding.lower() not in ("", "identity"):
        kind = f"{encoding}-compressed {kind}"
    if answer.status == 200 and kind.partition(";")[0].strip().lower() == "text/event-stream":
        return None
    code, text = answer.status, answer.read(LARGEST_ERROR).decode("utf-8", "replace").strip()
    if 200 <= code < 300:
        named = f"the Content-Type {kind}" if kind else "no Content-Type"
        why = (
            f"the answer has {named} and not text/event-stream: give an API that streams, and see what a proxy changes"
        )
        return "INTERNAL", f"{why} ({text or 'it is empty'})"
    if location := answer.getheader("location", ""):
        text = f"the server redirects to {location}: give that address"
    return http_status_name(code), f"HTTP {code}: {text}" if text else f"HTTP {code}"


def models_of(body: bytes) -> dict[str, int | None]:
    """Return the names in the list of models, each with the most tokens of a prompt and its answer, None if unknown.

    The key is vLLM's and SGLang's `max_model_len`, or llama.cpp's `meta.n_ctx`.
    """
    try:
        entries = json.loads(body)["data"]
        known = {str(one["id"]): one.get("max_model_len") or (one.get("meta") or {}).get("n_ctx") for one in entries}
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return {}
    return {name: limit if type(limit) is int and limit > 0 else None for name, limit in known.items()}
