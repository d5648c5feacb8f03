"""What a run shows to Prometheus, from its status and the files of its load processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from loadtests.generator.load_log import LoadLog
from loadtests.trials.progress import Load, ReplicaState, Status
from loadtests.trials.run_metrics import RunCollector
from servers.clock import now_ns
from tests.fakes.request_records import MS, record

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
    log = LoadLog(folder, worker=worker, planned=10, arms=["eager", "naive"])
    log.start_ns = now_ns()
    for number in range(answers + failed + 1):
        log.begun("eager")
        if number < answers + failed:
            log.ended(record(number, status="OK" if number < answers else "UNAVAILABLE"), "eager")
    log.lag.add(3 * MS)
    log.write()


def test_before_the_first_trial_there_is_where_the_run_stands() -> None:
    samples = shown(Status(phase="preparing", trials=3))
    assert value(samples, "tailgate_run_phase", phase="preparing") == 1
    assert value(samples, "tailgate_run_trials") == 3
    assert value(samples, "tailgate_load_requests_started_total") == 0
    assert not [name for name, _ in samples if name.endswith("_bucket")]


def test_replicas_and_traffic_are_those_of_the_status(tmp_path: Path) -> None:
    status = Status(phase="traffic", trial=2, trials=3, planned=40, duration_s=60.0, load=Load(t_s=7.5))
    status.replicas = {"eager-0": ReplicaState(stage="ready"), "naive-0": ReplicaState(stage="warmup", compiles=4)}
    samples = shown(status)
    assert value(samples, "tailgate_run_replica_ready", replica="eager-0") == 1
    assert value(samples, "tailgate_run_replica_ready", replica="naive-0") == 0
    assert value(samples, "tailgate_run_replica_compile_events_total", replica="naive-0") == 4
    assert value(samples, "tailgate_run_traffic_seconds") == 7.5
    assert value(samples, "tailgate_run_planned_traffic_seconds") == 60.0
    assert value(samples, "tailgate_run_planned_requests") == 40


def test_counters_go_on_over_trials_and_gauges_are_of_the_newest(tmp_path: Path) -> None:
    load(tmp_path / "trial-01", 0, answers=5)
    load(tmp_path / "trial-01", 1, answers=2, failed=1)
    load(tmp_path / "trial-02", 0, answers=4)
    samples = shown(Status(run_dir=tmp_path))
    assert value(samples, "tailgate_load_requests_total", arm="eager", outcome="ok") == 11
    assert value(samples, "tailgate_load_requests_total", arm="eager", outcome="failed") == 1
    assert value(samples, "tailgate_load_requests_total", arm="naive", outcome="failed") == 0
    assert value(samples, "tailgate_load_requests_started_total") == 6 + 4 + 5
    assert value(samples, "tailgate_load_in_flight", arm="eager") == 1
    name = "tailgate_load_time_to_first_token_seconds"
    assert value(samples, f"{name}_count", arm="eager") == 11
    assert value(samples, f"{name}_bucket", arm="eager", le="0.01") == 0
    assert value(samples, f"{name}_bucket", arm="eager", le="0.02") == 11
    assert value(samples, f"{name}_bucket", arm="eager", le="+Inf") == 11
    assert abs(value(samples, f"{name}_sum", arm="eager") - 11 * 0.011) < 1e-6
    assert value(samples, "tailgate_load_schedule_lag_seconds", worker="0", quantile="1") == 0.003
    assert ("tailgate_load_schedule_lag_seconds", (("quantile", "1"), ("worker", "1"))) not in samples
    assert value(samples, "tailgate_load_cpu_seconds_total", worker="1") >= 0


def test_files_that_make_no_sense_are_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "trial-01"
    load(folder, 0, answers=1)
    (folder / "progress-1.json").write_text("{")
    (folder / "progress-2.json").write_text("[]")
    (folder / "generator-1.json").write_text(json.dumps({"cpu": 3, "lag_ms": None, "records": {"written": "x"}}))
    broken: dict[str, Any] = {"arms": {"eager": None}, "histograms": {"eager": {"ttft": 3}}, "started": "many"}
    (folder / "progress-3.json").write_text(json.dumps(broken))
    other = {"bounds_s": [1.0], "counts": [2, 3], "sum_s": 9.0}
    (folder / "progress-4.json").write_text(json.dumps({"histograms": {"eager": {"ttft": other}}}))
    samples = shown(Status(run_dir=tmp_path))
    assert value(samples, "tailgate_load_requests_total", arm="eager", outcome="ok") == 1
    assert value(samples, "tailgate_load_time_to_first_token_seconds_count", arm="eager") == 1
    assert value(samples, "tailgate_load_records_written_total", worker="1") == 0


def test_every_name_says_its_unit_and_no_label_is_without_bound(tmp_path: Path) -> None:
    load(tmp_path / "trial-01", 0, answers=1)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunCollector(Status(run_dir=tmp_path, replicas={"eager-0": ReplicaState()})))
    families = {metric.name: metric for metric in registry.collect()}
    assert all(name.startswith(("tailgate_run_", "tailgate_load_")) for name in families)
    labels = {label for metric in families.values() for sample in metric.samples for label in sample.labels}
    assert labels == {"arm", "outcome", "phase", "quantile", "replica", "worker", "le"}
    assert all(metric.documentation for metric in families.values())
