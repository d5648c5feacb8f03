"""Looks at a run directory after every block until it is stopped: `python -m analysis.looks RUN_DIR`.

With --preview at a run that is judged once, at its end: as if it were judged at every look, for whoever watches.

A process of its own, at low priority, so that judging takes no time from the load.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from pathlib import Path

from analysis.looks.watch import Watch

_POLITE = 10
_REST = 2.0  # times as long as a look took


def main() -> int:
    """Until SIGTERM; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m analysis.looks")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument(
        "--every", type=float, default=2.0, metavar="S", help="how often it is asked whether there is more"
    )
    parser.add_argument("--preview", action="store_true")
    options = parser.parse_args()
    os.nice(_POLITE)
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    watch = Watch(options.run_dir, preview=options.preview)
    failures = 0
    while not stopped.wait(options.every):
        began = time.monotonic()
        try:
            row = watch.look(time.time_ns())
            failures = 0
        except Exception as error:  # a file may be half written: the next look finds it whole
            failures += 1
            print(f"the look failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            stopped.wait(min(60.0, 2.0**failures))
            continue
        if row is not None:
            # Never more than a third of one processor, and that at the lowest priority.
            stopped.wait(_REST * (time.monotonic() - began))
    return 0


if __name__ == "__main__":
    sys.exit(main())
