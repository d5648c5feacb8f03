"""The files of a run as they are read: what is wrong with each, and which of them say what they should hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis.records.documents import Document, read_document, read_toml
from analysis.records.sums import sums_path
from analysis.records.tables import RecordError, one_line


class RunFiles:
    """Reads the files of the run in `directory`. With a `name`, each file is called by it and its own path."""

    def __init__(self, directory: Path, name: str = "") -> None:
        self._directory = directory
        self._name = name
        self._problems: list[str] = []
        self._documents: dict[str, bool] = {}  # of each file, whether it says what it should hold
        self._tables: dict[str, dict[str, bool]] = {}  # the same, by table

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
            self._add(path, document.problem)
        if document.content is not None:
            self._documents[self._label(path)] = document.stated
        return document.content

    def table(self, stem: str, path: Path, problems: Sequence[str]) -> None:
        """The file at `path` of the table `stem` was read, with these problems."""
        for problem in problems:
            self._add(path, problem)
        self._tables.setdefault(stem, {})[self._label(path)] = sums_path(path).exists()

    def lacks(self, folder: Path, stem: str) -> None:
        """The folder of a trial has no table `stem`, which others have."""
        self._add(folder, f"holds no {stem}, as other trials do")

    @property
    def stated(self) -> bool:
        """Whether the tables say what they should hold."""
        return any(any(kind.values()) for kind in self._tables.values())

    def problems(self) -> list[str]:
        """All that is wrong. Where some files of a kind say what they should hold, one that does not was changed."""
        kinds = [kind for kind in (self._documents, *self._tables.values()) if any(kind.values())]
        silent = [name for kind in kinds for name, stated in kind.items() if not stated]
        return self._problems + [f"{name} does not say what it should hold, as others of the run do" for name in silent]

    def _add(self, path: Path, problem: str) -> None:
        self._problems.append(f"{self._label(path)} {problem}")

    def _label(self, path: Path) -> str:
        return self._called(path.relative_to(self._directory).as_posix())

    def _called(self, path: str) -> str:
        return f"{self._name}/{path}" if self._name else path
