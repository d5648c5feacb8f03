"""The fault campaign: `python -m tests.faults.campaign --runs 300 --seed 1`.

Plans faults from seeds, injects them into live runs, and holds every run against every promise. Run N of seed S is seed
S + N: `--seed N --runs 1` carries out the plan of N again. A line of JSON a run goes to --out as soon as it is over.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.faults.live_run import carry_out
from tests.faults.plan import DEFAULT, FAMILIES, KINDS, Plan, covering, plan
from tests.faults.promises import PROMISES, breaches, lost_s
from tests.faults.story import Story


def row(story: Story) -> dict[str, Any]:
    """One line of the campaign's file."""
    run = story.run
    return {
        "seed": story.plan.seed,
        "kind": story.plan.kind,
        "truth": story.plan.truth,
        "family": story.plan.family,
        "quick": story.plan.quick,
        "faults": [
            {"fault": item.moment.fault.name, "phase": item.phase, "hit": item.hit, "lasts_s": item.moment.lasts_s}
            for item in story.injected
        ],
        "not_reached": len(story.plan.moments) - len(story.injected),
        "code": run.code,
        "verdict": story.verdict,
        "complete": run.line.get("complete"),
        "analyzed": None if story.analysis is None else story.analysis.code,
        "took_s": round(run.took_s, 1),
        "limit_s": round(run.limit_s, 1),
        "gone_after_s": round(story.gone_after_s, 2),
        "lost_s": round(lost_s(story), 3) if lost_s(story) != float("inf") else None,
        "breaches": breaches(story),
    }


def carried_out(planned: Plan, keep: Path | None = None) -> dict[str, Any]:
    """The line of one run. Its folder stays in `keep` where a promise was broken."""
    with tempfile.TemporaryDirectory(prefix="tailgate-faults-", ignore_cleanup_errors=True) as place:
        folder = Path(place) / "run"
        folder.mkdir()
        line = row(carry_out(planned, folder))
        if line["breaches"] and keep is not None:
            shutil.copytree(folder, keep / f"seed-{planned.seed}", dirs_exist_ok=True)
    return line


def table(rows: Sequence[dict[str, Any]]) -> str:
    """How often each promise held, each fault came, and each truth got which verdict."""
    lines = [f"{'promise':<36}held  of    seeds that broke it"]
    for name in PROMISES:
        judged = [row for row in rows if _is_held_to(row, name)]
        broken = [row["seed"] for row in judged if name in row["breaches"]]
        lines.append(f"{name:<36}{len(judged) - len(broken):<6}{len(judged):<6}{' '.join(map(str, broken))}")
    came = Counter(fault["fault"] for row in rows for fault in row["faults"] if fault["hit"])
    lines += ["", *(f"{count:>5}  {name}" for name, count in came.most_common())]
    said = Counter((row["truth"], row["verdict"] or "none") for row in rows)
    lines += ["", *(f"{count:>5}  {truth}: {verdict}" for (truth, verdict), count in sorted(said.items()))]
    return "\n".join(lines)


def _is_held_to(row: dict[str, Any], promise: str) -> bool:
    match promise:
        case "goes on once faults are lifted":
            return bool(row["family"] != "safety")
        case "can be judged afterwards":
            return row["analyzed"] is not None
    return True


def main() -> int:
    """0 where every promise held, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.campaign", description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1, help="of the first run")
    parser.add_argument("--quick", action="store_true", help="the short plans that make test carries out")
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(DEFAULT))
    parser.add_argument("--kind", choices=KINDS, help="runs of one kind alone")
    parser.add_argument("--out", type=Path, default=Path("faults.jsonl"), help="a line a run (default %(default)s)")
    parser.add_argument("--keep", type=Path, help="folder for the files of runs that broke a promise")
    parser.add_argument("--plans", action="store_true", help="print the plans alone")
    parser.add_argument("--covering", action="store_true", help="the quick plans of make test, which cover the most")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what runs is ended in order
    rows = []
    seeds = covering(options.runs) if options.covering else range(options.seed, options.seed + options.runs)
    for seed in seeds:
        planned = plan(seed, quick=options.quick or options.covering, families=options.families, kind=options.kind)
        print(planned, flush=True)
        if options.plans:
            continue
        began_s = time.monotonic()
        line = carried_out(planned, options.keep)
        rows.append(line)
        with options.out.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")
        what = "; ".join(f"{name}: {'; '.join(found)}" for name, found in line["breaches"].items()) or "all held"
        print(f"  {line['verdict']} ({line['code']}) in {time.monotonic() - began_s:.0f} s: {what}", flush=True)
    if rows:
        print(f"\n{table(rows)}")
    return int(any(line["breaches"] for line in rows))


if __name__ == "__main__":
    sys.exit(main())
