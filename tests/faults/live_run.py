"""A run that goes wrong as planned: started, watched phase by phase, hit at its moments, and looked over afterwards."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from analysis.records.schemas import REQUESTS
from analysis.records.tables import RecordError, read_table
from servers.clock import now_ns
from tests.fakes.listening import Listener, listeners
from tests.faults import arrangement, look_over
from tests.faults.arrangement import ANSWERS
from tests.faults.fault import Kind, Moment, Setup, phases
from tests.faults.plan import Plan
from tests.faults.processes import ancestry, by_role, marked
from tests.faults.story import AMONG_TEMPORARY, Answered, Command, Injected, Story

_POLL_S = 0.02
_SOCKETS_EVERY_S = 1.0
_ANALYZE_S = 180.0
_GOES_S = 30.0  # until whatever is left is called left
_OF_TRAFFIC = re.compile(r"\d+-\d+")  # others ask too: whether arms answer alike
_LINE = re.compile(r"\[\d+:\d\d\] (?:· trial \d+/\d+ )?· (.*)")


class LiveRun:
    """The run of a plan in a folder of its own."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.mark = uuid.uuid4().hex[:12]
        self.setup = arrangement.arranged(plan, folder)
        self._process: subprocess.Popen[bytes] | None = None
        self._read = 0
        self._phase = ""
        self._seen_s: dict[str, float] = {}  # when each phase was first shown
        self.injected: list[Injected] = []
        self.recorded_before: set[str] = set()
        self.commands: set[str] = set()
        self.sockets: set[Listener] = set()

    @property
    def phase(self) -> str:
        """The last phase that the run has shown."""
        return self._phase

    def pids(self, role: str) -> list[int]:
        """The processes that have the role now."""
        assert self._process is not None
        orchestrator = self._process.pid if self._process.poll() is None else 0
        return by_role(self.mark, orchestrator).get(role, [])

    def every_pid(self) -> list[int]:
        """All processes of the run."""
        return list(marked(self.mark))

    def run_dir(self) -> Path | None:
        """The run directory, once it is there."""
        found = sorted(self.setup.folder.glob("out/*-*/experiment.toml"))
        return found[0].parent if found else None

    def carry_out(self, words: list[str]) -> Command:
        """The run went on to its end, or to its limit, and its faults came."""
        folder, limit_s = self.setup.folder, self.plan.limit_s
        with (folder / "run.out").open("wb") as out, (folder / "run.err").open("wb") as err:
            self._process = process = subprocess.Popen(
                arrangement.command(self.plan, self.setup, words),
                cwd=folder,
                env=arrangement.environment(self.mark, self.setup),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        began_s = time.monotonic()
        waiting, lifts = list(self.plan.moments), list[tuple[float, Moment]]()
        sockets_s = 0.0
        while process.poll() is None and time.monotonic() - began_s < limit_s:
            self.follow(folder / "run.err")
            for moment in [item for item in waiting if self.is_due(item)]:
                waiting.remove(moment)
                self._inject(moment)
                if moment.lasts_s is not None:
                    lifts.append((time.monotonic() + moment.lasts_s, moment))
            for due_s, moment in list(lifts):
                if time.monotonic() >= due_s:
                    lifts.remove((due_s, moment))
                    moment.fault.lift(self)
            if time.monotonic() - sockets_s > _SOCKETS_EVERY_S:
                sockets_s = time.monotonic()
                self.commands |= {process.command for process in marked(self.mark).values()}
                self.sockets |= listeners(process.pid)
            time.sleep(_POLL_S)
        took_s = time.monotonic() - began_s
        code = process.poll()
        for _, moment in lifts:
            moment.fault.lift(self)
        if code is None:
            process.kill()
            process.wait()
        return Command(
            code=code,
            stdout=_text(folder / "run.out"),
            stderr=_text(folder / "run.err"),
            took_s=took_s,
            limit_s=limit_s,
        )

    def follow(self, path: Path) -> None:
        """The phase is what the run has said last on stderr, which goes to the file."""
        text = _text(path)
        for line in text[self._read : text.rfind("\n") + 1].splitlines():
            if phase := phase_of(line, self.plan.kind):
                self._phase = phase
                self._seen_s.setdefault(phase, time.monotonic())
        self._read = text.rfind("\n") + 1

    def is_due(self, moment: Moment) -> bool:
        """Whether it is so long after the phase was seen, or a later one where it was too short to be seen."""
        order = phases(self.plan.kind)
        seen = [self._seen_s[phase] for phase in order[order.index(moment.phase) :] if phase in self._seen_s]
        return bool(seen) and time.monotonic() - min(seen) >= moment.after_s

    def _inject(self, moment: Moment) -> None:
        self.recorded_before |= recorded(self.setup.folder)
        at_ns = now_ns()
        hit = moment.fault.inject(self)
        self.injected.append(Injected(moment=moment, at_ns=at_ns, phase=self._phase, hit=hit))


def phase_of(line: str, kind: Kind) -> str:
    """The phase that a line on stderr shows; empty where it shows none."""
    if line.startswith("judging "):
        return "judging"
    shown = _LINE.match(line)
    known = (phase for phase in phases(kind) if shown is not None and shown[1].startswith(phase))
    return next(known, "")


def carry_out(plan: Plan, folder: Path) -> Story:
    """What happened when the plan was carried out in the folder, which is empty. Afterwards nothing of it runs."""
    live = LiveRun(plan, folder)
    temporary = arrangement.temporary(live.mark)
    temporary.mkdir()
    try:
        with arrangement.beside(plan, live.mark, live.setup) as words:
            others = set(marked(live.mark))
            run = live.carry_out(words)
            if run.code == 2 and not live.injected:
                raise AssertionError(f"{plan}: the run was refused: {run.stderr}")
            gone_after_s, left = _gone(live, others)
        left += [item for item in _gone(live, set())[1] if item not in left]
        left += _left_in(temporary)
        run_dir = live.run_dir()
        # One that came to its end was just judged by the same code, which takes as long as half the run.
        is_judged = run_dir is None or run.line.get("complete") is True
        analysis = None if is_judged or run_dir is None else _analyzed(live, run_dir)
        return Story(
            plan=plan,
            run=run,
            run_dir=run_dir,
            injected=tuple(live.injected),
            analysis=analysis,
            summaries=look_over.summaries(folder),
            answered=tuple(answered(folder)),
            recorded=frozenset(recorded(folder)),
            recorded_before=frozenset(live.recorded_before),
            left=tuple(left),
            gone_after_s=gone_after_s,
            leaks=look_over.leaks((folder, temporary), live.commands),
            tracebacks=look_over.tracebacks((folder, temporary)),
        )
    finally:
        for pid in marked(live.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(temporary, ignore_errors=True)
        live.setup.closing.close()


def recorded(folder: Path) -> set[str]:
    """The ids of all requests in the records of the run, and in what workers kept."""
    found: set[str] = set()
    for path in (*folder.glob("out/*/trial-*/requests*.arrow"), *folder.glob("kept/*/trial-*/requests*.arrow")):
        with contextlib.suppress(RecordError, OSError):
            found |= set(read_table(path, REQUESTS)[0].column("request_id").to_pylist())
    return found


def answered(folder: Path) -> Iterator[Answered]:
    """What arms answered of the traffic, as they wrote it down themselves."""
    for line in _text(folder / ANSWERS).splitlines():
        request_id, arm, at_ns = line.split(" ")
        if _OF_TRAFFIC.match(request_id):
            yield Answered(request_id=request_id, arm=arm, at_ns=int(at_ns))


def _gone(live: LiveRun, others: set[int]) -> tuple[float, list[str]]:
    """How long it took until no process was there but `others` and what those started, and what is left after
    `_GOES_S`."""
    began_s = time.monotonic()
    while True:
        every = marked(live.mark)
        rest = {pid: process for pid, process in every.items() if not others & ancestry(process, every)}
        took_s = time.monotonic() - began_s
        if not rest or took_s > _GOES_S:
            break
        time.sleep(0.05)
    left = [f"process {process.command[:200]!r}" for process in rest.values()]
    owners = {listener.pid for listener in live.sockets}
    now = {item for pid in owners for item in listeners(pid)}
    left += [f"{item.address}:{item.port} of {item.command[:200]!r}" for item in live.sockets & now]
    return took_s, left


def _left_in(temporary: Path) -> list[str]:
    """The temporary files that are there after `_GOES_S`."""
    end_s = time.monotonic() + _GOES_S
    while any(temporary.iterdir()) and time.monotonic() < end_s:
        time.sleep(0.05)
    return [f"{path.name} {AMONG_TEMPORARY}" for path in sorted(temporary.iterdir())]


def _analyzed(live: LiveRun, run_dir: Path) -> Command:
    began_s = time.monotonic()
    try:
        done = subprocess.run(
            arrangement.tailgate("analyze", str(run_dir)),
            cwd=live.setup.folder,
            env=arrangement.environment(live.mark, Setup(folder=live.setup.folder)),
            capture_output=True,
            text=True,
            timeout=_ANALYZE_S,
            check=False,
        )
        code, out, err = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired:
        code, out, err = None, "", ""
    return Command(code=code, stdout=out, stderr=err, took_s=time.monotonic() - began_s, limit_s=_ANALYZE_S)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
