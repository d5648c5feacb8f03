"""Runs an experiment: per trial a fresh start of every arm, the splitter, the load, and all records in one directory.

Everything is stopped in order, whatever happens: load generator, telemetry, splitter, arms.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from analysis.judging.gates import FAIL
from analysis.records.documents import vouched_toml, write_document
from loadtests.experiments.experiment import Experiment, ExperimentArm, same_kind_of_device, to_toml
from loadtests.external.addresses import external_table
from loadtests.external.client_security import bearer_token
from loadtests.external.probes import NotReadyError, Probe, UnusableError, wait_ready
from loadtests.traffic.drawing import build_schedule
from loadtests.traffic.prompts import PromptSource
from loadtests.traffic.rate_steps import closer
from loadtests.traffic.schedule import Schedule
from loadtests.traffic.settings import TrafficConfig
from loadtests.traffic.source import Source, read_source
from loadtests.trials.channels import arm_channel
from loadtests.trials.cpu_time import cpu_seconds
from loadtests.trials.device_rotation import in_trial
from loadtests.trials.environment import describe_environment
from loadtests.trials.parity_processes import PARITY_COMMAND, ParityError, ParityRun
from loadtests.trials.preflight import check_experiment, check_writable
from loadtests.trials.processes import Child, describe_exit
from loadtests.trials.progress import Load, ReplicaState, Status, read_load, read_workers
from loadtests.trials.served_parity import STILL_S, TIMEOUT_S, ask, compared, questions
from loadtests.trials.telemetry import Collector
from loadtests.workers.channel_token import TOKEN_VARIABLE, channel_token
from servers.clock import anchored_environment, now_ns
from servers.complaint import fault
from servers.config import STALLING_KINDS, ConfigError
from servers.rpc import telemetry_pb2
from servers.security import server_tls
from servers.splitter.envoy import INFERENCE_SERVICE, ArmTarget, Envoy, SplitterConfig, SplitterError

ARM_COMMAND = (sys.executable, "-P", "-m", "servers.front.serve")
# -P: a directory called `locust` or `servers` where the user stands must not be imported instead.
LOCUST_COMMAND = (sys.executable, "-P", "-m", "locust")
LOCUSTFILE = Path(__file__).resolve().parents[1] / "chat.py"

LOOPBACK = "127.0.0.1"

_POLL_S = 0.1
_LOCUST_START_S = 120.0
_LOCUST_GRACE_S = 15.0
_ENVOY_READY_S = 30.0
_ARM_GRACE_S = 10.0


class RunError(RuntimeError):
    """The run itself failed: no verdict is to be had from what happened. One line that names the log."""


class StopRequestedError(Exception):
    """The user asked the run to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """How a run ended. Complete only if every trial ended by itself. `failed_parity` is why no trial was begun."""

    run_dir: Path
    complete: bool
    interrupted: bool = False
    error: str | None = None
    failed_parity: Mapping[str, Any] | None = None


