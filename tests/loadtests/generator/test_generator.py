"""Open-loop dispatch against real gRPC servers in processes of their own. gevent runs here without patching."""

from __future__ import annotations

import gc
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gevent
import pyarrow as pa
import pytest

from tailgate.analysis.records.schemas import REQUESTS
from tailgate.analysis.records.tables import read_table
from tailgate.loadtests.generator.generator import Generator
from tailgate.loadtests.generator.load_log import LoadLog
from tailgate.loadtests.generator.precise_sleep import sleep_until
from tailgate.loadtests.generator.preparer import Preparer
from tailgate.loadtests.generator.record import SERVED_COLUMNS, RequestRecord
from tailgate.loadtests.generator.recorder import RequestRecorder, record_file
from tailgate.loadtests.generator.trial_config import TrialConfig
from tailgate.loadtests.traffic.prompts import prompt_ids
from tailgate.loadtests.traffic.schedule import SCHEDULE, Schedule, planned_requests
from tailgate.servers.clock import now_ns
from tailgate.servers.complaint import ConfigError
from tailgate.servers.rpc.inference_pb2 import GenerateRequest
from tailgate.servers.splitter.envoy import Envoy
from tailgate.servers.splitter.envoy_config import ArmTarget, SplitterConfig
from tests.fakes.inference import Behaviour, serve
from tests.fakes.request_rows import piped, row_of

MS = 1_000_000
SECOND = 1000 * MS
ARMS = ("eager", "compiled")


def schedule(offsets_ms: list[int], *, arm: str | None = "*", tokens: int = 3) -> Schedule:
    same = {"prompt_tokens": 20, "max_tokens": tokens, "arm": arm, "phase": "measure"}
    rows = [
        {"index": number, "offset_ns": offset * MS, "prompt_seed": 100 + number, **same}
        for number, offset in enumerate(offsets_ms)
    ]
    return Schedule(table=pa.Table.from_pylist(rows, schema=SCHEDULE), arms=ARMS)


class Run:
    """One generator run to its end, with its records by request id. `before` is called just before the start."""

    def __init__(
        self,
        plan: Schedule,
        *,
        before: Callable[[Run], object] = lambda run: None,
        recorder: RequestRecorder | None = None,
        **settings: Any,
    ) -> None:
        config = TrialConfig(**{"arms": ARMS, "timeout_s": 10.0, "trial": 1, **settings})
        self.log = LoadLog(None, worker=0, arms=config.arms, recorder=recorder)
        self.records: list[RequestRecord] = []
        self.generator = generator = Generator(config, log=self.log, on_record=self.records.append)
        generator.load(plan)
        generator.connect()
        # The generator collects garbage before it starts; in a test process full of imports that would make it late.
        gc.freeze()
        began = time.monotonic()
        self.start_ns = now_ns() + 50 * MS
        before(self)
        generator.run(self.start_ns)
        self.took_s = time.monotonic() - began
        generator.stop()
        self.failure = generator.failure
        self.by_id = {record.request_id: record for record in self.records}
        assert len(self.by_id) == len(self.records)

    def end_after(self, after_ms: int) -> None:
        self.generator.end_at(self.start_ns + after_ms * MS)

    def statuses(self, arm: str | None = None) -> list[str]:
        return [record.status for record in self.records if arm is None or record.arm == arm]

    def arms(self) -> dict[str, list[RequestRecord]]:
        return {arm: [record for record in self.records if record.arm == arm] for arm in ARMS}


@pytest.fixture(scope="module")
def targets() -> Iterator[dict[str, str]]:
    stalls = Behaviour(arm="compiled", stall_every=2, stall_s=0.5)
    with serve(Behaviour(arm="eager")) as eager, serve(stalls) as compiled:
        yield {"eager": eager.target, "compiled": compiled.target}


