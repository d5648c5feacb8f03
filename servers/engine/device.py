"""The engine process: one device thread that loads, warms and runs the model, joined to the gRPC front by a pipe.

The main thread of this process is the device thread, because CUDA graphs are bound to the thread that recorded them.
Two more threads move messages. The front lives in another process, so that serving thousands of streams takes no
interpreter time from the device thread, and so that health checks are answered while a compile holds this process's
interpreter lock.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import threading
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection

from servers.clock import now_ns
from servers.compiler.events import CompileUnderWay
from servers.complaint import named
from servers.config import ArmConfig
from servers.engine.engine import Arrivals, Engine
from servers.engine.messages import MemoryReading, Progress, Ready, Shutdown, StepOutput
from servers.engine.outbox import Outbox
from servers.engine.startup import itemised, process_started_ns
from servers.fields import ConfigError
from servers.program import isolate_compiler, log_to_stderr

log = logging.getLogger("tailgate.device")

_LONGEST_REST_S = 0.5
_LONGEST_WAIT_S = 0.02  # with texts that wait for company, whose deadlines may pass
_LONGEST_FLUSH_S = 0.1  # a front that does not read holds no compile up for longer


def serve_engine(connection: Connection, table: dict[str, object], cache_dir: str) -> None:
    """The body of the engine process: load, warm up, then step until the front closes the pipe."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)  # the front decides when to stop
    log_to_stderr()
    outbox = Outbox()
    arrivals = Arrivals()
    sender = threading.Thread(target=outbox.send, args=(connection,), daemon=True)
    sender.start()
    threading.Thread(target=_receive, args=(connection, arrivals), daemon=True).start()
    try:
        arm = ArmConfig.from_dict(table)
        isolate_compiler(os.environ, cache_dir)
        engine, memory = _start(arm, outbox)
    except Exception as error:
        is_refused = isinstance(error, ConfigError)
        if not is_refused:
            log.exception("the engine could not start")
        outbox.put(Progress(at_ns=now_ns(), stage="failed", detail=str(error) if is_refused else named(error)))
        outbox.close()
        sender.join(5.0)
        return
    _loop(engine, memory, arrivals, outbox)


def _start(arm: ArmConfig, outbox: Outbox) -> tuple[Engine, Callable[[], MemoryReading | None]]:
    """A warm engine, and what says once a second what it holds."""
    entered_ns = now_ns()
    outbox.put(Progress(at_ns=entered_ns, stage="load", detail=arm.model.id))
    from servers.compiler.recorder import CompileRecorder
    from servers.engine.memory import MemoryWatch
    from servers.engine.placement import platform_versions
    from servers.engine.runners import runner_for

    imported_ns = now_ns()
    recorder = CompileRecorder(publish=outbox.put, announce=lambda compile: _announce(compile, outbox))
    recorder.install()
    runner = runner_for(arm, recorder)
    runner.load()
    missed: list[str] = []  # shapes whose graph was not found in the compile cache

    def report(done: int, total: int, detail: str) -> None:
        for event in recorder.drain():
            outbox.put(event)
            missed.extend([event.shape] * (event.cache == "miss"))
        outbox.put(Progress(at_ns=now_ns(), stage="warmup", done=done, total=total, detail=detail))

    runner.warm_up(report)
    loaded = runner.loaded
    if loaded is not None and (missed or loaded.compiled_anew()):
        log.warning(
            "%s lacked %d graphs, and %d kernels and libraries, which were compiled now%s: write it anew with "
            "`tailgate precompile`",
            loaded.artifact.path,
            len(missed),
            loaded.compiled_anew(),
            f" (the first for {missed[0]})" if missed else "",
        )
    # What start-up leaves behind stays; a collection while serving need not walk through it.
    gc.collect()
    gc.freeze()
    engine = Engine(arm, runner, recorder.drain)
    engine.eos_ids = runner.eos_ids
    artifact = {"artifact": loaded.artifact.identity} if loaded is not None else {}
    outbox.put(
        Ready(
            vocab_size=runner.vocab_size,
            device=runner.device_name(),
            dtype=runner.dtype_name(),
            versions={**_versions(), **platform_versions(), **artifact},
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
    )
    return engine, MemoryWatch(runner.device).due


def _loop(
    engine: Engine,
    memory: Callable[[], MemoryReading | None],
    arrivals: Arrivals,
    outbox: Outbox,
) -> None:
    while not arrivals.closed:
        arrivals.take(engine)
        ended, cancelled = engine.expire(now_ns()), engine.take_cancelled()
        if ended or cancelled:
            outbox.put(StepOutput(emit_ns=now_ns(), finished=ended, cancelled=cancelled))
        outputs, events = engine.advance(arrivals)
        for message in (*events, *outputs):
            outbox.put(message)
        if (reading := memory()) is not None:
            outbox.put(reading)
        # a deadline may pass meanwhile, and telemetry goes on
        if (rest_s := min(engine.rest_s(), _LONGEST_REST_S if engine.idle else _LONGEST_WAIT_S)) > 0:
            arrivals.wait(rest_s)


def _announce(compile: CompileUnderWay, outbox: Outbox) -> None:
    """The front knows of the compile before it begins: from then on it may hold the interpreter lock."""
    outbox.put(compile)
    if not compile.end_ns:
        outbox.flush(_LONGEST_FLUSH_S)


def _receive(connection: Connection, arrivals: Arrivals) -> None:
    try:
        while True:
            message = connection.recv()
            if isinstance(message, Shutdown):
                break
            arrivals.put(message)
    except (EOFError, OSError):
        # The front is gone. A compile may hold the device thread for a minute: do not wait for it.
        os._exit(1)
    arrivals.close()


def _versions() -> dict[str, str]:
    versions = {}
    for package in ("torch", "torchao", "transformers", "grpcio", "triton"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions
