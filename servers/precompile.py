"""Compile an arm once and leave its code in a file: `python -m servers.precompile --config ARM.json --out FILE`.

The arm is loaded and warmed as it would be served, in a compile cache of its own; the file holds that cache. A start
with `compile.artifact` set to the file compiles none of it again. Exit codes: 0 written, 2 cannot be configured so,
1 it broke.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from servers import stdout
from servers.clock import now_ns
from servers.config import ArmConfig
from servers.program import compile_cache, exit_code, isolate_compiler, log_to_stderr, on_its_card_alone, read_arm


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m servers.precompile", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", required=True, help="the arm as JSON (ArmConfig.to_dict())")
    parser.add_argument("--out", required=True, help="where the file is written")
    parser.add_argument("--json", action="store_true", help="print one JSON object alone")
    options = parser.parse_args(arguments)
    return exit_code(lambda: _precompile(read_arm(options.config), options.out, as_json=options.json))


def _precompile(arm: ArmConfig, path: str, *, as_json: bool) -> int:
    log_to_stderr(logging.WARNING)
    arm = on_its_card_alone(replace(arm, compile=replace(arm.compile, artifact="")), os.environ)
    begun_ns = now_ns()
    with compile_cache("") as folder:
        isolate_compiler(os.environ, folder)
        from servers.compiler import artifacts
        from servers.compiler.recorder import CompileRecorder
        from servers.engine.runner import runner_for

        artifacts.compile_portably()
        recorder = CompileRecorder()
        recorder.install()
        runner = runner_for(arm, recorder)
        print(f"loading {arm.model.id}", file=sys.stderr, flush=True)
        runner.load()
        runner.warm_up(lambda done, total, detail: print(f"{done}/{total}: {detail}", file=sys.stderr, flush=True))
        compiles = [event for event in recorder.drain() if event.kind in ("compile", "recompile")]
        written = artifacts.save(path, arm, runner.device)
    unkept = sum(event.cache == "bypass" for event in compiles)
    size, seconds, graphs = Path(path).stat().st_size, (now_ns() - begun_ns) / 1e9, int(written.facts["graphs"])
    kept = "1 graph" if graphs == 1 else f"{graphs} graphs"
    words = (
        f"{path}\n{kept} of {arm.name} in {size / 2**20:.1f} MiB, compiled in {seconds:.1f} s\n"
        f"for {written.facts['device']}; load it with compile.artifact"
    )
    if unkept:
        words += f"\n{unkept} of {len(compiles)} graphs cannot be kept: they compile at every start"
    document = {"artifact": path, "identity": written.identity, "bytes": size, "seconds": seconds}
    stdout.write(words, {**document, "graphs": graphs, "compiles": len(compiles), "unkept": unkept}, as_json=as_json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
