"""A neighbour on a device: it takes a share of the memory, computes a share of the time, and sends a tenant requests.

`python -m servers.neighbour --device cuda:0 [--tenant HOST:PORT]`, run by loadtests/trials/pressure.py. Prints
{"ready": true, "device": "cuda:0"} once torch is there. Then each JSON object on stdin, such as {"memory_share": 0.3,
"compute_share": 0.2, "tenant_rps": 2}, is what it does until the next one, and is answered by one JSON object: when the
last ended, what it had come to, when this one began, how much memory is held, and what went wrong. It ends when stdin
does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import random
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
import torch

from servers.clock import now_ns
from servers.complaint import named, one_line
from servers.engine.placement import device_name, resolve_device
from servers.fields import build
from servers.host_memory import host_memory
from servers.rpc import inference_pb2, inference_pb2_grpc

# How long computing and resting take together. Shorter than a decode step of a large model, so that each step feels it.
PERIOD_S = 0.01
SPARED_SHARE = 0.05  # of a host's memory, which stays free whatever is asked
_CHUNK_BYTES = 64 << 20
_AT_ONCE = 64  # requests under way to the tenant; what is due beyond them is left out and counted
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What the neighbour does: shares from 0 to 1, requests/s."""

    memory_share: float = 0.0
    compute_share: float = 0.0
    tenant_rps: float = 0.0


class Memory:
    """A share of the memory of a device, or of the host, touched so that it is really taken."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: list[torch.Tensor] = []

    @property
    def held_bytes(self) -> int:
        """How much is held."""
        return sum(chunk.numel() for chunk in self._held)

    def hold(self, share: float) -> str:
        """As much of the share is held as there is. Returns what is missing, in words; empty when nothing is."""
        total, _ = self._memory()
        wanted = int(share * total)
        del self._held[wanted // _CHUNK_BYTES :]
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        why = ""
        while not why and (left := wanted - self.held_bytes) > 0:
            size = min(left, _CHUNK_BYTES)
            try:
                if self._device.type == "cpu" and self._memory()[1] - size < SPARED_SHARE * total:
                    raise MemoryError(f"the last {SPARED_SHARE:.0%} of the host's memory stay free")
                self._held.append(torch.ones(size, dtype=torch.uint8, device=self._device))
            except (RuntimeError, MemoryError) as error:
                why = str(error).partition("\n")[0]
        if not why:
            return ""
        return f"holds {self.held_bytes / 2**30:.1f} GiB of {wanted / 2**30:.1f} GiB asked for: {why}"

    def _memory(self) -> tuple[int, int]:
        """(total, free) bytes."""
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            return total, free
        return host_memory()


class Compute:
    """Matrix products for a share of each period, and rest for the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        size, dtype = (4096, torch.bfloat16) if device.type == "cuda" else (256, torch.float32)
        self._left, self._right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        self._product = torch.empty_like(self._left)
        # Without it the host would spin while it waits for the card, and take a processor from the arms.
        self._done = torch.cuda.Event(blocking=True) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.busy_s = 0.0
        self._overrun_s = 0.0
        self._products()

    def period(self, share: float) -> None:
        """One period has passed, `share` of it with products. What one overran the next makes up for."""
        began = time.perf_counter()
        budget_s = share * PERIOD_S - self._overrun_s
        busy_s = 0.0
        while busy_s < budget_s:
            self._products()
            busy_s = time.perf_counter() - began
        self._overrun_s = min(PERIOD_S, busy_s - budget_s)
        self.busy_s += busy_s
        time.sleep(max(0.0, PERIOD_S - busy_s))

    def _products(self) -> None:
        torch.mm(self._left, self._right, out=self._product)
        if self._done is not None:
            self._done.record()
            self._done.synchronize()


