"""What does the splitter cost, beside a bare proxy: one command, one JSON line.

    python benchmarks/splitter.py --repeats 30

Every repeat measures three ways in turn, in a new order: direct, envoy (the least of a configuration), tailgate (Envoy
as servers/splitter/bootstrap.py configures it). call: the p50 of calls one after the other. token: the p50 of how late
tokens of paced streams are. What a way adds is its p50 less that of direct in the same repeat; ratios are medians over
repeats. Results go to stderr as soon as they are there, the last line on stdout is one JSON object. Exit code: 0 all
measured and the goal reached, 1 something failed or missed it, 2 bad usage.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import socket
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import gevent
import numpy as np
from gevent.event import Event

if not __package__:  # as a script: the repository is importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from analysis.arrays import Ints
from benchmarks.command import BenchmarkParser, command_line, end_in_order, run_command
from benchmarks.contest import ContestError, Cores, NullProcess, Process, process_cpu_s, settle
from benchmarks.ledger import Ledger, Row, paired_ratio, spread
from benchmarks.observed import Emitted
from loadtests.clients.call import Call
from loadtests.clients.inference import InferenceClient
from loadtests.trials.environment import describe_environment
from servers.address import host_port
from servers.rpc.inference_pb2 import GenerateRequest
from servers.splitter.envoy import Envoy, envoy_path
from servers.splitter.envoy_config import ArmTarget, SplitterConfig

WAYS: Final = ("direct", "envoy", "tailgate")
GOAL: Final = 1.1  # what tailgate adds ÷ what bare Envoy adds
CALLS: Final = 200  # one after the other, in each turn of a way
STREAMS, TOKENS_PER_S, STREAM_S = 100, 20.0, 1.5

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to the server. `cpu_s` is the processor time of what stands in between, 0 for nothing."""

    address: str
    cpu_s: Callable[[], float]


