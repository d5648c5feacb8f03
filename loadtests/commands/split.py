"""`tailgate split`: traffic split over arms with Envoy, and new weights and shadows for a running split."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from loadtests.commands.exits import EXIT_BROKE, complain, stopping
from loadtests.commands.options import Json, Port, TlsCertificate, TlsClientCa, TlsKey, file_name, listener_tls
from servers import stdout
from servers.fields import ConfigError
from servers.processes import TemporaryFolder, log_tail
from servers.security import check_named
from servers.splitter.admin import Admin, SplitterError, admin_address
from servers.splitter.bootstrap import bootstrap
from servers.splitter.envoy import Envoy
from servers.splitter.envoy_config import ArmTarget, SplitterConfig, upstream_tls
from servers.splitter.kubernetes import grpc_route_manifest
from servers.splitter.live import reshare

_ASKING_S = 5.0  # for a replica's name, whenever the health of one changes
EXAMPLES = """\
  tailgate split --arm eager=127.0.0.1:50051 --arm compiled-padded=127.0.0.1:50052,127.0.0.1:50053 \\
                 --weight eager=90 --weight compiled-padded=10 --port 8080 --admin-port 9901
  tailgate split --admin 127.0.0.1:9901 --set-weights eager=50,compiled-padded=50
  tailgate split --arm eager=127.0.0.1:50051 --arm compiled-padded=127.0.0.1:50052 \\
                 --shadow compiled-padded=25% --port 8080 --admin-port 9901
  tailgate split --admin 127.0.0.1:9901 --set-shadow compiled-padded=0% \\
                 --set-weights eager=99,compiled-padded=1
  tailgate split --arm eager=10.0.0.7:50051 --arm compiled-padded=10.0.0.8:50051 --print-config envoy
  tailgate split --arm eager=10.0.0.7:50051 --arm compiled-padded=10.0.0.8:50051 --print-config kubernetes"""


class ConfigKind(StrEnum):
    """What --print-config prints."""

    ENVOY = "envoy"
    KUBERNETES = "kubernetes"


def _file(text: str) -> Any:
    return typer.Option(metavar="FILE", parser=file_name, help=text)


def command(
    context: typer.Context,
    arm: Annotated[
        list[str] | None, typer.Option(metavar="NAME=HOST:PORT,...", help="One arm and its replicas. Repeatable.")
    ] = None,
    weight: Annotated[
        list[str] | None, typer.Option(metavar="NAME=N", help="Share of one arm; 1 by default. Repeatable.")
    ] = None,
    shadow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=P%", help="Copy this percentage of requests to an arm, whose weight is then 0. Repeatable."
        ),
    ] = None,
    host: Annotated[str, typer.Option(metavar="HOST", help="Address to listen on.")] = "127.0.0.1",
    port: Port = 8080,
    admin_port: Annotated[
        int,
        typer.Option(
            metavar="PORT",
            min=0,
            max=65535,
            help="Port of Envoy's admin interface on 127.0.0.1; 0: a private Unix socket.",
        ),
    ] = 0,
    stickiness: Annotated[str, typer.Option(metavar="WHAT", help="What a session keeps: arm, replica or off.")] = "arm",
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientCa = None,
    upstream_ca: Annotated[
        str | None, _file("Reach the arms by TLS and trust this authority (PEM); their names are checked.")
    ] = None,
    upstream_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name in the arms' certificates. Default: the addresses' own.")
    ] = None,
    upstream_certificate: Annotated[str | None, _file("Client certificate for the arms (PEM).")] = None,
    upstream_key: Annotated[str | None, _file("The key of --upstream-certificate (PEM).")] = None,
    request_log: Annotated[
        str, _file("Log each request's start and end, by which `tailgate ramp --admin` judges production traffic.")
    ] = "",
    log_dir: Annotated[
        str, typer.Option(metavar="DIR", parser=file_name, help="Keep Envoy's log and configuration here.")
    ] = "",
    print_config: Annotated[
        ConfigKind | None,
        typer.Option(help="Print Envoy's configuration or a Kubernetes GRPCRoute as JSON, and exit."),
    ] = None,
    admin: Annotated[str, typer.Option(metavar="HOST:PORT|PATH", help="Admin interface of a running split.")] = "",
    set_weights: Annotated[
        str, typer.Option(metavar="NAME=N,...", help="New weights for the split behind --admin.")
    ] = "",
    set_shadow: Annotated[
        str,
        typer.Option(metavar="NAME=P%,...", help="New shadows for the split behind --admin; 0% ends the copies."),
    ] = "",
    as_json: Json = False,
) -> int:
    """Split traffic over arms with Envoy, in the foreground.

    Clients connect to --port. Weights decide the arm of each request, or of each session when a session header is sent;
    the header x-tailgate-arm pins one. A shadow receives copies of requests that another arm answers, and its responses
    are discarded. Weights and shadows change live: run the command again with --admin; streams in flight are not
    touched. Ctrl-C ends it once running streams are done.
    """
    if set_weights or set_shadow or admin:
        if admin and (set_weights or set_shadow) and (arm or weight or shadow or print_config):
            raise ConfigError(
                "--admin changes a running split: leave out --arm, --weight, --shadow and --print-config; new shares "
                "come with --set-weights and --set-shadow"
            )
        return _reshare(admin, set_weights, set_shadow, as_json=as_json)
    config = split_config(context.params)
    if print_config is not None:
        document = bootstrap(config) if print_config is ConfigKind.ENVOY else grpc_route_manifest(config)
        print(json.dumps(document, indent=2))
        return 0
    return _split(config, log_dir, as_json=as_json)


def _split(config: SplitterConfig, log_dir: str, *, as_json: bool) -> int:
    """Run Envoy until it is stopped or dies; return the exit code."""
    stopped: list[int] = []
    with (
        TemporaryFolder("tailgate-split-") as scratch,
        stopping(lambda: stopped.append(1), _note),
    ):
        folder = Path(log_dir or scratch.path)
        log_path = folder / "envoy.log"
        try:
            with Envoy.start(config, log_path=log_path, work_dir=folder) as envoy:
                admin = envoy.admin.address
                where = {"port": envoy.port, "target": envoy.target, "admin": admin}
                stdout.write("", where, as_json=as_json)
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
    """Return whether the replica at `address` answers as `arm` or reports no name, and False while it is not there.

    Raises ConfigError where it answers as another arm, since clients would refuse each of its answers.
    """
    import grpc

    from loadtests.external.addresses import parse_target
    from loadtests.external.client_security import OPEN, SecurityConfig
    from loadtests.external.grpc_channel import open_channel
    from servers.rpc import telemetry_pb2, telemetry_pb2_grpc

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
    # stderr may be closed, and a signal may come while another note is written.
    with contextlib.suppress(OSError, RuntimeError):
        print(text, file=sys.stderr)


def _shares(weights: dict[str, int], separator: str = " ") -> str:
    return separator.join(f"{name}={weight}" for name, weight in weights.items())


def _copies(shadows: dict[str, float]) -> str:
    return "".join(f", copies of {percent:g} % to {name}" for name, percent in shadows.items())


def split_config(options: Mapping[str, Any]) -> SplitterConfig:
    """Return the configuration that the options of `tailgate split` describe. Raises ConfigError."""
    arm_texts: Sequence[str] = options["arm"] or ()
    if not arm_texts:
        raise ConfigError("no arm is given: add --arm NAME=HOST:PORT at least once")
    weights: dict[str, int] = {}
    for text in options["weight"] or ():
        weights |= parse_weights(text, "--weight")
    shadows: dict[str, float] = {}
    for text in options["shadow"] or ():
        shadows |= parse_shadows(text, "--shadow")
    arms = []
    for text in arm_texts:
        name, equals, addresses = text.partition("=")
        if not equals or not name or not addresses:
            raise ConfigError(f'--arm "{text}" is not NAME=HOST:PORT,...: write for example eager=127.0.0.1:50051')
        backends = tuple(address.strip() for address in addresses.split(","))
        # A shadow, also one of 0 % for later, answers no request.
        weight = weights.pop(name, 0 if name in shadows else 1)
        arms.append(ArmTarget(name=name, backends=backends, weight=weight, shadow_percent=shadows.pop(name, 0.0)))
    upstream = {f"--upstream-{name}": options[f"upstream_{name}"] for name in ("ca", "name", "certificate", "key")}
    check_named(upstream)
    known = ", ".join(arm.name for arm in arms)
    for flag, unknown in (("--weight", weights), ("--shadow", shadows)):
        for name in unknown:
            raise ConfigError(f'{flag} names the arm "{name}", which no --arm gives: use one of {known}')
    return SplitterConfig(
        arms=tuple(arms),
        host=options["host"],
        port=options["port"],
        admin_port=options["admin_port"],
        stickiness=options["stickiness"],
        # Absolute, since Envoy and its readers run in other folders.
        request_log=str(Path(options["request_log"]).resolve()) if options["request_log"] else "",
        tls=listener_tls(options["tls_certificate"], options["tls_key"], options["tls_client_ca"]),
        upstream_tls=upstream_tls(*(value or "" for value in upstream.values())),
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


def _reshare(address: str, set_weights: str, set_shadow: str, *, as_json: bool) -> int:
    """Change weights and shadows of a running split; return the exit code."""
    if not address:
        raise ConfigError("--set-weights and --set-shadow need a running split: add --admin 127.0.0.1:9901")
    if not (set_weights or set_shadow):
        raise ConfigError("--admin needs a change: add --set-weights eager=50, or --set-shadow compiled=25%")
    weights = parse_weights(set_weights, "--set-weights") if set_weights else {}
    shadows = parse_shadows(set_shadow, "--set-shadow") if set_shadow else {}
    wrong = f'--admin "{address}" is not HOST:PORT or PATH: give the admin address that the split printed'
    try:
        admin = Admin(admin_address(address.removeprefix("http://").rstrip("/"), wrong))
        shares = reshare(admin, weights=weights, shadows=shadows)
    except SplitterError as error:
        return complain(str(error), EXIT_BROKE)
    text = f"weights: {_shares(shares.weights)}{_copies(shares.shadows)}"
    stdout.write(text, {"weights": shares.weights, "shadows": shares.shadows}, as_json=as_json)
    return 0
