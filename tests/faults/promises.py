"""What is promised of every run, whatever goes wrong: each promise is a function that tells its breaches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.fakes.summary_schema import faults
from tests.faults.fault import CANDIDATE, CONTROL
from tests.faults.story import AMONG_TEMPORARY, Command, Story

VERDICTS = {0: "PASS", 3: "INCONCLUSIVE", 99: "FAIL"}
BROKE = (1, 2)
# Records are on the disk a second after they are made; beside that a busy machine takes its time.
FLUSHED_S = 1.0
HASTE_S = 1.0
# What goes by itself once whoever started it was killed.
GONE_S = 15.0
_LONGEST_LINE = 2000
_ARM_OF = {CONTROL: "eager"}


def no_wrong_pass(story: Story) -> list[str]:
    """A bad candidate never passes, nor one that stopped answering, and nobody without a control that answers."""
    said = {"the run": story.run, "analyze": story.analysis}
    passed = [who for who, command in said.items() if command is not None and _passed(command)]
    passed += ["a summary" for item in story.summaries if isinstance(item, Mapping) and item.get("overall") == "PASS"]
    if not passed:
        return []
    why = [f"its candidate is {story.plan.truth!r}"] if story.plan.is_bad else []
    why += [item.moment.fault.name for item in story.injected if item.hit and item.moment.fault.forbids_pass]
    for item in story.injected:
        for arm in item.moment.fault.silences if item.hit else ():
            # By the word of the others: requests were answered afterwards, which the arm was sent too.
            others = {CONTROL: CANDIDATE, CANDIDATE: CONTROL}[arm]
            later = [row for row in story.answered if row.at_ns > item.at_ns + 1e9 and _role(row.arm) == others]
            if later:
                why.append(f"{arm} was gone, by {item.moment.fault.name}, while {len(later)} requests were answered")
    return [f"{', '.join(passed)} said PASS, and {reason}" for reason in why]


def no_wrong_blame(story: Story) -> list[str]:
    """A good candidate does not fail by what hit others."""
    if story.plan.is_bad or story.plan.hurts() or story.verdict != "FAIL":
        return []
    return [f"a good candidate failed, which no fault hit: {story.run.line.get('headline')}"]


def ends_by_itself(story: Story) -> list[str]:
    """The run is over within the limit that its plan states, and so is its analysis."""
    named = (("the run", story.run), ("analyze", story.analysis))
    return [
        f"{who} did not end within {command.limit_s:.0f} s"
        for who, command in named
        if command is not None and command.code is None
    ]


def nothing_is_left(story: Story) -> list[str]:
    """No process, listening socket or temporary file stays."""
    spared = any(item.moment.fault.spares_temporary for item in story.injected if item.hit)
    left = [what for what in story.left if not (spared and what.endswith(AMONG_TEMPORARY))]
    late = [f"its processes took {story.gone_after_s:.1f} s to go"] if story.gone_after_s > GONE_S else []
    return [*left, *late]


def records_stay(story: Story) -> list[str]:
    """What was on the disk stays there; what an arm answered is recorded, but for the last second before its recorder
    ended."""
    removed = any(item.moment.fault.removes_records and item.hit for item in story.injected)
    lost = frozenset() if removed else story.recorded_before - story.recorded
    breaches = [f"{len(lost)} records were on the disk and are gone, such as {min(lost)}"] if lost else []
    late = (
        [] if removed else [row for row in unrecorded(story) if _before_end_s(story, row.at_ns) > FLUSHED_S + HASTE_S]
    )
    if late:
        most = max(_before_end_s(story, row.at_ns) for row in late)
        breaches.append(f"{len(late)} answers are not recorded, the first {most:.2f} s before the recorder ended")
    return breaches


def unrecorded(story: Story) -> list[Any]:
    """What an arm answered before whoever records it ended, and nobody recorded."""
    return [
        row
        for row in story.answered
        if row.request_id and row.request_id not in story.recorded and _before_end_s(story, row.at_ns) > 0
    ]


def lost_s(story: Story) -> float:
    """How long before the recorder ended the first answer came that is not recorded."""
    return max((_before_end_s(story, row.at_ns) for row in unrecorded(story)), default=0.0)


def one_line_reasons(story: Story) -> list[str]:
    """Whatever is said of a failure is one line, and nowhere is a traceback."""
    # Of what had no memory the line names a file with the traceback.
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
        # A signal that nobody handles ends a program without a word: only whoever is killed may go so.
        if command.code is not None and command.code not in (*VERDICTS, *BROKE) and not story.was_killed:
            breaches.append(f"{who} ended with exit code {command.code}")
    return breaches


def can_be_judged(story: Story) -> list[str]:
    """`tailgate analyze` gives a verdict on what is there, or says in one line why it cannot."""
    command = story.analysis
    if command is None or command.code is None:
        return []
    if command.code in VERDICTS:
        said = command.line.get("verdict")
        return [] if said == VERDICTS[command.code] else [f"exit code {command.code} with verdict {said}"]
    lines = [line for line in command.stderr.splitlines() if line.startswith("tailgate: ")]
    return [] if command.code in BROKE and len(lines) == 1 else [f"exit code {command.code}: {command.stderr[-300:]!r}"]


def no_secrets(story: Story) -> list[str]:
    """No file, output or command line holds a secret that the run was given."""
    return [f"a secret is in {where}" for where in story.leaks]


def summaries_are_as_published(story: Story) -> list[str]:
    """Every summary is as docs/schema describes it, and there is one where there is a verdict."""
    breaches = []
    for summary in story.summaries:
        if isinstance(summary, str):
            breaches.append(f"a summary cannot be read: {summary}")
        else:
            breaches += list(faults(summary))[:3]
    if story.run.code in VERDICTS and not story.summaries:
        breaches.append("there is a verdict and no summary")
    return breaches


def goes_on(story: Story) -> list[str]:
    """After faults that were lifted, or that hit what a run can do without, it comes to its usual end."""
    if story.plan.family == "safety":
        return []
    usual = {"good": ("PASS", "INCONCLUSIVE"), "naive": ("FAIL",)}.get(story.plan.truth, ("FAIL", "INCONCLUSIVE"))
    if story.plan.truth == "good" and story.plan.hurts():
        usual = (*usual, "FAIL")
    line, reason = story.run.line, _complaint(story.run) or story.run.stderr[-200:]
    breaches = [] if line.get("complete") is True else [f"the run is not complete: {reason}"]
    if story.verdict not in usual:
        breaches.append(f"the verdict is {story.verdict}, and not {' or '.join(usual)}: {line.get('headline')}")
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
    """What did not hold, by promise."""
    return {name: found for name, promise in PROMISES.items() if (found := promise(story))}


def _passed(command: Command) -> bool:
    return command.code == 0 or command.line.get("verdict") == "PASS"


def _role(arm: str) -> str:
    return CONTROL if arm == _ARM_OF[CONTROL] else CANDIDATE


def _before_end_s(story: Story, at_ns: int) -> float:
    """How long before the first fault that ends records; without one, as long as there is."""
    ends = [item.at_ns for item in story.injected if item.moment.fault.ends_records and item.hit]
    return (min(ends) - at_ns) / 1e9 if ends else float("inf")


def _complaint(command: Command) -> str:
    lines = [line for line in command.stderr.splitlines() if line.startswith("tailgate: ")]
    return lines[-1] if lines else ""
