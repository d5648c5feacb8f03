"""Result files as one run directory: a trial a file, the first arm the control, one tool and one load."""

from pathlib import Path

import pytest

from analysis.records.run_records import read_run
from analysis.records.tables import RecordError
from analysis.results.run_directory import write_run
from analysis.run.run import Run
from tests.fakes import results
from tests.fakes.results import traffic, write


@pytest.fixture
def files(tmp_path: Path) -> list[tuple[str, Path]]:
    made = [("eager", 1), ("compiled", 2), ("compiled", 3)]
    return [(arm, write(tmp_path / f"{seed}.json", results.vllm(traffic(30, seed=seed)))) for arm, seed in made]


def test_each_file_is_a_trial_of_its_arm(files: list[tuple[str, Path]], tmp_path: Path) -> None:
    write_run(tmp_path / "run", files)
    run = Run.of(read_run(tmp_path / "run"))
    assert (run.control, run.arms, run.separate) == ("eager", ("eager", "compiled"), True)
    assert [len(run.trials_of(arm)) for arm in run.arms] == [1, 2]
    assert run.planned == {"eager": 120, "compiled": 240}
    assert run.account("compiled").external["model_name"] == "tiny"
    assert run.reported_open_loop is True
    assert "took a request up" in run.pace
    assert not run.records.problems
    assert run.records.experiment["traffic"]["request_rate"] == 4.0


def test_one_closed_loop_makes_the_run_one(files: list[tuple[str, Path]], tmp_path: Path) -> None:
    closed = results.vllm(traffic(30, seed=4), max_concurrency=2, queue_times=None)
    more = [("eager", write(tmp_path / f"{seed}.json", {**closed, "date": str(seed)})) for seed in (8, 9)]
    write_run(tmp_path / "run", [*more, ("compiled", write(tmp_path / "7.json", closed))])
    assert Run.of(read_run(tmp_path / "run")).reported_open_loop is False


def test_problems_of_a_file_are_those_of_the_run(tmp_path: Path) -> None:
    named = [write(tmp_path / f"{seed}.json", results.vllm(traffic(9, seed=seed), completed=seed)) for seed in (1, 2)]
    write_run(tmp_path / "run", list(zip(("a", "b"), named, strict=True)))
    assert read_run(tmp_path / "run").problems == (
        "1.json says that 1 request completed, and 36 did by its lists",
        "2.json says that 2 requests completed, and 36 did by its lists",
    )


def test_other_load_tool_or_the_same_run_twice_is_refused(files: list[tuple[str, Path]], tmp_path: Path) -> None:
    faster = write(tmp_path / "faster.json", results.vllm(traffic(30), request_rate=8.0))
    for other, said in (
        (faster, r"are of other loads \(request_rate 4.0 and 8.0\): give runs of one load"),
        (write(tmp_path / "g.json", results.guidellm(traffic(30))), "which time requests in other ways"),
        (write(tmp_path / "copy.json", results.vllm(traffic(30, seed=1))), "hold the same run: give each run once"),
        (tmp_path / "none.json", "none.json cannot be read"),
    ):
        with pytest.raises(RecordError, match=said):
            write_run(tmp_path / "run", [files[0], ("other", other)])
    assert not (tmp_path / "run").exists()
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
