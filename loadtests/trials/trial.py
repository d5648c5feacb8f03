"""One trial: arms and splitter started, the traffic sent and recorded, everything stopped in order."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence

from tailgate.loadtests.experiments.model import Experiment
from tailgate.loadtests.external.arms import ExternalArm
from tailgate.loadtests.generator.trial_config import write_end
from tailgate.loadtests.traffic.schedule import Schedule
from tailgate.loadtests.trials.context import RunError, TrialContext
from tailgate.loadtests.trials.external_answers import ask_external_arms, greedy_arms
from tailgate.loadtests.trials.external_arms import find_external_arms, local_servers
from tailgate.loadtests.trials.load import LoadGenerator
from tailgate.loadtests.trials.machines import MonitorProcess, measure_references
from tailgate.loadtests.trials.pressure import Pressure
from tailgate.loadtests.trials.processes import ProcessorTurns
from tailgate.loadtests.trials.replicas import FRESH_CACHE, Replicas
from tailgate.loadtests.trials.served_parity import Answers, compared, questions
from tailgate.loadtests.trials.server_logs import ServerLogs
from tailgate.loadtests.trials.status import Load, ReplicaState
from tailgate.loadtests.trials.steering import Steering
from tailgate.loadtests.trials.telemetry import Collector
from tailgate.loadtests.trials.weights import EnvoySplitter, Splitter
from tailgate.servers.processes import describe_exit
from tailgate.servers.security import server_tls
from tailgate.servers.splitter.admin import SplitterError
from tailgate.servers.splitter.envoy import START_S, Envoy
from tailgate.servers.splitter.envoy_config import ArmTarget, SplitterConfig

_POLL_S = 0.1
ENVOY_METRICS = "/stats/prometheus?usedonly"


class Trial:
    """A trial whose folder is there, and whose telemetry is recorded from now until `close`."""

    def __init__(
        self,
        context: TrialContext,
        *,
        schedule: Schedule,
        expected: dict[str, Answers] | None = None,
        steering: Sequence[Steering] = (),
    ) -> None:
        self.context = context
        self._steering = steering
        self._expected = expected
        self._schedule = schedule
        context.logs.mkdir(parents=True)
        self.collector = Collector(context.folder, trial=context.number, status=context.status)
        self._recording = True
        self._server_logs = ServerLogs(context, self.collector)
        self._monitor = MonitorProcess(context)
        self._replicas = Replicas(context, collector=self.collector, monitor=self._monitor)
        self._turns = ProcessorTurns(context.experiment.machines.processor_turn_s)
        self._pressure = Pressure(context, self._monitor)
        self._envoy: Envoy | None = None
        self.splitter: Splitter  # while traffic flows through it
        self._load: LoadGenerator | None = None

    def run(self) -> None:
        """Send the trial's traffic and record it."""
        context, experiment = self.context, self.context.experiment
        context.status.load = Load()
        # Requests as they are sent: a mirrored one counts for each arm.
        context.status.planned = sum(self._schedule.planned.values())
        context.status.replicas = {
            name: ReplicaState(compiles=None if isinstance(arm, ExternalArm) and not arm.telemetry.logs else 0)
            for arm in experiment.arms
            for name in arm.replica_names
        }
        self._schedule.write(context.folder / "schedule.arrow")
        context.write_facts()
        find_external_arms(context, self._schedule.ints("prompt_tokens") + self._schedule.ints("max_tokens"))
        for name, arm, pid in local_servers(context):
            self._monitor.name(name, pid, arm=arm)
        self._monitor.first_sample()
        measure_references(context, "before")
        self._replicas.start()
        self._replicas.compare()
        self._send_traffic(self._start_splitter())
        self._end_records(hurry=False)
        # Said before the trial is complete: a gate must know whose answers are missing.
        context.facts.asked = [arm.name for arm in greedy_arms(experiment)]
        context.facts.complete = True
        context.write_facts()
        ask_external_arms(context, self._schedule)
        if experiment.parity.served and not experiment.compare_models:
            self._compare_answers()

    def close(self, *, hurry: bool) -> None:
        """End every process of the trial and complete its records. With `hurry` neither wait for answers nor measure
        the machines again."""
        self.context.status.phase, self.context.status.detail = "stopping", ""
        self.context.status.pages = {}
        take_all(
            lambda: self._end_records(hurry=hurry),
            lambda: self._envoy.stop(grace_s=0.0 if hurry else 5.0) if self._envoy is not None else None,
            self._replicas.stop,
            self._monitor.stop,
            lambda: shutil.rmtree(self.context.folder / FRESH_CACHE, ignore_errors=True),
            self.context.keep_facts,
        )
        if not hurry:
            measure_references(self.context, "after")

    def _start_splitter(self) -> dict[str, str]:
        """Return where the load goes: {"*": the splitter}, or each arm's own address.

        With an external arm all go direct, so that no arm has a hop more than another.
        """
        context, experiment = self.context, self.context.experiment
        targets = self._replicas.targets
        if experiment.external_arms:
            return {name: ",".join(addresses) for name, addresses in targets.items()}
        context.status.phase = "starting the splitter"
        config = splitter_config(experiment, targets)
        self._envoy = envoy = Envoy(config, log_path=context.logs / "envoy.log", work_dir=context.folder)
        self._monitor.name("splitter", envoy.pid)
        self.splitter = EnvoySplitter(envoy.admin)
        context.status.pages = {**context.status.pages, "splitter": (envoy.admin.address, ENVOY_METRICS)}
        deadline = time.monotonic() + START_S
        while True:
            context.check()
            try:
                envoy.wait_ready(0.5)
                return {"*": envoy.target}
            except SplitterError:
                if envoy.poll() is not None or time.monotonic() > deadline:
                    raise

    def _send_traffic(self, targets: dict[str, str]) -> None:
        self._pressure.start()
        self._turns.start(self._replicas.process_ids)
        self.context.status.phase = "starting the load"
        sizes = [snapshot.vocab_size for snapshot in self._replicas.snapshots.values()]
        self._load = load = LoadGenerator(self.context, targets, vocab_sizes=sizes)
        self._monitor.name("load", load.child.pid)
        while not load.ended():
            self.context.check()
            load.show()
            self._watch()
            self._turns.poll()
            self._pressure.poll()
            for steering in self._steering:
                steering(self)
            time.sleep(_POLL_S)

    def end_load(self, at_ns: int | None) -> None:
        """Send nothing due at the instant or later, nor to an arm of `ended_arms` from its own on."""
        context, facts = self.context, self.context.facts
        if self._load is None or facts.start_ns is None:
            return
        if at_ns is not None:
            facts.duration_s = min(facts.duration_s, (at_ns - facts.start_ns) / 1e9)
        arms = {arm: int(row["at_ns"]) for arm, row in facts.ended_arms.items()}
        write_end(context.folder, at_ns=at_ns, arms=arms)
        facts.planned = self._schedule.planned_before(
            int(facts.duration_s * 1e9), arms={arm: at - facts.start_ns for arm, at in arms.items()}
        )
        context.status.planned = sum(facts.planned.values())
        context.write_facts()

    def _watch(self) -> None:
        """Record a dead arm or monitor, with which the run goes on; any other dead process raises and ends it."""
        self._replicas.watch()
        self._monitor.poll()
        if not self.context.experiment.external_arms and self._replicas.all_dead:
            raise RunError(f"every arm died: see {self.context.logs}")
        if self._envoy is not None and (code := self._envoy.poll()) is not None:
            raise RunError(f"Envoy ended with {describe_exit(code)}: see {self._envoy.log_path}")
        if self.collector.failure is not None:
            raise RunError(self.collector.failure)

    def _end_records(self, *, hurry: bool) -> None:
        """End load and telemetry, and complete their records. A second call does nothing."""
        if not self._recording:
            return
        self._recording = False
        take_all(
            lambda: self._load.stop() if self._load is not None else None,
            self._turns.stop,
            self._pressure.stop,
            lambda: self._receive_last(hurry=hurry),
            lambda: self._server_logs.stop(hurry=hurry),
            self.collector.stop,
        )

    def _receive_last(self, *, hurry: bool) -> None:
        """Take what replicas still report after the load into the records and the facts."""
        if self._load is None:
            return
        self.collector.settle(timeout_s=1.0 if hurry else 5.0)
        self.context.facts.final = self._replicas.last_words()
        if not hurry:
            self._replicas.watch()  # one may have died after its last answer

    def _compare_answers(self) -> None:
        """Write which replicas give the control's answers to trial.json. The records hold nothing of this."""
        context, experiment = self.context, self.context.experiment
        context.status.phase, context.status.detail = "comparing answers", ""
        snapshots = self._replicas.snapshots
        vocab_size = min(snapshot.vocab_size for snapshot in snapshots.values())
        expected = self._expected
        # Where arms take turns, all get the questions of the first trial, which the control answered.
        number = context.number if expected is None else 1
        prompts = questions(experiment, trial=number, vocab_size=vocab_size)
        first = experiment.control.replica_names[0]
        arms = {name: arm.name for arm in experiment.managed_arms for name in arm.replica_names}
        answers = self._replicas.answers(prompts)
        if expected is not None and not isinstance(given := answers.get(first, ""), str):
            expected.setdefault(first, given)  # for the trials of arms that are not there together with the control
        dtype, least = next(iter(snapshots.values())).dtype, None
        if experiment.task == "embed":
            from tailgate.analysis.parity.vectors import LEAST_COSINE

            least = experiment.parity.min_cosine or LEAST_COSINE[dtype]
        known = None if expected is None else expected.get(first)
        rows = compared(answers, arms, first=first, least=least, expected=known)
        context.facts.answers = {"dtype": dtype, "control": first, "replicas": rows}
        context.write_facts()


def take_all(*steps: Callable[[], object]) -> None:
    """Take every step, also after one that failed, and then raise the first failure."""
    failures = []
    for step in steps:
        try:
            step()
        except Exception as failure:
            failures.append(failure)
    if failures:
        raise failures[0]


def splitter_config(experiment: Experiment, targets: dict[str, tuple[str, ...]]) -> SplitterConfig:
    """Return the splitter in front of the replicas at `targets`."""
    settings, traffic = experiment.splitter, experiment.traffic
    return SplitterConfig(
        arms=tuple(ArmTarget(name=arm.name, backends=targets[arm.name], weight=arm.weight) for arm in experiment.arms),
        # Requests of workers on other hosts come to the address that the workers themselves come to.
        host=traffic.master[0] if traffic.remote_workers else "127.0.0.1",
        port=settings.port,
        admin_port=settings.admin_port,
        workers=settings.workers,
        tls=server_tls(settings.tls_certificate, settings.tls_key),
    )
