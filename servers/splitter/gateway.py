"""Weights of a gateway's route in a cluster, read and changed through the API server's plain REST interface."""

from __future__ import annotations

import http.client
import json
import os
import re
import ssl
import urllib.parse
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from servers.address import host_port, joined
from servers.fields import ConfigError
from servers.splitter.admin import SplitterError
from servers.splitter.kubernetes import arm_weights, route_weights, weights_patch

# Where Kubernetes puts what a pod needs to be known to the API server.
SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TRIES: Final = 5  # of a change that somebody else's changes of the same route come before


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiServer:
    """A cluster's API server. `ca` and `token` are files; without them it is reached as `kubectl proxy` serves it.

    The token's file is read at each request: Kubernetes puts a new one there every hour.
    """

    host: str
    port: int
    ca: str = ""
    token: str = ""

    def __post_init__(self) -> None:
        if self.token and not self.ca:
            raise ConfigError(f"the token {self.token} would go out in the clear: name the cluster's authority too")

    @property
    def address(self) -> str:
        """Where it listens, "host:port"."""
        return joined(self.host, self.port)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteState:
    """A route as it was read: the weight of each arm, and whether its gateways follow what it says.

    `in_force` is true once every gateway that tells has accepted this very generation; False also where none tells.
    """

    resource_version: str
    weights: Mapping[str, int]
    in_force: bool


def in_cluster(
    environment: Mapping[str, str] = os.environ, service_account: Path = SERVICE_ACCOUNT
) -> tuple[ApiServer, str]:
    """The API server that a pod finds, and the pod's own namespace. Raises ConfigError outside of a cluster."""
    host = environment.get("KUBERNETES_SERVICE_HOST", "")
    port = environment.get("KUBERNETES_SERVICE_PORT_HTTPS") or environment.get("KUBERNETES_SERVICE_PORT") or "443"
    if not host:
        raise ConfigError("KUBERNETES_SERVICE_HOST is not set: run in a pod, or give the address of a `kubectl proxy`")
    files = {name: service_account / name for name in ("ca.crt", "token", "namespace")}
    for path in files.values():
        if not path.is_file():
            raise ConfigError(
                f"{path} is missing: give the pod a service account, and leave automountServiceAccountToken on"
            )
    wrong = f'KUBERNETES_SERVICE_HOST "{host}" and port "{port}" are no address: leave both as Kubernetes sets them'
    host, number = host_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", wrong)
    api = ApiServer(host=host, port=number, ca=str(files["ca.crt"]), token=str(files["token"]))
    return api, files["namespace"].read_text().strip()