class Tenant:
    """Requests of one size to a server, one each 1/rps seconds, whatever becomes of those before."""

    def __init__(self, target: str, *, prompt_tokens: int, tokens: int) -> None:
        # A proxy from the environment must not stand between this process and a server on loopback.
        self._channel = grpc.insecure_channel(target, options=(("grpc.enable_http_proxy", 0),))
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)  # type: ignore[no-untyped-call]
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="tenant")
        self._prompt_tokens, self._tokens = prompt_tokens, tokens
        self._rng = random.Random(0)
        self._lock = threading.Lock()
        self._under_way = 0
        self.counts = {"answered": 0, "failed": 0, "left_out": 0}
        self._rps = 0.0
        self._changed = threading.Event()
        threading.Thread(target=self._send, name="tenant-clock", daemon=True).start()

    def at(self, rps: float) -> dict[str, int]:
        """From now on `rps` are sent; returns the counts of what was sent until now."""
        with self._lock:
            counts, self.counts = self.counts, dict.fromkeys(self.counts, 0)
            self._rps = rps
        self._changed.set()
        return counts

    def _send(self) -> None:
        while True:
            self._changed.wait()
            self._changed.clear()
            due = time.monotonic()
            while (rps := self._rps) > 0:
                with self._lock:
                    full = self._under_way >= _AT_ONCE
                    if full:
                        self.counts["left_out"] += 1
                    else:
                        self._under_way += 1
                if not full:
                    self._pool.submit(self._ask, [self._rng.randrange(3, 200) for _ in range(self._prompt_tokens)])
                due += 1.0 / rps
                if self._changed.wait(max(0.0, due - time.monotonic())):
                    break

    def _ask(self, prompt: list[int]) -> None:
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=prompt), max_tokens=self._tokens, ignore_eos=True
        )
        outcome = "answered"
        try:
            for _ in self._stub.Generate(request, timeout=_TIMEOUT_S):
                pass
        except grpc.RpcError:
            outcome = "failed"
        with self._lock:
            self.counts[outcome] += 1
            self._under_way -= 1


class Neighbour:
    """Does what the last demand says."""

    def __init__(self, device: torch.device, tenant: Tenant | None) -> None:
        self.demand = Demand()
        self._memory, self._compute, self._tenant = Memory(device), Compute(device), tenant
        self._since = time.perf_counter()

    def change(self, demand: Demand) -> dict[str, object]:
        """The neighbour does what `demand` says; returns what the last came to, and what is missing of this one."""
        ended_ns, seconds = now_ns(), time.perf_counter() - self._since
        had = {"compute_share": self._compute.busy_s / seconds if seconds else 0.0}
        counts = self._tenant.at(demand.tenant_rps) if self._tenant is not None else {}
        error = self._memory.hold(demand.memory_share)
        self.demand, self._compute.busy_s, self._since = demand, 0.0, time.perf_counter()
        return {
            **asdict(demand),
            "ended_ns": ended_ns,
            "had": had | counts,
            "began_ns": now_ns(),
            "memory_bytes": self._memory.held_bytes,
            "error": one_line(error) or None,
        }

    def work(self) -> None:
        """One period of it has passed."""
        self._compute.period(self.demand.compute_share)


def main(arguments: Sequence[str] | None = None) -> int:
    """The program."""
    parser = argparse.ArgumentParser(prog="python -m servers.neighbour", description=__doc__)
    parser.add_argument("--device", required=True, help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--tenant", default="", help="host:port of the server that gets its requests")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16)
    options = parser.parse_args(arguments)
    _be_the_first_to_go()
    try:
        device = resolve_device(options.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(1)
        tenant = None
        if options.tenant:
            tenant = Tenant(options.tenant, prompt_tokens=options.prompt_tokens, tokens=options.tokens)
        neighbour = Neighbour(device, tenant)
    except Exception as error:  # a device that is taken, full or broken
        _say({"error": one_line(named(error))})
        return 1
    _say({"ready": True, "device": device_name(device)})
    demands: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(demands,), daemon=True).start()
    while True:
        try:
            line = demands.get(block=not neighbour.demand.compute_share)
        except queue.Empty:
            neighbour.work()
            continue
        if not line:
            return 0
        _say(neighbour.change(build(Demand, json.loads(line), where="demand")))


def _be_the_first_to_go() -> None:
    """Where memory runs out all the same, the kernel ends this process and no arm."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _read(demands: queue.SimpleQueue[str]) -> None:
    """Each line of stdin is in the queue, and an empty one when it has ended."""
    for line in sys.stdin:
        demands.put(line)
    demands.put("")


def _say(message: Mapping[str, object]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    sys.exit(main())
