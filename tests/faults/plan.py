"""A plan: what goes wrong in one run, drawn from a seed, and what the run is started with."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tailgate.servers.clock import anchored_environment
from tests.fakes.processes import free_port, wait_for
from tests.faults import machine, network, processes, storage
from tests.faults.fault import CANDIDATE, Draw, Family, Kind, Moment, Setup, Situation, Truth
from tests.faults.processes import MARK

# Where faults come from, by the name that the campaign's --families takes.
FAMILIES: dict[str, Draw] = {
    "signals": processes.draw_signal,
    "network": network.draw,
    "storage": storage.draw,
    "machine": machine.draw,
    "lies": processes.draw_lie,
}
# How often each kind is planned; those that take minutes are rare.
_WEIGHTS: dict[Kind, int] = {
    "run": 8,
    "until-decided": 4,
    "ramp": 4,
    "workers": 4,
    "remote worker": 3,
    "external": 3,
}
_ALL_TRUTHS: tuple[Truth, ...] = ("good", "good", "naive", "slow", "other answers", "dies")
_BESIDES_S = 120.0  # start, stop and judgement
_TRIES = 100  # a family may have no fault for a kind of run


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run: its kind, the truth about its candidate, and its faults."""

    seed: int
    kind: Kind
    truth: Truth
    family: Family
    duration_s: float
    moments: tuple[Moment, ...] = ()

    @property
    def limit_s(self) -> float:
        """Seconds within which the run ends by itself."""
        paused = sum(moment.lasts_s or 0.0 for moment in self.moments)
        extra = max((moment.fault.extra_s for moment in self.moments), default=0.0)
        return _BESIDES_S + 1.5 * self.duration_s + paused + extra

    @property
    def is_bad(self) -> bool:
        """Whether the candidate must never pass, whatever else happens."""
        return self.truth != "good"

    def hurts(self, arm: str = CANDIDATE) -> bool:
        """Whether a fault may make the arm slower, or make its requests fail."""
        return any(arm in moment.fault.hurts for moment in self.moments)

    def __str__(self) -> str:
        wrong = "; ".join(map(str, self.moments)) or "nothing"
        return f"seed {self.seed}: {self.family}, {self.kind} of a candidate that is {self.truth!r}: {wrong}"


def plan(seed: int, *, quick: bool = False, families: Sequence[str] = tuple(FAMILIES)) -> Plan:
    """Draw the plan of the seed; one in twelve has no fault. `quick`: no long stop."""
    rng = random.Random(seed)
    kind: Kind = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    truth: Truth = rng.choice(("good",) if kind == "external" else _ALL_TRUTHS)
    family: Family = rng.choices(("safety", "liveness", "none"), (7, 4, 1))[0]
    duration_s = 14.0 if kind == "ramp" else 5.0
    situation = Situation(kind=kind, truth=truth, duration_s=duration_s, liveness=family == "liveness", quick=quick)
    count = 0 if family == "none" else rng.choices((1, 2, 3), (6, 3, 1))[0]
    moments: list[Moment] = []
    for _ in range(_TRIES):
        if len(moments) == count:
            break
        moment = FAMILIES[rng.choice(list(families))](rng, situation)
        if moment is not None:
            moments.append(moment)
    return Plan(seed=seed, kind=kind, truth=truth, family=family, duration_s=duration_s, moments=tuple(moments))


def covering(count: int, family: str) -> list[int]:
    """Return the first seeds of `count` quick plans with one fault, each of another fault, phase, kind and truth."""
    seen: set[str] = set()
    seeds: list[int] = []
    for seed in itertools.count(1):
        item = plan(seed, quick=True, families=(family,))
        new = {item.kind, f"a {item.truth}", *(moment.fault.name for moment in item.moments)}
        new |= {moment.phase for moment in item.moments if moment.after_s}  # a lie begins with its arm
        if len(item.moments) == 1 and not new & seen and (seeds or item.is_bad):
            seen |= new
            seeds.append(seed)
        if len(seeds) == count:
            return seeds
    raise AssertionError("unreachable")


ROOT = Path(__file__).resolve().parents[2]
SECRETS = {
    "TAILGATE_CHANNEL_TOKEN": "planted-channel-token-1d90ab",
    "FAULTS_TOKEN": "planted-bearer-token-60e2c5",
    "CLOUD_SECRET_KEY": "planted-cloud-key-b7735d",  # in the environment by chance
}

