"""deploy/container, deploy/github, deploy/grafana and deploy/prometheus, with the real tools where they exist."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tailgate.loadtests.trials.trial import ENVOY_METRICS
from tests.fakes.command_line import parsed
from tests.fakes.processes import free_port
from tests.fakes.whole_run import environment

REPOSITORY = Path(__file__).resolve().parents[2]
CONTAINERFILE = REPOSITORY / "deploy" / "container" / "Containerfile"
# (name, value) of each instruction
STEPS = re.findall(r"^([A-Z]+) (.+)", CONTAINERFILE.read_text(encoding="utf-8").replace("\\\n", " "), re.M)
CERTIFICATES = "/run/certificates.crt"
PROBE = "command -v mmdebstrap; unshare --mount true; box=$(buildah from scratch); buildah mount $box; buildah rm $box"


def values(name: str) -> list[str]:
    return [value for step, value in STEPS if step == name]


def test_everything_is_installed_within_the_constraints() -> None:
    installs = re.findall(r"pip install [^&]+", " && ".join(values("RUN")))
    assert ["-c /src/constraints.txt" in install for install in installs] == [True, False]
    assert ["--no-deps" in install for install in installs] == [False, True]
    assert not any("--index-url" in install or "://" in install for install in installs)


def test_copied_files_exist_and_pass_the_ignore_file() -> None:
    sources = {source for value in values("COPY") for source in shlex.split(value)[:-1]}
    assert all((REPOSITORY / source).exists() for source in sources)
    allowed = set(re.findall(r"^!(.+)$", (REPOSITORY / ".dockerignore").read_text(encoding="utf-8"), re.M))
    assert sources == allowed


def pip_here() -> list[str]:
    """Return flags with which pip in the image uses the indexes of this machine."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, timeout=60, check=True
    )
    known = dict(re.findall(r"^(?:global|install|:env:)\.([\w-]+)='(.*)'$", done.stdout, re.M))
    flags: list[str] = []
    for key in ("index-url", "extra-index-url", "find-links"):
        if value := known.get(key, "").replace("\\n", " ").strip():
            flags += ["--build-arg", f"PIP_{key.replace('-', '_').upper()}={value}"]
            for place in value.split():
                path = place.removeprefix("file://")
                top = "/".join(path.split("/")[:3])
                if path.startswith("/") and Path(top).is_dir() and f"{top}:{top}:ro" not in flags:
                    flags += ["--volume", f"{top}:{top}:ro"]
    if certificates := known.get("cert"):
        flags += ["--volume", f"{certificates}:{CERTIFICATES}:ro", "--build-arg", f"PIP_CERT={CERTIFICATES}"]
    return flags


