from __future__ import annotations

import json
import urllib.request
from pathlib import Path

from loadtests.trials.live_page import LivePage
from loadtests.trials.progress import Status
from tests.loadtests.trials.test_live_page import HERE
from tests.loadtests.trials.test_run import experiment, run


def test_a_run_serves_its_page_from_its_start(tmp_path: Path) -> None:
    status = Status()
    page = LivePage(HERE, status)
    outcome, _ = run(experiment(), tmp_path, page=page, status=status)
    assert outcome.complete, outcome.error
    assert status.page
    with urllib.request.urlopen(f"{status.page}events") as events:
        lines = iter(events)
        told = json.loads(next(line for line in lines if line.startswith(b"data: "))[6:])
        assert told["run"]["name"] == "small"
        assert [arm["name"] for arm in told["run"]["arms"]] == ["eager", "naive"]
        assert told["now"]["finished"] == told["now"]["planned"] > 0
        assert told["compiles"]["naive"]["serving"] == len(told["series"]["events"][1]) > 0
        assert told["series"]["load"][1][-1]["arms"]["eager"]["ttft_p99_ms"] > 0
        assert told["series"]["bed"][1]
        assert told["now"]["running"]
        page.close({"complete": True})
        (outcome.run_dir / "logs" / "page.log").read_text()
        last = [json.loads(line[6:]) for line in lines if line.startswith(b"data: ")][-1]
        assert last["last"]
        assert last["now"]["state"] == "ended"
    assert (outcome.run_dir / "logs" / "page.log").read_text() == ""
