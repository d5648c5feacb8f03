"""What weighs on a trial's machines and when, as trial.json keeps it: real processes, and a clock that is set."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtests.trials import pressure as pressure_room
from loadtests.trials.context import TrialContext
from loadtests.trials.errors import RunError, StopRequestedError
from loadtests.trials.pressure import Pressure
from loadtests.trials.processes import Child
from loadtests.trials.trial_facts import TrialFacts
from servers.clock import now_ns
from tests.fakes.patience import wait_for
from tests.fakes.trial_context import trial_context

FAKES = Path(__file__).resolve().parents[2] / "fakes"
TWO_PHASES = [{"end_s": 20, "compute_share": 0.5}, {"start_s": 30, "compute_share": 0.5}]
Start = Callable[..., tuple[Pressure, TrialContext]]


@pytest.fixture
def pressed(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Start]:
    """Makes a Pressure over arms on two cards, and ends all its processes."""
    made: list[Pressure] = []

    def make(pressure: dict[str, Any], *flags: str, check: Callable[[], None] = lambda: None) -> Any:
        table: dict[str, Any] = {
            "engine": {"max_prompt_tokens": 32, "max_new_tokens": 8},
            "arms": [
                {"name": f"arm-{index}", "preset": "eager", "control": not index, "model": {"device": device}}
                for index, device in enumerate(getattr(request, "param", ("cuda:0", "cuda:1")))
            ],
            "traffic": {"duration_s": 100, "rate": 2, "block_s": 10, "length_scale": 0.02},
            "trials": {"ready_timeout_s": 20, "swap_devices": False},
            "pressure": pressure,
        }
        context = trial_context(tmp_path / "trial", table, check=check)
        context.logs.mkdir()
        made.append(
            Pressure(
                context,
                arm_command=[sys.executable, str(FAKES / "arm.py")],
                neighbour_command=[sys.executable, str(FAKES / "neighbour.py"), *flags],
            )
        )
        return made[-1], context

    yield make
    for pressure in made:
        pressure.kill()
        pressure.stop(hurry=True)


def rows(context: TrialContext) -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = json.loads((context.folder / "trial.json").read_text())["pressure"]
    assert kept == context.facts.pressure
    return kept


def of_each_card(context: TrialContext) -> list[list[dict[str, Any]]]:
    """Rows of cuda:0 and of cuda:1, each in their order; which neighbour answers first is nobody's promise."""
    return [[row for row in rows(context) if row["device"] == device] for device in ("cuda:0", "cuda:1")]


def at(context: TrialContext, seconds: float) -> None:
    """So many seconds of the traffic have passed."""
    context.facts.start_ns = now_ns() - int(seconds * 1e9)


def until(pressure: Pressure, holds: Callable[[], bool], within_s: float = 60.0) -> None:
    wait_for(holds, within_s, sleep=lambda _: pressure.step())


def test_without_a_pressure_nothing_is_started_or_kept(pressed: Start) -> None:
    pressure, context = pressed({}, "--refuse", "cuda:0")
    pressure.start({"arm-0-0": 1})
    pressure.step()
    pressure.stop(hurry=False)
    assert (pressure.process_ids, context.facts.pressure) == ({}, None)


def test_a_phase_of_the_whole_traffic_is_on_every_device_before_the_load_and_until_its_end(pressed: Start) -> None:
    pressure, context = pressed({"memory_share": 0.3, "compute_share": 0.2})
    pressure.start({})
    started_ns = now_ns()
    assert sorted(pressure.process_ids) == ["neighbour cuda:0", "neighbour cuda:1"]
    assert context.status.phase == "starting the pressure"
    at(context, 50.0)
    pressure.step()
    assert {row["end_ns"] for row in rows(context)} == {None}
    ending_ns = now_ns()
    pressure.stop(hurry=False)
    kept = [row for card in of_each_card(context) for row in card]
    assert [(row["kind"], row["device"], row["share"]) for row in kept] == [
        *(("memory", "cuda:0", 0.3), ("compute", "cuda:0", 0.2)),
        *(("memory", "cuda:1", 0.3), ("compute", "cuda:1", 0.2)),
    ]
    assert {row["memory_bytes"] for row in kept if row["kind"] == "memory"} == {300}
    assert {row["had_share"] for row in kept if row["kind"] == "compute"} == {0.25}
    assert all(row["start_ns"] <= started_ns and ending_ns <= row["end_ns"] and row["error"] is None for row in kept)
    assert pressure.process_ids == {}


