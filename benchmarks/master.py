"""What a run's master holds: shares handed out, clocks compared, and records of many workers taken.

    python benchmarks/master.py records shares --workers 1,10,100 --rates 1000,10000,50000 --repeats 3

The master is the one of `tailgate run` with `remote_workers`: Locust's, encrypted, with tailgate's messages. The
workers are Locust's and tailgate's too, all in one process beside it, and send to no arm
(benchmarks/recording_workers.py). Their clock is set ahead by a second, so that the error of the comparison is known.
`--rates` are records/s of all workers together. The window is all of --seconds but the first.

records: processor time of the master's threads in the window, as shares of a core (main: Locust and tailgate; channel:
ZeroMQ, which decrypts; disk: writing; waiting is none: the main one had no core), from a batch on a worker's disk to
its acknowledgement, an exchange's round trip and what it bounds, bytes. behind: how long after the end of the load the
last acknowledgement came. shares: from the assignment to the last part of the last share, for a schedule of --requests.

Progress and a table go to stderr, the last line on stdout is one JSON object. Exit code: 0 all measured, 1 something
failed, 2 bad usage.
"""

from __future__ import annotations

import json
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

if not __package__:  # as a script: the repository is importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from analysis.records.schemas import REQUESTS
from analysis.records.tables import read_table
from benchmarks.command import BenchmarkParser, command_line, count, end_in_order, one_of, run_command, several
from benchmarks.contest import ContestError, Cores, Process
from benchmarks.ledger import Ledger, Row
from loadtests.generator.trial_config import TrialConfig
from loadtests.traffic.drawing import build_schedule
from loadtests.traffic.settings import TrafficConfig
from loadtests.traffic.source import read_source
from loadtests.trials.environment import describe_environment
from loadtests.trials.load import locust_command
from loadtests.workers.channel_token import TOKEN_VARIABLE
from servers.clock import ANCHOR_NS, ANCHOR_VARIABLE, now_ns

SECTIONS: Final = ("records", "shares")
ARMS: Final = ("eager", "compiled")
AHEAD_NS: Final = 1_000_000_000  # the workers' clock
_COME_UP_S: Final = 60.0
_END_S: Final = 150.0  # the last records have 60 s


def parser() -> BenchmarkParser:
    """The command line."""
    parser = BenchmarkParser("master.py", __doc__, repeats=1)
    add = parser.add_argument
    add("sections", nargs="*", type=one_of(SECTIONS), metavar="SECTION", help="records, shares (default: both)")
    add("--workers", type=several(count, "1,10"), default=(1, 10, 100), help="how many (default 1,10,100)")
    add("--rates", type=several(count, "1000,10000"), default=(1000, 10_000), help="records/s (default 1000,10000)")
    add("--tokens", type=count, default=16, help="of the answer in a record (default %(default)s)")
    add("--seconds", type=count, default=8, help="of load in each run (default %(default)s)")
    add("--requests", type=several(count, "100000"), default=(1_000_000,), help="of a schedule (default 1000000)")
    return parser


