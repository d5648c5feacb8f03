"""Parts of a ramp of users' traffic are killed at random moments: `KILLS` times; `SEED` draws them.

Whatever dies, the candidate never has more than the last decision allows, no user's answer is lost from the records,
and the report tells what happened.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from analysis.records.weight_journal import WeightChange, read_weights
from servers.splitter.admin import SplitterError
from tests.e2e.test_users_ramp import LOOSE, ended, journal, more_answers, nothing_is_lost, run_dir, wait_for_action
from tests.fakes.browser import Browser
from tests.fakes.summary_schema import hold
from tests.fakes.users_house import UsersHouse

KILLS = int(os.environ.get("KILLS", "2"))
SEED = int(os.environ.get("SEED", "42"))
STEPS = ["--set", "ramp.steps=[5,50,100]", "--set", "ramp.step_s=4", "--set", "ramp.most_step_s=90"]
LATEST_S = 20.0  # after the start of the ramp: it is at 50 % by then

pytestmark = [pytest.mark.slow, pytest.mark.timeout(700)]


class Guard:
    """Looks again and again whether the candidate has more than the last decision allows; `broken` says where."""

    def __init__(self, house: UsersHouse) -> None:
        self._house, self._candidate = house, house.arms[1]
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look_on, daemon=True)
        self.looks = 0
        self.broken: list[str] = []

    def __enter__(self) -> Guard:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(10)

    def _look_on(self) -> None:
        while not self._stopped.wait(0.05):
            allowed = self._allowed()
            try:
                weights = self._house.weights()
            except SplitterError:
                continue  # it is dead just now
            share = weights[self._candidate] / sum(weights.values())
            self.looks += 1
            # A decision that came meanwhile may be in force already.
            if share > max(allowed, self._allowed()) + 1e-9:
                self.broken.append(f"{share:.2%} where {allowed:.2%} were allowed")

    def _allowed(self) -> float:
        changes: tuple[WeightChange, ...] = ()
        for folder in (self._house.folder / "out").glob("*-demo"):
            changes = read_weights(folder)
        shares = [0.0]
        for change in changes:
            if change.done_ns is not None:
                shares.clear()  # what was before is over
            shares.append(change.weights[self._candidate] / sum(change.weights.values()))
        return max(shares)


class Ramping:
    """A ramp in a house, with its page open in a browser, and who can be killed."""

    def __init__(self, folder: Path) -> None:
        self._stack = ExitStack()
        self.folder = folder
        self.house = UsersHouse(folder)

    def __enter__(self) -> Ramping:
        with ExitStack() as stack:
            stack.enter_context(self.house)
            self.guard = stack.enter_context(Guard(self.house))
            self.ramp = self._start("demo", "--admin", f"127.0.0.1:{self.house.ports['admin']}", "--out", "out")
            stack.callback(lambda: self.ramp.kill())
            wait_for_action(self.house, "start")
            self.browser = stack.enter_context(Browser(self.folder))
            self.browser.open(self._page())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self, *arguments: str) -> subprocess.Popen[str]:
        candidate = ["--set", f"ramp.candidate={self.house.arms[1]}", "--set", "traffic.block_s=1"]
        return self.house.ramp(*arguments, "--page", "127.0.0.1:0", *candidate, *STEPS, *LOOSE)

    def _page(self) -> str:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if found := re.search(r"http://127\.0\.0\.1:\d+/\S*", (self.folder / "ramp.log").read_text()):
                return found[0]
            time.sleep(0.1)
        raise AssertionError((self.folder / "ramp.log").read_text())

    def controller(self) -> set[str]:
        """Its records and the weights stay, and the next controller goes on."""
        self.ramp.kill()
        self.ramp.wait()
        more_answers(self.house)
        self.ramp = self.house.ramp("--resume", str(run_dir(self.house)), "--page", "off")
        return {"promoted", "hold"}

    def splitter(self) -> set[str]:
        """It has the weights of its configuration until it is told again."""
        os.kill(self.house.envoy_pid(), signal.SIGKILL)
        self.house.children["split"].wait(20)
        self.house.start_split()
        return {"promoted", "hold", "rollback"}

    def candidate(self) -> set[str]:
        self.house.kill("compiled-padded")
        return {"rollback"}

    def control(self) -> set[str]:
        """Somebody starts it again. A control that died is none to pass by."""
        self.house.kill("eager")
        self.house.start_arm("eager")
        return {"hold"}

    def page(self) -> set[str]:
        os.kill(child_named(self.ramp.pid, "loadtests.page"), signal.SIGKILL)
        return {"promoted", "hold"}

    def close_browser(self) -> set[str]:
        self.browser.kill()
        return {"promoted", "hold"}


WHO: dict[str, Callable[[Ramping], set[str]]] = {
    "controller": Ramping.controller,
    "splitter": Ramping.splitter,
    "candidate": Ramping.candidate,
    "control": Ramping.control,
    "page": Ramping.page,
    "browser": Ramping.close_browser,
}


def child_named(pid: int, module: str) -> int:
    """The child of the process that runs the module."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            if module in Path(f"/proc/{child}/cmdline").read_text():
                return int(child)
    raise AssertionError(f"{pid} has no {module}")