@pytest.mark.parametrize("pressed", [("cuda", "cuda:0")], indirect=True)
def test_two_names_of_one_card_have_one_neighbour(pressed: Start) -> None:
    pressure, _ = pressed({"memory_share": 0.3})
    pressure.start({})
    assert list(pressure.process_ids) == ["neighbour cuda:0"]


def test_phases_come_and_go_by_the_clock_of_the_traffic(pressed: Start) -> None:
    schedule = [
        {"start_s": 10, "end_s": 20, "memory_share": 0.5},
        {"start_s": 30, "end_s": 40, "compute_share": 1.0},
        {"start_s": 40, "memory_share": 0.1},
    ]
    pressure, context = pressed({"schedule": schedule})
    pressure.start({})
    pressure.step()  # no traffic yet
    at(context, 5.0)
    pressure.step()
    assert context.facts.pressure == []
    steps = ((10.1, 2, 0), (20.1, 2, 2), (30.1, 4, 2), (40.1, 6, 4))
    for seconds, begun, over in steps:
        at(context, seconds)
        until(pressure, lambda begun=begun: len(context.facts.pressure or []) == begun)  # type: ignore[misc]
        until(pressure, lambda over=over: sum(row["end_ns"] is not None for row in rows(context)) == over)  # type: ignore[misc]
    pressure.stop(hurry=False)
    assert [row["kind"] for row in rows(context)] == ["memory"] * 2 + ["compute"] * 2 + ["memory"] * 2
    assert all(row["start_ns"] <= row["end_ns"] for row in rows(context))


def test_before_the_first_answer_the_clock_is_that_of_the_load(pressed: Start) -> None:
    pressure, context = pressed({"start_s": 10, "memory_share": 0.5})
    pressure.start({})
    context.status.load = type(context.status.load)(t_s=11.0)
    until(pressure, lambda: len(context.facts.pressure or []) == 2)


def test_a_tenant_is_a_warm_server_on_each_device_with_traffic_of_its_own(pressed: Start) -> None:
    pressure, context = pressed({"tenant_rps": 4.0})
    pressure.start({})
    names = {f"{what} cuda:{card}" for what in ("neighbour", "tenant") for card in (0, 1)}
    assert set(pressure.process_ids) == names
    config = json.loads((context.logs / "tenant-cuda-1.json").read_text())
    assert (config["preset"], config["model"]["device"], config["engine"]["max_new_tokens"]) == ("eager", "cuda:1", 8)
    pressure.stop(hurry=False)
    for row in rows(context):
        assert (row["kind"], row["requests_per_s"], row["answered"], row["failed"]) == ("tenant", 4.0, 3, 1)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--refuse", "cuda:1"), "neighbour-cuda-1 could not start: the device is busy"),
        (("--die", "cuda:1=0"), "could not be put on: the neighbour ended with exit code 7"),
        (("--short", "cuda:1"), "could not be put on: holds half: out of memory: lower what [pressure] asks for"),
    ],
)
def test_a_pressure_that_cannot_be_had_ends_the_run_before_the_traffic(
    flags: tuple[str, ...], words: str, pressed: Start
) -> None:
    pressure, _ = pressed({"memory_share": 0.3}, *flags)
    with pytest.raises(RunError) as refused:
        pressure.start({})
    assert words in str(refused.value)


def test_a_neighbour_that_dies_is_told_and_what_it_would_have_done_is_a_row_with_the_reason(pressed: Start) -> None:
    pressure, context = pressed({"schedule": TWO_PHASES}, "--die", "cuda:1=1")
    pressure.start({})
    at(context, 20.1)
    until(pressure, lambda: len(context.status.notes) == 1)
    assert context.status.notes == ["cuda:1: the neighbour ended with exit code 7: the driver fell off"]
    at(context, 30.1)
    until(pressure, lambda: len(context.facts.pressure or []) == 4)
    pressure.stop(hurry=False)
    errors = [(row["device"], row["error"]) for row in rows(context)]
    why = "the neighbour ended with exit code 7"
    assert sorted(errors, key=str) == [("cuda:0", None), ("cuda:0", None), ("cuda:1", why), ("cuda:1", why)]
    assert all(row["end_ns"] is not None for row in rows(context))


