"""The machine: clocks that step or run fast, and processors, memory and cards that are taken away (Linux, root)."""

from __future__ import annotations

import functools
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

from tests.faults.fault import ARMS, CANDIDATE, CONTROL, Fault, Live, Moment, Setup, Situation, some_instant

# Preloaded: the wall clock is off by the nanoseconds in the file CLOCKS_FILE, which may change, and all clocks run at
# CLOCKS_RATE since the process began. Waits until an instant are not stretched.
_CLOCKS_C = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static const volatile long long *shift;
static double gain;
static long long began;

static long long kernel_ns(clockid_t id, struct timespec *at, long *failed) {
    *failed = syscall(SYS_clock_gettime, id, at);
    return at->tv_sec * 1000000000LL + at->tv_nsec;
}

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("CLOCKS_FILE"), *rate = getenv("CLOCKS_RATE");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    struct timespec at;
    long failed;
    if (file >= 0) {
        void *page = mmap(NULL, sizeof(*shift), PROT_READ, MAP_SHARED, file, 0);
        if (page != MAP_FAILED)
            shift = page;
        close(file);
    }
    gain = rate ? atof(rate) - 1.0 : 0.0;
    began = kernel_ns(CLOCK_MONOTONIC, &at, &failed);
}

int clock_gettime(clockid_t id, struct timespec *at) {
    long failed;
    long long ns = kernel_ns(id, at, &failed);
    int wall = id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE;
    if (failed || !(wall || id == CLOCK_MONOTONIC))
        return (int)failed;
    if (gain != 0.0) {
        struct timespec now;
        ns += (long long)(gain * (double)(kernel_ns(CLOCK_MONOTONIC, &now, &failed) - began));
    }
    if (wall && shift)
        ns += *shift;
    at->tv_sec = ns / 1000000000LL;
    at->tv_nsec = ns % 1000000000LL;
    return 0;
}
"""


def why_no_clocks() -> str:
    """Return why this machine has no clocks to change; empty where it has."""
    return "" if shutil.which("cc") else "no C compiler"


def clocks(folder: Path, *, rate: float = 1.0) -> dict[str, str]:
    """Return the environment of processes whose clocks run at the rate and whose wall clock `step_clock` changes."""
    library, source = folder / "clocks.so", folder / "clocks.c"
    if not library.exists():
        source.write_text(_CLOCKS_C)
        command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        step_clock(folder, 0)
    return {"LD_PRELOAD": str(library), "CLOCKS_FILE": str(folder / "clocks"), "CLOCKS_RATE": str(rate)}


def step_clock(folder: Path, seconds: int) -> None:
    """Set the wall clock of all processes with the environment of `clocks` to so many seconds from the true time."""
    with (folder / "clocks").open("r+b" if (folder / "clocks").exists() else "wb") as file:
        file.write((seconds * 1_000_000_000).to_bytes(8, "little", signed=True))


class Clock(Fault):
    """The wall clock of every process of the run steps; monotonic clocks do not."""

    whose = "the"

    def __init__(self, seconds: int) -> None:
        super().__init__(name=f"{self.whose} wall clock steps by {seconds:+d} s")
        self._seconds = seconds

    def arrange(self, setup: Setup) -> None:
        setup.environment |= clocks(setup.folder)

    def inject(self, live: Live) -> str:
        step_clock(live.setup.folder, self._seconds)
        return "all processes"

    def lift(self, live: Live) -> None:
        step_clock(live.setup.folder, 0)


class WorkerClock(Clock):
    """The wall clock of the remote worker alone steps."""

    whose = "the worker's"

    def arrange(self, setup: Setup) -> None:
        setup.worker_environment |= clocks(setup.folder) | setup.worker_environment  # the rate is another fault's

    def inject(self, live: Live) -> str:
        super().inject(live)
        return "the remote worker" if live.pids("remote worker") else ""


class Skew(Fault):
    """All clocks of the remote worker run fast from its start on."""

    def __init__(self, rate: float) -> None:
        super().__init__(name=f"the worker's clocks run at {rate:g}")
        self._rate = rate

    def arrange(self, setup: Setup) -> None:
        setup.worker_environment |= clocks(setup.folder, rate=self._rate)

    def inject(self, live: Live) -> str:
        return "the remote worker" if live.pids("remote worker") else ""


class Processors(Fault):
    """Every process of the run shares one processor with two others that compute."""

    def __init__(self) -> None:
        super().__init__(name="one processor for all, and two that compute on it", hurts=ARMS)
        self._burners: list[subprocess.Popen[bytes]] = []

    def inject(self, live: Live) -> str:
        one = {min(os.sched_getaffinity(0))}
        for _ in range(2):
            burner = subprocess.Popen([sys.executable, "-c", "while True: pass"], env={}, process_group=0)
            os.sched_setaffinity(burner.pid, one)
            self._burners.append(burner)
        live.setup.closing.callback(self._end)
        return f"{_pin(live, one)} threads"

    def lift(self, live: Live) -> None:
        self._end()
        _pin(live, os.sched_getaffinity(0))

    def _end(self) -> None:
        while self._burners:
            burner = self._burners.pop()
            burner.kill()
            burner.wait()


def _pin(live: Live, processors: set[int]) -> int:
    count = 0
    for pid in live.every_pid():
        for task in Path(f"/proc/{pid}/task").glob("*"):
            with suppress(OSError):
                os.sched_setaffinity(int(task.name), processors)
                count += 1
    return count


class Memory(Fault):
    """A process gets no more than 1 MiB of addresses beside those that it has."""

    def __init__(self, role: str, *, held: bool = False) -> None:
        # Python, grpcio and Locust print a traceback when there was no memory; a process that is killed prints nothing.
        logs = {CONTROL: ("eager-",), CANDIDATE: ("compiled-",), "load": ("locust",)}
        super().__init__(
            name=f"the kernel holds the memory of {role}" if held else f"no more memory for {role}",
            hurts=(role,) if role in ARMS else ARMS if role == "envoy" else (),
            ends_records=role not in (*ARMS, "envoy"),
            silenced_logs=() if held else logs.get(role, ()),
            # What the orchestrator starts is in its group, also what would remove its folders.
            spares_temporary=held and role == "orchestrator",
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


_GROUPS = Path("/sys/fs/cgroup")
_ROOM = 2 << 20


class MemoryGroup:
    """A control group whose processes may take `room` bytes more than they have."""

    def __init__(self, room: int) -> None:
        first = (_GROUPS / "memory").is_dir()  # cgroup v1; in v2 all controllers are in one tree
        self._above = _GROUPS / "memory" if first else _GROUPS
        self._limit = "memory.limit_in_bytes" if first else "memory.max"
        self._none = "-1" if first else "max"
        self.path = self._above / f"tailgate-faults-{uuid.uuid4().hex[:8]}"
        self.path.mkdir()
        (self.path / self._limit).write_text(str(room))

    def take(self, pid: int) -> None:
        """Move the process into the group; memory that it has stays counted where it was."""
        (self.path / "cgroup.procs").write_text(str(pid))

    def lift(self) -> None:
        with suppress(OSError):
            (self.path / self._limit).write_text(self._none)

    def close(self) -> None:
        """Move the processes back and remove the group."""
        until_s = time.monotonic() + 5.0
        while self.path.exists() and time.monotonic() < until_s:
            with suppress(OSError):
                for pid in (self.path / "cgroup.procs").read_text().split():
                    (self._above / "cgroup.procs").write_text(pid)
                self.path.rmdir()
            time.sleep(0.05)


@functools.cache
def why_no_groups() -> str:
    """Return why no process can be held to a group here; empty where one can."""
    if os.geteuid() != 0:
        return "not root"
    try:
        group = MemoryGroup(_ROOM)
    except OSError as error:
        return str(error)
    # Some kernels count and enforce nothing.
    takes = f"import sys; sys.stdin.read(); bytearray(b'1') * {16 * _ROOM}"
    process = subprocess.Popen([sys.executable, "-c", takes], stdin=subprocess.PIPE)
    try:
        group.take(process.pid)
        process.communicate(timeout=30.0)
    except (OSError, subprocess.TimeoutExpired) as error:
        process.kill()
        process.communicate()
        return str(error)
    finally:
        group.close()
    return "" if process.returncode == -signal.SIGKILL else "the limit of a group is not enforced"


class HeldMemory(Memory):
    """The kernel gives a process 2 MiB more and then kills it."""

    def __init__(self, role: str) -> None:
        super().__init__(role, held=True)
        self._taken: list[MemoryGroup] = []

    def inject(self, live: Live) -> str:
        pids = live.pids(self._role)
        if not pids:
            return ""
        group = MemoryGroup(_ROOM)
        live.setup.closing.callback(group.close)
        self._taken.append(group)
        for pid in pids:
            with suppress(OSError):
                group.take(pid)
        return f"{len(pids)} of {self._role}"

    def lift(self, live: Live) -> None:
        for group in self._taken:
            group.lift()


# Waits for a line, allocates what is free in powers of two, and holds it until it is killed.
_NEIGHBOUR = """\
import sys, torch
torch.zeros(1, device="cuda")
print("there", flush=True)
sys.stdin.readline()
held, size = [], 1 << 36
while size >= 1 << 21:
    try:
        held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        size >>= 1
