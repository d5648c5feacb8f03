from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.analysis.report.conftest import demo, hostile, nulls, rollout
from tests.fakes.screens import CHROMIUM, Browser
from tests.loadtests.page.conftest import serve

__all__ = ["demo", "hostile", "nulls", "rollout", "serve"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no page was tested, because Chromium is absent: apt-get install chromium")
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser
