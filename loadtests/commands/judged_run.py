"""An experiment run with its live page and metrics, and a run directory judged: `run`, `ramp`, `frontier`, `analyze`.

What judges is imported after the traffic: nothing of it is needed before, and SciPy alone takes half a second.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from loadtests.commands.exits import EXIT_BROKE, EXIT_USAGE, complain, stopping, without_verdict
from loadtests.commands.parity import show_parity
from loadtests.trials.environment import has_requests
from loadtests.trials.live_page import LivePage, page_address
from loadtests.trials.progress import Display
from loadtests.trials.run import Orchestrator
from loadtests.trials.status import Status
from servers import stdout
from servers.complaint import fault, unwritten


def run_and_judge(orchestrator: Orchestrator, *, page: str, metrics: str, as_json: bool) -> int:
    """Run the experiment and judge it, after checks that start nothing; return the exit code.

    `page` and `metrics` are the addresses of --page and --metrics.
    """
    status, place = orchestrator.status, page_address(page)
    live_page = None if place is None else LivePage(*place, status)
    orchestrator.page, orchestrator.metrics = live_page, bool(metrics)
    orchestrator.prepare()
    ended: dict[str, Any] = {"complete": False, "error": "it ended in the middle"}
    try:
        with _exporting(status, metrics):
            return _run(orchestrator, status, ended, as_json=as_json)
    finally:
        if live_page is not None:
            live_page.close(ended)


def _exporting(status: Status, metrics: str) -> AbstractContextManager[object]:
    if not metrics:
        return nullcontext()
    from loadtests.trials.run_metrics import exporting

    return exporting(status, metrics)


def _run(orchestrator: Orchestrator, status: Status, ended: dict[str, Any], *, as_json: bool) -> int:
    """Run and judge the experiment, put into `ended` how it ended, and return the exit code."""
    with stopping(orchestrator.interrupt, status.note), Display(status):
        outcome = orchestrator.run()
        status.phase = "stopped" if not outcome.complete else "recorded"
    if outcome.error is not None:
        complain(outcome.error, EXIT_BROKE)
    elif outcome.interrupted:
        complain(f"interrupted: what was recorded is in {outcome.run_dir}", EXIT_BROKE)
    ended.clear()
    ended |= outcome.ended
    if outcome.failed_parity is not None:
        return show_parity(outcome.failed_parity, outcome.run_dir, as_json=as_json)
    if not outcome.complete and not has_requests(outcome.run_dir):
        return without_verdict(outcome.run_dir, ended, as_json=as_json)
    status.phase = "judging"
    print(f"judging {outcome.run_dir}", file=sys.stderr)
    return judge_run(outcome.run_dir, ended, as_json=as_json, broke=not outcome.complete)


def judge_run(
    run_dir: Path,
    ended: dict[str, Any],
    *,
    as_json: bool,
    whole: bool = False,
    broke: bool = False,
    slo: Sequence[str] = (),
) -> int:
    """Write the summary and reports into the run directory, and the verdict or the answer of a search to stdout.

    As JSON it is the `whole` summary or its outcome. Returns the exit code.
    """
    from analysis.records.tables import RecordError
    from analysis.report import write_reports
    from analysis.report.terminal import verdict_table
    from analysis.summary.summary import analyze, exit_code, write_summary

    def unjudged(message: str, code: int) -> int:
        """Complain that there is no verdict. After a run, programs still get their line."""
        complain(message, code)
        return without_verdict(run_dir, {"error": message, **ended}, code, as_json=as_json) if ended else code

    try:
        summary = analyze(run_dir, slo=slo)
        write_summary(summary, run_dir / "summary.json")
        write_reports(summary, run_dir)
    except RecordError as error:
        return unjudged(str(error), EXIT_BROKE if ended else EXIT_USAGE)
    except OSError as error:
        return unjudged(f"{unwritten(error)}, then tailgate analyze {run_dir}: the records are kept", EXIT_BROKE)
    except KeyboardInterrupt:
        return unjudged(f"interrupted: the records are kept: tailgate analyze {run_dir}", EXIT_BROKE)
    except Exception as error:
        return unjudged(fault(error, run_dir), EXIT_BROKE)
    code = EXIT_BROKE if broke else exit_code(summary)
    if whole:
        stdout.write("", summary, as_json=True)
        return code
    report = run_dir / "report.html"
    line = {
        "verdict": summary["overall"],
        "run_dir": str(run_dir),
        **({"runs": len(joined["runs"])} if (joined := summary.get("joined")) else {}),
        "report": str(report),
        "exit_code": code,
        "headline": summary.get("headline"),
        "arms": {arm["name"]: arm["verdict"] for arm in summary.get("arms", []) if not arm.get("control")},
        "needed_s": (summary.get("advice") or {}).get("needed_s"),
        **ended,
    }
    if frontier := summary.get("frontier"):
        if not frontier["gated"]:
            line = {key: value for key, value in line.items() if key not in ("headline", "arms", "needed_s")}
            line["verdict"] = None
        line |= {"answer": frontier["answer"]}
    text = verdict_table(summary, width=stdout.columns())
    stdout.write(f"{text}\nreport: {report}", line, as_json=as_json)
    return code
