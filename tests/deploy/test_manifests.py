"""The manifests in deploy/: those of Kubernetes' own kinds are valid by the schemas that it publishes, and what they
run is what tailgate reads. tests/deploy/test_controllers.py has the resources of Argo Rollouts and Flagger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from analysis.summary.summary import EXIT_CODES
from loadtests.commands.command_line import CommandParser
from loadtests.commands.provider import add_arguments as provider_arguments
from loadtests.commands.ramp import add_arguments as ramp_arguments
from loadtests.commands.run import add_arguments
from loadtests.experiments.reading import from_table, load, load_table
from loadtests.experiments.users import of_users
from loadtests.provider.server import HEALTH
from loadtests.trials.ramp import ramped
from servers.config import EngineConfig
from servers.metadata import INFERENCE_SERVICE

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
FOLDER = DEPLOY / "kubernetes"
VERSIONS = ("1.31", "1.34")  # podFailurePolicy is part of the first
DOCUMENTS: list[tuple[str, dict[str, Any]]] = [
    (f"{path.relative_to(FOLDER)}: {document['kind']} {document['metadata']['name']}", document)
    for path in sorted(FOLDER.rglob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
]
BESIDE = [
    document
    for path in sorted((*DEPLOY.glob("argo/*.yaml"), *DEPLOY.glob("flagger/*.yaml")))
    for document in yaml.safe_load_all(path.read_text())
]
# Of the Gateway API, Argo Rollouts and Flagger, whose schemas are not Kubernetes' own.
OTHERS = {"Gateway", "GRPCRoute", "AnalysisTemplate", "Rollout", "Canary"}
OWN = [item for item in (*(item for _, item in DOCUMENTS), *BESIDE) if item["kind"] not in OTHERS]
JOBS = {item["metadata"]["name"]: item for item in OWN if item["kind"] == "Job"}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("document", OWN, ids=lambda item: f"{item['kind']} {item['metadata']['name']}")
def test_a_manifest_is_valid(document: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


def test_a_key_that_does_not_exist_is_found() -> None:
    job = JOBS["tailgate-rollout"]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**job, "spec": {**job["spec"], "backofLimit": 0}}, VERSIONS[0], strict=True)


def pods() -> list[Any]:
    """Name and spec of every pod that a manifest makes, also a Rollout's."""
    every = [*(item for _, item in DOCUMENTS), *BESIDE]
    found = [
        pytest.param(item["spec"]["template"]["spec"], id=f"{item['kind']} {item['metadata']['name']}")
        for item in every
        if "template" in item.get("spec", {})
    ]
    assert len(found) > 7
    return found


@pytest.mark.parametrize("pod", pods())
def test_a_pod_runs_under_the_restricted_standard_and_has_no_token_that_it_does_not_use(pod: dict[str, Any]) -> None:
    assert pod["automountServiceAccountToken"] is False, "no manifest asks the API server for anything as it is"
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"]:
        own = container["securityContext"]
        assert (own["allowPrivilegeEscalation"], own["capabilities"]) == (False, {"drop": ["ALL"]})
    assert {key for volume in pod.get("volumes", ()) for key in volume} <= {
        "name",
        *("configMap", "secret", "emptyDir", "persistentVolumeClaim"),
    }


