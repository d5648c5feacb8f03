from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtests.commands.main import main
from loadtests.experiments.reading import load
from loadtests.experiments.writing import to_toml
from servers.fields import ConfigError
from tests.analysis.foresight.test_costs import RATES, started
from tests.analysis.judging.test_load_steps import write_search

EXPERIMENT = """
name = "canary"
[[arms]]
name = "eager"
preset = "eager"
control = true
[[arms]]
name = "new"
preset = "compiled-padded"
[traffic]
rate = 4.0
"""


@pytest.fixture
def search(tmp_path: Path) -> Path:
    startup = {"eager": started(1), "new": started(300)}
    return write_search(tmp_path / "run", {"eager": 9, "new": 17}, RATES, startup=startup)


def test_the_command_says_gpus_and_when_it_pays(search: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["breakeven", str(search), "--load", "200", "--gpus-per-replica", "2"]) == 0
    *words, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert (found["load_rps"], found["gpus_per_replica"]) == (200, 2)
    assert found["arms"][1]["gpus"]["seen"] == 26
    text = "\n".join(words)
    assert "200 requests/s, 2 GPUs a replica" in text
    assert "5 min 29 s (" in text
    assert "latest never" in text
    assert main(["breakeven", str(search), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["load_rps"] is None


def test_the_experiments_own_rollout_is_the_default(search: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (search / "experiment.toml").open("a") as file:
        file.write("[rollout]\nload_rps = 50\ngpus_per_replica = 4\n")
    main(["breakeven", str(search), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["load_rps"], found["gpus_per_replica"]) == (50, 4)


def test_a_price_shows_what_requests_cost(search: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["breakeven", str(search), "--load", "200", "--gpu-hour-price", "3.6", "--currency", "EUR", "--json"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["gpu_hour_price"], found["currency"]) == (3.6, "EUR")
    assert found["arms"][1]["cost"]["per_1000_requests"]["seen"] == pytest.approx(13 / 200)
    assert main([*arguments[:-1]]) == 0
    text = capsys.readouterr().out
    assert "1,000 requests cost, EUR" in text
    assert main(["breakeven", str(search), "--gpu-hour-price", "-1"]) == 2
    assert "rollout.gpu_hour_price is -1" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--load", "--gpus-per-replica"])
def test_bad_usage_is_one_line(search: Path, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["breakeven", str(search), flag, "0"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"rollout.{flag[2:].replace('-', '_').replace('load', 'load_rps')} is 0: give a value from" in err


def test_an_experiment_carries_its_rollout(tmp_path: Path) -> None:
    path = tmp_path / "canary.toml"
    path.write_text(EXPERIMENT + "[rollout]\nload_rps = 200.0\n")
    experiment = load(path)
    assert experiment.rollout.load_rps == 200
    path.write_text(to_toml(experiment))
    assert load(path) == experiment
    path.write_text(EXPERIMENT + "[rollout]\nload = 200.0\n")
    with pytest.raises(ConfigError, match=r"rollout\.load is unknown"):
        load(path)
    path.write_text(EXPERIMENT + "[rollout]\ngpus_per_replica = 0\n")
    with pytest.raises(ConfigError, match=r"rollout\.gpus_per_replica is 0"):
        load(path)
