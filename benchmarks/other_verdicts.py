"""What other tools would have said of the kept records of a case, beside what tailgate says.

The same records, arms, metrics and cold start as `tailgate analyze`, latency from the scheduled time as well. The rules
(benchmarks/other_rules.py) get the completed requests past the cold start, also those that a compile held up: they know
of no compile. A request that failed at its deadline, or that had no end, is counted here and seen by none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from analysis.arrays import Ints
from analysis.judging.gates import FAIL
from analysis.judging.verdict import combined
from analysis.records.run_records import read_run
from analysis.run.run import Run
from analysis.run.trials import SECOND, Trial
from analysis.settings.metrics import quantile_label
from analysis.wording import counted
from benchmarks.other_rules import CANNOT_SAY, RULE_NAMES, RULES, TAIL, Answers, Opinion

EQUAL_ARMS: Final = ("aa", "aa-bucketed", "aa-h100")  # cases whose arms are the same, with several whole trials
_GATES: Final = {f"noninferiority p{100 * TAIL:g}_{metric}": metric for metric in ("ttft", "e2e")}
_ENOUGH_POINTS: Final = 50  # of a series, as Spinnaker's guide has it
_SLACK_NS: Final = 1_000_000  # the last request of a trial that was cut off starts at its end


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A stretch of a trial; a request is of the one in which it was due."""

    begin_ns: int
    end_ns: int

    @classmethod
    def past_cold_start(cls, run: Run, trial: Trial) -> Window:
        """The trial without its cold start; empty where it was not longer."""
        begin = trial.start_ns + int(run.limits.cold_s * SECOND)
        return cls(begin_ns=begin, end_ns=max(begin, trial.end_ns + _SLACK_NS))

    def halves(self) -> tuple[Window, Window]:
        """Its first half and its second."""
        middle = (self.begin_ns + self.end_ns) // 2
        return Window(begin_ns=self.begin_ns, end_ns=middle), Window(begin_ns=middle, end_ns=self.end_ns)


Windows = Mapping[int, Window]  # by the number of the trial


def answers(run: Run, arm: str, metric: str, windows: Windows) -> Answers:
    """The completed requests of the arm in the windows, past the cold start."""
    rows = run.answered(arm)
    rows = rows[~run.cold[rows]]
    requests = run.requests
    latency_ms = requests.metric_ms(metric).astype(np.float64)
    rows = rows[_within(run, rows, windows) & ~np.isnan(latency_ms[rows])]
    trial = requests.trial[rows]
    begin_ns = np.array([windows[int(number)].begin_ns for number in trial], dtype=np.int64)
    return Answers(
        latency_ms=latency_ms[rows],
        trial=trial,
        ended_s=(requests.end_ns[rows] - begin_ns) / SECOND,
        window_s={number: (item.end_ns - item.begin_ns) / SECOND for number, item in windows.items()},
    )


def _within(run: Run, rows: Ints, windows: Windows) -> Any:
    start_ns, trial = run.requests.start_ns[rows], run.requests.trial[rows]
    within = np.zeros(len(rows), dtype=np.bool_)
    for number, item in windows.items():
        within |= (trial == number) & (start_ns >= item.begin_ns) & (start_ns < item.end_ns)
    return within


def opinions(run: Run, arm: str, control: str, metric: str, windows: Windows) -> dict[str, Opinion]:
    """What each rule says of the arm."""
    candidate, base = (answers(run, name, metric, windows) for name in (arm, control))
    return {name: rule(candidate, base) for name, rule in RULES.items()}


# --- Cases ------------------------------------------------------------------------------------------------------------


