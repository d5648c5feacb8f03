"""Argo Rollouts and Flagger as far as they ask a provider: the requests that they send, and what they make of answers.

Written after argo-rollouts 1.9 (metricproviders/webmetric, utils/evaluate, analysis) and Flagger 1.44 (pkg/controller:
webhook, scheduler, scheduler_hooks). Neither runs here; time passes by calls.
"""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


def asked(
    port: int, method: str, path: str, *, body: str | None = None, headers: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Return the status and the body that the provider on this machine answers."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request(method, path, body=body, headers=dict(headers or {}))
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def _place(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.path}?{parts.query}" if parts.query else parts.path


@dataclass
class AnalysisRun:
    """One metric of an AnalysisTemplate, measured once a `measure` until `phase` is no longer Running."""

    template: Mapping[str, Any]
    port: int
    args: Mapping[str, str]
    phase: str = "Running"
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("Successful", "Failed", "Inconclusive"), 0))
    errors_in_a_row: int = 0
    successes_in_a_row: int = 0

    def __post_init__(self) -> None:
        spec = self.template["spec"]
        given = {arg["name"]: arg.get("value", "") for arg in spec["args"]} | dict(self.args)
        values = re.compile(r"\{\{\s*args\.([\w-]+)\s*\}\}")
        self.metric = json.loads(values.sub(lambda match: given[match[1]], json.dumps(spec["metrics"][0])))

    def measure(self) -> str:
        found = self._measurement()
        self.errors_in_a_row = self.errors_in_a_row + 1 if found == "Error" else 0
        if found != "Error":
            self.counts[found] += 1
            self.successes_in_a_row = self.successes_in_a_row + 1 if found == "Successful" else 0
        self.phase = self._assessed()
        return self.phase

    def terminate(self) -> str:
        """Return the phase of a background analysis that the end of its rollout stops."""
        if self.phase == "Running":
            self.phase = "Successful"
        return self.phase

    def _measurement(self) -> str:
        web = self.metric["provider"]["web"]
        headers = {header["key"]: header["value"] for header in web.get("headers", ())}
        try:
            status, body = asked(self.port, "GET", _place(web["url"]), headers=headers)
            if not 200 <= status < 300:
                return "Error"
        except OSError:
            return "Error"
        assert web["jsonPath"] == "{$.verdict}"
        result = json.loads(body)["verdict"]
        succeeded, failed = (_holds(self.metric.get(f"{name}Condition"), result) for name in ("success", "failure"))
        if failed is None and succeeded is not None:
            failed = not succeeded
        if succeeded is None and failed is not None:
            succeeded = not failed
        return "Failed" if failed else "Successful" if succeeded or failed is None else "Inconclusive"

    def _assessed(self) -> str:
        limit = self.metric.get
        if self.counts["Failed"] > limit("failureLimit", 0):
            return "Failed"
        if self.counts["Inconclusive"] > limit("inconclusiveLimit", 0):
            return "Inconclusive"
        if self.errors_in_a_row > limit("consecutiveErrorLimit", 4):
            return "Error"
        wanted = limit("consecutiveSuccessLimit", 0)
        if wanted and self.successes_in_a_row >= wanted:
            return "Successful"
        count = limit("count", 0 if "interval" in self.metric else 1)
        if count and sum(self.counts.values()) >= count:
            return "Inconclusive" if wanted else "Successful"
        return "Running"


def _holds(condition: str | None, result: str) -> bool | None:
    if condition is None:
        return None
    match = re.fullmatch(r'result == "(\w+)"', condition)
    assert match is not None, condition
    return result == match[1]


@dataclass
class Flagger:
    """A Canary that one call of `tick` takes through one interval of its analysis."""

    canary: Mapping[str, Any]
    port: int
    phase: str = "Initialized"
    weight: int = 0
    failed_checks: int = 0
    events: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.analysis = self.canary["spec"]["analysis"]

    def tick(self) -> str:
        """Return the phase after one interval."""
        self.phase = self._next()
        if self.phase == "Failed":
            self.weight = 0
        return self.phase

    def _next(self) -> str:
        if self.phase in ("Initialized", "Waiting"):
            return "Progressing" if self._passes("confirm-rollout", self.phase) else "Waiting"
        if self.phase not in ("Progressing", "WaitingPromotion"):
            return self.phase
        rollbacks = [hook for hook in self.analysis["webhooks"] if hook.get("type") == "rollback"]
        if any(self._called(hook, self.phase) for hook in rollbacks):
            return "Failed"
        if self.failed_checks >= self.analysis["threshold"]:
            return "Failed"
        if not self._passes("rollout" if self.weight else "pre-rollout", "Progressing"):
            self.failed_checks += 1
            return self.phase
        if self.phase != "WaitingPromotion" and not self._passes("confirm-traffic-increase", "Progressing"):
            return self.phase
        if self.weight < self.analysis["maxWeight"]:
            self.weight = next(weight for weight in self.analysis["stepWeights"] if weight > self.weight)
            return self.phase
        return "Promoting" if self._passes("confirm-promotion", "WaitingPromotion") else "WaitingPromotion"

    def _passes(self, kind: str, phase: str) -> bool:
        return all(self._called(hook, phase) for hook in self.analysis["webhooks"] if hook.get("type") == kind)

    def _called(self, hook: Mapping[str, Any], phase: str) -> bool:
        name = self.canary["metadata"]["name"]
        payload = {"name": name, "namespace": "default", "phase": phase, "checksum": "85d557f47b"}
        body = json.dumps({**payload, "metadata": hook["metadata"]})
        try:
            headers = {"Content-Type": "application/json"}
            status, said = asked(self.port, "POST", _place(hook["url"]), body=body, headers=headers)
        except OSError as error:
            status, said = 599, str(error)
        if status > 202:
            self.events.append(said)
        return status <= 202
