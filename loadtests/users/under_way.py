"""Which requests are under way, by the lines of their beginning and of their end, and so up to when all have ended."""

from __future__ import annotations

from collections import OrderedDict

# A line is in the file half a second after the event at the latest, and a disk may take its time.
_LATE_NS = 2_000_000_000


class UnderWay:
    """Requests that came and have not ended. One that has lasted `longest_ns` is not waited for any more."""

    def __init__(self, *, longest_ns: int) -> None:
        self._longest_ns = longest_ns
        self._arms: OrderedDict[tuple[int, int], list[str]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._arms.values()))

    def begun(self, start_ns: int, connection: int, arm: str) -> None:
        """One more is under way at the arm, "" where that is not known or does not count."""
        self._arms.setdefault((start_ns, connection), []).append(arm)

    def ended(self, start_ns: int, connection: int, arm: str) -> None:
        """One of them has ended; one that nobody saw begin changes nothing."""
        arms = self._arms.get((start_ns, connection), [])
        if arms:
            arms.remove(arm if arm in arms else arms[-1])
        if not arms:
            self._arms.pop((start_ns, connection), None)

    def at(self, arm: str, *, until_ns: int | None = None) -> int:
        """How many are under way at the arm, of those that came before `until_ns`."""
        return sum(
            arms.count(arm) for (start_ns, _), arms in self._arms.items() if until_ns is None or start_ns < until_ns
        )

    def lost(self) -> int:
        """How many were under way, none of which will end: the splitter is gone."""
        count = len(self)
        self._arms.clear()
        return count

    def settled_ns(self, now_ns: int) -> int:
        """All that came before this instant has ended and been read, as far as it was waited for."""
        waited = (start_ns for start_ns, _ in self._arms if start_ns > now_ns - self._longest_ns)
        return min(min(waited, default=now_ns), now_ns - _LATE_NS)
