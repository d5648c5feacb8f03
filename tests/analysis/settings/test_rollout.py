from __future__ import annotations

from typing import Any

import pytest

from analysis.records.tables import RecordError
from analysis.settings.rollout import Rollout


def test_a_table_gives_load_and_gpus_and_the_rest_is_ignored() -> None:
    assert Rollout.from_table({}) == Rollout(load_rps=None, gpus_per_replica=1)
    found = Rollout.from_table({"load_rps": 200, "gpus_per_replica": 2.0, "colour": "blue"})
    assert found == Rollout(load_rps=200.0, gpus_per_replica=2)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"load_rps": 0}, "rollout.load_rps is 0: give a value from"),
        ({"load_rps": "many"}, "rollout.load_rps is 'many': give a number"),
        ({"load_rps": True}, "rollout.load_rps is True: give a number"),
        ({"load_rps": float("nan")}, "rollout.load_rps is nan: give a number"),
        ({"gpus_per_replica": 1.5}, "rollout.gpus_per_replica is 1.5: give a whole number"),
        ({"gpus_per_replica": 0}, "rollout.gpus_per_replica is 0: give a value from 1"),
    ],
)
def test_what_cannot_be_used_is_named(table: dict[str, Any], said: str) -> None:
    with pytest.raises(RecordError, match=said):
        Rollout.from_table(table)
