"""Analyse a run directory after every block, until SIGTERM: `python -m tailgate.analysis.interim RUN_DIR ANCHOR_NS`.

ANCHOR_NS is the wall clock less the monotonic clock when the run began: the run's clock, which never steps. A process
of its own, at low priority, so that judging takes no time from the load.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from tailgate.analysis.interim.journal import Watch

_NICE = 10
_EVERY_S = 2.0  # between checks for new records
_REST = 2.0  # times the processor time that an analysis took: leaves the load most of a processor


def main() -> int:
    """Run until SIGTERM; returns the exit code."""
    os.nice(_NICE)
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    watch, anchor_ns = Watch(Path(sys.argv[1])), int(sys.argv[2])
    failures = 0
    while not stopped.wait(_EVERY_S):
        began = time.process_time()
        try:
            row = watch.analyse(anchor_ns + time.monotonic_ns())
            failures = 0
        except Exception as error:  # a file may be half written: the next analysis finds it whole
            failures += 1
            print(f"the analysis failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            stopped.wait(min(60.0, 2.0**failures))
            continue
        if row is not None:
            stopped.wait(_REST * (time.process_time() - began))
    return 0


if __name__ == "__main__":
    sys.exit(main())
