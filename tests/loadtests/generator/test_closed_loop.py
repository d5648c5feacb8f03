"""A closed loop keeps so many requests under way to each arm, whatever the other arm does."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from loadtests.generator.generator import Generator
from loadtests.generator.load_log import LoadLog
from loadtests.generator.record import RequestRecord
from loadtests.generator.trial_config import TrialConfig
from loadtests.traffic.drawing import build_schedule
from loadtests.traffic.schedule import Schedule
from loadtests.traffic.settings import TrafficConfig
from loadtests.traffic.source import Source
from servers.clock import now_ns
from tests.fakes.inference import Behaviour, ServedFake, serve

SECOND = 1_000_000_000


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[ServedFake, ServedFake]]:
    with serve(Behaviour(arm="eager")) as eager, serve(Behaviour(arm="compiled", stall_every=2, stall_s=0.2)) as other:
        yield eager, other


@pytest.fixture(scope="module")
def targets(servers: tuple[ServedFake, ServedFake]) -> dict[str, str]:
    return {"eager": servers[0].target, "compiled": servers[1].target}


def schedule(**changes: Any) -> Schedule:
    config = TrafficConfig(**{"arrivals": "closed", "concurrency": 3, "length_scale": 0.01, **changes})
    return build_schedule(
        config, Source(), arms=("eager", "compiled"), seed=1, trial=1, max_prompt_tokens=64, max_new_tokens=4
    )


def drive(plan: Schedule, targets: dict[str, str], *, workers: int = 1, **changes: Any) -> list[RequestRecord]:
    settings = {"arms": ("eager", "compiled"), "targets": targets, "concurrency": 3, "duration_s": 0.8, "drain_s": 10.0}
    config = TrialConfig(**{**settings, **changes})  # type: ignore[arg-type]
    records: list[RequestRecord] = []
    log = LoadLog(None, worker=0, planned=0, arms=config.arms)
    generator = Generator(config, log=log, on_record=records.append, workers=workers)
    generator.load(plan)
    generator.connect()
    gc.freeze()  # a load process collects garbage before it starts: of a whole suite's objects that takes too long
    assert generator.run(now_ns() + SECOND // 20)
    generator.stop()
    assert generator.failure is None
    return records


def most_at_once(records: list[RequestRecord]) -> int:
    changes = sorted([(record.sent_ns, 1) for record in records] + [(record.end_ns, -1) for record in records])
    running = most = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return most


def by_arm(records: list[RequestRecord]) -> dict[str, list[RequestRecord]]:
    found: dict[str, list[RequestRecord]] = defaultdict(list)
    for record in records:
        found[str(record.arm)].append(record)
    return found


def test_each_arm_has_its_number_under_way_and_goes_at_its_own_pace(targets: dict[str, str]) -> None:
    arms = by_arm(drive(schedule(), targets))
    assert most_at_once(arms["eager"]) == most_at_once(arms["compiled"]) == 3
    assert len(arms["eager"]) > 2 * len(arms["compiled"]) > 5
    # Requests count from their start: a loop that waits has no schedule to be late for.
    assert max(record.sent_ns - record.scheduled_ns for record in arms["eager"]) < SECOND // 10
    # Arms get the same requests in the same order, as far as they come.
    firsts = [{record.pair_id for record in arms[arm]} for arm in ("eager", "compiled")]
    assert firsts[1] <= firsts[0]
    ids = [record.request_id for own in arms.values() for record in own]
    assert len(set(ids)) == len(ids)


def test_num_prompts_are_sent_to_each_arm_once_and_the_loop_ends(targets: dict[str, str]) -> None:
    began = now_ns()
    records = drive(schedule(num_prompts=10), targets, num_prompts=10, duration_s=60.0)
    assert now_ns() - began < 20 * SECOND
    for own in by_arm(records).values():
        assert sorted(record.pair_id for record in own) == sorted(f"1-{index}" for index in range(10))


def test_rows_come_round_again(targets: dict[str, str]) -> None:
    plan = schedule(num_prompts=4)
    own = by_arm(drive(plan, targets, num_prompts=0, duration_s=0.8))["eager"]
    assert {"1-0", "1-0.1", "1-3.2"} <= {record.pair_id for record in own}


def test_a_pause_lies_between_an_answer_and_the_next_request(targets: dict[str, str]) -> None:
    own = by_arm(drive(schedule(concurrency=1), targets, concurrency=1, pause_s=0.1))["eager"]
    own.sort(key=lambda record: record.sent_ns)
    gaps = [after.sent_ns - before.end_ns for before, after in pairwise(own)]
    assert 0.03 * SECOND < sum(gaps) / len(gaps) < 0.4 * SECOND


def test_workers_share_the_number_under_way(targets: dict[str, str]) -> None:
    plan = schedule()
    for worker, slots in ((0, 2), (1, 1)):
        records = drive(plan.share(worker, 2), targets, workers=2, duration_s=0.4)
        assert most_at_once(by_arm(records)["eager"]) == slots
        assert {int(record.pair_id.split("-")[1].partition(".")[0]) % 2 for record in records} == {worker}


def test_the_first_seconds_are_marked(targets: dict[str, str]) -> None:
    records = by_arm(drive(schedule(), targets, rampup_s=0.3))["eager"]
    assert {record.phase for record in records} == {"rampup", "measure"}


def test_an_arm_that_refuses_is_not_hammered() -> None:
    nobody = {"eager": "localhost:1", "compiled": "localhost:1"}
    records = drive(schedule(), nobody, duration_s=0.4)
    assert {record.status for record in records} == {"UNAVAILABLE"}
    assert len(records) <= 2 * 3 * 6
