"""External arms: the prompts that they answer twice, and the logs of their compiles."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from benchmarks.simulation.greedy import Server
from tailgate.analysis.records.asked_answers import answers_in
from tailgate.analysis.records.schemas import COMPILE_EVENTS
from tailgate.analysis.records.tables import read_table
from tailgate.loadtests.experiments.reading import from_table
from tailgate.loadtests.external.compile_lines import CompileLog
from tailgate.loadtests.external.log_tail import LogTail
from tailgate.loadtests.trials import external_answers
from tailgate.loadtests.trials.context import StopRequestedError, TrialContext
from tailgate.loadtests.trials.external_answers import PROMPTS, ask_external_arms, greedy_arms, questions
from tailgate.loadtests.trials.external_arms import local_servers
from tailgate.loadtests.trials.server_logs import ServerLogs
from tailgate.loadtests.trials.telemetry import Collector
from tailgate.loadtests.trials.trial_schedule import draw, source_of
from tailgate.servers.clock import now_ns
from tests.fakes.processes import wait_for
from tests.fakes.simulated import GreedyServer, serving
from tests.fakes.whole_run import external_trial, trial_context
from tests.loadtests.external.test_compile_lines import GRAPH, IN_DETAIL, MONITOR, ONCE, RECOMPILE, VERBOSE
from tests.loadtests.external.test_compile_lines import TRITON_LINE as TRITON

SECRET = "s3cret-of-the-server"
THREE = {"prompts": 3, "tokens": 3}


def table(*addresses: Any, **tables: Any) -> dict[str, Any]:
    arms = [
        {"name": f"arm{number}", "kind": "openai", "model_name": "llama", "address": address, "control": number == 0}
        for number, address in enumerate(addresses)
    ]
    traffic = {"rate": 5, "duration_s": 4, "block_s": 1, "timeout_s": 10, "length_scale": 0.05}
    engine = {"max_prompt_tokens": 64, "max_new_tokens": 16}
    whole = {"name": "small", "compare_models": True, "arms": arms, "traffic": traffic, "engine": engine}
    return {**whole, **tables}


def ask(folder: Path, content: dict[str, Any], check: Callable[[], None] = lambda: None) -> None:
    context = trial_context(folder, content, check=check)
    ask_external_arms(context, draw(context.experiment, source_of(context.experiment), 1))


def test_the_process_of_a_server_on_this_host_is_found(tmp_path: Path) -> None:
    with socket.socket() as listening, socket.socket() as bound:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        bound.bind(("127.0.0.1", 0))
        own = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        refusing = f"http://localhost:{bound.getsockname()[1]}/v1"
        # Debian's /etc/hosts has 127.0.1.1 for the host's name.
        debian = "http://127.0.1.1:1/v1"
        context = trial_context(tmp_path / "trial", table(own, refusing, debian, "http://192.0.2.1:8000/v1"))
        own_pid, *unknown = local_servers(context)
        assert own_pid == ("arm0-0", "arm0", os.getpid())
        assert unknown == [("arm1-0", "arm1", None), ("arm2-0", "arm2", None)]


def listening(*rows: tuple[str, int | None]) -> Any:
    found = [
        SimpleNamespace(status=psutil.CONN_LISTEN, laddr=SimpleNamespace(ip=ip, port=8000), pid=pid) for ip, pid in rows
    ]
    return lambda kind: found


@pytest.mark.parametrize(
    ("connections", "found"),
    [
        (listening(("127.0.0.1", 70)), 70),
        (listening(("0.0.0.0", 70)), 70),
        (listening(("::ffff:127.0.0.1", 70)), 70),
        (listening(("127.0.0.1", 70), ("192.0.2.7", 80)), 70),  # another server on another address
        (listening(("127.0.0.1", 71), ("127.0.0.1", 70)), 70),  # its worker
        (listening(("127.0.0.1", 70), ("127.0.0.1", 80)), None),  # workers of a parent that does not listen
        (listening(("127.0.0.1", 70), ("::", None)), None),  # another user's
        (listening(("127.0.0.1", 90)), None),  # listens for a container
        (listening(("127.0.0.1", 99)), None),  # ended meanwhile
        (listening(), None),
        (Mock(side_effect=psutil.AccessDenied()), None),
        (Mock(side_effect=PermissionError()), None),
        (Mock(side_effect=RuntimeError("error while parsing /proc/net/tcp")), None),
    ],
)
def test_a_server_that_is_not_surely_found_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connections: Any, found: int | None
) -> None:
    def process(pid: int) -> Any:
        if pid == 99:
            raise psutil.NoSuchProcess(pid)
        name = "docker-proxy" if pid == 90 else "python"
        return SimpleNamespace(pid=pid, ppid=lambda: {71: 70}.get(pid, 1), name=lambda: name)

    monkeypatch.setattr(psutil, "net_connections", connections)
    monkeypatch.setattr(psutil, "Process", process)
    here = "http://127.0.0.1:8000/v1"
    assert [pid for *_, pid in local_servers(trial_context(tmp_path / "trial", table(here, here)))] == [found, found]


def document(folder: Path, arm: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / f"answers-{arm}.json").read_text())
    return content


def test_every_arm_is_asked_the_same_twice_and_another_replica_the_second_time(tmp_path: Path) -> None:
    servers = [GreedyServer(Server()), GreedyServer(Server()), GreedyServer(Server(name="other"))]
    with ExitStack() as stack:
        addresses = [stack.enter_context(serving(server)) for server in servers]
        content = table(addresses[:2], addresses[2], addresses[0], parity={"prompts": 9, "tokens": 5})
        content["arms"][2]["openai"] = {"endpoint": "chat"}
        ask(tmp_path, content)
    twice, its, chat = (answers_in(document(tmp_path, f"arm{number}")) for number in range(3))
    assert twice is not None
    assert its is not None
    assert chat is not None
    assert [item.digest for item in twice[0]] == [item.digest for item in its[0]]
    assert not {item.digest for item in twice[0]} & {item.digest for item in chat[0]}, (
        "its template makes others of them"
    )
    assert [item.text for item in twice[0]] == [item.text for item in twice[1]]
    assert [item.pieces for item in twice[0]] == [item.asked for item in twice[0]]
    assert max(item.asked for item in twice[0]) == 5
    assert [[item.replica for item in answers][:2] for answers in twice] == [["arm0-0", "arm0-1"], ["arm0-1", "arm0-0"]]
    bodies = servers[2].bodies
    assert len(bodies) == 2 * 9
    # A seed of its own each time, and greedy: a server that samples does not repeat itself.
    assert len({body["seed"] for body in bodies}) == 18
    assert {body["temperature"] for body in bodies} == {0}


def test_the_token_of_a_server_is_in_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASKED_TOKEN", "not-the-server-s")
    refusing = GreedyServer(Server(), token=SECRET)
    with serving(refusing) as one, serving(GreedyServer(Server())) as other:
        content = table(one, other, parity=THREE)
        content["arms"][0]["token_env"] = "ASKED_TOKEN"
        ask(tmp_path, content)
    rows = document(tmp_path, "arm0")["answers"][0]
    assert all("HTTP 401: " in row["error"] and "Bearer ***" in row["error"] for row in rows)
    assert not any("not-the-server-s" in path.read_text() for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.parametrize(("most_s", "words"), [(None, "ConnectionRefusedError"), (0.0, "0 s")])
def test_a_server_that_is_gone_or_one_without_time_costs_answers_and_not_the_run(
    most_s: float | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if most_s is not None:
        monkeypatch.setattr(external_answers, "MOST_S", most_s)
    with serving(GreedyServer(Server())) as here:
        ask(tmp_path, table(here, "http://127.0.0.1:9/v1", parity=THREE))
    rows = document(tmp_path, "arm1")["answers"][0]
    assert all(words in row["error"] for row in rows)


def test_an_interruption_ends_the_round(tmp_path: Path) -> None:
    def check() -> None:
        raise StopRequestedError

    with serving(GreedyServer(Server())) as one, pytest.raises(StopRequestedError):
        ask(tmp_path, table(one, one), check)


def test_a_short_trial_is_asked_about_more_prompts_of_its_lengths() -> None:
    experiment = from_table(table("http://a/v1", "http://b/v1"))
    schedule = draw(experiment, source_of(experiment), 1)
    found = questions(experiment, schedule, contexts=[])
    assert len(schedule) < len(found) == PROMPTS
    assert len({item.prompt_seed for item in found}) == PROMPTS
    assert {item.prompt_tokens for item in found} <= set(schedule.ints("prompt_tokens").tolist())
    assert {item.max_tokens for item in found} == {16}  # engine.max_new_tokens
    # No context left after the longest prompts: these get as many as were planned.
    context = int(schedule.ints("prompt_tokens").max()) + 1
    planned = dict(enumerate(schedule.ints("max_tokens").tolist()))
    for item in questions(experiment, schedule, contexts=[None, context]):
        assert item.max_tokens <= max(context - item.prompt_tokens, planned[item.index])


def test_arms_with_a_managed_control_or_without_the_setting_are_not_asked() -> None:
    assert greedy_arms(from_table(table("http://a/v1", "http://b/v1", parity={"served": False}))) == ()
    content = table("http://a/v1", "http://b/v1")
    content["arms"][0] = {"name": "eager", "preset": "eager", "control": True}
    assert greedy_arms(from_table(content)) == ()


STATS = "(APIServer pid=1) INFO 11-25 22:58:30 [loggers.py:273] Engine 000: Running: 3 reqs, Waiting: 0 reqs"


def write(path: Path, *lines: str) -> None:
    with path.open("a") as file:
        file.write("".join(f"{line}\n" for line in lines))


def followed(trial: TrialContext, during: Callable[[ServerLogs], None]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The events that were recorded while `during` ran, and what trial.json says of the log."""
    collector = Collector(trial.folder, trial=1, status=trial.status)
    logs = ServerLogs(trial, collector)
    try:
        during(logs)
    finally:
        logs.stop(hurry=True)
        collector.stop()
    [facts] = trial.facts.arms[1]["reported"]["logs"]
    return read_table(trial.folder / "compile_events.arrow", COMPILE_EVENTS)[0].to_pylist(), facts


