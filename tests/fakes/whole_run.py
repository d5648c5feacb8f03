"""Whole runs with paced fake arms, in this process or as a command, and what they leave."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tailgate.analysis.records.schemas import REQUESTS
from tailgate.analysis.records.tables import read_table
from tailgate.loadtests.experiments.model import Experiment
from tailgate.loadtests.experiments.reading import from_table
from tailgate.loadtests.trials.context import TrialContext, TrialFacts
from tailgate.loadtests.trials.run import Orchestrator, RunOutcome
from tailgate.loadtests.trials.status import ReplicaState, Status
from tailgate.loadtests.trials.trial_schedule import draw, source_of
from tests.fakes.processes import family

ROOT = Path(__file__).resolve().parents[2]
FAKE_ARM = ROOT / "tests" / "fakes" / "arm.py"


def experiment(**tables: Any) -> Experiment:
    """Return two arms under two seconds of traffic; `tables` are merged into the experiment's."""
    table: dict[str, Any] = {
        "name": "small",
        "seed": 3,
        "model": {"device": "cpu", "dtype": "float32"},
        "engine": {"max_prompt_tokens": 128, "max_new_tokens": 16},
        "arms": [{"name": "eager", "preset": "eager", "control": True}, {"name": "naive", "preset": "compiled-naive"}],
        "traffic": {"duration_s": 2, "rate": 8, "length_scale": 0.05, "block_s": 1, "timeout_s": 10},
        "trials": {"starting_at_once": 3},
        "machines": {"reference_s": 0},
    }
    for key, value in tables.items():
        table[key] = {**table.get(key, {}), **value} if isinstance(value, dict) else value
    return from_table(table)


def run(
    what: Experiment,
    out: Path,
    *flags: str,
    status: Status | None = None,
    **more: Any,
) -> tuple[RunOutcome, Status]:
    """Run the experiment in this process; `flags` are of the fake arm."""
    status = status or Status()
    command = [sys.executable, str(FAKE_ARM), *flags]
    return Orchestrator(what, out=out, status=status, arm_command=command, **more).run(), status


def tailgate(*arguments: str, flags: tuple[str, ...] = ()) -> list[str]:
    """Return the command line that starts fake arms with `flags`."""
    code = (
        "import sys; from tailgate.loadtests.commands.main import main; "
        f"sys.exit(main({list(arguments)!r}, arm_command={[sys.executable, str(FAKE_ARM), *flags]!r}))"
    )
    return [sys.executable, "-c", code]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def command(line: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(line, cwd=folder, env=environment(), capture_output=True, text=True, timeout=280, check=False)


def with_fake_arms(arguments: list[str], folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run `tailgate` with fake arms to its end, without measuring machines unless `arguments` ask for it."""
    if not any("machines.reference_s" in argument for argument in arguments):
        arguments = [*arguments, "--set", "machines.reference_s=0"]
    return command(tailgate(*arguments, "--json", flags=flags), folder)


def console_script(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the installed command with --json to its end."""
    script = Path(sys.executable).with_name("tailgate")
    start = [str(script)] if script.exists() else [sys.executable, "-m", "tailgate.loadtests.commands.main"]
    return command([*start, *arguments, "--json"], folder)


@contextlib.contextmanager
def ended(*processes: subprocess.Popen[str]) -> Iterator[None]:
    """Kill the processes at the end, whatever happens."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def last_line(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the JSON that a command prints."""
    return json.loads(done.stdout)


def trial_facts(run_dir: Path, number: int = 1) -> dict[str, Any]:
    return json.loads((run_dir / f"trial-{number:02d}" / "trial.json").read_text())


def summary_of(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "summary.json").read_text())


def requests(run_dir: Path, trial: str = "trial-*") -> list[dict[str, Any]]:
    """Return the rows of all trials, or of one."""
    return [row for folder in sorted(run_dir.glob(trial)) for row in records(folder)]


def children_of_this_process() -> set[int]:
    return set(family(os.getpid()))


def start_locust(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "locust", "--only-summary", *arguments],
        cwd=ROOT,
        env=environment(),
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def run_locust(*arguments: str) -> tuple[int, str]:
    process = start_locust(*arguments)
    try:
        output, _ = process.communicate(timeout=90)
    finally:
        process.kill()
    return process.returncode, output


def records(directory: Path) -> list[dict[str, Any]]:
    """Return what has been recorded so far; a file that is being written may end anywhere."""
    rows: list[dict[str, Any]] = []
    for path in sorted(directory.glob("requests-*.arrow")):
        rows += read_table(path, REQUESTS)[0].to_pylist()
    return rows


TRAFFIC = {"rate": 4, "duration_s": 2, "block_s": 1}


def trial_context(
    folder: Path, what: Experiment | Mapping[str, Any], *, check: Callable[[], None] = lambda: None
) -> TrialContext:
    """Return the first trial of an experiment, or of what its table says, in `folder`, which is made."""
    table = what if isinstance(what, Experiment) else from_table({"name": "small", "traffic": TRAFFIC, **what})
    folder.mkdir(parents=True, exist_ok=True)
    status = Status()
    status.replicas = {name: ReplicaState() for arm in table.arms for name in arm.replica_names}
    facts = TrialFacts.of(table, 1, draw(table, source_of(table), 1))
    return TrialContext(
        **{"experiment": table, "number": 1, "folder": folder, "facts": facts, "status": status, "check": check},
        arm_command=["false"],
        shared_cache=folder / "cache",
    )


def external_trial(folder: Path, telemetry: dict[str, Any], *, replicas: int = 1) -> TrialContext:
    """Return a trial of an arm of tailgate's, and of `vllm` with this telemetry."""
    addresses = [f"http://127.0.0.1:{port}/v1" for port in range(8001, 8001 + replicas)]
    vllm = {"name": "vllm", "kind": "openai", "model_name": "llama", "address": addresses, "telemetry": telemetry}
    arms = [{"name": "eager", "preset": "eager", "control": True}, vllm]
    return trial_context(folder, {"compare_models": True, "arms": arms})
