"""A Kubernetes API server that holds one route, over real HTTP or TLS: tokens, roles, merge patches, conflicts.

It follows the real one in what matters to a client: a resourceVersion in a patch that is not the newest is a conflict
(409), and each change counts the generation up.
"""

from __future__ import annotations

import copy
import http.client
import json
import re
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tests.fakes.credentials import Certificates
from tests.fakes.http_servers import HttpPeer, Request, plain

PREFIX = "/apis/gateway.networking.k8s.io/v1/namespaces/"
Change = Callable[[dict[str, Any]], None]


class FakeCluster:
    """`rules` are those of a Role, None allows all. `token` is the one that is let in, "" for none.

    `interfere` runs before each patch, as somebody else's change; `admit` changes what a patch asked for; `refusal` is
    the message with which every patch is refused.
    """

    def __init__(
        self,
        route: Mapping[str, Any],
        *,
        namespace: str = "models",
        token: str = "",
        rules: list[dict[str, Any]] | None = None,
    ) -> None:
        self.namespace = namespace
        self.token = token
        self.rules = rules
        self.interfere: Change | None = None
        self.admit: Change | None = None
        self.refusal = ""
        self.requests: list[tuple[str, int]] = []
        self.route = copy.deepcopy(dict(route))
        self.route["metadata"] |= {"namespace": namespace, "resourceVersion": "100", "generation": 1}

    def change(self, change: Change) -> None:
        change(self.route)
        self._count_up()

    def accept(self) -> None:
        """Record that the gateway's controller has taken the route as it is now."""
        generation = self.route["metadata"]["generation"]
        condition = {"type": "Accepted", "status": "True", "observedGeneration": generation}
        self.route["status"] = {"parents": [{"controllerName": "fake/gateway", "conditions": [condition]}]}

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> tuple[int, dict[str, Any]]:
        status, document = self._answer(method, path, headers, body)
        self.requests.append((method, status))
        return status, document

    def _answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> tuple[int, dict[str, Any]]:
        if self.token and headers.get("authorization", "").lower() != f"bearer {self.token}":
            return _status(401, "Unauthorized")
        namespace, _, rest = path.removeprefix(PREFIX).partition("/")
        kind, _, name = rest.partition("/")
        if not (self.rules is None or any(_allows(rule, method.lower(), kind, name) for rule in self.rules)):
            return _status(403, f'{kind} "{name}" is forbidden: cannot {method.lower()}\nresource "{kind}"')
        known = (self.namespace, f"{self.route.get('kind', 'GRPCRoute').lower()}s", self.route["metadata"]["name"])
        if (namespace, kind, name) != known:
            return _status(404, f'{kind}.gateway.networking.k8s.io "{name}" not found')
        if method == "GET":
            return 200, self.route
        if headers.get("content-type") != "application/merge-patch+json":
            return _status(415, "the body of the request was in an unknown format")
        if self.interfere is not None:
            self.interfere(self.route)
        if self.refusal:
            return _status(422, self.refusal)
        patched, patch = copy.deepcopy(self.route), json.loads(body)
        for part in ("metadata", "spec"):
            patched[part] |= patch[part]
        if patched["metadata"]["resourceVersion"] != self.route["metadata"]["resourceVersion"]:
            return _status(409, "the object has been modified; please apply your changes to the latest version")
        if self.admit is not None:
            self.admit(patched)
        self.route = patched
        self._count_up()
        return 200, self.route

    def _count_up(self) -> None:
        metadata = self.route["metadata"]
        metadata["resourceVersion"] = str(int(metadata["resourceVersion"]) + 7)
        metadata["generation"] += 1


@contextmanager
def served(cluster: FakeCluster, certificates: Certificates | None = None) -> Iterator[int]:
    """Serve the cluster's API until the block ends, over TLS where there are certificates; yield the port."""
    context = None
    if certificates is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificates.certificate, certificates.key)

    def script(request: Request) -> None:
        method, path, _ = request.line.split()
        status, document = cluster.answer(method, path, request.headers, request.body)
        request.send(plain(f"{status} Fake", json.dumps(document).encode()))

    with HttpPeer(script, context) as peer:
        yield peer.port


def _allows(rule: Mapping[str, Any], verb: str, kind: str, name: str) -> bool:
    group = "gateway.networking.k8s.io" in rule["apiGroups"]
    return verb in rule["verbs"] and kind in rule["resources"] and group and name in rule.get("resourceNames", [name])


def _status(code: int, message: str) -> tuple[int, dict[str, Any]]:
    return code, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}


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
