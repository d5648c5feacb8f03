"""The resources of Argo Rollouts and Flagger in deploy/: each field that decides what is promoted.

Their schemas are in no Python package and are not copied here: docs/providers.md says against which they were held."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
import yaml

from loadtests.provider.flagger import GOAL_OF
from loadtests.provider.question import KEYS, Question
from loadtests.provider.server import FLAGGER, JUDGEMENT

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def documents(*patterns: str) -> list[dict[str, Any]]:
    return [
        document
        for pattern in patterns
        for path in sorted(DEPLOY.glob(pattern))
        for document in yaml.safe_load_all(path.read_text())
    ]


ALL = documents("argo/*.yaml", "flagger/*.yaml")
(CANARY,) = (item for item in ALL if item["kind"] == "Canary")
(ROLLOUT,) = (item for item in ALL if item["kind"] == "Rollout")
TEMPLATES = {item["metadata"]["name"]: item for item in ALL if item["kind"] == "AnalysisTemplate"}
(SERVICE,) = (item for item in documents("kubernetes/provider/*.yaml") if item["kind"] == "Service")
HOOKS = {hook["type"]: hook for hook in CANARY["spec"]["analysis"]["webhooks"]}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_asks_the_service_what_the_provider_understands(name: str) -> None:
    spec = TEMPLATES[name]["spec"]
    (metric,) = spec["metrics"]
    web = metric["provider"]["web"]
    defaults = {arg["name"]: arg.get("value", "") for arg in spec["args"]}
    url = web["url"]
    for arg, value in defaults.items():
        url = url.replace(f"{{{{args.{arg}}}}}", value)
    address = urlsplit(url)
    assert address.netloc == f"{SERVICE['metadata']['name']}:{SERVICE['spec']['ports'][0]['port']}"
    assert address.path == JUDGEMENT
    given = dict(parse_qsl(address.query))
    assert set(given) <= set(KEYS)
    assert Question.of(given).goal == "step"
    assert web["jsonPath"] == "{$.verdict}"
    assert web["headers"] == [{"key": "Authorization", "value": "Bearer {{args.token}}"}]
    secret = next(arg["valueFrom"]["secretKeyRef"] for arg in spec["args"] if arg["name"] == "token")
    assert secret == {"name": "tailgate-provider", "key": "token"}
    assert metric["failureCondition"] == 'result == "FAIL"'
    assert metric["failureLimit"] == 0


def test_a_step_that_saw_no_pass_is_never_successful() -> None:
    (metric,) = TEMPLATES["tailgate-wait"]["spec"]["metrics"]
    assert metric["successCondition"] == 'result == "PASS"'
    assert metric["inconclusiveLimit"] < metric["count"]
    assert metric["consecutiveSuccessLimit"] == 1


def test_what_is_open_neither_ends_nor_pauses_the_background_analysis() -> None:
    (metric,) = TEMPLATES["tailgate-harm"]["spec"]["metrics"]
    assert not {"successCondition", "count", "consecutiveSuccessLimit"} & set(metric)


def test_every_weight_of_the_rollout_waits_for_the_judge() -> None:
    canary = ROLLOUT["spec"]["strategy"]["canary"]
    steps = canary["steps"]
    assert [item["templateName"] for item in canary["analysis"]["templates"]] == ["tailgate-harm"]
    asked = []
    for weight, step in zip(steps[::2], steps[1::2], strict=True):
        assert set(weight) == {"setWeight"}
        assert step["analysis"]["templates"] == [{"templateName": "tailgate-wait"}]
        asked.append({arg["name"]: arg["value"] for arg in step["analysis"]["args"]}["for"])
    assert asked == ["step"] * (len(asked) - 1) + ["promotion"]
    assert [step["setWeight"] for step in steps[::2]] == [1, 5, 25, 50]
    services = {item["metadata"]["name"] for item in ALL if item["kind"] == "Service"}
    assert services == {canary["stableService"], canary["canaryService"]}
    (route,) = (item for item in ALL if item["kind"] == "GRPCRoute")
    assert {item["name"] for item in route["spec"]["rules"][0]["backendRefs"]} == services
    assert canary["trafficRouting"]["plugins"]["argoproj-labs/gatewayAPI"]["grpcRoute"] == route["metadata"]["name"]


def test_the_canary_asks_by_every_hook_that_belongs_together() -> None:
    assert set(HOOKS) == {"confirm-rollout", "rollout", "confirm-traffic-increase", "confirm-promotion", "rollback"}
    for kind, hook in HOOKS.items():
        address = urlsplit(hook["url"])
        assert address.netloc == f"{SERVICE['metadata']['name']}:{SERVICE['spec']['ports'][0]['port']}"
        assert address.path == f"{FLAGGER}/{kind}"
        assert kind in GOAL_OF
        assert set(hook["metadata"]) <= {"token", *KEYS}
    analysis = CANARY["spec"]["analysis"]
    # Timeouts of the hooks of an interval together end within it, as Flagger asks.
    assert sum(int(HOOKS[kind]["timeout"].removesuffix("s")) for kind in ("rollout",)) < 10
    assert (analysis["interval"], analysis["maxWeight"], analysis["stepWeights"][-1]) == ("10s", 50, 50)
