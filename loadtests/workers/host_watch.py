"""The host of a load worker that shares no disk with the run, watched during a trial; its samples go to the master."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from analysis.records.schemas import MACHINES
from analysis.records.tables import RecordError, RecordWriter, read_table
from servers.launcher import launched

# By its name and not imported: what a trial has watched lies above this floor.
_WATCHER = (sys.executable, "-P", "-m", "loadtests.monitor")
_STOP_WITHIN_S = 5.0
PART_BYTES = 512 << 10


class HostWatch:
    """This host is sampled into `path` until `stop`; `host` is what the table calls it, `load` this process in it."""

    def __init__(self, path: Path, *, trial: int, host: str, sample_s: float) -> None:
        self._path = path
        self._host = host
        command = [*_WATCHER, "--out", str(path), "--trial", str(trial), "--host", host, "--sample-s", str(sample_s)]
        with path.with_name("watcher.log").open("ab") as log:
            self._process = subprocess.Popen(
                launched(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # Ctrl-C reaches the worker alone, which still ships what was seen
            )
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(json.dumps({"name": "load", "pid": os.getpid()}) + "\n")
            self._process.stdin.flush()

    def stop(self) -> dict[str, Any]:
        """The samples are complete on disk. Returns what the watcher saw of the machine, as trial.json has it."""
        try:
            said, _ = self._process.communicate(timeout=_STOP_WITHIN_S)
        except (subprocess.TimeoutExpired, OSError):
            self._process.kill()
            said, _ = self._process.communicate()
        facts: dict[str, Any] = {"machines": {}, "unreadable": [], "gaps": []}
        for line in said.splitlines():
            with suppress(ValueError):
                message = json.loads(line)
                facts |= {"machines": message["monitor"]["machines"]} if "monitor" in message else {}
                facts["unreadable"] += [message["unreadable"]] if "unreadable" in message else []
        if self._process.returncode:
            why = f"its watcher ended with exit code {self._process.returncode}: see {self._path.parent} there"
            facts["gaps"].append({"host": self._host, "at_ns": None, "why": why})
        return facts

    def samples(self, offset_ns: int) -> list[bytes]:
        """The samples as parts of an Arrow stream, with `offset_ns` added to their times. RecordError without any."""
        try:
            table, _ = read_table(self._path, MACHINES)
        except OSError as error:
            raise RecordError(f"{self._path} cannot be read ({error})") from None
        place = MACHINES.get_field_index("at_ns")
        table = table.set_column(place, MACHINES.field(place), pc.add(table.column(place), offset_ns)).combine_chunks()
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, MACHINES, options=pa.ipc.IpcWriteOptions(compression="zstd")) as stream:
            stream.write_table(table)
        content = sink.getvalue()
        return [content[at : at + PART_BYTES] for at in range(0, len(content), PART_BYTES)]


def write_samples(parts: list[bytes], path: Path) -> None:
    """`path` holds the samples of `HostWatch.samples`, and what it should hold. Raises ValueError for anything else."""
    try:
        table = pa.ipc.open_stream(b"".join(parts)).read_all()
        table.validate(full=True)
    except (pa.ArrowException, OSError, EOFError) as error:
        raise ValueError(f"they are no samples: {error}") from None
    if not table.schema.equals(MACHINES):
        raise ValueError("they are no samples: they have other columns")
    with RecordWriter(path, MACHINES) as writer:
        for row in table.to_pylist():
            writer.append(row)
