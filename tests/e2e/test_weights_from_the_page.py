from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from analysis.records.run_records import read_run
from analysis.records.weight_journal import read_weights
from loadtests.trials.live_page import LivePage
from loadtests.trials.progress import Status
from loadtests.trials.run import RunOutcome
from tests.fakes.patience import wait_for
from tests.loadtests.trials.test_asked_weights import asked
from tests.loadtests.trials.test_live_page import HERE
from tests.loadtests.trials.test_run import experiment, run


def test_weights_that_somebody_asks_for_are_in_the_records_and_the_traffic(tmp_path: Path) -> None:
    what = experiment(traffic={"design": "split", "duration_s": 5, "rate": 25}, trials={"count": 2})
    status = Status()
    page = LivePage(HERE, status, weights=True)
    ended: list[RunOutcome] = []
    answers: list[dict[str, Any]] = []

    def watch() -> None:
        wait_for(lambda: status.page)
        answers.append(asked(status.page, {"naive": 0}, status.page_token))
        wait_for(lambda: status.load.t_s > 2.0, 60.0)
        answers.append(asked(status.page, {"naive": 0}, status.page_token[:-1] + "!"))
        answers.append(asked(status.page, {"naive": 0}, status.page_token))
        answers.append(asked(status.page, {"naive": 0, "eager": 0}, status.page_token))
        answers.append(asked(status.page, {"nobody": 3}, status.page_token))
        answers.append(asked(status.page, {"naive": -1}, status.page_token))

    watching = threading.Thread(target=watch)
    watching.start()
    ended.append(run(what, tmp_path, page=page, status=status)[0])
    watching.join()
    page.close({"complete": True})
    (outcome,) = ended
    assert outcome.complete, outcome.error
    early, wrong, taken, none, unknown, negative = answers
    assert early == {"error": "Weights are changed while traffic flows, and none does now."}
    assert wrong == {"error": "That is not the token: the terminal of the run shows it."}
    assert taken == {"weights": {"eager": 1, "naive": 0}}
    assert none["error"].startswith("every arm would have weight 0: give at least one arm")
    assert unknown["error"].startswith('arm "nobody" is unknown')
    assert negative["error"].startswith('weight of arm "naive" is -1: give a whole number from 0')

    start, change, again = read_weights(outcome.run_dir)
    assert [(one.trial, one.action, dict(one.weights)) for one in (start, change, again)] == [
        (1, "start", {"eager": 1, "naive": 1}),
        (1, "set", {"eager": 1, "naive": 0}),
        (2, "start", {"eager": 1, "naive": 1}),
    ]
    assert change.step is None
    assert change.why == "asked for on the live page"
    assert change.done_ns is not None
    assert change.at_ns <= change.done_ns
    sent = [(row["sent_ns"], row["arm"]) for row in read_run(outcome.run_dir).requests.to_pylist()]
    assert {arm for at_ns, arm in sent if change.done_ns + 10**8 < at_ns < again.at_ns} == {"eager"}
    # Each trial begins with the experiment's weights.
    assert {arm for at_ns, arm in sent if at_ns > again.at_ns} == {"eager", "naive"}
    assert any("weights from now on: eager 1, naive 0" in note for note in status.notes)
