"""The locustfile for embeddings in real Locust processes: by hand, and chat.py under an embedding's schedule."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from loadtests.traffic.drawing import build_schedule
from loadtests.traffic.settings import TrafficConfig
from loadtests.traffic.source import Source
from tests.fakes.inference import Behaviour, serve
from tests.fakes.locust_process import records, run_locust

BY_HAND = ["-f", "loadtests/embed.py", "--headless", "--stop-timeout", "5"]


def test_headless_run_by_hand_records_answers_without_tokens(tmp_path: Path) -> None:
    with serve(Behaviour(fail_every=10, empty_every=7)) as server:
        arguments = [*BY_HAND, "--host", server.target, "-u", "2", "-r", "2", "--request-rate", "20"]
        arguments += ["--num-prompts", "50", "--goodput", "e2e:5000", "--records", str(tmp_path)]
        code, output = run_locust(*arguments, "--json-file", str(tmp_path / "out"))
    assert "Traceback" not in output
    assert code == 1, output  # Locust's own rule: some requests failed
    rows = records(tmp_path)
    assert len(rows) == 50
    assert Counter(row["status"] for row in rows) == {"OK": 38, "RESOURCE_EXHAUSTED": 5, "INTERNAL": 7}
    assert {row["error"] for row in rows if row["status"] == "INTERNAL"} == {
        "the answer ended with OK and holds no vector"
    }
    for name in ("first_token_ns", "token_ns", "output_tokens", "max_tokens"):
        assert {row[name] for row in rows} == {None}, name
    good = [row for row in rows if row["status"] == "OK"]
    assert all(1 <= row["prompt_tokens"] <= 128 for row in good)
    assert len({row["prompt_tokens"] for row in good}) > 10
    assert all(row["padded_length"] == row["prompt_tokens"] + 1 for row in good)  # from the trailers
    assert all(row["server_recv_ns"] <= row["server_end_ns"] <= row["end_ns"] for row in good)
    stats = {row["name"]: row for row in json.loads((tmp_path / "out.json").read_text())}
    assert stats["Embed e2e [eager]"]["num_requests"] == 38 + 7
    assert not any("ttft" in name for name in stats)
    assert "38 of 45 requests (84.44 %) within e2e 5000 ms" in output


def test_chat_replays_a_schedule_of_embeddings(tmp_path: Path) -> None:
    traffic = TrafficConfig(duration_s=2.0, rate=25.0, workload="sentences")
    schedule = build_schedule(
        traffic, Source(), arms=["eager", "compiled"], seed=1, trial=1, max_prompt_tokens=64, max_new_tokens=0
    )
    schedule.write(tmp_path / "schedule.arrow")
    with serve(Behaviour(arm="eager")) as eager, serve(Behaviour(arm="compiled")) as compiled:
        targets = {"eager": eager.target, "compiled": compiled.target}
        config = {"task": "embed", "arms": ["eager", "compiled"], "targets": targets, "drain_s": 10}
        (tmp_path / "generator.json").write_text(json.dumps(config))
        files = ["--schedule", str(tmp_path / "schedule.arrow"), "--trial-config", str(tmp_path / "generator.json")]
        code, output = run_locust("-f", "loadtests/chat.py", "--headless", *files, "--records", str(tmp_path))
    assert code == 0, output
    rows = records(tmp_path)
    assert Counter(row["status"] for row in rows) == {"OK": 2 * len(schedule)}
    assert {row["output_tokens"] for row in rows} == {None}
    assert "Embed e2e [compiled]" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--goodput", "ttft:200"], "--goodput names ttft, and an embedding has no tokens"),
        (["--workload", "conversation"], "invalid choice: 'conversation'"),
        (["--max-new-tokens", "8"], "unrecognized arguments: --max-new-tokens"),
    ],
)
def test_what_has_no_meaning_for_an_embedding_is_one_clear_line(arguments: list[str], message: str) -> None:
    code, output = run_locust(*BY_HAND, "--host", "localhost:1", "-u", "1", "-t", "1s", *arguments)
    assert code == 2
    assert message in output
    assert "Traceback" not in output