@pytest.mark.timeout(1800)
def test_the_image_builds_and_runs_tailgate_and_not_as_root(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if os.geteuid() or subprocess.run(["sh", "-ec", PROBE], capture_output=True, check=False).returncode:
        pytest.skip("needs root, Debian's packages buildah and mmdebstrap, and mounts")
    request.addfinalizer(lambda: shutil.rmtree(tmp_path, ignore_errors=True))  # gigabytes

    def run(*words: object) -> str:
        done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout.strip()

    buildah = partial(run, "buildah", "--root", tmp_path / "images", "--runroot", tmp_path / "running")
    # The base comes from Debian's archive, so that no registry is needed.
    (base,) = values("FROM")
    run("mmdebstrap", "--quiet", "--variant=minbase", base.split(":")[1].removesuffix("-slim"), tmp_path / "base.tar")
    empty = buildah("from", "scratch")
    buildah("add", empty, tmp_path / "base.tar", "/")
    buildah("commit", "--rm", empty, f"docker.io/library/{base}")
    alone = ("--isolation", "chroot")
    buildah("bud", "--pull-never", *alone, *pip_here(), "--file", CONTAINERFILE, "--tag", "tailgate", REPOSITORY)
    config = ("--type", "image", "--format", "{{.OCIv1.Config.Entrypoint}} {{.OCIv1.Config.User}}")
    assert buildah("inspect", *config, "tailgate") == "[tailgate] 10001"
    inside = partial(buildah, "run", *alone, buildah("from", "--pull-never", "tailgate"), "--")
    assert re.fullmatch(r"tailgate \d+\.\d+\.\d+", inside("tailgate", "--version"))
    inside("tailgate", "run", "demo", "--help")
    inside("sh", "-c", "test $(id -u) = 10001 && touch runs/written && ! touch written 2>/dev/null")
    include = "$(python -c 'import sysconfig; print(sysconfig.get_path(\"include\"))')"
    inside("sh", "-c", f"g++ --version && test -f {include}/Python.h")
    for command in commands_of_manifests():
        inside(*command, "--help")


def commands_of_manifests() -> list[list[str]]:
    found = []
    for path in sorted((REPOSITORY / "deploy" / "kubernetes").rglob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            pod = document.get("spec", {}).get("template", {}).get("spec", {})
            for container in pod.get("containers", []):
                assert container["image"] == "tailgate:latest"
                if container["command"] not in found:
                    found.append(container["command"])
    assert len(found) > 3
    return found


WORKFLOW: dict[str, Any] = yaml.safe_load((REPOSITORY / "deploy/github/rollout.yml").read_text())
JOB_STEPS: list[dict[str, Any]] = WORKFLOW["jobs"]["judge"]["steps"]
STAND_IN = """#!/bin/sh
[ "$1 $2 $3 $4" = "check serving/canary.toml --out runs" ] && exit CHECKED
[ "$1 $2 $3 $4 $5" = "run serving/canary.toml --out runs --json" ] || exit 64
LEAVES
exit CODE
"""
JUDGED = """mkdir -p runs/one; echo "# report" > runs/one/report.md
echo '{"verdict": "X", "run_dir": "runs/one"}'"""
BROKEN = """mkdir -p runs/one
echo '{"verdict": null, "run_dir": "runs/one", "report": null}'"""
REFUSED = "echo 'tailgate: canary.toml does not exist' >&2"


def outputs(folder: Path) -> dict[str, str]:
    lines = (folder / "output").read_text().splitlines() if (folder / "output").exists() else []
    return dict(line.split("=", 1) for line in lines)


def expanded(text: str, folder: Path) -> str:
    return re.sub(r"\$\{\{ steps\.run\.outputs\.(\w+) \}\}", lambda match: outputs(folder).get(match[1], ""), str(text))


def asks(step: dict[str, Any], folder: Path, *, succeeded: bool) -> bool:
    """Return whether GitHub runs the step after steps that all `succeeded`, or did not."""
    *first, last = str(step.get("if", "")).split(" && ")
    wanted = re.fullmatch(r"steps\.run\.outputs\.(\w+)", last)
    always = "always()" in (*first, last)
    return (succeeded or always) and (wanted is None or bool(outputs(folder).get(wanted[1])))


def job(folder: Path, code: int, leaves: str = JUDGED, *, checked: int = 0, **changed: str) -> tuple[bool, str]:
    """Run the steps with a `tailgate` whose check ends with `checked` and whose run ends with `code`.

    Return whether the job succeeds, and its output.
    """
    program = folder / ".tailgate" / "bin" / "tailgate"
    program.parent.mkdir(parents=True)
    program.write_text(STAND_IN.replace("LEAVES", leaves).replace("CODE", str(code)).replace("CHECKED", str(checked)))
    program.chmod(0o755)
    succeeded, printed = True, ""
    for step in JOB_STEPS:
        if "run" not in step or step["name"] == "Install" or not asks(step, folder, succeeded=succeeded):
            continue
        variables = {
            **os.environ,
            **WORKFLOW["env"],
            **{name: expanded(value, folder) for name, value in step.get("env", {}).items()},
            **changed,
            "GITHUB_OUTPUT": str(folder / "output"),
            "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
        }
        shell = ["bash", "-e", "-o", "pipefail", "-c", step["run"]]
        done = subprocess.run(shell, cwd=folder, env=variables, capture_output=True, text=True, check=False)
        succeeded &= done.returncode == 0
        printed += done.stdout
    return succeeded, printed


@pytest.mark.parametrize(
    ("code", "leaves", "settings", "succeeds", "says"),
    [
        (0, JUDGED, {}, True, "PASS"),
        (99, JUDGED, {}, False, "FAIL"),
        (3, JUDGED, {}, False, "::error::INCONCLUSIVE"),
        (3, JUDGED, {"HOLD_WHEN_INCONCLUSIVE": "0"}, True, "::warning::INCONCLUSIVE"),
        (1, JUDGED, {}, False, "broke (exit code 1)"),
        (1, BROKEN, {}, False, "::error::the run itself broke (exit code 1)\n"),
        (2, REFUSED, {}, False, "::error::serving/canary.toml cannot run: the step "),
        (1, REFUSED, {}, False, "::error::the run itself broke (exit code 1)\n"),
    ],
)
def test_the_job_ends_as_the_verdict_does_and_shows_a_report_where_there_is_one(
    code: int, leaves: str, settings: dict[str, str], succeeds: bool, says: str, tmp_path: Path
) -> None:
    succeeded, printed = job(tmp_path, code, leaves, **settings)
    assert succeeded is succeeds
    assert says in printed
    report = tmp_path / "summary.md"
    assert (report.read_text() if report.exists() else "") == ("# report\n" if leaves == JUDGED else "")
    assert outputs(tmp_path) == {"code": str(code)} | ({"report": "runs/one"} if leaves == JUDGED else {})


def test_an_experiment_that_cannot_run_ends_the_job_before_its_run(tmp_path: Path) -> None:
    succeeded, printed = job(tmp_path, 0, checked=2)
    assert not succeeded
    assert printed == (
        "::error::serving/canary.toml cannot run: the line above says which setting to change (exit code 2)\n"
    )
    assert outputs(tmp_path) == {}


def test_the_workflow_keeps_results_names_no_index_and_gives_a_fork_no_secret() -> None:
    (keep,) = [step for step in JOB_STEPS if "upload-artifact" in step.get("uses", "")]
    assert (keep["if"], keep["with"]["path"]) == ("always()", "runs")
    assert WORKFLOW["permissions"] == {"contents": "read", "checks": "write"}
    assert "pull_request_target" not in str(WORKFLOW)
    assert "/" in WORKFLOW["env"]["TAILGATE"]
    (line,) = re.findall(r"bin/tailgate run (.+) > line\.json", str(JOB_STEPS))
    parsed("run", *line.replace('"$EXPERIMENT"', "demo").split())


DASHBOARD: dict[str, Any] = json.loads((REPOSITORY / "deploy/grafana/tailgate.json").read_text())
CONFIG = REPOSITORY / "deploy" / "prometheus" / "prometheus.yml"
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]

# A short run whose compiled arms are traced, and not compiled by C++.
SHORT = ["traffic.duration_s=20", "traffic.rate=6", "trials.count=1", "machines.reference_s=0"]
SHORT += [
    f"arms.{arm}.compile.{key}"
    for arm in ("compiled-padded", "compiled-naive")
    for key in ("backend=eager", "mode=default")
]


def test_expressions_filter_by_arm_and_hold_no_address() -> None:
    for _, expression in EXPRESSIONS:
        assert "instance" not in expression
        assert ("arm" in expression) == ("$arm" in expression), expression


def test_the_configuration_scrapes_the_default_address() -> None:
    (job,) = yaml.safe_load(CONFIG.read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["127.0.0.1:9465"]}]
    assert ENVOY_METRICS.startswith("/stats/prometheus")


