from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import generator, splitter
from benchmarks.contest import Cores, NullProcess
from benchmarks.generator import blast


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["open", "--contestants", "nobody"], '--contestants: "nobody" is unknown: use stock, bare, tailgate'),
        (["open", "--contestants", ","], "--contestants: the list is empty"),
        (["open", "--rates", "fast"], "--rates: 'fast' is no rate"),
        (["open", "--rates", "0"], "--rates: '0' is no rate"),
        (["open", "--repeats", "0"], "--repeats: '0' is no count"),
        (["open", "--window", "0"], "--window: '0' is no number: give a number from 1 to 600"),
        (["sideways"], '"sideways" is unknown: use server, streams'),
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
        (["--ways", "pigeon"], '--ways: "pigeon" is unknown'),
        (["sideways"], '"sideways" is unknown: use unary'),
        (["--repeats", "0"], "--repeats: '0' is no count"),
    ],
)
def test_bad_usage_of_the_splitter_benchmark_is_one_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert splitter.main(arguments) == 2
    assert says in capsys.readouterr().err


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
