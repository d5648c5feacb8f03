"""A TCP relay that delays, holds, resets or refuses connections.

`python tests/faults/relay.py ARM WORDS` starts an arm and prints its line with the port of a relay to it. The relay
follows the file `REPLICA.weather` in the folder that the variable `VARIABLE` names: JSON with the fields of `Weather`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tailgate.servers.processes import launched

VARIABLE = "TAILGATE_FAULTS_RELAYS"
PIECE = 1 << 14
_ABORT = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Weather:
    """Each piece arrives `delay_s` late; at most `bytes_per_s` are read (0: any); `held`: nothing passes; `refused`:
    connections are reset, and no new one is accepted; `reset`: they are reset once."""

    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    held: bool = False
    refused: bool = False
    reset: bool = False


FAIR = Weather()


class Relay:
    """Relay connections to `port` of loopback to `target`, in the current weather."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.weather = FAIR
        self.port = 0
        self._target = target
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port, limit=PIECE)
        self.port = self._server.sockets[0].getsockname()[1]

    async def follow(self, path: Path) -> None:
        """Change with the weather in the file, which this writes first."""
        change(path, self.weather)
        while True:
            await asyncio.sleep(_POLL_S)
            with contextlib.suppress(OSError, ValueError):  # it is being written
                was, self.weather = self.weather, Weather(**json.loads(path.read_text()))
                if self.weather.refused and not was.refused and self._server is not None:
                    self._server.close()
                if (self.weather.refused, self.weather.reset) > (was.refused, was.reset):
                    self._reset()
                if was.refused and not self.weather.refused:
                    await self.start()

    def _reset(self) -> None:
        """End every connection with a reset on both sides."""
        for writer in list(self._writers):
            with contextlib.suppress(OSError):
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
            writer.transport.abort()

    async def _accept(self, near_in: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        self._writers.add(near_out)
        far_out = None
        try:
            await self._released()
            far_in, far_out = await asyncio.open_connection(*self._target, limit=PIECE)
            self._writers.add(far_out)
            await asyncio.gather(self._pass_on(near_in, far_out), self._pass_on(far_in, near_out))
        except (OSError, asyncio.CancelledError):
            pass  # one side has ended it, or the relay ends
        finally:
            for writer in filter(None, (near_out, far_out)):
                self._writers.discard(writer)
                writer.transport.abort()

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while True:
            await self._released()
            rate = self.weather.bytes_per_s
            piece = await source.read(max(1, min(PIECE, int(rate * _POLL_S))) if rate else PIECE)
            if rate := self.weather.bytes_per_s:  # it may have changed meanwhile
                await asyncio.sleep(len(piece) / rate)
            await asyncio.sleep(self.weather.delay_s)
            await self._released()
            if not piece:
                sink.write_eof()
                return
            sink.write(piece)
            await sink.drain()

    async def _released(self) -> None:
        while self.weather.held:
            await asyncio.sleep(_POLL_S)


def change(path: Path, weather: Weather) -> None:
    """Set the weather of the relay that follows the file."""
    path.write_text(json.dumps(dataclasses.asdict(weather)))


async def _arm(command: list[str]) -> int:
    words = launched([sys.executable, *command])  # it ends when this process is killed
    arm = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, lambda: arm.returncode is None and arm.terminate())
    if line := await arm.stdout.readline():
        places = json.loads(line)
        relay = Relay(("127.0.0.1", places["port"]))
        await relay.start()
        replica = command[command.index("--replica") + 1]
        print(json.dumps({**places, "port": relay.port}), flush=True)
        follow = relay.follow(Path(os.environ[VARIABLE]) / f"{replica}.weather")
        tasks = [asyncio.create_task(arm.wait()), asyncio.create_task(follow)]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    return await arm.wait()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(asyncio.run(_arm(sys.argv[1:])))
