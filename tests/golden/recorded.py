"""Two recorded runs, judged as any run is: `demo` (90 s: FAIL and INCONCLUSIVE) and `rollout` (14 min: PASS).

Run `python -m tests.golden.recorded` to write the golden files again after a wanted change.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tailgate.analysis.summary.summary import analyze
from tests.fakes.runs import Compile, FakeArm, FakeRun, write_run

GOLDEN = Path(__file__).parent
ENVIRONMENT = {
    "python": "3.11.11",
    "platform": "Linux 6.1 x86_64",
    "versions": {"tailgate": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0", "locust": "2.47.0"},
    "git_commit": "4b1f0c6e2a7d5f8091b3c4d5e6f708192a3b4c5d",
    "cpu": {"model": "AMD EPYC 7R13", "count": 2, "usable": 2},
    "memory_bytes": 25_769_803_776,
    "gpus": [],
    "clock": {"source": "CLOCK_MONOTONIC + anchor"},
}
SLO = {"p99_ttft_ms": 2000, "p99_e2e_ms": 9000}

EAGER = FakeArm(
    name="eager",
    enabled=False,
    warmed={"prefill 1x191": 0.09, "prefill 1x65": 0.05, "decode 4@239": 0.03},
)
PADDED = FakeArm(
    name="compiled-padded",
    ratio=0.9,
    padding=2.0,
    warmed={"prefill 1x192": 8.64, "decode 4@240": 6.11},
)
MISMATCH = "tensor 'input_ids' size mismatch at"
MASK = (
    "0/1: 16 <= L['input_ids'].size()[1]  # attn_mask = prepare_mask(input_ids, cache)\n"
    f"0/0: {MISMATCH} index 1. expected 52, actual 64"
)
ROTARY = "1/1: L['position_ids'].size()[0] <= 4  # rotary = self.rotary_emb(hidden, position_ids)"
UPDATE = "0/2: L['input_ids'].size()[1] <= 160  # self.cache.update(keys, values, rows)"
HEADS = (
    "1/2: Eq(s0, 8): duck-shaped with the number of heads (8); guard added by "
    "`assert hidden.shape[0] != self.num_heads` in attention forward"
)
NAIVE = FakeArm(
    name="compiled-naive",
    ratio=0.95,
    warmed={"prefill 1x5": 6.9, "decode 1@6": 4.52},
    compiles=[
        Compile(at_s=at_s, seconds=seconds, shape=shape, reason=reason)
        for at_s, seconds, shape, reason in (
            (6.31, 8.95, "prefill [1, 137]", f"0/0: {MISMATCH} index 1. expected 52, actual 137"),
            (21.87, 3.25, "prefill [1, 64] (mark_dynamic)", MASK),
            (33.4, 5.21, "decode [3, 1]", f"1/0: {MISMATCH} index 0. expected 2, actual 3"),
            (47.02, 4.17, "decode [5, 1]", ROTARY),
            (61.55, 6.43, "prefill [1, 192]", UPDATE),
            (77.2, 3.13, "decode [8, 1]", HEADS),
        )
    ],
)
_SHAPES = [f"prefill 1x{size}" for size in (192, 128, 64, 32)]
_SHAPES += [f"decode {batch}@{size}" for size in (240, 128) for batch in (4, 3, 2, 1)]
BUCKETED = FakeArm(
    name="compiled-bucketed",
    ratio=0.8,
    padding=1.2,
    warmed={shape: round(9.2 - 0.53 * place, 2) for place, shape in enumerate(_SHAPES)},
)

_SHARED: dict[str, Any] = {"rate": 2.0, "slo": SLO, "environment": ENVIRONMENT}
RUNS = {
    "demo": FakeRun(name="demo", seed=20231116, arms=(EAGER, PADDED, NAIVE), duration_s=90.0, lag_ms=2.4, **_SHARED),
    "rollout": FakeRun(
        name="rollout", seed=7, arms=(EAGER, BUCKETED), duration_s=420.0, trials=2, lag_ms=2.1, **_SHARED
    ),
}


def golden(name: str) -> dict[str, Any]:
    """The golden summary."""
    return json.loads((GOLDEN / name / "summary.json").read_text(encoding="utf-8"))


def summary_of(name: str, folder: Path) -> dict[str, Any]:
    """What `analyze` says of the run, which is recorded in `folder`; numbers to six digits, those of every machine."""
    return _rounded(analyze(write_run(folder / f"20251121-080000-{name}", RUNS[name])))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def encoded(summary: dict[str, Any]) -> str:
    """`summary` as the golden file holds it: indented, but with one line for each innermost list or record."""
    lines = []
    for key in sorted(summary):
        value = summary[key]
        if isinstance(value, list):
            body = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in value)
            lines.append(f'"{key}": [\n{body}\n]' if value else f'"{key}": []')
        else:
            lines.append(f'"{key}": {json.dumps(value, ensure_ascii=False)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    """All golden files are as today's code writes them."""
    from tailgate.analysis.report.rendering import junit_xml, markdown_report

    for name in RUNS:
        folder = GOLDEN / name
        with tempfile.TemporaryDirectory() as place:
            summary = summary_of(name, Path(place))
        (folder / "summary.json").write_text(encoded(summary), encoding="utf-8", newline="\n")
        (folder / "report.md").write_text(markdown_report(summary), encoding="utf-8", newline="\n")
        (folder / "junit.xml").write_text(junit_xml(summary), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
