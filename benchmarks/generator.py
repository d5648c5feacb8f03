"""Measure the load generator against a null server, and what the splitter adds: one command, one JSON line.

    python benchmarks/generator.py --repeats 3

A null server sends what is measured, on one core; a Locust process with loadtests/chat.py that replays a schedule and
records has the other. streams: 1,000 streams of 50 tokens/s, what share of the tokens is seen and how late. open:
10,000 requests/s open loop, and the load process's own share of their latency. splitter: 100 streams of 20 tokens/s,
directly and behind Envoy as a run configures it, in turns. Results go to stderr as soon as they are there; the last
line on stdout is one JSON object. Exit code: 0 all measured and every goal reached, 1 something failed or missed its
goal, 2 bad usage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import pyarrow as pa

if not __package__:  # as a script: the repository is importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.command import Ledger, MeasurementError, Row, count, end_in_order, parser_of, spread
from tailgate.analysis.arrays import Ints
from tailgate.analysis.records.request_columns import integers
from tailgate.analysis.records.schemas import REQUESTS
from tailgate.analysis.records.tables import read_table
from tailgate.loadtests.generator.trial_config import TrialConfig
from tailgate.loadtests.traffic.schedule import SCHEDULE, Schedule
from tailgate.loadtests.traffic.settings import TrafficConfig
from tailgate.loadtests.trials.environment import describe_environment
from tailgate.loadtests.trials.load import locust_command
from tailgate.servers.clock import anchored_environment, now_ns
from tailgate.servers.processes import Child
from tailgate.servers.splitter.envoy import Envoy
from tailgate.servers.splitter.envoy_config import ArmTarget, SplitterConfig

# Children find the packages here where nothing is installed.
ROOT: Final = Path(__file__).resolve().parent.parent
_PATIENCE_S: Final = 60.0
AHEAD_S: Final = 6.0  # tailgate encodes requests so far ahead
_SAMPLE_S: Final = 0.1


def cores() -> tuple[int | None, int | None]:
    """Return the last usable core for the server and the first for the load, or None each without a choice."""
    usable = sorted(os.sched_getaffinity(0))
    return (usable[-1], usable[0]) if len(usable) >= 2 else (None, None)


@contextmanager
def child(
    name: str, command: Sequence[str], *, folder: Path, core: int | None, speaks: bool = False
) -> Iterator[Child]:
    """Run a process on `core`, with this one's clock and packages, until the block ends."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, **anchored_environment()}
    common: dict[str, Any] = {"log_path": folder / f"{name}.log", "environment": environment, "folder": folder}
    started = Child(name, command, commands=speaks, parse=json.loads if speaks else None, **common)
    try:
        if core is not None:
            os.sched_setaffinity(started.pid, {core})
        yield started
    finally:
        started.kill()


@contextmanager
def null_server(folder: Path, tokens_per_s: float, *, core: int | None) -> Iterator[str]:
    """Yield the address of benchmarks.null_server in a process of its own, which then writes its account to the
    folder."""
    command = [sys.executable, "-m", "benchmarks.null_server"]
    command += ["--report", str(folder / "server.npz"), "--tokens-per-s", str(tokens_per_s)]
    with child("null-server", command, folder=folder, core=core, speaks=True) as server:
        while not (heard := server.receive(1.0))[0]:
            if heard[1] is not None:
                raise MeasurementError(f"the null server {server.ending(heard[1])}")
        answer: Any = heard[0][0]
        yield f"127.0.0.1:{answer['port']}"
        server.command("end")
        if server.wait(_PATIENCE_S) != 0:
            raise MeasurementError(f"the null server left no account: {server.log_tail()}")


