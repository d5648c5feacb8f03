"""How a trial ends what it started."""

from pathlib import Path
from typing import Any

import pytest

from loadtests.experiments.reading import from_table
from loadtests.trials.bed_watch import BedWatch
from loadtests.trials.context import TrialContext
from loadtests.trials.pressure import Pressure
from loadtests.trials.progress import Status
from loadtests.trials.replicas import Replicas
from loadtests.trials.telemetry import Collector
from loadtests.trials.trial import Trial, take_all
from loadtests.trials.trial_facts import TrialFacts
from loadtests.trials.trial_schedule import TrialSchedules


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
    traffic = {"rate": 4, "duration_s": 2, "block_s": 1}
    experiment = from_table({"name": "small", "arms": arms, "traffic": traffic, "bed": {"sample_s": 0}})
    schedule = TrialSchedules.of(experiment).draw(1, ())
    facts = TrialFacts.of(experiment, 1, schedule)
    context = TrialContext(
        experiment=experiment, number=1, folder=tmp_path, facts=facts, status=Status(), check=lambda: None
    )
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
