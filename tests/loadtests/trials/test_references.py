"""What a trial keeps of its references, with processes that do what a device may do to them."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loadtests.trials.context import TrialContext
from loadtests.trials.errors import StopRequestedError
from loadtests.trials.references import References
from tests.fakes.trial_context import trial_context

# Ready at once, and measures when told; the line on stdout between is somebody else's.
MEASURES = """
import json, os, sys, time
print(json.dumps({"ready": True}), flush=True)
sys.stdin.readline()
start = time.monotonic()
print("a library greets", flush=True)
time.sleep(0.05)
print(json.dumps({"at_ns": 5, "device_asked": sys.argv[2], "seconds_asked": float(sys.argv[4]), "start": start,
    "end": time.monotonic(), "threads": os.environ.get("OMP_NUM_THREADS"), "error": None}), flush=True)
"""
SLOW_TO_COME_UP = "import time; time.sleep(0.3 * (__import__('sys').argv[2] == 'cuda:1'));" + MEASURES
REFUSES = 'print(\'{"error": "CUDA-capable device(s) is/are busy or unavailable"}\')'
DIES = "import os, sys; print('the driver fell off', file=sys.stderr, flush=True); os._exit(7)"
SILENT = "import time; time.sleep(60)"


def trial(
    folder: Path,
    *,
    devices: tuple[str, ...] = ("cpu", "cpu"),
    reference_s: float = 2.0,
    external: bool = False,
    check: Callable[[], None] = lambda: None,
) -> TrialContext:
    elsewhere = {"kind": "openai", "address": "http://127.0.0.1:9", "model_name": "m"}
    table: dict[str, Any] = {
        "compare_models": external,
        "engine": {"threads": 3},
        "arms": [
            {"name": f"arm-{index}", "control": index == 0}
            | (elsewhere if external else {"preset": "eager", "model": {"device": device}})
            for index, device in enumerate(devices)
        ],
        "bed": {"reference_s": reference_s},
    }
    return trial_context(folder / "trial", table, check=check)


def references(context: TrialContext, program: str, **limits: float) -> References:
    return References(context, command=[sys.executable, "-c", program], **limits)


def rows(context: TrialContext) -> list[dict[str, Any]]:
    written = json.loads((context.folder / "trial.json").read_text())["references"]
    assert written == context.facts.references
    return context.facts.references


def test_two_names_of_one_card_are_measured_once(tmp_path: Path) -> None:
    context = trial(tmp_path, devices=("cuda", "cuda:0"))
    references(context, MEASURES).measure("before")
    assert [(row["device"], row["device_asked"]) for row in rows(context)] == [("cuda:0", "cuda:0")]


def test_each_device_is_measured_once_with_its_arms_threads(tmp_path: Path) -> None:
    context = trial(tmp_path)
    references(context, MEASURES).measure("before")
    (row,) = rows(context)
    expected = {"host": "run", "device": "cpu", "when": "before", "at_ns": 5, "error": None}
    assert expected.items() <= row.items()
    assert (row["device_asked"], row["seconds_asked"], row["threads"]) == ("cpu", 2.0, "3")
    assert context.status.phase == "measuring the machines"
    assert (context.logs / "reference-before-cpu.log").read_text() == "a library greets\n"


def test_devices_are_measured_one_after_the_other_and_backwards_after_the_trial(tmp_path: Path) -> None:
    context = trial(tmp_path, devices=("cuda:0", "cuda:1", "cuda:0"))
    measuring = references(context, SLOW_TO_COME_UP)
    began = time.monotonic()
    measuring.measure("before")
    measuring.measure("after")
    assert [(row["device"], row["when"]) for row in rows(context)] == [
        *(("cuda:0", "before"), ("cuda:1", "before")),
        *(("cuda:1", "after"), ("cuda:0", "after")),
    ]
    for first, second in (rows(context)[:2], rows(context)[2:]):
        assert began + 0.3 < first["start"] < first["end"] < second["start"], "none before the last is warm"


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (REFUSES, "CUDA-capable device(s) is/are busy or unavailable"),
        (DIES, "ended with exit code 7: the driver fell off"),
        (SILENT, "was not ready after 0.3 s"),
        (f"print('{{\"ready\": true}}', flush=True); {SILENT}", "took over 0.2 s"),
    ],
)
def test_a_device_that_cannot_be_measured_is_a_row_and_a_note(program: str, words: str, tmp_path: Path) -> None:
    context = trial(tmp_path)
    measuring = references(context, program, start_timeout_s=0.3 if words.endswith("0.3 s") else 30.0)
    measuring._limit_s = 0.2
    measuring.measure("after")
    (row,) = rows(context)
    assert words in row["error"]
    assert row["at_ns"] > 1.6e18
    (note,) = context.status.notes
    assert note.startswith("cpu was not measured after the trial: ")


def test_a_reference_of_no_seconds_is_left_out(tmp_path: Path) -> None:
    context = trial(tmp_path, reference_s=0)
    references(context, DIES).measure("before")
    assert (context.facts.references, context.logs.exists()) == ([], False)


def test_machines_of_others_are_not_measured(tmp_path: Path) -> None:
    context = trial(tmp_path, external=True)
    references(context, DIES).measure("before")
    assert (context.facts.references, context.logs.exists()) == ([], False)


def test_an_interruption_ends_the_measurement_and_its_processes(tmp_path: Path) -> None:
    def stop() -> None:
        raise StopRequestedError

    context = trial(tmp_path, check=stop)
    measuring = references(context, SILENT)
    began = time.monotonic()
    with pytest.raises(StopRequestedError):
        measuring.measure("before")
    assert time.monotonic() - began < 20
    assert measuring._running == []
    assert rows(context) == []
