"""`tailgate parity`: whether the arms of an experiment compute the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from tailgate.analysis.wording import counted
from tailgate.loadtests.commands.exits import EXIT_BROKE, complain, stopping, without_verdict
from tailgate.loadtests.commands.options import ExperimentName, Json, Out, Quiet, Verbose, set_option
from tailgate.servers import stdout

EXAMPLES = """\
  tailgate parity demo
  tailgate parity canary.toml --set parity.prompts=64 --set parity.tokens=128
  tailgate parity int8.toml --set parity.texts=texts.jsonl --set parity.max_kl=0.01"""


def command(
    experiment: ExperimentName,
    settings: Annotated[list[str] | None, set_option("parity.prompts=64")] = None,
    out: Out = "runs",
    quiet: Quiet = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> int:
    """Check that the arms of an experiment compute the same.

    Runs every arm alone on the same prompts, without traffic, and compares its greedy answers with the control's and
    its logits with a float64 reference of the same weights. A quantised arm is judged by its mean KL divergence from
    float64 on texts instead, an encoder by the cosine of every text's vector with float64's. Arms that differ in more
    than policy and quantisation are refused.

    Exit codes: 0 PASS, 3 INCONCLUSIVE, 99 FAIL, 2 bad usage or configuration, 1 the measurement broke or was
    interrupted.
    """
    from tailgate.loadtests.experiments.files import check_makeable
    from tailgate.loadtests.experiments.reading import load
    from tailgate.loadtests.trials.context import RunError, StopRequestedError
    from tailgate.loadtests.trials.environment import new_run_dir
    from tailgate.loadtests.trials.parity_processes import check_measurable
    from tailgate.loadtests.trials.progress import displayed
    from tailgate.loadtests.trials.run import Orchestrator

    loaded = load(experiment, settings=settings or ())
    check_measurable(loaded)
    check_makeable(Path(out))
    orchestrator = Orchestrator(loaded, out=Path(out))
    status = orchestrator.status
    status.run_dir = folder = new_run_dir(Path(out), f"{loaded.name}-parity")
    try:
        with stopping(orchestrator.interrupt, status.note), displayed(status, verbosity=verbose - quiet):
            outcome = orchestrator.measure_parity(folder)
            status.phase = "measured"
    except (RunError, StopRequestedError) as error:
        why = str(error) or "interrupted"
        complain(why, EXIT_BROKE)
        return without_verdict(folder, {"error": why}, as_json=as_json)
    return show_parity(outcome, folder, as_json=as_json)


def show_parity(outcome: Mapping[str, Any], folder: Path, *, as_json: bool) -> int:
    """Write the outcome to stdout; return its exit code."""
    line = {
        "verdict": outcome["verdict"],
        "run_dir": str(folder),
        "report": str(folder / "parity.json"),
        "exit_code": outcome["exit_code"],
        "arms": {arm["name"]: arm["verdict"] for arm in outcome["arms"]},
        "reasons": {arm["name"]: arm["reasons"] for arm in outcome["arms"] if arm["reasons"]},
    }
    words = f"{parity_table(outcome)}\n\nreport: {folder / 'parity.json'}"
    stdout.write(words, line, as_json=as_json)
    return int(outcome["exit_code"])


def parity_table(document: Mapping[str, Any]) -> str:
    """Return the outcome for a terminal: a heading, a line for each distance of each arm, and why an arm fails."""
    from tailgate.analysis.report.values import count, figure

    size = f"{count(document['rows'])} outputs for {counted(document['prompts'], 'prompt')}"
    lines = [f"parity of {document['name']} · {document['dtype']} · {size} · control {document['control']['name']}", ""]
    rows = [("arm", "distance", "verdict", "value", "limit", "")]
    for arm in (document["control"], *document["arms"]):
        for item in arm["findings"]:
            rows.append((arm["name"], item["name"], item["verdict"], figure(item["value"]), figure(item["limit"]), ""))
    lines += stdout.aligned(rows, left=3)
    for arm in document["arms"]:
        lines += ["", f"{arm['name']}: {arm['verdict']}", *arm["reasons"]]
    return "\n".join(lines)
