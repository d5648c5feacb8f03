"""The engine process: one device thread that loads, warms and runs the model, joined to each gRPC front by a pipe.

The main thread is the device thread, because CUDA graphs are bound to the thread that recorded them. Two more threads
for each pipe move messages. Fronts are other processes: they take no interpreter time from the device thread, and
answer health checks while a compile holds this process's interpreter lock.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from tailgate.servers.clock import now_ns
from tailgate.servers.complaint import ConfigError, named
from tailgate.servers.config import ArmConfig
from tailgate.servers.engine.engine import Arrivals, Engine
from tailgate.servers.engine.messages import BlindSpots, Report, Shutdown, StepOutput
from tailgate.servers.engine.scheduler import scheduler_for
from tailgate.servers.program import isolate_compiler, log_to_stderr
from tailgate.servers.rpc.telemetry_pb2 import CompileUnderWay, MemoryReading, Progress, SnapshotResponse

log = logging.getLogger("tailgate.device")

MEMORY_EVERY_NS = 1_000_000_000
_LONGEST_FLUSH_S = 0.1  # a front that does not read delays no compile for longer
_SHORT_FLUSH_S = 0.005  # nor any other launch: a thread that waits for the interpreter gets it within this time


class Outbox:
    """Messages to the front, in order. `put` takes them from any thread without a wait; `send` runs in a thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._messages: deque[object] = deque()
        self._has_some = threading.Event()

    def put(self, message: object) -> None:
        """Have the sending thread send the message."""
        self._messages.append(message)
        if not self._has_some.is_set():
            self._has_some.set()

    def flush(self, timeout_s: float = _LONGEST_FLUSH_S) -> None:
        """Wait until everything put so far is sent, for `timeout_s` at most.

        After the call this thread may hold the interpreter for long, so that the sending thread cannot run.
        """
        is_sent = threading.Event()
        self.put(is_sent)
        is_sent.wait(timeout_s)

    def send(self) -> None:
        """Send what is put, without end."""
        while self._has_some.wait():
            self._has_some.clear()
            taken = [self._messages.popleft() for _ in range(len(self._messages))]
            if messages := [item for item in taken if not isinstance(item, threading.Event)]:
                with contextlib.suppress(OSError):  # the front is gone
                    self._connection.send(messages)
            for item in taken:
                if isinstance(item, threading.Event):
                    item.set()


