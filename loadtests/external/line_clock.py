"""When a line of a server's log was written, by this host's clock."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

_HEAD = 240  # characters of a line in which its time stands
# As kubectl and docker put it in front, as SGLang and JSON lines have it.
_WHOLE = re.compile(r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?(Z|[+-]\d\d:\d\d)?")
# vLLM's "INFO 11-25 22:48:07", and PyTorch's "V1125 22:48:07.239000". Neither names the year.
_YEARLESS = re.compile(r"\b(?:[A-Z]+ |[VIWEC](?=\d{4} ))(\d\d)-?(\d\d) (\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?")
_SECOND = 10**9
_SET_BACK_NS = 600 * _SECOND


class LineClock:
    """The clock of one log, whose zone and error are unknown: what it differs by is learnt from the lines that came
    soonest. A line without a time was written when it arrived."""

    def __init__(self) -> None:
        self._offset_ns: int | None = None
        self._before_ns: int | None = None  # the time of the line before, as it has it

    def learn(self, line: str, arrived_ns: int) -> None:
        """What the line tells of the clock is known, for lines that are taken up later."""
        if (told := _time_of(line[:_HEAD], arrived_ns)) is not None:
            delay_ns = arrived_ns - told[0]
            self._offset_ns = delay_ns if self._offset_ns is None else min(delay_ns, self._offset_ns)

    def moment(self, line: str, arrived_ns: int) -> int:
        """When the line was written: as it arrived, unless by its own time it came late."""
        told = _time_of(line[:_HEAD], arrived_ns)
        if told is None:
            return arrived_ns
        at_ns, step_ns = told
        if self._before_ns is not None and at_ns < self._before_ns - _SET_BACK_NS:
            self._offset_ns = None
        self._before_ns = at_ns
        self.learn(line, arrived_ns)
        assert self._offset_ns is not None
        return min(arrived_ns, at_ns + self._offset_ns + step_ns)


def _time_of(head: str, arrived_ns: int) -> tuple[int, int] | None:
    """(ns, what it is rounded down to) of the first time in the text, as if of UTC; None where there is none."""
    if match := _WHOLE.search(head):
        year, *rest, fraction, zone = match.groups()
        years = [int(year)]
    elif match := _YEARLESS.search(head):
        *rest, fraction = match.groups()
        zone = None
        this = datetime.fromtimestamp(arrived_ns // _SECOND, tz=UTC).year
        years = [this - 1, this, this + 1]
    else:
        return None
    month, day, hour, minute, second = map(int, rest)
    moments = []
    for candidate in years:
        try:
            moment = datetime(candidate, month, day, hour, minute, second, tzinfo=UTC)
        except ValueError:  # no such day in that year
            continue
        if zone and zone != "Z":
            sign = -1 if zone[0] == "-" else 1
            moment -= sign * timedelta(hours=int(zone[1:3]), minutes=int(zone[4:6]))
        moments.append(int(moment.timestamp()) * _SECOND)
    if not moments:
        return None
    digits = fraction or ""
    nearest = min(moments, key=lambda at_ns: abs(at_ns - arrived_ns))
    return nearest + int(digits.ljust(9, "0")), 10 ** (9 - len(digits))
