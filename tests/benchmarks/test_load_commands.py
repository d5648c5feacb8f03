from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import generator, splitter
from benchmarks.contest import Cores, NullProcess
from benchmarks.generator import Goal, blast


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["open", "--contestants", "nobody"], '--contestants "nobody" is unknown'),
        (["open", "--contestants", ","], "--contestants is empty"),
        (["open", "--rates", "fast"], '--rates "fast" is no list of rates'),
        (["open", "--rates", "0"], "is no list of rates"),
        (["open", "--repeats", "0"], "--repeats is 0"),
        (["open", "--window", "0"], "--window is 0"),
    ],
)
def test_bad_usage_of_the_generator_benchmark_is_one_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generator.main(arguments) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_a_folder_that_is_there_is_not_written_into(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generator.main(["server", "--keep", str(tmp_path)]) == 2
    assert "give a new folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--ways", "pigeon"], '--ways "pigeon" is unknown'),
        (["sideways"], 'section "sideways" is unknown'),
        (["--repeats", "0"], "--repeats is 0"),
    ],
)
def test_bad_usage_of_the_splitter_benchmark_is_one_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert splitter.main(arguments) == 2
    assert says in capsys.readouterr().err


def test_a_goal_may_be_a_floor_or_a_ceiling() -> None:
    assert Goal(what="lag", value=4.9, limit=5.0).reached
    assert not Goal(what="lag", value=5.1, limit=5.0).reached
    assert Goal(what="delivered", value=0.995, limit=0.995, at_least=True).to_dict()["goal"] == "≥ 0.995"
    assert not Goal(what="delivered", value=0.99, limit=0.995, at_least=True).reached


def test_the_null_server_answers_thousands_a_second(tmp_path: Path) -> None:
    with NullProcess((), folder=tmp_path, cores=Cores(server=None, load=None)) as server:
        assert blast(server.address, seconds=0.5) > 2000


def test_the_whole_of_a_small_benchmark_is_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    code = generator.main(["open", "--contestants", "bare", "--rates", "50", "--window", "1", "--repeats", "2"])
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert out.count("\n") == 1
    assert code == 0
    assert result["ok"]
    (row,) = [row for row in result["results"] if row["section"] == "open"]
    assert row["contestant"] == "bare"
    assert row["p99_own_ms"]["n"] == 2
    assert "50 requests/s" in err
