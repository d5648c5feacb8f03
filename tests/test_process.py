"""What holds for the test process itself."""

from __future__ import annotations

import ast
from pathlib import Path

import gevent.monkey
import pytest


def test_no_test_patches_the_standard_library_for_all_others() -> None:
    # Collected before this runs: every test module has been imported. Under a patched library grpc hangs.
    assert not gevent.monkey.is_module_patched("threading")


ROOT = Path(__file__).parents[1]
# Modules that run what they read, or that pickle what they pass on.
MODULES = ("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "multiprocessing", "shelve")
NAMES = ("ProcessPoolExecutor", "recv_pyobj", "send_pyobj", "GraphPickler", "allow_pickle", "weights_only")
CALLS = ("torch.load",)

PIPE = "a socket pair without a name, between an arm's front and the engine that it started"
POOL = "pipes without a name, to a process that it started for itself"
ALLOWED = {
    "servers/front/serve.py": PIPE,
    "servers/engine/device.py": PIPE,
    "benchmarks/analysis.py": POOL,
    "benchmarks/simulation/table.py": POOL,
}


def uses(source: str) -> set[str]:
    """What of the above the source names."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} if node.module.partition(".")[0] in MODULES else set()
            found |= {alias.name for alias in node.names if alias.name in NAMES}
        elif isinstance(node, ast.Attribute) and (node.attr in NAMES or ast.unparse(node) in CALLS):
            found.add(ast.unparse(node))
        elif isinstance(node, ast.keyword) and node.arg in NAMES:
            found.add(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "_pickler" in node.value:
            # A module that is imported by its name.
            found |= {node.value} if " " not in node.value else set()
    return found


def test_who_unpickles_is_listed() -> None:
    packages = ("servers", "loadtests", "analysis", "benchmarks")
    files = [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    assert len(files) > 300
    found = {str(path.relative_to(ROOT)): names for path in files if (names := uses(path.read_text()))}
    assert set(found) == set(ALLOWED), {path: found.get(path) for path in set(found) ^ set(ALLOWED)}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from multiprocessing.connection import Listener",
        "from concurrent.futures import ProcessPoolExecutor",
        "socket.recv_pyobj()",
        "np.load(path, allow_pickle=True)",
        "torch.load(path)",
        "_reach('torch.fx._graph_pickler:GraphPickler')",
    ],
)
def test_each_way_to_unpickle_is_seen(source: str) -> None:
    assert uses(source)


def test_words_about_it_are_not_taken_for_it() -> None:
    assert not uses('"""torch unpickles this, see _graph_pickler.py."""\nimport json\n')
