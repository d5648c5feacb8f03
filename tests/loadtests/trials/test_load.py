"""What the load of a trial is told beside its schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadtests.experiments.model import Experiment
from loadtests.experiments.reading import from_table
from loadtests.trials.load import trial_config, why_it_ended
from tests.fakes.trial_context import trial_context


def experiment(slo: dict[str, Any], **more: Any) -> Experiment:
    table: dict[str, Any] = {
        "name": "small",
        "model": {"device": "cpu", "dtype": "float32"},
        "engine": {"max_prompt_tokens": 64, "max_new_tokens": 4},
        "arms": [
            {"name": "eager", "preset": "eager", "control": True},
            {"name": "dynamic", "preset": "compiled-dynamic"},
        ],
        "traffic": {
            **{"arrivals": "saturation", "rates": [4, 64], "duration_s": 80, "step_s": 10, "settle_s": 2},
            **{"length_scale": 0.05},
        },
        "slo": slo,
    }
    return from_table({**table, **more})


def limits(what: Experiment, folder: Path) -> tuple[float, float]:
    config = trial_config(trial_context(folder, what), {"*": "127.0.0.1:1"}, vocab_sizes=[100])
    return config.ttft_limit_ms, config.e2e_limit_ms


@pytest.mark.parametrize(
    ("slo", "known"),
    [
        ({"p99_ttft_ms": 500}, (500.0, 0.0)),
        ({"p99_ttft_ms": 500, "p50_ttft_ms": 200, "p99_e2e_ms": 9000}, (500.0, 9000.0)),
        ({"targets": ["p99_e2e <= 2s"]}, (0.0, 2000.0)),
        ({"p99_ttft_ms": 500, "cold": {"p99_ttft_ms": 5000}}, (500.0, 0.0)),
        # What these count of a request is not known until it ends.
        ({"p99_ttft_ms": 500, "p99_itl_ms": 100}, (0.0, 0.0)),
        ({"p99_ttft_ms": 500, "error_pct": 1.0}, (0.0, 0.0)),
    ],
)
def test_a_search_waits_for_no_request_that_can_change_none_of_its_steps(
    slo: dict[str, Any], known: tuple[float, float], tmp_path: Path
) -> None:
    assert limits(experiment(slo), tmp_path) == known


def test_other_limits_of_goodput_and_other_traffic_wait_for_all(tmp_path: Path) -> None:
    slo = {"p99_ttft_ms": 500}
    assert limits(experiment(slo, goodput={"ttft": 2000}), tmp_path) == (0.0, 0.0)
    poisson = experiment(slo, traffic={"rate": 2, "duration_s": 60, "length_scale": 0.05})
    assert limits(poisson, tmp_path) == (0.0, 0.0)


def test_why_the_load_ended_is_our_own_error_and_none_of_locusts_tables(tmp_path: Path) -> None:
    log = tmp_path / "locust.log"
    table = "Type     Name  50%    66%\n--------|-----|------|-----\n" * 300
    log.write_text(
        "[2026-01-01 00:00:00,000] vm/ERROR/tailgate: load process 0 is lost (it no longer answers)\n"
        "[2026-01-01 00:00:01,000] vm/ERROR/tailgate: every load process is lost: it no longer answers\n"
        f"[2026-01-01 00:00:02,000] vm/INFO/locust.main: Shutting down (exit code 1)\n{table}"
    )
    assert why_it_ended(log) == "every load process is lost: it no longer answers"
    log.write_text("ImportError: no such module\n")
    assert why_it_ended(log) == "ImportError: no such module"
    assert why_it_ended(tmp_path / "none.log") == "no log"
