"""How honest is the load generator, beside stock clients: one command, one JSON line.

    python benchmarks/generator.py streams short open stall --repeats 3

A null server sends what is measured, on one core; each load process has the other. Contestants take turns in every
repeat: stock (Locust, synchronous grpcio, gevent), bare (tailgate's client alone) and tailgate (a Locust process with
loadtests/chat.py that replays a schedule and records).

Sections: server (what the null server itself can do), streams (1,000 streams of 20 and 50 tokens/s), short (answers of
one token, as many as go), open (open loop at 1,000, 3,000 and 10,000 requests/s) and stall (the server is silent for
3 s of 25). Progress and tables go to stderr, each result at once, also to --out;
the last line on stdout is one JSON object with everything. Exit code: 0 all measured and every goal reached, 1
something failed or missed its goal, 2 bad usage.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

if not __package__:  # as a script: the repository is importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.command import BenchmarkParser, command_line, end_in_order, one_of, run_command, several
from benchmarks.contest import CONTESTANTS, Cores, NullProcess, Outcome, Work, run
from benchmarks.frames import literal
from benchmarks.lag import completions_per_s, own_error, stalled_latencies, stream_figures
from benchmarks.ledger import Ledger, Row
from benchmarks.measure import spread
from benchmarks.observed import Plan
from loadtests.clients import frames
from loadtests.commands.command_line import real
from loadtests.trials.environment import describe_environment
from servers.address import host_port
from servers.fields import ConfigError
from servers.rpc.inference_pb2 import GenerateRequest

SECTIONS: Final = ("server", "streams", "short", "open", "stall")
STREAMS: Final = 1000
# Tokens/s of a stream, and the goals: share delivered, p99 lag and p99 error of a gap in ms.
STREAM_GOALS: Final = {20.0: (0.995, 5.0, 5.0), 50.0: (0.99, 10.0, math.inf)}
STALL_AFTER_S, STALL_S, STALL_RUN_S = 8.0, 3.0, 25.0
STALL_RATE, STALL_SERVICE_S, STALL_CAP = 200.0, 0.05, 32
USERS: Final = 64  # requests in flight in a closed loop
# Beyond this rate a contestant falls behind for good, and its run says nothing.
MOST_RATE: Final = {"stock": 1000.0}
# Sustained: this share of what was due was answered, and the generator's own error stayed below this at p99.
SUSTAINED_SHARE, SUSTAINED_MS = 0.99, 50.0
SUSTAINED_RATES: Final = tuple(8000 * 1.25**step for step in range(8))


def parser() -> BenchmarkParser:
    """The command line."""
    parser = BenchmarkParser("generator.py", __doc__, repeats=3)
    parser.add_argument("sections", nargs="+", type=one_of(SECTIONS), metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--contestants", type=several(one_of(CONTESTANTS), "stock,tailgate"), default=CONTESTANTS,
                        help=f"which ones (default {','.join(CONTESTANTS)})")  # fmt: skip
    parser.add_argument("--window", dest="window_s", metavar="SECONDS", type=real(1, 600), default=10.0,
                        help="seconds that count in each (default %(default)s)")  # fmt: skip
    parser.add_argument("--rates", type=several(real(1, 1e6, "rate"), "1000,10000"), default=(1e3, 3e3, 1e4),
                        help="open: requests/s (default 1000,3000,10000)")  # fmt: skip
    parser.add_argument("--nice", type=int, default=0, help="of all processes; below 0 where neighbours are noisy")
    parser.add_argument("--keep", default="", help="keep what every run left behind in this new folder")
    return parser


class Bench:
    """Runs the contests of every section and keeps what they gave."""

    def __init__(self, settings: argparse.Namespace, folder: Path, ledger: Ledger) -> None:
        self.settings = settings
        self.folder = folder
        self.ledger = ledger
        self.cores = Cores.of_this_machine(nice=settings.nice)
        self._runs = 0

    def contests(self, section: str, works: dict[str, Work]) -> dict[str, list[Outcome]]:
        """Every contestant's outcomes; in each repeat they take turns, the first one changing."""
        outcomes: dict[str, list[Outcome]] = {name: [] for name in works}
        names = list(works)
        for repeat in range(self.settings.repeats):
            turn = repeat % max(1, len(names))
            for name in names[turn:] + names[:turn]:
                self.ledger.note(f"{section}: {name}, repeat {repeat + 1} of {self.settings.repeats}")
                with self.ledger.attempt(section, contestant=name):
                    outcomes[name].append(self._run(name, works[name]))
        return outcomes

    def _run(self, name: str, work: Work) -> Outcome:
        self._runs += 1
        folder = self.folder / f"{self._runs:03d}-{name.replace(' ', '-')}"
        return run(name.split()[0], work, folder=folder, cores=self.cores)

    def plan(self, mode: str, **fields: Any) -> Plan:
        """A plan whose address and place are not known yet."""
        return Plan(mode=mode, address="", out="", seed=self.settings.seed, **fields)

    # --- sections ----------------------------------------------------------------------------------------------------

    def server(self) -> None:
        """How many answers a second the null server gives on its core to a socket that reads nothing but ends."""
        for style, options in (("as gRPC writes headers", ()), ("as Envoy writes headers", ("--huffman",))):
            rates, costs = [], []
            for repeat in range(self.settings.repeats):
                folder = self.folder / f"server-{len(options)}-{repeat}"
                folder.mkdir()
                with NullProcess(options, folder=folder, cores=self.cores) as server:
                    rate = blast(server.address, seconds=min(3.0, self.settings.window_s))
                    report = server.request(f"report {folder / 'server.npz'}")
                rates.append(rate)
                costs.append(report["cpu_s"] / report["answered"] * 1e6)
            self.ledger.add("server", what=style, answers_s=spread(rates), cpu_us=spread(costs))

    def streams(self) -> None:
        """1,000 paced streams: what share of the tokens each client sees, and how late."""
        reach, settle_s, ramp_s = self.ledger.reach, 3.0, 2.0
        for rate, (share, lag_ms, error_ms) in STREAM_GOALS.items():
            what = f"{STREAMS:,} × {rate:g} tok/s"
            seconds = settle_s + ramp_s + self.settings.window_s + 3.0
            work = Work(
                plan=self.plan("streams", streams=STREAMS, ramp_s=ramp_s, tokens=int(rate * seconds)),
                server=("--tokens-per-s", str(rate)),
                window_s=self.settings.window_s,
                settle_s=settle_s,
            )
            for name, outcomes in self.contests("streams", dict.fromkeys(self.settings.contestants, work)).items():
                rows = self._rows("streams", what, name, outcomes, lambda o: stream_figures(o.seen, o.sent, **o.window))
                if name == "tailgate":
                    reach(f"{what}: delivered", _median(rows, "delivered"), share, at_least=True)
                    reach(f"{what}: p99 lag, ms", _median(rows, "p99_lag_ms"), lag_ms)
                    if error_ms < math.inf:
                        reach(f"{what}: p99 ITL error, ms", _median(rows, "p99_itl_error_ms"), error_ms)

    def short(self) -> None:
        """Requests/s of answers of one token: a closed loop of 64, and what tailgate sustains open loop."""
        closed = Work(plan=self.plan("closed", users=USERS), window_s=min(5.0, self.settings.window_s))
        best: dict[str, float] = {}
        for name, outcomes in self.contests("short", dict.fromkeys(self.settings.contestants, closed)).items():
            rows = self._rows(
                "short",
                f"closed loop of {USERS}",
                name,
                outcomes,
                lambda o: {"requests_s": completions_per_s(o.seen, **o.window)},
            )
            if rows:
                best[name] = float(np.median([row["requests_s"] for row in rows]))
        if "tailgate" in self.settings.contestants:
            sustained = [self._sustained() for _ in range(self.settings.repeats)]
            self.ledger.add("short", what="open loop sustained", contestant="tailgate", requests_s=spread(sustained))
            best["tailgate, open loop"] = float(np.median(sustained))
        if "stock" in best:
            for name in ("bare", "tailgate, open loop"):
                if name in best:
                    ratio = best[name] / best["stock"]
                    self.ledger.reach(f"short requests: {name} ÷ stock", ratio, 10.0, at_least=True)

    def _sustained(self) -> float:
        """The highest of rising open-loop rates that a whole tailgate load process keeps."""
        best = 0.0
        for rate in SUSTAINED_RATES:
            work = Work(plan=self.plan("open", rate=rate), window_s=min(5.0, self.settings.window_s), settle_s=2.0)
            kept = False
            with self.ledger.attempt("short", contestant="tailgate"):
                outcome = self._run("tailgate", work)
                figures = own_error(outcome.seen, **outcome.window)
                self.ledger.note(
                    f"tailgate, open loop of {rate:,.0f}/s: answered {figures['answered']:.4f}, "
                    f"own p99 {figures['p99_own_ms']:.2f} ms, {outcome.load_core:.2f} of a core"
                )
                kept = figures["answered"] >= SUSTAINED_SHARE and figures["p99_own_ms"] <= SUSTAINED_MS
            if not kept:
                break
            best = rate
        return best

    def open(self) -> None:
        """Open loop: the generator's own share of the latency, with the garbage collector as each of them has it."""

        def figures(outcome: Outcome) -> Row:
            collected = {"gc_max_ms": outcome.generator.get("gc_ms", {}).get("max")}
            return own_error(outcome.seen, **outcome.window) | collected

        for rate in self.settings.rates:
            what = f"{rate:,.0f} requests/s"
            names = [name for name in self.settings.contestants if rate <= MOST_RATE.get(name, rate)]
            work = Work(plan=self.plan("open", rate=rate), window_s=self.settings.window_s, settle_s=2.0)
            for name, outcomes in self.contests("open", dict.fromkeys(names, work)).items():
                rows = self._rows("open", what, name, outcomes, figures)
                if name == "tailgate":
                    self.ledger.reach(f"open loop at {what}: own error p99, ms", _median(rows, "p99_own_ms"), 3.0)

    def stall(self) -> None:
        """A server that is silent for 3 s of 25: which p99 each way of loading reports, and which is the truth."""
        open_loop = Work(
            plan=self.plan("open", rate=STALL_RATE, seconds=STALL_RUN_S),
            server=("--service-ms", f"{STALL_SERVICE_S * 1e3:g}"),
            settle_s=0.0,
            window_s=STALL_RUN_S,
            stall_s=(STALL_AFTER_S, STALL_S),
        )
        works = {
            "tailgate": open_loop,
            f"tailgate max_concurrency {STALL_CAP}": dataclasses.replace(open_loop, cap=STALL_CAP),
            "stock closed loop": dataclasses.replace(open_loop, plan=self.plan("closed", users=10)),
        }

        def figures(outcome: Outcome) -> Row:
            seen, answered = outcome.seen, outcome.seen.ok > 0
            latency = (seen.end - seen.scheduled)[answered] / 1e6
            row: Row = {"requests": len(latency), "p99_ms": float(np.quantile(latency, 0.99))}
            if outcome.work.plan.mode == "open":
                truth = stalled_latencies(
                    np.sort(seen.scheduled),
                    service_ns=int(STALL_SERVICE_S * 1e9),
                    stall_ns=outcome.server["stall_ns"],
                    cap=outcome.work.cap,
                )
                row["truth_p99_ms"] = float(np.quantile(truth, 0.99)) / 1e6
                row["error"] = row["p99_ms"] / row["truth_p99_ms"] - 1
                row["unanswered"] = int((~answered).sum())
            return row

        works = {name: work for name, work in works.items() if name.split()[0] in self.settings.contestants}
        for name, outcomes in self.contests("stall", works).items():
            rows = self._rows("stall", f"{STALL_S:g} s of {STALL_RUN_S:g} s", name, outcomes, figures)
            errors = [abs(row["error"]) for row in rows if "error" in row]
            self.ledger.reach(f"stall, {name}: |p99 ÷ truth − 1|", max(errors, default=None), 0.1)

    def _rows(
        self, section: str, what: str, name: str, outcomes: Sequence[Outcome], figures: Callable[[Outcome], Row]
    ) -> list[Row]:
        """The figures of each outcome, together a row of the ledger; an outcome without figures is a failed one."""
        rows: list[Row] = []
        for outcome in outcomes:
            with self.ledger.attempt(section, what=what, contestant=name):
                rows.append(figures(outcome))
        if not rows:
            return rows
        columns = {key: spread([row[key] for row in rows]) for key in rows[0] if rows[0][key] is not None}
        lags = [o.server["tick_lag_ms"]["p99"] for o in outcomes if o.server["tick_lag_ms"]]
        if lags:
            columns["server_p99_late_ms"] = spread(lags)
        self.ledger.add(
            section,
            what=what,
            contestant=name,
            **columns,
            load_core=spread([o.load_core for o in outcomes]),
            server_core=spread([o.server_core for o in outcomes]),
            servers=[o.server for o in outcomes],
            generators=[o.generator for o in outcomes],
            samples=rows,
        )
        return rows


