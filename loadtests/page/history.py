"""What happened until now, in a bounded number of items: the longer a run, the wider its items lie apart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Item = dict[str, Any]


class History:
    """Items in the order in which they came. Once there are `most`, every other one is dropped, but for the newest, and
    from then on only every other one that comes is kept; or, with `newest`, the oldest half is dropped."""

    def __init__(self, most: int, *, newest: bool = False) -> None:
        self._most = most
        self._newest = newest
        self._every = 1
        self._came = 0
        self._items: list[Item] = []
        self._last = 0  # which of all that came is the last item
        self._changed_from: int | None = None

    @property
    def items(self) -> list[Item]:
        return self._items

    def add(self, items: Iterable[Item]) -> None:
        """The items are the newest."""
        for item in items:
            if self._items and self._last % self._every:
                self._items.pop()  # it was there only until the next
            at = len(self._items)
            self._last = self._came
            self._came += 1
            self._items.append(item)
            self._changed_from = at if self._changed_from is None else min(at, self._changed_from)
            if len(self._items) >= self._most:
                self._thin()

    def take_changes(self) -> tuple[int, list[Item]] | None:
        """(index, items from there on) of what changed since the last call; None where nothing did."""
        at, self._changed_from = self._changed_from, None
        return None if at is None else (at, self._items[at:])

    def _thin(self) -> None:
        self._changed_from = 0
        if self._newest:
            self._items = self._items[len(self._items) // 2 :]
            return
        last = self._items[-1]
        self._items = self._items[::2]
        self._every *= 2
        if self._items[-1] is not last:
            self._items.append(last)
