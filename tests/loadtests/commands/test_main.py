"""The command line: usage, flags, configurations, and what a command leaves that broke or was killed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer

from tailgate.loadtests.commands.arm_flags import preset_arm
from tailgate.loadtests.commands.main import COMMANDS, main
from tailgate.loadtests.commands.options import duration
from tailgate.loadtests.external.grpc_channel import check_replica
from tailgate.servers.complaint import ConfigError
from tailgate.servers.rpc import inference_pb2_grpc, telemetry_pb2, telemetry_pb2_grpc
from tailgate.servers.stdout import aligned
from tests.fakes.command_line import GROUP, parsed
from tests.fakes.grpc_servers import serving
from tests.fakes.processes import command_of, family, refusal

ROOT = Path(__file__).resolve().parents[3]


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return what the command says on stderr: one line, with exit code 2 and nothing on stdout."""
    code = main(list(map(str, arguments)))
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("tailgate: ")
    assert err.count("\n") == 1
    return err


def run_command(capsys: pytest.CaptureFixture[str], command: str, *arguments: object) -> tuple[int, dict, str]:
    """The exit code, the JSON where --json asks for it, and all that was printed; nothing is on stderr."""
    code = main([command, *map(str, arguments)])
    out, err = capsys.readouterr()
    assert err == ""
    return code, json.loads(out) if "--json" in arguments else {}, out


@pytest.mark.process
def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from tailgate.loadtests.commands.main import COMMANDS, main\n"
        "main(['--help']); assert 'pydantic' not in sys.modules\n"
        "for arguments in (['estimate'], *([name, '--help'] for name in COMMANDS)): main(arguments)\n"
        "heavy = {'numpy', 'pyarrow', 'grpc', 'scipy', 'torch', 'locust'} & {*sys.modules}\n"
        "print('heavy', heavy, file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stderr.splitlines()[-1] == "heavy set()"


