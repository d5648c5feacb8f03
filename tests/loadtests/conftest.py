from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _garbage_of_other_tests_is_theirs() -> Iterator[None]:
    """A load process collects garbage before its traffic: of a whole suite's objects that takes longer than a test's
    traffic lasts."""
    gc.freeze()
    yield
    gc.unfreeze()
