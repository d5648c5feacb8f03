from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtests.commands.main import build_parser
from tests.fakes.runs import FakeRun, write_run
from tests.fakes.terminal import ROOT, at_terminal, tailgate

COLUMNS = 80


FAKE_ARM = ROOT / "tests" / "fakes" / "arm.py"


# Commands of one process that ends by itself: arguments after the name. RUN and EARLIER are run directories, TRACE is a
# trace.
ENDING: dict[str, tuple[str, ...]] = {
    "analyze": ("RUN",),
    "compare": ("EARLIER", "RUN"),
    "plan": ("RUN", "--duration", "600"),
    "calibrate": ("RUN", "--splits", "20"),
    "breakeven": ("RUN",),
    "export": ("RUN", "--format", "csv"),
    "forecast": ("TRACE",),
    "inspect": ("--arm", "eager", "--slots", "2", "--shapes", "prefill 1x12, decode 2@30"),
    "precompile": ("--arm", "compiled-naive", "--slots", "1", "--max-prompt-tokens", "16", "--out", "ARTIFACT"),
}


# Others have a test of their own below; a worker finds nothing out.
APART = {"run", "ramp", "provider", "frontier", "serve", "split", "parity", "worker"}


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("terminal")
    write_run(folder / "run", FakeRun(duration_s=150, rate=3, slo={"p99_ttft_ms": 2000}))
    write_run(folder / "earlier", FakeRun(duration_s=150, rate=3, slo={"p99_ttft_ms": 2000}, seed=2, day=-7))
    trace = folder / "trace.csv"
    rows = "".join(f"2023-11-16 18:15:{second:02}.0,{40 + 7 * second},20\n" for second in range(60))
    trace.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    run = folder / "run"
    yield {"RUN": f"{run}", "EARLIER": f"{folder / 'earlier'}", "TRACE": f"{trace}", "ARTIFACT": f"{run}.compiled"}
    shutil.rmtree(folder)


def objects(lines: list[str]) -> list[Any]:
    """The JSON objects among the lines."""
    found = []
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def test_every_command_is_tried_at_a_terminal() -> None:
    (commands,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    assert set(commands.choices) == set(ENDING) | APART
    without = {name for name, parser in commands.choices.items() if "--json" not in parser.format_help()}
    assert without == {"worker"}


@pytest.mark.parametrize("command", ENDING)
def test_a_person_is_shown_words_that_fit(command: str, given: dict[str, str], tmp_path: Path) -> None:
    arguments = [given.get(argument, argument) for argument in ENDING[command]]
    # The C++ compiler takes minutes where others use the processors.
    within_s = 500.0 if command in ("inspect", "precompile") else 120.0
    code, lines, err = at_terminal(tailgate(command, *arguments), tmp_path, columns=COLUMNS, within_s=within_s)
    assert code in (0, 3), err
    assert objects(lines) == []
    assert lines
    # A path has the length that it has, and colours take no room.
    shown = [re.sub("\x1b\\[[0-9;]*m", "", line) for line in lines]
    assert [line for line in shown if len(line) > COLUMNS and given["RUN"] not in line] == []
    if command == "precompile":
        return  # It compiles for minutes, and tests/servers/test_precompile.py reads its object.
    if command == "export":
        shutil.rmtree(f"{given['RUN']}-csv")
    code, lines, err = at_terminal(tailgate(command, *arguments, "--json"), tmp_path, within_s=within_s)
    assert code in (0, 3), err
    assert len(lines) == len(objects(lines)) == 1


def test_a_run_that_broke_says_so_in_words_alone(tmp_path: Path) -> None:
    fake = (sys.executable, str(FAKE_ARM), "--fail-start", "compiled-naive-0")
    code, lines, err = at_terminal(tailgate("run", "demo", "--set", "bed.reference_s=0", arm_command=fake), tmp_path)
    assert (code, objects(lines)) == (1, [])
    assert "the weights are missing" in err


def test_a_run_is_judged_in_words_alone(tmp_path: Path) -> None:
    settings = ("bed.reference_s=0", "traffic.duration_s=4", "traffic.block_s=1", "traffic.rate=8")
    flags = [flag for setting in settings for flag in ("--set", setting)]
    fake = (sys.executable, str(FAKE_ARM))
    code, lines, err = at_terminal(tailgate("run", "demo", *flags, arm_command=fake), tmp_path)
    assert (code in (3, 99), objects(lines)) == (True, []), err
    assert any("compiled-naive" in line for line in lines)
    assert lines[-1].startswith("report: ")


def test_a_search_ends_in_an_answer_in_words_alone(tmp_path: Path) -> None:
    settings = ("bed.reference_s=0", "traffic.step_s=1", "traffic.settle_s=0", "traffic.rampup_s=0")
    settings += ("traffic.duration_s=4", "traffic.rates=[24,96]")
    flags = [flag for setting in settings for flag in ("--set", setting)]
    fake = (sys.executable, str(FAKE_ARM), "--prefill-s", "eager-0=0.02")
    words = tailgate("frontier", "demo", "--budget", "0.5", *flags, arm_command=fake)
    code, lines, err = at_terminal(words, tmp_path, columns=COLUMNS)
    assert (code, objects(lines)) == (0, []), err
    assert lines[0].endswith("frontier-demo")
    assert any("requests/s" in line or "No load is known" in line for line in lines)
    assert any(line.startswith("search: It ended after") for line in lines)
    assert lines[-1].startswith("report: ")
    assert [line for line in lines[:-1] if len(line) > COLUMNS and str(tmp_path) not in line] == []


def test_a_server_names_its_port_on_stderr(tmp_path: Path) -> None:
    serve = tailgate("serve", "--preset", "eager", "--slots", "2", "--port", "0")
    code, lines, err = at_terminal(serve, tmp_path, stop_at="listens on 127.0.0.1:")
    assert (code, lines) == (0, []), err


def test_a_split_names_its_port_on_stderr(tmp_path: Path) -> None:
    arms = ("--arm", "eager=127.0.0.1:9", "--arm", "compiled=127.0.0.1:9", "--port", "0")
    code, lines, err = at_terminal(tailgate("split", *arms), tmp_path, stop_at="Ctrl-C ends")
    assert (code, lines) == (0, []), err


def test_a_provider_names_its_address_on_stderr(tmp_path: Path, given: dict[str, str]) -> None:
    words = tailgate("provider", given["RUN"], "--listen", "127.0.0.1:0")
    code, lines, err = at_terminal(words, tmp_path, stop_at="Ctrl-C ends")
    assert (code, lines) == (0, []), err
    assert re.search(r"at http://127\.0\.0\.1:[1-9]\d+/v1/judgement; Ctrl-C ends", err)
