"""`tailgate split`: traffic split over arms with Envoy, and new weights and shadows for a split that runs."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import grpc

from loadtests.commands.command_line import CommandParser, add_listener_tls, listener_tls, named, port
from loadtests.commands.exits import EXIT_BROKE, complain, stopping
from loadtests.external.addresses import parse_target
from loadtests.external.client_security import OPEN, SecurityConfig
from loadtests.external.grpc_channel import open_channel
from loadtests.trials.processes import log_tail
from servers import stdout
from servers.fields import ConfigError
from servers.launcher import TemporaryFolder
from servers.rpc import telemetry_pb2, telemetry_pb2_grpc
from servers.splitter.admin import Admin, SplitterError, admin_address
from servers.splitter.bootstrap import bootstrap
from servers.splitter.envoy import Envoy
from servers.splitter.envoy_config import ArmTarget, SplitterConfig, upstream_tls
from servers.splitter.kubernetes import grpc_route_manifest
from servers.splitter.live import reshare

_ASKING_S = 5.0  # for a replica's name, whenever the health of one changes


def add_arguments(parser: CommandParser) -> None:
    """`parser` reads the command line of `tailgate split`."""
    parser.describe(
        "Clients dial --port. Weights decide the arm of each request (of each session, when a session header is\n"
        "sent); the header x-tailgate-arm pins one. A shadow gets copies of requests that another arm answers, and\n"
        "its own answers are thrown away. Weights and shadows change live: run the command again with --admin;\n"
        "streams in flight are not touched. Ctrl-C ends it once running streams are done.",
        "  tailgate split --arm eager=127.0.0.1:50051 --arm compiled-padded=127.0.0.1:50052,127.0.0.1:50053 \\\n"
        "                 --weight eager=90 --weight compiled-padded=10 --port 8080 --admin-port 9901\n"
        "  tailgate split --admin 127.0.0.1:9901 --set-weights eager=50,compiled-padded=50\n"
        "  tailgate split --arm eager=127.0.0.1:50051 --arm compiled-padded=127.0.0.1:50052 \\\n"
        "                 --shadow compiled-padded=25% --port 8080 --admin-port 9901\n"
        "  tailgate split --admin 127.0.0.1:9901 --set-shadow compiled-padded=0% \\\n"
        "                 --set-weights eager=99,compiled-padded=1\n"
        "  tailgate split --arm eager=10.0.0.7:50051 --arm compiled-padded=10.0.0.8:50051 --print-config envoy\n"
        "  tailgate split --arm eager=10.0.0.7:50051 --arm compiled-padded=10.0.0.8:50051 --print-config kubernetes",
    )
    parser.add_argument(
        "--arm", action="append", default=[], metavar="NAME=HOST:PORT,...", help="one arm and its replicas; repeat"
    )
    parser.add_argument(
        "--weight", action="append", default=[], metavar="NAME=N", help="share of one arm (default 1); repeat"
    )
    parser.add_argument(
        "--shadow",
        action="append",
        default=[],
        metavar="NAME=P%",
        help="copy this percentage of requests to an arm, whose weight is then 0; repeat",
    )
    for flag, kind, default, text in (
        ("--host", str, "127.0.0.1", "address to listen on (default %(default)s)"),
        ("--port", port, 8080, "port to listen on (default %(default)s)"),
        (
            "--admin-port",
            port,
            0,
            "port of Envoy's admin interface on 127.0.0.1 (default: a Unix socket of yours alone)",
        ),
        ("--stickiness", str, "arm", "what a session keeps: arm, replica or off (default %(default)s)"),
    ):
        parser.add_argument(flag, type=kind, default=default, help=text)
    add_listener_tls(parser)
    for flag, metavar, text in (
        ("--upstream-ca", "FILE", "reach the arms by TLS and trust this authority (PEM); their names are checked"),
        ("--upstream-name", None, "name that the arms' certificates carry (default: the addresses' own)"),
        ("--upstream-certificate", "FILE", "shown to the arms (PEM)"),
        ("--upstream-key", "FILE", "the key of --upstream-certificate (PEM)"),
    ):
        parser.add_argument(flag, metavar=metavar, help=text)
    parser.add_argument(
        "--request-log",
        default="",
        metavar="FILE",
        help="a line for each request that comes and ends, by which `tailgate ramp --admin` judges users' traffic",
    )
    parser.add_argument("--log-dir", default="", metavar="DIR", help="keep Envoy's log and configuration here")
    parser.add_argument(
        "--print-config",
        nargs="?",
        const="envoy",
        choices=("envoy", "kubernetes"),
        help="print Envoy's configuration or a Kubernetes GRPCRoute as JSON, and end",
    )
    parser.add_argument("--admin", default="", metavar="HOST:PORT or PATH", help="admin interface of a running split")
    parser.add_argument(
        "--set-weights", default="", metavar="NAME=N,...", help="new weights for the split behind --admin"
    )
    parser.add_argument(
        "--set-shadow",
        default="",
        metavar="NAME=P%,...",
        help="new shadows for the split behind --admin; 0%% ends the copies",
    )


def main(options: argparse.Namespace) -> int:
    """Splits until it is stopped, or changes a split that runs; the exit code."""
    if options.set_weights or options.set_shadow or options.admin:
        return _reshare(options)
    config = split_config(options)
    if options.print_config:
        document = bootstrap(config) if options.print_config == "envoy" else grpc_route_manifest(config)
        print(json.dumps(document, indent=2))
        return 0
    stopped: list[int] = []
    started: list[Envoy] = []

    def kill() -> None:
        for envoy in started:
            envoy.kill()

    with (
        TemporaryFolder("tailgate-split-") as scratch,
        stopping(lambda: stopped.append(1), kill, _note),
    ):
        folder = Path(options.log_dir or scratch.path)
        log_path = folder / "envoy.log"
        try:
            with Envoy.start(config, log_path=log_path, work_dir=folder) as envoy:
                started.append(envoy)
                admin = envoy.admin.address
                where = {"port": envoy.port, "target": envoy.target, "admin": admin}
                stdout.write("", where, as_json=options.json)
                _note(
                    f"splitting {_shares(config.weights)}{_copies(config.shadows)} on {envoy.target}; Ctrl-C ends; "
                    f"new weights: tailgate split --admin {admin} --set-weights {_shares(config.weights, ',')}"
                )
                shown = None
                unnamed = {(arm.name, address) for arm in config.arms for address in arm.backends}
                while not stopped:
                    if (code := envoy.poll()) is not None:
                        return complain(f"Envoy ended with exit code {code}: {log_tail(log_path, 2)}", EXIT_BROKE)
                    with contextlib.suppress(SplitterError):
                        health = envoy.healthy()
                        if health != shown:
                            counts = (f"{arm} {healthy}/{total}" for arm, (healthy, total) in health.items())
                            _note(f"healthy replicas: {', '.join(counts)}")
                            shown = health
                            unnamed -= {replica for replica in unnamed if check_name(config, *replica)}
                    time.sleep(0.2)
        except SplitterError as error:
            return complain(str(error), EXIT_BROKE)
    return 0


def check_name(config: SplitterConfig, arm: str, address: str) -> bool:
    """Whether it is known that the replica at `address` answers as `arm`, or that it does not say. Raises ConfigError
    where it answers as another arm: clients would refuse each of its answers."""
    tls = config.upstream_tls
    security = (
        SecurityConfig(tls_ca=tls.ca, tls_server_name=tls.name, tls_certificate=tls.certificate, tls_key=tls.key)
        if tls
        else OPEN
    )
    where = replace(parse_target(address), tls=tls is not None)
    with open_channel(where, security, [("grpc.enable_http_proxy", 0)]) as channel:
        stub = telemetry_pb2_grpc.TelemetryStub(channel)  # type: ignore[no-untyped-call]
        try:
            answered = stub.Snapshot(telemetry_pb2.SnapshotRequest(), timeout=_ASKING_S).arm
        except grpc.RpcError as error:
            # A server that is still to come is asked again. One without telemetry, or that wants a token, does not say.
            return error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    if answered != arm:
        raise ConfigError(
            f'--arm "{arm}={address}" leads to a replica that answers as "{answered}": write --arm '
            f"{answered}={address}, or serve it with --name {arm}"
        )
    return True


def _note(text: str) -> None:
    # Nobody may be left to read it, and a signal may come while another note is written.
    with contextlib.suppress(OSError, RuntimeError):
        print(text, file=sys.stderr)


def _shares(weights: dict[str, int], separator: str = " ") -> str:
    return separator.join(f"{name}={weight}" for name, weight in weights.items())


def _copies(shadows: dict[str, float]) -> str:
    return "".join(f", copies of {percent:g} % to {name}" for name, percent in shadows.items())


def split_config(options: argparse.Namespace) -> SplitterConfig:
    """The SplitterConfig that the flags of `tailgate split` describe."""
    if not options.arm:
        raise ConfigError("no arm is given: add --arm NAME=HOST:PORT at least once")
    weights: dict[str, int] = {}
    for text in options.weight:
        weights |= parse_weights(text, "--weight")
    shadows: dict[str, float] = {}
    for text in options.shadow:
        shadows |= parse_shadows(text, "--shadow")
    arms = []
    for text in options.arm:
        name, equals, addresses = text.partition("=")
        if not equals or not name or not addresses:
            raise ConfigError(f'--arm "{text}" is not NAME=HOST:PORT,...: write for example eager=127.0.0.1:50051')
        backends = tuple(address.strip() for address in addresses.split(","))
        # An arm that is named as a shadow, also one of 0 % for later, answers nobody.
        weight = weights.pop(name, 0 if name in shadows else 1)
        arms.append(ArmTarget(name=name, backends=backends, weight=weight, shadow_percent=shadows.pop(name, 0.0)))
    upstream = named(options, ("upstream_ca", "upstream_name", "upstream_certificate", "upstream_key"))
    known = ", ".join(arm.name for arm in arms)
    for flag, unknown in (("--weight", weights), ("--shadow", shadows)):
        for name in unknown:
            raise ConfigError(f'{flag} names the arm "{name}", which no --arm gives: use one of {known}')
    return SplitterConfig(
        arms=tuple(arms),
        host=options.host,
        port=options.port,
        admin_port=options.admin_port,
        stickiness=options.stickiness,
        # Absolute: Envoy, and whoever reads it, may stand elsewhere.
        request_log=str(Path(options.request_log).resolve()) if options.request_log else "",
        tls=listener_tls(options),
        upstream_tls=upstream_tls(*upstream),
    )


def parse_weights(text: str, flag: str) -> dict[str, int]:
    """{"eager": 90, "compiled": 10} of "eager=90,compiled=10"."""
    weights = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals or not name.strip() or not re.fullmatch("[0-9]{1,9}", value.strip()):
            raise ConfigError(f'{flag} "{part}" is not NAME=WEIGHT: write for example eager=90')
        weights[name.strip()] = int(value)
    return weights


def parse_shadows(text: str, flag: str) -> dict[str, float]:
    """{"compiled": 12.5} of "compiled=12.5%"."""
    shadows = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        share = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?%", value.strip())
        if not equals or not name.strip() or share is None:
            raise ConfigError(f'{flag} "{part}" is not NAME=PERCENT%: write for example compiled=25%')
        shadows[name.strip()] = float(share[1])
    return shadows


def _reshare(options: argparse.Namespace) -> int:
    if not options.admin:
        raise ConfigError("--set-weights and --set-shadow need a running split: add --admin 127.0.0.1:9901")
    if not (options.set_weights or options.set_shadow):
        raise ConfigError("--admin needs a change: add --set-weights eager=50, or --set-shadow compiled=25%")
    if options.arm or options.weight or options.shadow or options.print_config:
        raise ConfigError(
            "--admin changes a running split: leave out --arm, --weight, --shadow and --print-config; new shares come "
            "with --set-weights and --set-shadow"
        )
    weights = parse_weights(options.set_weights, "--set-weights") if options.set_weights else {}
    shadows = parse_shadows(options.set_shadow, "--set-shadow") if options.set_shadow else {}
    address = options.admin.removeprefix("http://").rstrip("/")
    wrong = f'--admin "{options.admin}" is not HOST:PORT or PATH: give the admin address that the split printed'
    try:
        shares = reshare(Admin(admin_address(address, wrong)), weights=weights, shadows=shadows)
    except SplitterError as error:
        return complain(str(error), EXIT_BROKE)
    text = f"weights: {_shares(shares.weights)}{_copies(shares.shadows)}"
    stdout.write(text, {"weights": shares.weights, "shadows": shares.shadows}, as_json=options.json)
    return 0
