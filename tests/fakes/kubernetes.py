"""A Kubernetes API server that holds one route, over real HTTP or TLS: tokens, roles, merge patches, conflicts.

It follows the real one in what matters to a client: a resourceVersion in a patch that is not the newest is a conflict
(409), and each change counts the generation up.
"""

from __future__ import annotations

import copy
import http.client
import json
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from tailgate.servers.metadata import ARM_HEADER
from tailgate.servers.splitter.kubernetes import service_name
from tests.fakes.credentials import Certificates
from tests.fakes.http_servers import HttpPeer, Request, plain


def route_of(weights: Mapping[str, int]) -> dict[str, Any]:
    """A route that pins the arms and splits over them by weight, as deploy/kubernetes/gateway.yaml has it."""
    backends = [{"name": service_name(arm), "port": 50051} for arm in weights]
    shares = [{**backend, "weight": weight} for backend, weight in zip(backends, weights.values(), strict=True)]
    pins = [
        {"matches": [{"headers": [{"type": "Exact", "name": ARM_HEADER, "value": arm}]}], "backendRefs": [backend]}
        for arm, backend in zip(weights, backends, strict=True)
    ]
    return {"kind": "GRPCRoute", "metadata": {"name": "tailgate"}, "spec": {"rules": [*pins, {"backendRefs": shares}]}}


PREFIX = "/apis/gateway.networking.k8s.io/v1/namespaces/"
Change = Callable[[dict[str, Any]], None]


class FakeCluster:
    """`rules` are those of a Role, None allows all. `token` is the one that is let in, "" for none.

    `interfere` runs before each patch, as another client's change; `admit` changes what a patch asked for; `refusal` is
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
