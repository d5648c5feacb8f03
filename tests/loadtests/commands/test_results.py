"""Results of other load tools from the command line: a verdict for each tool with its reasons, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loadtests.commands.main import main
from tests.fakes import results
from tests.fakes.results import Sent, in_turn, traffic, write
from tests.fakes.summary_schema import hold

GATES = "\n[gates]\nquantiles = [0.9]\nmin_blocks = 18\n"
LIMITS = "[compare]\nneed_references = false\n[compare.limits]\np99_ttft_ms = 0.5\np99_e2e_ms = 0.5\n"


def aiperf(path: Path, requests: list[Sent], **phase: Any) -> Path:
    write(path.parent / f"{path.stem}.json", results.aiperf_summary(len(requests), **phase))
    return write(path.parent / f"{path.stem}.jsonl", results.aiperf(requests))


WRITERS: dict[str, Callable[[Path, list[Sent]], Path]] = {
    "vllm": lambda path, requests: write(path, results.vllm(requests)),
    "aiperf": aiperf,
    "guidellm": lambda path, requests: write(path, results.guidellm(requests)),
    "inference-perf": lambda path, requests: write(path, results.inference_perf(requests)),
}
CLOSED: dict[str, Callable[[Path, list[Sent]], Path]] = {
    "vllm": lambda path, requests: write(path, results.vllm(requests, request_rate="inf", max_concurrency=2)),
    "aiperf": lambda path, requests: aiperf(path, requests, type="concurrency", rate=None, concurrency=2),
    "guidellm": lambda path, requests: write(path, results.guidellm(requests, type_="concurrent", streams=2)),
    "inference-perf": lambda path, requests: write(path, results.inference_perf(requests)),
}


def judged(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, dict]:
    code = main(["analyze", *map(str, arguments), "--json"])
    out, err = capsys.readouterr()
    assert err == ""
    summary = json.loads(out)
    hold(summary, "the summary")
    return code, summary


def judged_with_gates(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> tuple[int, dict]:
    """The run's experiment is edited, as its reader would, and the folder judged again."""
    judged(capsys, *arguments, "--out", folder)
    experiment = folder / "experiment.toml"
    experiment.write_text(experiment.read_text() + GATES)
    return judged(capsys, *arguments, "--out", folder)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    code = main(list(map(str, arguments)))
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    return err


def checks(summary: dict) -> dict[str, dict]:
    return {row["check"]: row for row in summary["validity"]}


def gates(summary: dict) -> dict[str, dict]:
    return {row["gate"]: row for row in summary["gates"]}


@pytest.mark.parametrize("tool", ["vllm", "aiperf", "guidellm"])
def test_equal_servers_under_a_schedule_pass(tool: str, tmp_path: Path, capsys) -> None:
    files = [WRITERS[tool](tmp_path / f"{seed}.json", traffic(seed=seed)) for seed in (1, 2)]
    given = [f"{arm}={path}" for arm, path in zip(("eager", "compiled"), files, strict=True)]
    code, summary = judged_with_gates(capsys, tmp_path / "run", *given)
    assert (code, summary["overall"], summary["control"]) == (0, "PASS", "eager")
    assert summary["design"]["design"] == "separate"
    assert checks(summary)["open loop"]["ok"]
    assert "latency counts from" in checks(summary)["open loop"]["reason"]
    assert {row["method"] for row in summary["comparisons"]} == {"unpaired t over trials"}
    assert gates(summary)["recompiles"]["reason"].startswith("Seen from outside")


@pytest.mark.parametrize("tool", ["vllm", "aiperf", "guidellm"])
def test_much_slower_server_fails(tool: str, tmp_path: Path, capsys) -> None:
    files = [
        WRITERS[tool](tmp_path / f"{seed}.json", traffic(seed=seed, slower=slow)) for seed, slow in ((1, 1), (2, 2))
    ]
    given = [f"{arm}={path}" for arm, path in zip(("eager", "compiled"), files, strict=True)]
    code, summary = judged_with_gates(capsys, tmp_path / "run", *given)
    assert (code, summary["overall"]) == (99, "FAIL")
    assert gates(summary)["noninferiority p90_ttft"]["verdict"] == "FAIL"


