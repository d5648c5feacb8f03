"""The manifests in deploy/kubernetes: valid by the schemas that Kubernetes publishes, and what the Job runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from analysis.summary.summary import EXIT_CODES
from loadtests.commands.command_line import CommandParser
from loadtests.commands.run import add_arguments
from loadtests.experiments.reading import load

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
VERSIONS = ("1.31", "1.34")  # podFailurePolicy is part of the first
DOCUMENTS: list[tuple[str, dict[str, Any]]] = [
    (f"{path.relative_to(FOLDER)}: {document['kind']} {document['metadata']['name']}", document)
    for path in sorted(FOLDER.rglob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
]
OTHERS = {"Gateway", "GRPCRoute"}  # of the Gateway API, whose schemas are not Kubernetes' own


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "document", [item for _, item in DOCUMENTS if item["kind"] not in OTHERS], ids=lambda item: item["metadata"]["name"]
)
def test_a_manifest_is_valid(document: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


def test_a_key_that_does_not_exist_is_found() -> None:
    (job,) = (item for _, item in DOCUMENTS if item["kind"] == "Job")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**job, "spec": {**job["spec"], "backofLimit": 0}}, VERSIONS[0], strict=True)


def test_who_moves_weights_may_read_and_patch_the_deployed_route_alone() -> None:
    known = {item["kind"]: item for name, item in DOCUMENTS if name.startswith("ramp/")}
    (route,) = (item for _, item in DOCUMENTS if item["kind"] == "GRPCRoute")
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


def test_every_verdict_but_pass_ends_the_job_at_once() -> None:
    (job,) = (item for _, item in DOCUMENTS if item["kind"] == "Job")
    (rule,) = job["spec"]["podFailurePolicy"]["rules"]
    assert set(rule["onExitCodes"]["values"]) == {2, *EXIT_CODES.values()} - {0}
    assert job["spec"]["backoffLimit"] == 0
    assert rule["onExitCodes"]["containerName"] == job["spec"]["template"]["spec"]["containers"][0]["name"]