class Orchestrator:
    """Runs one experiment into a new directory under `out`. `status` says at any time what is going on.

    `arm_command` is what starts an arm replica, in front of --config, --port, --replica and --cache-dir.
    """

    def __init__(
        self,
        experiment: Experiment,
        *,
        out: Path,
        status: Status | None = None,
        arm_command: Sequence[str] = ARM_COMMAND,
        parity_command: Sequence[str] = PARITY_COMMAND,
    ) -> None:
        self.experiment = experiment
        self.status = status or Status()
        self._out = out
        self._arm_command = tuple(arm_command)
        self._parity_command = tuple(parity_command)
        self._build: _ScheduleBuilder | None = None
        self._trial: _Trial | None = None
        self._parity: ParityRun | None = None
        # A plain flag: the signal handler that sets it runs inside any line of the main thread, where taking a lock
        # may wait for ever.
        self._interrupted = False

    def interrupt(self) -> None:
        """The run ends soon and in order. Safe in a signal handler."""
        self._interrupted = True

    def kill(self) -> None:
        """Every child process is gone at once. Safe in a signal handler."""
        self._interrupted = True
        if self._trial is not None:
            self._trial.kill()
        if self._parity is not None:
            self._parity.kill()

    def prepare(self) -> None:
        """This machine and the traffic were checked; nothing was started or written. Otherwise ConfigError."""
        experiment = self.experiment
        check_experiment(experiment)
        source = read_source(experiment.traffic, seed=experiment.seed, model=_model(experiment))
        self._build = _ScheduleBuilder(experiment, source)
        self._build(1)  # an impossible schedule is known now
        check_writable(self._out)

    def run(self) -> RunOutcome:
        """The run directory holds the records of all trials, or of those until the run broke or was interrupted.

        Raises ConfigError, before anything was started, for whatever is known to fail on this machine.
        """
        experiment, status = self.experiment, self.status
        status.trials = experiment.trials.count
        status.duration_s = experiment.traffic.duration_s
        if self._build is None:
            self.prepare()
        run_dir = new_run_dir(self._out, experiment.name)
        (run_dir / "experiment.toml").write_text(vouched_toml(to_toml(experiment)), encoding="utf-8")
        write_document(run_dir / "environment.json", describe_environment(), indent=2)
        try:
            if experiment.parity.full:
                parity = self._measure_parity(run_dir)
                if parity["verdict"] == FAIL:
                    return RunOutcome(run_dir=run_dir, complete=False, failed_parity=parity)
            for number in range(1, experiment.trials.count + 1):
                status.trial = number
                self._run_trial(number, run_dir)
        except StopRequestedError:
            return RunOutcome(run_dir=run_dir, complete=False, interrupted=True)
        except (RunError, SplitterError, ParityError, ConfigError) as error:
            return RunOutcome(run_dir=run_dir, complete=False, error=str(error))
        except OSError as error:
            return RunOutcome(run_dir=run_dir, complete=False, error=f"{error}: see {run_dir}")
        except Exception as error:  # what was recorded until then is judged all the same
            return RunOutcome(run_dir=run_dir, complete=False, error=fault(error, run_dir))
        return RunOutcome(run_dir=run_dir, complete=True)

    def _measure_parity(self, run_dir: Path) -> dict[str, Any]:
        self._parity = ParityRun(
            self.experiment,
            folder=run_dir,
            shared_cache=self._out / "compile-cache",
            status=self.status,
            check=self._check,
            command=self._parity_command,
        )
        outcome = self._parity.run()
        for arm in outcome["arms"]:
            self.status.note(f"parity of {arm['name']}: {arm['verdict']}. {' '.join(arm['reasons'])}".rstrip())
        return outcome

    def _run_trial(self, number: int, run_dir: Path) -> None:
        self._check()
        assert self._build is not None
        levels = self._levels(number, run_dir)
        self._trial = trial = _Trial(
            in_trial(self.experiment, number),
            number=number,
            folder=run_dir / f"trial-{number:02d}",
            shared_cache=self._out / "compile-cache",
            schedule=self._build(number, levels),
            status=self.status,
            arm_command=self._arm_command,
            check=self._check,
        )
        clean = False
        try:
            trial.run()
            clean = True
        finally:
            trial.close(hurry=not clean)

    def _levels(self, number: int, run_dir: Path) -> tuple[float, ...]:
        """The rates of a saturation search in this trial: over what the trials before leave open for each arm."""
        traffic = self.experiment.traffic
        if traffic.arrivals != "saturation" or number == 1:
            return ()
        from analysis.judging.load_steps import brackets
        from analysis.records.requests import read_run
        from analysis.run.run import Run

        low, high = traffic.step_rates
        found = [item.to_search for item in brackets(Run.of(read_run(run_dir)))]
        levels = closer(found, traffic.saturation_steps, low=low, high=high)
        self.status.note(f"trial {number} searches at {', '.join(f'{rate:g}' for rate in levels)} requests/s")
        return levels

    def _check(self) -> None:
        if self._interrupted:
            raise StopRequestedError


def _model(experiment: Experiment) -> str:
    """The model whose tokenizer counts: the control's, or that of the experiment when the control is external."""
    control = experiment.control
    return control.own.model.id if control.own is not None else experiment.model.id


@dataclass(frozen=True, slots=True)
class _ScheduleBuilder:
    experiment: Experiment
    source: Source

    def __call__(self, trial: int, levels: Sequence[float] = ()) -> Schedule:
        experiment = self.experiment
        engines = [arm.config.engine for arm in experiment.own_arms]
        if experiment.external_arms:
            engines.append(experiment.engine)
        return build_schedule(
            experiment.traffic,
            arms=[arm.name for arm in experiment.arms],
            seed=experiment.seed,
            trial=trial,
            # Arms of an experiment about models may have limits of their own: every prompt must fit all of them.
            # External arms do not tell theirs: [engine] at the top speaks for them.
            max_prompt_tokens=min(engine.max_prompt_tokens for engine in engines),
            max_new_tokens=min(engine.max_new_tokens for engine in engines),
            source=self.source,
            levels=levels,
            edges={arm.name: arm.config.length_ladder for arm in experiment.own_arms},
        )