def test_inference_perf_keeps_no_schedule_so_that_latency_stays_open(tmp_path: Path, capsys) -> None:
    files = [WRITERS["inference-perf"](tmp_path / f"{seed}.json", traffic(seed=seed)) for seed in (1, 2)]
    code, summary = judged_with_gates(capsys, tmp_path / "run", f"eager={files[0]}", f"compiled={files[1]}")
    assert (code, summary["overall"]) == (3, "INCONCLUSIVE")
    assert "keeps no schedule" in checks(summary)["open loop"]["reason"]
    assert gates(summary)["noninferiority p90_ttft"]["blocked_by"] == ["open loop"]
    assert gates(summary)["errors"]["verdict"] == "PASS"
    assert gates(summary)["recompiles"]["verdict"] == "PASS"


@pytest.mark.parametrize("tool", list(CLOSED))
def test_closed_loop_says_nothing_of_tails(tool: str, tmp_path: Path, capsys) -> None:
    files = [CLOSED[tool](tmp_path / f"{seed}.json", in_turn(traffic(seed=seed))) for seed in (1, 2)]
    arguments = [f"eager={files[0]}", f"compiled={files[1]}", "--slo", "p99_ttft_ms <= 5000"]
    code, summary = judged(capsys, *arguments, "--out", tmp_path / "run")
    assert (code, summary["overall"]) == (3, "INCONCLUSIVE")
    open_loop = checks(summary)["open loop"]
    assert not open_loop["ok"]
    if tool != "inference-perf":
        assert "kept 2 requests under way" in open_loop["reason"]
    for name in ("noninferiority p99_ttft", "noninferiority p99_e2e", "slo p99_ttft_ms"):
        assert "open loop" in gates(summary)[name]["blocked_by"]
        assert gates(summary)[name]["verdict"] == "INCONCLUSIVE"


def test_stalls_are_seen_from_outside_and_left_open_without_a_witness(tmp_path: Path, capsys) -> None:
    calm, stalled = traffic(seed=1), traffic(seed=2)
    for place in range(200, 2600, 200):
        until_s = stalled[place].due_s + 3.0
        held = [other for other in range(place, place + 40) if stalled[other].due_s < until_s]
        for rank, other in enumerate(held, start=1):
            due_s = stalled[other].due_s
            stalled[other] = Sent(due_s=due_s, first_s=until_s - due_s + 0.1 * rank, prompt_tokens=24)
    files = [write(tmp_path / f"{name}.json", results.vllm(own)) for name, own in (("a", calm), ("b", stalled))]
    code, summary = judged(capsys, f"eager={files[0]}", f"compiled={files[1]}", "--out", tmp_path / "run")
    # Its p95 is surely worse. How far p99 may reach, which lies in twelve pieces of luck, one run does not say.
    (p95,) = [
        row for row in summary["comparisons"] if (row["metric"], row["quantile"], row["phase"]) == ("ttft", 0.95, "all")
    ]
    assert p95["low"] > 1.5
    assert (code, summary["overall"]) == (3, "INCONCLUSIVE")
    assert "so little of the tail sets no limits" in gates(summary)["noninferiority p99_ttft"]["reason"]
    longest = gates(summary)["longest stall"]
    assert longest["verdict"] == "INCONCLUSIVE"
    assert "compiled, with no other arm to compare, stood still 12 times, up to 3.1 s" in longest["reason"]


def test_other_lengths_are_other_work(tmp_path: Path, capsys) -> None:
    files = [write(tmp_path / f"{tokens}.json", results.vllm(traffic(seed=tokens, tokens=tokens))) for tokens in (4, 6)]
    _, summary = judged(capsys, f"eager={files[0]}", f"compiled={files[1]}", "--out", tmp_path / "run")
    assert not checks(summary)["equal work"]["ok"]
    assert "6 to 4 answer tokens" in checks(summary)["equal work"]["reason"]


