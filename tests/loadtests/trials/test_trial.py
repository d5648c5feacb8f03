"""A trial: its processes and how it ends them, what its load is given, and its devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tailgate.loadtests.experiments.model import Experiment
from tailgate.loadtests.experiments.reading import from_table
from tailgate.loadtests.trials.load import trial_config, why_it_ended
from tailgate.loadtests.trials.machines import MonitorProcess
from tailgate.loadtests.trials.processes import child_environment
from tailgate.loadtests.trials.replicas import Replicas
from tailgate.loadtests.trials.telemetry import Collector
from tailgate.loadtests.trials.trial import Trial
from tailgate.loadtests.trials.trial_schedule import devices_of, draw, in_trial, source_of
from tailgate.servers.clock import ANCHOR_NS, ANCHOR_VARIABLE
from tests.fakes.whole_run import trial_context


def test_a_part_that_cannot_be_stopped_keeps_no_other_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = [{"name": "a", "preset": "eager", "control": True}, {"name": "b", "preset": "compiled-padded"}]
    context = trial_context(tmp_path, {"arms": arms})
    schedule = draw(context.experiment, source_of(context.experiment), 1)
    trial = Trial(context, schedule=schedule)
    stopped: list[type] = []

    def stop(part: type, fails: bool) -> Any:
        original: Any = part.stop  # type: ignore[attr-defined]

        def stopping(self: Any, **how: Any) -> None:
            original(self, **how)
            stopped.append(part)
            if fails:
                raise OSError(28, "No space left on device")

        return stopping

    for part in (Collector, Replicas, MonitorProcess):
        monkeypatch.setattr(part, "stop", stop(part, fails=part is Collector))
    with pytest.raises(OSError, match="No space"):
        trial.close(hurry=True)
    assert stopped == [Collector, Replicas, MonitorProcess]


def test_text_of_external_arms_alone_may_hold_any_token(tmp_path: Path) -> None:
    arms = [{"name": name, "preset": "eager", "control": name == "a"} for name in "ab"]
    config = trial_config(trial_context(tmp_path, {"arms": arms}), {"*": "127.0.0.1:1"}, vocab_sizes=[])
    assert config.vocab_size > 1 << 30


def test_the_reason_of_an_ended_load_is_the_last_error_in_its_log(tmp_path: Path) -> None:
    log = tmp_path / "locust.log"
    table = "Type     Name  50%    66%\n--------|-----|------|-----\n" * 300
    log.write_text(
        "[2026-01-01 00:00:00,000] vm/ERROR/tailgate: load process 0 is lost (it no longer answers)\n"
        "[2026-01-01 00:00:01,000] vm/ERROR/tailgate: every load process is lost\n"
        f"[2026-01-01 00:00:02,000] vm/INFO/locust.main: Shutting down (exit code 1)\n{table}"
    )
    assert why_it_ended(log) == "every load process is lost"
    log.write_text("ImportError: no such module\n")
    assert why_it_ended(log) == "ImportError: no such module"
    assert why_it_ended(tmp_path / "none.log") == "no log"


def test_children_share_the_clock_and_not_locusts_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCUST_USERS", "7")
    environment = child_environment()
    assert environment[ANCHOR_VARIABLE] == str(ANCHOR_NS)
    assert "LOCUST_USERS" not in environment


def rotated(devices: list[str], *, seed: int = 1, swap: bool = True) -> Experiment:
    presets = ("eager", "compiled-padded", "compiled-naive", "compiled-dynamic")
    arms = [
        {"name": f"a{index}", "preset": presets[index], "control": index == 0, "model": {"device": device}}
        for index, device in enumerate(devices)
    ]
    table = {"name": "x", "seed": seed, "compare_models": True, "arms": arms, "traffic": {"rate": 1.0}}
    return from_table({**table, "trials": {"count": 4, "swap_devices": swap}})


def test_devices_of_one_kind_rotate_and_arms_on_one_device_stay_together() -> None:
    mixed, shared = rotated(["cpu", "cuda:0", "cuda:1"]), rotated(["cuda", "cuda:0", "cuda:1"])
    assert {devices_of(mixed, trial)["a0"] for trial in (1, 2)} == {"cpu"}
    assert {devices_of(mixed, trial)["a1"] for trial in (1, 2)} == {"cuda:0", "cuda:1"}
    for trial in (1, 2):
        devices = devices_of(shared, trial)
        assert devices["a0"] == devices["a1"] != devices["a2"]


@pytest.mark.parametrize(("devices", "swap"), [(["cuda:0", "cuda:1"], False), (["cpu", "cpu"], True)])
def test_devices_do_not_rotate_where_it_is_off_or_all_are_alike(devices: list[str], swap: bool) -> None:
    what = rotated(devices, swap=swap)
    assert [in_trial(what, trial) for trial in (1, 2)] == [what, what]