def cpu_s(pid: int) -> float:
    """Return the processor seconds of a process; nan if it has ended."""
    try:
        used = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return float("nan")
    return float(used.user + used.system)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a load process is given to do: `streams` that start over `ramp_s`, or Poisson arrivals at `rate`.

    Each request gets `tokens_per_s`, those of an open loop a single token. The window that counts begins `settle_s`
    after all of it runs.
    """

    streams: int = 0
    rate: float = 0.0
    tokens_per_s: float = 1000.0
    ramp_s: float = 2.0
    settle_s: float = 3.0
    window_s: float = 10.0
    seed: int = 0

    @property
    def seconds(self) -> float:
        """How long the load lasts."""
        return (self.ramp_s if self.streams else 0.0) + self.settle_s + self.window_s

    def schedule(self, path: Path) -> None:
        """Write it as a schedule: streams start evenly over the ramp, open-loop requests by a Poisson process."""
        rng = np.random.default_rng(self.seed)
        # Requests must outlast the window: otherwise the process that encodes ahead would have less to do.
        seconds, tokens = self.seconds + AHEAD_S, 1
        if self.streams:
            offsets = np.linspace(0, self.ramp_s, self.streams, endpoint=False)
            tokens = int(self.tokens_per_s * (self.seconds + 1.0))
        else:
            offsets = np.cumsum(rng.exponential(1 / self.rate, int(self.rate * seconds * 1.2) + 100))
            offsets = offsets[offsets < seconds]
        count = len(offsets)
        table = pa.table(
            {
                "index": np.arange(count),
                "offset_ns": (offsets * 1e9).astype(np.int64),
                "prompt_tokens": np.full(count, 16, np.int32),
                "max_tokens": np.full(count, tokens, np.int32),
                "prompt_seed": rng.integers(0, 2**62, count),
                "arm": [None] * count,
                "phase": ["measure"] * count,
            },
            schema=SCHEDULE,
        )
        Schedule(table=table, arms=()).write(path)


def run(work: Work, *, folder: Path, splitter: bool = False) -> dict[str, float]:
    """Run it once in `folder`; return how late the load process was, and how much of a core it took."""
    folder.mkdir(parents=True)
    server_core, load_core = cores()
    with ExitStack() as stack:
        target = stack.enter_context(null_server(folder, work.tokens_per_s, core=server_core))
        if splitter:
            config = SplitterConfig(arms=(ArmTarget(name="null", backends=(target,)),))
            envoy = stack.enter_context(Envoy(config, log_path=folder / "envoy.log", work_dir=folder))
            envoy.wait_ready(_PATIENCE_S)
            target = envoy.target
        work.schedule(folder / "schedule.arrow")
        TrialConfig(targets={"*": target}, timeout_s=600.0).write(folder / "generator.json")
        command = locust_command(folder, TrafficConfig(rate=1.0))
        load = stack.enter_context(child("locust", command, folder=folder, core=load_core))
        used = [(now_ns(), 0.0)]
        deadline = time.monotonic() + work.seconds + AHEAD_S + _PATIENCE_S
        while load.poll() is None:
            used.append((now_ns(), cpu_s(load.pid)))
            if time.monotonic() > deadline:
                raise MeasurementError(f"the load does not end: {load.log_tail()}")
            time.sleep(_SAMPLE_S)
        records = folder / "requests-0.arrow"
        if not records.exists():
            raise MeasurementError(f"the load left no records: {load.log_tail()}")
    requests, sent, late_ns = read_table(records, REQUESTS)[0], *sent_by_server(folder / "server.npz")
    settled_s = work.seconds - work.window_s
    start_ns = int(integers(requests["sent_ns"], 0).min() + settled_s * 1e9)
    window = start_ns, start_ns + int(work.window_s * 1e9)
    figures = stream_figures(requests, sent, window) if work.streams else own_error(requests, window)
    times, seconds = np.array(used).T
    core = float(np.diff(np.interp(window, times, seconds))[0]) / work.window_s
    return {**figures, "load_core": core, "server_p99_late_ms": float(np.quantile(late_ns, 0.99)) / 1e6}


def sent_by_server(path: Path) -> tuple[dict[str, Ints], Ints]:
    """Return when the null server sent the tokens of each request, 0 for one that it did not, and how late its ticks
    were."""
    with np.load(path) as account:
        tokens = np.split(account["token_ns"], np.cumsum(account["tokens"]))
        return dict(zip(account["names"].tolist(), tokens, strict=False)), account["late"]


Window = tuple[int, int]


def stream_figures(requests: pa.Table, sent: Mapping[str, Ints], window: Window) -> dict[str, float]:
    """Delivered share and lag (ms) over the window.

    delivered: tokens stamped in the window ÷ tokens sent in the window, at most 1 (a client that catches up does not
    deliver more). Lag: stamp − send of the tokens sent in the window; one that has not come has the lag that it had
    reached when the window ended. Raises MeasurementError where nothing came.
    """
    start_ns, end_ns = window
    lags: list[Ints] = []
    left = came = 0
    starts = integers(requests["sent_ns"], 0).tolist()
    seen = dict(
        zip(requests["request_id"].to_pylist(), zip(starts, requests["token_ns"].to_pylist(), strict=True), strict=True)
    )
    for name, at in sent.items():
        start, offsets = seen.get(name, (0, None))
        stamps = np.array(offsets or (), np.int64) + start
        inside = (at >= start_ns) & (at < end_ns)
        left += int(inside.sum())
        came += int(((stamps >= start_ns) & (stamps < end_ns)).sum())
        stamped = np.full(len(at), end_ns)
        stamped[: len(stamps)] = stamps
        lags.append((stamped - at)[inside])
    if not left or not came:
        raise MeasurementError("no token was sent in the window and came")
    lag = np.concatenate(lags) / 1e6
    p50, p99, top = np.quantile(lag, (0.5, 0.99, 1.0)).tolist()
    return {"sent": left, "delivered": min(1.0, came / left), "p50_lag_ms": p50, "p99_lag_ms": p99, "max_lag_ms": top}


def own_error(requests: pa.Table, window: Window) -> dict[str, float]:
    """Return the load process's share of the latency (ms) of answers that were due in the window.

    late: sent − scheduled. delivery: the client's stamp of the end − the server's. own: the sum. Raises
    MeasurementError if nothing was answered.
    """
    scheduled, sent, end, answer = (
        integers(requests[name], 0) for name in ("scheduled_ns", "sent_ns", "end_ns", "server_end_ns")
    )
    due = (scheduled >= window[0]) & (scheduled < window[1])
    good = due & (np.array(requests["status"].to_pylist()) == "OK") & (answer > 0)
    if not good.any():
        raise MeasurementError("no request of the window was answered")
    late, delivery = (sent - scheduled)[good] / 1e6, (end - answer)[good] / 1e6
    figures = {"due": float(due.sum()), "answered": float(good.sum() / due.sum())}
    for name, values in (("late", late), ("delivery", delivery), ("own", late + delivery)):
        figures[f"p50_{name}_ms"], figures[f"p99_{name}_ms"] = np.quantile(values, (0.5, 0.99)).tolist()
    return {**figures, "max_own_ms": float((late + delivery).max())}


SECTIONS: Final = {
    "streams": Work(streams=1000, tokens_per_s=50.0),
    "open": Work(rate=10_000.0),
    "splitter": Work(streams=100, tokens_per_s=20.0),
}
# The goals: share delivered, p99 lag in ms, p99 of the load process's own error in ms, p50 that Envoy adds in ms.
DELIVERED, LAG_MS, OWN_MS, ADDED_MS = 0.99, 10.0, 3.0, 1.0


def parser() -> argparse.ArgumentParser:
    """Define the command line."""
    parser = parser_of("generator.py", __doc__, repeats=3)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], metavar="SECTION",
                        help=f"{', '.join(SECTIONS)} (default: all)")  # fmt: skip
    parser.add_argument("--window", dest="window_s", metavar="SECONDS", type=count, default=10,
                        help="seconds that count in each (default %(default)s)")  # fmt: skip
    return parser


def measure(section: str, work: Work, *, repeats: int, folder: Path, ledger: Ledger) -> None:
    """Measure one section. Paths to the server take turns, and the one that begins changes."""
    rows: dict[str, list[Row]] = {"direct": [], "envoy": []} if section == "splitter" else {"direct": []}
    for repeat in range(repeats):
        for path in rows if repeat % 2 else [*rows][::-1]:
            ledger.note(f"{section}: {path}, repeat {repeat + 1} of {repeats}")
            place = folder / f"{section}-{path}-{repeat}"
            rows[path].append(run(work, folder=place, splitter=path == "envoy"))
    for path, measured in rows.items():
        ledger.add(section, path=path, **{key: spread([row[key] for row in measured]) for key in measured[0]})

    def median(key: str, path: str = "direct") -> float:
        return float(np.median([row[key] for row in rows[path]]))

    if section == "splitter":
        added = median("p50_lag_ms", "envoy") - median("p50_lag_ms")
        ledger.reach("splitter: p50 that Envoy adds to a token, ms", added, ADDED_MS)
    elif section == "streams":
        ledger.reach("streams: delivered", median("delivered"), DELIVERED, at_least=True)
        ledger.reach("streams: p99 lag, ms", median("p99_lag_ms"), LAG_MS)
    else:
        ledger.reach("open: own error p99, ms", median("p99_own_ms"), OWN_MS)


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    options = parser().parse_args(arguments)
    ledger = Ledger()
    with tempfile.TemporaryDirectory(prefix="tailgate-bench-") as scratch:
        for section in options.sections or SECTIONS:
            work = replace(SECTIONS[section], window_s=options.window_s, seed=options.seed)
            measure(section, work, repeats=options.repeats, folder=Path(scratch), ledger=ledger)
    return ledger.finish("generator", arguments, machine=describe_environment())


if __name__ == "__main__":
    end_in_order()
    sys.exit(main(sys.argv[1:]))
