import json
import os
import signal
import socket
import urllib.request
from pathlib import Path

import pytest

from analysis.records.documents import content_of
from loadtests.page.access import TOKEN_VARIABLE
from loadtests.trials import live_page
from loadtests.trials.live_page import LivePage, PageAddress
from loadtests.trials.processes import child_environment
from loadtests.trials.progress import ArmLoad, Load, ReplicaState, Status
from servers.fields import ConfigError
from tests.fakes.patience import wait_for

HERE = PageAddress(host="127.0.0.1", port=0)


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "_EVERY_S", 0.05)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("off", None),
        ("127.0.0.1:0", HERE),
        ("[::1]:8080", PageAddress(host="::1", port=8080)),
        ("bench-host:000", PageAddress(host="bench-host", port=0)),
    ],
)
def test_an_address_may_take_a_free_port(text: str, address: PageAddress | None) -> None:
    assert PageAddress.of(text) == address


@pytest.mark.parametrize("text", ["", "on", "8080", ":8080", "host:", "host:65536", "host:-1", "a b:1"])
def test_what_is_no_address_is_refused_with_what_is(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not HOST:PORT: give one such as 127\.0\.0\.1:8080"):
        PageAddress.of(text)


def test_the_page_of_a_run_is_told_its_status_and_its_load(tmp_path: Path) -> None:
    status = Status(phase="traffic", trials=2, planned=90, duration_s=60.0)
    page = LivePage(HERE, status)
    page.open(tmp_path)
    try:
        wait_for(lambda: status.page)
        assert content_of(tmp_path / "page.json")["url"] == status.page
        assert os.getpriority(os.PRIO_PROCESS, page.pid or 0) >= 10
        status.replicas["eager-0"] = ReplicaState(stage="warmup", done=1, total=3)
        for second in (1.0, 2.0):
            arm = ArmLoad(finished=int(second), inflight=3, ttft_p99_ms=120.0)
            status.load = Load(finished=int(second), t_s=second, arms={"eager": arm})
            wait_for(lambda: len((tmp_path / "load.jsonl").read_text().splitlines()) == int(status.load.t_s))
        lines = [json.loads(line) for line in (tmp_path / "load.jsonl").read_text().splitlines()]
        assert [(line["t_s"], line["trial"]) for line in lines] == [(1.0, 1), (2.0, 1)]
        assert lines[1]["arms"]["eager"]["ttft_p99_ms"] == 120.0
        wait_for(lambda: content_of(tmp_path / "status.json")["load"]["t_s"] == 2.0)
        told = content_of(tmp_path / "status.json")
        assert told["replicas"]["eager-0"]["text"] == "warm-up 1/3"
        assert (told["phase"], told["trials"], told["planned"], told["ended"]) == ("traffic", 2, 90, None)
        with urllib.request.urlopen(status.page) as answer:
            assert b"Under load" in answer.read()
    finally:
        page.close({"complete": True})
    assert content_of(tmp_path / "status.json")["ended"] == {"complete": True}
    assert not (tmp_path / "page.json").exists()
    page.close({"complete": False})
    assert content_of(tmp_path / "status.json")["ended"] == {"complete": True}


def test_a_token_is_shown_once_where_it_was_made_and_stands_in_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    for given in ("", "a-token-of-the-user"):
        folder = tmp_path / (given or "made")
        folder.mkdir()
        if given:
            monkeypatch.setenv(TOKEN_VARIABLE, given)
        status = Status()
        page = LivePage(PageAddress(host="0.0.0.0", port=0), status)
        page.open(folder)
        try:
            wait_for(lambda: status.page)  # noqa: B023
        finally:
            page.close({"complete": True})
        address, _, token = status.page.partition("?token=")
        assert bool(token) == (not given)
        assert socket.gethostname() in address
        assert (token or given) not in "".join(path.read_text() for path in folder.rglob("*") if path.is_file())
        assert TOKEN_VARIABLE not in child_environment()


def test_a_page_that_cannot_start_or_dies_is_one_note(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status = Status()
        page = LivePage(PageAddress(host="127.0.0.1", port=port), status)
        page.open(tmp_path)
        wait_for(lambda: status.notes)
        page.close({"complete": True})
    (note,) = status.notes
    assert note.startswith("there is no live page, and the run goes on: it ended with exit code 1: ")
    assert f"127.0.0.1:{port} cannot be listened on: Address already in use" in note

    status = Status()
    page = LivePage(HERE, status)
    page.open(tmp_path)
    wait_for(lambda: status.page)
    os.kill(page.pid or 0, signal.SIGKILL)
    wait_for(lambda: status.notes)
    page.close({"complete": True})
    assert len(status.notes) == 1
    assert "SIGKILL" in status.notes[0]


def test_a_folder_that_cannot_be_written_is_one_note(tmp_path: Path) -> None:
    # A file stands where the folder should, which stops root too.
    (tmp_path / "run").write_text("")
    status = Status()
    page = LivePage(HERE, status)
    page.open(tmp_path / "run")
    page.close({"complete": True})
    assert len(status.notes) == 1
