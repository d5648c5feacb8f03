"""tailgate's settings on Locust's command line and web page, and the trial that they describe."""

from __future__ import annotations

import argparse
from typing import Any

from locust.env import Environment

from loadtests.external.addresses import parse_target
from loadtests.external.client_security import SecurityConfig
from loadtests.generator.trial_config import TrialConfig
from loadtests.traffic.lengths import workloads_of
from servers.complaint import ConfigError
from servers.config import Task
from servers.fields import read

_LOOPBACK = "127.0.0.1"
_SECURITY_FLAGS = (  # flag, field of SecurityConfig, help
    ("--tls-ca", "tls_ca", "PEM file of the authority behind an https:// host (default: the system's)"),
    ("--tls-server-name", "tls_server_name", "Name that the host's certificate carries (default: the host)"),
    ("--client-certificate", "tls_certificate", "Certificate (PEM) for servers that ask who the client is"),
    ("--client-key", "tls_key", "Key of --client-certificate (PEM)"),
    ("--token-env", "token_env", "Environment variable that holds the bearer token; never the token itself"),
)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and finite")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def add_arguments(parser: Any, *, task: Task) -> None:
    """Locust's command line and web page know tailgate's settings for requests of this task.

    Page and master listen on loopback where nobody says otherwise: Locust's own defaults are all addresses, and its
    page starts load for whoever comes.
    """
    parser.set_defaults(web_host=_LOOPBACK, master_bind_host=_LOOPBACK)
    add = parser.add_argument
    add("--request-rate", type=_positive, default=1.0, help="Requests/s of each User (default 1)")
    add("--burstiness", type=_positive, default=1.0, help="Shape of the gamma gaps: 1 is Poisson, below 1 is bursty")
    workload, scale, why = ("sentences", 1.0, "") if task == "embed" else ("conversation", 0.1, ": fits small models")
    add("--workload", choices=workloads_of(task), default=workload, help=f"Which lengths (default {workload})")
    add("--length-scale", type=_positive, default=scale, help=f"Factor on all lengths (default {scale:g}{why})")
    add("--max-prompt-tokens", type=_count, default=128, help="Longer prompts are cut (default 128)")
    if task == "generate":
        add("--max-new-tokens", type=_count, default=32, help="Longer answers are cut (default 32)")
    add("--vocab-size", type=int, default=256, help="Prompts are token ids below this (default 256)")
    add("--arm", default="", help="Send every request to this arm (default: the splitter chooses)")
    add("--request-timeout", type=_positive, default=60.0, help="Deadline of each request in seconds (default 60)")
    add("--seed", type=int, default=0, help="Seed of gaps, lengths and prompts (default 0)")
    add("--records", default="", help="Directory for requests-N.arrow (default: no records)")
    # Not in the web page: its visitors must not choose files of this machine. Locust's own page has --tls-key.
    for flag, _, text in _SECURITY_FLAGS:
        add(flag, default="", include_in_web_ui=False, help=text)
    add("--schedule", default="", include_in_web_ui=False, help="schedule.arrow to replay; needs --trial-config")
    add("--trial-config", default="", include_in_web_ui=False, help="generator.json of the trial to replay")
    add("--keep", default="", include_in_web_ui=False, help="On a worker that shares no disk: where its records stay")
    add(
        "--remote-workers", type=int, default=0, include_in_web_ui=False, help="Workers to wait for besides --processes"
    )


def hand_config(environment: Environment, test: int, *, task: Task) -> TrialConfig:
    """The trial that the command line describes, for test number `test`. ConfigError for what cannot work."""
    options = environment.parsed_options
    assert options is not None
    if not environment.host:
        raise ConfigError("no host is given: add --host localhost:50051, the splitter or one arm's server")
    parse_target(environment.host)
    return TrialConfig(
        trial=test,
        task=task,
        arms=(options.arm,) if options.arm else (),
        targets={"*": environment.host},
        timeout_s=options.request_timeout,
        vocab_size=options.vocab_size,
        security=_security(options),
    )


def _security(options: Any) -> SecurityConfig:
    values = {name: getattr(options, flag[2:].replace("-", "_")) for flag, name, _ in _SECURITY_FLAGS}
    security = read(SecurityConfig, values)
    security.check("--tls or --token")
    return security
