"""Whether the statistics hold: their errors on made-up servers whose truth is known, as a table.

    python benchmarks/judging.py [SECTION ...] [--seeds 400] [--processes 2]

Sections: promises, detection, attribution, frontiers, sequential, objectives, ramps, separate,
greedy, machines, planning; all where none is named.

Each line is a share of seeded runs (or a time) with its goal. The last line on stdout is one JSON object.
Exit code 1 when a line misses its goal. The simulator is in benchmarks/simulation. With 400 seeds, promises and
detection take seven minutes on eleven processors, sequential, objectives, attribution and separate nine on twenty.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command import Ledger
from benchmarks.simulation.attribution import attribution_table
from benchmarks.simulation.detection import detection_table
from benchmarks.simulation.frontiers import frontiers_table
from benchmarks.simulation.greedy import greedy_table
from benchmarks.simulation.machines import machines_table
from benchmarks.simulation.planning import planning_table
from benchmarks.simulation.promises import promises_table
from benchmarks.simulation.ramps import ramps_table
from benchmarks.simulation.separate import separate_table
from benchmarks.simulation.sequential import objectives_table, sequential_table
from benchmarks.simulation.table import Table

SECTIONS = {
    "promises": promises_table,
    "detection": detection_table,
    "attribution": attribution_table,
    "frontiers": frontiers_table,
    "sequential": sequential_table,
    "objectives": objectives_table,
    "ramps": ramps_table,
    "separate": separate_table,
    "greedy": greedy_table,
    "machines": machines_table,
    "planning": planning_table,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--seeds", type=int, default=400, help="runs behind each line (%(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="side by side (%(default)s)")
    options = parser.parse_args(arguments)
    if options.seeds < 1 or options.processes < 1:
        parser.error(f"--seeds is {options.seeds} and --processes {options.processes}: give 1 or more of each")
    ledger = Ledger()
    table = Table(options.seeds, processes=options.processes, show=partial(print, flush=True))
    for section in options.sections or SECTIONS:
        SECTIONS[section](table)
    ledger.rows = [asdict(row) | {"check": row.check.strip(), "ok": row.ok} for row in table.rows]
    ledger.missed = [row.check.strip() for row in table.rows if row.ok is False]
    ledger.note(f"{len(table.rows)} lines; missed: {'; '.join(ledger.missed) or 'none'}")
    return ledger.finish("judging", sys.argv[1:] if arguments is None else arguments, seeds=options.seeds)


if __name__ == "__main__":
    sys.exit(main())
