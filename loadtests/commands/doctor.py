"""`tailgate doctor`: what this machine lacks, and whether it is quiet and steady enough for a verdict."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, cast

import typer

from tailgate.loadtests.commands.exits import EXIT_BROKE, EXIT_OPEN, working
from tailgate.loadtests.commands.options import Json, duration
from tailgate.servers import stdout
from tailgate.servers.complaint import ConfigError, check_installed, not_installed

if TYPE_CHECKING:
    from tailgate.servers.processes import Measured

EXAMPLES = """\
  tailgate doctor
  tailgate doctor --duration 1m      measure for a minute"""

_PROCESSORS = 4
# Figures of tailgate.servers.reference: name and unit.
_FIGURES = {
    "matmul_tflops": ("matrix product", "TFLOP/s"),
    "read_gb_per_s": ("memory", "GB/s"),
    "launch_us": ("launch", "µs"),
    "python_ms": ("Python", "ms"),
}


class Finding(NamedTuple):
    """One line: what it is about, how it is, and the remedy. A verdict on latency needs a machine that `carries` it."""

    what: str
    state: Literal["ok", "warning", "missing"]
    text: str
    carries: bool = True


def command(
    seconds: Annotated[
        float,
        typer.Option(
            "--duration",
            metavar="TIME",
            parser=partial(duration, low_s=0.0, high_s=600.0),
            help="How long to measure, such as 60s; 0s: not at all.",
        ),
    ] = "10s",  # type: ignore[assignment]  # is parsed, and --help shows it
    as_json: Json = False,
) -> int:
    """Say what this machine lacks and what it can decide.

    Looks for GPU, compilers and Envoy. Then measures how much processor time the hypervisor and other work take, and
    whether the machine keeps its speed. The checks of a run apply the same limits.

    Exit codes: 0 nothing is missing and this machine can carry a verdict on latency, 3 such a verdict would stay open,
    1 something is missing, 2 bad usage.
    """

    found = [*installed(), *(measured(seconds) if seconds else ())]
    lines = stdout.aligned([(item.state, item.what, item.text) for item in found], left=2)
    lines += ["", *outcome(found)] if seconds else []
    open_by = any(not item.carries for item in found)
    document = {"findings": [item._asdict() for item in found], "carries_latency": not open_by if seconds else None}
    stdout.write("\n".join(lines), document, as_json=as_json)
    if any(item.state == "missing" for item in found):
        return EXIT_BROKE
    return EXIT_OPEN if open_by else 0


def outcome(found: Sequence[Finding]) -> Iterator[str]:
    """Yield what follows from all findings, in a sentence each."""
    missing = [item.what for item in found if item.state == "missing"]
    if missing:
        yield f"A run that needs {' or '.join(missing)} cannot start here."
    if open_by := [item.what for item in found if not item.carries]:
        yield f"A verdict on latency would stay open here: {', '.join(open_by)}. Compiles are counted anyway."
    elif not missing:
        few = any(item.what == "processors" and item.state == "warning" for item in found)
        waits = (
            f"; with fewer than {_PROCESSORS} processors, latencies on the CPU include waiting for one" if few else ""
        )
        yield f"This machine can carry a verdict on latency, as long as it stays like this{waits}."


def installed() -> Iterator[Finding]:
    """Look for what a run needs. Nothing is started."""
    from tailgate.loadtests.trials.preflight import check_compiler
    from tailgate.servers.splitter.envoy import envoy_path

    def tried(what: str, check: Callable[[], object], ok: str = "") -> Finding:
        """Return whether `check` raises no ConfigError."""
        try:
            found = check()
        except ConfigError as error:
            return Finding(what, "missing", str(error))
        return Finding(what, "ok", ok or str(found))

    yield Finding("Python", "ok", platform.python_version())
    yield tried("Locust", partial(check_installed, "locust"), "installed")
    yield from needed_by_managed_arms()
    yield tried("C++ compiler", check_compiler, os.environ.get("CXX") or "g++")
    yield tried("Envoy", envoy_path)


def needed_by_managed_arms() -> Iterator[Finding]:
    """Look for what arms that tailgate starts need, also for `tailgate check`."""
    from tailgate.loadtests.monitor.gpus import shown_cards
    from tailgate.loadtests.monitor.host import cpu_model
    from tailgate.loadtests.trials.environment import sees_gpu

    gpus, torch, usable = shown_cards(), "", len(os.sched_getaffinity(0))
    with suppress(metadata.PackageNotFoundError):
        torch = metadata.version("torch")
    blind = " sees no GPU: install the build for CUDA (pytorch.org)" if gpus and "+cpu" in torch else ""
    few = f": arms, splitter and load share them, so latencies on the CPU include waiting; use {_PROCESSORS}"
    hidden = "its driver does not answer: nvidia-smi says why" if sees_gpu() else "none is visible"
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))), None)
    if torch:
        yield Finding("torch", "warning" if blind else "ok", f"{torch}{blind}")
    else:
        yield Finding("torch", "warning", f"{not_installed('torch')}, unless all arms are external")
    shared = usable < _PROCESSORS
    yield Finding("processors", "warning" if shared else "ok", f"{usable} of {cpu_model()}{few if shared else ''}")
    yield from (Finding("GPU", "ok", f"{gpu.model}, driver {gpu.driver}") for gpu in gpus)
    if not gpus:
        yield Finding("GPU", "warning", f'{hidden}; arms with model.device = "auto" run on the CPU')
    absent: Literal["missing", "warning"] = "missing" if gpus else "warning"
    yield Finding("C compiler", "ok" if compiler else absent, compiler or "Triton needs one on a GPU: install gcc")


def measured(seconds: float) -> Iterator[Finding]:
    """Watch what others take of the machine for a third of `seconds`, then measure it twice, as long each."""
    from tailgate.analysis.settings.gate_limits import GateLimits
    from tailgate.analysis.wording import digits
    from tailgate.loadtests.monitor.host import Host

    limits, processors = GateLimits(), Host().probes["cpu_s", "steal_s", "cpus"]
    held: set[str] = set()
    with working(f"measuring this machine for {seconds:g} s"):
        before = (time.monotonic(), *processors())
        time.sleep(seconds / 3)
        after = (time.monotonic(), *processors())
        answers = [_reference(seconds / 3, held) for _ in range(2)]
    took_s, busy_s, steal_s = (now - then for now, then in zip(after[:3], before[:3], strict=True))
    for what, key, taken_s, remedy in (
        ("steal", "max_steal_pct", steal_s, "other virtual machines take it: use processors of your own"),
        ("other work", "max_other_cpu_pct", busy_s, "end other programs before a run"),
    ):
        value, limit = max(0.0, 100.0 * taken_s / (took_s * after[3])), getattr(limits, key)
        text = f"{digits(value, 2)} % of the processors' time, limit {limit:g} % (gates.{key})"
        yield _limited(what, text, remedy, fine=value <= limit)
    yield _speed(answers, limits.max_machine_drift)
    if held:
        yield _limited("clock", f"held back by {', '.join(sorted(held))}", "cool the card", fine=False)


def _reference(seconds: float, held: set[str]) -> Measured:
    """Measure the machine, and add to `held` what holds its GPU's clock back meanwhile."""
    from tailgate.loadtests.trials.machines import REFERENCE_COMMAND, START_TIMEOUT_S, answer_of
    from tailgate.loadtests.trials.processes import child_environment
    from tailgate.servers.processes import Child, Measured, Ready, messages_of, temporary_folder

    command = [*REFERENCE_COMMAND, "--device", "auto", "--seconds", f"{seconds:g}"]
    setting: dict[str, Any] = {"commands": True, "parse": messages_of(Ready, Measured)}
    with temporary_folder("tailgate-doctor-") as scratch:
        child = Child("reference", command, log_path=scratch / "log", environment=child_environment(), **setting)
        try:
            answer = answer_of(child, START_TIMEOUT_S, lambda: None)
            if isinstance(answer, Ready):
                child.command("go")
                answer = answer_of(child, 30.0 + 10.0 * seconds, lambda: held.update(_held_back()))
            return cast("Measured", answer)
        finally:
            child.kill()


