"""What each process of a run imports: the time and memory of a library are paid where it is used, and nowhere else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_TORCH = {"torch", "transformers", "pandas"}
_LOAD = {"locust", "gevent"}
_JUDGING = {"scipy", "jinja2", "tailgate.analysis.judging.gates", "tailgate.analysis.report"}
_RECORDS = {"numpy", "pyarrow"}

FORBIDDEN = {
    # `tailgate analyze` judges a recorded run: it starts nothing.
    "tailgate.loadtests.commands.verdict": _TORCH | _LOAD | _JUDGING | {"grpc", "asyncio", "tailgate.loadtests.trials"},
    # The orchestrator judges too, and imports what it needs for that once the traffic is over.
    "tailgate.loadtests.commands.judged_run": _TORCH | _LOAD | _JUDGING | {"prometheus_client", "huggingface_hub"},
    "tailgate.loadtests.monitor.__main__": _TORCH | _LOAD | _JUDGING | _RECORDS | {"grpc", "pydantic"},
    "tailgate.loadtests.page.updates": _TORCH | _LOAD | _JUDGING | {"grpc"},
    "tailgate.analysis.interim.__main__": _TORCH | _LOAD | {"jinja2", "tailgate.analysis.report", "grpc"},
    # Locust brings jinja2.
    "tailgate.loadtests.chat": _TORCH | (_JUDGING - {"jinja2"}) | {"grpc"},
    # What writes a trial's configuration is not patched by gevent.
    "tailgate.loadtests.generator.trial_config": _TORCH | _LOAD,
    # The front of a replica; torch is imported by the engine process that it starts.
    "tailgate.servers.front.serve": _TORCH | _LOAD | _JUDGING | _RECORDS | {"loadtests", "analysis"},
}


@pytest.mark.parametrize("module", FORBIDDEN)
def test_a_process_imports_no_library_that_it_does_not_need(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({FORBIDDEN[module]!r} & set(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == []
