"""Every reader of what others wrote, on inputs that are damaged and hostile.

`TAILGATE_FUZZ` says how many each is given (`make fuzz`: 10,000). Input n is the same every time.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.fuzz.files import FILES
from tests.fuzz.oracle import Reader, hunted
from tests.fuzz.wire import WIRE

COUNT = int(os.environ.get("TAILGATE_FUZZ", "200"))
READERS = (*FILES, *WIRE)


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_what_cannot_be_read_is_refused_in_one_line(reader: Reader, tmp_path: Path) -> None:
    findings = hunted(reader, tmp_path, count=COUNT)
    print(f"{reader.name}: {findings.taken} taken, {findings.refused} refused, at most {findings.largest_mib:.0f} MiB")
    faults = "\n\n".join(f"{place}, {findings.counts[place]} times: {told}" for place, told in findings.faults.items())
    assert not findings.faults, f"{len(findings.faults)} faults in {COUNT} inputs:\n{faults}"
