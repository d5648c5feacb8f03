"""The machines of a trial: sampled by a process meanwhile, and measured by work that never changes before and after.

What either sees is in trial.json. Neither ends the run: what cannot be seen is a note to the user and a row with the
reason.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Literal, cast

from tailgate.analysis.records.schemas import MACHINES
from tailgate.analysis.records.tables import CUT_OFF, RecordError, RecordWriter, read_table
from tailgate.analysis.wording import counted
from tailgate.loadtests.monitor.gpus import MUCH_BYTES, device_name
from tailgate.loadtests.monitor.readings import Seen, Task, Unreadable, Watch
from tailgate.loadtests.trials.context import TrialContext
from tailgate.loadtests.trials.processes import child_environment, thread_variables
from tailgate.servers.clock import now_ns
from tailgate.servers.processes import Child, Measured, Ready, messages_of

# -P: a directory called `tailgate` where the user stands must not be imported instead.
MONITOR_COMMAND = (sys.executable, "-P", "-m", "tailgate.loadtests.monitor")
REFERENCE_COMMAND = (sys.executable, "-P", "-m", "tailgate.servers.reference")
_FIRST_LOOK_S = 60.0
_STOP_GRACE_S = 5.0
START_TIMEOUT_S = 120.0  # torch from a cold disk, and a device that others keep busy
_MEASURE_S = 30.0  # in addition to ten times what it takes: its repetitions have no fixed length
_POLL_S = 0.1

When = Literal["before", "after"]


class MonitorProcess:
    """Sample the machines of `trial` from now until `stop`.

    A monitor that dies is a thing that cannot be read; the trial goes on.
    """

    def __init__(self, trial: TrialContext) -> None:
        self._trial = trial
        self._begun = self._ended = False
        self._table = trial.folder / "machines.arrow"
        sample_s = trial.experiment.machines.sample_s
        devices = sorted({arm.model.device for arm in trial.experiment.managed_arms} - {"cpu"})
        task = Task(out=str(self._table.resolve()), trial=trial.number, sample_s=sample_s, devices=devices)
        self.child = Child(
            "watcher",
            [*MONITOR_COMMAND, json.dumps(asdict(task))],
            log_path=trial.logs / "watcher.log",
            environment=child_environment(),
            commands=True,
            parse=messages_of(Seen, Unreadable),
        )
        self._facts: dict[str, Any] = {"interval_s": sample_s, "devices": {}, "unreadable": [], "before": []}
        trial.facts.monitor = self._facts

    def first_sample(self) -> None:
        """Wait until it has read the devices, before anything of the trial is on them, where any arm runs on one."""
        if all(arm.model.device == "cpu" for arm in self._trial.experiment.managed_arms):
            return
        deadline = time.monotonic() + _FIRST_LOOK_S
        while not self._ended and not self._begun:
            if time.monotonic() > deadline:
                self.child.kill()  # the driver hangs
            self._trial.check()
            self.poll(_POLL_S)

    def name(self, name: str, pid: int | None, *, arm: str | None = None) -> None:
        """Sample the process and its descendants under `name`; an arm's replica with its arm.

        An external server on this host whose process is unknown (None) cannot be distinguished from other work.
        """
        if pid is not None:
            self.child.command(json.dumps(asdict(Watch(name=name, pid=pid, arm=arm))))
        else:
            self._take(Unreadable(name=name, what="cpu_s", why="its process cannot be seen from here"))

    def poll(self, timeout_s: float = 0.0) -> None:
        """Take what the monitor says into the trial's facts, and note its death."""
        messages, ended = self.child.receive(timeout_s)
        for message in messages:
            self._take(message)
        if ended and not self._ended:
            self._ended = True
            why = f"the watcher {self.child.ending(ended)}"
            self._take(Unreadable(name="watcher", what="samples", why=why))
            self._trial.status.note(f"the machines were not watched to the end: {why}")
            with suppress(OSError, RecordError):
                self._end_table()
            self._trial.keep_facts()

    def stop(self) -> None:
        """End the sampling and complete machines.arrow."""
        self.poll()
        self._ended |= not self._begun
        self.child.stop(_STOP_GRACE_S)
        self.poll()

    def _end_table(self) -> None:
        """State the end of a table that the monitor left cut off."""
        rows, problems = read_table(self._table, MACHINES)
        if CUT_OFF in problems:
            ended = self._table.with_suffix(".ended")
            with RecordWriter(ended, MACHINES) as writer:
                for batch in rows.to_batches():
                    writer.append_batch(batch)
            ended.replace(self._table)

    def _take(self, message: object) -> None:
        if isinstance(message, Unreadable):
            self._facts["unreadable"].append(asdict(message))
        elif isinstance(message, Seen):
            self._begun = True
            self._facts.update(asdict(message))
            for row in message.before:
                if text := busy_text(row, message.devices[row["name"]]):
                    self._trial.status.note(text)
            self._trial.keep_facts()


