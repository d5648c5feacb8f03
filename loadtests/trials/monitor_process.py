"""The machines of a trial are watched: a process beside it samples them, and the trial's facts say what it sees."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from analysis.records.documents import content_of
from analysis.records.schemas import MACHINES
from analysis.records.tables import CUT_OFF, RecordError, RecordWriter, read_table
from loadtests.monitor.gpus import MUCH_BYTES, index_of
from loadtests.trials.context import TrialContext
from loadtests.trials.processes import Child, child_environment, describe_exit
from servers.clock import now_ns

# -P: a directory called `loadtests` where the user stands must not be imported instead.
_COMMAND = (sys.executable, "-P", "-m", "loadtests.monitor")
_FIRST_LOOK_S = 10.0
_STOP_GRACE_S = 5.0
_BUSY_PCT = 5


class MonitorProcess:
    """Sample the machines of `trial` from now until `stop`, unless machines.sample_s is 0.

    A watcher that dies is a note to the user and a gap that trial.json states; the trial goes on.
    """

    def __init__(self, trial: TrialContext) -> None:
        self._trial = trial
        self._child: Child | None = None
        self._ended = self._stopped = self._looked_late = False
        self._table = trial.folder / "machines.arrow"
        machines = trial.experiment.machines
        if not machines.sample_s:
            return
        devices = sorted({arm.config.model.device for arm in trial.experiment.own_arms} - {"cpu"})
        command = [*_COMMAND, "--out", str(self._table.resolve()), "--trial", str(trial.number)]
        command += ["--sample-s", str(machines.sample_s), *(["--devices", *devices] if devices else [])]
        log = trial.logs / "watcher.log"
        self._child = Child("watcher", command, log_path=log, environment=child_environment(), commands=True)
        empty: dict[str, Any] = {"machines": {}, "devices": {}, "unreadable": [], "before": [], "gaps": []}
        trial.facts.monitor = {"interval_s": machines.sample_s, **empty}

    def first_look(self) -> None:
        """The devices were looked at before anything of the trial is on them, where any arm runs on one."""
        if all(arm.config.model.device == "cpu" for arm in self._trial.experiment.own_arms):
            return
        deadline = time.monotonic() + _FIRST_LOOK_S
        while not self._ended and self._child is not None and time.monotonic() < deadline:
            self._trial.check()
            if (line := self._child.line(0.1)) is not None:
                self._take(line)
            if self._monitor["machines"]:
                return
            self.poll()
        if self._child is not None and not self._ended:
            self._looked_late = True
            why = f"the driver took over {_FIRST_LOOK_S:g} s to show the devices"
            self._monitor["unreadable"].append({"host": "run", "name": "devices", "what": "before", "why": why})
            self._trial.status.note(f"what ran on the devices before the trial is not known: {why}")
            self._trial.keep_facts()

    def place_arms(self) -> None:
        """The facts have each arm on the device that its replicas report, once they have."""
        if self._child is not None and self._monitor["machines"]:
            self._monitor["arms"] = self._devices_of_arms()

    def name(self, name: str, pid: int, *, arm: str | None = None) -> None:
        """The process and its descendants are sampled under `name`; an arm's replica with its arm."""
        if self._child is not None:
            self._child.command(json.dumps({"name": name, "pid": pid, "arm": arm}))

    def name_server(self, name: str, pid: int | None, *, arm: str) -> None:
        """Sample an external server on this host, if its process is known; else other work cannot be told from it."""
        if pid is not None:
            self.name(name, pid, arm=arm)
        elif self._child is not None:
            why = "its process cannot be seen from here"
            self._monitor["unreadable"].append({"host": "run", "name": name, "what": "cpu_s", "why": why})

    def forget(self, name: str) -> None:
        """The process of that name has ended."""
        if self._child is not None:
            self._child.command(json.dumps({"name": name, "pid": None}))

    def poll(self) -> None:
        """What the watcher has said is in the trial's facts, and its death is noted."""
        if self._child is None:
            return
        ended = self._child.poll()  # read first: what it says, it says before it ends
        while (line := self._child.line(0)) is not None:
            self._take(line)
        if ended is not None and not self._ended:
            self._ended = True
            self._state_gap(f"the watcher ended with {describe_exit(ended)}: {self._child.log_tail(2)}", at_ns=now_ns())
            self._trial.keep_facts()

    def stop(self) -> None:
        """End the sampling and complete machines.arrow. A second call does nothing."""
        if self._child is None or self._stopped:
            return
        self._stopped = True
        self.poll()
        hung = not self._ended
        self._child.stop(_STOP_GRACE_S)
        self._ended = True
        self.poll()
        if hung and self._monitor["machines"] and "watcher" not in self._monitor:
            self._state_gap(f"the watcher did not end within {_STOP_GRACE_S:g} s of being asked to", at_ns=None)
        self._add_other_hosts()

    @property
    def pid(self) -> int | None:
        """The watcher's process id; None without one."""
        return None if self._child is None else self._child.pid

    def kill(self) -> None:
        """The watcher is gone at once. Safe in a signal handler."""
        if self._child is not None:
            self._child.kill_now()

    def _state_gap(self, why: str, *, at_ns: int | None) -> None:
        """trial.json and the user know that this host was not watched to the end; the table ends where it did."""
        self._monitor["gaps"].append({"host": "run", "at_ns": at_ns, "why": why})
        self._trial.status.note(f"the machines were not watched to the end: {why}")
        with suppress(OSError, RecordError):
            self._end_table()

    def _end_table(self) -> None:
        """State the end of a table that the watcher left cut off."""
        rows, problems = read_table(self._table, MACHINES)
        if CUT_OFF in problems:
            ended = self._table.with_suffix(".ended")
            with RecordWriter(ended, MACHINES) as writer:
                for batch in rows.to_batches():
                    writer.append_batch(batch)
            ended.replace(self._table)

    def _add_other_hosts(self) -> None:
        """What load workers saw of their hosts, which they sent with their accounts."""
        for path in sorted(self._trial.folder.glob("generator-[0-9]*.json")):
            seen = content_of(path).get("monitor", {})
            self._monitor["machines"] |= seen.get("machines", {})
            known = self._monitor["unreadable"]
            known += [item for item in seen.get("unreadable", []) if item not in known]
            self._monitor["gaps"] += seen.get("gaps", [])
            for gap in seen.get("gaps", []):
                self._trial.status.note(f"{gap['host']} was not watched to the end: {gap['why']}")

    @property
    def _monitor(self) -> dict[str, Any]:
        assert self._trial.facts.monitor is not None
        return self._trial.facts.monitor

    def _take(self, line: str) -> None:
        message: dict[str, Any] = {}
        with suppress(ValueError):
            message = json.loads(line)
        if "unreadable" in message:
            self._monitor["unreadable"].append(message["unreadable"])
        elif "watcher" in message:
            self._monitor["watcher"] = message["watcher"]
        elif "monitor" in message:
            self._monitor.update(message["monitor"])
            if self._looked_late:  # by now the run's own processes are on the devices
                self._monitor["before"] = []
            self.place_arms()
            for reading in self._monitor["before"]:
                if text := not_idle(reading, self._monitor["devices"].get(reading["device"], {})):
                    self._trial.status.note(text)
            self._trial.keep_facts()

    def _devices_of_arms(self) -> dict[str, str]:
        """The device of each arm by its name in the records: `cuda` and an `auto` that finds a GPU are cuda:0.

        A build of torch without CUDA does not find the GPU that the driver shows: its replica says that it is on cpu.
        """
        names = {}
        for arm in self._trial.experiment.own_arms:
            reported = self._trial.facts.startup.get(arm.name, {}).get("device")
            given = "cpu" if reported == "cpu" else arm.config.model.device
            index = 0 if given == "auto" and self._monitor["devices"] else index_of(given)
            names[arm.name] = "cpu" if index is None else f"cuda:{index}"
        return names


def not_idle(look: Mapping[str, Any], device: Mapping[str, Any]) -> str:
    """One line for a device that others use before the trial starts, with a remedy; empty for an idle one."""
    processes, used = look["processes"] or [], look["memory_bytes"] or 0
    busy = look["utilisation_pct"] or 0
    if not processes and busy < _BUSY_PCT and used <= MUCH_BYTES:
        return ""
    people = ", ".join(f"{process['name'] or 'a process'} (pid {process['pid']})" for process in processes[:3])
    people += f" and {len(processes) - 3} more" if len(processes) > 3 else ""
    name = f"{look['device']} ({device['name']})" if "name" in device else look["device"]
    return (
        f"{name} is not idle before the trial: {used / 2**30:.1f} GiB in use, {busy} % busy"
        f"{f', by {people}' if people else ''}: end what runs there, or give another device"
    )
