from __future__ import annotations

from typing import Any

import pytest

from analysis.records.tables import RecordError
from analysis.settings.rollout import Rollout


def test_a_table_gives_load_and_gpus_and_the_rest_is_ignored() -> None:
    assert Rollout.from_table({}) == Rollout(load_rps=None, gpus_per_replica=1)
    found = Rollout.from_table({"load_rps": 200, "gpus_per_replica": 2.0, "colour": "blue"})
    assert found == Rollout(load_rps=200.0, gpus_per_replica=2)


def test_a_price_is_of_an_hour_of_one_gpu() -> None:
    assert Rollout(gpu_hour_price=2.0).price_of(1800.0) == 1.0
    assert Rollout().price_of(1800.0) is None
    assert Rollout.from_table({"gpu_hour_price": 2, "currency": "€"}) == Rollout(gpu_hour_price=2.0, currency="€")


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"load_rps": 0}, "rollout.load_rps is 0: give a value from"),
        ({"load_rps": "many"}, "rollout.load_rps is 'many': give a number"),
        ({"load_rps": True}, "rollout.load_rps is True: give a number"),
        ({"load_rps": float("nan")}, "rollout.load_rps is nan: give a number"),
        ({"gpus_per_replica": 1.5}, "rollout.gpus_per_replica is 1.5: give a whole number"),
        ({"gpu_hour_price": -1}, "rollout.gpu_hour_price is -1: give a value from 0"),
        ({"gpu_hour_price": "2 EUR"}, "rollout.gpu_hour_price is '2 EUR': give a number"),
        ({"currency": 3}, "rollout.currency is 3: give a short name such as EUR"),
        ({"currency": "<b>"}, "rollout.currency is '<b>': give a short name such as EUR"),
        ({"gpus_per_replica": 0}, "rollout.gpus_per_replica is 0: give a value from 1"),
    ],
)
def test_what_cannot_be_used_is_named(table: dict[str, Any], said: str) -> None:
    with pytest.raises(RecordError, match=said):
        Rollout.from_table(table)