def test_without_words_it_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "Start here" in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"tailgate {command} " in text.partition("examples:")[2]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["run"],
            "run takes one EXPERIMENT and got none: type `tailgate run EXPERIMENT`, for example `tailgate run demo`",
        ),
        (["compare", "a"], "one BASELINE and one CANDIDATE and got a: type `tailgate compare a CANDIDATE`"),
        (["compare", "a", "b", "c"], "one CANDIDATE and got a, b and c: type `tailgate compare a b`"),
        (["run", f"{'x' * 300}.toml"], "File name too long"),
        (["run", "demo", "--set", "traffic.rate=fast"], 'traffic.rate is "fast": give a number'),
        (["check", "demo", "--trace", "none.csv"], 'none.csv" cannot be read (No such file or directory)'),
        (["analyze", "none"], 'run directory "none" does not exist'),
        (["analyze", "."], 'run directory "." holds no run: give'),
        (["init", "new.toml", "--p99-ms", "0"], '--p99-ms is "0": give a number from'),
        (["serve"], "Missing option '--preset'"),
        (
            ["serve", "--preset", "eager", "--port", "70000"],
            '--port is "70000": give 0, or a port from 1024 to 65535',
        ),
        (["serve", "--preset", "eager", "--cache-dir", "key.toml"], '--cache-dir "key.toml" cannot be made'),
        (["serve", "--preset", "eager", "--replica", "a b"], '--replica is "a b": give letters'),
        (["split", "--arm", "a=h:1", "--port", "8080", "--admin-port", "8080"], "--admin-port are both 8080"),
        (["run", "demo", "--page", "x"], '--page is "x": give off, 0 for a free one, or a port from 1024'),
        (["frontier", "demo", "--budget", "5x"], '--budget is "5x": give a time such as 90s, 5m or 1.5h, up to 168h'),
        (["ramp", "demo", "--admin", "9901"], '--admin "9901" is not HOST:PORT or PATH'),
        (["ramp", "demo"], "such as --set ramp.candidate=compiled-padded"),
        (["serve", "--preset", "eager", "--set", "model.id="], "model.id"),
        (["inspect", "--arm", "eager", "--max-prompt-tokens", "9"], "--set engine.max_prompt_tokens=N"),
        (["serve", "--preset", "eager", "--set", "compile.speed=1"], "compile.speed is unknown"),
        (["split", "--arm", "eager"], '--arm "eager" is not NAME=HOST:PORT'),
        (["split", "--arm", "a=h:1", "--arm", "a=h:2"], 'arm name "a" is taken'),
        (["split", "--arm", "a=h:1", "--weight", "b=2"], '--weight names the arm "b"'),
        (["split", "--arm", "a=h:1", "--weight", "a=x"], '--weight "a=x" is not NAME=WEIGHT'),
        (["split", "--arm", "a=h:1", "--shadow", "b=5%"], '--shadow names the arm "b"'),
        (["split", "--arm", "a=h:1", "--shadow", "a=0.25"], '--shadow "a=0.25" is not NAME=PERCENT%'),
        (["split", "--arm", "a=h:1", "--shadow", "a=5%"], "every arm has weight 0"),
        (["split", "--arm", "a=h:1", "--tls-certificate", "a.pem"], "TLS key"),
        (["split", "--arm", "a=h:1", "--tls-key", ""], "--tls-key is empty"),
        (["run", "demo", "--set", "traffic.rate=0.001", "--duration", "1s"], "no request"),
        (["split", "--weight", "a=5"], "no arm is given: add --arm NAME=HOST:PORT at least once, or --admin"),
        (["split", "--admin", "localhost", "--weight", "a=1"], '--admin "localhost" is not HOST:PORT'),
        (["split", "--admin", "h:1", "--weight", "a=1", "--arm", "a=h:1"], "leave out --arm"),
        # What a new user gets wrong: what is allowed, and what to type instead.
        (["rnu", "demo"], "'rnu'. Did you mean 'run'? see `tailgate --help`"),
        (["run", "demo", "--set", "traffic.rte=3"], "traffic.rte is unknown: did you mean rate?"),
        (["check", "key.toml"], "trafic is unknown: did you mean traffic?"),
        (["check", "demo", "--set", "slots=4"], "slots is unknown: did you mean engine.slots?"),
        (["check", "demo", "--set", "traffic.slots=4"], "traffic.slots is unknown: did you mean engine.slots?"),
        (["check", "demo", "--mode=default"], "--mode: write --set arms.NAME.compile.mode=VALUE"),
        (["run", "canry.toml"], '"canry.toml" does not exist: did you mean canary.toml? give a TOML file'),
        (["run", "demo.toml"], '"demo.toml" does not exist: did you mean demo? give a TOML file'),
        (["run", "demo", "--model", "x"], "No such option: --model: write --set model.id=VALUE"),
        (["run", "demo", "--outt", "3"], "--outt (Possible options: --out, --quiet): see `tailgate run"),
        (
            ["inspect", "demo", "--arm", "compiled-nave"],
            "did you mean compiled-naive? use one of eager, compiled-pad",
        ),
        (["inspect", "external", "--arm", "candidate"], '"candidate" is external (kind = "openai")'),
        (["run", "demo", "--set", "arms.eagre.weight=1"], 'called "eagre": did you mean eager? use one of eager, comp'),
        (
            ["serve", "--preset", "compiled-nave"],
            '--preset is "compiled-nave": did you mean compiled-naive? use eager,',
        ),
        (["inspect", "--arm", "eagr"], '--arm is "eagr": did you mean eager? use eager,'),
        (["check", "unnamed.toml", "--set", "arms.eager-padded.preset=x"], 'arms.eager-padded.preset is "x": use'),
        (["check", "demo", "--out", "/proc/x"], '--out "/proc" is not writable: give a folder that is'),
        (
            ["run", "demo", "--set", "model.id=./llama"],
            "llama\" does not exist: give a model's folder",
        ),
        (["check", "twice.toml"], "twice.toml: a key is set twice (at line 2, column 9): correct it there: seed = 2"),
        (["check", "broken.toml"], "declaration (at line 2, column 9): correct it there: [traffic"),
        (["check", "demo", "--set"], "Option '--set' requires an argument: see `tailgate check --help`"),
        (["check", "demo", "--set", "traffic.duration_s=10m"], 'traffic.duration_s is "10m": give 600, in seconds'),
        (["check", "demo", "--set", "model.id=tiny"], 'model.id "tiny" is no model: did you mean random:tiny'),
        (["check", "canary.toml"], "arms has 0 entries: give 2 to 26 [[arms]] tables"),
        (["run", "runs/1-demo"], "is a run directory: give runs/1-demo/experiment.toml to run it again"),
        (["analyze", "runs"], "holds several runs: did you mean runs/1-demo?"),
        (["open", "runs/demo"], '"runs/demo" does not exist: did you mean runs/1-demo?'),
        (["run", "demo", "--set", "model.device=cuda"], "no GPU is visible: use cpu, or run where `tailgate doctor`"),
    ],
)
def test_bad_usage_is_one_line_with_exit_code_2(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tailgate.loadtests.trials.preflight.sees_gpu", lambda: False)
    arms = 'arms = [{ preset = "eager", control = true }, { preset = "eager-padded" }]'
    files = {"unnamed": f'name = "a"\n{arms}\n[traffic]\nrate = 1\n'}
    files |= {
        "canary": 'name = "a"\n[traffic]\nrate = 1\n',
        "runs/1-demo/experiment": "",
        "key": 'name = "a"\n[trafic]\nrate = 1\n',
        "broken": 'name = "a"\n[traffic\n',
        "twice": "seed = 1\nseed = 2\n",
    }
    (tmp_path / "runs" / "1-demo").mkdir(parents=True)
    for name, text in files.items():
        (tmp_path / f"{name}.toml").write_text(text)
    before = sorted(tmp_path.rglob("*"))
    assert expected in refused(capsys, *arguments)
    assert sorted(tmp_path.rglob("*")) == before


def test_check_asks_for_the_log_of_a_candidate_only(capsys: pytest.CaptureFixture[str]) -> None:
    log = ("--set", f"arms.compiled.telemetry.log={__file__}")
    for more, seen in (((), "by stalls that clients see; arms.compiled.telemetry.log would"), (log, "counted")):
        _, document, _ = run_command(capsys, "check", "vllm", "--json", *more)
        assert document["gates"][-1]["why"].startswith(seen)


def test_check_names_the_loads_of_a_search(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "frontier-demo"]) == 0
    assert "steps of 16 to 256 requests/s (saturation)" in capsys.readouterr().out


