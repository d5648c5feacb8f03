"""`tailgate serve`: one arm over gRPC."""

from __future__ import annotations

from typing import Annotated

import typer

from tailgate.loadtests.commands.arm_flags import CacheDir, become, preset_arm
from tailgate.loadtests.commands.options import Json, Port, port_option, set_option
from tailgate.servers.complaint import ConfigError
from tailgate.servers.presets import PRESETS, check_name
from tailgate.servers.security import check_named, token_from_variable

EXAMPLES = """\
  tailgate serve --preset eager --port 50051
  tailgate serve --preset compiled-padded --set model.id=random:llama-3.2-1b \\
                 --set engine.max_prompt_tokens=2048 --port 50052
  tailgate serve --preset compiled-naive --set compile.mode=reduce-overhead --port 50053
  tailgate serve --preset compiled-bucketed --set compile.artifact=bucketed.compiled"""


def command(
    preset: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=f"Shape and compile policy of the arm: {', '.join(PRESETS)}.",
        ),
    ],
    name: Annotated[str, typer.Option(metavar="NAME", help="Name of the arm in records. Default: the preset.")] = "",
    settings: Annotated[list[str] | None, set_option("compile.mode=max-autotune or engine.max_queue=64")] = None,
    host: Annotated[str, typer.Option(metavar="HOST", help="Address to listen on.")] = "127.0.0.1",
    port: Port = 50051,
    replica: Annotated[
        str, typer.Option(metavar="NAME", help="Name of this process in records. Default: NAME-0.")
    ] = "",
    cache_dir: CacheDir = "",
    metrics_port: Annotated[int, port_option("Serve Prometheus metrics here; 0 is off.")] = 0,
    token_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Environment variable with the bearer token that every call but health checks must carry.",
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Serve one arm over gRPC.

    Loads the model, warms it up, and serves tailgate.v1.Inference, telemetry, health and reflection. Prints its
    port and pid when the port listens; health turns SERVING when the arm is warm and has answered a request of its
    own. SIGTERM or Ctrl-C drains: new requests are refused, running ones finish, and it exits with 0.
    """
    from tailgate.loadtests.trials.preflight import check_arm, check_port

    for flag, text in (("--name", name), ("--replica", replica)):
        try:
            check_name(text or preset)
        except ValueError as error:
            raise ConfigError(f"{flag} {error}") from None
    arm = preset_arm(preset, settings, name=name, flag="--preset")
    check_arm(arm)
    check_port(port, key="--port", host=host)
    if metrics_port:
        if metrics_port == port:
            raise ConfigError(f"--port and --metrics-port are both {port}: give two ports")
        check_port(metrics_port, key="--metrics-port", host=host, remedy="or give another")
    extra = ["--host", host, "--port", str(port), "--replica", replica or f"{arm.name}-0"]
    if metrics_port:
        extra += ["--metrics-port", str(metrics_port)]
    check_named({"--token-env": token_env})
    if token_env:
        token_from_variable(token_env, key="--token-env")
        extra += ["--token-env", token_env]
    if as_json:
        extra.append("--json")
    become("tailgate.servers.front.serve", arm, cache_dir, extra)
