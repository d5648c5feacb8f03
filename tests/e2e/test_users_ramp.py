"""A ramp of users' traffic from the outside: real Envoy, real processes, users who send all the time, paced arms."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.patience import PATIENCE_S, wait_for
from tests.fakes.users_house import UsersHouse
from tests.fakes.whole_run import requests, summary_of

STEPS = ["--set", "ramp.steps=[50,100]", "--set", "ramp.step_s=3", "--set", "ramp.most_step_s=240"]
LOOSE = ["--set", "ramp.step_margin=1.0", "--set", "gates.margin=1.0", "--set", "gates.cold_s=1"]
# Of the slowest 1 % a busy machine may make one bunch, which leaves an objective for them open for minutes.
LOOSE += ["--set", "slo={p50_ttft_ms=2000,p50_e2e_ms=6000}"]


@pytest.fixture
def house(tmp_path: Path) -> Iterator[UsersHouse]:
    with UsersHouse(tmp_path) as house:
        yield house


def started(house: UsersHouse, *more: str) -> subprocess.Popen[str]:
    """A ramp of the house's candidate."""
    admin = f"127.0.0.1:{house.ports['admin']}"
    candidate = ["--set", f"ramp.candidate={house.arms[1]}", "--set", "traffic.block_s=1"]
    return house.ramp("demo", "--admin", admin, "--out", "out", "--page", "off", *candidate, *STEPS, *LOOSE, *more)


def ended(ramp: subprocess.Popen[str], timeout_s: float = 280.0) -> tuple[int, dict[str, Any]]:
    """Its exit code and its last line."""
    out, _ = ramp.communicate(timeout=timeout_s)
    return ramp.returncode, json.loads(out.splitlines()[-1])


def run_dir(house: UsersHouse) -> Path:
    """The only run directory."""
    (path,) = (house.folder / "out").glob("*-demo")
    return path


def journal(house: UsersHouse) -> list[dict[str, Any]]:
    """What was decided, each decision once."""
    path = run_dir(house) / "weights.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return list({row["at_ns"]: row for row in rows}.values())


def wait_for_action(house: UsersHouse, action: str) -> None:
    def is_done() -> bool:
        rows = journal(house) if list((house.folder / "out").glob("*-demo")) else []
        return any(row["action"] == action and row["done_ns"] is not None for row in rows)

    wait_for(is_done, otherwise=lambda: (house.folder / "ramp.log").read_text()[-2000:])


def more_answers(house: UsersHouse, count: int = 40) -> None:
    """So many users were answered from now on."""
    enough = len(house.answers) + count
    wait_for(lambda: len(house.answers) >= enough)


def nothing_is_lost(house: UsersHouse) -> None:
    """Every request that was sent after the first record began and answered before the last one did is a record, once,
    of the arm that answered."""
    rows = requests(run_dir(house))
    arms = {row["session_id"]: row["arm"] for row in rows}
    assert len({row["request_id"] for row in rows}) == len(arms) == len(rows)
    first_s, last_s = min(row["sent_ns"] for row in rows) / 1e9, max(row["sent_ns"] for row in rows) / 1e9
    answers = [item for item in house.answers if first_s < item.sent_s and item.at_s < last_s and item.status == "OK"]
    assert len(answers) > 100
    assert [item for item in answers if item.session not in arms] == []
    assert [item for item in answers if arms.get(item.session, item.arm) != item.arm] == []


def test_a_candidate_that_compiles_long_is_taken_back_and_the_requests_that_wait_are_hurt(tmp_path: Path) -> None:
    compiles_long = {"compiled-naive": ("--stall-s", "10")}
    with UsersHouse(tmp_path, arms=("eager", "compiled-naive"), flags=compiles_long) as house:
        code, line = ended(started(house, "--set", "ramp.stall_limit_s=1"))
        assert (code, line["verdict"]) == (99, "FAIL")
        assert house.weights() == {"eager": 10_000, "compiled-naive": 0}
        summary = summary_of(run_dir(house))
        assert summary["ramp"]["outcome"] == "rollback"
        assert 0 < summary["ramp"]["hurt"] <= summary["ramp"]["exposed"]
        (account,) = [json.loads(path.read_text()) for path in run_dir(house).glob("trial-01/generator-0.json")]
        assert account["complete"]
        assert account["started"] == account["finished"]
        last, worst = journal(house)[-1], max(summary["events"], key=lambda event: event["end_ns"])
        assert last["done_ns"] < worst["end_ns"], "it did not wait for the end of the compile"
        # Users give up by themselves; no stream was broken off.
        assert {answer.status for answer in house.answers} <= {"OK", "DEADLINE_EXCEEDED"}


def test_a_killed_controller_leaves_the_weights_and_the_next_one_goes_on(house: UsersHouse) -> None:
    ramp = started(house)
    wait_for_action(house, "start")
    more_answers(house)
    ramp.send_signal(signal.SIGKILL)
    ramp.wait()
    left = house.weights()
    more_answers(house)
    assert house.weights() == left
    assert journal(house)[-1]["weights"] == left
    code, line = ended(house.ramp("--resume", str(run_dir(house)), "--page", "off"))
    assert code in (0, 3), line
    actions = [row["action"] for row in journal(house)]
    assert actions[-2:] == ["advance", "promoted"]
    assert "resume" in actions
    assert {answer.status for answer in house.answers} == {"OK"}
    nothing_is_lost(house)
    ramp_found = summary_of(run_dir(house))["ramp"]
    assert (ramp_found["outcome"], ramp_found["hurt"]) == ("promoted", 0)
    again = house.ramp("--resume", str(run_dir(house)), "--page", "off")
    assert again.communicate(timeout=PATIENCE_S) is not None
    assert again.returncode == 2, "a ramp that has ended is not gone on with"


def test_weights_that_somebody_else_sets_end_the_ramp_and_stay(house: UsersHouse) -> None:
    ramp = started(house, "--set", "ramp.step_s=30")
    wait_for_action(house, "start")
    by_hand = ["--admin", f"127.0.0.1:{house.ports['admin']}", "--set-weights", "eager=9,compiled-padded=1"]
    assert house.command("split", *by_hand).returncode == 0
    code, _ = ended(ramp)
    assert code == 3
    last = journal(house)[-1]
    assert (last["action"], last["weights"]) == ("set by hand", {"eager": 9, "compiled-padded": 1})
    assert house.weights() == {"eager": 9, "compiled-padded": 1}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["--admin", "127.0.0.1:1"], "127.0.0.1:1"),
        (["--set", "ramp.load=none"], "users"),
    ],
)
def test_a_ramp_without_a_split_is_refused_in_one_line(tmp_path: Path, settings: list[str], words: str) -> None:
    house = UsersHouse(tmp_path)
    done = house.command("ramp", "demo", "--set", "ramp.candidate=compiled-padded", *settings)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_split_that_gives_the_candidate_traffic_from_its_start_is_refused(tmp_path: Path) -> None:
    with UsersHouse(tmp_path, arms=("compiled-padded", "eager")) as house:  # all to the first
        admin = f"127.0.0.1:{house.ports['admin']}"
        done = house.command("ramp", "demo", "--admin", admin, "--set", "ramp.candidate=compiled-padded")
        assert done.returncode == 2
        assert "--weight compiled-padded=0" in done.stderr
