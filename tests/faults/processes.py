"""The processes of a run, found by a mark in their environment, and what each of them is (Linux)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MARK = "TAILGATE_FAULTS_MARK"
_CONTROL = "eager"  # the control's name in every plan


@dataclass(frozen=True, slots=True)
class Process:
    """One that runs, or is stopped."""

    pid: int
    parent: int
    words: tuple[str, ...]
    started: int  # in ticks since boot: with the process id it is one process for good

    @property
    def command(self) -> str:
        """Its command line, without the text of programs."""
        return " ".join(word for word in self.words if "\n" not in word)


def marked(mark: str) -> dict[int, Process]:
    """Every process that has the mark in its environment, or had it when it started. No zombies: they have none."""
    wanted = f"{MARK}={mark}".encode()
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError, IndexError, ValueError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    fields = (folder / "stat").read_text().rpartition(")")[2].split()
                    words = tuple((folder / "cmdline").read_bytes().decode(errors="replace").split("\0"))
                    pid = int(folder.name)
                    found[pid] = Process(pid=pid, parent=int(fields[1]), words=words, started=int(fields[19]))
    return found


def role(process: Process, every: Mapping[int, Process], orchestrator: int) -> str:
    """What the process is in its run; empty where it is nothing that faults are planned for."""
    if process.pid == orchestrator:
        return "orchestrator"
    words, command = process.words, process.command
    above = every.get(process.parent)
    parent = role(above, every, orchestrator) if above is not None else ""
    if "--replica" in words:
        arm = words[words.index("--replica") + 1].rpartition("-")[0]
        return "control" if arm == _CONTROL else "candidate"
    if any("spawn_main" in word for word in words):
        return f"engine of {parent}" if parent in ("control", "candidate") else ""
    if any(word.rsplit("/", 1)[-1] == "envoy" for word in words[:8]):
        return "envoy"
    if "-m locust" in command:
        return "worker" if parent in ("load", "worker", "remote worker") else "load"
    if "-m analysis.looks" in command:
        return "preview" if "--preview" in words else "judge"
    modules = {
        "-m loadtests.bed": "watcher",
        "-m loadtests.page": "page",
        "-m loadtests.users": "users",
        "-m loadtests.commands.main worker": "remote worker",
        "-m loadtests.commands.main split": "split",
        "tests.faults.external_server": "server",
    }
    return next((name for words_of, name in modules.items() if words_of in command), "")


def ancestry(process: Process, every: Mapping[int, Process]) -> set[int]:
    """The process and those above it, of the marked ones."""
    above = every.get(process.parent)
    return {process.pid} | (ancestry(above, every) if above is not None else set())


def by_role(mark: str, orchestrator: int) -> dict[str, list[int]]:
    """The process ids of each role, oldest first."""
    every = marked(mark)
    found: dict[str, list[int]] = {}
    for process in sorted(every.values(), key=lambda item: (item.started, item.pid)):
        found.setdefault(role(process, every, orchestrator), []).append(process.pid)
    return found
