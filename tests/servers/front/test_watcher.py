"""What a subscriber of the telemetry gets, and when it gets nothing more."""

from __future__ import annotations

import asyncio

from servers.front.watcher import Watcher


def test_a_watcher_gives_what_was_retained_then_what_comes_then_the_end() -> None:
    async def read() -> list[int | None]:
        watcher: Watcher[int] = Watcher((int,), [1, 2])
        seen = [await watcher.get(), await watcher.get()]
        waiting = asyncio.create_task(watcher.get())
        await asyncio.sleep(0)
        watcher.put(3)
        seen.append(await waiting)
        watcher.close()
        watcher.put(4)
        return [*seen, await watcher.get(), await watcher.get()]

    assert asyncio.run(read()) == [1, 2, 3, None, None]


def test_what_was_not_asked_for_is_not_kept() -> None:
    watcher: Watcher[int | str] = Watcher((int,), [])
    watcher.put("step")
    assert watcher.empty()


def test_a_watcher_that_is_not_read_ends_and_holds_nothing() -> None:
    watcher: Watcher[int] = Watcher((int,), [], limit=3)
    for number in range(5):
        watcher.put(number)
    assert watcher.fell_behind
    assert watcher.empty()
    assert asyncio.run(watcher.get()) is None
