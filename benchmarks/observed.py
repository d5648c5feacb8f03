"""What a load process saw of its requests, and what the null server says it sent: the same columns for every peer."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from analysis.arrays import Ints
from analysis.records.requests import integers
from analysis.records.schemas import REQUESTS
from analysis.records.tables import read_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a peer is asked to do, as a JSON file.

    mode: `streams` starts that many over `ramp_s` and keeps them until SIGTERM; `open` sends Poisson arrivals at `rate`
    for `seconds`; `closed` keeps `users` requests in flight for `seconds`. Each request asks for `tokens` tokens.
    """

    mode: str
    address: str
    out: str
    tokens: int = 1
    streams: int = 0
    ramp_s: float = 2.0
    rate: float = 0.0
    users: int = 0
    seconds: float = 0.0
    seed: int = 0

    @classmethod
    def read(cls, path: Path) -> Self:
        """The plan in a file."""
        return cls(**json.loads(path.read_text()))


@dataclass(slots=True, kw_only=True)
class Note:
    """A peer's own record of one request; `stamps` are its tokens' times. Times are 0 where it has not ended."""

    name: str
    scheduled: int
    sent: int
    stamps: array[int] = field(default_factory=partial(array, "q"))
    end: int = 0
    recv: int = 0
    answer: int = 0
    ok: bool = False

    def ended(self, *, end_ns: int, ok: bool, trailing: Mapping[str, Any]) -> None:
        """The request ended with these trailing metadata."""
        self.end, self.ok = end_ns, ok
        self.recv = int(trailing.get("tailgate-recv-ns", 0))
        self.answer = int(trailing.get("tailgate-end-ns", 0))


def write_notes(notes: Sequence[Note], path: Path) -> None:
    """The file holds all of them, whole or not at all."""
    partly = path.with_name("partial-" + path.name)
    numbers = ("scheduled", "sent", "end", "recv", "answer", "ok")
    columns: dict[str, Any] = {key: np.array([getattr(note, key) for note in notes], np.int64) for key in numbers}
    columns["names"] = np.array([note.name for note in notes], dtype=np.str_)
    columns["stamps"] = np.concatenate([np.zeros(0, np.int64), *(np.array(note.stamps) for note in notes)])
    columns["counts"] = np.array([len(note.stamps) for note in notes], np.int64)
    np.savez(partly, **columns)
    partly.replace(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One row a request in every column; `stamps` holds the tokens' times of all, `counts` how many are whose.

    recv and answer are the server's times of receipt and answer; 0 where a request has not ended.
    """

    names: npt.NDArray[np.str_]
    scheduled: Ints
    sent: Ints
    end: Ints
    recv: Ints
    answer: Ints
    ok: Ints
    stamps: Ints
    counts: Ints

    @classmethod
    def of_notes(cls, path: Path) -> Self:
        """What a peer noted."""
        with np.load(path) as kept:
            return cls(**{name: kept[name] for name in cls.__slots__})

    @classmethod
    def of_records(cls, path: Path) -> Self:
        """What tailgate recorded: requests-N.arrow. A torn tail is left out."""
        table = read_table(path, REQUESTS)[0]

        def column(name: str) -> Ints:
            return np.asarray(integers(table[name], 0), dtype=np.int64)

        times = table["token_ns"].combine_chunks()
        counts = np.asarray(integers(times.value_lengths(), 0), np.int64)
        sent = column("sent_ns")
        status = np.array(table["status"].to_pylist(), dtype=np.str_)
        return cls(
            names=np.array(table["request_id"].to_pylist(), dtype=np.str_),
            scheduled=column("scheduled_ns"),
            sent=sent,
            end=np.where(status == "CANCELLED", 0, column("end_ns")),
            recv=column("server_recv_ns"),
            answer=column("server_end_ns"),
            ok=(status == "OK").astype(np.int64),
            stamps=np.asarray(times.flatten(), np.int64) + np.repeat(sent, counts),
            counts=counts,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitted:
    """The null server's log: which tick was sent when, and each stream's first tick and number of tokens."""

    ticks: Ints
    emits: Ints
    names: npt.NDArray[np.str_]
    first_ticks: Ints
    tokens: Ints
    phases: int

    @classmethod
    def read(cls, path: Path) -> Self:
        """What the server's `report` wrote."""
        with np.load(path) as kept:
            columns = {name: kept[name] for name in cls.__slots__ if name != "phases"}
            return cls(**columns, phases=int(kept["phases"]))

    def at(self, ticks: Ints) -> Ints:
        """When these ticks were sent; 0 for one that was not."""
        if not len(self.ticks):
            return np.zeros(len(ticks), np.int64)
        place = np.searchsorted(self.ticks, ticks).clip(max=len(self.ticks) - 1)
        return np.where(self.ticks[place] == ticks, self.emits[place], 0)