@dataclass(slots=True)
class _Replica:
    """One server process on its way from launch to ready."""

    arm: ExperimentArm
    name: str
    child: Child
    deadline: float
    target: str = ""
    ready: bool = False
    dead: bool = False
    channel: grpc.Channel | None = None
    snapshot: telemetry_pb2.SnapshotResponse | None = None


class _Trial:
    """One trial: start, traffic, stop. `check` raises StopRequestedError when the user wants an end."""

    def __init__(
        self,
        experiment: Experiment,
        *,
        number: int,
        folder: Path,
        shared_cache: Path,
        schedule: Schedule,
        status: Status,
        arm_command: Sequence[str],
        check: Callable[[], None],
    ) -> None:
        self._experiment = experiment
        self._number = number
        self._folder = folder
        self._logs = folder / "logs"
        self._cache = folder / "compile-cache"
        self._shared_cache = shared_cache
        self._schedule = schedule
        self._status = status
        self._arm_command = tuple(arm_command)
        self._check = check
        self._replicas: dict[str, _Replica] = {}
        self._collector: Collector | None = None
        self._envoy: Envoy | None = None
        self._locust: Child | None = None
        self._in_traffic = False
        self._recording = False
        self._facts: dict[str, Any] = {
            "trial": number,
            "design": experiment.traffic.design,
            "control": experiment.control.name,
            "stalling_kinds": list(STALLING_KINDS),
            "arms": [_arm_facts(arm) for arm in experiment.arms],
            "start_ns": None,
            "duration_s": experiment.traffic.duration_s,
            "block_s": experiment.gates.block_s,
            "open_loop": experiment.traffic.open_loop,
            "max_concurrency": experiment.traffic.max_concurrency or None,
            "load_processes": experiment.traffic.load_processes,
            "loop": schedule.loop,
            "concurrency": experiment.traffic.concurrency or None,
            "num_prompts": experiment.traffic.num_prompts or None,
            "steps": [dict(step) for step in schedule.steps],
            "settle_s": experiment.traffic.settle_s if schedule.steps else None,
            "prompts": dict(schedule.prompts),
            "devices": {arm.name: arm.config.model.device for arm in experiment.own_arms},
            "start_order": [],
            "complete": False,
            "deaths": [],
            "weights": {arm.name: arm.weight for arm in experiment.arms},
            "ready": {},
            "startup": {},
            "planned": schedule.planned,
            "dropped": dict(schedule.dropped),
        }

    def run(self) -> None:
        """The trial's traffic was sent and recorded."""
        status, experiment = self._status, self._experiment
        self._logs.mkdir(parents=True)
        status.load = Load()
        status.planned = _copies(self._schedule)
        status.replicas = {name: ReplicaState() for arm in experiment.arms for name in arm.replica_names}
        self._schedule.write(self._folder / "schedule.arrow")
        self._write_facts()
        self._collector = Collector(self._folder, trial=self._number, status=status)
        self._recording = True
        self._find_external()
        self._start_arms()
        self._compare_arms()
        targets = self._start_splitter()
        self._send_traffic(targets)
        self._end_records(hurry=False)
        self._facts["complete"] = True
        self._write_facts()
        if experiment.parity.served and not experiment.compare_models:
            self._compare_answers()

    # --- Arms -------------------------------------------------------------------------------------------------------

    def _find_external(self) -> None:
        """Every replica of every external arm has answered a short request. Otherwise RunError."""
        for number, arm in enumerate(self._experiment.arms):
            if arm.external is None:
                continue
            self._status.phase = "finding external arms"
            probes = []
            for name, address in zip(arm.replica_names, arm.external.addresses, strict=True):
                probes.append(self._find(arm, name, address).to_dict())
            self._facts["arms"][number]["probe"] = probes
            self._facts["ready"][arm.name] = now_ns()
        self._write_facts()

    def _find(self, arm: ExperimentArm, name: str, address: str) -> Probe:
        assert arm.external is not None
        state = self._status.replicas[name]
        state.stage = "asking"

        def told(why: str) -> None:
            state.stage = f"not ready: {why}"

        limit = self._experiment.trials.ready_timeout_s
        try:
            found = wait_ready(arm.external, address, timeout_s=limit, check=self._check, told=told)
        except NotReadyError as error:
            raise RunError(
                f'arm "{arm.name}": {address} was not ready after {limit:g} s ({error}): start the server, correct the '
                "address, or raise trials.ready_timeout_s"
            ) from None
        except UnusableError as error:
            raise RunError(f'arm "{arm.name}": {address} cannot be used: {error}') from None
        state.stage = "ready"
        if found.tokens is None:
            self._status.note(
                f"{name} does not count its tokens: pieces of text are counted instead, and TPOT, ITL and token rates "
                "are per piece"
            )
        elif found.tokens < found.asked and self._experiment.traffic.ignore_eos:
            self._status.note(
                f"{name} answered {found.tokens} of {found.asked} tokens asked for: answers may end early, which "
                f"{arm.kind}.length_fields prevents where the server knows them"
            )
        return found

    def _start_arms(self) -> None:
        """Every replica is warm. They start in an order drawn from the seed, so that no arm always goes first."""
        self._status.phase = "starting arms"
        every = [(arm, name) for arm in self._experiment.own_arms for name in arm.replica_names]
        rng = np.random.default_rng([self._experiment.seed, self._number])
        waiting = [every[index] for index in rng.permutation(len(every))]
        self._facts["start_order"] = [name for _, name in waiting]
        while waiting or not all(replica.ready for replica in self._replicas.values()):
            self._check()
            starting = sum(not replica.ready for replica in self._replicas.values())
            while waiting and starting < self._experiment.trials.starting_at_once:
                self._launch(*waiting.pop(0))
                starting += 1
            for replica in self._replicas.values():
                self._advance(replica)
            time.sleep(_POLL_S)
        self._facts["ready"] |= {
            arm.name: max(self._ready_ns(name) for name in arm.replica_names) for arm in self._experiment.own_arms
        }
        self._write_facts()

    def _launch(self, arm: ExperimentArm, name: str) -> None:
        # Beside the logs: an arm called "generator" must not pass for the account of a load process.
        config_path = self._logs / f"{name}.json"
        _write_json(config_path, arm.config.to_dict())
        fresh = self._experiment.trials.compile_cache == "fresh"
        cache = self._cache / name if fresh else self._shared_cache
        cache.mkdir(parents=True, exist_ok=True)
        command = [*self._arm_command, "--config", str(config_path.resolve()), "--port", "0", "--replica", name]
        command += ["--cache-dir", str(cache.resolve())]
        if self._experiment.security.token_env:
            command += ["--token-env", self._experiment.security.token_env]
        environment = child_environment()
        threads = arm.config.engine.threads
        if threads and not arm.config.model.device.startswith("cuda"):
            # Before torch is imported: a thread pool is sized once.
            environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        self._status.replicas[name].stage = "starting"
        self._replicas[name] = _Replica(
            arm=arm,
            name=name,
            child=Child(name, command, log_path=self._logs / f"{name}.log", environment=environment),
            deadline=time.monotonic() + self._experiment.trials.ready_timeout_s,
        )

    def _advance(self, replica: _Replica) -> None:
        """The replica is one step further towards ready, if it can be. Never waits long."""
        code = replica.child.poll()
        if code is not None:
            raise RunError(
                f'arm "{replica.arm.name}": {replica.name} ended with {describe_exit(code)} during start-up: '
                f"{replica.child.log_tail()}: see {replica.child.log_path}"
            )
        assert self._collector is not None
        failure = self._collector.failed_stage.get(replica.name)
        if failure is not None:
            raise RunError(f'arm "{replica.arm.name}": {replica.name} failed: {failure}: see {replica.child.log_path}')
        if replica.ready:
            return
        if time.monotonic() > replica.deadline:
            limit = self._experiment.trials.ready_timeout_s
            raise RunError(
                f'arm "{replica.arm.name}": {replica.name} was not ready after {limit:g} s (it was at: '
                f"{self._status.replicas[replica.name].text()}): raise trials.ready_timeout_s, "
                f"or see {replica.child.log_path}: {replica.child.log_tail(2)}"
            )
        if not replica.target:
            self._find_port(replica)
        elif self._is_serving(replica):
            replica.ready = True
            self._collector.serving_ns.setdefault(replica.name, now_ns())
            self._status.replicas[replica.name].stage = "ready"

    def _find_port(self, replica: _Replica) -> None:
        line = replica.child.line(0.05)
        if line is None:
            return
        try:
            port = int(json.loads(line)["port"])
        except (ValueError, KeyError, TypeError):
            return  # something else was printed; it is in the log
        replica.target = f"127.0.0.1:{port}"
        # Arms check tokens from a variable, which they inherit; the load generator may read its own from a file.
        token = bearer_token(self._experiment.security) if self._experiment.security.token_env else ""
        replica.channel = arm_channel(replica.target, token=token)
        assert self._collector is not None
        self._collector.follow(arm=replica.arm.name, replica=replica.name, target=replica.target, token=token)

    def _is_serving(self, replica: _Replica) -> bool:
        assert replica.channel is not None
        stub = health_pb2_grpc.HealthStub(replica.channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=INFERENCE_SERVICE), timeout=2.0)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def _ready_ns(self, replica: str) -> int:
        assert self._collector is not None
        return self._collector.serving_ns[replica]

    def _compare_arms(self) -> None:
        """All arms run the same thing by their own account. Otherwise ConfigError."""
        assert self._collector is not None
        for replica in self._replicas.values():
            replica.snapshot = self._collector.snapshot(replica.name)
            if replica.snapshot is None:
                raise RunError(f"{replica.name} does not tell what it runs: see {replica.child.log_path}")
        self._facts["startup"] = {
            arm.name: _startup([self._snapshot(name) for name in arm.replica_names])
            for arm in self._experiment.own_arms
        }
        self._write_facts()
        if self._experiment.compare_models:
            return
        control = self._snapshot(self._experiment.control.replica_names[0])
        for replica in self._replicas.values():
            mine = self._snapshot(replica.name)
            for what, value, expected in (
                ("dtype", mine.dtype, control.dtype),
                ("attention", _attention(mine), _attention(control)),
                ("vocabulary", mine.vocab_size, control.vocab_size),
                ("device", mine.device, control.device),
            ):
                alike = same_kind_of_device(str(value), str(expected)) if what == "device" else value == expected
                if not alike:
                    raise ConfigError(
                        f"{replica.name} runs with {what} {value} but the control with {expected}: not comparable; "
                        "make them equal, or set compare_models = true at the top if that is the question"
                    )

    def _snapshot(self, replica: str) -> telemetry_pb2.SnapshotResponse:
        snapshot = self._replicas[replica].snapshot
        assert snapshot is not None
        return snapshot

    # --- Splitter ---------------------------------------------------------------------------------------------------

    def _start_splitter(self) -> dict[str, str]:
        """Where the load goes: {"*": the splitter}, or each arm's own address when it goes direct.

        Beside an external arm all go direct, so that no arm has a hop more than another.
        """
        experiment = self._experiment
        backends = {
            arm.name: tuple(self._replicas[name].target for name in arm.replica_names) for arm in experiment.own_arms
        }
        if experiment.external_arms:
            return {name: ",".join(addresses) for name, addresses in backends.items()}
        if experiment.traffic.direct:
            return {name: addresses[0] for name, addresses in backends.items()}
        self._status.phase = "starting the splitter"
        settings = experiment.splitter
        config = SplitterConfig(
            arms=tuple(
                ArmTarget(name=arm.name, backends=backends[arm.name], weight=arm.weight) for arm in experiment.arms
            ),
            # Requests of workers on other hosts come to the address that the workers themselves come to.
            host=experiment.traffic.master[0] if experiment.traffic.remote_workers else "127.0.0.1",
            port=settings.port,
            admin_port=settings.admin_port,
            workers=settings.workers,
            stickiness=settings.stickiness,
            access_log=str((self._logs / "access.log").resolve()) if settings.access_log else "",
            tls=server_tls(settings.tls_certificate, settings.tls_key, settings.tls_client_ca),
        )
        self._envoy = Envoy.start(config, log_path=self._logs / "envoy.log", work_dir=self._folder)
        deadline = time.monotonic() + _ENVOY_READY_S
        while True:
            self._check()
            try:
                self._envoy.wait_ready(0.5, every_replica=True)
                return {"*": self._envoy.target}
            except SplitterError:
                if self._envoy.poll() is not None or time.monotonic() > deadline:
                    raise

    # --- Traffic ----------------------------------------------------------------------------------------------------

    def _send_traffic(self, targets: dict[str, str]) -> None:
        self._status.phase = "starting the load"
        traffic = self._experiment.traffic
        drain_s = traffic.timeout_s + 5.0
        config_path = self._folder / "generator.json"
        external = {arm.name: arm.external for arm in self._experiment.external_arms if arm.external is not None}
        vocabularies = [replica.snapshot.vocab_size for replica in self._replicas.values() if replica.snapshot]
        vocabularies += [found.vocab_size for found in external.values() if found.vocab_size]
        if traffic.prompts != "ids" and vocabularies:
            # Said here, in one line, rather than by every request.
            PromptSource.of(
                traffic.prompts, model=traffic.tokenizer or _model(self._experiment), vocab_size=min(vocabularies)
            )
        _write_json(
            config_path,
            {
                "trial": self._number,
                "arms": [arm.name for arm in self._experiment.arms],
                "targets": targets,
                "external": {name: asdict(found) for name, found in external.items()},
                "timeout_s": traffic.timeout_s,
                "vocab_size": min(vocabularies, default=256),
                "ignore_eos": traffic.ignore_eos,
                "max_concurrency": traffic.max_concurrency or None,
                "prompts": traffic.prompts,
                "tokenizer": traffic.tokenizer or _model(self._experiment),
                "concurrency": traffic.concurrency,
                "pause_s": traffic.pause_s,
                "num_prompts": traffic.num_prompts,
                "duration_s": traffic.duration_s,
                "rampup_s": traffic.rampup_s,
                "drain_s": drain_s,
                "seed": self._experiment.seed,
                "client": traffic.client,
                "security": asdict(self._experiment.security),
            },
        )
        self._locust = Child(
            "locust",
            locust_command(
                schedule=self._folder / "schedule.arrow",
                trial_config=config_path,
                records=self._folder,
                workers=traffic.workers,
                remote_workers=traffic.remote_workers,
                master=traffic.master if traffic.remote_workers else None,
                wait_s=self._experiment.trials.ready_timeout_s,
            ),
            log_path=self._logs / "locust.log",
            environment=load_environment(traffic),
            folder=self._logs,
        )
        self._in_traffic = True
        # Workers on other hosts are started by somebody else, as arms are by us: both may take as long.
        start_s = self._experiment.trials.ready_timeout_s if traffic.remote_workers else 0.0
        deadline = time.monotonic() + _LOCUST_START_S + start_s + traffic.duration_s + drain_s
        while (code := self._locust.poll()) is None:
            self._watch(traffic.duration_s)
            if time.monotonic() > deadline:
                raise RunError(
                    f"the load did not end within {_LOCUST_START_S + start_s + traffic.duration_s + drain_s:g} s: "
                    f"{self._locust.log_tail(2)}: see {self._locust.log_path}"
                )
            time.sleep(_POLL_S)
        self._in_traffic = False
        self._read_load()
        if code != 0 and traffic.remote_workers and (here := read_workers(self._folder)) is not None:
            raise RunError(
                f"{here[0]} of {here[1]} load workers came within {start_s:g} s: start `tailgate worker --master "
                f"{traffic.master_bind}` on {traffic.remote_workers} hosts with the same {TOKEN_VARIABLE}, or raise "
                f"trials.ready_timeout_s: see {self._locust.log_path}"
            )
        if code != 0:
            raise RunError(
                f"the load generator ended with {describe_exit(code)}: {self._locust.log_tail(3)}: "
                f"see {self._locust.log_path}"
            )

    def _watch(self, duration_s: float) -> None:
        """Deaths of arms are recorded and the run goes on; whatever else dies ends it."""
        self._check()
        assert self._collector is not None
        self._read_load()
        load = self._status.load
        if load.arms:
            late = load.t_s > duration_s
            self._status.phase = "waiting for the last answers" if late else "traffic"
            self._status.detail = "" if late else f"{max(0.0, load.t_s):.0f} of {duration_s:g} s"
        elif (here := read_workers(self._folder)) is not None:
            self._status.phase = "waiting for load workers"
            self._status.detail = f"{here[0]} of {here[1]} at {self._experiment.traffic.master_bind}"
        self._watch_replicas()
        if not self._experiment.external_arms and all(replica.dead for replica in self._replicas.values()):
            raise RunError(f"every arm died: see {self._logs}")
        if self._envoy is not None and self._envoy.poll() is not None:
            raise RunError(f"Envoy ended with {describe_exit(self._envoy.poll() or 0)}: see {self._envoy.log_path}")
        if self._collector.failure is not None:
            raise RunError(self._collector.failure)

    def _watch_replicas(self) -> None:
        for replica in self._replicas.values():
            code = replica.child.poll()
            if code is not None and not replica.dead:
                self._record_death(replica, code)

    def _record_death(self, replica: _Replica, code: int) -> None:
        replica.dead = True
        self._status.replicas[replica.name].stage = "dead"
        self._facts["deaths"].append(
            {"arm": replica.arm.name, "replica": replica.name, "at_ns": now_ns(), "exit_code": code}
        )
        self._write_facts()
        self._status.note(
            f"{replica.name} died ({describe_exit(code)}): {replica.child.log_tail(1)}: see {replica.child.log_path}"
        )

    def _read_load(self) -> None:
        self._status.load = read_load(self._folder)
        if self._facts["start_ns"] is None and self._status.load.finished:
            # The instant that all load processes agreed on; before the first answer the file may hold another.
            starts = [start for path in self._folder.glob("generator-[0-9]*.json") if (start := _start_ns(path))]
            self._facts["start_ns"] = max(starts, default=None)
            self._write_facts()

    # --- The end ----------------------------------------------------------------------------------------------------

    def _compare_answers(self) -> None:
        """trial.json tells which replicas give the control's answers. Nothing of this is in the records."""
        self._status.phase, self._status.detail = "comparing answers", ""
        replicas = list(self._replicas.values())
        asked = questions(
            self._experiment,
            trial=self._number,
            vocab_size=min(self._snapshot(replica.name).vocab_size for replica in replicas),
        )
        first = self._experiment.control.replica_names[0]
        answers: dict[str, list[list[int]] | str] = {}
        for replica in sorted(replicas, key=lambda item: item.name != first):
            self._status.detail = replica.name
            if replica.dead or replica.child.poll() is not None or replica.channel is None:
                answers[replica.name] = "its process is gone"
            else:
                limit_s = self._experiment.traffic.timeout_s
                answers[replica.name] = ask(
                    replica.channel,
                    asked,
                    check=self._check,
                    timeout_s=min(TIMEOUT_S, limit_s * len(asked)),
                    still_s=min(STILL_S, limit_s),
                    worked_s=partial(cpu_seconds, replica.child.pid),
                )
        self._facts["answers"] = {
            "dtype": self._snapshot(first).dtype,
            "control": first,
            "prompts": [len(question.prompt) for question in asked],
            "replicas": compared(answers, {replica.name: replica.arm.name for replica in replicas}, first=first),
        }
        self._write_facts()

    def _end_records(self, *, hurry: bool) -> None:
        """Load and telemetry have ended and are on disk. A second call does nothing."""
        if not self._recording:
            return
        self._recording = False
        if self._locust is not None:
            self._locust.stop(_LOCUST_GRACE_S)
            with suppress(OSError):
                self._read_load()
        assert self._collector is not None
        if self._locust is not None:
            self._collector.settle(timeout_s=1.0 if hurry else 5.0)
            self._final_snapshots()
            if not hurry:
                self._watch_replicas()  # one may have died after its last answer
        self._collector.stop()

    def close(self, *, hurry: bool) -> None:
        """Every process of the trial is gone and its records are complete. `hurry`: nobody waits for answers."""
        self._status.phase, self._status.detail = "stopping", ""
        self._end_records(hurry=hurry)
        if self._envoy is not None:
            self._envoy.stop(grace_s=0.0 if hurry else 5.0)
        self._stop_arms()
        shutil.rmtree(self._cache, ignore_errors=True)
        with suppress(OSError):
            self._write_facts()

    def _stop_arms(self) -> None:
        for replica in self._replicas.values():
            if replica.channel is not None:
                replica.channel.close()
            replica.child.ask_to_stop()
        # The load is gone, so there is little to drain; all share one grace time.
        deadline = time.monotonic() + _ARM_GRACE_S
        for replica in self._replicas.values():
            replica.child.stop(max(0.0, deadline - time.monotonic()))

    def _final_snapshots(self) -> None:
        """trial.json holds the last word of every replica that still serves; one that is missing there does not."""
        assert self._collector is not None
        final = {}
        for replica in self._replicas.values():
            if replica.ready and not replica.dead and replica.child.poll() is None and self._is_serving(replica):
                answer = self._collector.snapshot(replica.name, timeout_s=2.0)
                if answer is not None:
                    final[replica.name] = {
                        "counters": dict(answer.counters),
                        "memory_bytes": dict(answer.memory_bytes),
                    }
        self._facts["final"] = final

    def kill(self) -> None:
        """Every process of the trial is gone at once, records as they are."""
        for child in (self._locust, *(replica.child for replica in self._replicas.values())):
            if child is not None:
                child.kill_now()
        if self._envoy is not None and self._envoy.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self._envoy.pid, 9)

    def _write_facts(self) -> None:
        write_document(self._folder / "trial.json", self._facts, indent=2)


