"""How honest is the load generator, beside what everybody else would use: one command, one JSON line.

    python benchmarks/generator.py streams short open stall --repeats 3

A null server sends what is measured, on one core; each load process has the other. Contestants take turns in every
repeat: stock (Locust, synchronous grpcio, gevent), bare (tailgate's client alone) and tailgate (a Locust process with
loadtests/chat.py that replays a schedule and records).

Sections: server (what the null server itself can do), streams (1,000 streams of 20 and 50 tokens/s), short (answers of
one token, as many as go), open (open loop at 1,000, 3,000 and 10,000 requests/s), stall (the server is silent for 3 s
of 25), recorder (records at 10,000 requests/s). Progress and tables go to stderr, each result at once, also to --out;
the last line on stdout is one JSON object with everything. Exit code: 0 all measured and every goal reached, 1
something failed or missed its goal, 2 bad usage.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

if not __package__:  # as a script: the repository is importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import frames
from benchmarks.contest import CONTESTANTS, ContestError, Cores, NullProcess, Outcome, Work, run
from benchmarks.environment import ROOT, child_environment
from benchmarks.lag import completions_per_s, own_error, stalled_latencies, stream_figures
from benchmarks.ledger import Ledger, end_in_order
from benchmarks.measure import spread
from benchmarks.observed import Plan
from servers.address import host_port
from servers.fields import ConfigError
from servers.rpc.inference_pb2 import GenerateRequest

SECTIONS: Final = ("server", "streams", "short", "open", "stall", "recorder")
STREAMS: Final = 1000
TOKEN_RATES: Final = (20.0, 50.0)
STALL_AFTER_S, STALL_S, STALL_RUN_S = 8.0, 3.0, 25.0
STALL_RATE, STALL_SERVICE_S, STALL_CAP = 200.0, 0.05, 32
USERS: Final = 64  # requests in flight in a closed loop
# Beyond these a contestant only makes heat: it was seen to fall behind for good.
MOST_RATE: Final = {"stock": 1000.0}
# Sustained: this share of what was due was answered, and the generator's own error stayed below this at p99.
SUSTAINED_SHARE, SUSTAINED_MS = 0.99, 50.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How long and how often."""

    sections: tuple[str, ...]
    contestants: tuple[str, ...]
    repeats: int
    window_s: float
    rates: tuple[float, ...]
    seed: int
    nice: int
    recorder_s: float
    folder: Path


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A number that tailgate is to reach: `at_most` or `at_least`."""

    what: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def reached(self) -> bool:
        """Whether it does."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def to_dict(self) -> dict[str, Any]:
        """For the ledger."""
        sign = "≥" if self.at_least else "≤"
        return {"what": self.what, "value": self.value, "goal": f"{sign} {self.limit:g}", "reached": self.reached}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/generator.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sections", nargs="+", choices=SECTIONS, metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--contestants", default=",".join(CONTESTANTS), help="which ones (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each (default %(default)s)")
    parser.add_argument("--window", type=float, default=10.0, help="seconds that count in each (default %(default)s)")
    parser.add_argument("--rates", default="1000,3000,10000", help="open: requests/s (default %(default)s)")
    parser.add_argument("--recorder-seconds", type=float, default=60.0, help="recorder: how long (default %(default)s)")
    parser.add_argument("--nice", type=int, default=0, help="of all processes; below 0 where neighbours are noisy")
    parser.add_argument("--out", default="", help="append each result to this JSON Lines file as soon as it is there")
    parser.add_argument("--keep", default="", help="keep what every run left behind in this new folder")
    parser.add_argument("--seed", type=int, default=0, help="for arrivals and orders (default 0)")
    return parser.parse_args(arguments)


