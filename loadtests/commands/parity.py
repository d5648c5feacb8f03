"""`tailgate parity`: whether the arms of an experiment compute the same."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from analysis.report.values import count, figure
from analysis.wording import counted
from loadtests.commands.command_line import CommandParser, add_experiment, add_set, seed
from loadtests.commands.exits import EXIT_BROKE, complain, stopping, without_verdict
from loadtests.commands.terminal_table import aligned
from loadtests.experiments.reading import load
from loadtests.trials.errors import RunError
from loadtests.trials.parity_processes import ParityRun, check_measurable
from loadtests.trials.progress import Display, Status
from loadtests.trials.run_directory import check_writable, new_run_dir
from servers import stdout


def add_arguments(parser: CommandParser) -> None:
    """`parser` reads the command line of `tailgate parity`."""
    parser.describe(
        "Runs every arm by itself on the same prompts, without traffic, and compares its greedy answers with the\n"
        "control's and its logits with a float64 reference of the same weights. In float32 the answers must be\n"
        "equal. In lower precision the error may be 1.5 times the control's, and a token that float64 would not\n"
        "take must lie within noise of the one that it would. An arm whose weights are quantised is judged by its\n"
        "mean KL divergence from float64 on texts instead. Encoders are judged by the cosine of every text's\n"
        "vector with float64's. Arms that differ in more than their policy and\n"
        "quantisation are refused.\n\n"
        "Exit codes: 0 PASS, 3 INCONCLUSIVE, 99 FAIL, 2 bad usage or configuration, 1 the measurement broke or was\n"
        "interrupted.",
        "  tailgate parity demo\n"
        "  tailgate parity demo --set model.dtype=bfloat16\n"
        "  tailgate parity canary.toml --set parity.prompts=64 --set parity.tokens=128\n"
        "  tailgate parity canary.toml --set parity.reference=false\n"
        "  tailgate parity int8.toml --set parity.texts=texts.jsonl --set parity.max_kl=0.01",
    )
    add_experiment(parser)
    add_set(parser, "parity.prompts=64")
    parser.add_argument("--out", default="runs", metavar="DIR", help="folder for the outcome (default %(default)s)")
    parser.add_argument("--keep-logits", action="store_true", help="leave the arms' logits in the outcome's folder")
    parser.add_argument("--seed", type=seed, metavar="N", help="replaces the experiment's seed")


def main(options: argparse.Namespace) -> int:
    """Measures and compares the arms; the exit code."""
    experiment = load(options.experiment, settings=options.settings, seed=options.seed, needs_traffic=False)
    texts = check_measurable(experiment)
    out = Path(options.out)
    check_writable(out)
    stopped: list[int] = []

    def check() -> None:
        if stopped:
            raise KeyboardInterrupt

    status = Status()
    measuring = ParityRun(
        experiment,
        folder=new_run_dir(out, f"{experiment.name}-parity"),
        shared_cache=out / "compile-cache",
        status=status,
        check=check,
        keep_logits=options.keep_logits,
        texts=texts,
    )
    try:
        with stopping(lambda: stopped.append(1), measuring.kill, status.note), Display(status):
            outcome = measuring.run()
            status.phase = "measured"
    except (RunError, KeyboardInterrupt) as error:
        why = str(error) or "interrupted"
        complain(why, EXIT_BROKE)
        return without_verdict(measuring.folder, {"error": why}, as_json=options.json)
    return show_parity(outcome, measuring.folder, as_json=options.json)


def show_parity(outcome: Mapping[str, Any], folder: Path, *, as_json: bool) -> int:
    """The outcome is on stdout; returns its exit code."""
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
    """The outcome for a terminal: a heading, a line for each distance of each arm, and why an arm did not pass."""
    if "width" in document:
        size = f"{count(document['rows'])} vectors of {counted(document['texts'], 'text')}, alone and in batches"
    else:
        size = f"{count(document['positions'])} positions of {counted(document['requests'], 'answer')}"
    lines = [f"parity of {document['name']} · {document['dtype']} · {size} · control {document['control']['name']}", ""]
    rows = [("arm", "distance", "verdict", "value", "limit", "")]
    for arm in (document["control"], *document["arms"]):
        for item in arm["findings"]:
            rows.append((arm["name"], item["name"], item["verdict"], figure(item["value"]), figure(item["limit"]), ""))
    lines += aligned(rows, left=3)
    for arm in document["arms"]:
        lines += ["", f"{arm['name']}: {arm['verdict']}", *arm["reasons"]]
    return "\n".join(lines)
