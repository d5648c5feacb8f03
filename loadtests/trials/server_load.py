"""The pages of external arms for Prometheus are read once a second during a trial, and their load is recorded."""

from __future__ import annotations

import threading
import time
import urllib.request
from dataclasses import astuple, dataclass
from typing import Any

from analysis.records.schemas import SERVER_LOAD
from analysis.records.tables import RecordWriter
from loadtests.experiments.model import ExternalArm
from loadtests.external.client_security import client_context
from loadtests.external.openai_wire import shortened
from loadtests.external.server_metrics import ServerLoad, load_of_page
from loadtests.trials.context import TrialContext
from servers.clock import now_ns
from servers.complaint import unwritten

EVERY_S = 1.0
_ANSWER_S = 5.0
_LARGEST_PAGE = 16 << 20


@dataclass(slots=True, kw_only=True)
class _Page:
    """One page, of one replica or of all of its arm's, and how often it was asked for."""

    arm: str
    place: int  # of the arm among those of the trial
    replica: str | None
    address: str
    opener: urllib.request.OpenerDirector
    answered: int = 0
    failed: int = 0
    late: int = 0  # moments at which the answer before was still waited for
    why: str = ""  # the first that failed

    def read(self) -> ServerLoad:
        """Raises whatever the network, HTTP or the page give cause to."""
        with self.opener.open(self.address, timeout=_ANSWER_S) as answer:
            return load_of_page(answer.read(_LARGEST_PAGE).decode(errors="replace"))

    def facts(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in ("replica", "answered", "failed", "late", "why")}


class ServerLoads:
    """From now until `stop` each page that an external arm names is read into `server_load.arrow`, flushed each second.

    A page that does not answer costs its own samples alone; how many it cost stands in trial.json.
    """

    def __init__(self, trial: TrialContext) -> None:
        self._trial = trial
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._rows: list[dict[str, Any]] = []
        self._noted = ""  # why records cannot be written, where a note says so
        self._pages: list[_Page] = []
        for place, arm in enumerate(trial.experiment.arms):
            if not isinstance(arm, ExternalArm):
                continue
            addresses = arm.external.telemetry.metrics
            for index, address in enumerate(addresses):
                replica = arm.replica_names[index] if len(addresses) == arm.replicas else None
                handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
                if address.lower().startswith("https"):
                    context = client_context(arm.external.security, protocols=("http/1.1",))
                    handlers.append(urllib.request.HTTPSHandler(context=context))
                opener = urllib.request.build_opener(*handlers)
                self._pages.append(_Page(arm=arm.name, place=place, replica=replica, address=address, opener=opener))
        if not self._pages:
            return
        self._writer = RecordWriter(trial.folder / "server_load.arrow", SERVER_LOAD)
        self._flusher = threading.Thread(target=self._flush_until_stopped, name="server-load", daemon=True)
        self._flusher.start()
        for page in self._pages:
            threading.Thread(target=self._read, args=(page,), name=f"metrics-{page.arm}", daemon=True).start()

    def stop(self) -> None:
        """No page is read, the table is complete, and trial.json says what it lacks. A second call does nothing."""
        if not self._pages or self._stopping.is_set():
            return
        self._stopping.set()
        self._flusher.join(timeout=5.0)
        self._guarded_flush(last=True)
        for page in self._pages:
            arm = self._trial.facts.arms[page.place]
            arm.setdefault("reported", {}).setdefault("metrics", []).append(page.facts())
            if page.failed:
                asked = page.answered + page.failed
                self._trial.status.note(f"{page.address} failed {page.failed} of {asked} times: {page.why}")

    def _read(self, page: _Page) -> None:
        began_s, tick = time.monotonic(), 0
        while not self._stopping.wait(max(0.0, began_s + tick * EVERY_S - time.monotonic())):
            try:
                load = page.read()
            except Exception as error:  # of the network, of HTTP, or of what the page holds
                page.failed += 1
                page.why = page.why or shortened(f"{type(error).__name__}: {error}")
            else:
                page.answered += 1
                self._append(page, load)
            due = tick + 1
            tick = max(due, int((time.monotonic() - began_s) / EVERY_S) + 1)
            page.late += tick - due

    def _append(self, page: _Page, load: ServerLoad) -> None:
        place = {"trial": self._trial.number, "arm": page.arm, "replica": page.replica, "at_ns": now_ns()}
        with self._lock:
            self._rows.append({**place, **dict(zip(ServerLoad.__slots__, astuple(load), strict=True))})

    def _flush_until_stopped(self) -> None:
        while not self._stopping.wait(EVERY_S):
            self._guarded_flush()

    def _guarded_flush(self, *, last: bool = False) -> None:
        with self._lock:
            rows, self._rows = self._rows, []
        try:
            for row in rows:
                self._writer.append(row)
            self._writer.flush()
            if last:
                self._writer.close()
            self._noted = ""
        except OSError as error:
            text = f"the load of external arms cannot be recorded: {unwritten(error)}"
            if text != self._noted:  # once, and not with each second of a full disk
                self._trial.status.note(text)
            self._noted = text
