from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

from loadtests.experiments.reading import from_table
from loadtests.trials.exporter import Exporter
from loadtests.trials.progress import Status
from loadtests.trials.run import Orchestrator
from tests.loadtests.trials.test_exporter import get

FAKE_ARM = Path(__file__).resolve().parents[1] / "fakes" / "arm.py"


def test_while_a_run_lasts_its_arms_and_its_splitter_are_found(tmp_path: Path) -> None:
    experiment = from_table(
        {
            "name": "small",
            "model": {"device": "cpu", "dtype": "float32"},
            "engine": {"max_prompt_tokens": 128, "max_new_tokens": 16},
            "arms": [{"name": "eager", "preset": "eager", "control": True}, {"name": "naive", "preset": "eager"}],
            "traffic": {"duration_s": 3, "rate": 8, "length_scale": 0.05, "block_s": 1, "timeout_s": 10},
            "trials": {"starting_at_once": 2},
            "bed": {"reference_s": 0},
        }
    )
    status = Status()
    run = Orchestrator(
        experiment, out=tmp_path, status=status, arm_command=[sys.executable, str(FAKE_ARM)], metrics=True
    )
    thread = threading.Thread(target=run.run)
    with Exporter(status, "127.0.0.1", 0) as exporter:
        thread.start()
        while thread.is_alive() and "splitter" not in status.pages:
            time.sleep(0.02)
        paths = [row["labels"]["__metrics_path__"] for row in json.loads(get(exporter.port, "/targets")[2])]
        # Arms that start at once are ready in any order.
        assert sorted(paths) == ["/metrics", "/metrics/eager-0", "/metrics/naive-0", "/metrics/splitter"]
        assert [get(exporter.port, path)[0] for path in paths] == [200] * 4
        assert "envoy_cluster_membership_healthy" in get(exporter.port, "/metrics/splitter")[2]
        thread.join(timeout=60)
        assert not thread.is_alive()
        assert status.pages == {}
        body = get(exporter.port, "/metrics")[2]
    answered = 'tailgate_load_requests_total{arm="naive",outcome="ok"}'
    (line,) = [line for line in body.splitlines() if line.startswith(answered)]
    assert float(line.split()[1]) == float(status.planned) / 2 > 10
