import json
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from analysis.records.weight_journal import read_weights
from loadtests.page.access import TOKEN_VARIABLE
from loadtests.trials.asked_weights import AskedWeights, may_change_weights
from loadtests.trials.live_page import LivePage
from loadtests.trials.progress import Status
from loadtests.trials.run import Orchestrator
from servers.splitter.admin import SplitterError
from tests.fakes.patience import wait_for
from tests.loadtests.trials.test_live_page import HERE
from tests.loadtests.trials.test_run import experiment

TOKEN = "a-token-of-the-user"


def asked(page: str, weights: Mapping[str, Any], token: str) -> dict[str, Any]:
    """The answer to a program that asks for weights."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"{page}weights", json.dumps({"weights": weights}).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            found: dict[str, Any] = json.load(answer)
    except urllib.error.HTTPError as refusal:
        found = json.load(refusal)
    return found


def test_weights_are_changed_only_where_the_splitter_goes_by_them() -> None:
    assert may_change_weights(experiment(traffic={"design": "split"}))
    assert not may_change_weights(experiment())


@pytest.mark.parametrize("given", ["", TOKEN])
def test_the_token_for_changes_is_shown_where_it_was_made_and_stands_in_no_file(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, given)
    status = Status(phase="traffic")
    page = LivePage(HERE, status, weights=True)
    page.open(tmp_path)
    try:
        wait_for(lambda: status.page)
        assert bool(status.page_token) == (not given)
        assert status.page_token in status.page_line
        assert "token" not in status.page
        asking = threading.Thread(target=asked, args=(status.page, {"eager": 7}, given or status.page_token))
        asking.start()
        wait_for(lambda: not page._requests.empty())
        request = page.asked()
        assert request is not None
        assert request.weights == {"eager": 7}
        page.answer(request, {"weights": {"eager": 7}})
        asking.join()
    finally:
        page.close({"complete": True})
    written = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert (given or status.page_token) not in written


def test_what_nobody_waits_for_any_more_is_not_carried_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtests.trials.live_page._LATE_S", 0.0)
    status = Status(phase="traffic")
    page = LivePage(HERE, status, weights=True)
    page.open(tmp_path)
    told: list[dict[str, Any]] = []
    try:
        wait_for(lambda: status.page)
        asking = threading.Thread(target=lambda: told.append(asked(status.page, {"eager": 7}, status.page_token)))
        asking.start()
        wait_for(lambda: not page._requests.empty())
        assert page.asked() is None
        asking.join()
    finally:
        page.close({"complete": True})
    assert told == [{"error": "The run was busy, and nothing was changed: ask again."}]


class DeafSplitter:
    """It says what its weights are, and takes no others."""

    def weights(self) -> dict[str, int]:
        return {"eager": 1, "naive": 1}

    def after(self, weights: Mapping[str, int]) -> dict[str, int]:
        return {**self.weights(), **weights}

    def reweight(self, weights: Mapping[str, int]) -> None:
        raise SplitterError("no split answers")


def test_a_splitter_that_does_not_take_a_change_leaves_the_old_weights_in_the_journal(tmp_path: Path) -> None:
    requests = [SimpleNamespace(number=1, weights={"naive": 9})]
    answers: list[Any] = []
    page: Any = SimpleNamespace(
        asked=lambda: requests.pop() if requests else None, answer=lambda request, answer: answers.append(answer)
    )
    trial: Any = SimpleNamespace(
        splitter=DeafSplitter(), context=SimpleNamespace(number=1, facts=SimpleNamespace(start_ns=5), status=Status())
    )
    AskedWeights(tmp_path, page, experiment(traffic={"design": "split"})).poll(trial)
    assert answers == [{"error": "no split answers"}]
    assert [(one.action, one.weights["naive"], one.done_ns) for one in read_weights(tmp_path)] == [
        ("start", 1, None),
        ("set", 9, None),
        ("set", 1, None),
    ]
    assert read_weights(tmp_path)[-1].why == "it was not taken: no split answers"


def test_an_orchestrator_without_a_page_asks_nobody(tmp_path: Path) -> None:
    assert Orchestrator(experiment(), out=tmp_path)._asked is None
