"""What a plan is run with: its experiment, its command line, its arms and what runs beside it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from servers.clock import anchored_environment
from tests.fakes.users_house import UsersHouse, free_port
from tests.faults.fault import Setup, Truth
from tests.faults.plan import Plan
from tests.faults.processes import MARK

ROOT = Path(__file__).resolve().parents[2]
SECRETS = {
    "TAILGATE_PAGE_TOKEN": "planted-page-token-8c41f7",
    "TAILGATE_CHANNEL_TOKEN": "planted-channel-token-1d90ab",
    "FAULTS_TOKEN": "planted-bearer-token-60e2c5",
    "CLOUD_SECRET_KEY": "planted-cloud-key-b7735d",  # of somebody else, and in the environment by chance
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
# A good candidate passes by a few seconds of traffic: a run that never says PASS promises nothing by not saying it.
[gates]
quantiles = [0.5]
margin = 1.0
min_blocks = 4
cold_s = 0
max_error_pct = 5
max_bed_drift = 0.9
max_generator_lag_ms = 2000
draws = 999
[trials]
starting_at_once = 2
ready_timeout_s = 60
[bed]
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
_ENGINE = """
[model]
id = "random:tiny"
device = "cpu"
dtype = "float32"
[engine]
threads = 1
max_prompt_tokens = 96
max_new_tokens = 24
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


def environment(plan_mark: str, setup: Setup) -> dict[str, str]:
    """The environment of all processes of a run: marked, with secrets, one clock and temporary files of its own."""
    given = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", MARK: plan_mark, "TMPDIR": str(temporary(plan_mark))}
    return {**os.environ, **given, **SECRETS, **anchored_environment(), **setup.environment}


def temporary(plan_mark: str) -> Path:
    """The folder for temporary files. Its path is short, as that of a usual one is: sockets have short names."""
    return Path(f"/tmp/tgf-{plan_mark}")


def experiment(plan: Plan, address: str = "") -> str:
    """The experiment of the plan, as TOML."""
    # Whoever else uses the machine would keep every run from a PASS: machines are watched where a fault needs it.
    watched = any(moment.fault.is_watched for moment in plan.moments)
    # The fake server outside does one step at a time.
    rate = 8 if plan.kind == "external" else 30
    head = _HEAD.format(seed=plan.seed, duration_s=plan.duration_s, sample_s=float(watched), rate=rate)
    if plan.kind == "external":
        return "compare_models = true\n" + head + _EXTERNAL.format(address=address)
    candidate = "compiled-naive" if plan.truth == "naive" else "compiled-padded"
    if plan.kind == "engine":
        return head + _ENGINE + _ARMS.format(candidate="eager-padded")
    # In float32 arms must answer alike: elsewhere other answers alone are no fault.
    return (
        head
        + '[model]\ndtype = "float32"\n[security]\ntoken_env = "FAULTS_TOKEN"\n'
        + _ARMS.format(candidate=candidate)
    )


def arranged(plan: Plan, folder: Path) -> Setup:
    """What the run is started with, as its faults want it."""
    setup = Setup(folder=folder)
    if plan.kind != "engine":
        setup.arm_flags += ["--warmup-s", "0.1", "--answers", str(folder / ANSWERS), *_FLAGS[plan.truth]]
    if plan.kind == "workers":
        setup.settings.append("traffic.workers=2")
    for moment in plan.moments:
        moment.fault.arrange(setup)
    return setup


@contextlib.contextmanager
def beside(plan: Plan, mark: str, setup: Setup) -> Iterator[list[str]]:
    """What the run finds there, which is gone afterwards, and the words of its command line."""
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
                stack.enter_context(_running(tailgate(*worker), "worker", mark, setup, setup.worker_environment))
            case "external":
                words = ["run", *common]
                server = [sys.executable, "-m", "tests.faults.external_server", str(folder / "server.log")]
                process = stack.enter_context(_running(server, "server", mark, setup))
                address = _first_line(folder / "server.out", process)
            case "users' ramp":
                words = stack.enter_context(_users(plan, mark, setup))
            case _:
                words = ["run", *common]
        (folder / "faults.toml").write_text(experiment(plan, address))
        yield words


def command(plan: Plan, setup: Setup, words: list[str]) -> list[str]:
    """The command line of the run, which starts fake arms in place of real ones."""
    if plan.kind == "users' ramp":
        return tailgate(*words)
    arm = setup.arm_command or [sys.executable, str(ROOT / "tests" / "fakes" / "arm.py")]
    given = "" if plan.kind == "engine" else f", arm_command={[*arm, *setup.arm_flags]!r}"
    code = f"from loadtests.commands.main import main; sys.exit(main({words!r}{given}))"
    return [sys.executable, "-c", "; ".join(["import sys", *([setup.prelude] if setup.prelude else []), code])]


def tailgate(*words: str) -> list[str]:
    """A command line of tailgate."""
    return [sys.executable, "-m", "loadtests.commands.main", *words]


@contextlib.contextmanager
def _running(
    words: list[str], name: str, mark: str, setup: Setup, more: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    given = {**environment(mark, setup), **(more or {})}
    with (setup.folder / f"{name}.out").open("wb") as out, (setup.folder / f"{name}.err").open("wb") as err:
        process = subprocess.Popen(words, cwd=setup.folder, env=given, stdout=out, stderr=err)
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10.0)
        process.kill()
        process.wait()


def _first_line(path: Path, process: subprocess.Popen[bytes]) -> str:
    while process.poll() is None:
        if "\n" in (text := path.read_text()):
            return text.partition("\n")[0]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
    raise AssertionError(path.with_suffix(".err").read_text())


@contextlib.contextmanager
def _users(plan: Plan, mark: str, setup: Setup) -> Iterator[list[str]]:
    candidate = "compiled-naive" if plan.truth == "naive" else "compiled-padded"
    given = {key: value for key, value in environment(mark, setup).items() if os.environ.get(key) != value}
    before = {key: os.environ.get(key) for key in given}
    os.environ.update(given)  # for what the house starts
    try:
        flags = dict.fromkeys(("eager", candidate), setup.arm_flags)
        with UsersHouse(setup.folder, arms=("eager", candidate), flags=flags, rate=40.0) as house:
            words = ["ramp", "demo", "--admin", f"127.0.0.1:{house.ports['admin']}", "--out", "out", "--json"]
            for setting in (
                *setup.settings,
                f"ramp.candidate={candidate}",
                "ramp.steps=[50,100]",
                "ramp.step_s=3",
                "ramp.most_step_s=20",
                "ramp.step_margin=3.0",
                "traffic.block_s=1",
                "gates.margin=3.0",
                "gates.cold_s=1",
                "slo={p50_ttft_ms=2000,p50_e2e_ms=6000}",
            ):
                words += ["--set", setting]
            yield words
    finally:
        for key, value in before.items():
            os.environ.pop(key, None)
            if value is not None:
                os.environ[key] = value
