"""Somebody else moves the weights of users' traffic, asks `tailgate provider` before each step, and takes them back."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from analysis.records.weight_journal import BY_OTHERS, read_weights
from servers.address import host_port
from tests.e2e.test_users_ramp import LOOSE, ended, more_answers, run_dir
from tests.fakes.controllers import asked
from tests.fakes.patience import wait_for
from tests.fakes.users_house import ROOT, UsersHouse


@contextmanager
def judged(house: UsersHouse) -> Iterator[subprocess.Popen[str]]:
    """A run that only looks on."""
    settings = ["--set", "users.moved_by=others", "--set", f"ramp.candidate={house.arms[1]}"]
    settings += ["--set", "traffic.block_s=1", "--at-most", "5m", *LOOSE]
    run = house.ramp("demo", "--admin", f"127.0.0.1:{house.ports['admin']}", "--out", "out", *settings)
    try:
        yield run
    finally:
        run.kill()
        run.wait()


class Provider:
    """`tailgate provider` beside the run, and the answers to who asks it as a controller does."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "loadtests.commands.main", "provider", str(folder), "--listen", "127.0.0.1:0"]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        self._port = host_port(json.loads(self._process.stdout.readline())["url"].removeprefix("http://"))[1]

    def __enter__(self) -> Provider:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def answer(self, question: str) -> dict[str, Any]:
        status, body = asked(self._port, "GET", f"/v1/judgement?for={question}&window=20s")
        assert status == 200, body
        found: dict[str, Any] = json.loads(body)
        return found

    def wait_for(self, question: str, verdict: str, *, timeout_s: float) -> dict[str, Any]:
        """The first answer with the verdict."""
        answers = [self.answer(question)]

        def is_given() -> bool:
            answers.append(self.answer(question))
            return bool(answers[-1]["verdict"] == verdict)

        wait_for(is_given, timeout_s, every_s=0.1, otherwise=lambda: answers[-1])
        return answers[-1]


def give(house: UsersHouse, share: int) -> None:
    """The candidate has `share` percent from now on, as its controller wants."""
    weights = f"{house.arms[0]}={100 - share},{house.arms[1]}={share}"
    done = house.command("split", "--admin", f"127.0.0.1:{house.ports['admin']}", "--set-weights", weights)
    assert done.returncode == 0, done.stderr


def wait_for_run(house: UsersHouse) -> None:
    wait_for(
        lambda: list((house.folder / "out").glob("*-demo/weights.jsonl")),
        otherwise=(house.folder / "ramp.log").read_text,
    )


def wait_for_weight(house: UsersHouse, share: int) -> None:
    """The run has seen it, and users have met the candidate with it."""
    wait_for(lambda: read_weights(run_dir(house))[-1].weights[house.arms[1]] == share)
    more_answers(house)


def test_a_candidate_that_dies_is_judged_to_fail_and_its_weights_stay(tmp_path: Path) -> None:
    with UsersHouse(tmp_path) as house, judged(house) as run:
        wait_for_run(house)
        with Provider(tmp_path / "out") as provider:
            assert provider.answer("step")["verdict"] == "INCONCLUSIVE", "the candidate has no traffic yet"
            give(house, 30)
            wait_for_weight(house, 30)
            house.kill("compiled-padded")
            provider.wait_for("promotion", "FAIL", timeout_s=60)  # the failures may be seen before the death
            wait_for(lambda: "compiled-padded-0 died" in provider.answer("promotion")["reasons"], every_s=0.1)
            assert house.weights() == {"eager": 70, "compiled-padded": 30}, "the provider moves nothing"
            run.send_signal(signal.SIGINT)
            ended(run, timeout_s=90)
        journal = read_weights(run_dir(house))
        assert [change.weights["compiled-padded"] for change in journal] == [0, 30]
        assert {change.action for change in journal} == {BY_OTHERS}
        assert (run_dir(house) / "report.html").exists()