def _arm_facts(arm: ExperimentArm) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": arm.name, "kind": arm.kind, "replicas": list(arm.replica_names)}
    if arm.external is None:
        return {**facts, "config": arm.config.to_dict(), "length_ladder": list(arm.config.length_ladder)}
    return {**facts, "external": external_table(arm.external)}


def locust_command(
    *,
    schedule: Path,
    trial_config: Path,
    records: Path,
    workers: int,
    remote_workers: int = 0,
    master: tuple[str, int] | None = None,
    wait_s: float = 0.0,
) -> list[str]:
    """The command that replays a schedule with `workers` load processes and ends by itself.

    With `remote_workers` it waits up to `wait_s` for so many more to come to `master` (host, port) from other hosts.
    """
    command = [*LOCUST_COMMAND, "-f", str(LOCUSTFILE), "--headless", "--only-summary", "--exit-code-on-error", "0"]
    command += ["-u", str(workers + remote_workers), "-r", str(workers + remote_workers)]
    if remote_workers and master is not None:
        host, port = master[0], str(master[1])
        command += ["--master-bind-host", host, "--master-bind-port", port, "--remote-workers", str(remote_workers)]
        command += ["--expect-workers-max-wait", str(math.ceil(wait_s))]
        command += ["--processes", str(workers), "--master-host", host, "--master-port", port] if workers else []
        command += [] if workers else ["--master"]
    elif workers > 1:
        # Locust's usual port may be taken by another run.
        port = str(_free_port())
        command += ["--processes", str(workers), "--master-host", LOOPBACK, "--master-port", port]
        command += ["--master-bind-host", LOOPBACK, "--master-bind-port", port]
    command += ["--schedule", str(schedule.resolve()), "--trial-config", str(trial_config.resolve())]
    command += ["--records", str(records.resolve())]
    return command


