"""One load process against one null server, each on a core of its own: start, watch, stop, and what both sides saw."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, cast

import numpy as np
import pyarrow as pa

from benchmarks.observed import Emitted, Observed
from loadtests.generator.trial_config import TrialConfig
from loadtests.traffic.schedule import SCHEDULE, Schedule
from loadtests.trials.load import locust_command
from servers.clock import ANCHOR_NS, anchored_environment
from servers.processes import Child

# Children find the packages here where nothing is installed.
ROOT: Final = Path(__file__).resolve().parent.parent
CONTESTANTS: Final = ("bare", "tailgate")
_PATIENCE_S: Final = 60.0
AHEAD_S: Final = 6.0


class ContestError(RuntimeError):
    """A process did not come up, did not stop or saw nothing; the message names its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """Where the processes run; None: wherever the kernel puts them."""

    server: int | None
    load: int | None

    @classmethod
    def of_this_machine(cls) -> Cores:
        """The last usable core for the server, the first for the load; nothing where there is one or no choice."""
        usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        if len(usable) < 2:
            return cls(server=None, load=None)
        return cls(server=usable[-1], load=usable[0])


def settle(pid: int, core: int | None) -> None:
    """A process that has one thread so far runs on `core`, and so do all threads to come."""
    if core is not None:
        os.sched_setaffinity(pid, {core})


def child_environment() -> dict[str, str]:
    """This process's environment, with its clock and the path of the packages."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **anchored_environment()}


class Process(Child):
    """A child on one core, with what it says in a log. It ends with its block."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        folder: Path,
        core: int | None,
        commands: bool = False,
    ) -> None:
        log = folder / f"{name}.log"
        super().__init__(
            name,
            command,
            log_path=log,
            environment=child_environment(),
            folder=folder,
            commands=commands,
            parse=json.loads if commands else None,
        )
        settle(self.pid, core)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def cpu_s(self) -> float:
        """Processor seconds that it and its threads have used, or nan where the system does not say."""
        return process_cpu_s(self.pid)

    def check(self) -> None:
        """ContestError if it has ended."""
        code = self.poll()
        if code is not None:
            raise ContestError(f"{self.name} ended with {code}: {self.log_tail()}")

    def finish(self, timeout_s: float) -> None:
        """It has ended by itself, or by the signal that it was sent before."""
        if self.wait(timeout_s) is None:
            raise ContestError(f"{self.name} did not end within {timeout_s:g} s: {self.log_tail()}")


class NullProcess(Process):
    """benchmarks.null_server in a process of its own."""

    def __init__(self, options: Sequence[str], *, folder: Path, cores: Cores) -> None:
        command = [sys.executable, "-m", "benchmarks.null_server", *options]
        super().__init__("null-server", command, folder=folder, core=cores.server, commands=True)
        self.address = f"127.0.0.1:{self._answer()['port']}"

    def request(self, command: str) -> dict[str, Any]:
        """The answer to one command."""
        self.command(command)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        while not (messages := self.hear(1.0)[0]):
            self.check()
        return cast("dict[str, Any]", messages[0])


def process_cpu_s(pid: int) -> float:
    """Processor seconds that the living threads of a process have used, from /proc; nan where there is none."""
    total_ns = 0
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            total_ns += int((task / "schedstat").read_text().split()[0])
    except (OSError, IndexError, ValueError):
        return float("nan")
    return total_ns / 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a load process is given to do: `streams` that start over `ramp_s`, or Poisson arrivals at `rate`.

    Each request asks for `tokens`. `server`: flags of the null server. The window that counts begins `settle_s` after
    all of it runs.
    """

    streams: int = 0
    ramp_s: float = 2.0
    rate: float = 0.0
    tokens: int = 1
    seed: int = 0
    server: tuple[str, ...] = ()
    window_s: float = 10.0
    settle_s: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run: what the load process saw, what was sent, the window that counts, and the use of its core in it."""

    seen: Observed
    sent: Emitted
    start_ns: int
    end_ns: int
    load_core: float
    server: dict[str, Any]


def run(contestant: str, work: Work, *, folder: Path, cores: Cores) -> Outcome:
    """Run it once in `folder`."""
    folder.mkdir(parents=True)
    out = folder / "requests-0.arrow"
    with NullProcess(work.server, folder=folder, cores=cores) as server:
        write_schedule(work, folder / "schedule.arrow")
        TrialConfig(targets={"*": server.address}, timeout_s=600.0).write(folder / "generator.json")
        with Process(contestant, _command(contestant, folder), folder=folder, core=cores.load) as load:
            _wait_for_load(server, load, work.streams)
            time.sleep(work.settle_s)
            before = time.monotonic_ns(), load.cpu_s()
            time.sleep(work.window_s)
            after = time.monotonic_ns(), load.cpu_s()
            load.finish(_PATIENCE_S)
        report = server.request(f"report {folder / 'server.npz'}")
    if not out.exists():
        raise ContestError(f"{contestant} left nothing: {load.log_tail()}")
    return Outcome(
        seen=Observed.of_records(out),
        sent=Emitted.read(folder / "server.npz"),
        start_ns=ANCHOR_NS + before[0],
        end_ns=ANCHOR_NS + after[0],
        load_core=(after[1] - before[1]) / (after[0] - before[0]) * 1e9,
        server=report,
    )


def _wait_for_load(server: NullProcess, load: Process, streams: int) -> None:
    """All streams are on, or the first request has come; a load process that never gets there is measured as it is."""
    deadline = time.monotonic() + _PATIENCE_S
    most, since = 0, time.monotonic()
    while time.monotonic() < deadline:
        status = server.request("status")
        if status["streaming"] >= streams if streams else status["requests"]:
            return
        if status["streaming"] > most:
            most, since = status["streaming"], time.monotonic()
        if most and time.monotonic() - since > 5.0:
            return
        load.check()
        time.sleep(0.05)
    raise ContestError(f"{load.name} sent nothing within {_PATIENCE_S:g} s: {load.log_tail()}")


def _command(contestant: str, folder: Path) -> list[str]:
    """tailgate's client by itself, or a real Locust process with loadtests/chat.py, on the schedule in the folder."""
    if contestant == "bare":
        return [sys.executable, "-m", "benchmarks.bare_client", str(folder)]
    return locust_command(
        schedule=folder / "schedule.arrow", trial_config=folder / "generator.json", records=folder, workers=1
    )


def write_schedule(work: Work, path: Path) -> None:
    """Write the work as a schedule: streams start evenly over the ramp, open-loop requests by a Poisson process."""
    rng = np.random.default_rng(work.seed)
    # tailgate encodes requests seconds ahead: they must not run out before the window ends, or it would have less to do
    seconds = work.settle_s + work.window_s + AHEAD_S
    if work.streams:
        offsets = np.linspace(0, work.ramp_s, work.streams, endpoint=False)
    else:
        offsets = np.cumsum(rng.exponential(1 / work.rate, int(work.rate * seconds * 1.2) + 100))
        offsets = offsets[offsets < seconds]
    count = len(offsets)
    table = pa.table(
        {
            "index": np.arange(count),
            "offset_ns": (offsets * 1e9).astype(np.int64),
            "session_id": [f"1-{number}" for number in range(count)],
            "turn": np.zeros(count, np.int32),
            "prompt_tokens": np.full(count, 16, np.int32),
            "max_tokens": np.full(count, work.tokens, np.int32),
            "prompt_seed": rng.integers(0, 2**62, count),
            "arm": [None] * count,
            "phase": ["measure"] * count,
            "prefix_seed": rng.integers(0, 2**62, count),
        },
        schema=SCHEDULE,
    )
    Schedule(
        table=table, design="split", arms=(), trial=1, seed=work.seed, duration_s=seconds, block_s=30.0, dropped={}
    ).write(path)
