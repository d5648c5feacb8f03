"""A server that no run starts: an OpenAI-compatible one, whose address is its first line on stdout."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from tests.fakes.openai_server import CompilingServer, serving


def main() -> None:
    """Serves until SIGTERM."""
    with serving(CompilingServer(Path(sys.argv[1]), compiles_at=-1, compile_s=0.0)) as address:
        print(address, flush=True)
        signal.sigwait({signal.SIGTERM})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # for the threads too
    main()
