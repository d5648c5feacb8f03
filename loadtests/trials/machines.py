"""The machines of a trial: sampled by a process meanwhile, and measured by work that never changes before and after.

What either sees is in trial.json. Neither ends the run: what cannot be seen is a note to the user and a row with the
reason.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Literal

from tailgate.analysis.records.schemas import MACHINES
from tailgate.analysis.records.tables import CUT_OFF, RecordError, RecordWriter, read_table
from tailgate.loadtests.monitor.gpus import MUCH_BYTES, device_name, index_of
from tailgate.loadtests.monitor.readings import Seen, Unreadable, Watch
from tailgate.loadtests.trials.context import TrialContext
from tailgate.loadtests.trials.processes import child_environment, thread_variables
from tailgate.servers.clock import now_ns
from tailgate.servers.processes import Child, Measured, Ready, messages_of

# -P: a directory called `loadtests` where the user stands must not be imported instead.
_MONITOR = (sys.executable, "-P", "-m", "tailgate.loadtests.monitor")
REFERENCE_COMMAND = (sys.executable, "-P", "-m", "tailgate.servers.reference")
_FIRST_LOOK_S = 10.0
_STOP_GRACE_S = 5.0
_BUSY_PCT = 5
START_TIMEOUT_S = 120.0  # torch from a cold disk, and a device that others keep busy
_MEASURE_S = 30.0  # in addition to ten times what it takes: its repetitions have no fixed length
_POLL_S = 0.1

When = Literal["before", "after"]


class MonitorProcess:
    """Sample the machines of `trial` from now until `stop`, unless machines.sample_s is 0.

    A monitor that dies leaves a gap that trial.json states; the trial goes on.
    """

    def __init__(self, trial: TrialContext) -> None:
        self._trial = trial
        self._child: Child | None = None
        self._ended = self._stopped = self._sampled_late = False
        self._table = trial.folder / "machines.arrow"
        machines = trial.experiment.machines
        if not machines.sample_s:
            return
        devices = sorted({arm.model.device for arm in trial.experiment.own_arms} - {"cpu"})
        command = [*_MONITOR, "--out", str(self._table.resolve()), "--trial", str(trial.number)]
        command += ["--sample-s", str(machines.sample_s), *(["--devices", *devices] if devices else [])]
        self._child = Child(
            "watcher",
            command,
            log_path=trial.logs / "watcher.log",
            environment=child_environment(),
            commands=True,
            parse=messages_of(Seen, Unreadable),
        )
        empty: dict[str, Any] = {"machines": {}, "devices": {}, "unreadable": [], "before": [], "gaps": []}
        trial.facts.monitor = {"interval_s": machines.sample_s, **empty}

    def first_sample(self) -> None:
        """Wait until it has read the devices, before anything of the trial is on them, where any arm runs on one."""
        if all(arm.model.device == "cpu" for arm in self._trial.experiment.own_arms):
            return
        deadline = time.monotonic() + _FIRST_LOOK_S
        while not self._ended and self._child is not None and time.monotonic() < deadline:
            self._trial.check()
            self.poll(_POLL_S)
            if self._monitor["machines"]:
                return
        if self._child is not None and not self._ended:
            self._sampled_late = True
            why = f"the driver took over {_FIRST_LOOK_S:g} s to show the devices"
            self._take(Unreadable(host="run", name="devices", what="before", why=why))
            self._trial.status.note(f"what ran on the devices before the trial is not known: {why}")
            self._trial.keep_facts()

    def place_arms(self) -> None:
        """Put each arm on the device that its replicas report into the facts, once they have."""
        if self._child is not None and self._monitor["machines"]:
            self._monitor["arms"] = self._devices_of_arms()

    def name(self, name: str, pid: int | None, *, arm: str | None = None) -> None:
        """Sample the process and its descendants under `name`; an arm's replica with its arm.

        An external server on this host whose process is unknown (None) cannot be distinguished from other work.
        """
        if pid is not None:
            self._command(Watch(name=name, pid=pid, arm=arm))
        elif self._child is not None:
            self._take(Unreadable(host="run", name=name, what="cpu_s", why="its process cannot be seen from here"))

    def forget(self, name: str) -> None:
        """Sample no process of that name any more: it has ended."""
        self._command(Watch(name=name))

    def poll(self, timeout_s: float = 0.0) -> None:
        """Take what the monitor says into the trial's facts, and note its death."""
        if self._child is None:
            return
        messages, ended = self._child.receive(timeout_s)
        for message in messages:
            self._take(message)
        if ended is not None and not self._ended:
            self._ended = True
            self._state_gap(f"the watcher {self._child.ending(ended)}", at_ns=now_ns())
            self._trial.keep_facts()

    def stop(self) -> None:
        """End the sampling and complete machines.arrow. A second call does nothing."""
        if self._child is None or self._stopped:
            return
        self._stopped = True
        self.poll()
        hung = not self._ended
        killed = self._child.stop(_STOP_GRACE_S) != 0
        self._ended = True
        self.poll()
        if hung and killed and self._monitor["machines"]:
            self._state_gap(f"the watcher did not end within {_STOP_GRACE_S:g} s of being asked to", at_ns=None)

    @property
    def pid(self) -> int | None:
        """Return the monitor's process id; None without one."""
        return None if self._child is None else self._child.pid

    def _command(self, watch: Watch) -> None:
        if self._child is not None:
            self._child.command(json.dumps(asdict(watch)))

    def _state_gap(self, why: str, *, at_ns: int | None) -> None:
        """Tell trial.json and the user that this host was not watched to the end; the table ends where it did."""
        self._monitor["gaps"].append({"host": "run", "at_ns": at_ns, "why": why})
        self._trial.status.note(f"the machines were not watched to the end: {why}")
        with suppress(OSError, RecordError):
            self._end_table()

    def _end_table(self) -> None:
        """State the end of a table that the monitor left cut off."""
        rows, problems = read_table(self._table, MACHINES)
        if CUT_OFF in problems:
            ended = self._table.with_suffix(".ended")
            with RecordWriter(ended, MACHINES) as writer:
                for batch in rows.to_batches():
                    writer.append_batch(batch)
            ended.replace(self._table)

    @property
    def _monitor(self) -> dict[str, Any]:
        assert self._trial.facts.monitor is not None
        return self._trial.facts.monitor

    def _take(self, message: object) -> None:
        match message:
            case Unreadable():
                self._monitor["unreadable"].append(asdict(message))
            case Seen():
                self._monitor.update(asdict(message))
                if self._sampled_late:  # by now the run's own processes are on the devices
                    self._monitor["before"] = []
                self.place_arms()
                for reading in self._monitor["before"]:
                    if text := busy_text(reading, self._monitor["devices"].get(reading["device"], {})):
                        self._trial.status.note(text)
                self._trial.keep_facts()

    def _devices_of_arms(self) -> dict[str, str]:
        """Return the device of each arm by its name in the records: `cuda` and an `auto` that finds a GPU are cuda:0.

        A build of torch without CUDA does not find the GPU that the driver shows: its replica says that it is on cpu.
        """
        names = {}
        for arm in self._trial.experiment.own_arms:
            reported = self._trial.facts.startup.get(arm.name, {}).get("device")
            given = "cpu" if reported == "cpu" else arm.model.device
            index = 0 if given == "auto" and self._monitor["devices"] else index_of(given)
            names[arm.name] = "cpu" if index is None else f"cuda:{index}"
        return names


