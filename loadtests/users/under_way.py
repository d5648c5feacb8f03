"""Which requests are under way, by the lines of their beginning and of their end, and so up to when all have ended."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

# A line is in the file half a second after the event at the latest, and a disk may take its time.
_LATE_NS = 2_000_000_000


class UnderWay:
    """Requests that came and have not ended. One that has lasted `longest_ns` is not waited for any more."""

    def __init__(self, *, longest_ns: int, known: Iterable[Sequence[int]] = ()) -> None:
        self._longest_ns = longest_ns
        self._since: OrderedDict[tuple[int, int], int] = OrderedDict()
        for start_ns, connection in known:
            self.begun(start_ns, connection)

    def __len__(self) -> int:
        return sum(self._since.values())

    def begun(self, start_ns: int, connection: int) -> None:
        """One more is under way."""
        key = (start_ns, connection)
        self._since[key] = self._since.get(key, 0) + 1

    def ended(self, start_ns: int, connection: int) -> None:
        """One of them has ended; one that nobody saw begin changes nothing."""
        key = (start_ns, connection)
        if (count := self._since.get(key, 0)) > 1:
            self._since[key] = count - 1
        else:
            self._since.pop(key, None)

    def lost(self) -> int:
        """How many were under way, none of which will end: the splitter is gone."""
        count = len(self)
        self._since.clear()
        return count

    def settled_ns(self, now_ns: int) -> int:
        """All that came before this instant has ended and been read, as far as it was waited for."""
        waited = (start_ns for start_ns, _ in self._since if start_ns > now_ns - self._longest_ns)
        return min(min(waited, default=now_ns), now_ns - _LATE_NS)

    def starts(self) -> list[list[int]]:
        """[start_ns, connection] of each, to go on from."""
        return [list(key) for key, count in self._since.items() for _ in range(count)]
