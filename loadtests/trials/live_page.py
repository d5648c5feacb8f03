"""The live page of a run: its process, and the two small files that tell it what the orchestrator knows.

`status.json` is what the run does now, rewritten each second; `load.jsonl` gets a line a second with the live numbers
of each arm. A page that cannot start, or that dies, is one note: the run never waits for it.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from analysis.records.documents import write_document
from loadtests.page.access import TOKEN_VARIABLE, is_loopback, run_token
from loadtests.trials.processes import Child, child_environment, describe_exit
from loadtests.trials.progress import Status
from servers.address import host_port
from servers.clock import now_ns

# -P: a directory called `loadtests` where the user stands must not be imported instead.
_COMMAND = (sys.executable, "-P", "-m", "loadtests.page")
_EVERY_S = 1.0
_STOP_GRACE_S = 5.0
_MOST_NOTES = 60
_LATE_S = 5.0  # after which nobody waits any more for what was asked
OFF = "off"
DEFAULT = "127.0.0.1:0"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageAddress:
    """Where the page listens; port 0 takes a free one."""

    host: str
    port: int

    @classmethod
    def of(cls, text: str) -> PageAddress | None:
        """The address in HOST:PORT; None for `off`. Raises ConfigError."""
        if text == OFF:
            return None
        wrong = f'--page "{text}" is not HOST:PORT: give one such as 127.0.0.1:8080, port 0 for a free one, or {OFF}'
        host, port = host_port(text, wrong, lowest=0)
        return cls(host=host, port=port)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRequest:
    """Weights that somebody with the token asked for, at monotonic `at_s`."""

    number: int
    weights: Mapping[str, int]
    at_s: float


class LivePage:
    """The page of the run whose `status` is given, served from `open` until `close`.

    With `weights`, whoever has the token may ask for weights on it: they wait in `asked`. Raises ConfigError for a
    token that cannot be used.
    """

    def __init__(self, address: PageAddress, status: Status, *, weights: bool = False) -> None:
        self._address = address
        self._status = status
        self.weights = weights
        self._requests: queue.SimpleQueue[WeightRequest] = queue.SimpleQueue()
        is_local = is_loopback(address.host)
        self._token, is_new = run_token() if weights or not is_local else ("", False)
        self._in_address = is_new and not is_local
        self._to_show = is_new and is_local
        self._run_dir: Path | None = None
        self._child: Child | None = None
        self._load: IO[str] | None = None
        self._began_ns = now_ns()
        self._written_load_s = -1.0
        self._noted = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write_until_closed, name="live-page", daemon=True)

    def open(self, run_dir: Path) -> None:
        """The page of the run in `run_dir` will soon be served; its address comes into the status.

        Call it from a thread that lives as long as the run.
        """
        self._run_dir = run_dir
        command = [*_COMMAND, str(run_dir.resolve()), "--host", self._address.host, "--port", str(self._address.port)]
        command += ["--weights"] if self.weights else []
        environment = child_environment() | ({TOKEN_VARIABLE: self._token} if self._token else {})
        try:
            self._load = (run_dir / "load.jsonl").open("a", encoding="utf-8")
            self._child = Child(
                "page", command, log_path=run_dir / "logs" / "page.log", environment=environment, commands=self.weights
            )
        except OSError as error:
            self._note(str(error))
            return
        self._write()
        self._thread.start()

    def asked(self) -> WeightRequest | None:
        """The next weights that somebody asked for and still waits for; None where there are none."""
        while True:
            try:
                request = self._requests.get_nowait()
            except queue.Empty:
                return None
            if time.monotonic() - request.at_s < _LATE_S:
                return request
            self.answer(request, {"error": "The run was busy, and nothing was changed: ask again."})

    def answer(self, request: WeightRequest, answer: Mapping[str, Any]) -> None:
        """Whoever asked is told."""
        assert self._child is not None
        self._child.command(json.dumps({"ask": request.number, **answer}))

    def close(self, ended: Mapping[str, Any]) -> None:
        """The page has shown how the run `ended` to whoever watches, and is gone. A second call does nothing."""
        if self._child is None or self._closing.is_set():
            return
        self._closing.set()
        self._thread.join(timeout=_STOP_GRACE_S)
        self._write(ended)
        with suppress(OSError):
            self._child.stop(_STOP_GRACE_S)
        if self._load is not None:
            with suppress(OSError):
                self._load.close()

    def kill(self) -> None:
        """The page is gone at once. Safe in a signal handler."""
        if self._child is not None:
            self._child.kill_now()

    @property
    def pid(self) -> int | None:
        """The page's process id; None before `open`."""
        return None if self._child is None else self._child.pid

    def _write_until_closed(self) -> None:
        written_s = 0.0
        while not self._closing.wait(0.1):
            self._watch()
            if time.monotonic() - written_s >= _EVERY_S:
                self._write()
                written_s = time.monotonic()

    def _watch(self) -> None:
        """What the page said is known, and its end is noted."""
        assert self._child is not None
        ended = self._child.poll()  # read first: what it says, it says before it ends
        while (line := self._child.line(0)) is not None:
            with suppress(ValueError, KeyError, TypeError):
                self._take(json.loads(line))
        if ended is not None:
            self._note(f"it ended with {describe_exit(ended)}: {self._child.log_tail(2)}")

    def _take(self, said: Mapping[str, Any]) -> None:
        """The address of the page, once it listens, or weights that somebody asks for."""
        if "url" in said:
            self._status.page_token = self._token if self._to_show else ""
            self._status.page = f"{said['url']}?token={self._token}" if self._in_address else str(said["url"])
            return
        request = WeightRequest(number=int(said["ask"]), weights=said["weights"], at_s=time.monotonic())
        if self._status.phase == "traffic":
            self._requests.put(request)
        else:
            self.answer(request, {"error": "Weights are changed while traffic flows, and none does now."})

    def _note(self, why: str) -> None:
        if not self._noted:
            self._noted = True
            self._status.note(f"there is no live page, and the run goes on: {why}")

    def _write(self, ended: Mapping[str, Any] | None = None) -> None:
        assert self._run_dir is not None
        with suppress(OSError, ValueError):
            write_document(self._run_dir / "status.json", self._content(ended))
        load = self._status.load
        if load.arms and load.t_s != self._written_load_s and self._load is not None:
            self._written_load_s = load.t_s
            line = {
                "at_ns": now_ns(),
                "trial": self._status.trial,
                "t_s": load.t_s,
                "arms": {name: asdict(arm) for name, arm in load.arms.items()},
            }
            with suppress(OSError, ValueError):
                self._load.write(json.dumps(line, separators=(",", ":")) + "\n")
                self._load.flush()

    def _content(self, ended: Mapping[str, Any] | None) -> dict[str, Any]:
        status, load = self._status, self._status.load
        return {
            "at_ns": now_ns(),
            "began_ns": self._began_ns,
            **{name: getattr(status, name) for name in ("phase", "detail", "trial", "trials", "planned", "duration_s")},
            "replicas": {
                name: {
                    "stage": state.stage,
                    "text": state.text(),
                    "compiles": state.compiles,
                    "compiling": asdict(compiling) if (compiling := state.compiling) is not None else None,
                }
                for name, state in dict(status.replicas).items()
            },
            "load": {"finished": load.finished, "failed": load.failed, "t_s": load.t_s},
            "notes": status.notes[-_MOST_NOTES:],
            "weights": self.weights,
            "ended": None if ended is None else dict(ended),
        }
