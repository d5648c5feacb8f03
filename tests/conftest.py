"""Rules of every test: the time limit of the default suite and the order of process tests."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent
# `make test` runs these folders; `make test-all` runs the others too.
DEFAULT = ("analysis", "golden", "loadtests", "servers")
LIMIT_S = float(os.environ.get("TAILGATE_TEST_LIMIT_S", 4))

# Hypothesis fails no example by its duration: the machine may be busy.
settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a worker: run process tests first, so that none is left alone at the end, and keep groups together."""
    if not hasattr(config, "workerinput"):
        return
    items.sort(key=lambda item: item.get_closest_marker("process") is None)
    # pytest-xdist 3.8 writes the group into `_nodeid`, which pytest 9.2 does not read.
    for item in items if config.getoption("loadgroup", default=False) else ():
        mark = item.get_closest_marker("xdist_group")
        if mark is not None and "@" not in item.nodeid.rpartition("]")[2] and hasattr(item, "_id"):
            item._id = type(item._id).parse(f"{item.nodeid}@{mark.args[0]}")


def _waiting_s() -> float:
    """Return how long this process has waited for a processor, 0 where the system does not say."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """Fail a test of the default suite that takes longer than LIMIT_S and is not marked as a process test.

    Time in which other processes had the processors does not count.
    """
    begin_s = time.monotonic() - _waiting_s()
    result = yield
    took_s = time.monotonic() - _waiting_s() - begin_s
    limited = item.path.relative_to(ROOT).parts[0] in DEFAULT and item.get_closest_marker("process") is None
    if limited and took_s > LIMIT_S:
        pytest.fail(
            f"the test took {took_s:.1f} s; a test of the default suite may take {LIMIT_S:.0f} s: make it faster, "
            "mark it with pytest.mark.process if it starts a process, or move it to tests/e2e",
            pytrace=False,
        )
    return result


@pytest.fixture(scope="session")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tests.fakes.credentials import make_certificates  # which needs trustme, as not every suite does

    return make_certificates(tmp_path_factory.mktemp("pem"))
