"""Weighs on the machines of a trial as the experiment's [pressure] says, and keeps from when to when it did.

A neighbour process on each device that an arm uses and, where one is asked for, a second server there are started
before the traffic and wait for their phases, so that no import falls into it. What a phase asks for counts as on from
the neighbour's answer, which comes once all memory is held. A phase that begins with the traffic is on before the load
starts.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from analysis.records.documents import write_json
from loadtests.bed.devices import device_name
from loadtests.experiments.model import OwnArm
from loadtests.experiments.pressure import PressurePhase
from loadtests.trials.channels import arm_channel, is_serving
from loadtests.trials.context import TrialContext
from loadtests.trials.cpu_limits import CpuLimit, limit_all
from loadtests.trials.errors import RunError, StopRequestedError
from loadtests.trials.processes import Child, child_environment, describe_exit, thread_variables
from servers.clock import now_ns
from servers.config import ArmConfig

NEIGHBOUR_COMMAND = (sys.executable, "-P", "-m", "servers.neighbour")

_POLL_S = 0.05
_START_S = 120.0  # torch from a cold disk
_CHANGE_S = 60.0  # to touch the memory of a large host
_HURRY_S = 1.0
_SILENT = "the neighbour did not answer"
_PROMPT_TOKENS, _TOKENS = 64, 16  # of a tenant's request, at most

Row = dict[str, Any]


@dataclass(slots=True)
class _Neighbour:
    """The neighbour on one device and what it does now."""

    device: str
    child: Child
    server: Child | None = None  # the tenant
    rows: list[Row] = field(default_factory=list)  # of what is on
    asked: list[tuple[PressurePhase | None, int]] = field(default_factory=list)  # when, and not answered yet
    dead: bool = False
    lost: str = ""  # why its tenant is gone


class Pressure:
    """The pressure of one trial. Without a [pressure] nothing is started or written.

    `arm_command` is what starts a server, as for arms; `neighbour_command` starts a neighbour.
    """

    def __init__(
        self,
        trial: TrialContext,
        *,
        arm_command: Sequence[str],
        neighbour_command: Sequence[str] = NEIGHBOUR_COMMAND,
    ) -> None:
        self._trial = trial
        self._arm_command = tuple(arm_command)
        self._neighbour_command = tuple(neighbour_command)
        self._waiting = list(trial.experiment.pressure.phases)
        self._phase: PressurePhase | None = None
        self._neighbours: list[_Neighbour] = []
        self._servers: dict[str, Child] = {}
        self._replicas: Mapping[str, int] = {}
        self._limits: list[tuple[CpuLimit | None, Row]] = []

    @property
    def process_ids(self) -> dict[str, int]:
        """Every process of it by name: they are no foreign work."""
        neighbours = {f"neighbour {neighbour.device}": neighbour.child.pid for neighbour in self._neighbours}
        return neighbours | {f"tenant {device}": server.pid for device, server in self._servers.items()}

    # --- Before the traffic -----------------------------------------------------------------------------------------

    def start(self, replicas: Mapping[str, int]) -> None:
        """All that the phases need is ready, and a phase that begins with the traffic is on.

        `replicas` are the arms' processes by name. Raises RunError where something cannot be had: nothing is measured
        yet, and a trial without its pressure would answer another question.
        """
        if not self._waiting:
            return
        self._replicas, self._trial.facts.pressure = replicas, []
        self._trial.status.phase, self._trial.status.detail = "starting the pressure", ""
        arms = {device_name(arm.config.model.device): arm for arm in self._trial.experiment.own_arms}
        if any(phase.has_neighbour for phase in self._waiting):
            has_tenant = any(phase.tenant_rps for phase in self._waiting)
            targets = {device: self._start_tenant(device, arm) for device, arm in arms.items() if has_tenant}
            for device, arm in arms.items():
                self._start_neighbour(device, arm, targets.get(device, ""))
        if self._waiting[0].start_s == 0:
            self._change(self._waiting.pop(0))
            self._await_answers(_CHANGE_S)
            if errors := [row["error"] for row in self._trial.facts.pressure if row["error"]]:
                raise RunError(f"the pressure could not be put on: {errors[0]}: lower what [pressure] asks for")

    def _start_tenant(self, device: str, arm: OwnArm) -> str:
        """Where a second server of the engine on the device listens, once it is warm. It runs without a compiler."""
        model, name = replace(arm.config.model, device=device), f"tenant-{_plain(device)}"
        config = ArmConfig.from_preset("eager", name="tenant", model=model, engine=arm.config.engine)
        path = self._trial.logs / f"{name}.json"
        write_json(path, config.to_dict(), indent=2)
        self._servers[device] = server = Child(
            name,
            [*self._arm_command, "--config", str(path.resolve()), "--port", "0", "--replica", name],
            log_path=self._trial.logs / f"{name}.log",
            environment=child_environment() | thread_variables(config),
        )
        limit_s = self._trial.experiment.trials.ready_timeout_s
        deadline = time.monotonic() + limit_s
        target = f"127.0.0.1:{self._first(server, 'port', deadline, limit_s)}"
        with arm_channel(target) as channel:
            while not is_serving(channel):
                self._check_start(server, deadline, limit_s)
                time.sleep(_POLL_S)
        return target

    def _start_neighbour(self, device: str, arm: OwnArm, tenant: str) -> None:
        """The neighbour waits for its first demand."""
        command = [*self._neighbour_command, "--device", device]
        if tenant:
            engine = arm.config.engine
            sizes = (min(_PROMPT_TOKENS, engine.max_prompt_tokens), min(_TOKENS, engine.max_new_tokens))
            command += ["--tenant", tenant, "--prompt-tokens", str(sizes[0]), "--tokens", str(sizes[1])]
        name = f"neighbour-{_plain(device)}"
        log = self._trial.logs / f"{name}.log"
        child = Child(name, command, log_path=log, environment=child_environment(), commands=True)
        self._neighbours.append(neighbour := _Neighbour(device, child, self._servers.get(device)))
        neighbour.device = str(self._first(child, "device", time.monotonic() + _START_S, _START_S))

    def _first(self, child: Child, key: str, deadline: float, limit_s: float) -> Any:
        """What the process says of `key`. Raises RunError when it ends or waits too long before."""
        while True:
            message = _message(child.line(_POLL_S))
            if key in message:
                return message[key]
            if "error" in message:
                raise RunError(f"{child.name} could not start: {message['error']}: see {child.log_path}")
            if not message:
                self._check_start(child, deadline, limit_s)

    def _check_start(self, child: Child, deadline: float, limit_s: float) -> None:
        self._trial.check()
        code = child.poll()
        if code is not None or time.monotonic() > deadline:
            what = f"was not ready after {limit_s:g} s" if code is None else f"ended with {describe_exit(code)}"
            raise RunError(f"{child.name} {what}: {child.log_tail(2)}: see {child.log_path}")

    # --- While the traffic runs -------------------------------------------------------------------------------------

    def step(self) -> None:
        """The phase of this moment is on, and what neighbours said is in trial.json."""
        self._listen()
        elapsed_s = self._elapsed_s()
        if elapsed_s is None:
            return
        if self._waiting and elapsed_s >= self._waiting[0].start_s:
            self._change(self._waiting.pop(0))
        elif self._phase is not None and 0 < self._phase.end_s <= elapsed_s:
            self._change(None)

    def _elapsed_s(self) -> float | None:
        """Seconds of traffic until now; None while it has not begun."""
        start_ns = self._trial.facts.start_ns
        if start_ns is not None:
            return (now_ns() - start_ns) / 1e9
        return self._trial.status.load.t_s or None  # before the first answer the load alone knows

    def _change(self, phase: PressurePhase | None) -> None:
        """`phase` is on and no other; neighbours are asked to, and answer when they do."""
        self._phase = phase
        self._end_limits()
        asked = phase or PressurePhase()
        demand = json.dumps({name: getattr(asked, name) for name in ("memory_share", "compute_share", "tenant_rps")})
        for neighbour in self._neighbours:
            neighbour.asked.append((phase, now_ns()))
            neighbour.child.command(demand)
        if asked.cpus:
            self._begin_limits(asked)

    def _listen(self) -> None:
        for neighbour in self._neighbours:
            ended = neighbour.child.poll()  # read first: what it says, it says before it ends
            while (line := neighbour.child.line(0)) is not None:
                if (message := _message(line)) and neighbour.asked:
                    self._answered(neighbour, neighbour.asked.pop(0)[0], message)
            server = neighbour.server
            if server is not None and not neighbour.lost and (code := server.poll()) is not None:
                neighbour.lost = f"the second server ended with {describe_exit(code)}"
                self._trial.status.note(f"{neighbour.device}: {neighbour.lost}: {server.log_tail(1)}")
                self._lose_tenant(neighbour)
                self._trial.keep_facts()
            if ended is not None:
                self._died(neighbour, f"the neighbour ended with {describe_exit(ended)}")

    def _lose_tenant(self, neighbour: _Neighbour) -> None:
        """Requests to its second server have ended, or never began, and their rows say why."""
        for row in neighbour.rows:
            if row["kind"] == "tenant" and not row["error"]:
                row |= {"end_ns": max(now_ns(), row["start_ns"]), "error": neighbour.lost}

    def _died(self, neighbour: _Neighbour, why: str) -> None:
        """What it did has ended, and what it is asked for from now on is a row that says why it never began."""
        if not neighbour.dead:
            neighbour.dead = True
            self._trial.status.note(f"{neighbour.device}: {why}: {neighbour.child.log_tail(1)}")
        elif not neighbour.asked:
            return
        self._give_up(neighbour, why, now_ns())

    def _give_up(self, neighbour: _Neighbour, why: str, at_ns: int) -> None:
        """What it did counts until `at_ns` at most, and what it was asked for since never began."""
        began = neighbour.rows
        for phase, asked_ns in neighbour.asked:
            began += _rows(neighbour.device, phase, {"began_ns": asked_ns, "memory_bytes": 0}, self._facts)
        for row in began:
            if row["end_ns"] is None:
                row |= {"end_ns": max(at_ns, row["start_ns"]), "error": row["error"] or why}
        neighbour.asked, neighbour.rows = [], []
        self._trial.keep_facts()

    def _answered(self, neighbour: _Neighbour, phase: PressurePhase | None, answer: Row) -> None:
        """The rows of what ended have their end, and what is on now has rows."""
        had = answer["had"]
        for row in neighbour.rows:
            row["end_ns"] = row["end_ns"] or answer["ended_ns"]
            if row["kind"] == "compute":
                row["had_share"] = had["compute_share"]
            elif row["kind"] == "tenant":
                row |= {name: had.get(name, 0) for name in ("answered", "failed", "left_out")}
        neighbour.rows = _rows(neighbour.device, phase, answer, self._facts)
        if neighbour.lost:
            self._lose_tenant(neighbour)
        for row in neighbour.rows:
            if row["error"] and row["error"] != neighbour.lost:
                self._trial.status.note(f"the pressure on {neighbour.device} is not what was asked: {row['error']}")
        self._trial.keep_facts()

    @property
    def _facts(self) -> list[Row]:
        assert self._trial.facts.pressure is not None
        return self._trial.facts.pressure

    def _begin_limits(self, phase: PressurePhase) -> None:
        limits: Sequence[CpuLimit | None] = [None] * len(self._replicas)
        error = "it had ended"
        try:
            limits = limit_all(list(self._replicas.values()), phase.cpus)
        except OSError as failed:
            error = f"no process could be limited: {failed}"
            self._trial.status.note(error)
        at_ns = now_ns()
        for name, limit in zip(self._replicas, limits, strict=True):
            row = {"kind": "cpus", "replica": name, **_span(phase, at_ns), "cpus": phase.cpus}
            row |= {"error": error} if limit is None else {"error": None, **limit.facts()}
            self._facts.append(row)
            self._limits.append((limit, row))
        self._trial.keep_facts()

    def _end_limits(self) -> None:
        for limit, row in self._limits:
            if limit is not None:
                limit.lift()
            row["end_ns"] = now_ns()
        self._limits = []

    # --- The end ----------------------------------------------------------------------------------------------------

    def stop(self, *, hurry: bool) -> None:
        """Nothing weighs on the machines, every process is gone, and each row has its end. Twice does nothing more."""
        if self._trial.facts.pressure is None:
            return
        if self._phase is not None:
            self._change(None)
        try:
            with suppress(RunError):
                self._await_answers(_HURRY_S if hurry else _CHANGE_S, check=not hurry)
        except StopRequestedError:  # whoever asked for it asks again after this
            with suppress(RunError):
                self._await_answers(_HURRY_S, check=False)
        for neighbour in self._neighbours:
            neighbour.child.kill()
            if neighbour.asked:
                self._trial.status.note(f"{neighbour.device}: {_SILENT}: see {neighbour.child.log_path}")
                self._give_up(neighbour, _SILENT, neighbour.asked[0][1])
        for server in self._servers.values():
            server.stop(0.0 if hurry else 5.0)
        self._neighbours, self._servers, self._waiting = [], {}, []
        self._trial.keep_facts()

    def kill(self) -> None:
        """Every process is gone at once. Safe in a signal handler."""
        for child in (*(neighbour.child for neighbour in self._neighbours), *self._servers.values()):
            child.kill_now()

    def _await_answers(self, limit_s: float, *, check: bool = True) -> None:
        deadline = time.monotonic() + limit_s
        while True:
            self._listen()
            if not any(neighbour.asked for neighbour in self._neighbours):
                return
            if check:
                self._trial.check()
            if time.monotonic() > deadline:
                raise RunError(f"the neighbours did not answer within {limit_s:g} s: see {self._trial.logs}")
            time.sleep(_POLL_S)


def _rows(device: str, phase: PressurePhase | None, answer: Row, facts: list[Row]) -> list[Row]:
    """A row, which is also in `facts`, for each thing that the neighbour of `device` does in `phase`."""
    if phase is None:
        return []
    on = _span(phase, answer["began_ns"]) | {"device": device, "error": None}
    rows: list[Row] = []
    if phase.memory_share:
        held = {"share": phase.memory_share, "memory_bytes": answer["memory_bytes"], "error": answer.get("error")}
        rows.append({"kind": "memory", **on, **held})
    if phase.compute_share:
        rows.append({"kind": "compute", **on, "share": phase.compute_share})
    if phase.tenant_rps:
        rows.append({"kind": "tenant", **on, "requests_per_s": phase.tenant_rps})
    facts += rows
    return rows


def _span(phase: PressurePhase, start_ns: int) -> Row:
    """When it was asked for, in seconds of the traffic (an end of 0 is that of the traffic), and when it was."""
    return {"from_s": phase.start_s, "to_s": phase.end_s, "start_ns": start_ns, "end_ns": None}


def _message(line: str | None) -> Row:
    """The JSON object on `line`; an empty one for any other line, which is in the log."""
    with suppress(ValueError):
        if line and isinstance(message := json.loads(line), dict):
            return message
    return {}


def _plain(device: str) -> str:
    return device.replace(":", "-")
