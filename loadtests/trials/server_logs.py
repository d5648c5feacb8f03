"""Follow the logs of external arms during a trial, and record the compiles that they report."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from tailgate.loadtests.external.arms import ExternalArm
from tailgate.loadtests.external.compile_lines import CompileLog, LoggedCompile
from tailgate.loadtests.external.log_tail import LogTail
from tailgate.loadtests.trials.context import RunError, TrialContext
from tailgate.loadtests.trials.processes import child_environment
from tailgate.loadtests.trials.telemetry import Collector
from tailgate.servers.clock import now_ns
from tailgate.servers.complaint import named
from tailgate.servers.processes import Child, describe_exit

_POLL_S = 0.1
_LAST_WORDS_S = 1.0  # for lines still in transit when the load has ended
_STOP_GRACE_S = 2.0
_FIRST_LINE_S, _REST_S, _HISTORY_S = 5.0, 0.3, 10.0  # a command prints what was before at once, and then rests


@dataclass(slots=True, kw_only=True)
class _Log:
    """One log, of one replica or of all of its arm's."""

    arm: dict[str, Any]  # its row in trial.json
    replica: str | None
    name: str
    tail: LogTail
    command: Child | None  # which prints the log into the file that is read
    compiles: CompileLog = field(default_factory=CompileLog)
    events: int = 0
    ended: str = ""

    def end(self) -> str:
        """Return why no line follows: the program has ended. A file has no end."""
        code = None if self.command is None else self.command.poll()
        return "" if code is None else f"its command ended with {describe_exit(code)} before the trial did"

    def facts(self) -> dict[str, Any]:
        silent = (
            "" if self.compiles.lines else "no line of it came during the trial, so see that the server still writes it"
        )
        spots = [*self.compiles.blind_spots, *filter(None, (silent, self.ended))]
        return {"replica": self.replica, "lines": self.compiles.lines, "events": self.events, "blind_spots": spots}


class ServerLogs:
    """From now until `stop` the logs that external arms name are followed; compiles go to `collector`.

    A log that cannot be followed is a note to the user and a blind spot that trial.json states; the trial goes on.
    """

    def __init__(self, trial: TrialContext, collector: Collector) -> None:
        self._trial, self._collector = trial, collector
        self._since_ns = now_ns()
        self._stopping = threading.Event()
        self._logs: dict[threading.Thread, _Log] = {}
        for row, arm in zip(trial.facts.arms, trial.experiment.arms, strict=True):
            sources = arm.telemetry.logs if isinstance(arm, ExternalArm) else ()
            for index, source in enumerate(sources):
                replica = arm.replica_names[index] if len(sources) == arm.replicas else None
                log = self._open(row, replica, source)
                thread = threading.Thread(target=self._follow, args=(log,), name=f"log-{log.name}", daemon=True)
                thread.start()
                self._logs[thread] = log

    def stop(self, *, hurry: bool) -> None:
        """Stop following the logs and write what each reported to trial.json."""
        if self._logs and not hurry:
            time.sleep(_LAST_WORDS_S)
        self._stopping.set()
        for thread, log in self._logs.items():
            thread.join(timeout=_STOP_GRACE_S)
            if thread.is_alive():
                log.ended = "its last lines were not read in time"
            log.tail.close()
            if log.command is not None:
                log.command.stop(_STOP_GRACE_S)
            facts = log.facts()
            log.arm.setdefault("reported", {}).setdefault("logs", []).append(facts)
            for spot in facts["blind_spots"]:
                self._trial.status.note(f"the log of {log.name} does not report every compile: {spot}")

    def _open(self, row: dict[str, Any], replica: str | None, source: str | tuple[str, ...]) -> _Log:
        name, command, begin = replica or row["name"], None, None
        if isinstance(source, str):
            path = Path(source)
        else:
            path, begin = self._trial.logs / f"{name}.log", 0
            command = Child(f"log-{name}", source, log_path=path, environment=child_environment())
        try:
            tail = LogTail(path, at=begin)
        except OSError as error:
            raise RunError(f'arm "{row["name"]}": telemetry.log cannot be read ({error}): give another one') from None
        return _Log(arm=row, replica=replica, name=name, tail=tail, command=command)

    def _follow(self, log: _Log) -> None:
        try:
            lines: Iterable[tuple[str, int]] = ()
            if log.command is None:
                for line in log.tail.before():
                    log.compiles.learn(line)
            else:
                lines = self._first_lines(log)
            while True:
                last, ended = self._stopping.is_set(), log.end()  # first: what comes before is read
                fresh = chain(log.tail.lines(), log.tail.rest()) if last or ended else log.tail.lines()
                for line, arrived_ns in chain(lines, ((line, now_ns()) for line in fresh)):
                    self._record(log, log.compiles.take(line, arrived_ns))
                self._record(log, log.compiles.rest(None if last or ended else now_ns()))
                if last or ended:
                    log.ended = "" if last else ended
                    return
                lines = ()
                self._stopping.wait(_POLL_S)
        except Exception as error:  # nothing more is read, and a silent log must not pass for a quiet one
            log.ended = f"it could not be read on ({named(error)})"

    def _first_lines(self, log: _Log) -> list[tuple[str, int]]:
        """Return the lines with which a command begins, and when they came: by the newest the others are old."""
        lines: list[tuple[str, int]] = []
        began_s = heard_s = time.monotonic()
        while not self._stopping.is_set() and not log.end():
            for line in log.tail.lines():
                lines.append((line, now_ns()))
                log.compiles.set_clock(*lines[-1])
                heard_s = time.monotonic()
            rested_s = time.monotonic() - heard_s
            if rested_s > (_REST_S if lines else _FIRST_LINE_S) or time.monotonic() - began_s > _HISTORY_S:
                break
            self._stopping.wait(_POLL_S)
        return lines

    def _record(self, log: _Log, compiles: Iterable[LoggedCompile]) -> None:
        """Record the compiles but for those of the past, which a command may print."""
        # Known some time after the first request; without a phase an event is serving if it ends after that one began.
        started_ns = self._trial.facts.start_ns
        for compile in compiles:
            if compile.end_ns < self._since_ns:
                continue
            event = {
                "event_id": f"{self._trial.number}-{log.name}-log-{log.events}",
                "trial": self._trial.number,
                "arm": log.arm["name"],
                "replica": log.replica,
                "phase": "serving" if started_ns is not None and compile.end_ns > started_ns else None,
            }
            self._collector.take_logged(event | asdict(compile))
            log.events += 1
