"""The console script `tailgate`: run | parity | inspect | serve | split | worker | analyze | export | forecast | plan |
calibrate | breakeven.

Exit codes of run, parity and analyze: 0 PASS, 3 INCONCLUSIVE, 99 FAIL, 2 bad usage or configuration, 1 the run itself
broke or was interrupted. What a command found is on stdout, as `servers.stdout` says: words for a person at a terminal,
one JSON object as the last line for a program. Every other word about progress goes to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from analysis.statistics.exposure import ExposureError
from loadtests.commands.flags import give_types, real, whole
from loadtests.commands.foresight import add_breakeven, add_calibrate, add_plan, breakeven, calibrate, plan
from loadtests.experiments.experiment import builtin_names, check_parity, load, parse_setting, set_path
from loadtests.experiments.field_names import FieldFlags
from loadtests.experiments.toml_limits import check_values
from servers import stdout
from servers.complaint import fault, one_line
from servers.config import PRESETS, ArmConfig, ConfigError, EngineConfig, ModelConfig, override

if TYPE_CHECKING:
    from servers.security import ServerTls

EXIT_BROKE = 1
EXIT_USAGE = 2


class _Parser(argparse.ArgumentParser):
    """Errors are one line on stderr, as all of tailgate's."""

    def error(self, message: str) -> NoReturn:
        command = self.prog.partition(" ")[2]
        see = f"see `tailgate {command}{' ' if command else ''}--help`"
        self.exit(EXIT_USAGE, f"tailgate: {one_line(message)}: {see}\n")


def main(arguments: Sequence[str] | None = None, *, arm_command: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. `arm_command` replaces what starts an arm, for tests."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show is no reason to fall
    folder: Path | None = None
    try:
        options = build_parser().parse_args(arguments)
        folder = Path(options.run_dir) if getattr(options, "run_dir", "") else None
        commands: dict[str, Callable[[argparse.Namespace], int]] = {
            "run": partial(_run, arm_command=arm_command),
            "parity": _parity,
            "inspect": _inspect,
            "serve": _serve,
            "split": _split,
            "worker": _worker,
            "export": _export,
            "forecast": _forecast,
            "analyze": _analyze,
            "plan": plan,
            "calibrate": calibrate,
            "breakeven": breakeven,
        }
        code = commands[options.command](options)
        if sys.stdout is not None:  # it is None where the caller closed it
            sys.stdout.flush()
        return code
    except ConfigError as error:
        return _complain(str(error), EXIT_USAGE)
    except KeyboardInterrupt:
        return _complain("interrupted", EXIT_BROKE)
    except BrokenPipeError:
        # The reader of stdout is gone (`tailgate ... | head`): nobody is left to tell.
        _leave_stdout()
        return EXIT_BROKE
    except Exception as error:
        if isinstance(error, OSError):
            _leave_stdout()
        return _complain(fault(error, folder), EXIT_BROKE)


def _leave_stdout() -> None:
    """What stdout still holds is not tried again at the end of the process."""
    sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115


def _complain(message: str, code: int) -> int:
    with contextlib.suppress(OSError):  # stderr may be closed or full: the exit code still tells
        print(f"tailgate: {one_line(message)}", file=sys.stderr)
    return code


# --- Command line -----------------------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = _Parser(
        prog="tailgate",
        description="May this compiled model server replace the eager one, under our traffic, within our SLA?",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  tailgate run demo                       three arms on this CPU, 90 s of traffic, a verdict\n"
        "  tailgate run canary.toml --trace conv.csv\n"
        "  tailgate parity demo                    do the arms compute the same?\n"
        "  tailgate inspect --arm compiled-naive   what will recompile, before any load\n"
        "  tailgate analyze runs/20260101T120000Z-canary\n"
        "  tailgate forecast conv.csv              how many compiles, how much padding, before any GPU time\n"
        "  tailgate plan --rate 4 --margin 0.1     how long a run must be\n"
        "\n"
        "`tailgate COMMAND --help` says more.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    _add_run(commands)
    _add_parity(commands)
    _add_inspect(commands)
    _add_serve(commands)
    _add_split(commands)
    _add_worker(commands)
    _add_analyze(commands)
    _add_export(commands)
    _add_forecast(commands)
    for add in (add_plan, add_calibrate, add_breakeven):
        add(partial(_command, commands))
    give_types(parser)
    return parser


def _command(
    commands: Any,
    name: str,
    summary: str,
    details: str,
    examples: str,
    *,
    json_help: str = "print one JSON object alone",
) -> argparse.ArgumentParser:
    """The command's parser. Each has --json, but for those with an empty `json_help`, which find nothing."""
    said = "\nWith --json, or where stdout is no terminal, its last line is one JSON object." if json_help else ""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.\n\n{details}{said}",
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if json_help:
        parser.add_argument("--json", action="store_true", help=json_help)
    return parser


def _add_run(commands: Any) -> None:
    parser = _command(
        commands,
        "run",
        "run an experiment and judge it",
        "Starts every arm and the splitter, drives the traffic through them, records everything in a new\n"
        "directory, and judges the arms against the control. Ctrl-C stops in order, keeps and judges what was\n"
        "recorded; a second Ctrl-C kills at once.\n\n"
        "Exit codes: 0 PASS, 3 INCONCLUSIVE, 99 FAIL, 2 bad usage or configuration, 1 the run broke or was\n"
        "interrupted.",
        "  tailgate run demo\n"
        "  tailgate run demo --set traffic.duration_s=1200 --set trials.count=3\n"
        "  tailgate run canary.toml --trace AzureLLMInferenceTrace_conv.csv --set traffic.time_scale=2\n"
        "  tailgate run canary.toml --set arms[1].compile.mode=max-autotune\n"
        "  tailgate run canary.toml --set arms.compiled.replicas=2\n"
        "  tailgate run canary.toml --request-rate 8 --num-prompts 500 --goodput ttft:200 tpot:50",
    )
    _add_experiment(parser)
    _add_set(parser, "traffic.rate=4")
    parser.add_argument(
        "--trace",
        default="",
        metavar="FILE",
        help="replay the times and lengths of this trace (Azure CSV, Mooncake JSON Lines, or a CSV of your own)",
    )
    parser.add_argument("--out", default="runs", metavar="DIR", help="folder for run directories (default %(default)s)")
    parser.add_argument("--seed", type=_seed, default=None, metavar="N", help="replaces the experiment's seed")
    _add_slo(parser)
    _add_field_names(parser)


def _add_slo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--slo",
        action="append",
        default=[],
        metavar="TARGET",
        help='a target, such as "p99_ttft_ms <= 500" or "error_rate <= 0.5%%"; replaces one on the same figure; '
        "may be repeated",
    )