def busy_text(reading: Mapping[str, Any], device: Mapping[str, Any]) -> str:
    """Return one line for a device that others use before the trial starts, with a remedy; empty for an idle one."""
    processes, used = reading["processes"] or [], reading["memory_bytes"] or 0
    busy = reading["utilisation_pct"] or 0
    if not processes and busy < _BUSY_PCT and used <= MUCH_BYTES:
        return ""
    people = ", ".join(f"{process['name'] or 'a process'} (pid {process['pid']})" for process in processes[:3])
    people += f" and {len(processes) - 3} more" if len(processes) > 3 else ""
    name = f"{reading['device']} ({device['name']})" if "name" in device else reading["device"]
    return (
        f"{name} is not idle before the trial: {used / 2**30:.1f} GiB in use, {busy} % busy"
        f"{f', by {people}' if people else ''}: end what runs there, or give another device"
    )


def measure_references(
    trial: TrialContext,
    when: When,
    *,
    command: Sequence[str] = REFERENCE_COMMAND,
    start_timeout_s: float = START_TIMEOUT_S,
) -> None:
    """Measure how fast each device and the host are, and add a row for each device to trial.json.

    A process measures each device that an arm of ours uses, with the threads of its arms. All start together, as
    importing torch takes most of the time, and measure one after the other, so that none disturbs another on the host:
    before a trial in the order of the arms and after it backwards, as a host may grow faster or slower meanwhile. Every
    process is gone when this returns.
    """
    arms = {device_name(arm.model.device): arm for arm in trial.experiment.own_arms}
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
                environment=child_environment() | thread_variables(arm.config),
                commands=True,
                parse=messages_of(Ready, Measured),
            )
        deadline = time.monotonic() + start_timeout_s
        late = f"was not ready after {start_timeout_s:g} s"
        # None measures while another still warms up.
        answers = [_answer(trial, child, deadline, late) for child in children.values()]
        for (device, child), answer in zip(children.items(), answers, strict=True):
            trial.status.detail = device
            at_ns = now_ns()
            if isinstance(answer, Ready):
                child.command("go")
                answer = _answer(trial, child, time.monotonic() + limit_s, f"took over {limit_s:g} s")
            known = {"at_ns": answer.at_ns, **answer.values} if isinstance(answer, Measured) else {"at_ns": at_ns}
            error = answer.error if isinstance(answer, Measured) else answer
            trial.facts.references.append({"host": "run", "device": device, "when": when, **known, "error": error})
            if error:
                trial.status.note(f"{device} was not measured {when} the trial: {error}")
    finally:
        for child in children.values():
            child.kill_now()
        for child in children.values():
            child.kill()
        trial.status.detail = ""
        trial.keep_facts()


def _answer(trial: TrialContext, child: Child, deadline: float, late: str) -> Ready | Measured | str:
    """Wait for the next message of a reference; a text is why none comes."""
    while True:
        trial.check()
        messages, ended = child.receive(_POLL_S)
        for message in messages:
            if isinstance(message, Ready | Measured):
                return message
        if ended is not None:
            return f"the reference {child.ending(ended, 1)}"
        if time.monotonic() > deadline:
            return f"the reference {late}: see {child.log_path}"
