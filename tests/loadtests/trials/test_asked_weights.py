"""Weights that somebody asks for on the live page, with a splitter that takes them or is deaf."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from analysis.records.weight_journal import read_weights
from loadtests.trials.asked_weights import WHY, AskedWeights, may_change_weights
from loadtests.trials.progress import Status
from servers.splitter.admin import SplitterError
from tests.fakes.whole_run import experiment


class FakeSplitter:
    """It says what its weights are; a deaf one takes no others."""

    def __init__(self, deaf: bool) -> None:
        self.deaf = deaf
        self.kept = {"eager": 1, "naive": 1}

    def weights(self) -> dict[str, int]:
        return dict(self.kept)

    def after(self, weights: Mapping[str, int]) -> dict[str, int]:
        return {**self.kept, **weights}

    def reweight(self, weights: Mapping[str, int]) -> None:
        if self.deaf:
            raise SplitterError("no split answers")
        self.kept = {**self.kept, **weights}


@pytest.mark.parametrize("deaf", [False, True])
def test_a_change_is_in_the_journal_before_and_after_the_splitter_takes_it(deaf: bool, tmp_path: Path) -> None:
    asked = [SimpleNamespace(number=1, weights={"naive": 9})]
    answers: list[Any] = []
    page: Any = SimpleNamespace(
        asked=lambda: asked.pop() if asked else None, answer=lambda request, answer: answers.append(answer)
    )
    splitter = FakeSplitter(deaf)
    trial: Any = SimpleNamespace(
        splitter=splitter, context=SimpleNamespace(number=1, facts=SimpleNamespace(start_ns=5), status=Status())
    )
    AskedWeights(tmp_path, page, experiment(traffic={"design": "split"})).poll(trial)
    start, change, *back = read_weights(tmp_path)
    assert (start.action, start.weights["naive"], start.done_ns) == ("start", 1, None)
    assert (change.action, change.weights["naive"], change.why) == ("set", 9, WHY)
    if deaf:
        assert answers == [{"error": "no split answers"}]
        assert [(one.action, one.weights["naive"]) for one in back] == [("set", 1)]
        assert change.done_ns is None
    else:
        assert answers == [{"weights": {"eager": 1, "naive": 9}}]
        assert back == []
        assert change.done_ns is not None
        assert splitter.kept["naive"] == 9


def test_weights_are_changed_only_where_the_splitter_goes_by_them() -> None:
    assert may_change_weights(experiment(traffic={"design": "split"}))
    assert not may_change_weights(experiment())
