"""What the compiler did and what is not seen of it, as plain data: no torch, so that the front may read it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileEvent:
    """One event of the compiler, or of another that stalls a server. Columns as in the run directory.

    `compile_id` is unique within a process: "0/1". `backend_ns` is the backend's share of a compile. `breaks` are the
    graph breaks that its tracing met, as place and cause.
    """

    event_id: str
    kind: str
    start_ns: int
    end_ns: int
    compile_id: str = ""
    frame: str = ""
    reason: str = ""
    shape: str = ""
    dynamic: bool = False
    cache: str = ""
    batch_id: int = -1
    request_ids: tuple[str, ...] = ()
    backend_ns: int = 0
    phase: str = "warmup"
    breaks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileUnderWay:
    """A compile of the device thread, sent when it begins and again, with `end_ns`, once it is over, failed or not.

    `kind` is compile, whichever it turns out to be, or graph_capture.
    """

    kind: str
    start_ns: int
    end_ns: int = 0  # while it goes on
    compile_id: str = ""
    shape: str = ""
    batch_id: int = -1
    phase: str = "warmup"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerFacts:
    """`blind_spots`: what of compilers this replica cannot see, in sentences; sent to the front when there is a new
    one."""

    blind_spots: tuple[str, ...] = ()
