"""The load of one trial: Locust in a process of its own, which plays the schedule."""

from __future__ import annotations

import math
import re
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tailgate.analysis.wording import counted
from tailgate.loadtests.generator.trial_config import TrialConfig
from tailgate.loadtests.traffic.prompts import served_text
from tailgate.loadtests.traffic.settings import TrafficConfig
from tailgate.loadtests.trials.context import RunError, TrialContext
from tailgate.loadtests.trials.processes import child_environment
from tailgate.loadtests.trials.status import read_load
from tailgate.loadtests.workers.channel import TOKEN_VARIABLE, channel_token, locust
from tailgate.servers.processes import Child, describe_exit, log_tail

_AWAITED = re.compile(r"Waiting for workers to be ready, (\d+ of \d+) connected")  # as Locust (2.47) logs each second
_GIVEN_UP = "Gave up waiting for workers to connect"  # at the end of that
_OWN_ERROR = re.compile(r"/ERROR/tailgate: (.+)")
_START_S = 120.0
_STOP_GRACE_S = 15.0


class LoadGenerator:
    """Locust, started when this is made. `targets` say where each arm is; `vocab_sizes` are those of managed arms.

    Raises ConfigError for prompts that cannot be made, before anything starts.
    """

    def __init__(self, trial: TrialContext, targets: Mapping[str, str], *, vocab_sizes: Sequence[int]) -> None:
        self._trial = trial
        traffic = trial.experiment.traffic
        config = trial_config(trial, targets, vocab_sizes=vocab_sizes)
        # Fails here in one line, rather than in every request.
        served_text(config.tokenizer, vocab_size=config.vocab_size)
        config.write(trial.folder / "generator.json")
        # Workers on other hosts are started by hand: they may take as long as arms.
        self._workers_s = trial.experiment.trials.ready_timeout_s if traffic.remote_workers else 0.0
        self._limit_s = _START_S + self._workers_s + traffic.duration_s + traffic.timeout_s
        self.child = Child(
            "locust",
            locust_command(trial.folder, traffic, wait_s=self._workers_s),
            log_path=trial.logs / "locust.log",
            environment=load_environment(traffic),
            folder=trial.logs,
        )
        self._deadline = time.monotonic() + self._limit_s

    def ended(self) -> bool:
        """Return whether all was sent and recorded. Raises RunError when Locust failed or takes too long."""
        code = self.child.poll()
        if code is None and time.monotonic() > self._deadline:
            tail = self.child.log_tail(2)
            raise RunError(f"the load did not end within {self._limit_s:g} s: {tail}: see {self.child.log_path}")
        if code:
            raise RunError(self._failure(code))
        return code == 0

    def _failure(self, code: int) -> str:
        traffic = self._trial.experiment.traffic
        why, tail = f"the load generator ended with {describe_exit(code)}", self.child.log_tail(20)
        if _GIVEN_UP in tail:
            came = (_AWAITED.findall(tail) or ["not all"])[-1]
            why = (
                f"{came} load workers came within {self._workers_s:g} s: start `tailgate worker "
                f"--master {traffic.master_bind}` on {counted(traffic.remote_workers, 'host')} with the same "
                f"{TOKEN_VARIABLE}, or raise trials.ready_timeout_s"
            )
        else:
            why += f": {why_it_ended(self.child.log_path)}"
        return f"{why}: see {self.child.log_path}"

    def show(self) -> None:
        """Take the live numbers and the phase of the load into the status."""
        self.read()
        status, traffic = self._trial.status, self._trial.experiment.traffic
        if status.load.arms:
            late = status.load.t_s > traffic.duration_s
            status.phase = "waiting for the last answers" if late else "traffic"
            status.detail = "" if late else f"{max(0.0, status.load.t_s):.0f} of {traffic.duration_s:g} s"
        elif traffic.remote_workers and (awaited := _AWAITED.search(self.child.log_tail(1))):
            status.phase, status.detail = "waiting for load workers", f"{awaited[1]} at {traffic.master_bind}"

    def read(self) -> None:
        """Take the live numbers into the status, and the start of the load into trial.json once that is known."""
        trial = self._trial
        trial.status.load = load = read_load(trial.folder)
        if trial.facts.start_ns is None and load.finished:
            # All load processes agreed on this instant; before the first answer the file may hold another.
            starts = (start for account in load.accounts.values() if (start := account["start_ns"]))
            trial.facts.start_ns = max(starts, default=None)
            trial.write_facts()

    def stop(self) -> None:
        """End Locust, which writes its records to disk."""
        self.child.stop(_STOP_GRACE_S)
        with suppress(OSError):
            self.read()


def trial_config(trial: TrialContext, targets: Mapping[str, str], *, vocab_sizes: Sequence[int]) -> TrialConfig:
    """Return the configuration of the load processes."""
    experiment, traffic = trial.experiment, trial.experiment.traffic
    return TrialConfig(
        trial=trial.number,
        task=experiment.task,
        arms=tuple(arm.name for arm in experiment.arms),
        targets=targets,
        external={arm.name: arm for arm in experiment.external_arms},
        timeout_s=traffic.timeout_s,
        vocab_size=min(vocab_sizes, default=2**31 - 1),  # external arms get text
        ignore_eos=traffic.ignore_eos,
        tokenizer=experiment.tokenizer,
        security=experiment.security,
    )


def why_it_ended(log_path: Path) -> str:
    """Return the last error of our own in Locust's log, which Locust ends with tables; without one the log's end."""
    with suppress(OSError):
        if errors := _OWN_ERROR.findall(log_path.read_text(encoding="utf-8", errors="replace")):
            return str(errors[-1])
    return log_tail(log_path, 3)


def locust_command(folder: Path, traffic: TrafficConfig, *, wait_s: float = 0.0) -> list[str]:
    """Return the command that replays the trial in `folder` with the load processes of `traffic` and ends by itself.

    It waits up to `wait_s` for those of other hosts.
    """
    workers, remote = traffic.workers, traffic.remote_workers
    command = [*locust(), "--headless", "--only-summary", "--exit-code-on-error", "0"]
    command += ["-u", str(workers + remote), "-r", str(workers + remote)]
    if remote or workers > 1:
        # Locust's usual port may be taken by another run.
        host, port = traffic.master if remote else ("127.0.0.1", _free_port())
        command += ["--master-bind-host", host, "--master-bind-port", str(port)]
        if remote:
            command += ["--remote-workers", str(remote), "--expect-workers-max-wait", str(math.ceil(wait_s))]
        own = ["--processes", str(workers), "--master-host", host, "--master-port", str(port)]
        command += own if workers else ["--master"]
    return [*command, "--trial", str(folder.resolve())]


def load_environment(traffic: TrafficConfig) -> dict[str, str]:
    """Return the environment of Locust: with its channel's secret, a fresh one where no worker comes from elsewhere."""
    remote = f"traffic.remote_workers = {traffic.remote_workers}"
    token = channel_token(remote) if traffic.remote_workers else secrets.token_hex(32)
    return {**child_environment(), TOKEN_VARIABLE: token}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