@pytest.mark.timeout(600)
def test_every_metric_of_the_dashboard_is_on_the_page_of_a_real_run(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "tailgate.loadtests.commands.main", "run", "demo"]
    command += ["--metrics", f"127.0.0.1:{port}", *(word for setting in SHORT for word in ("--set", setting))]
    shown: dict[str, set[str]] = {}  # the arms of each metric
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL) as run:
        while run.poll() is None:
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
                for family in text_string_to_metric_families(page.read().decode()):
                    for sample in family.samples:
                        shown.setdefault(sample.name, set()).add(sample.labels.get("arm", ""))
            time.sleep(0.5)
    assert run.returncode in (0, 3, 99)
    used = {
        name for _, expression in EXPRESSIONS for name in re.findall(r"\b(?:tailgate|envoy)_\w+(?=[\[{])", expression)
    }
    assert len(used) > 15
    assert used - set(shown) == set()
    assert shown["tailgate_load_requests_total"] >= {"eager", "compiled-padded"}


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("tailgate", 2),
        ("", 2),
        ("./vendor/tailgate[load]", 0),
        ("tailgate[load] @ git+https://host/t@0e45b0b0", 0),
    ],
)
def test_a_bare_name_is_not_installed(source: str, code: int, tmp_path: Path) -> None:
    (step,) = [step for step in JOB_STEPS if step.get("name") == "Install"]
    python = tmp_path / "python3"  # a program in place of Python
    python.write_text(
        '#!/bin/sh\n[ -x .tailgate/bin/python ] || { mkdir -p .tailgate/bin; cp "$0" .tailgate/bin/python; }\n'
    )
    python.chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "TAILGATE": source, "CONSTRAINTS": "c.txt"}
    done = subprocess.run(["bash", "-e", "-c", step["run"]], cwd=tmp_path, env=variables, check=False)
    assert done.returncode == code
