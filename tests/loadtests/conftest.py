from __future__ import annotations

import gc
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.fakes import triton


@pytest.fixture(autouse=True)
def _garbage_of_other_tests_is_theirs() -> Iterator[None]:
    """A load process collects garbage before its traffic: of a whole suite's objects that takes longer than a test's
    traffic lasts."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def triton_address() -> Iterator[str]:
    if find_spec("tritonclient") is None:  # importing it here would register its protobuf names next to ours
        pytest.skip("tritonclient is not installed")
    with triton.served() as address:
        yield address
