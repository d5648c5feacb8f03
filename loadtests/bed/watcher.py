"""Samples one host, its devices and the run's processes into a table, until stdin closes or SIGTERM comes.

    python -P -m loadtests.bed.watcher --out bed.arrow --trial 1 --sample-s 1 --devices cuda:0 cuda:1

Reads on stdin a JSON object a line: {"name": "eager-0", "arm": "eager", "pid": 4711} when a process and its descendants
have that name from now on, with a pid of null when nothing has it any more. Writes JSON objects on stdout: first
{"bed": {machines, devices, before}}, seen before the run starts anything; {"unreadable": {host, name, what, why}} once
for each value that cannot be read; at its end {"watcher": {cpu_s, seconds}}, what it cost since its start-up.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtests.bed.amd import AmdSmi
from loadtests.bed.devices import Card, Devices, Library, index_of, visible_cards
from loadtests.bed.host import Host
from loadtests.bed.machine import gpu_uuids, machine_identity
from loadtests.bed.nvml import Nvml
from loadtests.bed.processes import Processes
from loadtests.bed.readings import Readings, reason
from servers.clock import now_ns

_FLUSH_S = 0.9  # with a sample each second, each is flushed
_BUSY_PCT = 5
_SETTLE_S = 1.2  # the driver's utilisation is of up to the last second


def main() -> int:
    """The table is complete; returns the exit code."""
    parser = argparse.ArgumentParser(prog="watcher", description="Samples a host, its devices and processes of a run.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--trial", type=int, default=1)
    parser.add_argument("--host", default="run", help="what the table calls it")
    parser.add_argument("--sample-s", type=float, default=1.0)
    parser.add_argument("--devices", nargs="*", default=[], help="as arms name them: cuda:0, auto")
    options = parser.parse_args()
    stopping = _woken_by_signal()
    readings = Readings(options.host, lambda what: _say("unreadable", what))
    processes = Processes(readings, root=os.getppid())
    host = Host()
    names, cards = find_cards(options.devices, readings)
    devices = Devices(names, cards, readings=readings, processes=processes)
    before = devices.before(now_ns())
    is_busy = any(not look["processes"] and (look["utilisation_pct"] or 0) >= _BUSY_PCT for look in before)
    if is_busy or devices.is_unsure:
        time.sleep(_SETTLE_S)  # what has just ended there still shows
        before = devices.before(now_ns())
    machine = {"machine": machine_identity(gpu_uuids()), **host.facts()}
    _say("bed", {"machines": {options.host: machine}, "devices": devices.facts(), "before": before})
    # Only now: this takes longer than all of the above, for which the arms wait.
    from analysis.records.schemas import BED
    from analysis.records.tables import RecordWriter

    began_s, began_cpu_s, flushed_s = time.monotonic(), time.process_time(), 0.0
    with RecordWriter(options.out, BED) as writer:
        for last in _ticks(options.sample_s, stopping, processes):
            if last:
                devices.hurry()  # energy counts up to here
            shared = {"trial": options.trial, "host": options.host, "at_ns": now_ns()}
            device_rows, held = devices.sample()
            host_row = {"kind": "host", "name": options.host, **readings.of(options.host, host.probes)}
            for row in (host_row, *device_rows, *processes.sample(held)):
                writer.append({**shared, **row})
            if time.monotonic() - flushed_s >= _FLUSH_S:
                writer.flush()
                flushed_s = time.monotonic()
    cost = {"cpu_s": time.process_time() - began_cpu_s, "seconds": time.monotonic() - began_s}
    _say("watcher", {name: round(value, 3) for name, value in cost.items()})
    return 0


def find_cards(devices: Sequence[str], readings: Readings) -> tuple[list[str], list[Card]]:
    """The devices as cuda:N, each once, and the cards as CUDA numbers them. What cannot be found is said.

    `auto` is the first card, where there is one.
    """
    names = {f"cuda:{index}": None for name in devices if (index := index_of(name)) is not None}
    if not names and "auto" not in devices:
        return [], []
    reasons = []
    for library in (_nvml, _amd):
        try:
            cards = visible_cards(library(), os.environ)
        except Exception as error:  # no driver, a broken one, or no way to tell which card is which
            reasons.append(reason(error))
            continue
        if "auto" in devices and cards:
            names["cuda:0"] = None
        return sorted(names), cards
    for name in names:
        readings.unreadable(name, "device", "; ".join(reasons))
    return [], []


def _nvml() -> Library:
    import pynvml

    return Nvml(pynvml)


def _amd() -> Library:
    # Comes with ROCm and not from an index of packages.
    return AmdSmi(importlib.import_module("amdsmi"))


def _ticks(every_s: float, stopping: int, processes: Processes) -> Iterator[bool]:
    """Yields False once every `every_s` until stdin closes or `stopping` can be read, and then True.

    In between, and once a tick at least, `processes` learns the names that come on stdin. A tick that was missed is
    left out.
    """
    began_s = time.monotonic()
    tick, rest = 0, b""
    while True:
        yield False
        tick = max(tick + 1, int((time.monotonic() - began_s) / every_s) + 1)
        due_s = began_s + tick * every_s
        looked = False
        while (left_s := max(0.0, due_s - time.monotonic())) or not looked:
            looked = True
            ready, _, _ = select.select([sys.stdin, stopping], [], [], left_s)
            if stopping in ready:
                yield True
                return
            if ready:
                piece = os.read(sys.stdin.fileno(), 65536)
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    _learn(json.loads(line), processes)
                if not piece:
                    yield True
                    return


def _learn(message: Mapping[str, Any], processes: Processes) -> None:
    if message["pid"] is None:
        processes.forget(message["name"])
    else:
        processes.watch(message["name"], pid=int(message["pid"]), arm=message.get("arm"))


def _woken_by_signal() -> int:
    """A descriptor that can be read once SIGTERM has come."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    return reader


def _say(kind: str, what: Mapping[str, Any]) -> None:
    print(json.dumps({kind: what}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
