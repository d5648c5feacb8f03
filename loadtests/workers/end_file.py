"""end.json beside a trial's records: when its load is to end before its time. The run writes it, the master reads it.

{"at_ns": instant or null, "arms": {arm: instant}} in ns since the epoch: nothing that is due then or later is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from analysis.records.documents import write_document

END_FILE = "end.json"


def write_end(folder: Path, *, at_ns: int | None, arms: Mapping[str, int]) -> None:
    """The load of the trial in `folder` ends at `at_ns`, that of some arms earlier."""
    write_document(folder / END_FILE, {"at_ns": at_ns, "arms": dict(arms)})
