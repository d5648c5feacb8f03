"""deploy/container: what the file says, and that its steps end with a tailgate that runs, in a clean root."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from deploy.container.in_clean_root import Instruction, Root, StepError, instructions

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "container"
STEPS = list(instructions((FOLDER / "Containerfile").read_text(encoding="utf-8")))
CERTIFICATES = "/run/certificates.crt"
TOOLS = ("mmdebstrap", "unshare", "chroot")
CAN = not os.geteuid() and all(shutil.which(tool) for tool in TOOLS)


def values(name: str) -> list[str]:
    return [step.value for step in STEPS if step.name == name]


def test_the_image_runs_tailgate_and_not_as_root() -> None:
    assert json.loads(values("ENTRYPOINT")[0]) == ["tailgate"]
    (user,) = values("USER")
    assert user.isdecimal(), "so that Kubernetes sees that it is not root"
    assert int(user) > 0
    assert [step.name for step in STEPS][-3:] == ["USER", "ENTRYPOINT", "CMD"], "no step after it is root's"


def test_everything_is_installed_within_the_constraints() -> None:
    installs = re.findall(r"pip install [^&]+", " && ".join(values("RUN")))
    assert len(installs) == 2
    assert all("-c constraints.txt" in install for install in installs)
    assert not any("--index-url" in install or "://" in install for install in installs), "torch's default index"


def test_all_that_is_copied_is_there_and_passes_the_ignore_file() -> None:
    sources = {source for value in values("COPY") for source in shlex.split(value)[:-1]}
    assert all((ROOT / source).exists() for source in sources)
    allowed = set(re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(encoding="utf-8"), re.M))
    assert sources == allowed


def test_lines_that_go_on_are_one_step_and_comments_none() -> None:
    text = "# a\nFROM debian:bookworm-slim\nRUN one \\\n    && two\n\nCMD []\n"
    assert list(instructions(text)) == [
        Instruction("FROM", "debian:bookworm-slim"),
        Instruction("RUN", "one && two"),
        Instruction("CMD", "[]"),
    ]


def test_a_step_that_the_script_does_not_know_is_refused(tmp_path: Path) -> None:
    root = Root(path=tmp_path / "root", arguments={"GIVEN": "1"})
    for step in (Instruction("VOLUME", "/runs"), Instruction("FROM", "alpine:3")):
        with pytest.raises(StepError):
            root.take(step)
    for step in (Instruction("ARG", "GIVEN"), Instruction("ARG", "UNSET"), Instruction("ENV", "A=1 PATH=/bin")):
        root.take(step)
    assert root.given == {"GIVEN": "1"}
    assert root.environment == {"PATH": "/bin", "A": "1"}


PODMAN = """#!/bin/sh
echo "$@" >> engine.txt
while [ $# -gt 0 ]; do
    if [ "$1" = -v ]; then stat -c %A "${2%%:*}" >> volumes.txt || exit 1; fi
    shift
done
"""


def test_what_the_page_says_lets_the_images_user_write_runs(tmp_path: Path) -> None:
    (commands, *_) = re.findall(r"^```\n(.+?)^```", (FOLDER / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    (tmp_path / "podman").write_text(PODMAN)
    (tmp_path / "podman").chmod(0o755)
    subprocess.run(
        ["sh", "-e", "-c", f"umask 022\n{commands}"],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PWD": str(tmp_path)},
        check=True,
        timeout=60,
    )
    started = (tmp_path / "engine.txt").read_text().splitlines()
    assert started[0] == "build -f deploy/container/Containerfile -t tailgate ."
    assert all(f":{values('WORKDIR')[0]}/runs tailgate run " in line for line in started[1:])
    assert (tmp_path / "volumes.txt").read_text().split() == ["drwxrwxrwx"] * (len(started) - 1)


# --- In a clean root --------------------------------------------------------------------------------------------------


def pip_here() -> list[str]:
    """The flags that have pip in the root find packages where it finds them on this machine."""
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
                if path.startswith("/") and Path(top).is_dir() and f"{top}:{top}" not in flags:
                    flags += ["--mount", f"{top}:{top}"]
    if certificates := known.get("cert"):
        flags += ["--mount", f"{certificates}:{CERTIFICATES}", "--build-arg", f"PIP_CERT={CERTIFICATES}"]
    return flags


@pytest.fixture
def clean_root(tmp_path: Path) -> Iterator[Path]:
    root = tmp_path / "root"
    yield root
    shutil.rmtree(root, ignore_errors=True)  # gigabytes


@pytest.mark.timeout(1800)
@pytest.mark.skipif(not CAN, reason=f"needs root and {', '.join(TOOLS)}: install Debian's package mmdebstrap")
def test_the_steps_end_with_a_tailgate_that_runs(clean_root: Path) -> None:
    flags = ["--root", str(clean_root), *pip_here()]
    done = subprocess.run(
        [sys.executable, str(FOLDER / "in_clean_root.py"), *flags, "--", "--version"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert re.fullmatch(r"tailgate \d+\.\d+\.\d+", done.stdout.splitlines()[-1])
    root = Root(path=clean_root, arguments={})
    for step in STEPS:
        if step.name in ("ENV", "USER"):
            root.take(step)
    root.folder = values("WORKDIR")[0]
    root.run(["tailgate", "run", "demo", "--help"])
    root.run(["/bin/sh", "-c", "test $(id -u) = 10001 && touch runs/written && ! touch analysis/written 2>/dev/null"])
    root.run(
        [
            "/bin/sh",
            "-c",
            "g++ --version && python -c 'import sysconfig, pathlib; "
            'assert pathlib.Path(sysconfig.get_paths()["include"], "Python.h").exists()\'',
        ]
    )
    for command in commands_of_manifests():
        root.run([*command, "--help"])


def commands_of_manifests() -> list[list[str]]:
    """What the manifests start in the image."""
    found = []
    for path in sorted((ROOT / "deploy" / "kubernetes").rglob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            pod = document.get("spec", {}).get("template", {}).get("spec", {})
            for container in pod.get("containers", []):
                assert container["image"] == "tailgate:latest"
                if container["command"] not in found:
                    found.append(container["command"])
    assert len(found) > 3
    return found
