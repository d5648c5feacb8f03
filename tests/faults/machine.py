"""The machine: a wall clock that steps, and memory that a process does not get (Linux)."""

from __future__ import annotations

import random
import resource
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

from tests.faults.fault import ARMS, CANDIDATE, CONTROL, Fault, Live, Moment, Setup, Situation, some_instant

# Preloaded: the wall clock is off by the nanoseconds in the file CLOCKS_FILE, which may change.
_CLOCKS_C = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static const volatile long long *shift;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("CLOCKS_FILE");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file >= 0) {
        void *page = mmap(NULL, sizeof(*shift), PROT_READ, MAP_SHARED, file, 0);
        if (page != MAP_FAILED)
            shift = page;
        close(file);
    }
}

int clock_gettime(clockid_t id, struct timespec *at) {
    long failed = syscall(SYS_clock_gettime, id, at);
    if (!failed && shift && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) {
        long long ns = at->tv_sec * 1000000000LL + at->tv_nsec + *shift;
        at->tv_sec = ns / 1000000000LL;
        at->tv_nsec = ns % 1000000000LL;
    }
    return (int)failed;
}
"""


def why_no_clocks() -> str:
    """Return why this machine has no clocks to change; empty where it has."""
    return "" if shutil.which("cc") else "no C compiler"


def clocks(folder: Path) -> dict[str, str]:
    """Return the environment of processes whose wall clock `step_clock` changes."""
    library, source = folder / "clocks.so", folder / "clocks.c"
    if not library.exists():
        source.write_text(_CLOCKS_C)
        command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        step_clock(folder, 0)
    return {"LD_PRELOAD": str(library), "CLOCKS_FILE": str(folder / "clocks")}


def step_clock(folder: Path, seconds: int) -> None:
    """Set the wall clock of all processes with the environment of `clocks` to so many seconds from the true time."""
    with (folder / "clocks").open("r+b" if (folder / "clocks").exists() else "wb") as file:
        file.write((seconds * 1_000_000_000).to_bytes(8, "little", signed=True))


class Clock(Fault):
    """The wall clock of every process of the run steps; monotonic clocks do not."""

    def __init__(self, seconds: int) -> None:
        super().__init__(name=f"the wall clock steps by {seconds:+d} s")
        self._seconds = seconds

    def arrange(self, setup: Setup) -> None:
        setup.environment |= clocks(setup.folder)

    def inject(self, live: Live) -> str:
        step_clock(live.setup.folder, self._seconds)
        return "all processes"

    def lift(self, live: Live) -> None:
        step_clock(live.setup.folder, 0)


class Memory(Fault):
    """A process gets no more than 1 MiB of addresses besides those that it has."""

    def __init__(self, role: str) -> None:
        # Python, grpcio and Locust print a traceback when there was no memory.
        logs = {CONTROL: ("eager-",), CANDIDATE: ("compiled-",), "load": ("locust",)}
        super().__init__(
            name=f"no more memory for {role}",
            hurts=(role,) if role in ARMS else ARMS if role == "envoy" else (),
            ends_records=role not in (*ARMS, "envoy"),
            silenced_logs=logs.get(role, ()),
            extra_s=130.0 if role in ("load", "worker") else 0.0,  # a load that does not end is waited for
        )
        self._role = role

    def inject(self, live: Live) -> str:
        pids = live.pids(self._role)
        for pid in pids:
            with suppress(OSError, ValueError):
                size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
                resource.prlimit(pid, resource.RLIMIT_AS, (size + (1 << 20), resource.RLIM_INFINITY))
        return f"{len(pids)} of {self._role}" if pids else ""

    def lift(self, live: Live) -> None:
        for pid in live.pids(self._role):
            with suppress(OSError):
                resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def draw(rng: random.Random, situation: Situation) -> Moment | None:
    """Draw a fault of the clock or of the memory of a process."""
    lasts_s: float | None = round(rng.uniform(0.3, 2.0), 1)
    if not situation.liveness and rng.random() < 0.5:
        lasts_s = None
    phase, after_s = some_instant(rng, situation)
    fault: Fault = Clock(rng.choice((-3600, -30, 30, 3600)))
    if rng.random() < 0.5:
        roles = ["orchestrator", "load", CONTROL]
        fault = Memory(rng.choice([*roles, *([] if situation.kind == "external" else ["envoy", CANDIDATE])]))
    if (situation.liveness and isinstance(fault, Memory)) or (isinstance(fault, Clock) and why_no_clocks()):
        return None
    return Moment(phase=phase, after_s=after_s, fault=fault, lasts_s=lasts_s)
