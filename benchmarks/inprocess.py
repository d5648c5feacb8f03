"""The engine alone: an arm loaded into this process and driven as its own device loop drives it, without the wire.

Importing this file imports no torch, so that the compiler's cache directory can still be chosen.
"""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.measure import Answer, Session
from benchmarks.traffic import Request
from servers.clock import now_ns
from servers.compiler.events import CompileEvent
from servers.config import ArmConfig
from servers.engine.engine import Arrivals, Engine
from servers.engine.messages import Cancel, StepOutput, Submit


class Line:
    """What a feed sends through: requests and cancellations go to the engine, and it knows what is still running."""

    def __init__(self, arrivals: Arrivals) -> None:
        self.live: dict[str, None] = {}  # in the order of sending
        self.sent: dict[str, Answer] = {}
        self._arrivals = arrivals
        self._numbers = itertools.count()

    def send(self, request: Request, *, due_ns: int = 0) -> None:
        """Submit the request now; its latencies count from `due_ns`, or from now."""
        at_ns = now_ns()
        name = f"r{next(self._numbers)}"
        self.sent[name] = Answer(prompt_tokens=len(request.prompt), due_ns=due_ns or at_ns, token_ns=[])
        self.live[name] = None
        self._arrivals.put(
            Submit(
                request_id=name,
                prompt=request.prompt,
                max_tokens=request.max_tokens,
                recv_ns=at_ns,
                ignore_eos=True,
            )
        )

    def cancel(self, name: str) -> None:
        """The client of `name` has gone."""
        self.live.pop(name, None)
        self.sent[name].status = "CANCELLED"
        self._arrivals.put(Cancel(request_id=name))


# Called before every turn of the loop; sends what is due and says whether more may come.
Feed = Callable[[Line], bool]


class InProcess:
    """A warm arm in this process. Every method belongs to the thread that called `load`."""

    def __init__(self, arm: ArmConfig, runner: Any, recorder: Any) -> None:
        self.arm = arm
        self.runner = runner
        self.recorder = recorder

    @classmethod
    def load(cls, arm: ArmConfig, note: Callable[[str], None]) -> InProcess:
        """The arm's model is loaded and every planned shape is warm."""
        from servers.compiler.recorder import CompileRecorder
        from servers.engine.runner import ModelRunner

        recorder = CompileRecorder()
        recorder.install()
        try:
            runner = ModelRunner(arm, recorder)
            runner.load()
            runner.warm_up(lambda done, total, detail: note(f"{arm.name}: warm-up {done} of {total}: {detail}"))
        except BaseException:
            recorder.remove()
            raise
        recorder.drain()
        gc.collect()
        gc.freeze()  # as the device loop does
        return cls(arm, runner, recorder)

    @property
    def vocab_size(self) -> int:
        """Token ids go from 0 to this, exclusive."""
        return int(self.runner.vocab_size)

    def close(self) -> None:
        """The recorder's taps are out of the compiler again."""
        self.recorder.remove()
        gc.unfreeze()

    @contextmanager
    def recording(self, on: bool) -> Iterator[None]:
        """Inside, the compile recorder is installed, or not."""
        if on:
            yield
            return
        self.recorder.remove()
        try:
            yield
        finally:
            self.recorder.install()

    def serve(self, requests: Sequence[Request]) -> Session:
        """All `requests` at once, until the last is answered."""

        def feed(line: Line) -> bool:
            if not line.sent:
                for request in requests:
                    line.send(request)
            return False

        return self.run(feed)

    def replay(self, requests: Sequence[Request]) -> tuple[Session, list[float]]:
        """`requests` when they are due, whatever the engine does (open loop); also how late each was sent, in ms.

        A thread feeds them, as one does behind the wire, so that a request may arrive in the middle of a step.
        """
        lags: list[float] = []
        feeder: threading.Thread | None = None
        done = threading.Event()

        def send_all(line: Line, start_ns: int) -> None:
            try:
                for request in requests:
                    due_ns = start_ns + request.offset_ns
                    while (left_ns := due_ns - now_ns()) > 0:
                        time.sleep(left_ns / 1e9)
                    line.send(request, due_ns=due_ns)
                    lags.append((now_ns() - due_ns) / 1e6)
            finally:
                done.set()

        def feed(line: Line) -> bool:
            nonlocal feeder
            if feeder is None:
                feeder = threading.Thread(target=send_all, args=(line, now_ns()), name="feeder", daemon=True)
                feeder.start()
            return not done.is_set()

        return self.run(feed), lags

    def run(self, feed: Feed) -> Session:
        """Steps until `feed` says that nothing more comes and everything is answered."""
        engine = Engine(self.arm, self.runner, self.recorder.drain)
        engine.eos_ids = self.runner.eos_ids
        arrivals = Arrivals()
        line = Line(arrivals)
        outputs: list[StepOutput] = []
        events: list[CompileEvent] = []
        self.recorder.drain()
        start_ns = now_ns()
        while True:
            more = feed(line)  # asked first: what was sent before a last "no" is taken below
            arrivals.take(engine)
            ended = engine.expire(now_ns())
            fresh = [StepOutput(emit_ns=now_ns(), finished=ended)] if ended else []
            stepped, happened = engine.advance(arrivals)
            fresh += stepped
            events += happened
            outputs += fresh
            for output in fresh:
                for finished in output.finished:
                    line.live.pop(finished.request_id, None)
            if engine.idle:
                if not more:
                    break
                arrivals.wait(0.05)
        end_ns = now_ns()
        events += self.recorder.drain()
        return Session(
            start_ns=start_ns, end_ns=end_ns, answers=_fold(line.sent, outputs), outputs=outputs, events=events
        )


def _fold(answers: dict[str, Answer], outputs: Sequence[StepOutput]) -> dict[str, Answer]:
    """`answers` with the token times and endings that `outputs` tell."""
    for output in outputs:
        for name, _ in output.tokens:
            answers[name].token_ns.append(output.emit_ns)
        for finished in output.finished:
            if not answers[finished.request_id].status:
                answers[finished.request_id].status = finished.status
    return answers