_HEAD = """
name = "faults"
seed = {seed}
slo = {{p50_ttft_ms = 2000, p50_e2e_ms = 6000}}
[traffic]
duration_s = {duration_s}
rate = {rate}
length_scale = 0.05
block_s = 0.5
timeout_s = 6
# A good candidate passes after seconds of traffic: a run that cannot say PASS would promise nothing.
[gates]
quantiles = [0.5]
margin = 1.0
min_blocks = 4
cold_s = 0
max_error_pct = 5
max_machine_drift = 0.9
max_generator_lag_ms = 2000
[trials]
starting_at_once = 2
ready_timeout_s = 60
[machines]
reference_s = 0
sample_s = {sample_s}
[ramp]
steps = [50, 100]
step_s = 2
most_step_s = 8
step_margin = 1.0
least_requests = 10
"""
_ARMS = """
[[arms]]
preset = "eager"
control = true
[[arms]]
preset = "{candidate}"
"""
_EXTERNAL = """
[engine]
max_prompt_tokens = 64
max_new_tokens = 16
[[arms]]
preset = "eager"
control = true
[[arms]]
name = "server"
kind = "openai"
address = "{address}/v1"
model_name = "llama"
"""
_FLAGS: dict[Truth, list[str]] = {
    "good": [],
    "naive": ["--stall-s", "0.3"],
    "slow": ["--prefill-s", "compiled-padded-0=0.02"],
    "other answers": ["--token", "compiled-padded-0=7"],
    "dies": ["--die", "compiled-padded-0=60"],
}
ANSWERS = "answers.txt"


def environment(setup: Setup) -> dict[str, str]:
    """Return the environment of all processes of a run: mark, secrets, one clock and a temporary folder."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    given = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", MARK: setup.mark, "TMPDIR": str(setup.scratch)}
    return {**os.environ, **given, **SECRETS, **anchored_environment(), **setup.environment}


def experiment(plan: Plan, address: str = "") -> str:
    """Return the experiment of the plan, as TOML."""
    # Machines that are sampled under other load would keep every run from a PASS.
    watched = any(moment.fault.is_watched for moment in plan.moments)
    rate = 8 if plan.kind == "external" else 30  # the external fake does one step at a time
    head = _HEAD.format(seed=plan.seed, duration_s=plan.duration_s, sample_s=1.0 if watched else 60.0, rate=rate)
    if plan.kind == "external":
        return "compare_models = true\n" + head + _EXTERNAL.format(address=address)
    candidate = "compiled-naive" if plan.truth == "naive" else "compiled-padded"
    # Arms must answer alike in float32 alone.
    return (
        head
        + '[model]\ndtype = "float32"\n[security]\ntoken_env = "FAULTS_TOKEN"\n'
        + _ARMS.format(candidate=candidate)
    )


def arranged(plan: Plan, folder: Path) -> Setup:
    """Return what the run is started with, as its faults want it."""
    setup = Setup(folder=folder)
    setup.arm_flags += ["--warmup-s", "0.1", "--answers", str(folder / ANSWERS), *_FLAGS[plan.truth]]
    if plan.kind == "workers":
        setup.settings.append("traffic.workers=2")
    for moment in plan.moments:
        moment.fault.arrange(setup)
    return setup


@contextlib.contextmanager
def companions(plan: Plan, setup: Setup) -> Iterator[list[str]]:
    """Start what the run needs and yield the words of its command line."""
    folder = setup.folder
    settings = [word for setting in setup.settings for word in ("--set", setting)]
    common = ["faults.toml", "--out", "out", "--json", *settings]
    with contextlib.ExitStack() as stack:
        address = ""
        match plan.kind:
            case "until-decided":
                words = ["run", *common, "--until-decided", "--at-most", f"{plan.duration_s:g}s"]
            case "ramp":
                words = ["ramp", *common, "--at-most", f"{plan.duration_s:g}s"]
            case "remote worker":
                master = f"127.0.0.1:{free_port()}"
                words = ["run", *common, "--set", "traffic.workers=0", "--set", "traffic.remote_workers=1"]
                words += ["--set", f"traffic.master_bind={master}"]
                worker = ["worker", "--master", master, "--keep", "kept", "--trials", "1"]
                stack.enter_context(_running(tailgate(*worker), "worker", setup))
            case "external":
                words = ["run", *common]
                server = [sys.executable, "-m", "tests.fakes.http_servers", "0", str(folder / "server.log")]
                stack.enter_context(_running(server, "server", setup))
                said = folder / "server.out"
                address = wait_for(lambda: re.search(r"serving (\S+)/v1, log .*\n", said.read_text()))[1]
            case _:
                words = ["run", *common]
        (folder / "faults.toml").write_text(experiment(plan, address))
        yield words


def command(setup: Setup, words: list[str]) -> list[str]:
    """Return the command line of the run, with fake arms in place of real ones."""
    code = f"import sys; from tailgate.loadtests.commands.main import main; sys.exit(main({words!r}, arm_command="
    return [sys.executable, "-c", f"{code}{[*setup.arm_command, *setup.arm_flags]!r}))"]


def tailgate(*words: str) -> list[str]:
    return [sys.executable, "-m", "tailgate.loadtests.commands.main", *words]


@contextlib.contextmanager
def _running(words: list[str], name: str, setup: Setup) -> Iterator[None]:
    given = environment(setup)
    with (setup.folder / f"{name}.out").open("wb") as out, (setup.folder / f"{name}.err").open("wb") as err:
        process = subprocess.Popen(words, cwd=setup.folder, env=given, stdout=out, stderr=err)
    try:
        yield
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10.0)
        process.kill()
        process.wait()