def child_environment() -> dict[str, str]:
    """This process's environment with the shared clock, and without what is meant for Locust."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("LOCUST_") and key != TOKEN_VARIABLE}
    return {**kept, **anchored_environment()}


def load_environment(traffic: TrafficConfig) -> dict[str, str]:
    """The environment of Locust: with the secret of its channel, a fresh one where no worker comes from elsewhere."""
    remote = f"traffic.remote_workers = {traffic.remote_workers}"
    token = channel_token(remote) if traffic.remote_workers else secrets.token_hex(32)
    return {**child_environment(), TOKEN_VARIABLE: token}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _copies(schedule: Schedule) -> int:
    """Requests as they are sent: a mirrored one counts for each arm."""
    return sum(schedule.planned.values())


def _startup(snapshots: list[telemetry_pb2.SnapshotResponse]) -> dict[str, Any]:
    """What an arm's start cost; the slowest replica for times, the sum for memory."""
    items: dict[str, int] = {}
    memory: dict[str, int] = {}
    for snapshot in snapshots:
        for key, value in snapshot.startup_ns.items():
            items[key] = max(items.get(key, 0), value)
        for key, value in snapshot.memory_bytes.items():
            memory[key] = memory.get(key, 0) + value
    first = snapshots[0]
    return {
        "items_ns": items,
        "memory_bytes": memory,
        "versions": dict(first.versions),
        "device": first.device,
        "dtype": first.dtype,
    }


def _attention(snapshot: telemetry_pb2.SnapshotResponse) -> str:
    return str(json.loads(snapshot.config_json)["model"]["attention"])


def _start_ns(path: Path) -> int:
    try:
        return int(json.loads(path.read_text(encoding="utf-8")).get("start_ns") or 0)
    except (OSError, ValueError):
        return 0


def new_run_dir(out: Path, name: str) -> Path:
    """A new directory `<time>-<name>` under `out`."""
    stamp = datetime.now(tz=UTC).strftime("%Y%m%dT%H%M%SZ")
    for attempt in range(1, 1000):
        suffix = "" if attempt == 1 else f"-{attempt}"
        path = out / f"{stamp}-{name}{suffix}"
        with suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
    raise RunError(f'"{out}" has too many runs of {stamp}: give another --out')


def _write_json(path: Path, content: object) -> None:
    """`path` holds `content`; a reader sees the old content or the new, never a part."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=2, sort_keys=False) + "\n", encoding="utf-8")
    partial.replace(path)
