"""A trial of one arm of tailgate's and one of somebody else's that tells of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loadtests.experiments.reading import from_table
from loadtests.trials.context import TrialContext
from loadtests.trials.progress import ReplicaState, Status
from loadtests.trials.trial_facts import TrialFacts
from loadtests.trials.trial_schedule import TrialSchedules


def external_trial(folder: Path, telemetry: dict[str, Any], *, replicas: int = 1) -> TrialContext:
    """Its arm `vllm`, the second, has this telemetry."""
    addresses = [f"http://127.0.0.1:{port}/v1" for port in range(8001, 8001 + replicas)]
    vllm = {"name": "vllm", "kind": "openai", "model_name": "llama", "address": addresses, "telemetry": telemetry}
    arms = [{"name": "eager", "preset": "eager", "control": True}, vllm]
    traffic = {"rate": 4, "duration_s": 2, "block_s": 1}
    experiment = from_table({"name": "small", "compare_models": True, "arms": arms, "traffic": traffic})
    folder.mkdir(exist_ok=True)
    status = Status()
    status.replicas = {name: ReplicaState() for arm in experiment.arms for name in arm.replica_names}
    facts = TrialFacts.of(experiment, 1, TrialSchedules.of(experiment).draw(1, ()))
    return TrialContext(experiment=experiment, number=1, folder=folder, facts=facts, status=status, check=lambda: None)
