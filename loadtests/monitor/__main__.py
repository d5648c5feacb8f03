"""Samples one host, its GPUs and the run's processes into a table, until stdin closes or SIGTERM comes.

    python -P -m tailgate.loadtests.monitor --out machines.arrow --trial 1 --sample-s 1 --devices cuda:0 cuda:1

Reads messages `Watch` on stdin. Says `Seen` first, read before the run starts anything, and `Unreadable` once for
each value that cannot be read.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue

from tailgate.loadtests.monitor.gpus import Card, Gpus, index_of, visible_cards
from tailgate.loadtests.monitor.host import Host, machine_identity, shown_gpus
from tailgate.loadtests.monitor.processes import Processes
from tailgate.loadtests.monitor.readings import Readings, Seen, Watch, reason
from tailgate.servers.clock import now_ns
from tailgate.servers.processes import say

_HOST = "run"
_FLUSH_S = 0.9  # with a sample each second, each is flushed
_BUSY_PCT = 5
_SETTLE_S = 1.2  # the driver's utilisation is of up to the last second


def main() -> int:
    """Sample until stdin closes or SIGTERM comes, close the table and return the exit code."""
    parser = argparse.ArgumentParser(prog="monitor", description="Sample a host, its GPUs and the processes of a run.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--trial", type=int, default=1)
    parser.add_argument("--sample-s", type=float, default=1.0)
    parser.add_argument("--devices", nargs="*", default=[], help="as arms name them: cuda:0, auto")
    options = parser.parse_args()
    messages: SimpleQueue[Watch | None] = SimpleQueue()  # None: the end
    signal.signal(signal.SIGTERM, lambda number, frame: messages.put(None))
    threading.Thread(target=_listen, args=(messages,), daemon=True).start()
    readings = Readings(_HOST, say)
    processes = Processes(readings, root=os.getppid())
    host = Host()
    names, cards = find_cards(options.devices, readings)
    gpus = Gpus(names, cards, readings=readings, processes=processes)
    before = gpus.before(now_ns())
    is_busy = any(not row["processes"] and (row["utilisation_pct"] or 0) >= _BUSY_PCT for row in before)
    if is_busy or gpus.is_unsure:
        time.sleep(_SETTLE_S)  # what has just ended there still shows
        before = gpus.before(now_ns())
    machine = {"machine": machine_identity(gpu.uuid for gpu in shown_gpus()), **host.facts()}
    say(Seen(machines={_HOST: machine}, devices=gpus.facts(), before=before))
    # Only now: this takes longer than all of the above, for which the arms wait.
    from tailgate.analysis.records.schemas import MACHINES
    from tailgate.analysis.records.tables import RecordWriter

    flushed_s = 0.0
    with RecordWriter(options.out, MACHINES) as writer:
        for _ in _ticks(options.sample_s, messages, processes):
            shared = {"trial": options.trial, "host": _HOST, "at_ns": now_ns()}
            gpu_rows, held = gpus.sample()
            host_row = {"kind": "host", "name": _HOST, **readings.of(_HOST, host.probes)}
            for row in (host_row, *gpu_rows, *processes.sample(held)):
                writer.append({**shared, **row})
            if time.monotonic() - flushed_s >= _FLUSH_S:
                writer.flush()
                flushed_s = time.monotonic()
    return 0


def find_cards(devices: Sequence[str], readings: Readings) -> tuple[list[str], list[Card]]:
    """Return the devices as cuda:N, each once, and the cards as CUDA numbers them. Report what cannot be found.

    `auto` is the first card, where there is one.
    """
    names = {f"cuda:{index}": None for name in devices if (index := index_of(name)) is not None}
    if not names and "auto" not in devices:
        return [], []
    try:
        import pynvml

        cards = visible_cards(pynvml, os.environ)
    except Exception as error:  # no driver, a broken one, or no way to know which card is which
        for name in names:
            readings.unreadable(name, "device", reason(error))
        return [], []
    if "auto" in devices and cards:
        names["cuda:0"] = None
    return sorted(names), cards


def _ticks(every_s: float, messages: SimpleQueue[Watch | None], processes: Processes) -> Iterator[None]:
    """Yield once every `every_s` until None is in `messages`, and once more then. Skip missed ticks.

    In between, and at least once a tick, give `processes` what is in `messages`.
    """
    began_s = time.monotonic()
    tick = 0
    while True:
        yield
        tick = max(tick + 1, int((time.monotonic() - began_s) / every_s) + 1)
        with suppress(Empty):
            while True:
                message = messages.get(timeout=max(0.0, began_s + tick * every_s - time.monotonic()))
                if message is None:
                    yield
                    return
                processes.take(message)


def _listen(messages: SimpleQueue[Watch | None]) -> None:
    """Put what comes on stdin into `messages`, and None at its end."""
    try:
        with open(0, "rb", buffering=0) as stdin:  # a buffer would be locked when the process ends
            for line in stdin:
                messages.put(Watch(**json.loads(line)))
    finally:
        messages.put(None)


if __name__ == "__main__":
    sys.exit(main())