def test_a_port_in_use_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        out = str(tmp_path / "runs")
        message = refused(capsys, "run", "demo", "--out", out, "--set", f"splitter.port={port}")
        assert f"splitter.port is {port}" in message
        assert f"--page is {port}" in refused(capsys, "run", "demo", "--out", out, "--page", str(port))
        assert f"--port is {port}" in refused(capsys, "serve", "--preset", "eager", "--port", str(port))
        assert f"--port is {port}" in refused(capsys, "split", "--arm", "eager=127.0.0.1:9", "--port", str(port))
    assert not (tmp_path / "runs").exists()


def test_a_length_of_time_is_read_or_refused() -> None:
    for text, seconds in (("90s", 90.0), (" 1.5h ", 5400.0), ("5 m", 300.0), ("2min", 120.0)):
        assert duration(text) == seconds
    for other in ("", "0", "90", "0s", "-5s", "5d", "nan", "1e3", "٣s", "5 m 3 s", "8d", "9" * 5000):
        with pytest.raises(typer.BadParameter, match="give"):
            duration(other)


def test_serve_flags_become_an_arm() -> None:
    options = parsed(
        *("serve", "--preset", "compiled-padded", "--name", "blue", "--set", "model.id=random:llama-3.2-1b"),
        *("--set", "compile.mode=max-autotune", "--set", "engine.max_queue=7"),
    )
    arm = preset_arm(options["preset"], options["settings"], name=options["name"])
    assert (arm.name, arm.preset, arm.model.id) == ("blue", "compiled-padded", "random:llama-3.2-1b")
    assert (arm.compile.mode, arm.engine.max_queue) == ("max-autotune", 7)
    assert arm.shapes.kind == "pad"


def test_a_fault_of_a_run_keeps_and_judges_what_was_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("tailgate.loadtests.trials.trial.Trial.run", fail)
    assert main(["run", "demo", "--out", str(tmp_path), "--json"]) == 1
    output = capsys.readouterr()
    (path,) = tmp_path.glob("*/traceback-*.txt")
    assert f"its traceback is in {path}" in output.err
    assert "Traceback" not in output.err
    assert json.loads(output.out)["error"].startswith("out of memory")


def test_a_library_that_does_not_load_leaves_its_traceback_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "experiment.toml").touch()
    monkeypatch.setitem(sys.modules, "tailgate.analysis.summary.summary", None)
    assert main(["analyze", str(tmp_path)]) == 1
    (path,) = tmp_path.glob("traceback-*.txt")
    assert f"its traceback is in {path}" in capsys.readouterr().err


