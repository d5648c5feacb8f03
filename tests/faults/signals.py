"""Signals: a process is killed, asked to end, or stopped for a while."""

from __future__ import annotations

import os
import random
import signal
from contextlib import suppress
from dataclasses import dataclass, field

from tests.faults.fault import CANDIDATE, CONTROL, Fault, Kind, Live, Moment, Situation, some_instant

ARMS = (CONTROL, CANDIDATE)
_ALWAYS = ("orchestrator", *ARMS, "envoy", "load", "page")
_MORE: dict[Kind, tuple[str, ...]] = {
    "run": ("watcher",),
    "until-decided": ("judge",),
    "ramp": ("judge",),
    "workers": ("worker", "worker"),
    "remote worker": ("worker", "remote worker"),
    "external": ("server",),
    "engine": ("engine of control", "engine of candidate"),
    "users' ramp": ("judge", "users", "split"),
}
_NOT_THERE: dict[Kind, frozenset[str]] = {
    "external": frozenset({"envoy", CANDIDATE}),
    "users' ramp": frozenset({"load"}),
}
# From which phase to which a process is there; elsewhere from the first to the last.
_WHEN = {
    **dict.fromkeys((*ARMS, "watcher"), ("starting arms", "stopping")),
    **dict.fromkeys(("engine of control", "engine of candidate"), ("starting arms", "stopping")),
    "envoy": ("starting the splitter", "stopping"),
    **dict.fromkeys(("load", "worker"), ("starting the load", "waiting for the last answers")),
    "page": ("starting arms", "judging"),
    "judge": ("starting arms", "stopping"),
}
_WHEN_USERS = {"users": ("traffic of users", "stopping"), "judge": ("meeting the arms", "stopping")}
# What a run goes on without.
_SPARE = frozenset({"page", "watcher"})
_RECORDERS = frozenset({"load", "worker", "remote worker", "orchestrator", "users"})
# Without its load a run waits this long for a load that does not end (see loadtests/trials/load.py).
_LOAD_S = 130.0


def roles(kind: Kind) -> tuple[str, ...]:
    """Whom signals may hit in a run of the kind."""
    return tuple(role for role in (*_ALWAYS, *_MORE[kind]) if role not in _NOT_THERE.get(kind, ()))


@dataclass(frozen=True)
class Signal(Fault):
    """The signal for every process of the role, or for one of several workers. SIGSTOP is lifted by SIGCONT."""

    number: signal.Signals
    role: str
    _stopped: list[int] = field(default_factory=list, repr=False, compare=False)

    @property
    def name(self) -> str:
        """Such as "SIGKILL of envoy"."""
        return f"{self.number.name} of {self.role}"

    @property
    def hurts(self) -> frozenset[str]:
        """The arm, or both where it is what they share."""
        arm = self._arm
        return frozenset({arm}) if arm else frozenset(ARMS if self.role in ("envoy", "split") else ())

    @property
    def silences(self) -> frozenset[str]:
        """The arm that is gone."""
        arm = self._arm
        return frozenset({arm}) if arm and self.number != signal.SIGSTOP else frozenset()

    @property
    def ends_records(self) -> bool:
        """Whether nobody may be there to record what is answered."""
        return self.number != signal.SIGSTOP and self.role in _RECORDERS

    @property
    def is_watched(self) -> bool:
        """A watcher that is hit has to be there."""
        return self.role == "watcher"

    @property
    def extra_s(self) -> float:
        """A load that does not end is waited for."""
        return _LOAD_S if self.role in ("load", "worker", "remote worker") else 0.0

    @property
    def _arm(self) -> str:
        if self.role == "server":
            return CANDIDATE
        return next((arm for arm in ARMS if self.role in (arm, f"engine of {arm}")), "")

    def inject(self, live: Live) -> str:
        """The signal was sent."""
        pids = live.pids(self.role)
        if self.role == "worker":
            pids = pids[:1]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, self.number)
        if self.number == signal.SIGSTOP:
            self._stopped.extend(pids)
        return f"{len(pids)} of {self.role}" if pids else ""

    def lift(self, live: Live) -> None:
        """Whoever was stopped goes on, if it is still there."""
        for pid in self._stopped:
            if pid in live.pids(self.role):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


def draw(rng: random.Random, situation: Situation) -> Moment | None:
    """A signal at a random instant for somebody who is there."""
    role = rng.choice(roles(situation.kind))
    when = _WHEN_USERS if situation.kind == "users' ramp" else _WHEN
    phase, after_s = some_instant(rng, situation, *when.get(role, ("", "")))
    numbers = [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP]
    number = rng.choice(numbers if not situation.liveness or role in _SPARE else [signal.SIGSTOP])
    lasts_s = None
    if number == signal.SIGSTOP:
        # In a liveness plan no longer than any request may take; elsewhere 1 to 60 s, the longer the rarer.
        most_s = 2.0 if situation.quick or situation.liveness else 60.0
        lasts_s = round(most_s ** rng.random(), 1) if most_s > 2.0 else round(rng.uniform(0.3, most_s), 1)
    return Moment(phase=phase, after_s=after_s, fault=Signal(number, role), lasts_s=lasts_s)
