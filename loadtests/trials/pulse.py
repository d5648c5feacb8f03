"""Whether the replicas of somebody else's start still live: asked each second, since no exit code tells."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from loadtests.trials.channels import arm_channel, is_gone

_EVERY_S = 0.5
_TRIES = 2  # a connection may be lost without a death


class Pulse:
    """Asks each of `targets`, {replica: host:port}, until `stop`. `gone` is told of one that cannot be reached, once a
    death, and `back` of one that answers again: it may die again."""

    def __init__(
        self,
        targets: Mapping[str, str],
        *,
        gone: Callable[[str], None],
        back: Callable[[str], None],
        token: str = "",
    ) -> None:
        self._gone, self._back = gone, back
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(replica, target, token), name=f"pulse-{replica}", daemon=True)
            for replica, target in targets.items()
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Nobody is asked any more."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(timeout=3.0)

    def _ask(self, replica: str, target: str, token: str) -> None:
        channel = arm_channel(target, token=token)
        missed = 0
        while not self._stopped.wait(_EVERY_S):
            if is_gone(channel):
                missed += 1
                if missed == _TRIES:
                    self._gone(replica)
                continue
            if missed >= _TRIES:
                self._back(replica)
            missed = 0
        channel.close()
