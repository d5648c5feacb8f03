"""Serves the live page of one run until SIGTERM comes.

    python -P -m loadtests.page RUN_DIR --host 127.0.0.1 --port 0

Prints {"url": …} on stdout once it listens, and writes the same to RUN_DIR/page.json. The token that browsers need is
in the environment, where the page is not for this machine alone.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

from analysis.records.documents import write_document
from loadtests.page.access import page_token
from loadtests.page.server import PageServer

NICENESS = 10
_LAST_WORDS_S = 3.0


def main() -> int:
    """The page was served; returns the exit code."""
    parser = argparse.ArgumentParser(prog="page", description="Serves the live page of a run.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stopping.set())
    with suppress(OSError):
        os.nice(NICENESS)
    token, _ = page_token(options.host)
    try:
        server = PageServer(options.run_dir, options.host, options.port, token=token)
    except OSError as error:
        print(f"{options.host}:{options.port} cannot be listened on: {error.strerror or error}", file=sys.stderr)
        return 1
    url = server.url(_shown(options.host))
    address = options.run_dir / "page.json"
    with suppress(OSError):
        write_document(address, {"url": url, "pid": os.getpid()})
    print(json.dumps({"url": url}), flush=True)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 5.0}, name="server", daemon=True).start()
    stopping.wait()
    server.finish(_LAST_WORDS_S)
    with suppress(OSError):
        address.unlink()
    return 0


def _shown(host: str) -> str:
    """The name under which others reach this machine, where it listens on all its addresses."""
    try:
        is_any = ip_address(host).is_unspecified
    except ValueError:
        is_any = False
    return socket.gethostname() if is_any else host


if __name__ == "__main__":
    sys.exit(main())
