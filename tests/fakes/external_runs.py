"""Run directories in which the treatment is a server of somebody else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.simulation.detection import CONTROL, TREATMENT, arm_table
from benchmarks.simulation.records import write_requests
from benchmarks.simulation.scenario import Run


def write_external(folder: Path, made: Run, rng: np.random.Generator, *, gates: Mapping[str, float]) -> Path:
    """`folder` holds the run with the treatment as an external arm, of which there is no telemetry."""
    pieces = [f'[[arms]]\nname = "{CONTROL}"\ncontrol = true\n']
    pieces.append(f'[[arms]]\nname = "{TREATMENT}"\nkind = "openai"\nlength_ladder = {list(range(64, 20_000, 64))}\n')
    pieces.append("[gates]\n" + "".join(f"{key} = {value}\n" for key, value in gates.items()))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "experiment.toml").write_text("compare_models = true\n" + "\n".join(pieces))
    arms = ((made.treatment, TREATMENT), (made.control, CONTROL))
    tables = [arm_table(served, arm, rng, tokens=True, copies=True) for served, arm in arms]
    write_requests(folder / "requests.arrow", pa.concat_tables(tables))
    return folder
