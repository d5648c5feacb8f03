"""The weights of a route of a Kubernetes gateway, by the official client."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

from tailgate.servers.complaint import ConfigError
from tailgate.servers.splitter.admin import Shares, SplitterError
from tailgate.servers.splitter.envoy_config import check_weight

GROUP: Final = "gateway.networking.k8s.io"
_TIMEOUT_S: Final = 10.0
# No alarm of a ramp is seen while a route is waited for, and its rollback is to take 2 s at most.
_IN_FORCE_S, _ASK_S = 1.0, 0.2


def service_name(arm: str) -> str:
    """Return the Service of an arm: "tailgate-" and the name in lower case, with "-" for what DNS does not take."""
    return "tailgate-" + re.sub(r"[^a-z0-9-]", "-", arm.lower()).strip("-")


def weights_patch(route: Mapping[str, Any], weights: Mapping[str, int]) -> dict[str, Any]:
    """Return the merge patch (RFC 7386) that gives the arms of a route these weights, and changes nothing else.

    An arm is the Service `service_name(arm)`, or the one of that very name. It holds the version of `route`: the API
    server refuses it once another program has changed the route. Raises ConfigError for weights that cannot be.
    """
    services = _services(route, weights)
    for arm, weight in weights.items():
        check_weight(arm, weight)
    rules = copy.deepcopy(route["spec"]["rules"])
    for rule in filter(_is_weighted, rules):
        for backend in rule["backendRefs"]:
            if backend["name"] in services:
                backend["weight"] = weights[services[backend["name"]]]
        if not any(backend.get("weight", 1) for backend in rule["backendRefs"]):
            raise ConfigError("every arm would have weight 0: give at least one arm a weight of 1 or more")
    return {"metadata": {"resourceVersion": route["metadata"]["resourceVersion"]}, "spec": {"rules": rules}}


def route_weights(route: Mapping[str, Any]) -> dict[str, int]:
    """Return the weight of each Service that a route splits over.

    Raises ConfigError where it splits nothing, or where two of its rules give a Service different weights.
    """
    name_of_route = f'{route.get("kind", "GRPCRoute")} "{route["metadata"]["name"]}"'
    weights: dict[str, int] = {}
    for rule in filter(_is_weighted, route["spec"].get("rules", [])):
        for backend in rule["backendRefs"]:
            name, weight = backend["name"], backend.get("weight", 1)
            if weights.setdefault(name, weight) != weight:
                raise ConfigError(
                    f"{name_of_route} gives {name} weight {weights[name]} in one rule and {weight} in another: "
                    "make them equal"
                )
    if not weights:
        raise ConfigError(f"{name_of_route} has no rule with several backends: give it one rule with every arm")
    return weights


def _services(route: Mapping[str, Any], arms: Iterable[str]) -> dict[str, str]:
    present, found = route_weights(route), {}
    for arm in arms:
        service = next((name for name in (service_name(arm), arm) if name in present), None)
        if service is None:
            raise ConfigError(
                f'arm "{arm}" has no Service {service_name(arm)} among the weighted backends of the route '
                f'"{route["metadata"]["name"]}": use one of {", ".join(present)}'
            )
        found[service] = arm
    return found


def _is_weighted(rule: Mapping[str, Any]) -> bool:
    return len(rule.get("backendRefs", [])) > 1


class Gateway:
    """The route (GRPCRoute or HTTPRoute, by `kind`) of a cluster that splits the traffic among `arms`.

    `proxy` is the address of a `kubectl proxy`; without it the API server is the one that a pod finds. Methods raise
    SplitterError where it does not answer or refuses, and ConfigError where the route does not split among the arms.
    """

    def __init__(
        self, *, namespace: str, route: str, arms: Collection[str], kind: str = "GRPCRoute", proxy: str = ""
    ) -> None:
        try:
            from kubernetes import client, config
        except ImportError:
            raise ConfigError(
                "a route is moved with the Kubernetes client: pip install 'tailgate[kubernetes]'"
            ) from None
        settings = client.Configuration()
        if proxy:
            settings.host = f"http://{proxy}"
        else:
            try:
                config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
            except config.ConfigException as error:
                raise ConfigError(
                    f"{error} Run in a pod that has the token of a service account, or give the address of a "
                    "`kubectl proxy`"
                ) from None
        settings.retries = False
        self._api = client.CustomObjectsApi(client.ApiClient(settings))
        self._address, self._arms = settings.host, arms
        self._place = {"group": GROUP, "version": "v1", "namespace": namespace, "name": route}
        self._place["plural"] = f"{kind.lower()}s"

    def shares(self) -> Shares:
        """Return the weight of each arm in the route."""
        route = self._read()
        present = route_weights(route)
        return Shares(weights={arm: present[name] for name, arm in _services(route, self._arms).items()}, shadows={})

    def reweight(self, weights: Mapping[str, int]) -> None:
        """Give the route these weights; arms that are not named keep theirs. Return once every gateway says that it
        follows, or after 1 s: not every gateway says so.

        A route that another program changes at the same time is left as it is, with SplitterError: ask again.
        """
        patch = weights_patch(self._read(), weights)
        route = self._call(
            self._api.patch_namespaced_custom_object, body=patch, _content_type="application/merge-patch+json"
        )
        deadline = time.monotonic() + _IN_FORCE_S
        while not _in_force(route) and time.monotonic() < deadline:
            time.sleep(_ASK_S)
            route = self._read()

    def _read(self) -> Mapping[str, Any]:
        return self._call(self._api.get_namespaced_custom_object)

    def _call(self, method: Callable[..., Any], **arguments: Any) -> Mapping[str, Any]:
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        try:
            route = method(**self._place, _request_timeout=_TIMEOUT_S, **arguments)
        except ApiException as error:
            reason = " ".join(str(error.body or error.reason).split())[:300]
            raise SplitterError(
                f'{self._address} answered {error.status} for {self._place["plural"]} "{self._place["name"]}" of '
                f'namespace "{self._place["namespace"]}" ({reason}): see the role in deploy/kubernetes/ramp/rbac.yaml, '
                "and whether the cluster has the Gateway API"
            ) from None
        except (HTTPError, OSError) as error:
            raise SplitterError(f"the API server at {self._address} does not answer ({error}): is it up?") from None
        if not isinstance(route, dict) or "spec" not in route or "resourceVersion" not in route.get("metadata", {}):
            raise SplitterError(f"{self._address} answered no route: is it a Kubernetes API?")
        return route


def _in_force(route: Mapping[str, Any]) -> bool:
    """Return whether every gateway has accepted this generation of the route; False where none reports."""
    generation = route["metadata"].get("generation", 0)
    accepted = [
        condition.get("status") == "True" and condition.get("observedGeneration", 0) >= generation
        for parent in route.get("status", {}).get("parents", [])
        for condition in parent.get("conditions", [])
        if condition.get("type") == "Accepted"
    ]
    return bool(accepted) and all(accepted)
