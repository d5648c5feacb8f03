"""What a start costs: a replica from its process's start to ready, on an empty compiler cache, on a filled one, and on
an empty one with an artifact.

As a program (`python -m benchmarks.startup ARM.json CACHE_DIR`) this file stands where servers.front.serve stands,
without the wire: it starts the engine process, prints JSON lines of its progress and ends when the engine is ready.
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.environment import ROOT, child_environment
from benchmarks.measure import spread
from loadtests.trials.processes import Child, describe_exit
from servers.clock import now_ns
from servers.config import ArmConfig
from servers.engine.device import serve_engine
from servers.engine.messages import Progress, Ready, Shutdown


class StartupError(RuntimeError):
    """The engine process did not become ready; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start, in seconds from the start of the replica's process to ready."""

    ready_s: float
    items_s: dict[str, float]  # process, import, load, each warm-up shape, as the engine itemises it

    def parts(self) -> dict[str, float]:
        """Where the time went, by the first word of the items (process, load, decode, …); `rest` is in no item."""
        parts: dict[str, float] = {}
        for item, seconds in self.items_s.items():
            part = item.split(" ", 1)[0]
            parts[part] = parts.get(part, 0.0) + seconds
        return {**parts, "rest": self.ready_s - sum(parts.values())}

    def shapes_s(self) -> float:
        """What the warm-up of all shapes took; their CUDA graphs, which no cache holds, are captured besides."""
        parts = self.parts()
        return sum(parts.get(kind, 0.0) for kind in ("prefill", "extend", "decode"))


def start_once(arm: ArmConfig, cache_dir: str, note: Callable[[str], None]) -> Start:
    """Start a replica's processes, wait until its engine is ready, end them."""
    with tempfile.TemporaryDirectory(prefix="tailgate-start-") as folder:
        config = Path(folder) / "arm.json"
        config.write_text(json.dumps(arm.to_dict()))
        command = [sys.executable, "-m", "benchmarks.startup", str(config), cache_dir]
        started_ns = now_ns()
        log = Path(folder) / "replica.log"
        replica = Child("replica", command, log_path=log, environment=child_environment(), folder=ROOT)
        try:
            while True:
                code = replica.poll()
                line = replica.line(1.0)
                at_ns = now_ns()
                if line is None and code is not None:
                    raise StartupError(f"the replica ended with {describe_exit(code)}: {replica.log_tail()}")
                message = json.loads(line or "{}")
                if "failed" in message:
                    raise StartupError(message["failed"])
                if "progress" in message:
                    note(message["progress"])
                if "items_s" in message:
                    return Start(ready_s=(at_ns - started_ns) / 1e9, items_s=message["items_s"])
        finally:
            replica.stop(5.0)


def with_artifact(arm: ArmConfig, path: Path, note: Callable[[str], None]) -> ArmConfig:
    """The arm, which starts with its own compiled code: written to `path` as a user writes it."""
    config = path.with_suffix(".json")
    config.write_text(json.dumps(arm.to_dict()))
    command = [sys.executable, "-m", "servers.precompile", "--config", str(config), "--out", str(path), "--json"]
    ended = subprocess.run(command, env=child_environment(), cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise StartupError(f"no artifact was written: {ended.stderr.strip().splitlines()[-1:]}")
    written = json.loads(ended.stdout.splitlines()[-1])
    note(f"artifact: {written['graphs']} graphs in {written['bytes'] / 2**20:.1f} MiB after {written['seconds']:.1f} s")
    return replace(arm, compile=replace(arm.compile, artifact=str(path)))


def read_libraries() -> None:
    """torch and transformers are in the page cache, so that the first start reads them no slower than the next."""
    subprocess.run(
        [sys.executable, "-c", "import torch, transformers, torch._inductor.config"],
        env=child_environment(),
        check=True,
        stdout=subprocess.DEVNULL,
    )


def summary(starts: Mapping[str, Sequence[Start]]) -> dict[str, Any]:
    """The kinds of start side by side: seconds to ready and for the shapes, their parts and items, and how much quicker
    each kind is than cold, by medians."""
    ready = {kind: spread([start.ready_s for start in some]) for kind, some in starts.items()}
    shapes = {kind: spread([start.shapes_s() for start in some]) for kind, some in starts.items()}
    others = [kind for kind in starts if kind != "cold"]
    return {
        "starts": len(starts["cold"]),
        **{f"{kind}_s": ready[kind] for kind in starts},
        **{f"cold_over_{kind}": ready["cold"]["median"] / ready[kind]["median"] for kind in others},
        **{f"{kind}_shapes_s": shapes[kind] for kind in starts},
        **{f"cold_over_{kind}_shapes": _ratio(shapes["cold"]["median"], shapes[kind]["median"]) for kind in others},
        **{
            f"{kind}_{part}_s": median(start.parts()[part] for start in some)
            for kind, some in starts.items()
            for part in some[0].parts()
        },
        "items_s": {
            item: {kind: median(start.items_s.get(item, 0.0) for start in some) for kind, some in starts.items()}
            for item in dict.fromkeys(item for some in starts.values() for item in some[0].items_s)
        },
    }


def _ratio(above: float, below: float) -> float | None:
    """None where nothing was warmed."""
    return above / below if below else None


def main(config: str, cache_dir: str) -> int:
    """Be the replica: 0 once its engine was ready, 1 when it failed."""
    table = json.loads(Path(config).read_text())
    spawn = multiprocessing.get_context("spawn")
    pipe, engine_end = spawn.Pipe()
    engine = spawn.Process(target=serve_engine, args=(engine_end, table, cache_dir), daemon=True)
    engine.start()
    engine_end.close()
    outcome: dict[str, Any] = {}
    try:
        while not outcome:
            for message in pipe.recv():
                if isinstance(message, Ready):
                    outcome = {"items_s": {key: value / 1e9 for key, value in message.startup_ns.items()}}
                elif isinstance(message, Progress) and message.stage == "failed":
                    outcome = {"failed": message.detail}
                elif isinstance(message, Progress):
                    done = f"{message.stage} {message.done} of {message.total}: {message.detail}"
                    print(json.dumps({"progress": done}), flush=True)
        pipe.send(Shutdown())
    except (EOFError, OSError):
        engine.join(5.0)
        outcome = outcome or {"failed": f"the engine process ended with exit code {engine.exitcode}"}
    print(json.dumps(outcome), flush=True)
    engine.kill()
    return 1 if "failed" in outcome else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
