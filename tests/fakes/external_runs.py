"""Run directories in which the treatment is a server of somebody else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from analysis.records.schemas import COMPILE_EVENTS
from analysis.records.tables import RecordWriter
from benchmarks.simulation.detection import CONTROL, TREATMENT, arm_table
from benchmarks.simulation.records import write_requests
from benchmarks.simulation.scenario import Run


def write_external(folder: Path, made: Run, rng: np.random.Generator, *, gates: Mapping[str, float]) -> Path:
    """Write the run with the treatment as an external arm, without telemetry."""
    pieces = [f'[[arms]]\nname = "{CONTROL}"\ncontrol = true\n']
    pieces.append(f'[[arms]]\nname = "{TREATMENT}"\nkind = "openai"\nlength_ladder = {list(range(64, 20_000, 64))}\n')
    pieces.append("[gates]\n" + "".join(f"{key} = {value}\n" for key, value in gates.items()))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "experiment.toml").write_text("compare_models = true\n" + "\n".join(pieces))
    arms = ((made.treatment, TREATMENT), (made.control, CONTROL))
    tables = [arm_table(served, arm, rng, tokens=True, copies=True) for served, arm in arms]
    write_requests(folder / "requests.arrow", pa.concat_tables(tables))
    return folder


def write_logged(folder: Path, events: Sequence[Mapping[str, Any]], *, blind_spots: Sequence[str] = ()) -> Path:
    """Give the run in `folder` a log of the external arm that reported these events and may have left out others."""
    experiment = (folder / "experiment.toml").read_text()
    arm = f'name = "{TREATMENT}"\n'
    (folder / "experiment.toml").write_text(experiment.replace(arm, f'{arm}telemetry = {{ log = ["vllm.log"] }}\n'))
    log = {"replica": None, "lines": 99, "events": len(events), "tells": "kernels", "blind_spots": list(blind_spots)}
    arms = [{"name": CONTROL}, {"name": TREATMENT, "kind": "openai", "told": {"logs": [log]}}]
    arms[1]["external"] = {"telemetry": {"log": ["vllm.log"]}, "length_ladder": list(range(64, 20_000, 64))}
    (folder / "trial.json").write_text(json.dumps({"trial": 1, "complete": True, "arms": arms}))
    with RecordWriter(folder / "compile_events.arrow", COMPILE_EVENTS) as writer:
        for number, event in enumerate(events):
            writer.append({"event_id": f"1-log-{number}", "trial": 1, "arm": TREATMENT, "kind": "jit", **event})
    return folder
