"""The requests that shadows got, as rows beside those of the control, from what the splitter wrote of both.

Nobody waits for a shadow, so that no client can time it. Envoy times a request and its copies alike, from when it had
the request to the last byte of the answer. A copy's row is that of its request, as the client saw it, moved by as much
as Envoy saw the copy take longer: what the client would have seen of it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from analysis.records.schemas import REQUESTS
from analysis.records.tables import RecordWriter
from loadtests.page.tails import LinesTail, TableTail
from loadtests.trials.context import TrialContext
from servers.clock import now_ns
from servers.splitter.access_log import LoggedRequest, parse_line
from servers.splitter.admin import SplitterError
from servers.splitter.envoy import Envoy
from servers.splitter.envoy_config import stat_name

REQUEST_LOG = "requests.jsonl"  # among the logs of a trial
_ROWS = "requests-shadow.arrow"
_EVERY_NS = 1_000_000_000
_FLUSHED_NS = 5_000_000_000  # by then lines and rows of what has ended are in their files
_FILLED = frozenset(REQUESTS.names) - {"token_ns"}  # Envoy sees no tokens


class ShadowRows:
    """Writes the rows of the trial's shadows from `poll` to `poll`, and the rest when it is closed."""

    def __init__(self, context: TrialContext) -> None:
        experiment = context.experiment
        self._context = context
        self._shadows = [arm.name for arm in experiment.arms if not arm.control]
        self._tokens = experiment.task != "embed"
        self._keep_ns = round(2e9 * experiment.traffic.timeout_s) + _FLUSHED_NS
        self._log = LinesTail(context.logs / REQUEST_LOG)
        self._files: dict[Path, TableTail] = {}
        self._writer = RecordWriter(context.folder / _ROWS, REQUESTS)
        self._requests: dict[str, dict[str, Any]] = {}  # by id, as clients saw them
        self._originals: dict[str, LoggedRequest] = {}
        self._copies: dict[str, dict[str, LoggedRequest]] = {}  # by id and arm
        self._lines_ns: dict[str, int] = {}  # by id, when the first line of it was read, the oldest first
        self._passed = 0  # requests that the splitter passed on, of those that it may copy
        self._made: dict[str, int] = {}  # copies by arm, once they are counted
        self._next_ns = 0

    def poll(self) -> None:
        """What ended a while ago is in the rows. Does something once a second."""
        if now_ns() < self._next_ns:
            return
        self._next_ns = now_ns() + _EVERY_NS
        self._take()
        old_ns = now_ns() - self._keep_ns
        for name in list(self._requests):
            if self._whole(name) or self._requests[name]["end_ns"] < old_ns:
                self._write(name)
        self._forget(old_ns)
        self._writer.flush()

    def settle(self, envoy: Envoy, *, timeout_s: float) -> None:
        """No copy is under way any more, or `timeout_s` is over; the facts say how many copies there were."""
        deadline = time.monotonic() + timeout_s
        with suppress(SplitterError):
            while any(_counted(envoy, arm, "active") for arm in self._shadows) and time.monotonic() < deadline:
                time.sleep(0.1)
            self._made = {arm: _counted(envoy, arm, "total") for arm in self._shadows}
            self._context.facts.planned = {**self._context.facts.planned, **self._made}

    def close(self) -> None:
        """Every copy that ended has its row, and where all requests were copied, each that did not end has one too.

        To be called when the splitter has ended.
        """
        self._take()
        copied = [arm for arm in self._shadows if self._made.get(arm, 0) >= self._passed]
        for name in list(self._requests):
            self._write(name, unended=copied)
        self._writer.close()

    def _take(self) -> None:
        """What is new in the files was read."""
        folder = self._context.folder
        for path in folder.glob("requests-*.arrow"):
            if path.name != _ROWS and path not in self._files:
                self._files[path] = TableTail(path, _FILLED)
        for file in self._files.values():
            for row in file.new():
                self._requests[row["request_id"]] = row
        while lines := list(self._log.new()):
            for line in lines:
                logged = parse_line(line.decode("utf-8", "replace"))
                if logged is None or not logged.ended or not logged.request_id:
                    continue
                self._lines_ns.setdefault(logged.request_id, now_ns())
                if logged.copy:
                    self._copies.setdefault(logged.request_id, {})[logged.arm] = logged
                elif not logged.pinned:
                    self._passed += 1
                    self._originals[logged.request_id] = logged

    def _forget(self, old_ns: int) -> None:
        """Lines that were read before and have no request are gone: a copy that outlived all waiting, or the request of
        a load process that died. Without this a shadow that hangs would fill the memory of the run."""
        while self._lines_ns:
            name, at_ns = next(iter(self._lines_ns.items()))
            if at_ns >= old_ns or name in self._requests:
                return
            for kept in (self._lines_ns, self._originals, self._copies):
                kept.pop(name, None)

    def _whole(self, name: str) -> bool:
        return name in self._originals and len(self._copies.get(name, {})) == len(self._shadows)

    def _write(self, name: str, *, unended: Collection[str] = ()) -> None:
        """The rows of the copies of a request; also of those to the arms `unended` that had not ended."""
        request, original = self._requests.pop(name), self._originals.pop(name, None)
        copies = self._copies.pop(name, {})
        self._lines_ns.pop(name, None)
        for arm in self._shadows:
            if arm in copies:
                self._writer.append(shadow_row(request, original, copies[arm], tokens=self._tokens))
            elif arm in unended and original is not None:
                error = "the splitter ended before the copy did"
                cut = {"arm": arm, "first_token_ns": None, "end_ns": now_ns(), "status": "CANCELLED", "error": error}
                self._writer.append({**_asked(request), **cut})