def _limited(what: str, text: str, remedy: str, *, fine: bool) -> Finding:
    return Finding(what, "ok", text) if fine else Finding(what, "warning", f"{text}: {remedy}", carries=False)


def _speed(answers: Sequence[Measured], limit: float) -> Finding:
    """Return whether both measurements agree."""
    if why := answers[0].error or answers[1].error:
        return _limited("speed", f"not measured: {why}", "end other work", fine=False)
    first, second = (answer.values for answer in answers)
    shown = ", ".join(f"{name} {second[key]:.3g} {unit}" for key, (name, unit) in _FIGURES.items())
    drift, worst = max((abs(second[key] / first[key] - 1.0), name) for key, (name, _) in _FIGURES.items())
    text = f"{second['device']}: {shown}; {worst} changed most from one measurement to the next, by {100 * drift:.2g} %"
    text += f", limit {100 * limit:g} % (gates.max_machine_drift)"
    return _limited("speed", text, "end other work, or use a machine of your own", fine=drift <= limit)


def _held_back() -> set[str]:
    """Return what holds the clock of the first GPU back, but for the power cap, which is usual under full load."""
    from tailgate.analysis.run.machine_records import POWER_CAP, THROTTLES
    from tailgate.loadtests.monitor.gpus import shown_cards

    with suppress(Exception):  # a driver that does not show it
        for card in shown_cards(os.environ)[:1]:
            return {THROTTLES[name] for name in card.probes["throttle"]() if name in THROTTLES and name != POWER_CAP}
    return set()
