"""Promises of every run, whatever goes wrong: each is a function that returns its breaches in a story."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tailgate.analysis.summary.model import Summary
from tests.faults.fault import CANDIDATE, CONTROL, Moment
from tests.faults.plan import SECRETS, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """A fault that was injected: when, and what it hit."""

    moment: Moment
    at_ns: int
    hit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A request that an arm answered to its end, as the arm reports."""

    request_id: str
    arm: str
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """The end of a command. `code` is None where it did not end within `limit_s`."""

    code: int | None
    stdout: str
    stderr: str
    limit_s: float

    @property
    def line(self) -> Mapping[str, Any]:
        """The JSON object in the last line of stdout; empty where there is none."""
        lines = self.stdout.strip().splitlines()
        try:
            line = json.loads(lines[-1]) if lines else {}
        except ValueError:
            return {}
        return line if isinstance(line, dict) else {}

    @property
    def verdict(self) -> str | None:
        """The verdict in that line, which of `analyze` is a whole summary."""
        return self.line.get("verdict", self.line.get("overall"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """What is known of a run once it is over.

    `left`: processes, sockets and files that it left; `gone_after_s`: how long its processes took to end; `recorded`:
    ids of all recorded requests, and `recorded_before` of those on the disk when a fault came; `analysis`: `tailgate
    analyze` of a run that did not end as usual; `leaks`: files and command lines that hold a secret.
    """

    plan: Plan
    run: Command
    injected: tuple[Injected, ...] = ()
    analysis: Command | None = None
    summaries: tuple[Mapping[str, Any] | str, ...] = ()
    answered: tuple[Answered, ...] = ()
    recorded: frozenset[str] = frozenset()
    recorded_before: frozenset[str] = frozenset()
    left: tuple[str, ...] = ()
    gone_after_s: float = 0.0
    leaks: tuple[str, ...] = ()
    tracebacks: tuple[str, ...] = ()

    @property
    def was_killed(self) -> bool:
        """Whether the orchestrator was killed or asked to end."""
        ends = ("SIGKILL of orchestrator", "SIGTERM of orchestrator")
        return any(item.hit and item.moment.fault.name in ends for item in self.injected)

    @property
    def was_removed(self) -> bool:
        """Whether a fault removed the run directory or a folder in it."""
        return any(item.hit and item.moment.fault.removes_records for item in self.injected)


_TRACEBACK = b"Traceback (most recent call last)"
_IGNORED = re.compile(rb"Exception ignored in [^\n]*\n" + re.escape(_TRACEBACK))


def summaries(folder: Path) -> tuple[Mapping[str, Any] | str, ...]:
    """Read every summary.json in the folder; a string says why one cannot be read."""
    return tuple(_summary(path) for path in sorted(folder.rglob("summary.json")))


def leaks(folders: Iterable[Path], commands: Iterable[str]) -> tuple[str, ...]:
    """Return the files and command lines that hold a secret."""
    places = [(str(path), content) for path, content in _files(folders)]
    places += [(f"the command line {command[:60]!r}", command.encode()) for command in commands]
    return tuple(
        f"{where} ({name})"
        for where, content in places
        for name, secret in SECRETS.items()
        if secret.encode() in content
    )


def tracebacks(folders: Iterable[Path]) -> tuple[str, ...]:
    """Return the files that hold a traceback, without that of the external fake and without exceptions that Python
    ignores at exit, as in Locust when it is asked to end twice."""
    return tuple(
        str(path)
        for path, content in _files(folders)
        if _TRACEBACK in _IGNORED.sub(b"", content) and path.name != "server.err"
    )


def _files(folders: Iterable[Path]) -> Iterator[tuple[Path, bytes]]:
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.is_symlink():
                yield path, path.read_bytes()


def _summary(path: Path) -> Mapping[str, Any] | str:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"{path.name}: {error}"


VERDICTS = {0: "PASS", 3: "INCONCLUSIVE", 99: "FAIL"}
BROKE = (1, 2)
FLUSHED_S = 2.0  # records are flushed each second; a busy machine may take another
GONE_S = 15.0  # for processes whose parent was killed
_LONGEST_LINE = 2000


def no_wrong_pass(story: Story) -> list[str]:
    """No PASS for a bad candidate, nor without a candidate and a control that answer."""
    said = {"the run": story.run, "analyze": story.analysis}
    passed = [who for who, command in said.items() if command is not None and _passed(command)]
    passed += ["a summary" for item in story.summaries if isinstance(item, Mapping) and item.get("overall") == "PASS"]
    if not passed:
        return []
    why = [f"its candidate is {story.plan.truth!r}"] if story.plan.is_bad else []
    why += [item.moment.fault.name for item in story.injected if item.hit and item.moment.fault.forbids_pass]
    for item in story.injected:
        for arm in item.moment.fault.silences if item.hit else ():
            # The other arm answered later requests, which this arm was sent too.
            others = {CONTROL: CANDIDATE, CANDIDATE: CONTROL}[arm]
            later = [row for row in story.answered if row.at_ns > item.at_ns + 1e9 and _role(row.arm) == others]
            if later:
                why.append(f"{arm} was gone, by {item.moment.fault.name}, while {len(later)} requests were answered")
    return [f"{', '.join(passed)} said PASS, and {reason}" for reason in why]


def no_wrong_blame(story: Story) -> list[str]:
    """A good candidate does not fail by what hit others."""
    if story.plan.is_bad or story.plan.hurts() or story.run.verdict != "FAIL":
        return []
    return [f"a good candidate failed, which no fault hit: {story.run.line.get('headline')}"]


def ends_by_itself(story: Story) -> list[str]:
    """The run and its analysis end within their limits."""
    named = (("the run", story.run), ("analyze", story.analysis))
    return [
        f"{who} did not end within {command.limit_s:.0f} s"
        for who, command in named
        if command is not None and command.code is None
    ]


def nothing_is_left(story: Story) -> list[str]:
    """No process, listening socket or temporary file stays."""
    late = [f"its processes took {story.gone_after_s:.1f} s to go"] if story.gone_after_s > GONE_S else []
    return [*story.left, *late]


def records_stay(story: Story) -> list[str]:
    """Flushed records stay; every answer is recorded but for the last seconds before its recorder ended."""
    removed = story.was_removed
    lost = frozenset() if removed else story.recorded_before - story.recorded
    breaches = [f"{len(lost)} records were on the disk and are gone, such as {min(lost)}"] if lost else []
    late = [] if removed else [row for row in _unrecorded(story) if _before_end_s(story, row.at_ns) > FLUSHED_S]
    if late:
        most = max(_before_end_s(story, row.at_ns) for row in late)
        breaches.append(f"{len(late)} answers are not recorded, the first {most:.2f} s before the recorder ended")
    return breaches


def _unrecorded(story: Story) -> list[Answered]:
    """Return the answers before the recorder ended that are not recorded."""
    return [
        row for row in story.answered if row.request_id not in story.recorded and _before_end_s(story, row.at_ns) > 0
    ]


def one_line_reasons(story: Story) -> list[str]:
    """Reasons are one line each, without tracebacks."""
    # The line of a process without memory names the file with its traceback.
    said = story.run.stderr if "out of memory" in story.run.stderr else ""
    spared = tuple(name for item in story.injected if item.hit for name in item.moment.fault.silenced_logs)
    breaches = [
        f"a traceback is in {where}"
        for where in story.tracebacks
        if Path(where).name not in said and not Path(where).name.startswith(spared)
    ]
    for who, command in (("the run", story.run), ("analyze", story.analysis)):
        if command is None:
            continue
        if "Traceback (most recent call last)" in command.stderr + command.stdout:
            breaches.append(f"{who} printed a traceback")
        if any(len(line) > _LONGEST_LINE for line in command.stderr.splitlines()):
            breaches.append(f"{who} printed a line of more than {_LONGEST_LINE} characters")
        if "a fault in tailgate itself" in command.stderr:
            breaches.append(f"{who} met a fault in tailgate itself: {_complaint(command)}")
        if command.code in BROKE and not _complaint(command):
            breaches.append(f"{who} ended with exit code {command.code} and no reason")
        # A program that an unhandled signal ends gives no reason.
        if command.code is not None and command.code not in (*VERDICTS, *BROKE) and not story.was_killed:
            breaches.append(f"{who} ended with exit code {command.code}")
    return breaches


def can_be_judged(story: Story) -> list[str]:
    """`tailgate analyze` gives a verdict, or says in one line why it cannot."""
    command = story.analysis
    if command is None or command.code is None:
        return []
    if command.code in VERDICTS:
        said = command.verdict
        return [] if said == VERDICTS[command.code] else [f"exit code {command.code} with verdict {said}"]
    lines = [line for line in command.stderr.splitlines() if line.startswith("tailgate: ")]
    return [] if command.code in BROKE and len(lines) == 1 else [f"exit code {command.code}: {command.stderr[-300:]!r}"]


def no_secrets(story: Story) -> list[str]:
    """No file, output or command line holds a secret that the run was given."""
    return [f"a secret is in {where}" for where in story.leaks]


def summaries_are_as_published(story: Story) -> list[str]:
    """Every summary is as the model of it says, and a verdict has one."""
    breaches = []
    for summary in story.summaries:
        if isinstance(summary, str):
            breaches.append(f"a summary cannot be read: {summary}")
        else:
            try:
                Summary.of(summary)
            except ValidationError as error:
                breaches.append(f"a summary is not one: {error}")
    if story.run.code in VERDICTS and not story.summaries and not story.was_removed:
        breaches.append("there is a verdict and no summary")
    return breaches


def goes_on(story: Story) -> list[str]:
    """A run ends as usual after faults that were lifted, or that hit what it can do without."""
    if story.plan.family == "safety":
        return []
    usual = {"good": ("PASS", "INCONCLUSIVE"), "naive": ("FAIL",)}.get(story.plan.truth, ("FAIL", "INCONCLUSIVE"))
    if story.plan.truth == "good" and story.plan.hurts():
        usual = (*usual, "FAIL")
    line, reason = story.run.line, _complaint(story.run) or story.run.stderr[-200:]
    breaches = [] if line.get("complete") is True else [f"the run is not complete: {reason}"]
    if story.run.verdict not in usual:
        breaches.append(f"the verdict is {story.run.verdict}, and not {' or '.join(usual)}: {line.get('headline')}")
    return breaches


PROMISES: dict[str, Callable[[Story], list[str]]] = {
    "no wrong PASS": no_wrong_pass,
    "no wrong blame": no_wrong_blame,
    "ends by itself within its limit": ends_by_itself,
    "nothing is left behind": nothing_is_left,
    "flushed records stay": records_stay,
    "reasons are one line": one_line_reasons,
    "can be judged afterwards": can_be_judged,
    "no secret in any file": no_secrets,
    "summaries are as published": summaries_are_as_published,
    "goes on once faults are lifted": goes_on,
}


def breaches(story: Story) -> dict[str, list[str]]:
    """Return the breaches of each promise that did not hold."""
    return {name: found for name, promise in PROMISES.items() if (found := promise(story))}


def _passed(command: Command) -> bool:
    return command.code == 0 or command.verdict == "PASS"


def _role(arm: str) -> str:
    return CONTROL if arm == "eager" else CANDIDATE


def _before_end_s(story: Story, at_ns: int) -> float:
    """Return how long before the first fault that ends records; without one, infinity."""
    ends = [item.at_ns for item in story.injected if item.moment.fault.ends_records and item.hit]
    return (min(ends) - at_ns) / 1e9 if ends else float("inf")


def _complaint(command: Command) -> str:
    lines = [line for line in command.stderr.splitlines() if line.startswith("tailgate: ")]
    return lines[-1] if lines else ""