@pytest.fixture
def closed() -> Iterator[str]:
    """Yield an address that refuses connections: its port is bound, so no server of the test can get it."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def test_mirrored_copies_start_together_and_records_join_client_and_server(targets: dict[str, str]) -> None:
    run = Run(schedule(list(range(0, 400, 10))), targets=targets)
    assert len(run.records) == 80
    distances = []
    for number in range(40):
        copies = [run.by_id[f"1-{number}-{arm}"] for arm in ARMS]
        assert {copy.pair_id for copy in copies} == {f"1-{number}"}
        assert [copy.replica for copy in copies] == ["eager-0", "compiled-0"]
        assert {copy.scheduled_ns - run.start_ns for copy in copies} == {10 * number * MS}
        distances.append(abs(copies[0].sent_ns - copies[1].sent_ns))
    assert sorted(distances)[20] < 5 * MS
    record = run.by_id["1-0-eager"]
    row = row_of(record)
    assert (record.status, record.error, record.arm) == ("OK", None, "eager")
    assert (record.prompt_tokens, record.max_tokens, record.output_tokens, len(record.token_ns)) == (20, 3, 3, 3)
    assert record.first_token_ns == record.sent_ns + record.token_ns[0]
    assert 0 < row["server_recv_ns"] <= row["server_end_ns"]
    assert None not in [row[name] for name in SERVED_COLUMNS]
    assert record.sent_ns + record.token_ns[-1] <= record.end_ns


def test_a_disk_that_hangs_delays_no_request_and_the_account_tells_what_it_cost(targets: dict[str, str]) -> None:
    """A pipe without a reader stands for the disk."""
    reader, writer = os.pipe()
    recorder = RequestRecorder(piped(writer, most_waiting_bytes=20_000), rows_per_batch=8)
    run = Run(schedule([number // 2 for number in range(1200)], arm="eager"), targets=targets, recorder=recorder)
    account = run.log.account()
    assert account["finished"] == account["started"] == 1200
    assert run.log.lag.quantile_ms(0.5) < 500  # where it waited for the disk, it would wait for ever
    assert account["records"]["waiting_bytes"] <= 20_000
    assert account["records"]["dropped"] > 200
    assert recorder.file.rows + account["records"]["dropped"] < 1200  # some still wait
    os.close(reader)


def test_stalled_answers_do_not_delay_later_requests(targets: dict[str, str]) -> None:
    offsets = list(range(0, 500, 25))
    run = Run(schedule(offsets, arm="compiled"), targets=targets)
    records = [run.by_id[f"1-{number}-compiled"] for number in range(len(offsets))]
    assert [record.scheduled_ns for record in records] == [run.start_ns + offset * MS for offset in offsets]
    assert max(record.e2e_ms for record in records) > 500
    lags = sorted(record.sent_ns - record.scheduled_ns for record in records)
    assert lags[0] >= 0
    assert lags[len(lags) // 2] < 20 * MS
    assert run.log.lag.max_ms < 500  # below the stall: nothing waited for an answer


def test_a_replica_that_refuses_or_is_slow_gets_few_requests(targets: dict[str, str], closed: str) -> None:
    plan = schedule(list(range(0, 500, 25)), arm="eager")
    with serve(Behaviour(first_s=0.3, replica="slow")) as slow:
        run = Run(plan, targets={"eager": f"{closed},{slow.target},{targets['eager']}"})
    counts = Counter(record.replica or record.status for record in run.records)
    assert 1 <= counts["UNAVAILABLE"] < 5  # one a second
    assert 0 < counts["slow"] < 8
    assert run.statuses().count("OK") == 20 - counts["UNAVAILABLE"]


@pytest.mark.process
def test_requests_pass_the_real_splitter_and_learn_their_arm_even_when_they_fail(tmp_path: Path) -> None:
    with serve(Behaviour(arm="eager")) as eager, serve(Behaviour(arm="compiled", fail_every=3)) as compiled:
        arms = tuple(
            ArmTarget(name=name, backends=(fake.target,)) for name, fake in zip(ARMS, (eager, compiled), strict=True)
        )
        with Envoy(SplitterConfig(arms=arms), log_path=tmp_path / "envoy.log", work_dir=tmp_path) as envoy:
            envoy.wait_ready(30)
            pinned, free, lost = (
                Run(schedule(list(range(0, until_ms, 10)), arm=arm), targets={"*": envoy.target})
                for until_ms, arm in ((240, "*"), (600, None), (10, "missing"))
            )
    assert {arm: Counter(pinned.statuses(arm)) for arm in ARMS} == {
        "eager": {"OK": 24},
        "compiled": {"OK": 16, "RESOURCE_EXHAUSTED": 8},
    }
    assert len(free.records) == 60
    assert {record.arm for record in free.records} == set(ARMS)
    assert {record.arm for record in free.records if record.status != "OK"} == {"compiled"}
    assert (lost.records[0].arm, lost.records[0].status in ("OK", "")) == ("missing", False)
    assert lost.records[0].error


def test_stop_records_what_is_in_flight_as_cancelled() -> None:
    def stop(run: Run) -> None:
        gevent.spawn_later(0.4, run.generator.stop)

    with serve(Behaviour(first_s=30)) as slow:
        plan = schedule([0, 10, 20, 9_000], arm=None)
        run = Run(plan, targets={"*": slow.target}, before=stop)
    assert run.statuses() == ["CANCELLED"] * 3  # the fourth was never due
    assert {record.error for record in run.records} == {"cut by the end of the run"}
    assert (run.log.started, run.log.account()["finished"]) == (3, 3)


def test_the_lag_counts_from_the_schedule_and_nothing_starts_once_it_was_stopped(targets: dict[str, str]) -> None:
    # A dispatcher or a user whose instant has come in the same turn of the loop still runs once.
    log = LoadLog(None, worker=0)
    generator = Generator(TrialConfig(arms=ARMS, trial=1, targets=targets), log=log)
    generator.connect()
    plan = next(iter(planned_requests(schedule([0]).table, at_once=1)))
    generator.launch(generator.prepare(plan, "1-0"), now_ns() - SECOND)
    assert 1_000 <= log.lag.max_ms < 60_000
    generator.stop()
    generator.launch(generator.prepare(plan, "1-1"), now_ns())
    assert (log.started, log.account()["finished"]) == (2, 2)
    assert generator.wait_idle(0)


def test_a_disk_that_takes_no_record_ends_the_load(targets: dict[str, str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    recorder = RequestRecorder(piped(writer), rows_per_batch=1)
    run = Run(schedule(list(range(0, 3000, 10)), arm="eager"), targets=targets, recorder=recorder)
    assert (run.failure or "").startswith("records cannot be written: ")
    assert run.log.error == run.failure
    assert len(run.records) < 150


def test_copies_carry_the_same_prompt_and_their_own_id() -> None:
    config = TrialConfig(arms=ARMS, targets={"*": "localhost:1"}, vocab_size=300)
    generator = Generator(config, log=LoadLog(None, worker=0))
    row = next(planned_requests(schedule([0]).table))
    copies = generator.prepare(row, "1-0")
    assert [copy.arm for copy in generator.prepare(row._replace(index=1), "1-1")] == ["compiled", "eager"]
    generator.stop()
    requests = [GenerateRequest.FromString(copy.body) for copy in copies]
    assert [request.request_id for request in requests] == ["1-0-eager", "1-0-compiled"]
    assert [list(request.token_ids.ids) for request in requests] == [prompt_ids(row, 300)] * 2
    settings = {(request.max_tokens, request.ignore_eos, request.session_id) for request in requests}
    assert settings == {(3, True, "1-0")}
    assert b"x-tailgate-session\x031-0" in copies[0].headers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "generator.targets is empty"),
        ('{"targets": {"*": "nowhere"}}', 'target "nowhere" is not host:port'),
        *((text, "trial config ") for text in ("", "[" * 5000)),
    ],
)
def test_bad_trial_config_is_one_clear_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "generator.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        TrialConfig.read(tmp_path / "generator.json")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_due_at_the_end_or_later_is_sent_and_what_is_under_way_ends_by_itself(targets: dict[str, str]) -> None:
    def end(run: Run) -> None:
        run.end_after(300)
        run.generator.end_arm_at("compiled", run.start_ns + 200 * MS)

    # The answers of 40 tokens are under way when the load ends. Nothing sleeps until the last request.
    run = Run(schedule([*range(0, 3000, 20), 60_000], tokens=40), targets=targets, before=end)
    assert run.took_s < 20
    for arm, last_ms in (("eager", 280), ("compiled", 180)):
        due_ms = sorted((record.scheduled_ns - run.start_ns) // MS for record in run.arms()[arm])
        assert due_ms == [*range(0, last_ms + 1, 20)]
    assert set(run.statuses()) == {"OK"}
    assert run.log.planned == 15 + 10


def test_an_end_holds_where_the_loop_was_blocked_as_it_came(targets: dict[str, str]) -> None:
    def end(run: Run) -> None:
        sleep_until(run.start_ns + 100 * MS)
        run.end_after(499)
        sleep_until(run.start_ns + 490 * MS)
        time.sleep(0.06)  # no greenlet runs: what is due meanwhile comes all at once

    run = Run(schedule([0, 500]), targets=targets, before=partial(gevent.spawn, end))
    assert (len(run.records), run.log.planned) == (2, 2)


@pytest.mark.process
def test_what_was_due_before_the_settled_time_is_in_the_file(targets: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "requests.arrow"
    seen: list[tuple[int, list[int]]] = []

    def check(run: Run) -> None:
        while True:
            gevent.sleep(0.2)
            if run.log.settled_ns:
                seen.append((run.log.settled_ns, read_table(file, REQUESTS)[0]["scheduled_ns"].to_pylist()))

    recorder = RequestRecorder(record_file(file))
    run = Run(
        schedule(list(range(0, 2000, 20)), tokens=10),
        targets=targets,
        recorder=recorder,
        before=partial(gevent.spawn, check),
    )
    due = [record.scheduled_ns for record in run.records]
    assert seen
    for settled_ns, recorded in seen:
        assert sum(at < settled_ns for at in recorded) == sum(at < settled_ns for at in due)


def test_a_schedule_that_cannot_be_encoded_is_a_failure() -> None:
    failures: list[str] = []
    broken = Mock(side_effect=ValueError("no words"))
    assert list(Preparer(schedule([0]), prepare=broken, on_failure=failures.append).ready) == []
    assert failures == ["the schedule cannot be encoded: no words"]


def test_a_sleep_never_ends_early() -> None:
    for ahead_ms in [-1.0, 0.0, 0.05, 0.4, 3.0] * 20:
        due = now_ns() + int(ahead_ms * 1e6)
        sleep_until(due)
        assert now_ns() >= due


def test_others_run_while_one_sleeps_and_a_killed_sleeper_leaves_a_timer_that_wakes_nothing() -> None:
    turns: list[int] = []

    def other() -> None:
        for turn in range(5):
            turns.append(turn)
            gevent.sleep(0)

    sleeper = gevent.spawn(sleep_until, now_ns() + MS)
    gevent.sleep(0)
    sleeper.kill()
    gevent.spawn(other)
    due = now_ns() + 1_400_000
    sleep_until(due)
    assert now_ns() >= due
    assert turns == [0, 1, 2, 3, 4]


def test_the_kernels_timer_costs_no_core() -> None:
    used, began = time.thread_time(), time.perf_counter()
    for _ in range(300):
        sleep_until(now_ns() + MS)
    assert time.thread_time() - used < 0.5 * (time.perf_counter() - began)