@pytest.mark.process
@pytest.mark.parametrize("stream", ["/dev/full", "closed"])
def test_a_stdout_that_takes_nothing_is_reported_in_one_line(stream: str) -> None:
    arguments = ["split", "--arm", "eager=127.0.0.1:1", "--print-config"]
    command = [sys.executable, "-m", "tailgate.loadtests.commands.main", *arguments]
    redirect = ">&-" if stream == "closed" else f"> {stream}"
    done = subprocess.run(
        ["sh", "-c", f"{' '.join(command)} {redirect}"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback (most" not in done.stderr
    assert done.stderr.count("\n") <= 1
    assert done.returncode == (1 if stream == "/dev/full" else 0)


def test_a_large_configuration_reaches_the_program_that_serves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []

    def become(program: str, command: list[str], environment: dict[str, str]) -> None:
        given.append(json.loads(Path(command[command.index("--config") + 1]).read_text()))
        raise SystemExit(0)

    monkeypatch.setattr(os, "execve", become)
    ladders = [f"shapes.{name}_ladder={[*range(1, 10_001)]}" for name in ("batch", "length")]
    large = [part for setting in ("shapes.kind=buckets", *ladders) for part in ("--set", setting)]
    with pytest.raises(SystemExit):  # a pipe of 64 KiB would wait for ever
        main(["serve", "--preset", "eager", "--port", "0", *large])
    assert len(given[0]["shapes"]["length_ladder"]) == 10_000


def test_a_split_whose_envoy_never_serves_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tailgate.loadtests.commands.split.START_S", 0.1)
    monkeypatch.setattr("tailgate.servers.splitter.envoy.Envoy.serves", lambda envoy: False)
    assert main(["split", "--arm", "eager=127.0.0.1:1", "--port", "0", "--json"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tailgate: Envoy serves nothing after 0.1 s (")


@pytest.mark.process
def test_after_kill_9_neither_envoy_nor_a_temporary_file_is_left(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    split = subprocess.Popen(
        [sys.executable, "-m", "tailgate.loadtests.commands.main", "split", "--arm", "eager=127.0.0.1:1", "--json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert split.stdout is not None
    assert json.loads(split.stdout.readline())["port"]
    children = family(split.pid)[1:]
    assert any("envoy" in command_of(pid) for pid in children)
    assert list(temporary.iterdir())
    split.kill()
    split.communicate()
    deadline = time.monotonic() + 60
    while any(command_of(pid) for pid in children) or list(temporary.iterdir()):
        assert time.monotonic() < deadline, list(temporary.iterdir())
        time.sleep(0.05)


@pytest.mark.process
def test_a_shape_that_cannot_be_read_is_refused_before_anything_is_loaded() -> None:
    words = ["inspect", "--arm", "eager", "--shapes", "prefill 1x9"]
    command = [sys.executable, "-m", "tailgate.loadtests.commands.main", *words]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.splitlines() == [ended.stderr.strip()]
    assert "prefill 1x9" in ended.stderr


ROWS = [
    ["arm", "gate", "run length", "if as seen", ""],
    ["compiled-bucketed", "p99 TTFT", "11 minutes", "43 minutes", "299 requests if none misses it"],
    ["eager", "errors", "9 minutes", "", ""],
]


def test_every_command_but_the_load_processes_answers_programs() -> None:
    answers = {name for name, one in GROUP.commands.items() if any("--json" in item.opts for item in one.params)}
    assert set(GROUP.commands) - answers == {"locust", "worker"}


@pytest.mark.parametrize("columns", [60, 100])
def test_a_table_fits_and_keeps_every_word(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailgate.servers.stdout.columns", lambda piped: columns)
    lines = aligned(ROWS, left=2)
    assert max(map(len, lines)) <= columns
    shown = "".join(lines)
    for word in ("43", "p99", "TTFT", "errors", "299", "misses"):
        assert word in shown
    assert "…" not in shown


class NamedTelemetry(telemetry_pb2_grpc.TelemetryServicer):  # type: ignore[misc]
    def Snapshot(self, request: Any, context: Any) -> Any:  # noqa: N802
        return telemetry_pb2.SnapshotResponse(arm="compiled-padded", replica="compiled-padded-0")


def test_an_arm_that_answers_by_another_name_is_refused_with_both() -> None:
    with serving(telemetry_pb2_grpc.add_TelemetryServicer_to_server, NamedTelemetry()) as address:
        assert check_replica("compiled-padded", address)
        said = refusal(ConfigError, check_replica, "compiled", address)
    for words in (f"compiled={address}", f"--arm compiled-padded={address}", "--name compiled"):
        assert words in said


def test_a_server_without_telemetry_does_not_say_and_one_that_is_not_there_is_asked_again() -> None:
    with serving(inference_pb2_grpc.add_InferenceServicer_to_server, inference_pb2_grpc.InferenceServicer()) as address:
        assert check_replica("vllm", address)
    assert not check_replica("vllm", address)