class _ConflictError(SplitterError):
    """Somebody else may have changed the route since it was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """The `route` that splits the traffic among `arms`, by its `kind` (GRPCRoute or HTTPRoute). The role in
    deploy/kubernetes/ramp allows it all for a GRPCRoute."""

    api: ApiServer
    namespace: str
    route: str
    arms: Collection[str]
    kind: str = "GRPCRoute"

    def state(self) -> RouteState:
        """The route as it is now. Raises SplitterError when the API server does not give it, ConfigError when it does
        not split among the arms."""
        return self._state(self._get())

    def reweight(self, weights: Mapping[str, int]) -> RouteState:
        """The route has these weights, and its state after that; arms that are not named keep theirs.

        Changes of others to the same route are kept: the weights are set anew on top of them. Raises ConfigError as
        `weights_patch` does, and SplitterError when somebody else changes the weights too, when the cluster does not
        keep them, or when the API server does not answer or refuses.
        """
        route = self._get()
        before = route_weights(route)
        for _ in range(_TRIES):
            try:
                return self._kept(weights, self._ask("PATCH", weights_patch(route, weights)))
            except _ConflictError:
                stale, route = route, self._get()
                if _version(route) == _version(stale):
                    raise
            if (now := route_weights(route)) != before:
                raise SplitterError(
                    f"somebody else changed the weights of {self._name} from {_shares(before)} to {_shares(now)}: "
                    "let one of the two set them"
                )
        raise SplitterError(f"{self._name} was changed by others {_TRIES} times in a row: see who writes to it")

    @property
    def _name(self) -> str:
        return f'{self.kind} "{self.route}" of namespace "{self.namespace}"'

    def _kept(self, weights: Mapping[str, int], route: Mapping[str, Any]) -> RouteState:
        kept = arm_weights(route, weights)
        if kept != dict(weights):
            raise SplitterError(
                f"{self._name} has {_shares(kept)} after {_shares(weights)} was set: something in the cluster changes "
                "it back, such as an admission webhook"
            )
        return self._state(route)

    def _state(self, route: Mapping[str, Any]) -> RouteState:
        return RouteState(
            resource_version=_version(route),
            weights=arm_weights(route, self.arms),
            in_force=_in_force(route),
        )

    def _get(self) -> Mapping[str, Any]:
        return self._ask("GET")

    def _ask(self, method: str, patch: list[dict[str, Any]] | None = None) -> Mapping[str, Any]:
        """The route that the API server answers with. Raises SplitterError."""
        namespace, route = (urllib.parse.quote(part, safe="") for part in (self.namespace, self.route))
        path = f"/apis/gateway.networking.k8s.io/v1/namespaces/{namespace}/{self.kind.lower()}s/{route}"
        try:
            status, body = _exchange(self.api, method, path, patch)
        except (OSError, http.client.HTTPException) as error:
            raise SplitterError(
                f"the API server at {self.api.address} does not answer ({error}): is it up, and is its authority right?"
            ) from None
        if status == 200:
            try:
                document = json.loads(body)
                if document["metadata"]["resourceVersion"] and document["spec"] is not None:
                    return dict(document)
            except (ValueError, KeyError, TypeError):
                pass
            raise SplitterError(f"{self.api.address} answered no {self.kind}: is it a Kubernetes API?")
        remedies = {
            401: "is the service account's token still good?",
            403: f"let the service account {method.lower()} it, as deploy/kubernetes/ramp/rbac.yaml does",
            404: "does it have that name there, and does the cluster have the Gateway API?",
        }
        remedy = remedies.get(status, "see the API server's message")
        # The patch is tried on the route as it is now, before versions are compared: where rules are gone, it is 422.
        kind = _ConflictError if method == "PATCH" and status in (409, 422) else SplitterError
        raise kind(f"{self.api.address} answered {status} to {method} of {self._name} ({_message(body)}): {remedy}")


def _exchange(api: ApiServer, method: str, path: str, patch: list[dict[str, Any]] | None) -> tuple[int, bytes]:
    """(HTTP status, body)."""
    headers = {"Accept": "application/json"}
    body = None
    if patch is not None:
        headers["Content-Type"] = "application/json-patch+json"
        body = json.dumps(patch)
    # http.client, not urllib: a proxy from the environment must not see the token.
    connection: http.client.HTTPConnection
    if api.ca:
        context = ssl.create_default_context(cafile=api.ca)
        connection = http.client.HTTPSConnection(api.host, api.port, timeout=10.0, context=context)
    else:
        connection = http.client.HTTPConnection(api.host, api.port, timeout=10.0)
    if api.token:
        headers["Authorization"] = f"Bearer {_token(api)}"
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def _token(api: ApiServer) -> str:
    token = Path(api.token).read_text().strip()
    if not re.fullmatch("[!-~]+", token):
        # http.client would refuse it too, and show it.
        raise SplitterError(f"{api.token} holds no token of one line: is it the file of the service account?")
    return token


def _version(route: Mapping[str, Any]) -> str:
    return str(route["metadata"]["resourceVersion"])


def _in_force(route: Mapping[str, Any]) -> bool:
    generation = route["metadata"].get("generation", 0)
    verdicts = [
        condition.get("status") == "True" and condition.get("observedGeneration", 0) >= generation
        for parent in route.get("status", {}).get("parents", [])
        for condition in parent.get("conditions", [])
        if condition.get("type") == "Accepted"
    ]
    return bool(verdicts) and all(verdicts)


def _message(body: bytes) -> str:
    try:
        text = json.loads(body)["message"]
    except (ValueError, KeyError, TypeError):
        text = body.decode(errors="replace")
    return " ".join(str(text).split())[:200] or "no message"


def _shares(weights: Mapping[str, int]) -> str:
    return " ".join(f"{name}={weight}" for name, weight in weights.items())