def test_a_neighbour_that_hangs_has_no_end_that_it_never_said(pressed: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pressure_room, "_CHANGE_S", 1.0)
    pressure, context = pressed({"schedule": TWO_PHASES}, "--hang", "cuda:1=1")
    pressure.start({})
    at(context, 20.1)
    until(pressure, lambda: any(row["end_ns"] for row in context.facts.pressure or []))
    asked_ns = now_ns()
    at(context, 30.1)
    until(pressure, lambda: len(context.facts.pressure or []) == 3)
    later_ns = now_ns()
    pressure.stop(hurry=False)
    good, hung = of_each_card(context)
    assert [(row["error"], row["had_share"]) for row in good] == [(None, 0.25)] * 2
    assert [row["error"] for row in hung] == ["the neighbour did not answer"] * 2
    assert hung[0]["end_ns"] < asked_ns
    assert hung[1]["start_ns"] == hung[1]["end_ns"] < later_ns
    (note,) = context.status.notes
    assert note.startswith("cuda:1: the neighbour did not answer: see ")


def test_an_interruption_shortens_the_wait_for_a_neighbour_that_hangs(
    pressed: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pressure_room, "_HURRY_S", 0.1)
    interrupted = False

    def check() -> None:
        if interrupted:
            raise StopRequestedError

    pressure, context = pressed({"memory_share": 0.3}, "--hang", "cuda:1=1", check=check)
    pressure.start({})
    interrupted = True
    pressure.stop(hurry=False)
    ((good,), (hung,)) = of_each_card(context)
    assert (good["error"], hung["error"]) == (None, "the neighbour did not answer")


def test_a_tenant_that_dies_ends_its_rows_with_the_reason(pressed: Start) -> None:
    schedule = [{"end_s": 20, "memory_share": 0.1, "tenant_rps": 4.0}, {"start_s": 30, "tenant_rps": 4.0}]
    pressure, context = pressed({"schedule": schedule})
    pressure.start({})
    pressure._servers["cuda:1"].kill()
    until(pressure, lambda: len(context.status.notes) == 1)
    why = "the second server ended with SIGKILL"
    assert context.status.notes[0].startswith(f"cuda:1: {why}")
    died_ns = now_ns()
    for seconds, count in ((20.1, 4), (30.1, 6)):
        at(context, seconds)
        until(pressure, lambda count=count: len(context.facts.pressure or []) == count)  # type: ignore[misc]
    pressure.stop(hurry=False)
    good, bad = of_each_card(context)
    assert [(row["kind"], row["error"]) for row in good] == [("memory", None), ("tenant", None), ("tenant", None)]
    assert [(row["kind"], row["error"]) for row in bad] == [("memory", None), ("tenant", why), ("tenant", why)]
    assert bad[1]["end_ns"] < died_ns < bad[0]["end_ns"]
    assert len(context.status.notes) == 1


def test_processors_of_every_replica_are_limited_alike_and_given_back(pressed: Start, tmp_path: Path) -> None:
    replicas = [
        Child(f"arm-{index}", [sys.executable, "-c", "import time; time.sleep(60)"], log_path=tmp_path / f"{index}.log")
        for index in (0, 1)
    ]
    try:
        pressure, context = pressed({"cpus": 1.0})
        pressure.start({child.name: child.pid for child in replicas})
        assert pressure.process_ids == {}
        assert [(row["replica"], row["cpus"], row["error"], row["end_ns"]) for row in rows(context)] == [
            ("arm-0", 1.0, None, None),
            ("arm-1", 1.0, None, None),
        ]
        assert len({row["method"] for row in rows(context)}) == 1
        pressure.stop(hurry=False)
        assert all(row["start_ns"] < row["end_ns"] for row in rows(context))
    finally:
        for child in replicas:
            child.kill()


def test_a_replica_that_has_ended_is_a_row_with_the_reason_and_the_others_are_limited(
    pressed: Start, tmp_path: Path
) -> None:
    living = Child("arm-1", [sys.executable, "-c", "import time; time.sleep(60)"], log_path=tmp_path / "1.log")
    try:
        pressure, context = pressed({"start_s": 10, "cpus": 1.0})
        pressure.start({"arm-0": 2**22 + 1, "arm-1": living.pid})
        at(context, 10.1)
        until(pressure, lambda: len(context.facts.pressure or []) == 2)
        assert [(row["replica"], row["error"]) for row in rows(context)] == [("arm-0", "it had ended"), ("arm-1", None)]
        pressure.stop(hurry=False)
    finally:
        living.kill()


def test_on_a_full_disk_every_process_is_gone_all_the_same(pressed: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    pressure, context = pressed({"end_s": 20, "memory_share": 0.3})
    pressure.start({})
    children = [neighbour.child for neighbour in pressure._neighbours]

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TrialFacts, "write", full)
    at(context, 20.1)
    until(pressure, lambda: all(row["end_ns"] for row in context.facts.pressure or []))
    pressure.stop(hurry=False)
    assert pressure.process_ids == {}
    assert all(child.poll() is not None for child in children)
