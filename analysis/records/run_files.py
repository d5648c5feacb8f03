"""The files of a run as they are read: what is wrong with each, and which of them state what they should hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from analysis.records.checksums import crc32_of, read_end
from analysis.records.documents import Document, read_document, read_toml
from analysis.records.plain_values import mapping
from analysis.records.tables import NOT_AS_WRITTEN, RecordError, one_line, read_table

EXPORT = "export.json"


class RunFiles:
    """Reads the files of the run in `directory`. With a `name`, each file is called by it and its own path."""

    def __init__(self, directory: Path, name: str = "") -> None:
        self._directory = directory
        self._name = name
        self._problems: list[str] = []
        self._documents: dict[str, bool] = {}  # of each file, whether it states what it should hold
        self._tables: dict[str, dict[str, bool]] = {}  # the same, by table
        # An export states here what its tables hold: neither Parquet nor JSON Lines has a last line for it.
        export = read_document(directory / EXPORT)
        self.exported: Mapping[str, Any] = (export.content if export is not None else None) or {}
        if export is not None and export.problem:
            self.add(directory / EXPORT, export.problem)

    def document(self, path: Path) -> dict[str, Any] | None:
        """The JSON document at `path`; None where there is none, or none that can be believed."""
        return self._content(path, read_document(path))

    def toml(self, path: Path) -> dict[str, Any]:
        """The TOML document at `path`, empty where there is none. RecordError where it cannot be read."""
        try:
            return self._content(path, read_toml(path)) or {}
        except (OSError, ValueError) as error:
            raise RecordError(f"{self._called(path.name)} cannot be read ({one_line(error)}): correct it") from error

    def _content(self, path: Path, document: Document | None) -> dict[str, Any] | None:
        if document is None:
            return None
        if document.problem:
            self.add(path, document.problem)
        if document.content is not None:
            self._documents[self._label(path)] = document.stated
        return document.content

    def table(self, stem: str, path: Path, schema: pa.Schema, *, required: Sequence[str]) -> pa.Table:
        """The rows of the file at `path`, one of those of the table `stem`, as `read_table` has them. RecordError and
        OSError where it cannot be read."""
        stated = mapping(self.exported.get("files")).get(path.relative_to(self._directory).as_posix())
        if stated is not None and stated != f"{crc32_of(path):08x}":
            rows = schema.empty_table()
            problems: tuple[str, ...] = (f"{NOT_AS_WRITTEN}: its rows are not used",)
        else:
            rows, problems = read_table(path, schema, required=required)
        for problem in problems:
            self.add(path, problem)
        states = bool(stated or read_end(path))
        if states or not problems:  # what was cut off lost what it stated
            self._tables.setdefault(stem, {})[self._label(path)] = states
        return rows

    @property
    def stated(self) -> bool:
        """Whether the tables state what they should hold."""
        return any(any(kind.values()) for kind in self._tables.values())

    def problems(self) -> list[str]:
        """All that is wrong. Where documents or others of a kind state what they should hold, a file that does not was
        changed."""
        written = any(self._documents.values())
        kinds = [kind for kind in (self._documents, *self._tables.values()) if written or any(kind.values())]
        silent = [name for kind in kinds for name, stated in kind.items() if not stated]
        changed = [f"{name} does not state what it should hold, as others of the run do" for name in silent]
        return self._problems + changed

    def add(self, path: Path, problem: str) -> None:
        """Add what is wrong with the file or folder at `path`, in words that follow its name."""
        self._problems.append(f"{self._label(path)} {problem}")

    def _label(self, path: Path) -> str:
        return self._called(path.relative_to(self._directory).as_posix())

    def _called(self, path: str) -> str:
        return f"{self._name}/{path}" if self._name else path
