"""What a load process saw of its requests, and what the null server says it sent: the same columns for every peer."""

from __future__ import annotations

import contextlib
import json
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from analysis.arrays import Ints


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


class Notes:
    """A peer's own record, in flat arrays: nothing here makes work for a garbage collector."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._columns = {name: array("q") for name in ("scheduled", "sent", "end", "recv", "answer", "ok")}
        self._stamps: list[array[int]] = []

    def begin(self, name: str, *, scheduled_ns: int, sent_ns: int) -> tuple[int, array[int]]:
        """(number, where its tokens' stamps go) of a request that has not ended."""
        self._names.append(name)
        for column, value in (("scheduled", scheduled_ns), ("sent", sent_ns)):
            self._columns[column].append(value)
        for column in ("end", "recv", "answer", "ok"):
            self._columns[column].append(0)
        stamps = array("q")
        self._stamps.append(stamps)
        return len(self._names) - 1, stamps

    def end(self, number: int, *, end_ns: int, ok: bool, trailing: Mapping[str, Any]) -> None:
        """The request ended with these trailing metadata."""
        columns = self._columns
        columns["end"][number], columns["ok"][number] = end_ns, ok
        columns["recv"][number] = int(trailing.get("tailgate-recv-ns", 0))
        columns["answer"][number] = int(trailing.get("tailgate-end-ns", 0))

    def write(self, path: Path) -> None:
        """The file holds all of it, whole or not at all."""
        partial = path.with_name("partial-" + path.name)
        stamps = [np.array(item, np.int64) for item in self._stamps]
        columns: dict[str, Any] = {name: np.array(column, np.int64) for name, column in self._columns.items()}
        columns["names"] = np.array(self._names, dtype=np.str_)
        columns["stamps"] = np.concatenate([np.zeros(0, np.int64), *stamps])
        columns["counts"] = np.array([len(item) for item in stamps], np.int64)
        np.savez(partial, **columns)
        partial.replace(path)


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
        batches = []
        with pa.OSFile(str(path), "rb") as source, pa.ipc.open_stream(source) as reader:
            with contextlib.suppress(pa.ArrowInvalid, OSError):
                batches.extend(reader)
            table = pa.Table.from_batches(batches, schema=reader.schema)

        def column(name: str) -> Ints:
            return np.asarray(table[name].fill_null(0).to_numpy(), dtype=np.int64)

        offsets = table["token_ns"].combine_chunks()
        counts = np.asarray(offsets.value_lengths().fill_null(0).to_numpy(zero_copy_only=False), np.int64)
        sent = column("sent_ns")
        stamps = np.asarray(offsets.flatten().to_numpy(zero_copy_only=False), np.int64) + np.repeat(sent, counts)
        status = np.array(table["status"].to_pylist(), dtype=np.str_)
        return cls(
            names=np.array(table["request_id"].to_pylist(), dtype=np.str_),
            scheduled=column("scheduled_ns"),
            sent=sent,
            end=np.where(status == "CANCELLED", 0, column("end_ns")),
            recv=column("server_recv_ns"),
            answer=column("server_end_ns"),
            ok=(status == "OK").astype(np.int64),
            stamps=stamps,
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
        low, high = int(self.ticks[0]), int(self.ticks[-1])
        dense = np.zeros(high - low + 1, np.int64)
        dense[self.ticks - low] = self.emits
        within = (ticks >= low) & (ticks <= high)
        return np.where(within, dense[np.clip(ticks, low, high) - low], 0)