def other_verdicts(cases: Mapping[str, tuple[Path, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return what every rule says of each case whose gates compare latencies, and how often each fails equal arms.

    `cases` holds the folder and the verdict of each case, by name. The same records give the same document.
    """
    rows: list[dict[str, Any]] = []
    counts: dict[str, dict[str, Any]] = {}
    for name, (case, verdict) in cases.items():
        gates = {(row["arm"], row["gate"]): row["verdict"] for row in verdict["gates"] if row["gate"] in _GATES}
        if not gates:  # a search for the highest load compares no latencies
            continue
        run = Run.of(read_run(case))
        in_all = {
            arm: combined([row["verdict"] for row in verdict["gates"] if row["arm"] == arm]) for arm in run.treatments
        }
        rows += _rows_of_case(name, run, gates, in_all)
        if name in EQUAL_ARMS:
            _count_false_alarms(run, counts)
    rules = {
        name: {"name": RULE_NAMES[name], "sees_recompiles": False, "sees_failed_requests": False} for name in RULES
    }
    return {"rules": rules, "rows": rows, "equal_arms": counts}


def _rows_of_case(
    case: str, run: Run, gates: Mapping[tuple[str, str], str], in_all: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    windows = {trial.number: Window.past_cold_start(run, trial) for trial in run.trials}
    for (arm, gate), verdict in gates.items():
        metric = _GATES[gate]
        said = opinions(run, arm, run.control, metric, windows)
        yield {
            "case": case,
            "arm": arm,
            "metric": metric,
            "trials": len(run.trials),
            "requests": {name: _fates(run, name) for name in (arm, run.control)},
            "tailgate": {"gate": verdict, "overall": in_all[arm]},
            "rules": {name: {"verdict": item.verdict, **_rounded(item.figures)} for name, item in said.items()},
        }


def _fates(run: Run, arm: str) -> dict[str, int]:
    """What became of the arm's requests past the cold start; only the completed ones are seen by the rules."""
    own = run.of_arm(arm) & run.requests.measured & ~run.cold
    completed, failed = own & run.usable & run.requests.ok, own & run.requests.failed
    return {
        "sent": int(own.sum()),
        "completed": int(completed.sum()),
        "failed": int(failed.sum()),
        "without_end": int((own & ~completed & ~failed).sum()),
    }


def _count_false_alarms(run: Run, counts: dict[str, dict[str, Any]]) -> None:
    """Comparisons of equal arms, each arm in turn the candidate, are added to the counts.

    Of the two directions and the two metrics one follows the other, and arms sat on different cards, so that a share
    is no estimate of a rule's error: it says what somebody would have been told who had run so long.
    """
    whole = {trial.number: Window.past_cold_start(run, trial) for trial in run.trials}
    trials = list(whole.items())
    stretches: dict[str, list[Windows]] = {
        "half a trial": [{number: half} for number, item in whole.items() for half in item.halves()],
        "a trial": [{number: item} for number, item in whole.items()],
        "two trials": [dict(pair) for pair in zip(trials[::2], trials[1::2], strict=False)],
        "all trials": [whole],
    }
    for name, windows_of in stretches.items():
        rows = counts.setdefault(name, {rule: {"fail": 0, "of": 0} for rule in RULES})
        for windows in windows_of:
            for arm in run.treatments:
                for candidate, control in ((arm, run.control), (run.control, arm)):
                    for metric in run.limits.metrics:
                        for rule, item in opinions(run, candidate, control, metric, windows).items():
                            rows[rule]["fail"] += item.verdict == FAIL
                            rows[rule]["of"] += item.verdict != CANNOT_SAY


def _rounded(figures: Mapping[str, float | str]) -> dict[str, float | str]:
    """To four digits, which libraries agree on."""
    return {name: value if isinstance(value, str) else float(f"{value:.4g}") for name, value in figures.items()}


# --- In words ---------------------------------------------------------------------------------------------------------


def markdown(document: Mapping[str, Any]) -> str:
    """The verdicts as a table, and the false alarms as a second one."""
    names = [RULE_NAMES[rule] for rule in RULES]
    rows = [
        [
            row["case"],
            f"{row['arm']}, {quantile_label(row['metric'], TAIL)}",
            "{completed} of {sent}".format(**row["requests"][row["arm"]]),
            f"{row['tailgate']['gate']}, in all {row['tailgate']['overall']}",
            *(_in_words(row["rules"][rule]) for rule in RULES),
        ]
        for row in document["rows"]
    ]
    alarms = [
        [stretch, *(f"{count['fail']} of {count['of']}" for count in counts.values())]
        for stretch, counts in document["equal_arms"].items()
    ]
    return "\n\n".join(
        (
            _table(["case", "arm and metric", "requests seen", "tailgate", *names], rows),
            _table(["equal arms, FAIL after", *names], alarms),
        )
    )


def _in_words(opinion: Mapping[str, Any]) -> str:
    """The verdict, and of Kayenta its class where that says more, and the candidate's points where they are few."""
    more = ["Low"] if opinion.get("class") == "Low" else []
    points = opinion.get("points", _ENOUGH_POINTS)
    more += [counted(points, "point")] if points < _ENOUGH_POINTS else []
    return f"{opinion['verdict']} ({', '.join(more)})" if more else str(opinion["verdict"])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))
