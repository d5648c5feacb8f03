"""Install the wheel in clean environments outside the tree, next to a user's folders of the same names."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.runs import FakeRun, write_run

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if release := os.environ.get("TAILGATE_RELEASE"):  # of `make release-check`: a folder with the sdist and its wheel
        return next(Path(release).glob("tailgate-*.whl"))
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a build leaves files behind, which the next one would take in
    for name in ("analysis", "loadtests", "servers", "tailgate"):
        shutil.copytree(ROOT / name, source / name, symlinks=True)
    for name in ("LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--wheel-dir", str(folder), str(source)], check=True)
    return next(folder.glob("tailgate-*.whl"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with packages named as tailgate's are; importing one of them fails."""
    folder = tmp_path_factory.mktemp("user")
    for name in ("servers", "loadtests", "analysis"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise AssertionError(__name__)\n", encoding="utf-8")
    return folder


def environment(wheel: Path, folder: Path, extras: str) -> Path:
    """Install the wheel with `extras` in a fresh virtual environment; return its folder of programs."""
    home = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    install = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*install, f"{wheel}{extras}"], check=True, env=clean)
    return home / "bin"


def tailgate(programs: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    variables = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(folder), "PYTHONPATH": str(folder)}
    return subprocess.run(
        [str(programs / "tailgate"), *words],
        cwd=folder,
        env={**variables, "TMPDIR": os.environ.get("TMPDIR", "/tmp")},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_changelog_begins_with_the_version_that_is_built(wheel: Path) -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version, date = re.findall(r"^## (\S+) \((.+)\)$", text, re.M)[0]
    assert wheel.name.split("-")[1] == version
    if "TAILGATE_RELEASE" in os.environ:
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", date), (
            f"CHANGELOG.md has {version} ({date}): give the day of the release"
        )


def test_judging_needs_neither_torch_nor_locust(wheel: Path, folder: Path, tmp_path: Path) -> None:
    programs = environment(wheel, tmp_path, "")
    run = write_run(folder / "run", FakeRun())
    judged = tailgate(programs, folder, "analyze", str(run), "--json")
    assert judged.returncode in (0, 3, 99), judged.stderr
    assert (run / "report.html").exists()
    for words, extras in ((("run", "demo"), "load"), (("inspect", "--arm", "eager"), "serve,load")):
        refused = tailgate(programs, folder, *words)
        assert refused.returncode == 2, refused.stderr
        assert refused.stderr.endswith(f"is not installed: pip install 'tailgate[{extras}]'\n")


def test_everything_runs_the_demo_and_locust(wheel: Path, folder: Path, tmp_path: Path) -> None:
    programs = environment(wheel, tmp_path, "[serve,load]")
    demo = tailgate(programs, folder, "run", "demo")
    assert demo.returncode in (3, 99), demo.stderr[-2000:]
    assert list(folder.glob("runs/*-demo/report.html"))
    assert "ChatUser" in tailgate(programs, folder, "locust", "chat", "--list").stdout
