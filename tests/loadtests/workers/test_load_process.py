from __future__ import annotations

import subprocess
import sys

# In a process of its own: importing Locust patches the standard library.
_CODE = """
from locust.env import Environment
import logging, sys
from loadtests.workers.load_process import LoadProcess
LoadProcess(Environment())
handler = logging.StreamHandler(open("/dev/full", "w"))
handler.emit(logging.LogRecord("x", logging.INFO, "", 0, "a line", None, None))
print("went on", flush=True)
import os
os._exit(0)
"""


def test_a_log_on_a_full_disk_gets_no_traceback_of_its_own_writing() -> None:
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr) == ("went on\n", "")
