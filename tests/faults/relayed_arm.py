"""An arm that all reach through a relay: arguments are an arm's program and its command line.

The port that it prints is the relay's; where the relay takes orders is in `REPLICA.relay` in the folder that the
variable RELAYS names.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from servers.launcher import launched
from tests.faults.relay import serve

VARIABLE = "TAILGATE_FAULTS_RELAYS"


async def _main(command: list[str]) -> int:
    words = launched([sys.executable, *command])  # it goes when this process is killed
    arm = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE)
    assert arm.stdout is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, lambda: arm.returncode is None and arm.terminate())
    if line := await arm.stdout.readline():
        places = json.loads(line)
        relay, orders = await serve(("127.0.0.1", places["port"]))
        replica = command[command.index("--replica") + 1]
        path = Path(os.environ[VARIABLE]) / f"{replica}.relay"
        path.write_text(str(orders))
        print(json.dumps({**places, "port": relay.port}), flush=True)
    return await arm.wait()


if __name__ == "__main__":
    sys.exit(asyncio.run(_main(sys.argv[1:])))