def shadow_row(
    request: Mapping[str, Any], original: LoggedRequest | None, copy: LoggedRequest, *, tokens: bool = True
) -> dict[str, Any]:
    """The row of a copy of `request`, a row of REQUESTS. `original` is the request as the splitter saw it. Pure.

    Where one of the two did not answer in full, the copy's times count from when the client sent the request.
    """
    sent_ns = request["sent_ns"]
    first_ns, end_ns = copy.first_ns, sent_ns + copy.end_ns
    if first_ns is not None:
        first_ns += sent_ns
    if original is not None and original.status == request["status"] == "OK":
        end_ns = request["end_ns"] + copy.end_ns - original.end_ns
        if first_ns is not None and request["first_token_ns"] is not None and original.first_ns is not None:
            first_ns += request["first_token_ns"] - sent_ns - original.first_ns
    answered = first_ns is not None and tokens and (copy.status == "OK" or bool(copy.figures.get("output_tokens")))
    figures = copy.figures
    return {
        **_asked(request),
        "arm": copy.arm,
        "replica": copy.replica or None,
        "first_token_ns": min(first_ns, end_ns) if answered and first_ns is not None else None,
        "end_ns": end_ns,
        "status": copy.status,
        "error": copy.error or None,
        "prompt_tokens": figures.get("prompt_tokens", request["prompt_tokens"]),
        "output_tokens": figures.get("output_tokens", 0) if tokens else None,
        **{name: figures.get(name.removeprefix("server_")) for name in _SERVED},
    }


# What the server says of a request in its trailing metadata.
_SERVED = ("compile_stall_ns", "batch_id", "server_recv_ns", "server_end_ns")
_ASKED = (
    *("request_id", "session_id", "trial", "pair_id", "scheduled_ns", "sent_ns", "prompt_tokens"),
    *("max_tokens", "phase"),
)


def _asked(request: Mapping[str, Any]) -> dict[str, Any]:
    """What a request and its copies have in common."""
    return {name: request[name] for name in _ASKED}


def _counted(envoy: Envoy, arm: str, what: str) -> int:
    name = f"cluster.shadow@{stat_name(arm)}.upstream_rq_{what}"
    return envoy.stats(f"^{name}$").get(name, 0)
