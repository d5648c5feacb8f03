"""What holds for all tests: every summary that one produces is as docs/schema publishes it, whoever made it, and no
example that Hypothesis draws fails by the time it takes on a busy machine."""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from typing import Any

import pytest
from hypothesis import settings

from analysis.summary import summary as summaries
from tests.fakes.summary_schema import hold, hold_file

settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")

_analyze = summaries.analyze


@wraps(_analyze)
def _held_analyze(*args: Any, **options: Any) -> dict[str, Any]:
    summary = _analyze(*args, **options)
    hold(summary, "the summary")
    return summary


# Before any test module and any command imports it by name.
summaries.analyze = _held_analyze


@pytest.fixture(scope="module", autouse=True)
def _written_summaries_are_as_published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Those that processes of the module's tests wrote."""
    folder = tmp_path_factory.getbasetemp()
    before = set(folder.iterdir())
    yield
    for new in sorted(set(folder.iterdir()) - before):
        if not new.is_symlink():
            for path in new.rglob("summary.json"):
                hold_file(path)
