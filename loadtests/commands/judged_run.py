"""An experiment that runs with its live page and metrics and is judged: `run`, `ramp` and `frontier`."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any

from tailgate.loadtests.commands.exits import EXIT_BROKE, complain, stopping, without_verdict
from tailgate.loadtests.commands.parity import show_parity
from tailgate.loadtests.commands.verdict import judge_run
from tailgate.loadtests.trials.environment import has_requests
from tailgate.loadtests.trials.live_page import live_page
from tailgate.loadtests.trials.preflight import check_port
from tailgate.loadtests.trials.progress import displayed
from tailgate.loadtests.trials.run import Orchestrator


def run_and_judge(orchestrator: Orchestrator, *, page: int | None, metrics: str, verbosity: int, as_json: bool) -> int:
    """Run the experiment and judge it, after checks that start nothing; return the exit code.

    `page` and `metrics` are --page, None for no page, and --metrics.
    """
    status = orchestrator.status
    if page:
        check_port(page, key="--page")
    orchestrator.prepare()
    ended: dict[str, Any] = {"complete": False, "error": "it ended in the middle"}
    with ExitStack() as stack:
        if page is not None:
            stack.enter_context(live_page(status, page, ended))
        if metrics:
            from tailgate.loadtests.trials.run_metrics import exporting

            stack.enter_context(exporting(status, metrics))
        with stopping(orchestrator.interrupt, status.note), displayed(status, verbosity=verbosity):
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
        if verbosity >= 0 and not sys.stderr.isatty():
            print(f"judging {outcome.run_dir}", file=sys.stderr)
        return judge_run(outcome.run_dir, ended, as_json=as_json, broke=not outcome.complete, quiet=verbosity < 0)