def busy_text(row: Mapping[str, Any], device: Mapping[str, Any]) -> str:
    """Return one line for a device that others use before the trial starts, with a remedy; empty for an idle one."""
    foreign, used = row.get("foreign_processes", 0), row.get("memory_bytes", 0)
    if not foreign and used <= MUCH_BYTES:
        return ""
    name = f"{row['name']} ({device['name']})" if "name" in device else row["name"]
    people = f" and {counted(foreign, 'process')} of others on it" if foreign else ""
    return (
        f"{name} is not idle before the trial: {used / 2**30:.1f} GiB in use{people}: end what runs there (nvidia-smi "
        "lists it), or give another device"
    )


def measure_references(trial: TrialContext, when: When, *, command: Sequence[str] = REFERENCE_COMMAND) -> None:
    """Measure how fast each device and the host are, and add a row for each device to trial.json.

    A process measures each device that an arm of ours uses, with the threads of its arms. All start together, as
    importing torch takes most of the time, and measure one after the other, so that none disturbs another on the host:
    before a trial in the order of the arms and after it backwards, as a host may grow faster or slower meanwhile. Every
    process is gone when this returns.
    """
    arms = {device_name(arm.model.device): arm for arm in trial.experiment.managed_arms}
    seconds = trial.experiment.machines.reference_s
    if not seconds or not arms:
        return
    limit_s = _MEASURE_S + 10 * seconds
    trial.status.phase, trial.status.detail = "measuring the machines", ""
    children: dict[str, Child] = {}
    try:
        for device, arm in arms.items() if when == "before" else reversed(arms.items()):
            name = f"reference-{when}-{device.replace(':', '-')}"
            children[device] = Child(
                name,
                [*command, "--device", device, "--seconds", f"{seconds:g}"],
                log_path=trial.logs / f"{name}.log",
                environment=child_environment(trial.logs) | thread_variables(arm.config),
                commands=True,
                parse=messages_of(Ready, Measured),
            )
        # None measures while another still warms up.
        answers = [answer_of(child, START_TIMEOUT_S, trial.check) for child in children.values()]
        for (device, child), answer in zip(children.items(), answers, strict=True):
            trial.status.detail = device
            if isinstance(answer, Ready):
                child.command("go")
                answer = answer_of(child, limit_s, trial.check)
            assert isinstance(answer, Measured)  # it is ready once
            row = {"device": device, "when": when, "at_ns": answer.at_ns, **answer.values, "error": answer.error}
            trial.facts.references.append(row)
            if answer.error:
                trial.status.note(f"{device} was not measured {when} the trial: {answer.error}")
    finally:
        for child in children.values():
            child.kill()
        trial.status.detail = ""
        trial.keep_facts()


def answer_of(child: Child, limit_s: float, poll: Callable[[], object]) -> Ready | Measured:
    """Wait for the next message of a reference and poll meanwhile; the error of a `Measured` is why none comes."""
    deadline, ended = time.monotonic() + limit_s, None
    while ended is None and time.monotonic() < deadline:
        poll()
        messages, ended = child.receive(_POLL_S)
        if messages:
            return cast("Ready | Measured", messages[0])
    why = f"took over {limit_s:g} s" if ended is None else child.ending(ended, 1)
    return Measured(at_ns=now_ns(), values={}, error=f"the reference {why}")
