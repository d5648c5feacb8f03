"""A service that has users: paced arms, `tailgate split` in front of them, and requests all the time.

Each server is a process, which a test can kill.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from tailgate.loadtests.experiments.reading import load
from tailgate.servers.metadata import SESSION_HEADER
from tailgate.servers.rpc import inference_pb2, inference_pb2_grpc
from tailgate.servers.splitter.admin import Admin, live_shares
from tests.fakes.grpc_servers import spawned
from tests.fakes.processes import free_port, wait_for
from tests.fakes.whole_run import environment


@dataclass(frozen=True, slots=True)
class Answer:
    """How a user's request ended, by the trailing metadata. Its session identifies its record."""

    session: str
    sent_s: float
    at_s: float
    status: str
    arm: str


@dataclass(slots=True)
class Production:
    """Arms, a splitter and users in `folder`. `flags` are those of tests/fakes/arm.py, by arm."""

    folder: Path
    arms: Sequence[str] = ("eager", "compiled-padded")
    flags: dict[str, Sequence[str]] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)
    ports: dict[str, int] = field(default_factory=dict)
    children: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> Production:
        """Start the arms, the splitter, which gives all to the first of them, and the users."""
        with contextlib.ExitStack() as stack:
            for arm in self.arms:
                config = self.folder / f"{arm}.json"
                own = next(item for item in load("demo").managed_arms if item.name == arm)
                config.write_text(json.dumps(own.config.to_dict()))
                words = ["--config", str(config), "--replica", f"{arm}-0", "--warmup-s", "0.1"]
                starting = spawned("tests.fakes.arm", *words, *self.flags.get(arm, ()))
                self.children[arm], self.ports[arm] = stack.enter_context(starting)
            self.ports["admin"] = free_port()
            words = ["split", "--json", "--request-log", str(self.folder / "requests.log")]
            for place, arm in enumerate(self.arms):
                words += ["--arm", f"{arm}=127.0.0.1:{self.ports[arm]}", "--weight", f"{arm}={int(place == 0)}"]
            words += ["--port", "0", "--admin-port", str(self.ports["admin"])]
            _, self.ports["split"] = stack.enter_context(spawned("tailgate.loadtests.commands.main", *words))
            wait_for(self._serves)  # the split tells its port before it listens there
            sender = threading.Thread(target=self._send, daemon=True)
            stack.callback(sender.join, 10)
            stack.callback(self._stopped.set)
            sender.start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _serves(self) -> bool:
        admin = Admin(f"127.0.0.1:{self.ports['admin']}")
        healthy = admin.fetch("GET", "/clusters")[1].count("health_flags::healthy")
        return healthy == len(self.arms) and admin.fetch("GET", "/ready")[0] == 200

    def weights(self) -> dict[str, int]:
        """Return what is in force."""
        return dict(live_shares(Admin(f"127.0.0.1:{self.ports['admin']}")).weights)

    def kill(self, name: str) -> None:
        self.children[name].send_signal(signal.SIGKILL)
        self.children[name].wait()

    def ramp(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tailgate.loadtests.commands.main", "ramp", *arguments, "--json"],
            cwd=self.folder,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=(self.folder / "ramp.log").open("a"),
            text=True,
        )

    def _send(self) -> None:
        rng = random.Random(5)
        options = [("grpc.max_reconnect_backoff_ms", 200), ("grpc.initial_reconnect_backoff_ms", 100)]
        address = f"127.0.0.1:{self.ports['split']}"
        with grpc.insecure_channel(address, options=options) as channel, ThreadPoolExecutor(64) as pool:
            stub = inference_pb2_grpc.InferenceStub(channel)
            while not self._stopped.wait(rng.expovariate(80.0)):
                pool.submit(self._ask, stub, rng.randint(8, 120), rng.randint(2, 8))

    def _ask(self, stub: Any, length: int, tokens: int) -> None:
        ids = inference_pb2.TokenIds(ids=[1] * length)
        request = inference_pb2.GenerateRequest(token_ids=ids, max_tokens=tokens)
        session, sent_s = uuid.uuid4().hex, time.time()
        call = stub.Generate(request, timeout=20.0, metadata=((SESSION_HEADER, session),))
        try:
            for _ in call:
                pass
            status = "OK"
        except grpc.RpcError as error:
            status = error.code().name
        arm = str(dict(call.trailing_metadata() or ()).get("tailgate-arm", ""))
        self.answers.append(Answer(session, sent_s, time.time(), status, arm))
