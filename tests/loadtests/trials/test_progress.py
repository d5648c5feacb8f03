import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from loadtests.trials.progress import ArmLoad, Display, Load, ReplicaState, Status, live_table, plain_line, read_load
from loadtests.trials.under_way import UnderWay


def report(folder: Path, worker: int, arms: dict[str, dict[str, float | None]]) -> None:
    content = {"worker": worker, "finished": 10, "failed": worker, "t_s": 3.0 + worker, "arms": arms}
    (folder / f"progress-{worker}.json").write_text(json.dumps(content))


def test_load_of_several_processes_is_one(tmp_path: Path) -> None:
    report(tmp_path, 0, {"eager": {"n": 30, "ttft_p50_ms": 10.0, "ttft_p99_ms": 20.0, "inflight": 1}})
    report(tmp_path, 1, {"eager": {"n": 10, "ttft_p50_ms": 30.0, "ttft_p99_ms": 15.0, "inflight": 2}})
    load = read_load(tmp_path)
    assert (load.finished, load.failed, load.t_s) == (20, 1, 4.0)
    assert load.arms["eager"] == ArmLoad(finished=40, inflight=3, ttft_p50_ms=15.0, ttft_p99_ms=20.0)


def test_load_before_the_first_report_is_zero(tmp_path: Path) -> None:
    (tmp_path / "progress-0.json").write_text("{")
    assert read_load(tmp_path) == Load()


def test_plain_line_tells_phase_readiness_and_warmup() -> None:
    status = Status(phase="starting arms", trial=2, trials=3)
    status.replicas = {"eager-0": ReplicaState(stage="ready"), "naive-0": ReplicaState("warmup", 1, 4, "2x64")}
    line = plain_line(status, 65.0)
    assert line == "[1:05] · trial 2/3 · starting arms · eager-0: ready · naive-0: warm-up 1/4 2x64"


def test_plain_line_tells_requests_and_live_quantiles() -> None:
    arms = {"eager": ArmLoad(finished=5, ttft_p50_ms=9.26, ttft_p99_ms=250.4, e2e_p99_ms=12_345.0)}
    status = Status(phase="traffic", detail="3 of 9 s", planned=40, load=Load(finished=5, failed=1, arms=arms))
    status.replicas = {"naive-0": ReplicaState(stage="dead")}
    line = plain_line(status, 3.0)
    assert line == (
        "[0:03] · traffic 3 of 9 s · 5/40 requests, 1 failed · "
        "eager ttft p50 9.3 ms p99 250 ms e2e p99 12.35 s · naive-0 is dead"
    )


def test_plain_line_tells_what_compiles_under_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtests.trials.progress.now_ns", lambda: 13 * 10**9)
    compiling = UnderWay(arm="naive", replica="naive-0", kind="compile", start_ns=10**9, shape="2x64")
    status = Status(phase="traffic", load=Load(finished=5, arms={"naive": ArmLoad(finished=5)}))
    status.replicas = {"naive-0": ReplicaState(stage="serving", compiling=compiling)}
    assert plain_line(status, 3.0).endswith("naive-0 is compiling for 12 s (2x64)")


def test_live_table_holds_replicas_arms_and_notes() -> None:
    status = Status(phase="traffic", planned=10, load=Load(finished=5, arms={"eager": ArmLoad(finished=5)}))
    status.replicas = {"eager-0": ReplicaState(stage="ready", compiles=3)}
    status.note("naive-0 died")
    status.page = "http://127.0.0.1:8080/"
    console = Console(file=io.StringIO(), width=120, record=True)
    console.print(live_table(status, 1.0))
    text = console.export_text()
    for expected in (
        "traffic",
        "5/10 requests",
        "eager-0",
        "ready",
        "ttft p99",
        "naive-0 died",
        "live page: http://127.0.0.1:8080/",
    ):
        assert expected in text


def test_display_without_a_terminal_shows_every_phase_and_note_in_lines() -> None:
    out = io.StringIO()
    status = Status(phase="first")
    with Display(status, stream=out, every_s=60.0):
        pass
    status = Status(phase="second")
    with Display(status, stream=out, every_s=60.0):
        status.note("an arm died")
        status.page = "http://127.0.0.1:8080/"
        status.phase = "third"
    lines = out.getvalue().splitlines()
    assert lines[0] == "[0:00] · first"
    assert any("an arm died" in line for line in lines)
    assert any("third" in line for line in lines)
    assert sum("live page: http://127.0.0.1:8080/" in line for line in lines) == 1


def test_a_closed_stream_does_not_break_the_run() -> None:
    out = io.StringIO()
    out.close()
    with Display(Status(), stream=out, every_s=0.01):
        pass
    assert out.closed
