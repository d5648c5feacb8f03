"""Serve the live page of one run until SIGTERM comes.

    python -P -m loadtests.page RUN_DIR --host 127.0.0.1 --port 0

Says `Served` once it listens, and writes the same to RUN_DIR/page.json. The token that browsers need is
in the environment, where the page is not for this machine alone.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path

from analysis.records.documents import write_document
from loadtests.page.server import PageServer
from loadtests.page.serving import Served, page_token
from servers.processes import say

_NICENESS = 10
_LAST_WAIT_S = 3.0


def main() -> int:
    """Serve the page; returns the exit code."""
    parser = argparse.ArgumentParser(prog="page", description="Serves the live page of a run.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stopping.set())
    with suppress(OSError):
        os.nice(_NICENESS)
    token, _ = page_token(options.host)
    try:
        server = PageServer(options.run_dir, options.host, options.port, token=token)
    except OSError as error:
        print(f"{options.host}:{options.port} cannot be listened on: {error.strerror or error}", file=sys.stderr)
        return 1
    # Where it listens on all its addresses, others reach this machine by its name.
    url = server.url(socket.gethostname() if options.host in ("0.0.0.0", "::") else options.host)
    address = options.run_dir / "page.json"
    with suppress(OSError):
        write_document(address, {"url": url, "pid": os.getpid()})
    say(Served(url=url))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 5.0}, name="server", daemon=True).start()
    stopping.wait()
    server.finish(_LAST_WAIT_S)
    with suppress(OSError):
        address.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
