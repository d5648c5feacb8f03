"""`tailgate split`: traffic split over arms with Envoy, and new weights and shadows for a running split."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tailgate.loadtests.commands.exits import EXIT_BROKE, complain, stopping
from tailgate.loadtests.commands.options import Json, Port, port_option
from tailgate.servers import stdout
from tailgate.servers.complaint import ConfigError
from tailgate.servers.processes import log_tail, temporary_folder
from tailgate.servers.security import check_named, server_tls
from tailgate.servers.splitter.admin import Admin, SplitterError, admin_address, reweight
from tailgate.servers.splitter.bootstrap import bootstrap
from tailgate.servers.splitter.envoy import START_S, Envoy
from tailgate.servers.splitter.envoy_config import ArmTarget, SplitterConfig

EXAMPLES = """\
  tailgate split --arm eager=127.0.0.1:50051 --arm compiled-padded=127.0.0.1:50052,127.0.0.1:50053 \\
                 --weight eager=90,compiled-padded=10 --port 8080 --admin-port 9901
  tailgate split --admin 127.0.0.1:9901 --weight eager=50,compiled-padded=50
  tailgate split --arm eager=127.0.0.1:50051 --arm compiled-padded=127.0.0.1:50052 --shadow compiled-padded=25%"""


_FORMS = {
    "--weight": ("[0-9]{1,9}", "NAME=WEIGHT", "eager=90"),
    "--shadow": (r"[0-9]{1,9}(\.[0-9]{1,9})?%", "NAME=PERCENT%", "compiled=25%"),
}


def command(
    context: typer.Context,
    arm: Annotated[
        list[str] | None, typer.Option(metavar="NAME=HOST:PORT,...", help="One arm and its replicas. Repeatable.")
    ] = None,
    weight: Annotated[
        list[str] | None, typer.Option(metavar="NAME=N,...", help="Shares of arms; 1 by default. Repeatable.")
    ] = None,
    shadow: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=P%,...", help="Copy P% of requests to an arm of weight 0. Repeatable."),
    ] = None,
    host: Annotated[str, typer.Option(metavar="HOST", help="Address to listen on.")] = "127.0.0.1",
    port: Port = 8080,
    admin_port: Annotated[int, port_option("Envoy's admin interface on 127.0.0.1; 0: a private Unix socket.")] = 0,
    tls_certificate: Annotated[
        str | None, typer.Option(metavar="FILE", help="Serve TLS with this chain (PEM).")
    ] = None,
    tls_key: Annotated[str | None, typer.Option(metavar="FILE", help="The key of --tls-certificate (PEM).")] = None,
    request_log: Annotated[
        str, typer.Option(metavar="FILE", help="Log requests to this file, for `tailgate ramp --admin`.")
    ] = "",
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print Envoy's configuration as JSON, and exit.")
    ] = False,
    admin: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT|PATH", help="Change and show weights and shadows of the split with this admin address."
        ),
    ] = "",
    as_json: Json = False,
) -> int:
    """Split traffic over arms with Envoy, in the foreground.

    Weights decide the arm of each request, or of each session when a session header is sent; the header x-tailgate-arm
    pins one. A shadow receives copies of requests that another arm answers, and its answers are discarded. Weights and
    shadows change live: run the command again with --admin. Ctrl-C ends it once running streams are done.
    """
    if admin:
        if arm or print_config:
            raise ConfigError("--admin changes a running split: leave out --arm and --print-config")
        address = admin_address(
            admin, f'--admin "{admin}" is not HOST:PORT or PATH: give the admin address that the split printed'
        )
        weights = {arm: int(share) for arm, share in _pairs(weight, "--weight").items()}
        try:
            now = reweight(Admin(address), weights, _pairs(shadow, "--shadow"))
        except SplitterError as error:
            return complain(str(error), EXIT_BROKE)
        text = f"weights: {_shares(now.weights)}{_copies(now.shadows)}"
        stdout.write(text, {"weights": now.weights, "shadows": now.shadows}, as_json=as_json)
        return 0
    config = split_config(context.params)
    if print_config:
        print(json.dumps(bootstrap(config), indent=2))
        return 0
    from tailgate.loadtests.trials.preflight import check_port

    if config.port and config.port == config.admin_port:
        raise ConfigError(f"--port and --admin-port are both {config.port}: give two ports")
    for flag, host, port in (("--port", config.host, config.port), ("--admin-port", "127.0.0.1", config.admin_port)):
        check_port(port, key=flag, host=host)
    return _split(config, as_json=as_json)


def _split(config: SplitterConfig, *, as_json: bool) -> int:
    """Run Envoy until it is stopped or dies; return the exit code."""
    from tailgate.loadtests.external.grpc_channel import check_replica

    stopped: list[int] = []
    with temporary_folder("tailgate-split-") as scratch, stopping(lambda: stopped.append(1), _note):
        log_path = scratch / "envoy.log"
        try:
            with Envoy(config, log_path=log_path, work_dir=scratch) as envoy:
                admin, deadline = envoy.admin.address, time.monotonic() + START_S
                while not stopped and envoy.poll() is None and not envoy.serves():
                    if time.monotonic() > deadline:
                        raise SplitterError(
                            f"Envoy serves nothing after {START_S:g} s ({log_tail(log_path, 2)}): does every address "
                            "of --arm answer?"
                        )
                    time.sleep(0.02)
                stdout.write("", {"port": envoy.port, "target": envoy.target, "admin": admin}, as_json=as_json)
                _note(
                    f"splitting {_shares(config.weights)}{_copies(config.shadows)} on {envoy.target}; Ctrl-C ends; "
                    f"new weights: tailgate split --admin {admin} --weight {_shares(config.weights, ',')}"
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
                            unnamed -= {replica for replica in unnamed if check_replica(*replica)}
                    time.sleep(0.2)
        except SplitterError as error:
            return complain(str(error), EXIT_BROKE)
    return 0


def _note(text: str) -> None:
    # stderr may be closed, and a signal may come while another note is written.
    with contextlib.suppress(OSError, RuntimeError):
        print(text, file=sys.stderr)


def _shares(weights: Mapping[str, int], separator: str = " ") -> str:
    return separator.join(f"{name}={weight}" for name, weight in weights.items())


def _copies(shadows: Mapping[str, float]) -> str:
    return "".join(f", copies of {percent:g} % to {name}" for name, percent in shadows.items())


def split_config(options: Mapping[str, Any]) -> SplitterConfig:
    """Return the configuration that the options of `tailgate split` describe. Raises ConfigError."""
    if not options["arm"]:
        raise ConfigError("no arm is given: add --arm NAME=HOST:PORT at least once, or --admin of a running split")
    weights, shadows = _pairs(options["weight"], "--weight"), _pairs(options["shadow"], "--shadow")
    arms = []
    for text in options["arm"]:
        name, equals, addresses = text.partition("=")
        if not equals or not name or not addresses:
            raise ConfigError(f'--arm "{text}" is not NAME=HOST:PORT,...: write for example eager=127.0.0.1:50051')
        backends = tuple(address.strip() for address in addresses.split(","))
        # A shadow, also one of 0 % for later, answers no request.
        weight = int(weights.get(name, 0 if name in shadows else 1))
        arms.append(ArmTarget(name=name, backends=backends, weight=weight, shadow_percent=shadows.get(name, 0.0)))
    known = [arm.name for arm in arms]
    for flag, given in (("--weight", weights), ("--shadow", shadows)):
        if unknown := next((name for name in given if name not in known), None):
            raise ConfigError(f'{flag} names the arm "{unknown}", which no --arm gives: use one of {", ".join(known)}')
    tls = {f"--tls-{name}": options[f"tls_{name}"] for name in ("certificate", "key")}
    check_named(tls)
    return SplitterConfig(
        arms=tuple(arms),
        host=options["host"],
        port=options["port"],
        admin_port=options["admin_port"],
        # Absolute, since Envoy and its readers run in other folders.
        request_log=str(Path(options["request_log"]).resolve()) if options["request_log"] else "",
        tls=server_tls(*(value or "" for value in tls.values())),
    )


def _pairs(texts: Sequence[str] | None, flag: str) -> dict[str, float]:
    """Return {"eager": 90.0, "compiled": 10.0} of ["eager=90,compiled=10"]. Raises ConfigError."""
    number, form, example = _FORMS[flag]
    pairs = {}
    for part in (part for text in texts or () for part in text.split(",")):
        name, _, value = (side.strip() for side in part.partition("="))
        if not name or not re.fullmatch(number, value):
            raise ConfigError(f'{flag} "{part}" is not {form}: write for example {example}')
        pairs[name] = float(value.removesuffix("%"))
    return pairs
