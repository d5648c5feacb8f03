"""What every part of a trial works with, without a run around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from loadtests.experiments.model import Experiment
from loadtests.experiments.reading import from_table
from loadtests.trials.context import TrialContext
from loadtests.trials.progress import ReplicaState, Status
from loadtests.trials.trial_facts import TrialFacts
from loadtests.trials.trial_schedule import TrialSchedules

TRAFFIC = {"rate": 4, "duration_s": 2, "block_s": 1}


def trial_context(
    folder: Path, what: Experiment | Mapping[str, Any], *, check: Callable[[], None] = lambda: None
) -> TrialContext:
    """Return the first trial of an experiment, or of what its table says, in `folder`, which is made."""
    table = what if isinstance(what, Experiment) else from_table({"name": "small", "traffic": TRAFFIC, **what})
    folder.mkdir(parents=True, exist_ok=True)
    status = Status()
    status.replicas = {name: ReplicaState() for arm in table.arms for name in arm.replica_names}
    facts = TrialFacts.of(table, 1, TrialSchedules.of(table).draw(1, ()))
    return TrialContext(experiment=table, number=1, folder=folder, facts=facts, status=status, check=check)


def external_trial(folder: Path, telemetry: dict[str, Any], *, replicas: int = 1) -> TrialContext:
    """Return a trial of an arm of tailgate's, and of `vllm` with this telemetry."""
    addresses = [f"http://127.0.0.1:{port}/v1" for port in range(8001, 8001 + replicas)]
    vllm = {"name": "vllm", "kind": "openai", "model_name": "llama", "address": addresses, "telemetry": telemetry}
    arms = [{"name": "eager", "preset": "eager", "control": True}, vllm]
    return trial_context(folder, {"compare_models": True, "arms": arms})