print(sum(part.numel() for part in held), flush=True)
sys.stdin.readline()
"""


class DeviceMemory(Fault):
    """Both arms run on one card, and another process takes the rest of its memory, to the end if it `stays`."""

    def __init__(self, *, stays: bool) -> None:
        super().__init__(name="no more memory on the card", hurts=ARMS, forbids_pass=stays, is_watched=True)
        self._neighbours: list[subprocess.Popen[str]] = []

    def arrange(self, setup: Setup) -> None:
        setup.settings.append("model.device=cuda")
        neighbour = subprocess.Popen(
            [sys.executable, "-c", _NEIGHBOUR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        setup.closing.callback(self._end)
        self._neighbours.append(neighbour)
        assert neighbour.stdout is not None
        neighbour.stdout.readline()

    def inject(self, live: Live) -> str:
        (neighbour,) = self._neighbours
        assert neighbour.stdin is not None
        assert neighbour.stdout is not None
        neighbour.stdin.write("take\n")
        neighbour.stdin.flush()
        return f"{int(neighbour.stdout.readline()) / 2**30:.1f} GiB taken"

    def lift(self, live: Live) -> None:
        self._end()

    def _end(self) -> None:
        while self._neighbours:
            neighbour = self._neighbours.pop()
            neighbour.kill()
            neighbour.communicate(timeout=60.0)


@functools.cache
def why_no_device() -> str:
    """Return why no card can be filled here; empty where one can."""
    code = "import torch; raise SystemExit(not torch.cuda.is_available())"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    return "no CUDA device" if done.returncode else ""


def draw(rng: random.Random, situation: Situation) -> Moment | None:
    """Draw a fault of clocks, processors or the memory of a process."""
    lasts_s: float | None = round(rng.uniform(0.3, 2.0), 1)
    if not situation.liveness and rng.random() < 0.5:
        lasts_s = None
    phase, after_s = some_instant(rng, situation)
    match rng.choice(("clock", "skew", "processors", "memory")):
        case "clock" if not why_no_clocks():
            steps = WorkerClock if situation.kind == "remote worker" and rng.random() < 0.5 else Clock
            fault: Fault = steps(rng.choice((-3600, -30, 30, 3600)))
        case "skew" if not why_no_clocks() and situation.kind == "remote worker":
            fault, phase, after_s, lasts_s = Skew(rng.choice((0.998, 1.0002, 1.002))), "starting arms", 0.0, None
        case "processors":
            fault = Processors()
        case "memory" if not situation.liveness and situation.kind != "engine":
            roles = ["orchestrator", "load", CONTROL]
            fault = Memory(rng.choice([*roles, *([] if situation.kind == "external" else ["envoy", CANDIDATE])]))
        case _:
            return None
    return Moment(phase=phase, after_s=after_s, fault=fault, lasts_s=lasts_s)


def draw_group(rng: random.Random, situation: Situation) -> Moment | None:
    """Draw a process that the kernel holds to its memory; it may be killed, so that such plans are of safety."""
    role = rng.choice(("orchestrator", "load", CONTROL, "envoy", CANDIDATE))
    phase, after_s = some_instant(rng, situation)
    lasts_s = round(rng.uniform(0.3, 2.0), 1) if rng.random() < 0.5 else None
    if situation.liveness or situation.kind == "external" or why_no_groups():
        return None
    return Moment(phase=phase, after_s=after_s, fault=HeldMemory(role), lasts_s=lasts_s)


def draw_device(rng: random.Random, situation: Situation) -> Moment | None:
    """Draw an instant at which the memory of the card is taken in a run of the engine, which may not recover."""
    if situation.kind != "engine" or situation.liveness or why_no_device():
        return None
    phase, after_s = some_instant(rng, situation, "starting arms", "waiting for the last answers")
    lasts_s = round(rng.uniform(0.5, 3.0), 1) if rng.random() < 0.5 else None
    return Moment(phase=phase, after_s=after_s, fault=DeviceMemory(stays=lasts_s is None), lasts_s=lasts_s)
