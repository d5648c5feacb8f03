"""A run directory judged: the verdict of `run`, `ramp`, `frontier` and `analyze`.

What judges is imported when it is needed: SciPy alone takes half a second, and a run starts without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tailgate.loadtests.commands.exits import EXIT_BROKE, EXIT_USAGE, complain, without_verdict, working
from tailgate.servers import stdout
from tailgate.servers.complaint import fault, write_failure


def judge_run(
    run_dir: Path,
    ended: dict[str, Any],
    *,
    as_json: bool,
    whole: bool = False,
    broke: bool = False,
    slo: Sequence[str] = (),
    quiet: bool = False,
) -> int:
    """Write the summary and reports into the run directory, and the verdict or the answer of a search to stdout.

    As JSON it is the `whole` summary or its outcome, and either has the `next` step. Returns the exit code.
    """

    def unjudged(message: str, code: int) -> int:
        """Complain that there is no verdict. After a run, programs still get their line."""
        complain(message, code)
        return without_verdict(run_dir, {"error": message, **ended}, code, as_json=as_json) if ended else code

    try:
        from tailgate.analysis.records.tables import RecordError
        from tailgate.analysis.report import write_reports
        from tailgate.analysis.report.terminal import next_step, verdict_table
        from tailgate.analysis.summary.summary import analyze, write_summary
    except ImportError as error:  # such as for lack of memory
        return unjudged(fault(error, run_dir), EXIT_BROKE)
    try:
        with working(f"judging {run_dir}", quiet=quiet):
            summary = analyze(run_dir, slo=slo)
            write_summary(summary, run_dir / "summary.json")
            write_reports(summary, run_dir)
    except RecordError as error:
        return unjudged(str(error), EXIT_BROKE if ended else EXIT_USAGE)
    except OSError as error:
        return unjudged(f"{write_failure(error)}, then tailgate analyze {run_dir}: the records are kept", EXIT_BROKE)
    except KeyboardInterrupt:
        return unjudged(f"interrupted: the records are kept: tailgate analyze {run_dir}", EXIT_BROKE)
    except Exception as error:
        return unjudged(fault(error, run_dir), EXIT_BROKE)
    code = EXIT_BROKE if broke else int(summary["exit_code"])
    experiment = run_dir / "experiment.toml"  # runs that are judged as one have none in common
    name = str(experiment) if experiment.is_file() else experiment.name
    step = next_step(summary, experiment=name)
    if whole:
        stdout.write("", {**summary, "next": step}, as_json=True)
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
        "next": step,
        **ended,
    }
    if frontier := summary.get("frontier"):
        if not frontier["gated"]:
            line = {key: value for key, value in line.items() if key not in ("headline", "arms", "needed_s")}
            line["verdict"] = None
        line |= {"answer": frontier["answer"]}
    text = verdict_table(summary, width=stdout.columns(), experiment=name)
    stdout.write(f"{text}\nreport: {report}", line, as_json=as_json)
    return code
