"""What does the splitter cost, beside a bare proxy: one command, one JSON line.

    python benchmarks/splitter.py --repeats 30

Every repeat measures all ways in turn, in a new order: direct, envoy (the least of a configuration), tailgate (Envoy as
servers/splitter/bootstrap.py configures it).
unary: the p50 of calls one after the other. token: the p50 of how late tokens of paced streams are. busy: many calls at
once, for the processor time of a call. What a way adds is its p50 less that of direct in the same repeat; ratios are
medians over repeats. Progress and tables go to stderr, the last line on stdout is one JSON object. Exit code: 0 all
measured and the goal reached, 1 something failed or missed it, 2 bad usage.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import gevent
import numpy as np
from gevent.event import Event

if not __package__:  # as a script: the repository is importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from analysis.arrays import Ints
from benchmarks.command import BenchmarkParser, command_line, end_in_order, one_of, run_command, several
from benchmarks.contest import ContestError, Cores, NullProcess
from benchmarks.ledger import Ledger, Row
from benchmarks.measure import paired_ratio, spread
from benchmarks.observed import Emitted
from benchmarks.proxies import PATHS, Way, envoy_version, opened
from loadtests.clients.call import Call
from loadtests.clients.inference import InferenceClient
from loadtests.trials.environment import describe_environment
from servers.clock import now_ns
from servers.rpc.inference_pb2 import GenerateRequest

SECTIONS: Final = ("unary", "token", "busy")
GOAL: Final = 1.1  # what tailgate adds ÷ what bare Envoy adds
CALLS: Final = 200  # one after the other, in each turn of a way
STREAMS, TOKENS_PER_S, STREAM_S = 100, 20.0, 1.5
BUSY, BUSY_S = 32, 1.0

T = TypeVar("T")


def parser() -> BenchmarkParser:
    """The command line."""
    parser = BenchmarkParser("splitter.py", __doc__, repeats=20)
    parser.add_argument("sections", nargs="*", type=one_of(SECTIONS), metavar="SECTION",
                        help=f"{', '.join(SECTIONS)} (default: all)")  # fmt: skip
    parser.add_argument("--ways", type=several(one_of(PATHS), "envoy,tailgate"), default=PATHS,
                        help=f"which ones; direct always is (default {','.join(PATHS)})")  # fmt: skip
    parser.add_argument("--nice", type=int, default=0, help="of all processes; below 0 where neighbours are noisy")
    return parser


@contextmanager
def served(
    ways: Sequence[str], options: Sequence[str], *, folder: Path, cores: Cores
) -> Iterator[tuple[NullProcess, dict[str, Any]]]:
    """A null server and a connected client on every way to it, with the way itself."""
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(NullProcess(options, folder=folder, cores=cores))
        clients: dict[str, tuple[Way, InferenceClient]] = {}
        for name in ways:
            place = folder / name
            place.mkdir()
            way = stack.enter_context(opened(name, server.address, folder=place, cores=cores))
            client = InferenceClient(way.address, max_connections=1)
            stack.callback(client.close)
            reason = client.connect(10.0)
            if reason:
                raise ContestError(f"no connection by {name}: {reason}")
            clients[name] = way, client
        cores.settle(0, cores.load)  # after the children, which would inherit it
        yield server, clients


def body_of(name: str, tokens: int) -> bytes:
    """A serialised request."""
    return GenerateRequest(request_id=name, max_tokens=tokens).SerializeToString()


def call_in_turn(client: InferenceClient, count: int) -> Ints:
    """The times (ns) of `count` calls, one after the other."""
    body, took, ended = body_of("unary", 1), array("q"), Event()

    def done(_: Call) -> None:
        ended.set()

    for _ in range(count):
        ended.clear()
        call = client.start(body, timeout_s=10.0, on_done=done)
        ended.wait()
        if call.status != "OK":
            raise ContestError(f"a call ended with {call.status}: {call.error}")
        took.append(call.end_ns - call.start_ns)
    return np.array(took, dtype=np.int64)


def stream(client: InferenceClient, prefix: str) -> dict[str, Call]:
    """The ended calls of one turn of paced streams, by name."""
    calls: dict[str, Call] = {}
    for number in range(STREAMS):
        name = f"{prefix}-{number}"
        calls[name] = client.start(body_of(name, int(TOKENS_PER_S * STREAM_S)), timeout_s=30.0)
        gevent.sleep(1 / TOKENS_PER_S / STREAMS)
    while not all(call.status for call in calls.values()):
        gevent.sleep(0.02)
    bad = next((call for call in calls.values() if call.status != "OK"), None)
    if bad is not None:
        raise ContestError(f"a stream ended with {bad.status}: {bad.error}")
    return calls


def hammer(client: InferenceClient) -> tuple[int, float]:
    """(calls, seconds) of a closed loop of many."""
    body, until_ns, ended, left, count = body_of("busy", 1), now_ns() + int(BUSY_S * 1e9), Event(), BUSY, 0
    run_callback: Any = gevent.get_hub().loop.run_callback

    def start() -> None:
        client.start(body, timeout_s=30.0, on_done=done)

    def done(call: Call) -> None:
        nonlocal left, count
        count += call.status == "OK"
        if now_ns() < until_ns:
            run_callback(start)
            return
        left -= 1
        if not left:
            ended.set()

    began_ns = now_ns()
    for _ in range(BUSY):
        start()
    ended.wait()
    return count, (now_ns() - began_ns) / 1e9


class Bench:
    """All ways, measured in turn."""

    def __init__(self, ways: Sequence[str], options: argparse.Namespace, folder: Path, ledger: Ledger) -> None:
        self.ways = ways
        self.repeats = options.repeats
        self.ledger = ledger
        self._folder = folder
        self._cores = Cores.of_this_machine(nice=options.nice)
        self._rng = np.random.default_rng(options.seed)

    def unary(self) -> None:
        """Calls one after the other."""
        with served(self.ways, (), folder=self._folder / "unary", cores=self._cores) as (_, clients):

            def one(name: str) -> float:
                return float(np.quantile(call_in_turn(clients[name][1], CALLS), 0.5)) / 1e6

            for name in self.ways:
                one(name)
            p50s_ms = self._in_turn(one)
        self._added("unary", p50s_ms, {})

    def token(self) -> None:
        """Paced streams: the server's send time against the client's stamp."""
        options = ("--tokens-per-s", str(TOKENS_PER_S))
        numbers = itertools.count()
        with served(self.ways, options, folder=self._folder / "token", cores=self._cores) as (server, clients):

            def one(name: str) -> tuple[dict[str, Call], float]:
                way, client = clients[name]
                before = way.cpu_s()
                calls = stream(client, f"{name}-{next(numbers)}")
                return calls, (way.cpu_s() - before) / (STREAMS * int(TOKENS_PER_S * STREAM_S)) * 1e6

            turns = self._in_turn(one)
            log = self._folder / "token" / "server.npz"
            report = server.request(f"report {log}")
            sent = Emitted.read(log)
        first = dict(zip(sent.names, sent.first_ticks, strict=True))
        p50s_ms = {
            name: [float(np.quantile(lags(calls, first, sent), 0.5)) / 1e6 for calls, _ in some]
            for name, some in turns.items()
        }
        self.ledger.note(f"the server itself was late by {report['tick_lag_ms']}")
        self._added("token", p50s_ms, {name: [cpu_us for _, cpu_us in some] for name, some in turns.items()})

    def busy(self) -> None:
        """Many calls at once, for the processor time of a call in the proxy."""
        with served(self.ways, (), folder=self._folder / "busy", cores=self._cores) as (_, clients):

            def one(name: str) -> tuple[float, float]:
                way, client = clients[name]
                before = way.cpu_s()
                count, seconds = hammer(client)
                return count / seconds, (way.cpu_s() - before) / max(1, count) * 1e6

            turns = self._in_turn(one)
        for name, some in turns.items():
            row = {"calls_s": spread([per_s for per_s, _ in some])}
            if name != "direct":
                row["cpu_us_a_call"] = spread([cpu_us for _, cpu_us in some])
            self.ledger.add("busy", way=name, **row)

    def _in_turn(self, one: Callable[[str], T]) -> dict[str, list[T]]:
        """What `one` gave for each way: a list a way, equal in length."""
        turns: dict[str, list[T]] = {name: [] for name in self.ways}
        for repeat in range(self.repeats):
            for name in self._rng.permutation(self.ways):
                turns[str(name)].append(one(str(name)))
            if repeat % 5 == 0:
                self.ledger.note(f"repeat {repeat + 1} of {self.repeats}")
        return turns

    def _added(self, section: str, p50s_ms: dict[str, list[float]], cpu_us: dict[str, list[float]]) -> None:
        added = {
            name: [p50 - direct for p50, direct in zip(some, p50s_ms["direct"], strict=True)]
            for name, some in p50s_ms.items()
        }
        for name, some in p50s_ms.items():
            row: Row = {"p50_ms": spread(some)}
            if name != "direct":
                row["added_ms"] = spread(added[name])
                if name in cpu_us:
                    row["cpu_us_a_token"] = spread(cpu_us[name])
            if name == "tailgate" and "envoy" in added:
                # A repeat in which bare Envoy seemed to add nothing says nothing about a ratio.
                pairs = [(a, b) for a, b in zip(added[name], added["envoy"], strict=True) if b > 0]
                if pairs:
                    ratio = row["over_bare"] = paired_ratio([a for a, _ in pairs], [b for _, b in pairs])
                    if ratio["median"] > GOAL:
                        self.ledger.missed.append(f"{section}: tailgate adds {ratio['median']:.3f} × bare Envoy")
            self.ledger.add(section, way=name, **row)


def lags(calls: dict[str, Call], first: dict[str, int], sent: Emitted) -> Ints:
    """Stamp − send (ns) of every token but a stream's first, whose stream is still being set up."""
    out = []
    for name, call in calls.items():
        ticks = first[name] + np.arange(len(call.token_ns)) * sent.phases
        out.append((np.array(call.token_ns, np.int64) - sent.at(ticks))[1:])
    return np.concatenate(out)


def measure(arguments: Sequence[str]) -> Row:
    """What the command line asks for, as one JSON object."""
    options = parser().parse_args(arguments)
    ways = tuple(dict.fromkeys(["direct", *options.ways]))
    ledger = Ledger("null", out=Path(options.out) if options.out else None)
    about = {
        "command": command_line("splitter.py", arguments),
        "machine": {**describe_environment(), "envoy": envoy_version()},
    }
    ledger.head(**about, ways=ways)
    gc.collect()
    gc.freeze()
    with tempfile.TemporaryDirectory(prefix="tailgate-bench-") as scratch:
        bench = Bench(ways, options, Path(scratch), ledger)
        sections = [section for section in SECTIONS if section in (options.sections or SECTIONS)]
        complete = ledger.run((section, getattr(bench, section)) for section in sections)
    return ledger.result(
        "splitter", complete=complete, about={**about, "seed": options.seed, "repeats": options.repeats}
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    return run_command("splitter.py", measure, arguments)


if __name__ == "__main__":
    end_in_order()
    sys.exit(main())
