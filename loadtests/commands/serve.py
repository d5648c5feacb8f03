"""`tailgate serve`: one arm over gRPC."""

from __future__ import annotations

import argparse
from typing import NoReturn

from loadtests.commands.arm_flags import add_arm_flags, become, preset_arm
from loadtests.commands.command_line import (
    LISTENER_TLS,
    CommandParser,
    add_listener_tls,
    add_set,
    flag_of,
    listener_tls,
    named,
    port,
)
from loadtests.trials.preflight import check_arm, check_port
from servers.config import PRESETS
from servers.fields import ConfigError
from servers.security import token_from_variable


def add_arguments(parser: CommandParser) -> None:
    """`parser` reads the command line of `tailgate serve`."""
    parser.describe(
        "Loads the model, warms it up, and serves tailgate.v1.Inference, telemetry, health and reflection.\n"
        "Says its port and pid once the port listens; health turns SERVING\n"
        "when the arm is warm and has answered a request of its own.\n"
        "SIGTERM or Ctrl-C drains: no new request, running ones finish, exit 0.\n\n"
        f"Presets: {', '.join(PRESETS)}.",
        "  tailgate serve --preset eager --port 50051\n"
        "  tailgate serve --preset compiled-padded --model random:llama-3.2-1b --device cuda --dtype bfloat16 \\\n"
        "                 --slots 16 --max-prompt-tokens 2048 --port 50052\n"
        "  tailgate serve --preset compiled-naive --set compile.mode=reduce-overhead --port 50053\n"
        "  tailgate serve --preset compiled-bucketed --set compile.artifact=bucketed.compiled",
    )
    parser.add_argument("--preset", required=True, metavar="NAME", help="shapes and compile policy of the arm")
    parser.add_argument("--name", default="", help="name of the arm in records (default: the preset)")
    add_arm_flags(parser)
    add_set(parser, "compile.mode=max-autotune or engine.max_queue=64")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument(
        "--port", type=port, default=50051, help="port to listen on; 0 takes a free one (default %(default)s)"
    )
    parser.add_argument("--replica", default="", help="name of this process in records (default: NAME-0)")
    parser.add_argument("--cache-dir", default="", metavar="DIR", help="keep compiled code here (default: nowhere)")
    parser.add_argument("--metrics-port", type=port, default=0, help="serve Prometheus metrics here (default: off)")
    add_listener_tls(parser)
    parser.add_argument(
        "--token-env",
        metavar="NAME",
        help="environment variable with the bearer token that every call but health checks must carry",
    )


def main(options: argparse.Namespace) -> NoReturn:
    """This process becomes the server."""
    arm = preset_arm(options)
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
    listener_tls(options)
    secured = (*LISTENER_TLS, "token_env")
    for name, value in zip(secured, named(options, secured), strict=True):
        if value:
            extra += [flag_of(name), value]
    if options.token_env:
        token_from_variable(options.token_env, key="--token-env")
    if options.json:
        extra.append("--json")
    become("servers.front.serve", arm, options.cache_dir, extra)