def _add_field_names(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("names that other serving benchmarks use", "With the meaning they have there.")
    for flag, kind, metavar, text in (
        ("--request-rate", _rate, "R", "requests/s to each arm; inf: all at once, or as --max-concurrency lets them"),
        ("--burstiness", _factor, "B", "gamma shape of the gaps between requests; 1 is Poisson"),
        ("--max-concurrency", _count, "N", "most requests under way to each arm"),
        ("--num-prompts", _count, "N", "requests that are sent to each arm"),
    ):
        group.add_argument(flag, type=kind, default=None, metavar=metavar, help=text)
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="NAME:MS", help="limits of a good request, such as ttft:200 tpot:50"
    )


def _rate(text: str) -> float:
    return math.inf if text in ("inf", "+inf", "Infinity") else _finite_rate(text)


_finite_rate = real(0, 1e9, "rate (requests/s, or inf)", above=True)
_factor = real(0, 1e6, above=True)
_count = whole(1, 10**9, "count")
_number = whole(0, 10**6)
_port = whole(0, 65535, "port")
_seed = whole(0, 2**63 - 1, "seed")


def _add_parity(commands: Any) -> None:
    parser = _command(
        commands,
        "parity",
        "say whether the arms of an experiment compute the same",
        "Runs every arm by itself on the same prompts, without traffic, and compares its greedy answers with the\n"
        "control's and its logits with a float64 reference of the same weights. In float32 the answers must be\n"
        "equal. In lower precision the error may be 1.5 times the control's, and a token that float64 would not\n"
        "take must lie within noise of the one that it would. Arms that differ in more than their policy are\n"
        "refused.\n\n"
        "Exit codes: 0 PASS, 3 INCONCLUSIVE, 99 FAIL, 2 bad usage or configuration, 1 the measurement broke or was\n"
        "interrupted.",
        "  tailgate parity demo\n"
        "  tailgate parity demo --set model.dtype=bfloat16\n"
        "  tailgate parity canary.toml --set parity.prompts=64 --set parity.tokens=128\n"
        "  tailgate parity canary.toml --set parity.reference=false",
    )
    _add_experiment(parser)
    _add_set(parser, "parity.prompts=64")
    parser.add_argument("--out", default="runs", metavar="DIR", help="folder for the outcome (default %(default)s)")
    parser.add_argument("--keep-logits", action="store_true", help="leave the arms' logits in the outcome's folder")
    parser.add_argument("--seed", type=_seed, default=None, metavar="N", help="replaces the experiment's seed")


def _add_experiment(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "experiment", metavar="EXPERIMENT", help=f"a TOML file, or a built-in one: {', '.join(builtin_names())}"
    )


def _add_set(parser: argparse.ArgumentParser, example: str) -> None:
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=f"replaces one setting, such as {example}; may be repeated",
    )


def _add_serve(commands: Any) -> None:
    parser = _command(
        commands,
        "serve",
        "serve one arm over gRPC",
        "Loads the model, warms it up, and serves tailgate.v1.Inference, telemetry, health and reflection.\n"
        "Says its port and pid once the port listens; health turns SERVING\n"
        "when the arm is warm and has answered a request of its own.\n"
        "SIGTERM or Ctrl-C drains: no new request, running ones finish, exit 0.\n\n"
        f"Presets: {', '.join(PRESETS)}.",
        "  tailgate serve --preset eager --port 50051\n"
        "  tailgate serve --preset compiled-padded --model random:llama-3.2-1b --device cuda --dtype bfloat16 \\\n"
        "                 --slots 16 --max-prompt-tokens 2048 --port 50052\n"
        "  tailgate serve --preset compiled-naive --set compile.mode=reduce-overhead --port 50053",
    )
    parser.add_argument("--preset", required=True, metavar="NAME", help="shapes and compile policy of the arm")
    parser.add_argument("--name", default="", help="name of the arm in records (default: the preset)")
    _add_arm_flags(parser)
    _add_set(parser, "compile.mode=max-autotune or engine.max_queue=64")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument(
        "--port", type=_port, default=50051, help="port to listen on; 0 takes a free one (default %(default)s)"
    )
    parser.add_argument("--replica", default="", help="name of this process in records (default: NAME-0)")
    parser.add_argument("--cache-dir", default="", metavar="DIR", help="keep compiled code here (default: nowhere)")
    parser.add_argument("--metrics-port", type=_port, default=0, help="serve Prometheus metrics here (default: off)")
    _add_listener_tls(parser)
    parser.add_argument(
        "--token-env",
        default=None,
        metavar="NAME",
        help="environment variable with the bearer token that every call but health checks must carry",
    )


