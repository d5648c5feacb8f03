"""The locustfile by hand against a server that is not tailgate's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.http1 import DONE, HttpPeer, answer, said, scripted, usage
from tests.loadtests.test_chat import CHAT, records, run_locust

GOOD = answer(said("a", chat=True), said(" b", chat=True), said("", finish="length", chat=True), usage(2, 9), DONE)


def test_openai_host_shows_in_locusts_statistics_and_in_the_records(tmp_path: Path) -> None:
    with HttpPeer(scripted([GOOD])) as peer:
        arguments = ["-f", CHAT, "--headless", "-u", "2", "-r", "10", "--num-prompts", "8"]
        arguments += ["--host", peer.address, "--kind", "openai", "--model-name", "llama", "--option", "endpoint=chat"]
        code, output = run_locust(*arguments, "--request-rate", "10", "--arm", "vllm", "--records", str(tmp_path))
    assert code == 0, output
    assert "HTTP     Generate e2e [vllm]" in output
    assert "HTTP     Generate ttft [vllm]" in output
    rows = records(tmp_path)
    assert len(rows) == len(peer.requests) == 8
    assert {(row["arm"], row["replica"], row["status"], row["output_tokens"]) for row in rows} == {
        ("vllm", "vllm-0", "OK", 2)
    }
    assert peer.requests[0].line == "POST /v1/chat/completions HTTP/1.1"
    assert peer.requests[0].json["messages"][0]["role"] == "user"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--kind", "openai", "--host", "http://h/v1"], "needs --model-name"),
        (["--kind", "openai", "--host", "h:1", "--model-name", "m"], "has no scheme"),
        (["--kind", "oip", "--host", "h:1", "--model-name", "m", "--option", "x=1"], "--option.x is unknown"),
        (["--host", "h:1", "--model-name", "m"], "add --kind openai or oip"),
    ],
)
def test_bad_settings_end_locust_with_one_line(arguments: list[str], says: str) -> None:
    code, output = run_locust("-f", CHAT, "--headless", "-t", "1s", *arguments)
    assert code == 2
    assert says in output
    assert "Traceback" not in output
