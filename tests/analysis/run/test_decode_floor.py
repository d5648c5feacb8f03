"""How near decode steps come to reading their weights alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.records.run_records import read_run
from analysis.records.schemas import STEPS
from analysis.records.tables import RecordWriter
from analysis.run.decode_floor import FEWEST, DecodeFloor, decode_floor
from analysis.run.run import Run
from tests.fakes.resources import tell
from tests.fakes.runs import SECOND, FakeRun, write_run

CARDS = {"eager": "cuda:0", "compiled": "cuda:1"}
WEIGHTS = 15_000_000_000
READ = {"cuda:0": 4000.0, "cuda:1": 5000.0}


def run_in(
    folder: Path, steps: dict[int, tuple[int, float]], *, devices: dict[str, str] = CARDS, **memory: int
) -> Path:
    """Each trial of each arm has decode steps: by their rows, how many and how long in ms."""
    references: list[dict[str, Any]] = [
        {"host": "run", "device": device, "when": when, "read_bytes": 1 << 30, "read_gb_per_s": rate}
        for device, rate in READ.items()
        for when in ("before", "after")
    ]
    startup = {arm: {"memory_bytes": {"weights": WEIGHTS, **memory}} for arm in devices}
    directory = tell(write_run(folder / "run", FakeRun(duration_s=60)), devices=devices, references=references)
    tell(directory, startup=startup)
    for trial in sorted(directory.glob("trial-*")):
        start = int(json.loads((trial / "trial.json").read_text())["start_ns"])
        for path in trial.glob("*.sums"):
            path.unlink()
        (trial / "steps.arrow").unlink()
        with RecordWriter(trial / "steps.arrow", STEPS) as writer:
            for arm in devices:
                number = 0
                for rows, (count, ms) in steps.items():
                    for _ in range(count):
                        number += 1
                        begun = start + 20 * SECOND + number * 100_000_000
                        writer.append(
                            {
                                **{"trial": 1, "arm": arm, "replica": f"{arm}-0", "step_id": number, "kind": "decode"},
                                **{"start_ns": begun, "end_ns": begun + int(ms * 1e6), "batch": rows, "tokens": rows},
                                **{"padded_batch": rows, "padded_tokens": rows, "compiled": True},
                            }
                        )
        for path in trial.glob("*.sums"):
            path.unlink()
    return directory


def floor_of(directory: Path, arm: str = "eager") -> DecodeFloor | None:
    return decode_floor(Run.of(read_run(directory)), arm)


def test_the_floor_is_the_weights_over_what_the_arms_own_card_reads(tmp_path: Path) -> None:
    run = run_in(tmp_path, {1: (FEWEST, 5.0)}, step_weights=WEIGHTS, quantised_weights=WEIGHTS // 3)
    eager, compiled = floor_of(run), floor_of(run, "compiled")
    assert eager is not None
    assert compiled is not None
    assert (eager.floor_ms, compiled.floor_ms) == (pytest.approx(3.75), pytest.approx(3.0))
    assert (eager.share, compiled.share) == (pytest.approx(0.75), pytest.approx(0.6))
    assert (eager.rows, eager.bytes_a_token, eager.quantised) == (1, WEIGHTS, WEIGHTS // 3)


@pytest.mark.parametrize(
    ("devices", "weights"),
    [
        ({"eager": "cuda:0", "compiled": "cuda:0"}, WEIGHTS),
        ({"eager": "cpu", "compiled": "cpu"}, WEIGHTS),
        (CARDS, 100 << 20),
    ],
    ids=["a card for two arms", "a processor", "weights that a cache holds"],
)
def test_there_is_no_floor_for(tmp_path: Path, devices: dict[str, str], weights: int) -> None:
    found = floor_of(run_in(tmp_path, {1: (50, 5.0)}, devices=devices, step_weights=weights))
    assert found is not None
    assert found.floor_ms is None
    assert found.share is None
