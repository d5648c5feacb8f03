"""A service that has users: paced arms, `tailgate split` in front of them, and requests all the time.

Each server is a process, which a test can kill and start again at the same port.
"""

from __future__ import annotations

import json
import random
import signal
import socket
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

from loadtests.experiments.reading import load
from servers.metadata import SESSION_HEADER
from servers.rpc import inference_pb2, inference_pb2_grpc
from servers.splitter.admin import Admin
from servers.splitter.live import live_shares
from tests.fakes.processes import free_port, wait_for
from tests.fakes.whole_run import ROOT, command, environment


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
    rate: float = 80.0
    answers: list[Answer] = field(default_factory=list)
    ports: dict[str, int] = field(default_factory=dict)
    children: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _sender: threading.Thread | None = None

    def __enter__(self) -> Production:
        self.ports = {name: free_port() for name in (*self.arms, "split", "admin")}
        try:
            for arm in self.arms:
                self.start_arm(arm)
            self.start_split()
        except BaseException:
            self._end_children()
            raise
        self._sender = threading.Thread(target=self._send, daemon=True)
        self._sender.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        assert self._sender is not None
        self._sender.join(10)
        self._end_children()

    def _end_children(self) -> None:
        for child in self.children.values():
            child.kill()
            child.wait()

    @property
    def admin(self) -> Admin:
        return Admin(f"127.0.0.1:{self.ports['admin']}")

    def weights(self) -> dict[str, int]:
        """Return what is in force."""
        return live_shares(self.admin).weights

    def start_arm(self, arm: str) -> None:
        config = self.folder / f"{arm}.json"
        own = next(item for item in load("demo").own_arms if item.name == arm)
        config.write_text(json.dumps(own.config.to_dict()))
        command = ["tests/fakes/arm.py", "--config", str(config), "--replica", f"{arm}-0"]
        command += ["--port", str(self.ports[arm]), "--warmup-s", "0.1", *self.flags.get(arm, ())]
        self._start(arm, command)
        self._await_port(arm)

    def start_split(self) -> None:
        """Start the splitter, which gives all to the first arm."""
        command = ["-m", "loadtests.commands.main", "split", "--request-log", str(self.folder / "requests.log")]
        for place, arm in enumerate(self.arms):
            command += ["--arm", f"{arm}=127.0.0.1:{self.ports[arm]}", "--weight", f"{arm}={int(place == 0)}"]
        command += ["--port", str(self.ports["split"]), "--admin-port", str(self.ports["admin"])]
        self._start("split", command)
        self._await_port("split")

    def kill(self, name: str) -> None:
        self.children[name].send_signal(signal.SIGKILL)
        self.children[name].wait()

    def ramp(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "loadtests.commands.main", "ramp", *arguments, "--json"],
            cwd=self.folder,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=(self.folder / "ramp.log").open("a"),
            text=True,
        )

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return command([sys.executable, "-m", "loadtests.commands.main", *arguments], self.folder)

    def _start(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.children[name] = subprocess.Popen(
                [sys.executable, *command], cwd=ROOT, env=environment(), stdout=log, stderr=log
            )

    def _await_port(self, name: str) -> None:
        def is_open() -> bool:
            assert self.children[name].poll() is None, (self.folder / f"{name}.log").read_text()
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", self.ports[name])) == 0

        wait_for(is_open, every_s=0.05, otherwise=lambda: f"{name} does not listen")

    def _send(self) -> None:
        rng = random.Random(5)
        options = [("grpc.max_reconnect_backoff_ms", 200), ("grpc.initial_reconnect_backoff_ms", 100)]
        address = f"127.0.0.1:{self.ports['split']}"
        with grpc.insecure_channel(address, options=options) as channel, ThreadPoolExecutor(64) as pool:
            stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
            while not self._stopped.wait(rng.expovariate(self.rate)):
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
            status = error.code().name  # type: ignore[attr-defined]
        arm = str(dict(call.trailing_metadata() or ()).get("tailgate-arm", ""))
        self.answers.append(Answer(session, sent_s, time.time(), status, arm))
