"""What is known of a ramp's candidate at any moment of a trial: alarms, and where it stands by interim analyses."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from analysis.judging.alarms import Alarm, burst_alarms, compile_alarms, death_alarms
from analysis.judging.gates import FAIL, PASS
from analysis.judging.ramp import Standing
from analysis.settings.gate_limits import GateLimits
from analysis.settings.ramp_limits import RampLimits
from loadtests.trials.steering import Steered
from servers.clock import now_ns

_WINDOW_NS = 300_000_000_000  # in which a burst of errors counts
_COUNT_NS = 1_000_000_000  # between two counts


class Candidate:
    """Watches the candidate of `limits` since its share last changed, at `began_ns`."""

    def __init__(self, limits: RampLimits, gates: GateLimits) -> None:
        self.name = limits.candidate
        self.began_ns = 0
        self._limits, self._gates = limits, gates
        self._counts: deque[tuple[int, int, int]] = deque()  # (when, requests finished, of these failed)

    def begin(self, trial: Steered) -> None:
        """Count from now on: the candidate's share has changed."""
        self._count(trial)
        self.began_ns = now_ns()
        self._counts = deque([self._counts[-1]])

    def alarms(self, trial: Steered) -> list[Alarm]:
        """Return what happened to the candidate while it served, in order."""
        self._count(trial)
        at_ns, finished, failed = self._counts[-1]
        first_ns, finished_before, failed_before = self._counts[0]
        under_way = [compile.so_far(now_ns()) for compile in trial.collector.compiling]
        found = compile_alarms(
            self.name,
            [*trial.collector.served_compiles, *under_way],
            stall_limit_s=self._limits.stall_limit_s,
            max_recompiles=self._gates.max_recompiles,
        )
        found += death_alarms(self.name, trial.context.facts.deaths, now_ns=now_ns())
        found += burst_alarms(
            self.name,
            failed=failed - failed_before,
            finished=finished - finished_before,
            now_ns=now_ns(),
            meanwhile=f"in the last {(at_ns - first_ns) / 1e9:.0f} s",
        )
        return sorted(found)

    def standing(self, look: Mapping[str, Any], *, step: int = 0) -> Standing:
        """Return where the candidate stands by an interim analysis."""
        outlook, seen = look["arms"][self.name], look.get("step") or {}
        return Standing(
            step=step,
            step_s=(now_ns() - self.began_ns) / 1e9,
            failed=outlook["reason"] if outlook["decision"] == FAIL else seen.get("failed"),
            safe=bool(seen.get("safe")),
            passed=outlook["decision"] == PASS,
            requests=int(seen.get("requests") or 0),
            uneven=seen.get("uneven"),
        )

    def _count(self, trial: Steered) -> None:
        """Note how many requests have ended, once a second, and forget what is older than the window."""
        at_ns = now_ns()
        load = trial.context.status.load.arms.get(self.name)
        known = (load.finished, load.failed) if load is not None else self._counts[-1][1:] if self._counts else (0, 0)
        count = (at_ns, *known)
        if len(self._counts) > 1 and at_ns - self._counts[-2][0] < _COUNT_NS:
            self._counts[-1] = count
        else:
            self._counts.append(count)
        while self._counts[0][0] < at_ns - _WINDOW_NS:
            self._counts.popleft()