def serve_engine(connections: Sequence[Connection], table: dict[str, object], cache_dir: str) -> None:
    """Load, warm up, then step until a front closes its pipe: the body of the engine process."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)  # the front decides when to stop
    log_to_stderr()
    outboxes = [Outbox(connection) for connection in connections]
    outbox = outboxes[0]  # of the first front, which has the telemetry
    arrivals: Arrivals = queue.SimpleQueue()
    for connection, own in zip(connections, outboxes, strict=True):
        threading.Thread(target=own.send, daemon=True).start()
        threading.Thread(target=_receive, args=(connection, arrivals, outbox), daemon=True).start()
    try:
        arm = ArmConfig.from_dict(table)
        isolate_compiler(os.environ, cache_dir)
        engine, device = _start(arm, arrivals, outboxes)
    except Exception as error:
        is_refused = isinstance(error, ConfigError)
        if not is_refused:
            log.exception("the engine could not start")
        outbox.put(Progress(at_ns=now_ns(), stage="failed", detail=str(error) if is_refused else named(error)))
        outbox.flush(timeout_s=5.0)
        return
    due_ns = 0
    for messages in engine.turns():
        for message in messages:
            parts = message.divided(len(outboxes)) if isinstance(message, StepOutput) else [message]
            for own, part in zip(outboxes, parts, strict=False):
                own.put(part)
        if messages and (engine.has_planned or not engine.runner.overlaps):
            _flush(outboxes, _SHORT_FLUSH_S)
        if (at_ns := now_ns()) >= due_ns:
            due_ns = at_ns + MEMORY_EVERY_NS
            outbox.put(read_memory(device, at_ns))


def _flush(outboxes: Sequence[Outbox], timeout_s: float = _LONGEST_FLUSH_S) -> None:
    for own in outboxes:
        own.flush(timeout_s)


def _start(arm: ArmConfig, arrivals: Arrivals, outboxes: Sequence[Outbox]) -> tuple[Engine, Any]:
    entered_ns, outbox = now_ns(), outboxes[0]
    outbox.put(Progress(at_ns=entered_ns, stage="load", detail=arm.model.id))
    from tailgate.servers.compiler.recorder import CompileRecorder
    from tailgate.servers.engine.runner import runner_for

    def announce(compile: CompileUnderWay) -> None:
        outbox.put(compile)
        if not compile.end_ns:
            _flush(outboxes)

    imported_ns = now_ns()
    recorder = CompileRecorder(
        publish=lambda texts: outbox.put(BlindSpots(texts=texts)),
        announce=announce,
    )
    recorder.install()
    runner = runner_for(arm, recorder)
    runner.load()
    missed: list[str] = []  # shapes whose graph was not found in the compile cache

    def report(done: int, total: int, detail: str) -> None:
        for event in recorder.drain():
            outbox.put(event)
            missed.extend([event.shape] * (event.kind != "jit" and event.cache == "miss"))
        outbox.put(Progress(at_ns=now_ns(), stage="warmup", done=done, total=total, detail=detail))

    runner.warm_up(report)
    loaded = runner.loaded
    if loaded is not None and missed:
        log.warning(
            "%s lacked %d graphs, which were compiled now (the first for %s): write it anew with `tailgate precompile`",
            loaded.path,
            len(missed),
            missed[0],
        )
    # What start-up leaves behind stays; a collection while serving need not walk through it.
    gc.collect()
    gc.freeze()
    artifact = {"artifact": loaded.identity} if loaded is not None else {}
    snapshot = SnapshotResponse(
        vocab_size=runner.vocab_size,
        device=runner.device_name(),
        dtype=runner.dtype_name(),
        versions={**_versions(), **artifact},
        memory_bytes=runner.memory_bytes(),
        # the parent is the replica's front: what its user waits for begins with it
        startup_ns=itemised(
            runner.startup_ns,
            started_ns=process_started_ns(os.getppid()),
            entered_ns=entered_ns,
            imported_ns=imported_ns,
            ready_ns=now_ns(),
        ),
    )
    for own in outboxes:
        own.put(snapshot)
    read_memory(runner.device, now_ns())  # the next peak counts from here
    return Engine(scheduler_for(arm), runner, recorder.drain, arrivals), runner.device


def _receive(connection: Connection, arrivals: Arrivals, first: Outbox) -> None:
    message = None
    try:
        while not isinstance(message, Shutdown):
            message = connection.recv()
            (first if isinstance(message, Report) else arrivals).put(message)
    except (EOFError, OSError):
        # A front is gone. A compile may hold the device thread for a minute: do not wait for it.
        os._exit(1)


def _versions() -> dict[str, str]:
    import torch

    versions = {"cuda": torch.version.cuda} if torch.version.cuda else {}
    for package in ("torch", "torchao", "transformers", "grpcio", "triton"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def process_started_ns(pid: int) -> int:
    """Return when the process `pid` began, to about 10 ms; now, where the system does not say."""
    try:
        # the name of a program may hold anything, so fields are counted from its closing bracket
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        since_boot_ns = int(fields[19]) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return now_ns()
    return now_ns() - max(0, time.clock_gettime_ns(time.CLOCK_BOOTTIME) - since_boot_ns)


def itemised(
    items: Mapping[str, int], *, started_ns: int, entered_ns: int, imported_ns: int, ready_ns: int
) -> dict[str, int]:
    """Divide the time from `started_ns` to `ready_ns`: what came before, the runner's `items`, and the small rest."""
    known = {"process": entered_ns - started_ns, "import": imported_ns - entered_ns, **items}
    return {**known, "other": max(0, ready_ns - started_ns - sum(known.values()))}


def read_memory(device: Any, at_ns: int) -> MemoryReading:
    """Read what the process holds of the host and of `device`, without asking the device, in some tens of microseconds.
    The next `peak_bytes` counts from here."""
    import torch

    resident = psutil.Process().memory_info().rss
    if device.type != "cuda":
        return MemoryReading(at_ns=at_ns, memory_bytes=resident)
    # nested, because flattening it takes longer than asking
    counters = torch.cuda.memory_stats_as_nested_dict(device)
    torch.cuda.reset_peak_memory_stats(device)
    reserved, peak = counters["reserved_bytes"]["all"]["current"], counters["allocated_bytes"]["all"]["peak"]
    return MemoryReading(at_ns=at_ns, memory_bytes=resident, reserved_bytes=reserved, peak_bytes=peak)
