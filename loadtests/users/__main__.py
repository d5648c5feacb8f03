"""Record production traffic until stopped: `python -m tailgate.loadtests.users TRIAL_DIR`, which holds observed.json.

A line on stdin ends it in order: what comes from then on is not written down, and what is under way is waited for.

A process of its own, so that neither telemetry nor an interim analysis delays its reading of the log.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from pathlib import Path

from tailgate.loadtests.users import OBSERVED, Observed
from tailgate.loadtests.users.observer import Observer
from tailgate.servers.complaint import write_failure

EVERY_S = 0.5
_LAST_S = 1.5  # by then the splitter has written what had ended when the end was asked for


def main() -> int:
    """Observe until SIGTERM, or after a line on stdin until all earlier requests ended. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tailgate.loadtests.users")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    end_requested = threading.Event()
    threading.Thread(target=_listen, args=(end_requested,), daemon=True).start()
    try:
        observer = Observer(
            options.folder, Observed(**json.loads((options.folder / OBSERVED).read_text(encoding="utf-8")))
        )
        ending = False
        while not stopped.wait(EVERY_S) and not observer.settled(time.time_ns()):
            if end_requested.is_set() and not ending:
                ending = True
                observer.end(time.time_ns())
            observer.step(time.time_ns())
        observer.step(time.time_ns())
        time.sleep(_LAST_S)
        observer.close(time.time_ns())
    except OSError as error:
        print(f"production traffic cannot be recorded: {write_failure(error)}, then ramp again", file=sys.stderr)
        return 1
    return 0


def _listen(end_requested: threading.Event) -> None:
    if sys.stdin.readline():
        end_requested.set()


if __name__ == "__main__":
    sys.exit(main())