def test_compiles_in_a_log_are_recorded_from_the_trial_s_start(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    write(log, VERBOSE, GRAPH, MONITOR)
    trial = external_trial(tmp_path / "trial-01", {"log": str(log)})
    before_ns = now_ns()

    def during(logs: ServerLogs) -> None:
        write(log, STATS, GRAPH, IN_DETAIL)
        wait_for(lambda: trial.status.replicas["vllm-0"].compiles == 2)
        trial.facts.start_ns = before_ns
        write(log, IN_DETAIL, *RECOMPILE)

    rows, facts = followed(trial, during)
    assert [(row["event_id"], row["kind"], row["phase"]) for row in rows] == [
        ("1-vllm-0-log-0", "compile", None),
        ("1-vllm-0-log-1", "jit", None),
        ("1-vllm-0-log-2", "jit", "serving"),
        ("1-vllm-0-log-3", "recompile", "serving"),
    ]
    assert {(row["trial"], row["arm"], row["replica"]) for row in rows} == {(1, "vllm", "vllm-0")}
    graph, kernel, _, recompile = rows
    assert graph["shape"] == "(1, 8192)"
    assert graph["end_ns"] - graph["start_ns"] == 12_340_000_000
    assert before_ns <= graph["end_ns"] <= now_ns()
    assert (kernel["frame"], kernel["start_ns"]) == ("Triton _fwd_kernel", kernel["end_ns"])
    assert "size mismatch" in recompile["reason"]
    assert (facts["replica"], facts["lines"], facts["events"], facts["blind_spots"]) == ("vllm-0", 8, 4, [])


def test_a_program_s_output_is_followed_and_what_it_leaves_out_is_a_blind_spot(tmp_path: Path) -> None:
    code = f"import sys, time; print({TRITON!r}, file=sys.stderr, flush=True); time.sleep(600)"
    trial = external_trial(tmp_path / "trial-01", {"log_command": [sys.executable, "-c", code]}, replicas=2)
    # One log for two replicas: whose compile it was is not known.
    rows, facts = followed(trial, lambda logs: wait_for(lambda: (trial.logs / "vllm.log").stat().st_size > 0))
    assert [(row["event_id"], row["replica"], row["frame"]) for row in rows] == [
        ("1-vllm-log-0", None, "Triton _fwd_kernel")
    ]
    assert facts["blind_spots"] == [ONCE]
    assert any(ONCE in note for note in trial.status.notes)


def test_compiles_before_the_trial_that_a_program_prints_do_not_count(tmp_path: Path) -> None:
    old = GRAPH.replace("22:58:35", "20:00:00")
    code = f"import time; print({old!r}, {STATS!r}, {IN_DETAIL!r}, sep=chr(10), flush=True); time.sleep(600)"
    trial = external_trial(tmp_path / "trial-01", {"log_command": [sys.executable, "-c", code]})
    rows, facts = followed(trial, lambda logs: wait_for(lambda: trial.status.replicas["vllm-0"].compiles == 1))
    assert [row["kind"] for row in rows] == ["jit"]
    assert (facts["lines"], facts["events"]) == (3, 1)


def test_a_compile_in_a_last_line_without_its_end_counts(tmp_path: Path) -> None:
    code = f"print({VERBOSE!r}, {IN_DETAIL!r}, sep=chr(10), end='')"
    trial = external_trial(tmp_path / "trial-01", {"log_command": [sys.executable, "-c", code]})
    rows, facts = followed(trial, lambda logs: log_ended())
    assert ([row["kind"] for row in rows], facts["lines"]) == (["jit"], 2)


def log_ended() -> None:
    wait_for(lambda: not any(thread.name == "log-vllm-0" for thread in threading.enumerate()))


def test_a_program_that_ends_and_a_silent_log_are_blind_spots(tmp_path: Path) -> None:
    trial = external_trial(tmp_path / "trial-01", {"log_command": [sys.executable, "-c", "raise SystemExit(3)"]})
    rows, facts = followed(trial, lambda logs: log_ended())
    assert rows == []
    unknown, silent, ended = facts["blind_spots"]
    assert all(words in spot for words, spot in (("PyTorch", unknown), ("no line", silent), ("exit code 3", ended)))


def test_a_log_that_cannot_be_read_on_is_a_blind_spot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stumble(self: CompileLog, line: str, arrived_ns: int) -> None:
        raise UnicodeError("odd line")

    monkeypatch.setattr(CompileLog, "take", stumble)
    log = tmp_path / "vllm.log"
    write(log, VERBOSE, MONITOR)
    trial = external_trial(tmp_path / "trial-01", {"log": str(log)})
    _, facts = followed(trial, lambda logs: (write(log, STATS), log_ended())[-1])
    assert any("UnicodeError: odd line" in spot for spot in facts["blind_spots"])


def test_no_line_is_lost_when_a_log_is_rotated(tmp_path: Path) -> None:
    path, rotated = tmp_path / "a.log", tmp_path / "a.log.1"
    write(path, "one")
    tail = LogTail(path)
    write(path, "two")
    path.rename(rotated)
    write(rotated, "three")
    assert list(tail.lines()) == ["two", "three"]  # the server has not begun a new one yet
    write(rotated, "four")
    write(path, "five")
    assert list(tail.lines()) == ["four", "five"]
    write(path, "six")
    assert list(tail.lines()) == ["six"]


def test_an_emptied_log_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    write(path, "one", "two")
    tail = LogTail(path)
    path.write_text("new\n")
    assert list(tail.lines()) == ["new"]
    with pytest.raises(FileNotFoundError):
        LogTail(tmp_path / "none.log")