def envoy_version() -> str:
    """Which Envoy is measured, in its own words."""
    command = [str(envoy_path()), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    return done.stdout.partition("version:")[2].strip()


@contextmanager
def opened(name: str, target: str, *, folder: Path, cores: Cores) -> Iterator[Way]:
    """The way `name` to the server at `target`, ready for calls."""
    if name == "direct":
        yield Way(address=target, cpu_s=lambda: 0.0)
        return
    if name == "tailgate":
        config = SplitterConfig(arms=(ArmTarget(name="null", backends=(target,)),))
        with Envoy.start(config, log_path=folder / "tailgate.log", work_dir=folder) as envoy:
            for task in Path(f"/proc/{envoy.pid}/task").glob("*"):
                settle(int(task.name), cores.server)
            envoy.wait_ready(20.0)
            pid = envoy.pid
            yield Way(address=envoy.target, cpu_s=lambda: process_cpu_s(pid))
        return
    (host, backend), port = host_port(target), _free_port()
    path = folder / "bare.yaml"
    path.write_text(BARE.format(port=port, host=host, backend=backend))
    workers = str(SplitterConfig.__dataclass_fields__["workers"].default)
    command = [str(envoy_path()), "--config-path", str(path), "--concurrency", workers]
    command += ["--log-level", "warning", "--disable-hot-restart"]
    with Process(name, command, folder=folder, core=cores.server) as process:
        address = f"127.0.0.1:{port}"
        _wait_for(address, process)
        yield Way(address=address, cpu_s=process.cpu_s)


# The least of a configuration with which Envoy forwards gRPC: one listener, one route, one cluster.
BARE: Final = """
static_resources:
  listeners:
  - address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: bare
          codec_type: HTTP2
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes: [{{match: {{prefix: /}}, route: {{cluster: server, timeout: 0s}}}}]
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {{"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}
  clusters:
  - name: server
    type: STATIC
    load_assignment:
      cluster_name: server
      endpoints:
      - lb_endpoints:
        - endpoint: {{address: {{socket_address: {{address: {host}, port_value: {backend}}}}}}}
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {{http2_protocol_options: {{}}}}
"""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(address: str, process: Process) -> None:
    """Something listens."""
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        process.check()
        with contextlib.suppress(OSError), socket.create_connection(host_port(address), timeout=1.0):
            return
        time.sleep(0.05)
    raise ContestError(f"{process.name} does not listen on {address} after 20 s: {process.log_tail()}")


@contextmanager
def served(
    options: Sequence[str], *, folder: Path, cores: Cores
) -> Iterator[tuple[NullProcess, dict[str, tuple[Way, InferenceClient]]]]:
    """A null server and a connected client on every way to it, with the way itself."""
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(NullProcess(options, folder=folder, cores=cores))
        clients: dict[str, tuple[Way, InferenceClient]] = {}
        for name in WAYS:
            place = folder / name
            place.mkdir()
            way = stack.enter_context(opened(name, server.address, folder=place, cores=cores))
            client = InferenceClient(way.address, max_connections=1)
            stack.callback(client.close)
            reason = client.connect(10.0)
            if reason:
                raise ContestError(f"no connection by {name}: {reason}")
            clients[name] = way, client
        settle(0, cores.load)  # after the children, which would inherit it
        yield server, clients


def body_of(name: str, tokens: int) -> bytes:
    """A serialised request."""
    return GenerateRequest(request_id=name, max_tokens=tokens).SerializeToString()


def call_in_turn(client: InferenceClient, count: int) -> Ints:
    """The times (ns) of `count` calls, one after the other."""
    body, took, ended = body_of("call", 1), array("q"), Event()

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


class Bench:
    """All ways, measured in turn."""

    def __init__(self, options: argparse.Namespace, folder: Path, ledger: Ledger) -> None:
        self.repeats = options.repeats
        self.ledger = ledger
        self._folder = folder
        self._cores = Cores.of_this_machine()
        self._rng = np.random.default_rng(options.seed)

    def call(self) -> None:
        """Calls one after the other."""
        with served((), folder=self._folder / "call", cores=self._cores) as (_, clients):

            def one(name: str) -> tuple[float, float]:
                way, client = clients[name]
                before = way.cpu_s()
                p50_ms = float(np.quantile(call_in_turn(client, CALLS), 0.5)) / 1e6
                return p50_ms, (way.cpu_s() - before) / CALLS * 1e6

            for name in WAYS:
                one(name)
            self._added("call", self._in_turn(one))

    def token(self) -> None:
        """Paced streams: the server's send time against the client's stamp."""
        options = ("--tokens-per-s", str(TOKENS_PER_S))
        numbers = itertools.count()
        with served(options, folder=self._folder / "token", cores=self._cores) as (server, clients):

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
        self.ledger.note(f"the server itself was late by {report['tick_lag_ms']}")
        self._added(
            "token",
            {
                name: [(float(np.quantile(lags(calls, first, sent), 0.5)) / 1e6, cpu_us) for calls, cpu_us in some]
                for name, some in turns.items()
            },
        )

    def _in_turn(self, one: Callable[[str], T]) -> dict[str, list[T]]:
        """What `one` gave for each way: a list a way, equal in length."""
        turns: dict[str, list[T]] = {name: [] for name in WAYS}
        for repeat in range(self.repeats):
            for name in self._rng.permutation(WAYS):
                turns[str(name)].append(one(str(name)))
            if repeat % 5 == 0:
                self.ledger.note(f"repeat {repeat + 1} of {self.repeats}")
        return turns

    def _added(self, section: str, turns: dict[str, list[tuple[float, float]]]) -> None:
        """Keep a row for each way, from its (p50 in ms, processor time in µs) of each repeat, and the ratio."""
        direct = [p50_ms for p50_ms, _ in turns["direct"]]
        added: dict[str, list[float]] = {}
        for name, some in turns.items():
            p50s_ms = [p50_ms for p50_ms, _ in some]
            added[name] = [p50_ms - least_ms for p50_ms, least_ms in zip(p50s_ms, direct, strict=True)]
            row: Row = {"p50_ms": spread(p50s_ms)}
            if name != "direct":
                row["added_ms"] = spread(added[name])
                row["cpu_us"] = spread([cpu_us for _, cpu_us in some])
            self.ledger.add(section, way=name, **row)
        # A repeat in which bare Envoy seemed to add nothing says nothing about a ratio.
        pairs = [(one, other) for one, other in zip(added["tailgate"], added["envoy"], strict=True) if other > 0]
        if not pairs:
            raise ContestError(f"{section}: bare Envoy added nothing in any repeat")
        ratio = paired_ratio([one for one, _ in pairs], [other for _, other in pairs])
        self.ledger.add(section, way="tailgate ÷ envoy", added_ms=ratio)
        self.ledger.reach(f"{section}: what tailgate adds ÷ what bare Envoy adds", ratio["median"], GOAL)


def lags(calls: dict[str, Call], first: dict[str, int], sent: Emitted) -> Ints:
    """Stamp − send (ns) of every token but a stream's first, whose stream is still being set up."""
    out = []
    for name, call in calls.items():
        ticks = first[name] + np.arange(len(call.token_ns)) * sent.phases
        out.append((np.array(call.token_ns, np.int64) - sent.at(ticks))[1:])
    return np.concatenate(out)


def measure(arguments: Sequence[str]) -> Row:
    """What the command line asks for, as one JSON object."""
    options = BenchmarkParser("splitter.py", __doc__, repeats=20).parse_args(arguments)
    ledger = Ledger()
    gc.collect()
    gc.freeze()
    with tempfile.TemporaryDirectory(prefix="tailgate-bench-") as scratch:
        bench = Bench(options, Path(scratch), ledger)
        bench.call()
        bench.token()
    machine = {**describe_environment(), "envoy": envoy_version()}
    return ledger.result("splitter", about={"command": command_line("splitter.py", arguments), "machine": machine})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    return run_command("splitter.py", measure, arguments)


if __name__ == "__main__":
    end_in_order()
    sys.exit(main())
