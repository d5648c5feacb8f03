"""Inputs for HTTP/2 and its headers that are led by what code they reach: `python -m tests.fuzz.guided READER [RUNS]`.

atheris (libFuzzer) sees the branches of the client that an input takes and builds on those that took new ones. It ends
with the first fault; its exit status is 0 where there was none.
"""

from __future__ import annotations

import random
import sys
import tempfile
import zlib
from contextlib import suppress
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["loadtests.clients", "loadtests.generator.record", "loadtests.external"]):
    from tests.fuzz.wire import WIRE

_MOST_S = 10
_MOST_MIB = 2048


def main() -> None:
    """Never returns: libFuzzer ends the process."""
    name, runs = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "10000"
    reader = next(reader for reader in WIRE if reader.name == name)
    folder = Path(tempfile.mkdtemp())
    corpus = folder / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(reader.seeds(folder)):
        (corpus / str(number)).write_bytes(seed)

    def read(content: bytes) -> None:
        with suppress(*reader.refuses):
            reader.read(folder, content, random.Random(zlib.crc32(content)))

    limits = (f"-runs={runs}", "-seed=1", f"-timeout={_MOST_S}", f"-rss_limit_mb={_MOST_MIB}", "-max_len=65536")
    atheris.Setup([sys.argv[0], *limits, f"-artifact_prefix={folder}/", str(corpus)], read)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
