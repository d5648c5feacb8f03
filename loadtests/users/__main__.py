"""Writes down users' requests until it is stopped: `python -m loadtests.users TRIAL_DIR`, which holds observed.json.

A process of its own, so that neither telemetry nor a look at the run keeps it from its log.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from pathlib import Path

from loadtests.users.observed import OBSERVED, Observed
from loadtests.users.observer import Observer

EVERY_S = 0.5
_LAST_S = 1.5  # by then the splitter has written what had ended when the end was asked for


def main() -> int:
    """Until SIGTERM; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.users")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    try:
        observer = Observer(
            options.folder, Observed(**json.loads((options.folder / OBSERVED).read_text(encoding="utf-8")))
        )
        while not stopped.wait(EVERY_S):
            observer.step(time.time_ns())
        observer.step(time.time_ns())
        time.sleep(_LAST_S)
        observer.close(time.time_ns())
    except OSError as error:
        print(f"users' requests cannot be recorded ({error}): free the disk, then --resume", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