def settings_of(options: argparse.Namespace, folder: Path) -> Settings:
    """The options, checked."""
    contestants = tuple(name.strip() for name in options.contestants.split(",") if name.strip())
    for name in contestants:
        if name not in CONTESTANTS:
            raise ConfigError(f'--contestants "{name}" is unknown: use {", ".join(CONTESTANTS)}')
    if not contestants:
        raise ConfigError(f"--contestants is empty: use {', '.join(CONTESTANTS)}")
    try:
        rates = tuple(float(rate) for rate in options.rates.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(1 <= rate <= 1e6 for rate in rates):
        raise ConfigError(f'--rates "{options.rates}" is no list of rates: give for example 1000,10000')
    if options.repeats < 1:
        raise ConfigError(f"--repeats is {options.repeats}: give 1 or more")
    if not 5 <= options.recorder_seconds <= 3600:
        raise ConfigError(f"--recorder-seconds is {options.recorder_seconds:g}: give 5 to 3600")
    if not 1 <= options.window <= 600:
        raise ConfigError(f"--window is {options.window:g}: give 1 to 600 seconds")
    return Settings(
        sections=tuple(section for section in SECTIONS if section in options.sections),
        contestants=contestants,
        repeats=options.repeats,
        window_s=options.window,
        rates=rates,
        seed=options.seed,
        nice=options.nice,
        recorder_s=options.recorder_seconds,
        folder=folder,
    )


class Bench:
    """Runs the contests of every section and keeps what they gave."""

    def __init__(self, settings: Settings, ledger: Ledger) -> None:
        self.settings = settings
        self.ledger = ledger
        self.cores = Cores.of_this_machine(nice=settings.nice)
        self.goals: list[Goal] = []
        self._runs = 0

    def contests(self, what: str, works: dict[str, Work]) -> dict[str, list[Outcome]]:
        """Every contestant's outcomes; in each repeat they take turns, the first one changing."""
        found: dict[str, list[Outcome]] = {name: [] for name in works}
        for repeat in range(self.settings.repeats):
            for name in _rotated(list(works), repeat):
                self._runs += 1
                self.ledger.note(f"{what}: {name}, repeat {repeat + 1} of {self.settings.repeats}")
                folder = self.settings.folder / f"{self._runs:03d}-{name.replace(' ', '-')}"
                with self.ledger.attempt(what, contestant=name):
                    found[name].append(run(name.split()[0], works[name], folder=folder, cores=self.cores))
        return found

    def reach(self, what: str, value: float | None, limit: float, *, at_least: bool = False) -> None:
        """A goal and how far it was reached; nothing where there is no value."""
        if value is None:
            return
        goal = Goal(what=what, value=value, limit=limit, at_least=at_least)
        self.goals.append(goal)
        self.ledger.add("goals", **goal.to_dict())

    def plan(self, mode: str, **fields: Any) -> Plan:
        """A plan whose address and place are not known yet."""
        return Plan(mode=mode, address="", out="", seed=self.settings.seed, **fields)

    # --- sections ----------------------------------------------------------------------------------------------------

    def server(self) -> None:
        """How many answers a second the null server gives on its core to a socket that reads nothing but ends."""
        for style, options in (("as gRPC writes headers", ()), ("as Envoy writes headers", ("--huffman",))):
            rates, costs = [], []
            for repeat in range(self.settings.repeats):
                folder = self.settings.folder / f"server-{len(options)}-{repeat}"
                folder.mkdir()
                with NullProcess(options, folder=folder, cores=self.cores) as server:
                    rate = blast(server.address, seconds=min(3.0, self.settings.window_s))
                    report = server.ask(f"report {folder / 'server.npz'}")
                rates.append(rate)
                costs.append(report["cpu_s"] / report["answered"] * 1e6)
            self.ledger.add("server", what=style, answers_s=spread(rates), cpu_us=spread(costs))

    def streams(self) -> None:
        """1,000 paced streams: what share of the tokens each client sees, and how late."""
        for rate in TOKEN_RATES:
            what = f"{STREAMS:,} × {rate:g} tok/s"
            settle_s, ramp_s = 3.0, 2.0
            seconds = settle_s + ramp_s + self.settings.window_s + 3.0
            work = Work(
                plan=self.plan("streams", streams=STREAMS, ramp_s=ramp_s, tokens=int(rate * seconds)),
                server=("--tokens-per-s", str(rate)),
                window_s=self.settings.window_s,
                settle_s=settle_s,
            )
            found = self.contests("streams", dict.fromkeys(self.settings.contestants, work))
            for name, outcomes in found.items():
                rows = []
                for o in outcomes:
                    with self.ledger.attempt("streams", what=what, contestant=name):
                        rows.append(stream_figures(o.seen, o.sent, start_ns=o.start_ns, end_ns=o.end_ns))
                if rows:
                    self._row("streams", what, name, rows, outcomes)
                    if name == "tailgate":
                        few = rate <= 20
                        limit = 5.0 if few else 10.0
                        share = 0.995 if few else 0.99
                        self.reach(f"{what}: delivered", _median(rows, "delivered"), share, at_least=True)
                        self.reach(f"{what}: p99 lag, ms", _median(rows, "p99_lag_ms"), limit)
                        if few:
                            self.reach(f"{what}: p99 ITL error, ms", _median(rows, "p99_itl_error_ms"), 5.0)

    def short(self) -> None:
        """Requests/s of answers of one token: a closed loop of 64, and what tailgate sustains open loop."""
        closed = Work(plan=self.plan("closed", users=USERS), window_s=min(5.0, self.settings.window_s))
        found = self.contests("short", dict.fromkeys(self.settings.contestants, closed))
        best: dict[str, float] = {}
        for name, outcomes in found.items():
            rates = [completions_per_s(o.seen, start_ns=o.start_ns, end_ns=o.end_ns) for o in outcomes]
            if rates:
                best[name] = float(np.median(rates))
                self._row("short", f"closed loop of {USERS}", name, [{"requests_s": rate} for rate in rates], outcomes)
        if "tailgate" in self.settings.contestants:
            best["tailgate, open loop"] = self._sustained()
        if "stock" in best:
            for name in ("bare", "tailgate, open loop"):
                if name in best:
                    self.reach(f"short requests: {name} ÷ stock", best[name] / best["stock"], 10.0, at_least=True)

    def _sustained(self) -> float:
        """The highest of rising open-loop rates that a whole tailgate load process keeps."""
        kept: list[float] = []
        for _ in range(self.settings.repeats):
            best, rate = 0.0, 8000.0
            while rate <= 40_000:
                work = Work(plan=self.plan("open", rate=rate), window_s=min(5.0, self.settings.window_s), settle_s=2.0)
                self._runs += 1
                folder = self.settings.folder / f"{self._runs:03d}-tailgate"
                with self.ledger.attempt("short", contestant="tailgate"):
                    outcome = run("tailgate", work, folder=folder, cores=self.cores)
                    figures = own_error(outcome.seen, start_ns=outcome.start_ns, end_ns=outcome.end_ns)
                    self.ledger.note(
                        f"tailgate, open loop of {rate:,.0f}/s: answered {figures['answered']:.4f}, "
                        f"own p99 {figures['p99_own_ms']:.2f} ms, {outcome.load_core:.2f} of a core"
                    )
                    if figures["answered"] >= SUSTAINED_SHARE and figures["p99_own_ms"] <= SUSTAINED_MS:
                        best, rate = rate, rate * 1.25
                        continue
                break
            kept.append(best)
        self.ledger.add("short", what="open loop sustained", contestant="tailgate", requests_s=spread(kept))
        return float(np.median(kept))

    def open(self) -> None:
        """Open loop: the generator's own share of the latency, with the garbage collector as each of them has it."""
        for rate in self.settings.rates:
            what = f"{rate:,.0f} requests/s"
            names = [name for name in self.settings.contestants if rate <= MOST_RATE.get(name, rate)]
            work = Work(plan=self.plan("open", rate=rate), window_s=self.settings.window_s, settle_s=2.0)
            for name, outcomes in self.contests("open", dict.fromkeys(names, work)).items():
                rows = []
                for outcome in outcomes:
                    with self.ledger.attempt("open", what=what, contestant=name):
                        figures = own_error(outcome.seen, start_ns=outcome.start_ns, end_ns=outcome.end_ns)
                        rows.append({**figures, "gc_max_ms": outcome.generator.get("gc_ms", {}).get("max")})
                if rows:
                    self._row("open", what, name, rows, outcomes)
                    if name == "tailgate":
                        self.reach(f"open loop at {what}: own error p99, ms", _median(rows, "p99_own_ms"), 3.0)

    def stall(self) -> None:
        """A server that is silent for 3 s of 25: which p99 each way of loading reports, and which is the truth."""
        open_loop = Work(
            plan=self.plan("open", rate=STALL_RATE, seconds=STALL_RUN_S),
            server=("--service-ms", f"{STALL_SERVICE_S * 1e3:g}"),
            settle_s=0.0,
            window_s=STALL_RUN_S,
            stall_s=(STALL_AFTER_S, STALL_S),
        )
        closed = dataclasses.replace(open_loop, plan=self.plan("closed", users=10))
        works = {
            "tailgate": open_loop,
            f"tailgate max_concurrency {STALL_CAP}": dataclasses.replace(open_loop, cap=STALL_CAP),
            "stock closed loop": closed,
        }
        works = {name: work for name, work in works.items() if name.split()[0] in self.settings.contestants}
        for name, outcomes in self.contests("stall", works).items():
            rows = []
            for outcome in outcomes:
                seen, stall = outcome.seen, outcome.server["stall_ns"]
                done = seen.ok > 0
                latency = (seen.end - seen.scheduled)[done] / 1e6
                row: dict[str, Any] = {"requests": len(latency), "p99_ms": float(np.quantile(latency, 0.99))}
                if "closed" not in name:
                    due = np.sort(seen.scheduled)
                    truth = stalled_latencies(
                        due, service_ns=int(STALL_SERVICE_S * 1e9), stall_ns=stall, cap=works[name].cap
                    )
                    row["truth_p99_ms"] = float(np.quantile(truth, 0.99)) / 1e6
                    row["error"] = row["p99_ms"] / row["truth_p99_ms"] - 1
                    row["unanswered"] = int((~done).sum())
                rows.append(row)
            if rows:
                self._row("stall", f"{STALL_S:g} s of {STALL_RUN_S:g} s", name, rows, outcomes)
                if "error" in rows[0]:
                    self.reach(f"stall, {name}: |p99 ÷ truth − 1|", max(abs(row["error"]) for row in rows), 0.1)

    def recorder(self) -> None:
        """Records at 10,000 requests/s for a minute: all of them, in how much of a core, in how much memory."""
        seconds = self.settings.recorder_s
        command = [sys.executable, str(ROOT / "benchmarks" / "recorder.py"), "--rate", "10000"]
        command += ["--seconds", f"{seconds:g}"]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=self.settings.folder, env=child_environment()
        )
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or ["no message"]
            raise ContestError(f"benchmarks/recorder.py ended with {done.returncode}: {last[0]}")
        row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        memory = row["rss_mib"]
        growth = memory[-1] / memory[len(memory) // 3] - 1 if len(memory) > 2 else None
        self.ledger.add("recorder", **{key: value for key, value in row.items() if key != "benchmark"})
        self.reach("recorder: records lost", row["lost"], 0)
        self.reach("recorder: share of a core", row["recorder_cpu_share"], 0.1)
        self.reach("recorder: growth of memory after the first third", growth, 0.02)

    def _row(
        self, section: str, what: str, name: str, rows: Sequence[dict[str, Any]], outcomes: Sequence[Outcome]
    ) -> None:
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
            samples=list(rows),
        )