def plans() -> Iterator[tuple[str, float]]:
    """Who is killed, and how many seconds after the start: everybody in turn, in an order that is drawn."""
    rng = random.Random(SEED)
    order: list[str] = []
    for _ in range(KILLS):
        order = order or rng.sample(sorted(WHO), len(WHO))
        yield order.pop(), round(rng.uniform(0.0, LATEST_S), 1)


@contextmanager
def told(ramping: Ramping) -> Iterator[None]:
    """A failure tells what the ramp said."""
    try:
        yield
    except BaseException:
        print((ramping.folder / "ramp.log").read_text()[-3000:])
        raise


@pytest.mark.parametrize(("who", "after_s"), list(plans()))
def test_whoever_is_killed_the_candidate_never_has_more_than_was_decided(
    tmp_path: Path, who: str, after_s: float
) -> None:
    with Ramping(tmp_path) as ramping, told(ramping):
        house = ramping.house
        time.sleep(after_s)
        at = journal(house)[-1]
        killed_ns = time.time_ns()
        allowed = WHO[who](ramping)
        code, line = ended(ramping.ramp, timeout_s=600.0)
        actions = [row["action"] for row in journal(house)]
        outcome, last = actions[-1], journal(house)[-1]
        summary: dict[str, Any] = json.loads((run_dir(house) / "summary.json").read_text())
        print(
            f"\n{who} killed {after_s:g} s after the start, at {at['weights']}: {' '.join(actions)}, {code}", flush=True
        )
        assert outcome in allowed, (line, actions)
        assert not ramping.guard.broken
        assert ramping.guard.looks > 50
        assert (code == 99) == (outcome == "rollback")
        assert house.weights() == last["weights"]
        if who == "candidate":
            took_s = (last["done_ns"] - killed_ns) / 1e9
            print(f"back at 0 % {took_s:.2f} s after the kill", flush=True)
            assert took_s < 3.0  # of it a second until a replica is called dead
        if who == "controller":
            assert "resume" in actions
        if who == "control":
            # The fake one is back within a second or so: it is missed, or known by its new start.
            assert re.search(r"eager-0 (answers again|has started anew)", (tmp_path / "ramp.log").read_text())
        if who == "candidate":
            assert summary["overall"] == "FAIL"
        if who not in ("candidate", "splitter", "control"):
            assert {answer.status for answer in house.answers} == {"OK"}
        hold(summary, str(run_dir(house)))
        assert summary["ramp"]["outcome"] == outcome
        assert (run_dir(house) / "report.html").stat().st_size > 10_000
        # Envoy keeps lines for a fifth of a second.
        nothing_is_lost(house, killed_s=0.5 if who == "splitter" else 0.0)
