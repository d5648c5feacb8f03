"""Short runs in which something goes wrong, of every family of faults, held against every promise.

`make faults` makes hundreds.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.faults.live_run import carry_out
from tests.faults.plan import FAMILIES, covering, plan
from tests.faults.promises import breaches

COUNTS = dict.fromkeys(FAMILIES, 2) | {"signals": 6, "devices": 0}
SEEDS = [(family, seed) for family, count in COUNTS.items() for seed in covering(count, families=(family,)) if count]


@pytest.mark.timeout(420)
@pytest.mark.parametrize(("family", "seed"), SEEDS)
def test_every_promise_holds_whatever_goes_wrong(family: str, seed: int, tmp_path: Path) -> None:
    planned = plan(seed, quick=True, families=(family,))
    assert not breaches(carry_out(planned, tmp_path)), planned


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU: run tests/faults on a GPU machine")
@pytest.mark.timeout(420)
def test_every_promise_holds_without_device_memory(tmp_path: Path) -> None:
    planned = plan(6, families=("devices",), kind="engine")
    assert not breaches(carry_out(planned, tmp_path)), planned