class Trial:
    """A master and its workers, from the schedule to the last record, in `folder`, which must not be there."""

    def __init__(self, folder: Path, *, workers: int, rate: int, seconds: int, tokens: int, requests: int) -> None:
        self._folder, self._workers, self._rate, self._seconds = folder, workers, rate, seconds
        folder.mkdir()
        self.records = folder / "trial-01"
        self.records.mkdir()
        traffic = TrafficConfig(rate=requests / 60.0, duration_s=60.0, design="split")
        schedule = build_schedule(
            traffic, read_source(traffic, seed=0), arms=ARMS, seed=0, trial=1, max_prompt_tokens=2048,
            max_new_tokens=512,
        )  # fmt: skip
        schedule.write(folder / "schedule.arrow")
        TrialConfig(arms=ARMS, targets={"*": "127.0.0.1:1"}).write(folder / "generator.json")
        port = _free_port()
        variables, cores = {TOKEN_VARIABLE: secrets.token_hex(16)}, Cores(server=None, load=None)
        command = locust_command(
            schedule=folder / "schedule.arrow", trial_config=folder / "generator.json", records=self.records, workers=0,
            remote_workers=workers, master=("127.0.0.1", port), wait_s=_COME_UP_S,
        )  # fmt: skip
        self.master = Process("master", command, folder=folder, cores=cores, core=None, variables=variables)
        command = [sys.executable, "-m", "benchmarks.recording_workers", "--master-port", str(port)]
        command += ["--workers", str(workers), "--rate", str(rate), "--seconds", str(seconds), "--tokens", str(tokens)]
        command += ["--keep", str(folder / "kept"), "--ahead-ns", str(AHEAD_NS)]
        variables = {**variables, ANCHOR_VARIABLE: str(ANCHOR_NS + AHEAD_NS)}
        self.load = Process("workers", command, folder=folder, cores=cores, core=None, variables=variables)

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *_: object) -> None:
        self.load.kill()
        self.master.kill()

    def figures(self) -> Row:
        """What it took, once it has ended."""
        start_ns = int(self._answer(_COME_UP_S)["start_ns"])
        before = thread_seconds(self.master.pid)
        row: Row = {
            "workers": self._workers,
            "rate": self._rate,
            "prepare_cpu_s": sum(before.values()) - before["waiting"],
            "master_mib": memory_mib(self.master.pid),
            **(self._window(start_ns) if self._seconds > 1 else {}),
            **self._answer(self._seconds + _END_S),
        }
        row["behind_s"] = row.pop("last_ack_after_s") - self._seconds
        self.load.finish(30.0)
        self.master.finish(30.0)
        files = list(self.records.glob("requests-*.arrow"))
        row["rows_in_the_run"] = sum(read_table(path, REQUESTS)[0].num_rows for path in files)
        row["bytes_per_record_on_disk"] = sum(path.stat().st_size for path in files) / max(1, row["rows_in_the_run"])
        row["exit_code"] = self.master.poll()
        row["lost"] = self.master.log_path.read_text(encoding="utf-8", errors="replace").count(" is lost (")
        if not row["unacknowledged_rows"] and row["rows_in_the_run"] != row["rows"]:
            row["failed"] = f"{row['rows']} records were acknowledged and {row['rows_in_the_run']} are there"
        return row

    def _window(self, start_ns: int) -> Row:
        """The use of cores in the window, as shares of one, and the master's memory at its end."""
        _sleep_until(start_ns + 1_000_000_000)
        from_s, used, used_there = time.monotonic(), thread_seconds(self.master.pid), self.load.cpu_s()
        _sleep_until(start_ns + self._seconds * 1_000_000_000)
        took_s = time.monotonic() - from_s
        shares = {name: (until - used[name]) / took_s for name, until in thread_seconds(self.master.pid).items()}
        return {
            "master_core": sum(shares.values()) - shares["waiting"],
            **{f"{name}_core": share for name, share in shares.items()},
            "workers_core": (self.load.cpu_s() - used_there) / took_s,
            "master_mib": memory_mib(self.master.pid),
        }

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while (line := self.load.line(0.2)) is None or not line.startswith("{"):
            self.load.check()
            if time.monotonic() > deadline:
                raise ContestError(f"the workers say nothing after {timeout_s:g} s: {self.master.log_tail()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def thread_seconds(pid: int) -> dict[str, float]:
    """Processor seconds of a process's living threads: its main one, those of ZeroMQ, and the others (`disk`).

    `waiting` is how long the main one could have run and had no core: others use this machine too.
    """
    seconds = {"main": 0.0, "channel": 0.0, "disk": 0.0, "waiting": 0.0}
    for task in Path(f"/proc/{pid}/task").iterdir():
        name = (task / "comm").read_text().strip()
        kind = "main" if task.name == str(pid) else "channel" if name.startswith("ZMQ") else "disk"
        used, waited = (int(part) / 1e9 for part in (task / "schedstat").read_text().split()[:2])
        seconds[kind] += used
        seconds["waiting"] += waited if kind == "main" else 0.0
    return seconds


def memory_mib(pid: int) -> float:
    """The most that the process has held so far."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) / 1024


def measure(arguments: Sequence[str]) -> Row:
    """What the command line asks for, as one JSON object."""
    options = parser().parse_args(arguments)
    ledger = Ledger("master", out=Path(options.out) if options.out else None)
    about = {"command": command_line("master.py", arguments), "machine": describe_environment()}
    ledger.head(**about)
    with tempfile.TemporaryDirectory(prefix="tailgate-master-") as scratch:
        folders = (Path(scratch) / f"{number}" for number in range(10**6))

        def records() -> None:
            for repeat in range(options.repeats):
                for workers in options.workers:
                    for rate in options.rates:
                        trial(workers, rate, seconds=options.seconds, requests=1000, section="records", repeat=repeat)

        def shares() -> None:
            for repeat in range(options.repeats):
                for workers in options.workers:
                    for requests in options.requests:
                        trial(workers, 0, seconds=1, requests=requests, section="shares", repeat=repeat)

        def trial(workers: int, rate: int, *, seconds: int, requests: int, section: str, repeat: int) -> None:
            identity = {"repeat": repeat, "tokens": options.tokens, "requests": requests}
            with (
                ledger.attempt(section, workers=workers, rate=rate, **identity),
                Trial(
                    next(folders), workers=workers, rate=rate, seconds=seconds, tokens=options.tokens, requests=requests
                ) as running,
            ):
                ledger.add(section, **identity, **running.figures())

        chosen = options.sections or SECTIONS
        complete = ledger.run(
            (name, {"records": records, "shares": shares}[name]) for name in SECTIONS if name in chosen
        )
    return ledger.result("master", complete=complete, about=about)


def _sleep_until(at_ns: int) -> None:
    time.sleep(max(0.0, (at_ns - now_ns()) / 1e9))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    return run_command("master.py", measure, arguments)


if __name__ == "__main__":
    end_in_order()
    sys.exit(main())
