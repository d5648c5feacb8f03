from __future__ import annotations

import pytest

from loadtests.traffic.settings import TrafficConfig
from servers.fields import ConfigError


@pytest.mark.parametrize(("most", "workers", "fits"), [(2, 4, False), (4, 4, True), (0, 4, True)])
def test_a_limit_of_concurrency_gives_each_load_process_a_request(most: int, workers: int, fits: bool) -> None:
    if fits:
        TrafficConfig(rate=1.0, max_concurrency=most, workers=workers)
        return
    with pytest.raises(ConfigError) as refused:
        TrafficConfig(rate=1.0, max_concurrency=most, workers=workers)
    for words in (f"traffic.max_concurrency is {most}", "workers", str(workers)):
        assert words in str(refused.value)