def _add_listener_tls(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tls-certificate", default=None, metavar="FILE", help="serve TLS with this chain (PEM)")
    parser.add_argument("--tls-key", default=None, metavar="FILE", help="the key of --tls-certificate (PEM)")
    parser.add_argument(
        "--tls-client-ca",
        default=None,
        metavar="FILE",
        help="let in only clients with a certificate of this authority (PEM)",
    )


# The flags that describe the arm of a preset: name, table and key that it sets, help.
_ARM_FLAGS = (
    ("model", "model", "id", "Hugging Face path or id, or random:NAME"),
    ("device", "model", "device", "auto, cpu, cuda or cuda:N"),
    ("dtype", "model", "dtype", "auto, float32, float16 or bfloat16"),
    ("slots", "engine", "slots", "requests that run at once"),
    ("max_prompt_tokens", "engine", "max_prompt_tokens", "longest prompt"),
    ("max_new_tokens", "engine", "max_new_tokens", "longest answer"),
)


def _add_arm_flags(parser: argparse.ArgumentParser) -> None:
    tables = {"model": ModelConfig(), "engine": EngineConfig()}
    for name, table, key, text in _ARM_FLAGS:
        default = getattr(tables[table], key)
        # None tells a flag that was not given from one that repeats the default
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=type(default), default=None, help=f"{text} (default {default})")


def _add_inspect(commands: Any) -> None:
    parser = _command(
        commands,
        "inspect",
        "list the graphs of an arm and the shapes that will recompile",
        "Loads the arm, warms it up as it would be served, then runs each shape as a step of the engine and says\n"
        "what it met: a graph that was ready, a compile, a recompile and why, or a fall-back to eager. Then follow\n"
        "the graphs (guards, nodes, kernels, graph breaks), memory and the cost of the start. No traffic is sent.\n\n"
        "A shape is a step before padding: `prefill ROWSxTOKENS`, `decode ROWS@CONTEXT`, or for later chunks of\n"
        "prompts `extend ROWSxTOKENS@CONTEXT`. Without --shapes: every planned shape and a few that are not.\n\n"
        "Exit codes: 0 every shape is ready, 99 some are not, 2 bad usage or configuration, 1 it broke or was\n"
        "interrupted.",
        "  tailgate inspect demo --arm compiled-naive\n"
        "  tailgate inspect --arm compiled-bucketed --model random:llama-3.2-1b --max-prompt-tokens 2048\n"
        '  tailgate inspect --arm compiled-dynamic --shapes "prefill 1x128, prefill 1x129, decode 8@200"\n'
        "  tailgate inspect canary.toml --arm buckets --set arms.buckets.compile.mode=max-autotune",
    )
    parser.add_argument(
        "experiment",
        nargs="?",
        default="",
        metavar="EXPERIMENT",
        help=f"a TOML file, or a built-in one: {', '.join(builtin_names())}",
    )
    parser.add_argument(
        "--arm",
        "--preset",
        dest="arm",
        required=True,
        metavar="NAME",
        help=f"an arm of EXPERIMENT; without one a preset: {', '.join(PRESETS)}",
    )
    parser.add_argument("--shapes", default="", metavar="LIST", help="shapes to run in this order, between commas")
    _add_arm_flags(parser)
    _add_set(parser, "compile.mode=max-autotune, or as `run` takes it with EXPERIMENT")
    parser.add_argument("--cache-dir", default="", metavar="DIR", help="keep compiled code here (default: nowhere)")


def _add_split(commands: Any) -> None:
    parser = _command(
        commands,
        "split",
        "split traffic over arms with Envoy, in the foreground",
        "Clients dial --port. Weights decide the arm of each request (of each session, when a session header is\n"
        "sent); the header x-tailgate-arm pins one. Weights change live: run the command again with --admin and\n"
        "--set-weights; streams in flight are not touched. Ctrl-C ends it once running streams are done.",
        "  tailgate split --arm eager=127.0.0.1:50051 --arm compiled=127.0.0.1:50052,127.0.0.1:50053 \\\n"
        "                 --weight eager=90 --weight compiled=10 --port 8080 --admin-port 9901\n"
        "  tailgate split --admin 127.0.0.1:9901 --set-weights eager=50,compiled=50\n"
        "  tailgate split --arm eager=10.0.0.7:50051 --arm compiled=10.0.0.8:50051 --print-config envoy\n"
        "  tailgate split --arm eager=10.0.0.7:50051 --arm compiled=10.0.0.8:50051 --print-config kubernetes",
    )
    parser.add_argument(
        "--arm", action="append", default=[], metavar="NAME=HOST:PORT,...", help="one arm and its replicas; repeat"
    )
    parser.add_argument(
        "--weight", action="append", default=[], metavar="NAME=N", help="share of one arm (default 1); repeat"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument("--port", type=_port, default=8080, help="port to listen on (default %(default)s)")
    parser.add_argument(
        "--admin-port", type=_port, default=0, help="port of Envoy's admin interface (default: a free one)"
    )
    parser.add_argument(
        "--stickiness", default="arm", help="what a session keeps: arm, replica or off (default %(default)s)"
    )
    _add_listener_tls(parser)
    parser.add_argument(
        "--upstream-ca",
        default=None,
        metavar="FILE",
        help="reach the arms by TLS and trust this authority (PEM); their names are checked",
    )
    parser.add_argument(
        "--upstream-name", default=None, help="name that the arms' certificates carry (default: the addresses' own)"
    )
    parser.add_argument("--upstream-certificate", default=None, metavar="FILE", help="shown to the arms (PEM)")
    parser.add_argument("--upstream-key", default=None, metavar="FILE", help="the key of --upstream-certificate (PEM)")
    parser.add_argument("--log-dir", default="", metavar="DIR", help="keep Envoy's log and configuration here")
    parser.add_argument(
        "--print-config",
        nargs="?",
        const="envoy",
        choices=("envoy", "kubernetes"),
        help="print Envoy's configuration or a Kubernetes GRPCRoute as JSON, and end",
    )
    parser.add_argument("--admin", default="", metavar="HOST:PORT", help="admin interface of a running split")
    parser.add_argument(
        "--set-weights", default="", metavar="NAME=N,...", help="new weights for the split behind --admin"
    )


def _add_analyze(commands: Any) -> None:
    parser = _command(
        commands,
        "analyze",
        "judge a run directory again",
        "Reads the records (Arrow, Parquet or JSON Lines; also of a run that was cut off), writes summary.json,\n"
        "report.html, report.md and junit.xml into the directory, and prints the verdict.\n\n"
        "Exit codes: 0 PASS, 3 INCONCLUSIVE, 99 FAIL, 2 not readable.",
        "  tailgate analyze runs/20260101T120000Z-canary\n"
        "  tailgate analyze runs/20260101T120000Z-canary --json | jq .gates\n"
        "  tailgate analyze runs/20260101T120000Z-canary --slo 'p99_ttft_ms <= 300'",
        json_help="print summary.json on one line instead of the table",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="a directory that `tailgate run` wrote")
    _add_slo(parser)


def _add_worker(commands: Any) -> None:
    parser = _command(
        commands,
        "worker",
        "drive load from this host for a run on another one",
        "Waits for `tailgate run` with traffic.remote_workers at --master, drives its share of each trial, and sends\n"
        "the records back; a copy stays in --keep. Then it waits for the next trial, until Ctrl-C or --trials.\n"
        "Both need the same secret in the environment variable TAILGATE_CHANNEL_TOKEN: it closes and encrypts the\n"
        "channel between them. Tokens for arms are read here, from this host's environment or files, and never\n"
        "travel.",
        "  tailgate worker --master 10.0.0.5:5557\n"
        "  tailgate worker --master 10.0.0.5:5557 --keep /var/lib/tailgate --trials 3",
        json_help="",
    )
    parser.add_argument("--master", required=True, metavar="HOST:PORT", help="traffic.master_bind of the run")
    parser.add_argument(
        "--keep",
        default="tailgate-worker",
        metavar="DIR",
        help="records stay here, by run and trial (default %(default)s)",
    )
    parser.add_argument("--trials", type=_number, default=0, metavar="N", help="end after N trials (default: never)")


def _add_export(commands: Any) -> None:
    parser = _command(
        commands,
        "export",
        "write the records of a run as Parquet, JSON Lines or CSV",
        "Makes a directory that `tailgate analyze` judges as it does the run (not from CSV): each table under its own\n"
        "name, and the small files beside it. Rows go through in batches: memory does not grow with the run.\n"
        "In CSV a list of numbers such as token_ns is one cell with spaces between, a list of texts one cell of JSON.",
        "  tailgate export runs/20260101T120000Z-canary --format parquet\n"
        "  tailgate export runs/20260101T120000Z-canary --format csv --table requests --out canary-csv",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="a directory that `tailgate run` wrote")
    parser.add_argument("--format", required=True, choices=("parquet", "jsonl", "csv"), help="what to write")
    parser.add_argument("--out", default="", metavar="DIR", help="a new directory (default: RUN_DIR-FORMAT)")
    parser.add_argument(
        "--table",
        default="requests,steps,compile_events",
        metavar="LIST",
        help="which tables, between commas (default %(default)s)",
    )


def _add_forecast(commands: Any) -> None:
    parser = _command(
        commands,
        "forecast",
        "say from a trace alone what each compile policy will pay",
        "How often a prompt length that never came will arrive, how many graphs and compiles each policy needs,\n"
        "what it pads, and the ladder of buckets that pads least; and the same for the decode steps of a server with\n"
        "so many slots whose steps take so long. Nothing is run.",
        "  tailgate forecast AzureLLMInferenceTrace_conv.csv --max-prompt-tokens 8192\n"
        "  tailgate forecast conv.csv --graphs 6 --multiple 64 --compile-seconds 20\n"
        "  tailgate forecast conv.csv --batch 4 --window-ms 50 --ladder 256,1024,4096\n"
        "  tailgate forecast conv.csv --slots 32 --step-ms 7,12",
    )
    add = parser.add_argument
    add("trace", metavar="TRACE", help="an Azure CSV, a Mooncake JSON Lines file, or a CSV of your own")
    add("--max-prompt-tokens", type=int, default=0, metavar="N", help="leave longer prompts out (default: none)")
    add("--graphs", type=int, default=8, metavar="N", help="steps of the best ladder (default %(default)s)")
    add("--multiple", type=int, default=1, metavar="N", help="its steps are multiples of this (default %(default)s)")
    add("--ladder", default="", metavar="LIST", help="a ladder of your own to compare, such as 256,1024,4096")
    add("--batch", type=int, default=1, metavar="N", help="most prompts in one prefill (default %(default)s)")
    add("--window-ms", type=float, default=0.0, metavar="MS", help="they come within this time (default 0)")
    add("--recompile-limit", type=int, default=8, metavar="N", help="the compiler's (default %(default)s)")
    add("--slots", type=int, default=8, metavar="N", help="requests that decode at once (default %(default)s)")
    add("--step-ms", default="10,30,100", metavar="LIST", help="what a decode step takes (default %(default)s)")
    add("--compile-seconds", type=float, default=0.0, metavar="S", help="what one compile takes, for the stalls")


def _forecast(options: argparse.Namespace) -> int:
    from loadtests.commands.forecast import Forecast, forecast, forecast_text
    from loadtests.traffic.traces import read_trace

    try:
        ladder = tuple(int(step) for step in options.ladder.split(",")) if options.ladder else ()
    except ValueError:
        raise ConfigError(f'--ladder "{options.ladder}" is no list of tokens: give for example 256,1024,4096') from None
    try:
        step_ms = tuple(float(step) for step in options.step_ms.split(","))
    except ValueError:
        raise ConfigError(f'--step-ms "{options.step_ms}" is no list of times: give for example 10,30,100') from None
    asked = Forecast(
        max_prompt_tokens=options.max_prompt_tokens,
        batch=options.batch,
        window_s=options.window_ms / 1e3,
        graphs=options.graphs,
        multiple=options.multiple,
        ladder=ladder,
        recompile_limit=options.recompile_limit,
        compile_s=options.compile_seconds,
        slots=options.slots,
        step_ms=step_ms,
    )
    try:
        found = forecast(read_trace(options.trace), asked)
    except ExposureError as error:
        raise ConfigError(str(error)) from None
    stdout.write(forecast_text(found), found, as_json=options.json)
    return 0


# --- run --------------------------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace, arm_command: Sequence[str] | None) -> int:
    flags = FieldFlags(
        request_rate=options.request_rate,
        burstiness=options.burstiness,
        max_concurrency=options.max_concurrency,
        num_prompts=options.num_prompts,
        goodput=tuple(options.goodput),
    )
    experiment = load(
        options.experiment,
        settings=options.settings,
        trace=options.trace,
        seed=options.seed,
        flags=flags,
        slo=options.slo,
    )
    # After the experiment is known to be sound: these take a while to import.
    from loadtests.trials.progress import Display, Status
    from loadtests.trials.run import ARM_COMMAND, Orchestrator, RunOutcome

    status = Status()
    orchestrator = Orchestrator(
        experiment, out=Path(options.out), status=status, arm_command=arm_command or ARM_COMMAND
    )
    orchestrator.prepare()
    outcome: RunOutcome
    with _stopping(orchestrator.interrupt, orchestrator.kill, status.note), Display(status):
        outcome = orchestrator.run()
        status.phase = "stopped" if not outcome.complete else "recorded"
    if outcome.error is not None:
        _complain(outcome.error, EXIT_BROKE)
    elif outcome.interrupted:
        _complain(f"interrupted: what was recorded is in {outcome.run_dir}", EXIT_BROKE)
    if outcome.failed_parity is not None:
        return _tell_parity(outcome.failed_parity, outcome.run_dir, as_json=options.json)
    ended = {
        "complete": outcome.complete,
        **({"interrupted": True} if outcome.interrupted else {}),
        **({"error": outcome.error} if outcome.error else {}),
    }
    if not outcome.complete and not _has_requests(outcome.run_dir):
        line = {"verdict": None, "run_dir": str(outcome.run_dir), "report": None, "exit_code": EXIT_BROKE}
        stdout.write("", {**line, **ended}, as_json=options.json)
        return EXIT_BROKE
    print(f"judging {outcome.run_dir}", file=sys.stderr)
    return _judge(outcome.run_dir, ended, as_json=options.json, broke=not outcome.complete)


def _parity(options: argparse.Namespace) -> int:
    experiment = load(options.experiment, settings=options.settings, seed=options.seed, needs_traffic=False)
    check_parity(experiment)
    from loadtests.trials.parity_processes import ParityError, ParityRun
    from loadtests.trials.preflight import check_writable
    from loadtests.trials.progress import Display, Status
    from loadtests.trials.run import new_run_dir

    out = Path(options.out)
    check_writable(out)
    stopped: list[int] = []

    def check() -> None:
        if stopped:
            raise KeyboardInterrupt

    status = Status()
    measuring = ParityRun(
        experiment,
        folder=new_run_dir(out, f"{experiment.name}-parity"),
        shared_cache=out / "compile-cache",
        status=status,
        check=check,
        keep_logits=options.keep_logits,
    )
    try:
        with _stopping(lambda: stopped.append(1), measuring.kill, status.note), Display(status):
            outcome = measuring.run()
            status.phase = "measured"
    except (ParityError, KeyboardInterrupt) as error:
        why = str(error) or "interrupted"
        _complain(why, EXIT_BROKE)
        line = {"verdict": None, "run_dir": str(measuring.folder), "report": None, "exit_code": EXIT_BROKE}
        stdout.write("", {**line, "error": why}, as_json=options.json)
        return EXIT_BROKE
    return _tell_parity(outcome, measuring.folder, as_json=options.json)


def _tell_parity(outcome: Mapping[str, Any], folder: Path, *, as_json: bool) -> int:
    from loadtests.trials.parity_processes import parity_table

    line = {
        "verdict": outcome["verdict"],
        "run_dir": str(folder),
        "report": str(folder / "parity.json"),
        "exit_code": outcome["exit_code"],
        "arms": {arm["name"]: arm["verdict"] for arm in outcome["arms"]},
        "reasons": {arm["name"]: arm["reasons"] for arm in outcome["arms"] if arm["reasons"]},
    }
    words = f"{parity_table(outcome)}\n\nreport: {folder / 'parity.json'}"
    stdout.write(words, line, as_json=as_json)
    return int(outcome["exit_code"])


@contextlib.contextmanager
def _stopping(interrupt: Callable[[], None], kill: Callable[[], None], note: Callable[[str], None]) -> Iterator[None]:
    """Ctrl-C and SIGTERM stop in order; a second one kills every child and ends this process at once."""
    signals = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal signals
        signals += 1
        if signals == 1:
            interrupt()
            note("stopping in order; Ctrl-C again kills at once")
            return
        kill()
        os._exit(EXIT_BROKE)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _has_requests(run_dir: Path) -> bool:
    """Whether any request was recorded."""
    from analysis.records.requests import REQUESTS, RecordError, read_table

    for path in run_dir.glob("trial-*/requests*.arrow"):
        with contextlib.suppress(RecordError, OSError):
            if read_table(path, REQUESTS)[0].num_rows:
                return True
    return False


# --- analyze ----------------------------------------------------------------------------------------------------------


def _analyze(options: argparse.Namespace) -> int:
    run_dir = Path(options.run_dir)
    if not run_dir.is_dir():
        raise ConfigError(f'run directory "{run_dir}" does not exist: give one that `tailgate run` wrote')
    return _judge(run_dir, {}, as_json=options.json, whole=options.json, slo=options.slo)


def _export(options: argparse.Namespace) -> int:
    from analysis.records.export import export
    from analysis.records.requests import RecordError

    run_dir = Path(options.run_dir)
    out = (
        Path(options.out) if options.out else run_dir.resolve().with_name(f"{run_dir.resolve().name}-{options.format}")
    )
    tables = [name.strip() for name in options.table.split(",") if name.strip()]
    try:
        written = export(run_dir, out, form=options.format, tables=tables)
    except RecordError as error:
        return _complain(str(error), EXIT_USAGE)
    except OSError as error:
        return _complain(f"{error}: {out} is not whole", EXIT_BROKE)
    for problem in written.problems:
        print(f"tailgate: {problem}", file=sys.stderr)
    counted = ", ".join(f"{name} {rows:,}" for name, rows in written.rows.items())
    found = {"out": str(out), "format": options.format, "rows": written.rows, "problems": list(written.problems)}
    stdout.write(f"{out}: {options.format}, rows: {counted or 'none'}", found, as_json=options.json)
    return 0


def _judge(
    run_dir: Path,
    ended: dict[str, Any],
    *,
    as_json: bool,
    whole: bool = False,
    broke: bool = False,
    slo: Sequence[str] = (),
) -> int:
    """The run directory holds a summary and reports, and the verdict is on stdout; as JSON the `whole` summary or its
    outcome. Returns the exit code."""
    from analysis.records.requests import RecordError
    from analysis.report import write_reports
    from analysis.report.terminal import verdict_table
    from analysis.summary.summary import analyze, exit_code, write_summary

    unjudged = partial(_unjudged, run_dir=run_dir, ended=ended, as_json=as_json)
    try:
        summary = analyze(run_dir, slo=slo)
        write_summary(summary, run_dir / "summary.json")
        write_reports(summary, run_dir)
    except RecordError as error:
        return unjudged(str(error), EXIT_BROKE if ended else EXIT_USAGE)
    except OSError as error:
        return unjudged(f"{error}: the records are kept in {run_dir}", EXIT_BROKE)
    except KeyboardInterrupt:
        return unjudged(f"interrupted: the records are kept: tailgate analyze {run_dir}", EXIT_BROKE)
    except Exception as error:
        return unjudged(fault(error, run_dir), EXIT_BROKE)
    code = EXIT_BROKE if broke else exit_code(summary)
    if whole:
        stdout.write("", summary, as_json=True)
        return code
    report = run_dir / "report.html"
    line = {
        "verdict": summary["overall"],
        "run_dir": str(run_dir),
        "report": str(report),
        "exit_code": code,
        "headline": summary.get("headline"),
        "arms": {arm["name"]: arm["verdict"] for arm in summary.get("arms", []) if not arm.get("control")},
        "needed_s": (summary.get("advice") or {}).get("needed_s"),
        **ended,
    }
    words = f"{verdict_table(summary, width=stdout.columns())}\nreport: {report}"
    stdout.write(words, line, as_json=as_json)
    return code


def _unjudged(message: str, code: int, *, run_dir: Path, ended: dict[str, Any], as_json: bool) -> int:
    """There is no verdict, for the reason in `message`. After a run, programs get their line all the same."""
    _complain(message, code)
    if ended:
        line = {"verdict": None, "run_dir": str(run_dir), "report": None, "exit_code": code, "error": message}
        stdout.write("", {**line, **ended}, as_json=as_json)
    return code


# --- serve ------------------------------------------------------------------------------------------------------------


def _serve(options: argparse.Namespace) -> int:
    from loadtests.trials.preflight import check_arm, check_port
    from servers.security import check_named, token_from_variable

    arm = serve_config(options)
    check_arm(arm)
    if options.port:
        check_port(options.port, key="--port", host=options.host)
    if options.metrics_port:
        if options.metrics_port == options.port:
            raise ConfigError(f"--port and --metrics-port are both {options.port}: give two ports")
        check_port(options.metrics_port, key="--metrics-port", host=options.host, remedy="or give another")
    extra = ["--host", options.host, "--port", str(options.port), "--replica", options.replica or f"{arm.name}-0"]
    if options.metrics_port:
        extra += ["--metrics-port", str(options.metrics_port)]
    _listener_tls(options)
    check_named({"--token-env": options.token_env})
    if options.token_env:
        token_from_variable(options.token_env, key="--token-env")
    for flag in ("tls_certificate", "tls_key", "tls_client_ca", "token_env"):
        if getattr(options, flag):
            extra += [f"--{flag.replace('_', '-')}", getattr(options, flag)]
    if options.json:
        extra.append("--json")
    _become("servers.front.serve", arm, options.cache_dir, extra)


def _become(module: str, arm: ArmConfig, cache_dir: str, extra: Sequence[str]) -> NoReturn:
    """This process goes on as `python -m module` for the arm."""
    # The new program reads its configuration from a file without a name, and nothing is left behind. A pipe would take
    # 64 KiB and then wait for a reader that is not there yet.
    with tempfile.TemporaryFile() as nameless:
        nameless.write(json.dumps(arm.to_dict()).encode())
        nameless.seek(0)
        reader = os.dup(nameless.fileno())
    os.set_inheritable(reader, True)
    command = [sys.executable, "-P", "-m", module, "--config", f"/dev/fd/{reader}", *extra]
    if cache_dir:
        command += ["--cache-dir", cache_dir]
    environment = dict(os.environ)
    if arm.engine.threads and not arm.model.device.startswith("cuda"):
        environment["OMP_NUM_THREADS"] = str(arm.engine.threads)
    os.execve(sys.executable, command, environment)


# --- inspect ----------------------------------------------------------------------------------------------------------


def _inspect(options: argparse.Namespace) -> int:
    from loadtests.trials.preflight import check_arm

    arm = inspect_config(options)
    check_arm(arm)
    _become("servers.inspect", arm, options.cache_dir, ["--shapes", options.shapes, *(["--json"] * options.json)])


def inspect_config(options: argparse.Namespace) -> ArmConfig:
    """The arm that `tailgate inspect` is asked about: one of an experiment, or a preset with flags as `serve` has."""
    if not options.experiment:
        return serve_config(argparse.Namespace(**{**vars(options), "preset": options.arm, "name": ""}))
    given = [name for name, *_ in _ARM_FLAGS if getattr(options, name) is not None]
    if given:
        flag = f"--{given[0].replace('_', '-')}"
        raise ConfigError(
            f'{flag} is for presets, but EXPERIMENT "{options.experiment}" is given: use --set, as with `tailgate run`'
        )
    experiment = load(options.experiment, settings=options.settings, needs_traffic=False)
    found = next((arm for arm in experiment.arms if arm.name == options.arm), None)
    if found is None:
        names = ", ".join(arm.name for arm in experiment.arms)
        raise ConfigError(f'--arm "{options.arm}" is not in experiment "{experiment.name}": use one of {names}')
    if found.own is None:
        raise ConfigError(f'--arm "{options.arm}" is external (kind = "{found.kind}"): nobody sees into it from here')
    return found.own


# --- serve: its arm ---------------------------------------------------------------------------------------------------


def serve_config(options: argparse.Namespace) -> ArmConfig:
    """The arm that the flags of `tailgate serve` describe."""
    tables: dict[str, dict[str, Any]] = {"model": {}, "engine": {}}
    for name, table, key, _ in _ARM_FLAGS:
        if getattr(options, name) is not None:
            tables[table][key] = getattr(options, name)
    model = override(ModelConfig(), tables["model"], where="model")
    engine = override(EngineConfig(), tables["engine"], where="engine")
    arm = ArmConfig.from_preset(options.preset, name=options.name, model=model, engine=engine)
    changes: dict[str, Any] = {}
    for setting in options.settings:
        key, value = parse_setting(setting)
        set_path(changes, key, value)
    check_values(changes, "--set")
    for table, values in changes.items():
        if table not in ("model", "engine", "shapes", "compile") or not isinstance(values, dict):
            raise ConfigError(f"--set {table} is unknown: use model.KEY, engine.KEY, shapes.KEY or compile.KEY")
        arm = replace(arm, **{table: override(getattr(arm, table), values, where=table)})
    return arm


# --- worker -----------------------------------------------------------------------------------------------------------


def _worker(options: argparse.Namespace) -> int:
    from loadtests.workers.remote import parse_master, work

    return work(parse_master(options.master), keep=Path(options.keep), trials=options.trials)


# --- split ------------------------------------------------------------------------------------------------------------


def _split(options: argparse.Namespace) -> int:
    from servers.splitter.admin import SplitterError
    from servers.splitter.bootstrap import bootstrap
    from servers.splitter.envoy import Envoy
    from servers.splitter.kubernetes import grpc_route_manifest

    if options.set_weights or options.admin:
        return _reweight(options)
    config = split_config(options)
    if options.print_config:
        document = bootstrap(config) if options.print_config == "envoy" else grpc_route_manifest(config)
        print(json.dumps(document, indent=2))
        return 0
    with tempfile.TemporaryDirectory(prefix="tailgate-split-") as scratch:
        folder = Path(options.log_dir or scratch)
        stopped: list[int] = []
        before = {
            number: signal.signal(number, lambda *_: stopped.append(1)) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            envoy = Envoy.start(config, log_path=folder / "envoy.log", work_dir=folder)
            with envoy:
                admin = envoy.admin.address
                where = {"port": envoy.port, "target": envoy.target, "admin": admin}
                stdout.write("", where, as_json=options.json)
                print(
                    f"splitting {_shares(config.weights)} on {envoy.target}; Ctrl-C ends; new weights: "
                    f"tailgate split --admin {admin} --set-weights {_shares(config.weights, ',')}",
                    file=sys.stderr,
                )
                health = None
                while not stopped:
                    if envoy.poll() is not None:
                        return _complain(f"Envoy ended with exit code {envoy.poll()}: {_tail(folder)}", EXIT_BROKE)
                    with contextlib.suppress(SplitterError):
                        health = _tell_health(envoy.healthy(), health)
                    time.sleep(0.2)
        except SplitterError as error:
            return _complain(str(error), EXIT_BROKE)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return 0


def _tail(folder: Path) -> str:
    from loadtests.trials.processes import log_tail

    return log_tail(folder / "envoy.log", 2)


def _tell_health(
    now: dict[str, tuple[int, int]], before: dict[str, tuple[int, int]] | None
) -> dict[str, tuple[int, int]]:
    if now != before:
        text = ", ".join(f"{arm} {healthy}/{total}" for arm, (healthy, total) in now.items())
        print(f"healthy replicas: {text}", file=sys.stderr)
    return now


def _shares(weights: dict[str, int], separator: str = " ") -> str:
    return separator.join(f"{name}={weight}" for name, weight in weights.items())


def split_config(options: argparse.Namespace) -> Any:
    """The SplitterConfig that the flags of `tailgate split` describe."""
    from servers.security import check_named
    from servers.splitter.envoy_config import ArmTarget, SplitterConfig, upstream_tls

    if not options.arm:
        raise ConfigError("no arm is given: add --arm NAME=HOST:PORT at least once")
    weights: dict[str, int] = {}
    for text in options.weight:
        weights |= parse_weights(text, "--weight")
    arms = []
    for text in options.arm:
        name, equals, addresses = text.partition("=")
        if not equals or not name or not addresses:
            raise ConfigError(f'--arm "{text}" is not NAME=HOST:PORT,...: write for example eager=127.0.0.1:50051')
        backends = tuple(address.strip() for address in addresses.split(","))
        arms.append(ArmTarget(name=name, backends=backends, weight=weights.pop(name, 1)))
    upstream = ("upstream_ca", "upstream_name", "upstream_certificate", "upstream_key")
    check_named({f"--{name.replace('_', '-')}": getattr(options, name) for name in upstream})
    if weights:
        known = ", ".join(arm.name for arm in arms)
        raise ConfigError(f'--weight names the arm "{next(iter(weights))}", which no --arm gives: use one of {known}')
    return SplitterConfig(
        arms=tuple(arms),
        host=options.host,
        port=options.port,
        admin_port=options.admin_port,
        stickiness=options.stickiness,
        tls=_listener_tls(options),
        upstream_tls=upstream_tls(*(getattr(options, name) or "" for name in upstream)),
    )


def _listener_tls(options: argparse.Namespace) -> ServerTls | None:
    """What --tls-* say, checked."""
    from servers.security import check_named, server_tls

    flags = ("tls_certificate", "tls_key", "tls_client_ca")
    check_named({f"--{name.replace('_', '-')}": getattr(options, name) for name in flags})
    return server_tls(*(getattr(options, name) or "" for name in flags))


def parse_weights(text: str, flag: str) -> dict[str, int]:
    """{"eager": 90, "compiled": 10} of "eager=90,compiled=10"."""
    weights = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals or not name.strip() or not re.fullmatch("[0-9]{1,9}", value.strip()):
            raise ConfigError(f'{flag} "{part}" is not NAME=WEIGHT: write for example eager=90')
        weights[name.strip()] = int(value)
    return weights


def _reweight(options: argparse.Namespace) -> int:
    from servers.address import host_port
    from servers.splitter.admin import Admin, SplitterError
    from servers.splitter.weights import reweight

    if not (options.set_weights and options.admin):
        raise ConfigError("--admin and --set-weights belong together: --admin 127.0.0.1:9901 --set-weights eager=50")
    if options.arm or options.weight or options.print_config:
        raise ConfigError("--set-weights changes a running split: leave out --arm, --weight and --print-config")
    weights = parse_weights(options.set_weights, "--set-weights")
    address = options.admin.removeprefix("http://").rstrip("/")
    wrong = f'--admin "{options.admin}" is not HOST:PORT: give the admin address that the split printed'
    try:
        merged = reweight(Admin(*host_port(address, wrong)), weights)
    except SplitterError as error:
        return _complain(str(error), EXIT_BROKE)
    stdout.write(f"weights: {_shares(merged)}", {"weights": merged}, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
