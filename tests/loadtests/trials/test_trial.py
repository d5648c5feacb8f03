"""How a trial ends what it started."""

from pathlib import Path
from typing import Any

import pytest

from loadtests.trials.bed_watch import BedWatch
from loadtests.trials.pressure import Pressure
from loadtests.trials.replicas import Replicas
from loadtests.trials.telemetry import Collector
from loadtests.trials.trial import Trial, take_all
from loadtests.trials.trial_schedule import TrialSchedules
from tests.fakes.trial_context import trial_context


def test_every_step_is_taken_after_one_that_failed_and_the_first_failure_is_told() -> None:
    taken: list[str] = []

    def fail(what: str) -> None:
        taken.append(what)
        raise OSError(what)

    with pytest.raises(OSError, match="disk full"):
        take_all(lambda: fail("disk full"), lambda: taken.append("replicas"), lambda: fail("splitter"))
    assert taken == ["disk full", "replicas", "splitter"]


def test_a_part_that_cannot_be_stopped_keeps_no_other_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = [{"name": "a", "preset": "eager", "control": True}, {"name": "b", "preset": "compiled-padded"}]
    context = trial_context(tmp_path, {"arms": arms, "bed": {"sample_s": 0}})
    schedule = TrialSchedules.of(context.experiment).draw(1, ())
    trial = Trial(context, schedule=schedule, shared_cache=tmp_path / "cache", arm_command=["false"])
    stopped: list[type] = []

    def stop(part: type, fails: bool) -> Any:
        original: Any = part.stop  # type: ignore[attr-defined]

        def stopping(self: Any, **how: Any) -> None:
            original(self, **how)
            stopped.append(part)
            if fails:
                raise OSError(28, "No space left on device")

        return stopping

    for part in (Pressure, Collector, Replicas, BedWatch):
        monkeypatch.setattr(part, "stop", stop(part, fails=part is Pressure))
    with pytest.raises(OSError, match="No space"):
        trial.close(hurry=True)
    assert stopped == [Pressure, Collector, Replicas, BedWatch]


def test_trial_json_has_how_arms_pad_and_which_compiles_stall(tmp_path: Path) -> None:
    presets = ("eager", "compiled-padded", "compiled-bucketed")
    arms = [{"name": name, "preset": name, "control": name == "eager"} for name in presets]
    engine = {"max_prompt_tokens": 128, "prefill_chunk": 32}
    facts = trial_context(tmp_path, {"arms": arms, "engine": engine}).facts
    assert [row["length_ladder"] for row in facts.arms] == [[], [32, 128], [32, 64, 128]]
    assert "limit_hit" in facts.stalling_kinds
