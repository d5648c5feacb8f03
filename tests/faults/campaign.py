"""The fault campaign: `python -m tests.faults.campaign --runs 300 --seed 1`.

Plans faults from seeds, injects them into live runs, and checks every promise of every run. Run N of seed S is seed
S + N: `--seed N --runs 1` carries out the plan of N again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tailgate.analysis.records.schemas import REQUESTS
from tailgate.analysis.records.tables import RecordError, read_table
from tailgate.servers.clock import now_ns
from tests.fakes.processes import Listener, listeners
from tests.faults import plan as arrangement
from tests.faults import promises
from tests.faults.fault import PHASES, Moment, Setup
from tests.faults.plan import FAMILIES, Plan, plan
from tests.faults.processes import ancestry, by_role, marked
from tests.faults.promises import Answered, Command, Injected, Story, breaches

_POLL_S = 0.02
_SOCKETS_EVERY_S = 1.0
_ANALYZE_S = 180.0
_GOES_S = 30.0  # until what remains counts as left
_OF_TRAFFIC = re.compile(r"\d+-\d+")  # parity prompts are not of the traffic
_LINE = re.compile(r"\[\d+:\d\d\] (?:· trial \d+/\d+ )?· (.*)")


class LiveRun:
    """The run of a plan in a folder of its own."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.setup = arrangement.arranged(plan, folder)
        self._process: subprocess.Popen[bytes] | None = None
        self._read = 0
        self._seen_s: dict[str, float] = {}  # when each phase was first shown
        self.injected: list[Injected] = []
        self.recorded_before: set[str] = set()
        self.commands: set[str] = set()
        self.sockets: set[Listener] = set()

    def pids(self, role: str) -> list[int]:
        orchestrator = self._process.pid if self._process.poll() is None else 0
        return by_role(self.setup.mark, orchestrator).get(role, [])

    def run_dir(self) -> Path | None:
        found = sorted(self.setup.folder.glob("out/*-*/experiment.toml"))
        return found[0].parent if found else None

    def carry_out(self, words: list[str]) -> Command:
        """Run to the end or to the limit, and inject and lift the faults of the plan."""
        folder, limit_s = self.setup.folder, self.plan.limit_s
        with (folder / "run.out").open("wb") as out, (folder / "run.err").open("wb") as err:
            self._process = process = subprocess.Popen(
                arrangement.command(self.setup, words),
                cwd=folder,
                env=arrangement.environment(self.setup),
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
                self.commands |= {process.command for process in marked(self.setup.mark).values()}
                self.sockets |= listeners(process.pid)
            time.sleep(_POLL_S)
        code = process.poll()
        for _, moment in lifts:
            moment.fault.lift(self)
        if code is None:
            process.kill()
            process.wait()
        return Command(code=code, stdout=_text(folder / "run.out"), stderr=_text(folder / "run.err"), limit_s=limit_s)

    def follow(self, path: Path) -> None:
        """Read new lines of the file, which holds the run's stderr, for phases."""
        text = _text(path)
        for line in text[self._read : text.rfind("\n") + 1].splitlines():
            if phase := phase_of(line):
                self._seen_s.setdefault(phase, time.monotonic())
        self._read = text.rfind("\n") + 1

    def is_due(self, moment: Moment) -> bool:
        """Return whether `after_s` have passed since the phase, or a later one, was seen."""
        later = PHASES[PHASES.index(moment.phase) :]
        seen = [self._seen_s[phase] for phase in later if phase in self._seen_s]
        return bool(seen) and time.monotonic() - min(seen) >= moment.after_s

    def _inject(self, moment: Moment) -> None:
        self.recorded_before |= recorded(self.setup.folder)
        at_ns = now_ns()
        self.injected.append(Injected(moment=moment, at_ns=at_ns, hit=moment.fault.inject(self)))


def phase_of(line: str) -> str:
    """Return the phase that a line on stderr shows; empty where it shows none."""
    if line.startswith("judging "):
        return "judging"
    shown = _LINE.match(line)
    known = (phase for phase in PHASES if shown is not None and shown[1].startswith(phase))
    return next(known, "")


def carry_out(plan: Plan, folder: Path) -> Story:
    """Carry out the plan in the empty folder, end all its processes and return the story."""
    live = LiveRun(plan, folder)
    scratch = live.setup.scratch
    scratch.mkdir()
    try:
        with arrangement.companions(plan, live.setup) as words:
            others = set(marked(live.setup.mark))
            run = live.carry_out(words)
            if run.code == 2 and not live.injected:
                raise AssertionError(f"{plan}: the run was refused: {run.stderr}")
            gone_after_s, left = _gone(live, others)
        left += [item for item in _gone(live, set())[1] if item not in left]
        left += _left_in(scratch)
        run_dir = live.run_dir()
        # A complete run was just judged by the same code.
        is_judged = run_dir is None or run.line.get("complete") is True
        analysis = None if is_judged or run_dir is None else _analyzed(live, run_dir)
        return Story(
            plan=plan,
            run=run,
            injected=tuple(live.injected),
            analysis=analysis,
            summaries=promises.summaries(folder),
            answered=tuple(answered(folder)),
            recorded=frozenset(recorded(folder)),
            recorded_before=frozenset(live.recorded_before),
            left=tuple(left),
            gone_after_s=gone_after_s,
            leaks=promises.leaks((folder, scratch), live.commands),
            tracebacks=promises.tracebacks((folder, scratch)),
        )
    finally:
        for pid in marked(live.setup.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(scratch, ignore_errors=True)
        live.setup.closing.close()


def recorded(folder: Path) -> set[str]:
    """Return the ids of all recorded requests, also of those that workers kept."""
    found: set[str] = set()
    for path in (*folder.glob("out/*/trial-*/requests*.arrow"), *folder.glob("kept/*/trial-*/requests*.arrow")):
        with contextlib.suppress(RecordError, OSError):
            found |= set(read_table(path, REQUESTS)[0].column("request_id").to_pylist())
    return found


def answered(folder: Path) -> Iterator[Answered]:
    """Return the answers that arms wrote down, without those to parity prompts."""
    for line in _text(folder / arrangement.ANSWERS).splitlines():
        request_id, arm, at_ns = line.split(" ")
        if _OF_TRAFFIC.match(request_id):
            yield Answered(request_id=request_id, arm=arm, at_ns=int(at_ns))


def _gone(live: LiveRun, others: set[int]) -> tuple[float, list[str]]:
    """Return how long processes took to end, without `others` and their children, and what is left after `_GOES_S`."""
    began_s = time.monotonic()
    while True:
        every = marked(live.setup.mark)
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
    """Return the temporary files that remain after `_GOES_S`."""
    end_s = time.monotonic() + _GOES_S
    while any(temporary.iterdir()) and time.monotonic() < end_s:
        time.sleep(0.05)
    return [f"{path.name} among the temporary files" for path in sorted(temporary.iterdir())]


def _analyzed(live: LiveRun, run_dir: Path) -> Command:
    unharmed = Setup(folder=live.setup.folder, mark=live.setup.mark)
    try:
        done = subprocess.run(
            arrangement.tailgate("analyze", str(run_dir), "--json"),
            cwd=unharmed.folder,
            env=arrangement.environment(unharmed),
            capture_output=True,
            text=True,
            timeout=_ANALYZE_S,
            check=False,
        )
        code, out, err = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired:
        code, out, err = None, "", ""
    return Command(code=code, stdout=out, stderr=err, limit_s=_ANALYZE_S)


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def holds(planned: Plan, keep: Path | None) -> bool:
    """Carry out one run, print its outcome and return whether every promise held; `keep` gets the folder otherwise."""
    with tempfile.TemporaryDirectory(prefix="tailgate-faults-", ignore_cleanup_errors=True) as place:
        folder = Path(place) / "run"
        folder.mkdir()
        story = carry_out(planned, folder)
        broken = breaches(story)
        if broken and keep is not None:
            shutil.copytree(folder, keep / f"seed-{planned.seed}", dirs_exist_ok=True)
    hit = "; ".join(f"{item.moment.fault.name} hit {item.hit or 'nothing'}" for item in story.injected)
    print(f"  {hit or 'no fault'}: {story.run.verdict} ({story.run.code}), {broken or 'all held'}", flush=True)
    return not broken


def main() -> int:
    """Return 0 where every promise held, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.campaign", description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1, help="of the first run")
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--keep", type=Path, help="folder for the files of runs that broke a promise")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    broken = 0
    for seed in range(options.seed, options.seed + options.runs):
        planned = plan(seed, families=options.families)
        print(planned, flush=True)
        broken += not holds(planned, options.keep)
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