@pytest.mark.parametrize("pod", pods())
def test_a_server_that_is_taken_away_hears_of_it_first_and_has_time_for_its_streams(pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    if not {"serve", "servers.front.serve"} & {*container["command"], *container["args"]}:
        return
    waits_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert waits_s >= 5
    assert pod["terminationGracePeriodSeconds"] >= waits_s + EngineConfig().drain_grace_s + 5
    assert container["readinessProbe"]["grpc"]["service"] == INFERENCE_SERVICE, "ready when warm"
    assert container["resources"]["requests"] == container["resources"]["limits"], "no neighbour may borrow"


def test_who_moves_weights_may_read_and_patch_the_deployed_route_alone() -> None:
    known = {item["kind"]: item for name, item in DOCUMENTS if name.startswith("ramp/")}
    (route,) = (item for _, item in DOCUMENTS if item["kind"] == "GRPCRoute")
    assert (
        JOBS["tailgate-ramp"]["spec"]["template"]["spec"]["serviceAccountName"]
        == known["ServiceAccount"]["metadata"]["name"]
    )
    assert known["Role"]["rules"] == [
        {
            "apiGroups": [route["apiVersion"].partition("/")[0]],
            "resources": ["grpcroutes"],
            "resourceNames": [route["metadata"]["name"]],
            "verbs": ["get", "patch"],
        }
    ]
    account = known["ServiceAccount"]["metadata"]["name"]
    assert known["RoleBinding"]["subjects"] == [{"kind": "ServiceAccount", "name": account}]
    assert known["RoleBinding"]["roleRef"]["name"] == known["Role"]["metadata"]["name"]


def test_the_job_judges_an_experiment_that_tailgate_reads(tmp_path: Path) -> None:
    known = {item["kind"]: item for name, item in DOCUMENTS if name.startswith("judge/")}
    pod = known["Job"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (mount,) = (item for item in container["volumeMounts"] if item["name"] == "experiment")
    command, file, *flags = container["args"]
    folder, _, name = file.rpartition("/")
    assert (command, folder) == ("run", mount["mountPath"])
    parser = CommandParser(prog="run")
    add_arguments(parser)
    parser.parse_args([file, *flags])
    (tmp_path / name).write_text(known["ConfigMap"]["data"][name])
    experiment = load(str(tmp_path / name))
    assert [arm.name for arm in experiment.external_arms] == ["current", "candidate"]
    assert pod["volumes"][0]["configMap"]["name"] == known["ConfigMap"]["metadata"]["name"]
    assert pod["volumes"][1]["persistentVolumeClaim"]["claimName"] == known["PersistentVolumeClaim"]["metadata"]["name"]


def test_the_ramps_job_ramps_an_experiment_that_tailgate_reads(tmp_path: Path) -> None:
    known = {item["kind"]: item for name, item in DOCUMENTS if name.startswith("ramp/job")}
    pod = known["Job"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    command, file, *flags = container["args"]
    parser = CommandParser(prog="ramp")
    ramp_arguments(parser)
    options = parser.parse_args([file, *flags])
    mounts = {item["mountPath"]: item["name"] for item in container["volumeMounts"]}
    folder, _, name = file.rpartition("/")
    assert (command, mounts[folder], mounts[options.out]) == ("ramp", "experiment", "runs")
    (tmp_path / name).write_text(known["ConfigMap"]["data"][name])
    experiment = ramped(load(str(tmp_path / name)))
    assert [arm.name for arm in experiment.arms] == ["eager", "compiled-bucketed"]
    # Time for the arms to start, and to judge.
    assert known["Job"]["spec"]["activeDeadlineSeconds"] >= experiment.traffic.duration_s + 1800
    volumes = {item["name"]: item for item in pod["volumes"]}
    assert volumes["experiment"]["configMap"]["name"] == known["ConfigMap"]["metadata"]["name"]
    assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == known["PersistentVolumeClaim"]["metadata"]["name"]


def test_the_ramps_experiment_also_ramps_users_traffic_where_their_splitter_runs(tmp_path: Path) -> None:
    (known,) = (item for name, item in DOCUMENTS if name == "ramp/job.yaml: ConfigMap tailgate-ramp")
    (tmp_path / "ramp.toml").write_text(known["data"]["ramp.toml"])
    settings = ["ramp.load=none", "users.admin=127.0.0.1:9901"]
    table = load_table(str(tmp_path / "ramp.toml"), settings=settings, needs_traffic=False)
    experiment = ramped(from_table(of_users(table)))
    experiment.users.check()
    assert (experiment.ramp.load, experiment.traffic.arrivals) == ("none", "users")
    assert [arm.name for arm in experiment.arms] == ["eager", "compiled-bucketed"]


def test_the_provider_answers_from_the_ramps_volume_to_who_has_its_token() -> None:
    known = {item["kind"]: item for name, item in DOCUMENTS if name.startswith("provider/")}
    template = known["Deployment"]["spec"]["template"]
    (container,) = template["spec"]["containers"]
    command, *arguments = container["args"]
    parser = CommandParser(prog="provider")
    provider_arguments(parser)
    options = parser.parse_args(arguments)
    mounts = {item["mountPath"]: item["name"] for item in container["volumeMounts"]}
    volumes = {item["name"]: item for item in template["spec"]["volumes"]}
    assert (command, options.listen) == ("provider", f"0.0.0.0:{known['Service']['spec']['ports'][0]['port']}")
    claim = next(item for name, item in DOCUMENTS if name.startswith("ramp/job.yaml: PersistentVolumeClaim"))
    assert volumes[mounts[options.run_dir]]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert mounts[str(Path(options.token_file).parent)] == "token"
    assert known["Service"]["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    (beside,) = template["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    ramp_labels = JOBS["tailgate-ramp"]["spec"]["template"]["metadata"]["labels"]
    assert beside["labelSelector"]["matchLabels"] == ramp_labels
    assert container["readinessProbe"]["httpGet"]["path"] == HEALTH


@pytest.mark.parametrize("name", JOBS)
def test_every_verdict_but_pass_ends_the_job_at_once(name: str) -> None:
    job = JOBS[name]
    (rule,) = job["spec"]["podFailurePolicy"]["rules"]
    assert set(rule["onExitCodes"]["values"]) == {2, *EXIT_CODES.values()} - {0}
    assert job["spec"]["backoffLimit"] == 0
    # docs/distributed.md: how long the end may take.
    assert job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= 120 + 60
    assert rule["onExitCodes"]["containerName"] == job["spec"]["template"]["spec"]["containers"][0]["name"]
