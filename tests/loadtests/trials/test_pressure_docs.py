"""The example in docs/pressure.md does what it says."""

import json
import re
from pathlib import Path

import pytest

from analysis.records.schemas import BED
from analysis.records.tables import RecordWriter
from tests.fakes.runs import FakeArm, FakeRun, write_run

PAGE = Path(__file__).resolve().parents[3] / "docs" / "pressure.md"


def test_the_example_joins_allocator_retries_to_the_phases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "runs" / "ID", FakeRun(arms=[FakeArm(name="a"), FakeArm(name="b")])) / "trial-01"
    facts = json.loads((folder / "trial.json").read_text())
    row = {"kind": "memory", "share": 0.3, "start_ns": 10, "end_ns": 30}
    (folder / "trial.json").write_text(json.dumps({**facts, "pressure": [row]}))
    with RecordWriter(folder / "bed-arms.arrow", BED) as writer:
        for at_ns, retries in ((5, 0), (10, 1), (30, 4), (40, 9)):
            place = {"trial": 1, "host": "run", "at_ns": at_ns, "kind": "allocator", "name": "a-0", "arm": "a"}
            writer.append({**place, "allocator_retries": retries})
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, str(PAGE), "exec"), {})
    assert capsys.readouterr().out == "memory 0.3 a-0 retries: 3\n"
