"""Rows of what shadows got: times moved by what the splitter saw, whatever became of request and copy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from analysis.records.schemas import REQUESTS
from loadtests.trials import shadow_rows
from loadtests.trials.shadow_rows import REQUEST_LOG, ShadowRows, shadow_row
from servers.splitter.access_log import LoggedRequest

MS = 1_000_000
START = 1_700_000_000_000 * MS


def request(**changes: Any) -> dict[str, Any]:
    """A request as its client saw it: sent 1 ms late, its first token after 20 ms, its end after 100 ms."""
    row: dict[str, Any] = dict.fromkeys(REQUESTS.names)
    row |= {"request_id": "1-7", "pair_id": "1-7", "session_id": "s", "turn": 0, "trial": 1, "arm": "eager"}
    row |= {"scheduled_ns": START, "sent_ns": START + MS, "first_token_ns": START + 20 * MS, "status": "OK"}
    row |= {"end_ns": START + 100 * MS, "prompt_tokens": 9, "max_tokens": 8, "output_tokens": 8, "phase": "measure"}
    return {**row, **changes}


def logged(arm: str, first_ms: int | None, end_ms: int, **changes: Any) -> LoggedRequest:
    row = LoggedRequest(
        ended=True,
        connection=1,
        address="127.0.0.1:50051",
        arm=arm,
        copy=arm != "eager",
        request_id="1-7",
        session_id="s",
        pinned=False,
        replica=f"{arm}-0",
        path="/tailgate.v1.Inference/Generate",
        start_ns=START,
        first_ns=None if first_ms is None else first_ms * MS,
        end_ns=end_ms * MS,
        status="OK",
        error="",
        figures={"output_tokens": 8, "queue_ns": 5, "recv_ns": 77},
    )
    return replace(row, **changes)


ORIGINAL = logged("eager", 18, 97)


def test_a_copy_is_later_than_its_request_by_what_the_splitter_saw() -> None:
    row = shadow_row(request(), ORIGINAL, logged("dark", 28, 137))
    assert row["first_token_ns"] == START + 30 * MS
    assert row["end_ns"] == START + 140 * MS
    assert (row["arm"], row["replica"], row["status"], row["error"]) == ("dark", "dark-0", "OK", None)
    assert (row["pair_id"], row["scheduled_ns"], row["sent_ns"]) == ("1-7", START, START + MS)
    assert (row["output_tokens"], row["queue_ns"], row["server_recv_ns"]) == (8, 5, 77)
    assert row.keys() <= set(REQUESTS.names)


def test_a_copy_that_does_as_its_request_has_its_times() -> None:
    row = shadow_row(request(), ORIGINAL, replace(ORIGINAL, arm="dark", copy=True))
    assert (row["first_token_ns"], row["end_ns"]) == (START + 20 * MS, START + 100 * MS)


def test_times_of_a_copy_count_from_the_sending_where_its_request_failed() -> None:
    failed = request(status="UNAVAILABLE", first_token_ns=None, end_ns=START + 3 * MS)
    for original in (None, logged("eager", None, 2, status="UNAVAILABLE")):
        row = shadow_row(failed, original, logged("dark", 28, 137))
        assert (row["status"], row["first_token_ns"], row["end_ns"]) == ("OK", START + 29 * MS, START + 138 * MS)


def test_a_copy_that_failed_has_its_status_and_no_first_token() -> None:
    broken = logged("dark", 28, 30, status="INTERNAL", error="the engine failed", figures={})
    row = shadow_row(request(), ORIGINAL, broken)
    assert (row["status"], row["error"], row["first_token_ns"]) == ("INTERNAL", "the engine failed", None)
    assert row["output_tokens"] == 0


def test_a_vector_has_no_tokens() -> None:
    row = shadow_row(request(first_token_ns=None, output_tokens=None), ORIGINAL, logged("dark", 28, 30), tokens=False)
    assert (row["first_token_ns"], row["output_tokens"]) == (None, None)


def test_lines_of_copies_that_outlived_all_waiting_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shadow that hangs for long: its copies end when nobody waits for them any more, of 2,000 requests."""
    clock_ns = [START]
    monkeypatch.setattr(shadow_rows, "now_ns", lambda: clock_ns[0])
    monkeypatch.setattr(shadow_rows, "parse_line", lambda text: logged("dark", 28, 137, request_id=text))
    arms = [SimpleNamespace(name="eager", control=True), SimpleNamespace(name="dark", control=False)]
    traffic = SimpleNamespace(timeout_s=1.0)
    experiment = SimpleNamespace(arms=arms, task="generate", traffic=traffic)
    context: Any = SimpleNamespace(experiment=experiment, folder=tmp_path, logs=tmp_path, facts=SimpleNamespace())
    rows = ShadowRows(context)
    most = 0
    with (tmp_path / REQUEST_LOG).open("a") as log:
        for second in range(200):
            log.writelines(f"1-{second}-{number}\n" for number in range(10))
            log.flush()
            clock_ns[0] += 1_000 * MS
            rows.poll()
            most = max(most, len(rows._copies))
    assert len(rows._lines_ns) == len(rows._copies)
    assert most <= 10 * (2 * 1 + 5 + 1)  # twice the limit of a request and five seconds
    rows.close()
