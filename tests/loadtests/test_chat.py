"""What the flags of the locustfiles refuse."""

from __future__ import annotations

import os
from unittest.mock import Mock, patch

import pytest

from tailgate.servers.config import Task
from tests.fakes.whole_run import run_locust

# Locust would patch the standard library for every other test in this process.
with patch.dict(os.environ, {"LOCUST_SKIP_MONKEY_PATCH": "1"}):
    from locust.argument_parser import get_empty_argument_parser

    from tailgate.loadtests.workers.by_hand import add_arguments, hand_config

CHAT = "loadtests/chat.py"


@pytest.mark.process
def test_bad_usage_ends_locust_with_one_line() -> None:
    code, output = run_locust("-f", CHAT, "--headless", "--trial", "none")
    assert code == 2
    assert '"none/generator.json"' in output
    assert "Traceback" not in output


REFUSED: list[tuple[Task, str, list[str], tuple[str, ...]]] = [
    ("generate", "nowhere", [], ("nowhere", "host:port")),
    ("generate", "", [], ("--host",)),
    ("generate", "h:1", ["--request-rate", "0"], ("--request-rate", "0")),
    ("generate", "h:1", ["--request-rate", "inf"], ("--request-rate", "inf is not above 0 and finite")),
    ("generate", "https://h:1", ["--tls-ca", "/nowhere/ca.pem"], ("/nowhere/ca.pem",)),
    ("generate", "https://h:1", ["--token-env", "s3cret-T0ken"], ("token_env",)),
    ("embed", "nowhere", [], ("nowhere", "host:port")),
    ("embed", "h:1", ["--max-new-tokens", "8"], ("--max-new-tokens",)),
]


@pytest.mark.parametrize(("task", "host", "flags", "words"), REFUSED)
def test_flags_that_cannot_work_are_refused(
    capsys: pytest.CaptureFixture[str], task: Task, host: str, flags: list[str], words: tuple[str, ...]
) -> None:
    def give() -> None:
        parser = get_empty_argument_parser(add_help=False)
        add_arguments(parser, task=task)
        options = parser.parse_args(flags)
        hand_config(Mock(host=host, parsed_options=options), 1, task=task)

    with pytest.raises((ValueError, SystemExit)) as refused:
        give()
    said = f"{refused.value}{capsys.readouterr().err}"
    assert [word for word in words if word not in said] == [], said
    assert "s3cret" not in said
