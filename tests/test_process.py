"""What holds for the test process itself."""

from __future__ import annotations

import re
from pathlib import Path

import gevent.monkey


def test_no_test_patches_the_standard_library_for_all_others() -> None:
    # Collected before this runs: every test module has been imported. Under a patched library grpc hangs.
    assert not gevent.monkey.is_module_patched("threading")


ROOT = Path(__file__).parents[1]
# Imports of modules that run what they read or that pickle what they pass on, and other names of the same.
MODULES = "pickle|_pickle|cPickle|cloudpickle|dill|joblib|marshal|multiprocessing|shelve"
NAMES = "ProcessPoolExecutor|recv_pyobj|send_pyobj|GraphPickler|allow_pickle|weights_only|torch.load"
UNPICKLES = re.compile(rf"^\s*(from|import) ({MODULES})\b|\b({NAMES})\b", re.M)
# A pair of sockets or pipes without a name leads to a process that each of them started.
ALLOWED = {
    *("servers/front/serve.py", "servers/engine/device.py"),
    *("benchmarks/analysis.py", "benchmarks/simulation/table.py"),
}


def test_who_unpickles_is_listed() -> None:
    packages = ("servers", "loadtests", "analysis", "benchmarks")
    files = [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    assert len(files) > 300
    assert {str(path.relative_to(ROOT)) for path in files if UNPICKLES.search(path.read_text())} == ALLOWED
