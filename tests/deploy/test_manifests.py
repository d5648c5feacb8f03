"""Kubernetes manifests in deploy/, and resources of Argo Rollouts and Flagger, which have no published schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import kubernetes_validate
import pytest
import yaml

from tailgate.analysis.summary.summary import EXIT_CODES
from tailgate.loadtests.experiments.reading import from_table, load, load_table
from tailgate.loadtests.experiments.users import production_table
from tailgate.loadtests.provider import TOKEN_VARIABLE
from tailgate.loadtests.provider.answers import HOOKS
from tailgate.loadtests.provider.server import FLAGGER, HEALTH, JUDGEMENT
from tailgate.loadtests.trials.ramp import ramped
from tailgate.servers.config import EngineConfig
from tailgate.servers.metadata import INFERENCE_SERVICE
from tests.fakes.command_line import parsed

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
FOLDER = DEPLOY / "kubernetes"
DOCUMENTS: list[tuple[str, dict[str, Any]]] = [
    (f"{path.relative_to(FOLDER)}: {document['kind']} {document['metadata']['name']}", document)
    for path in sorted(FOLDER.rglob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
]
CONTROLLERS = [
    document
    for path in sorted((*DEPLOY.glob("argo/*.yaml"), *DEPLOY.glob("flagger/*.yaml")))
    for document in yaml.safe_load_all(path.read_text())
]
# Of the Gateway API, Argo Rollouts and Flagger, whose schemas are not Kubernetes' own.
OTHERS = {"Gateway", "GRPCRoute", "AnalysisTemplate", "Rollout", "Canary"}
OWN = [item for item in (*(item for _, item in DOCUMENTS), *CONTROLLERS) if item["kind"] not in OTHERS]
JOBS = {item["metadata"]["name"]: item for item in OWN if item["kind"] == "Job"}


@pytest.mark.parametrize("version", ["1.31", "1.34"])  # podFailurePolicy is part of the first
@pytest.mark.parametrize("document", OWN, ids=lambda item: f"{item['kind']} {item['metadata']['name']}")
def test_a_manifest_is_valid(document: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


def by_kind(prefix: str) -> dict[str, Any]:
    return {item["kind"]: item for name, item in DOCUMENTS if name.startswith(prefix)}


# Pods of every manifest, also of a Rollout, by name.
PODS = {
    f"{item['kind']} {item['metadata']['name']}": item["spec"]["template"]["spec"]
    for item in (*(item for _, item in DOCUMENTS), *CONTROLLERS)
    if "template" in item.get("spec", {})
}
SERVERS = [
    name
    for name, pod in PODS.items()
    if {"serve", "tailgate.servers.front.serve"} & {*pod["containers"][0]["command"], *pod["containers"][0]["args"]}
]


@pytest.mark.parametrize("name", PODS)
def test_a_pod_is_restricted_and_mounts_a_token_to_read_a_route_alone(name: str) -> None:
    pod = PODS[name]
    assert pod["automountServiceAccountToken"] is (name == "Job tailgate-provider")
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"]:
        own = container["securityContext"]
        assert (own["allowPrivilegeEscalation"], own["capabilities"]) == (False, {"drop": ["ALL"]})
    assert {key for volume in pod.get("volumes", ()) for key in volume} <= {
        "name",
        *("configMap", "secret", "emptyDir", "persistentVolumeClaim"),
    }


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_has_time_for_its_streams_before_it_is_removed(name: str) -> None:
    pod = PODS[name]
    (container,) = pod["containers"]
    waits_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert waits_s >= 5
    assert pod["terminationGracePeriodSeconds"] >= waits_s + EngineConfig().drain_grace_s + 5
    assert container["readinessProbe"]["grpc"]["service"] == INFERENCE_SERVICE
    assert container["resources"]["requests"] == container["resources"]["limits"]


def test_the_ramp_may_only_read_and_patch_the_deployed_route() -> None:
    known = by_kind("ramp/")
    (route,) = (item for _, item in DOCUMENTS if item["kind"] == "GRPCRoute")
    account = known["ServiceAccount"]["metadata"]["name"]
    assert JOBS["tailgate-ramp"]["spec"]["template"]["spec"]["serviceAccountName"] == account
    assert known["Role"]["rules"] == [
        {
            "apiGroups": [route["apiVersion"].partition("/")[0]],
            "resources": ["grpcroutes"],
            "resourceNames": [route["metadata"]["name"]],
            "verbs": ["get", "patch"],
        }
    ]
    assert known["RoleBinding"]["subjects"] == [{"kind": "ServiceAccount", "name": account}]
    assert known["RoleBinding"]["roleRef"]["name"] == known["Role"]["metadata"]["name"]


@pytest.mark.parametrize(
    ("folder", "command", "arms"),
    [("judge/", "run", ["current", "candidate"]), ("ramp/job", "ramp", ["eager", "compiled-bucketed"])],
)
def test_a_job_has_a_valid_experiment_and_volumes(folder: str, command: str, arms: list[str], tmp_path: Path) -> None:
    known = by_kind(folder)
    pod = known["Job"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    started, file, *flags = container["args"]
    options = parsed(command, file, *flags)
    mounts = {item["mountPath"]: item["name"] for item in container["volumeMounts"]}
    place, _, name = file.rpartition("/")
    assert (started, mounts[place], mounts[options["out"]]) == (command, "experiment", "runs")
    volumes = {item["name"]: item for item in pod["volumes"]}
    assert volumes["experiment"]["configMap"]["name"] == known["ConfigMap"]["metadata"]["name"]
    assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == known["PersistentVolumeClaim"]["metadata"]["name"]
    (tmp_path / name).write_text(known["ConfigMap"]["data"][name])
    experiment = load(str(tmp_path / name))
    if command == "ramp":
        experiment = ramped(experiment)
        # time to start the arms and to judge
        assert known["Job"]["spec"]["activeDeadlineSeconds"] >= experiment.traffic.duration_s + 1800
    assert [arm.name for arm in experiment.external_arms or experiment.arms] == arms


def test_the_provider_reads_the_route_that_a_controller_moves_and_needs_a_token(tmp_path: Path) -> None:
    known = by_kind("provider/")
    template = known["Job"]["spec"]["template"]
    (container,) = template["spec"]["containers"]
    command, file, *arguments = container["args"]
    name = file.rpartition("/")[2]
    (tmp_path / name).write_text(known["ConfigMap"]["data"][name])
    assert (command, parsed(command, file, *arguments)["page"]) == ("ramp", None)
    experiment = ramped(from_table(production_table(load_table(str(tmp_path / name)))))
    users = experiment.users
    assert users.provider == f"0.0.0.0:{known['Service']['spec']['ports'][0]['port']}"
    (route,) = (item for item in CONTROLLERS if item["kind"] == "GRPCRoute")
    assert users.route.partition("/")[2] == route["metadata"]["name"]
    assert {arm.name for arm in experiment.arms} == {
        backend["name"] for backend in route["spec"]["rules"][0]["backendRefs"]
    }
    assert known["Role"]["rules"][0]["resourceNames"] == [route["metadata"]["name"]]
    assert known["Role"]["rules"][0]["verbs"] == ["get"]
    assert template["spec"]["serviceAccountName"] == known["ServiceAccount"]["metadata"]["name"]
    assert [item["name"] for item in container["env"]] == [TOKEN_VARIABLE]
    assert known["Service"]["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert container["readinessProbe"]["httpGet"]["path"] == HEALTH


@pytest.mark.parametrize("name", JOBS)
def test_every_verdict_but_pass_ends_the_job(name: str) -> None:
    job = JOBS[name]
    (rule,) = job["spec"]["podFailurePolicy"]["rules"]
    assert set(rule["onExitCodes"]["values"]) == {2, *EXIT_CODES.values()} - {0}
    assert job["spec"]["backoffLimit"] == 0
    assert job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= 120 + 60
    assert rule["onExitCodes"]["containerName"] == job["spec"]["template"]["spec"]["containers"][0]["name"]


(CANARY,) = (item for item in CONTROLLERS if item["kind"] == "Canary")
(ROLLOUT,) = (item for item in CONTROLLERS if item["kind"] == "Rollout")
TEMPLATES = {item["metadata"]["name"]: item for item in CONTROLLERS if item["kind"] == "AnalysisTemplate"}
SERVICE = by_kind("provider/")["Service"]
PROVIDER = f"{SERVICE['metadata']['name']}:{SERVICE['spec']['ports'][0]['port']}"
WEBHOOKS = {hook["type"]: hook for hook in CANARY["spec"]["analysis"]["webhooks"]}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_asks_the_provider(name: str) -> None:
    spec = TEMPLATES[name]["spec"]
    (metric,) = spec["metrics"]
    web = metric["provider"]["web"]
    defaults = {arg["name"]: arg.get("value", "") for arg in spec["args"]}
    url = web["url"]
    for arg, value in defaults.items():
        url = url.replace(f"{{{{args.{arg}}}}}", value)
    address = urlsplit(url)
    assert (address.netloc, address.path) == (PROVIDER, JUDGEMENT)
    assert dict(parse_qsl(address.query)) == {"for": "step"}
    assert web["jsonPath"] == "{$.verdict}"
    assert web["headers"] == [{"key": "Authorization", "value": "Bearer {{args.token}}"}]
    secret = next(arg["valueFrom"]["secretKeyRef"] for arg in spec["args"] if arg["name"] == "token")
    assert secret == {"name": "tailgate-provider", "key": "token"}
    assert metric["failureCondition"] == 'result == "FAIL"'
    assert metric["failureLimit"] == 0


def test_a_step_passes_by_a_pass_alone_and_nothing_inconclusive_ends_the_background_analysis() -> None:
    (step,), (background,) = (TEMPLATES[f"tailgate-{name}"]["spec"]["metrics"] for name in ("wait", "harm"))
    assert step["successCondition"] == 'result == "PASS"'
    assert step["inconclusiveLimit"] < step["count"]
    assert step["consecutiveSuccessLimit"] == 1
    assert not {"successCondition", "count", "consecutiveSuccessLimit"} & set(background)


def test_every_weight_of_the_rollout_waits_for_a_verdict() -> None:
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
    services = {item["metadata"]["name"] for item in CONTROLLERS if item["kind"] == "Service"}
    assert services == {canary["stableService"], canary["canaryService"]}
    (route,) = (item for item in CONTROLLERS if item["kind"] == "GRPCRoute")
    assert {item["name"] for item in route["spec"]["rules"][0]["backendRefs"]} == services
    assert canary["trafficRouting"]["plugins"]["argoproj-labs/gatewayAPI"]["grpcRoute"] == route["metadata"]["name"]


def test_the_canary_asks_by_every_hook() -> None:
    assert set(WEBHOOKS) == {"confirm-rollout", "rollout", "confirm-traffic-increase", "confirm-promotion", "rollback"}
    for kind, hook in WEBHOOKS.items():
        address = urlsplit(hook["url"])
        assert (address.netloc, address.path) == (PROVIDER, f"{FLAGGER}/{kind}")
        assert kind in HOOKS
        assert set(hook["metadata"]) <= {"token"}
    analysis = CANARY["spec"]["analysis"]
    assert int(WEBHOOKS["rollout"]["timeout"].removesuffix("s")) < 10, "within the interval, as Flagger asks"
    assert (analysis["interval"], analysis["maxWeight"], analysis["stepWeights"][-1]) == ("10s", 50, 50)
