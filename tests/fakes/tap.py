"""A relay that keeps all that passes: what somebody on the way sees."""

from __future__ import annotations

import contextlib
import socket
import threading


class Tap:
    """Relays connections to `port` of loopback to `target` while it is entered; `seen` is all bytes of both ways."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.seen = bytearray()
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = [self._listener]

    def __enter__(self) -> Tap:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for item in self._sockets:
            with contextlib.suppress(OSError):
                item.shutdown(socket.SHUT_RDWR)
            item.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(self._target, timeout=10)
                except OSError:
                    near.close()
                    continue
                far.settimeout(None)
                self._sockets += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(65536):
                self.seen += piece
                sink.sendall(piece)
            sink.shutdown(socket.SHUT_WR)
