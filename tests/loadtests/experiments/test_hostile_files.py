"""Files and settings that are no experiment: one short line, whatever they hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tailgate.analysis.records.documents import DEEPEST
from tailgate.loadtests.commands.main import main
from tailgate.loadtests.experiments.reading import load, parse_setting, to_table
from tailgate.loadtests.trials.preflight import check_compiler, check_model
from tailgate.servers.complaint import LONGEST, ConfigError

DEEP = ".".join("a" * 50_000)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{DEEP} = 1", ("50000 parts", str(DEEPEST))),
        (" . ".join("a" * 50_000) + " = 1", ("50000 parts",)),
        ("x = " + "[" * 350_000 + "]" * 350_000, ("nested too deep",)),
        ("x = " + "[" * 40 + "]" * 40, ("levels deep", str(DEEPEST))),
        ("seed = " + "9" * 30, ("64 bits",)),
        ("seed = " + "9" * 5000, ("cannot be read",)),
        (f'name = "{"x" * 70_000}"', ("name", "64")),
        ('name = "a\\u0000b"', ("NUL",)),
        (
            f'name = "e"\narms = [{{preset = "eager", control = true}}, {{preset = "eager-padded"}}]\n'
            f'traffic = {{arrivals = "trace", trace = "{"x" * 300}"}}',
            ("trace", "File name too long"),
        ),
        (f'name = "e"\ntraffic.rate = 1\ncolour = "{"x" * 20_000}"', ("colour is unknown",)),
        (f'name = "e"\ntraffic.rate = 1\nseed = "{"x" * 20_000}"', ("characters left out", "give a whole number")),
        (f'name = "e"\ntraffic.rate = 1\n"{"k" * 20_000}" = 1', ("characters left out", "use one of name")),
        ('name = "e"\ntraffic.rate = 1\n"\\u001b[31m" = 1', ("\\x1b[31m is unknown",)),
    ],
)
def test_a_file_that_is_no_experiment_is_refused_in_one_short_line(
    text: str, words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "odd.toml"
    path.write_text(text)
    assert main(["run", str(path), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert len(said) < LONGEST + 100
    assert said.strip().isprintable()
    for word in words:
        assert word in said


def test_a_home_that_cannot_be_found_and_a_compiler_that_is_no_command_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match=r'model.id "~unknown9/x" does not exist'):
        check_model("~unknown9/x")
    monkeypatch.setenv("CXX", "'")
    with pytest.raises(ConfigError, match="CXX"):
        check_compiler("compiled")


def test_an_empty_variable_of_the_shell_does_not_remove_a_security_setting() -> None:
    for text in ("", '""', " "):
        with pytest.raises(ConfigError, match=r"security.token_env is empty"):
            parse_setting(f"security.token_env={text}")
    assert parse_setting("traffic.trace=") == ("traffic.trace", "")


HOSTILE = ("nan", "-1e300", "1979-05-27", f'"{"x" * 20_000}"', '"a\\u0000b"', "[[1]]", "{a = 1}")


def settings(table: dict[str, Any], where: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        path = f"{where}.{key}".removeprefix(".")
        if isinstance(value, dict) and value:
            yield from settings(value, path)
        elif key != "arms":
            yield path, value


DEMO = to_table(load("demo"))


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: value[:12])
def test_every_number_and_switch_refuses_a_hostile_value_in_one_short_line(value: str) -> None:
    accepted, refusals = [], []
    for key, default in [*settings(DEMO), *settings(DEMO["arms"][1], "arms.compiled-padded")]:
        try:
            load("demo", settings=[f"{key}={value}"])
        except ConfigError as error:
            refusals.append(str(error))
        else:
            accepted += [key] * isinstance(default, int | float)
    assert accepted == []
    assert len(refusals) > 100
    assert [text for text in refusals if len(text) >= LONGEST + 100 or "\n" in text] == []
