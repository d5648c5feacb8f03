"""Samples one host, its GPUs and the run's processes into a table, until stdin closes or SIGTERM comes.

Its one argument is a `Task` as JSON. Reads messages `Watch` on stdin. Says `Seen` first, read before the run starts
anything, and `Unreadable` once for each value that cannot be read.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tailgate.analysis.wording import counted
from tailgate.loadtests.monitor.gpus import Card, Gpus, index_of, sees_all_processes, visible_cards
from tailgate.loadtests.monitor.host import Host
from tailgate.loadtests.monitor.processes import Processes
from tailgate.loadtests.monitor.readings import Readings, Seen, Task, Watch, reason
from tailgate.servers.clock import now_ns
from tailgate.servers.processes import say

_HOST = "run"  # runs tailgate and the arms that it starts: the only one that is monitored


def main() -> int:
    """Sample until stdin closes or SIGTERM comes, close the table and return the exit code."""
    task = Task(**json.loads(sys.argv[1]))
    nothing = os.open(os.devnull, os.O_RDONLY)
    signal.signal(signal.SIGTERM, lambda number, frame: os.dup2(nothing, 0))  # at which stdin ends
    readings = Readings(say)
    processes = Processes(readings, root=os.getppid())
    host = Host()
    cards = find_cards(task.devices, readings)
    gpus = Gpus(cards, readings=readings, processes=processes, sees_all=sees_all_processes())
    known = {name: readings.of(name, card.facts) for name, card in cards.items()}
    say(Seen(devices=known, before=gpus.sample()[0]))
    # Only now: this takes longer than all of the above, for which the arms wait.
    from tailgate.analysis.records.schemas import MACHINES
    from tailgate.analysis.records.tables import RecordWriter

    with RecordWriter(Path(task.out), MACHINES) as writer:
        for _ in _ticks(task.sample_s, processes):
            shared = {"trial": task.trial, "at_ns": now_ns()}
            gpu_rows, held = gpus.sample()
            host_row = {"kind": "host", "name": _HOST, **readings.of(_HOST, host.probes)}
            for row in (host_row, *gpu_rows, *processes.sample(held)):
                writer.append({**shared, **row})
            writer.flush()
    return 0


def find_cards(devices: Sequence[str], readings: Readings) -> dict[str, Card]:
    """Return the cards of the devices by their names cuda:N, each once; `auto` is the first, where there is one.

    Report what cannot be found.
    """
    names = {f"cuda:{index}": index for name in devices if (index := index_of(name)) is not None}
    if not names and "auto" not in devices:
        return {}
    cards: list[Card] = []
    try:
        import pynvml

        cards = visible_cards(pynvml, os.environ)
        why = f"the driver shows {counted(len(cards), 'device')} to the run"
    except Exception as error:  # no driver, a broken one, or no way to know which card is which
        why = reason(error)
    if "auto" in devices and cards:
        names["cuda:0"] = 0
    for name, index in names.items():
        if index >= len(cards):
            readings.unreadable(name, "device", why)
    return {name: cards[index] for name, index in sorted(names.items()) if index < len(cards)}


def _ticks(every_s: float, processes: Processes) -> Iterator[None]:
    """Yield once every `every_s` until stdin ends, and once more then. Skip missed ticks.

    In between, and at least once a tick, give `processes` what comes on stdin.
    """
    began_s, tick, rest = time.monotonic(), 0, b""
    while True:
        yield
        tick = max(tick + 1, int((time.monotonic() - began_s) / every_s) + 1)
        while select.select([0], [], [], max(0.0, began_s + tick * every_s - time.monotonic()))[0]:
            piece = os.read(0, 65_536)
            if not piece:
                yield
                return
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                processes.take(Watch(**json.loads(line)))


if __name__ == "__main__":
    sys.exit(main())
