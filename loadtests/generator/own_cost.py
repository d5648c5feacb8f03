"""What a load process costs itself: its share of a core, and the pauses of the garbage collector."""

from __future__ import annotations

import gc
import time


class CpuShare:
    """How much of a core the thread that makes it used, second by second."""

    BUSY = 0.95  # above this a core is as good as used up
    _SHORTEST_S = 0.5

    def __init__(self) -> None:
        self._thread_s, self._wall_s = time.thread_time(), time.perf_counter()
        self._used_s = self._measured_s = self.busy_s = self.most = 0.0

    def restart(self) -> None:
        """What was used up to now counts for nothing: there was no schedule to keep."""
        self.__init__()  # type: ignore[misc]

    def take(self) -> None:
        """The stretch since the last call is counted, unless it is shorter than half a second."""
        thread_s, wall_s = time.thread_time(), time.perf_counter()
        used_s, took_s = thread_s - self._thread_s, wall_s - self._wall_s
        if took_s < self._SHORTEST_S:
            return
        self._thread_s, self._wall_s = thread_s, wall_s
        self._used_s += used_s
        self._measured_s += took_s
        self.most = max(self.most, used_s / took_s)
        if used_s >= self.BUSY * took_s:
            self.busy_s += took_s

    def summary(self) -> dict[str, float]:
        """{"mean", "max"} as shares of a core, {"busy_s", "of_s"} seconds at 95 % or more of those measured."""
        mean = self._used_s / self._measured_s if self._measured_s else 0.0
        figures = {"mean": mean, "max": self.most, "busy_s": self.busy_s, "of_s": self._measured_s}
        return {key: round(value, 4) for key, value in figures.items()}


class GarbageWindow:
    """No unplanned garbage collection between `open` and `close`.

    A full collection walks every object that Locust, pyarrow and protobuf ever made and stops all greenlets for tens of
    milliseconds: it is the hidden tail of a Python load generator. So the objects alive at the start are frozen
    and the collector is switched off. Reference counts still free nearly everything; cycles (some exceptions, web
    requests) would pile up, so `sweep` looks at the young objects alone when many have gathered, which takes well
    under a millisecond, and books the time it took.
    """

    SWEEP_ABOVE = 20_000  # tracked objects made since the last sweep and still alive

    def __init__(self) -> None:
        self._was_enabled: bool | None = None
        self.spent_ms = {"count": 0, "total": 0.0, "max": 0.0}

    def open(self) -> None:
        """The collector is off and it will not look at what is alive now."""
        if self._was_enabled is not None:
            return
        self._was_enabled = gc.isenabled()
        gc.collect()
        gc.freeze()
        gc.disable()

    def sweep(self) -> None:
        """Cycles among young objects are freed, if there may be many. Call it where a pause does least harm."""
        if self._was_enabled is None or gc.get_count()[0] < self.SWEEP_ABOVE:
            return
        began = time.perf_counter()
        gc.collect(0)
        took_ms = (time.perf_counter() - began) * 1e3
        spent = self.spent_ms
        spent["count"] += 1
        spent["total"] = round(spent["total"] + took_ms, 3)
        spent["max"] = round(max(spent["max"], took_ms), 3)

    def close(self) -> None:
        """The collector is as it was before `open`."""
        if self._was_enabled is None:
            return
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()
        self._was_enabled = None