def _median(rows: Sequence[Row], key: str) -> float | None:
    values = [row[key] for row in rows if row[key] is not None]
    return float(np.median(values)) if values else None


def blast(address: str, *, seconds: float) -> float:
    """Answers/s of a null server that a raw socket asks 64 at a time, without looking at what comes but its end."""
    body = GenerateRequest(request_id="1-1", max_tokens=1).SerializeToString()
    message = b"\x00" + frames.UINT32.pack(len(body)) + body
    head = b"\x83\x86" + literal(b":path", b"/tailgate.v1.Inference/Generate")
    with socket.create_connection(host_port(address)) as sock:
        ample = frames.UINT32.pack(frames.LARGEST_WINDOW - frames.DEFAULT_WINDOW)
        sock.sendall(frames.PREFACE + frames.frame(frames.SETTINGS, 0, 0))
        sock.sendall(frames.frame(frames.WINDOW_UPDATE, 0, 0, ample))
        stream_id, count, left = 1, 0, b""
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            out = []
            for _ in range(64):
                out.append(frames.frame(frames.HEADERS, frames.END_HEADERS, stream_id, head))
                out.append(frames.frame(frames.DATA, frames.END_STREAM, stream_id, message))
                stream_id += 2
            sock.sendall(b"".join(out))
            ended = 0
            while ended < 64:
                data = left + sock.recv(262_144)
                position = 0
                while len(data) - position >= 9:
                    high, low, kind, flags, _ = frames.HEAD.unpack_from(data, position)
                    end = position + 9 + (high << 16 | low)
                    if end > len(data):
                        break
                    ended += kind == frames.HEADERS and flags & frames.END_STREAM
                    position = end
                left = data[position:]
            count += 64
        return count / (time.monotonic() - began)


def measure(arguments: Sequence[str]) -> Row:
    """What the command line asks for, as one JSON object."""
    options = parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="tailgate-bench-") as scratch:
        folder = Path(options.keep or scratch).resolve()
        if options.keep:
            if folder.exists():
                raise ConfigError(f'--keep "{options.keep}" exists already: give a new folder')
            folder.mkdir(parents=True)
        options.sections = [section for section in SECTIONS if section in options.sections]
        settings = {name: value for name, value in vars(options).items() if name not in ("out", "keep")}
        ledger = Ledger("load", out=Path(options.out) if options.out else None)
        about = {
            "command": command_line("generator.py", arguments),
            "machine": describe_environment(),
            "settings": {**settings, "folder": None},
        }
        ledger.head(**about)
        bench = Bench(options, folder, ledger)
        complete = ledger.run((section, getattr(bench, section)) for section in options.sections)
    return ledger.result("generator", complete=complete, about=about)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    return run_command("generator.py", measure, arguments)


if __name__ == "__main__":
    end_in_order()
    sys.exit(main())
