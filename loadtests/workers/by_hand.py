"""Load by hand, without a run: tailgate's settings on Locust's command line and page, and the User they describe."""

from __future__ import annotations

import argparse
from typing import Any, cast

import numpy as np
from locust import User, task
from locust.env import Environment
from locust.exception import StopUser

from tailgate.loadtests.generator.precise_sleep import sleep_until
from tailgate.loadtests.generator.preparer import Prepared
from tailgate.loadtests.generator.trial_config import TrialConfig
from tailgate.loadtests.traffic.lengths import FIT_OF, fitted_lengths, scaled
from tailgate.loadtests.traffic.schedule import PlannedRequest
from tailgate.loadtests.workers.load_process import LoadProcess
from tailgate.servers.clock import now_ns
from tailgate.servers.complaint import ConfigError
from tailgate.servers.config import Task
from tailgate.servers.fields import read

_LOOPBACK = "127.0.0.1"
_SECURITY_FLAGS = (  # flag, field of SecurityConfig, help
    ("--tls-ca", "tls_ca", "PEM file of the authority behind an https:// host (default: the system's)"),
    ("--tls-server-name", "tls_server_name", "Name that the host's certificate carries (default: the host)"),
    ("--client-certificate", "tls_certificate", "Certificate (PEM) for servers that ask who the client is"),
    ("--client-key", "tls_key", "Key of --client-certificate (PEM)"),
    ("--token-env", "token_env", "Environment variable that holds the bearer token; never the token itself"),
)


# --- The command line -------------------------------------------------------------------------------------------------


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
    """Add tailgate's settings for requests of this task to Locust's command line and web page.

    Page and master listen on loopback by default: Locust's own defaults are all addresses, and its
    page starts load for any visitor.
    """
    parser.set_defaults(web_host=_LOOPBACK, master_bind_host=_LOOPBACK)
    add = parser.add_argument
    add("--request-rate", type=_positive, default=1.0, help="Requests/s of each User (default 1)")
    add("--burstiness", type=_positive, default=1.0, help="Shape of the gamma gaps: 1 is Poisson, below 1 is bursty")
    scale, why = (1.0, "") if task == "embed" else (0.1, ": fits small models")
    add("--length-scale", type=_positive, default=scale, help=f"Factor on all lengths (default {scale:g}{why})")
    add("--max-prompt-tokens", type=_count, default=128, help="Longer prompts are cut (default 128)")
    if task == "generate":
        add("--max-new-tokens", type=_count, default=32, help="Longer answers are cut (default 32)")
    add("--arm", default="", help="Send every request to this arm (default: the splitter chooses)")
    add("--request-timeout", type=_positive, default=60.0, help="Deadline of each request in seconds (default 60)")
    add("--seed", type=int, default=0, help="Seed of gaps, lengths and prompts (default 0)")
    add("--records", default="", help="Directory for requests-N.arrow (default: no records)")
    # Not in the web page: its visitors must not choose files of this machine. Locust's own page has --tls-key.
    for flag, _, text in _SECURITY_FLAGS:
        add(flag, default="", include_in_web_ui=False, help=text)
    trial = "Directory of a trial to replay, with schedule.arrow and generator.json; records go there too"
    add("--trial", default="", include_in_web_ui=False, help=trial)
    add("--keep", default="", include_in_web_ui=False, help="On a worker that shares no disk: where its records stay")
    add(
        "--remote-workers", type=int, default=0, include_in_web_ui=False, help="Workers to wait for besides --processes"
    )


def hand_config(environment: Environment, test: int, *, task: Task) -> TrialConfig:
    """Return the trial that the command line describes, for test number `test`. Raises ConfigError for what cannot
    work."""
    options = environment.parsed_options
    assert options is not None
    if not environment.host:
        raise ConfigError("no host is given: add --host localhost:50051, the splitter or one arm's server")
    table = {
        "trial": test,
        "task": task,
        "arms": [options.arm] if options.arm else [],
        "targets": {"*": environment.host},
        "timeout_s": options.request_timeout,
        "security": {name: getattr(options, flag[2:].replace("-", "_")) for flag, name, _ in _SECURITY_FLAGS},
    }
    config = read(TrialConfig, table)
    config.security.check("--tls or --token")
    return config


# --- The User ---------------------------------------------------------------------------------------------------------


class OpenLoopUser(User):
    """A Poisson source of requests that waits for nothing but its own next instant. With --trial it only keeps Locust's
    user count above zero.

    The locustfile's own class says by its name what is sent; what that is follows from the task of its `LoadProcess`.
    """

    abstract = True

    def on_start(self) -> None:
        self._load: LoadProcess = LoadProcess.of(self.environment)
        self._next_ns = now_ns()
        spawn_key = (self._load.worker, next(self._load.users))
        self._rng = np.random.default_rng(np.random.SeedSequence(entropy=self._load.options.seed, spawn_key=spawn_key))
        if self._is_source:
            self._plan_next()
            cast("Any", self).wait()  # Locust has no annotation on it

    @property
    def _is_source(self) -> bool:
        return not self._load.options.trial and self._load.generator is not None

    def on_stop(self) -> None:
        """Give requests in flight `--stop-timeout` to end, if it is set."""
        generator, timeout_s = self._load.generator, self.environment.stop_timeout
        if self._load.stopping and timeout_s and generator is not None:
            generator.wait_idle(timeout_s)

    def wait_time(self) -> float:
        """Return the seconds to just before the next instant; `ask` sleeps the rest precisely."""
        return max(0.0, (self._next_ns - now_ns()) / 1e9 - 0.001) if self._is_source else 3600.0

    @task
    def ask(self) -> None:
        """Send the request that is due, and plan the next one."""
        if self._load.options.trial:
            return
        sleep_until(self._next_ns)
        if self._load.generator is None:
            raise StopUser
        self._load.generator.launch(self._prepared, self._next_ns)
        self._plan_next()

    def _plan_next(self) -> None:
        load, options, rng = self._load, self._load.options, self._rng
        assert load.generator is not None
        gap_s = rng.standard_gamma(options.burstiness) / (options.burstiness * options.request_rate)
        self._next_ns += int(gap_s * 1e9)
        lengths = fitted_lengths(FIT_OF[load.task], 1, rng=rng)
        ((prompt_tokens, max_tokens),) = scaled(lengths, options.length_scale).tolist()
        number = next(load.requests)
        name = f"{load.tests}-{load.worker}.{number}"
        plan = PlannedRequest(
            index=number,
            offset_ns=0,
            prompt_tokens=min(prompt_tokens, options.max_prompt_tokens),
            max_tokens=min(max_tokens, getattr(options, "max_new_tokens", 0)),  # 0 of an embedding
            prompt_seed=int(rng.integers(0, 2**63 - 1)),
            arm=options.arm or None,
            phase="measure",
        )
        self._prepared: Prepared = load.generator.prepare(plan, name)
