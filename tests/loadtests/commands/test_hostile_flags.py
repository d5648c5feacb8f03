"""Give hostile values to one flag of each type, and to the positional arguments of every command.

The flags are read from the parser, so that a new type of flag is tried as soon as it exists.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tailgate.loadtests.commands.main import main
from tailgate.loadtests.trials.run import Orchestrator, RunOutcome
from tailgate.servers.complaint import LONGEST
from tailgate.servers.splitter.admin import SplitterError
from tests.fakes.command_line import GROUP
from tests.fakes.runs import FakeRun, write_run

HOSTILE = {
    "empty": "",
    "space": " ",
    "nan": "nan",
    "inf": "inf",
    "-inf": "-inf",
    "1e30": "1e30",
    "1e-320": "1e-320",
    "30 digits": "9" * 30,
    "5,000 digits": "9" * 5000,
    "zero": "0",
    "below zero": "-1",
    "superscript": "²",
    "300 characters": "x" * 300,
    "20,000 characters": "x" * 20_000,
    "a long path": "x/" * 3000,
    "not UTF-8": "a\udcffb",
    "an escape": "\x1b[31mred\nline",
    "right to left": "a\u202eb",
    "deep key": ".".join("a" * 40) + "=1",
    "deep value": "engine.slots=" + "[" * 5000,
    "huge value": "engine.slots=" + "9" * 5000,
    "huge index": f"arms[{'9' * 5000}].weight=1",
    "an unknown user's home": "~unknown9/x",
    "a file at an unknown user's home": "security.tls_ca=~unknown9/x",
    "a secret that is empty": "security.token_env=",
    "pair": "a=b",
    "equals": "=",
    "comma": ",",
    "percent": "%s %(prog)s {0}",
    "folder": "..",
    "device": "/dev/null",
    "target": "p99_ttft_ms=nan",
    "huge target": "p99_ttft_ms=" + "9" * 400,
    "shape": "prefill 99999999999999999999x1",
    "address": "eager=127.0.0.1:99999999999999",
}

# What a command needs besides the flag that is tried. Names in capitals stand for what the fixture makes.
BASE: dict[str, tuple[str, ...]] = {
    "init": ("NEW", "--model", "random:tiny", "--rate", "4"),
    "check": ("demo", "--out", "OUT"),
    "doctor": ("--duration", "0s"),
    "list": (),
    "open": ("RUN", "--out", "OUT"),
    "run": ("demo", "--out", "OUT"),
    "ramp": ("demo", "--set", "ramp.candidate=compiled-padded", "--out", "OUT"),
    "frontier": ("demo", "--out", "OUT"),
    "parity": ("demo", "--out", "OUT"),
    "inspect": ("--arm", "eager"),
    "serve": ("--preset", "eager", "--port", "0"),
    "precompile": ("--arm", "compiled-padded", "--out", "OUT"),
    "split": ("--arm", "eager=127.0.0.1:50051", "--arm", "dark=127.0.0.1:50052", "--shadow", "dark=5%"),
    "locust": ("chat",),
    "worker": ("--master", "127.0.0.1:5557", "--keep", "OUT"),
    "analyze": ("RUN",),
    "compare": ("EARLIER", "RUN"),
}


def cases() -> Iterator[Any]:
    seen = set()
    for name, one in GROUP.commands.items():
        for option in one.params:
            flag = option.opts[-1] if option.opts[-1].startswith("-") else ""
            described = option.type_descriptor
            kind = (described.annotation, described.parameter_info.parser, option.nargs)
            if getattr(option, "is_flag", False) or (flag and kind in seen):
                continue
            seen.add(kind)
            yield pytest.param(name, BASE[name], flag, id=f"{name} {flag or option.name}")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("made")
    trace = folder / "trace.csv"
    rows = [f"2023-11-16 00:00:0{second},{tokens},5\n" for second, tokens in enumerate((10, 300, 10))]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(rows))
    run = write_run(folder / "run", FakeRun(duration_s=60.0, rate=1.0))
    earlier = write_run(folder / "earlier", FakeRun(duration_s=60.0, rate=1.0, day=-7, seed=2))
    return {
        "NEW": str(folder / "new.toml"),
        "OUT": str(folder / "out"),
        "RUN": str(run),
        "EARLIER": str(earlier),
        "TRACE": str(trace),
    }


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)

    def outcome(orchestrator: Orchestrator) -> RunOutcome:
        return RunOutcome(run_dir=tmp_path, complete=False, interrupted=True)

    def stopped(*_: object, **__: object) -> NoReturn:
        raise SystemExit(0)

    def refused(*_: object, **__: object) -> NoReturn:
        raise SplitterError("not started")

    monkeypatch.setattr(Orchestrator, "run", outcome)
    monkeypatch.setattr("tailgate.loadtests.commands.split.Envoy", refused)
    monkeypatch.setattr(os, "execve", stopped)
    monkeypatch.setattr("os.execv", stopped)
    monkeypatch.setattr("tailgate.loadtests.commands.worker._wait_for", stopped)
    monkeypatch.setattr("tailgate.analysis.compare.comparison.compare_runs", stopped)
    monkeypatch.setattr("tailgate.loadtests.trials.parity_processes.ParityRun.run", stopped)


def run(arguments: list[str]) -> int:
    try:
        return main(arguments)
    except SystemExit as leaving:
        return int(leaving.code or 0)


def without(base: tuple[str, ...], flag: str) -> list[str]:
    """`base` without `flag` and its value, or without its first word where a positional one is tried."""
    words = list(base)
    if not flag:
        return words[1:] if words and not words[0].startswith("-") else words
    if flag in words:
        place = words.index(flag)
        del words[place : place + 2]
    return words


@pytest.mark.parametrize(("command", "base", "flag"), cases())
def test_a_hostile_value_is_one_line_and_an_exit_code(
    command: str, base: tuple[str, ...], flag: str, made: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    others = [made.get(word, word) for word in without(base, flag)]
    for name, value in HOSTILE.items():
        given = [f"{flag}={value}"] if flag.startswith("--") else ["--", value]
        code = run([command, *others, *given])
        out, err = capsys.readouterr()
        case = f"{command} {flag} with {name}: {err[:500]!r}"
        assert code in (0, 1, 2, 3, 99), case
        assert "Traceback" not in err + out, case
        assert "a fault in tailgate" not in err + out, case
        if code == 2:
            assert err.startswith("tailgate: "), case
            assert err.count("\n") == 1, case
            assert len(err) < LONGEST + 200, case
            assert err[:-1].isprintable(), case
        if code == 0 and "{" in out[:1]:
            json.loads(out, parse_constant=pytest.fail)