def test_folder_beside_the_first_file_is_the_same_every_time(tmp_path: Path, capsys) -> None:
    given = [
        f"{arm}={write(tmp_path / f'{arm}.json', results.vllm(traffic(90, seed=len(arm))))}" for arm in ("a", "bb")
    ]
    for _ in range(2):
        code = main(["analyze", *given])
        line = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (code, line["verdict"]) == (3, "INCONCLUSIVE")
    (folder,) = tmp_path.glob("results-*")
    assert line["run_dir"] == str(folder)
    assert (folder / "report.html").exists()
    assert main(["analyze", str(folder)]) == 3


def test_what_cannot_be_judged_is_refused(tmp_path: Path, capsys) -> None:
    one = write(tmp_path / "one.json", results.vllm(traffic(9)))
    summary = {key: value for key, value in results.vllm(traffic(9)).items() if key != "ttfts"}
    alone = write(tmp_path / "alone.json", summary)
    run = tmp_path / "run"
    run.mkdir()
    for words, said in (
        ([f"a={one}"], '"a" is the only arm: give the results of two'),
        ([f"a={one}", str(run)], "names no arm: give each result file as NAME=FILE"),
        ([f"a={one}", f"={one}"], "has no name of an arm in front"),
        ([f"a={one}", "b=none.json"], 'result file "none.json" does not exist'),
        ([f"a={one}", f"b={one}"], "hold the same run"),
        ([f"a={one}", f"b={alone}"], "run it again with --save-result --save-detailed"),
        ([f"a={one}", f"b={alone}", "--out", str(tmp_path)], "holds other files: give a new folder"),
        ([f"a={one}", f"b={alone}", "--allow-different", "x"], "--allow-different is for run directories"),
    ):
        assert said in refusal(capsys, "analyze", *words)


def compared(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, dict]:
    code = main(["compare", *map(str, arguments), "--json"])
    out, err = capsys.readouterr()
    assert err == ""
    return code, json.loads(out)


@pytest.mark.parametrize("tool", ["vllm", "aiperf", "guidellm"])
def test_two_results_are_compared_as_releases_are(tool: str, tmp_path: Path, capsys) -> None:
    limits = tmp_path / "limits.toml"
    limits.write_text(LIMITS)
    last_week, slow = (
        WRITERS[tool](tmp_path / f"{name}.json", traffic(seed=seed, slower=slower))
        for name, seed, slower in (("last-week", 1, 1.0), ("slow", 3, 2.0))
    )
    code, document = compared(capsys, last_week, slow, "--limits", limits)
    assert (code, document["overall"], [arm["name"] for arm in document["arms"]]) == (99, "FAIL", ["server"])
    assert (document["baseline"]["run_id"], document["candidate"]["run_id"]) == ("last-week", "slow")


def test_result_is_kept_as_a_baseline(tmp_path: Path, capsys) -> None:
    first, second = (write(tmp_path / f"{seed}.json", results.vllm(traffic(seed=seed))) for seed in (1, 2))
    assert compared(capsys, tmp_path / "baselines", first, "--accept")[0] == 3
    assert (tmp_path / "baselines" / "1.json").exists()
    _, document = compared(capsys, tmp_path / "baselines", second)
    assert document["baseline"]["run_id"] == "1"
    assert document["overall"] != "FAIL"


def test_closed_loop_or_another_load_is_not_compared(tmp_path: Path, capsys) -> None:
    one, other = (CLOSED["vllm"](tmp_path / f"{seed}.json", in_turn(traffic(seed=seed))) for seed in (1, 2))
    code, document = compared(capsys, one, other)
    assert (code, document["overall"]) == (3, "INCONCLUSIVE")
    assert all("open loop" in row["doubt"] for row in document["figures"] if row["verdict"] is not None)
    opened = write(tmp_path / "open.json", results.vllm(traffic(seed=3)))
    assert "traffic.request_rate inf → 4" in refusal(capsys, "compare", one, opened)
    assert "traffic.tool" in refusal(capsys, "compare", opened, WRITERS["guidellm"](tmp_path / "g.json", traffic()))
    alone = write(tmp_path / "alone.json", results.aiperf_summary(1))
    assert "give profile_export.jsonl" in refusal(capsys, "compare", opened, alone)
