from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from analysis.looks.journal import JOURNAL, append
from loadtests.page import tails
from loadtests.trials import judge as judging
from loadtests.trials.judge import Judge


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Judge]:
    """One whose process looks at nothing: the tests write the journal."""
    monkeypatch.setattr(judging, "_COMMAND", (sys.executable, "-c", "import time; time.sleep(60)"))
    started = Judge(tmp_path)
    yield started
    started.stop()


def test_the_last_whole_look_counts(tmp_path: Path, judge: Judge) -> None:
    assert judge.last() is None
    append(tmp_path, {"look": 1})
    append(tmp_path, {"look": 2})
    assert judge.last() == {"look": 2}
    line = json.dumps({"look": 3})
    with (tmp_path / JOURNAL).open("a") as file:
        file.write(line[:5])
        file.flush()
        assert judge.last() == {"look": 2}
        file.write(line[5:] + "\n")
    assert judge.last() == {"look": 3}


def test_a_look_is_read_once_however_many_there_are(
    tmp_path: Path, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def parse(text: str) -> Any:
        read.append(text)
        return json.loads(text)

    monkeypatch.setattr(tails, "parse_json", parse)
    for number in range(300):
        append(tmp_path, {"look": number})
        assert judge.last() == {"look": number}
        assert judge.last() == {"look": number}
    assert len(read) == 300
