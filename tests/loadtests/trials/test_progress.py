"""Progress of a run: on the terminal, and as metrics for Prometheus."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from tailgate.analysis.judging.alarms import ServedCompile
from tailgate.loadtests.generator.histogram import ArmTally
from tailgate.loadtests.generator.load_log import LoadLog
from tailgate.loadtests.trials.progress import displayed, parts_of
from tailgate.loadtests.trials.run_metrics import RunCollector, exporting
from tailgate.loadtests.trials.status import ArmLoad, Load, ReplicaState, Status, read_load
from tailgate.servers.clock import now_ns
from tailgate.servers.complaint import ConfigError
from tailgate.servers.front.metrics import FrontMetrics
from tests.fakes.request_rows import MS, record


def report(folder: Path, worker: int, latencies: dict[str, float], *, n: int) -> None:
    arm = {"n": n, "failed": 0, "inflight": worker + 1, "e2e_p50_ms": None, "e2e_p99_ms": None, **latencies}
    content = {"finished": 10, "failed": worker, "t_s": 3.0 + worker, "lag_ms": {"p99": worker}, "arms": {"eager": arm}}
    (folder / f"generator-{worker}.json").write_text(json.dumps(content))


def test_load_of_several_processes_is_added_up(tmp_path: Path) -> None:
    (tmp_path / "generator-2.json").write_text("{")
    (tmp_path / "generator-3.json").write_text('{"finished": 0, "lost": "it never reported"}')
    assert read_load(tmp_path) == Load()
    report(tmp_path, 0, {"ttft_p50_ms": 10.0, "ttft_p99_ms": 20.0}, n=30)
    report(tmp_path, 1, {"ttft_p50_ms": 30.0, "ttft_p99_ms": 15.0}, n=10)
    load = read_load(tmp_path)
    assert (load.finished, load.failed, load.t_s, load.lag_ms) == (20, 1, 4.0, 1.0)
    assert load.arms["eager"] == ArmLoad(finished=40, inflight=3, ttft_p50_ms=30.0, ttft_p99_ms=20.0)


def test_a_line_shows_requests_quantiles_and_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailgate.loadtests.trials.status.now_ns", lambda: 13 * 10**9)
    arms = {"eager": ArmLoad(finished=5, ttft_p50_ms=9.26, ttft_p99_ms=250.4, e2e_p99_ms=12_345.0)}
    status = Status(phase="traffic", detail="3 of 9 s", planned=40, load=Load(finished=5, failed=1, arms=arms))
    compiling = ServedCompile(arm="naive", replica="naive-0", kind="compile", start_ns=10**9, shape="2x64")
    status.replicas = {
        "naive-0": ReplicaState(stage="dead"),
        "naive-1": ReplicaState("warmup", 1, 4, "2x64"),
        "naive-2": ReplicaState(stage="serving", compiling=compiling),
    }
    line = " · ".join(parts_of(status, 65.0))
    for words in (
        "[1:05]",
        "3 of 9 s",
        "5/40 requests of all arms, 1 failed",
        f"last {ArmTally.RECENT_NS / 1e9:g} s: ",
        "p50 9.3 ms",
        "p99 250 ms",
        "p99 12.35 s",
    ):
        assert words in line
    for words in ("naive-0 is dead", "naive-2 is compiling for 12 s (2x64)"):
        assert words in line
    assert "naive-1: warm-up 1/4 2x64" in parts_of(Status(phase="starting", replicas=status.replicas), 65.0)


def test_a_closed_stream_does_not_break_the_run() -> None:
    out = io.StringIO()
    out.close()
    with displayed(Status(), stream=out, every_s=0.01):
        pass
    assert out.closed


def test_a_terminal_shows_a_bar_of_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = io.StringIO()
    out.isatty = lambda: True  # type: ignore[method-assign]
    with displayed(Status(phase="traffic", planned=4, load=Load(finished=1)), stream=out):
        pass
    assert "1/4 requests" in out.getvalue()
    assert "━" * 10 in out.getvalue()


@pytest.mark.parametrize("verbosity", [-1, 0, 1])
def test_every_phase_and_note_is_shown_once_and_with_verbose_what_the_processes_log(
    verbosity: int, tmp_path: Path
) -> None:
    log = tmp_path / "trial-01" / "logs" / "eager-0.log"
    log.parent.mkdir(parents=True)
    log.write_text("warms up\nhalf a li")
    status, out = Status(phase="starting arms", run_dir=tmp_path), io.StringIO()
    with displayed(status, verbosity=verbosity, stream=out, every_s=60.0):
        status.note("eager is ready")
        status.phase = "traffic"
    shown = {-1: [], 0: ["[0:00] eager is ready", "[0:00] · traffic"], 1: ["eager-0: warms up"]}[verbosity]
    lines = out.getvalue().splitlines()
    assert [lines.count(line) for line in shown] == [1] * len(shown)
    assert bool(lines) == (verbosity >= 0)


Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def shown(status: Status) -> Samples:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunCollector(status))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


def load(folder: Path, worker: int, answers: int, failed: int = 0) -> None:
    """One load process of a trial, which has sent this much to "eager" and has one request more under way."""
    folder.mkdir(parents=True, exist_ok=True)
    log = LoadLog(folder, worker=worker, arms=["eager", "naive"])
    log.planned = 10
    log.start_ns = now_ns()
    for number in range(answers + failed + 1):
        log.begun("eager")
        if number < answers + failed:
            log.ended(record(number, status="OK" if number < answers else "UNAVAILABLE"), "eager")
    log.lag.add(3 * MS)
    log.garbage.spent_ms = 500.0
    log.write()


def test_metrics_are_those_of_the_status_and_of_all_load_processes(tmp_path: Path) -> None:
    load(tmp_path, 0, answers=3)
    load(tmp_path, 1, answers=1, failed=1)
    of_traffic = {"arms": {}, "finished": 0, "failed": 0, "t_s": 7.5}  # without lag, processor and records
    (tmp_path / "generator-2.json").write_text(json.dumps(of_traffic))
    status = Status(phase="traffic", trial=2, trials=3, planned=40, duration_s=60.0, load=read_load(tmp_path))
    status.replicas = {"eager-0": ReplicaState(stage="ready"), "naive-0": ReplicaState(stage="warmup", compiles=4)}
    status.replicas["external-0"] = ReplicaState(compiles=None)
    samples = shown(status)
    for name, labels, expected in (
        ("run_phase", {"phase": "traffic"}, 1),
        ("run_replica_ready", {"replica": "eager-0"}, 1),
        ("run_replica_ready", {"replica": "naive-0"}, 0),
        ("run_replica_compile_events_total", {"replica": "naive-0"}, 4),
        ("run_traffic_seconds", {}, 7.5),
        ("run_planned_traffic_seconds", {}, 60),
        ("run_planned_requests", {}, 40),
        ("load_requests_started_total", {}, 7),
        ("load_requests_total", {"arm": "eager", "outcome": "ok"}, 4),
        ("load_requests_total", {"arm": "eager", "outcome": "failed"}, 1),
        ("load_requests_total", {"arm": "naive", "outcome": "ok"}, 0),
        ("load_in_flight", {"arm": "eager"}, 2),
        ("load_time_to_first_token_seconds_count", {"arm": "eager"}, 4),
        ("load_e2e_request_latency_seconds_bucket", {"arm": "eager", "le": "+Inf"}, 4),
        ("load_schedule_lag_seconds", {"worker": "1", "quantile": "1"}, 0.003),
        ("load_gc_seconds_total", {"worker": "1"}, 0.5),
        ("load_records_written_total", {"worker": "2"}, 0),
    ):
        assert value(samples, f"tailgate_{name}", **labels) == pytest.approx(expected), name
    unknown = ("tailgate_run_replica_compile_events_total", (("replica", "external-0"),))
    assert unknown not in samples, "what nothing reports is not 0"
    assert value(shown(Status()), "tailgate_load_requests_started_total") == 0


def test_the_pages_of_processes_are_on_that_of_the_run_which_one_that_is_gone_does_not_break() -> None:
    replicas = {}
    for name in ("eager-0", "naive-0"):
        metrics = FrontMetrics(name.removesuffix("-0"), name)
        metrics.tokens.inc(7)
        replicas[name], _ = start_http_server(0, addr="127.0.0.1", registry=metrics.registry)
    pages = {name: (f"127.0.0.1:{server.server_port}", "/metrics") for name, server in replicas.items()}
    status = Status(pages=pages, trials=3)
    samples = shown(status)
    assert value(samples, "tailgate_output_tokens_total", arm="naive", replica="naive-0") == 7
    replicas["eager-0"].shutdown()
    replicas["eager-0"].server_close()
    samples = shown(status)
    assert {dict(labels)["arm"] for name, labels in samples if name == "tailgate_output_tokens_total"} == {"naive"}
    assert value(samples, "tailgate_run_trials") == 3
    replicas["naive-0"].shutdown()
    replicas["naive-0"].server_close()


def test_a_taken_or_bad_address_for_metrics_is_refused() -> None:
    with exporting(Status(), "127.0.0.1:0") as port:
        with (
            pytest.raises(ConfigError, match=rf"--metrics 127\.0\.0\.1:{port}"),
            exporting(Status(), f"127.0.0.1:{port}"),
        ):
            pass
        with pytest.raises(ConfigError, match="HOST:PORT"), exporting(Status(), "9465"):
            pass