def _rotated(items: list[str], by: int) -> list[str]:
    turn = by % len(items) if items else 0
    return items[turn:] + items[:turn]


def _median(rows: Sequence[dict[str, Any]], key: str) -> float | None:
    values = [row[key] for row in rows if row[key] is not None]
    return float(np.median(values)) if values else None


def blast(address: str, *, seconds: float) -> float:
    """Answers/s of a null server that a raw socket asks 64 at a time, without looking at what comes but its end."""
    body = GenerateRequest(request_id="1-1", max_tokens=1).SerializeToString()
    message = b"\x00" + frames.UINT32.pack(len(body)) + body
    head = b"\x83\x86" + frames.literal(b":path", b"/tailgate.v1.Inference/Generate")
    with socket.create_connection(host_port(address)) as sock:
        ample = frames.UINT32.pack(frames.LARGEST_WINDOW - frames.DEFAULT_WINDOW)
        sock.sendall(frames.PREFACE + frames.settings(()) + frames.frame(frames.WINDOW_UPDATE, 0, 0, ample))
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


def main(arguments: Sequence[str] | None = None) -> int:
    """The process's exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(given)
    try:
        with tempfile.TemporaryDirectory(prefix="tailgate-bench-") as scratch:
            folder = Path(options.keep) if options.keep else Path(scratch)
            if options.keep:
                if folder.exists():
                    raise ConfigError(f'--keep "{folder}" exists already: give a new folder')
                folder.mkdir(parents=True)
            return _main(settings_of(options, folder.resolve()), options, given)
    except ConfigError as error:
        print(f"benchmarks/generator.py: {error}", file=sys.stderr)
        return 2


def _main(settings: Settings, options: argparse.Namespace, given: Sequence[str]) -> int:
    from loadtests.trials.environment import describe_environment

    ledger = Ledger("load", out=Path(options.out) if options.out else None)
    command = shlex.join(["python", "benchmarks/generator.py", *given])
    shown = {**dataclasses.asdict(settings), "folder": None}
    where = describe_environment()
    ledger.head(command=command, machine=where, settings=shown)
    bench = Bench(settings, ledger)
    complete = ledger.run((section, getattr(bench, section)) for section in settings.sections)
    missed = [f"{goal.what} is {goal.value:.4g}" for goal in bench.goals if not goal.reached]
    about = {"command": command, "machine": where, "settings": shown}
    result = ledger.result("generator", complete=complete, about=about, missed=missed)
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    end_in_order()
    sys.exit(main())
