"""Compile an arm and write its code to a file: `python -m tailgate.servers.precompile --config ARM.json --out FILE`.

Exit codes: 0 written, 2 cannot be configured so, 1 it broke.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tailgate.servers import stdout
from tailgate.servers.config import ArmConfig
from tailgate.servers.program import (
    compile_cache,
    exit_code,
    isolate_compiler,
    log_to_stderr,
    pin_to_card,
    progress_to_stderr,
    read_arm,
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tailgate.servers.precompile")
    parser.add_argument("--config", required=True, help="the arm as JSON (ArmConfig.to_dict())")
    parser.add_argument("--out", required=True, help="where the file is written")
    parser.add_argument("--json", action="store_true", help="print one JSON object alone")
    parser.add_argument("--quiet", action="store_true", help="print no progress")
    options = parser.parse_args(arguments)
    report = progress_to_stderr(quiet=options.quiet)
    return exit_code(lambda: _precompile(read_arm(options.config), options.out, report, as_json=options.json))


def _precompile(arm: ArmConfig, path: str, report: Callable[[str], None], *, as_json: bool) -> int:
    log_to_stderr(logging.WARNING)
    arm = pin_to_card(arm.replace(compile=arm.compile.replace(artifact="")), os.environ)
    with compile_cache("") as folder:
        isolate_compiler(os.environ, folder)
        from tailgate.servers.compiler import artifacts
        from tailgate.servers.engine.in_process import warm_runner

        artifacts.compile_portably()
        with warm_runner(arm, lambda *at: report("{}/{}: {}".format(*at))) as runner:
            caches = [event.cache for event in runner.recorder.drain() if event.kind != "jit"]
            graphs, unkept = caches.count("miss"), caches.count("bypass")
            artifacts.save(path, arm, str(runner.device), graphs)
    words = f"{path}: {graphs} graphs of {arm.name} for {runner.device_name()}; load it with compile.artifact"
    words += f"\n{unkept} graphs cannot be kept: they compile at every start" if unkept else ""
    document = {"artifact": path, "bytes": Path(path).stat().st_size, "graphs": graphs, "unkept": unkept}
    stdout.write(words, document, as_json=as_json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
