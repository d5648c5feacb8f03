"""Every external arm is asked the same prompts twice, and its file holds what it answered."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from analysis.records.asked_answers import answers_in
from benchmarks.simulation.greedy import Server
from loadtests.experiments.reading import from_table
from loadtests.trials import external_answers
from loadtests.trials.errors import StopRequestedError
from loadtests.trials.external_answers import PROMPTS, ExternalAnswers, asked_arms, questions
from loadtests.trials.trial_schedule import TrialSchedules
from servers.fields import ConfigError
from tests.fakes.greedy_server import GreedyServer, serving
from tests.fakes.trial_context import trial_context

SECRET = "s3cret-of-the-server"


def table(*addresses: Any, **tables: Any) -> dict[str, Any]:
    arms = [
        {"name": f"arm{number}", "kind": "openai", "model_name": "llama", "address": address, "control": number == 0}
        for number, address in enumerate(addresses)
    ]
    traffic = {"rate": 5, "duration_s": 4, "block_s": 1, "timeout_s": 10, "length_scale": 0.05}
    engine = {"max_prompt_tokens": 64, "max_new_tokens": 16}
    whole = {"name": "small", "compare_models": True, "arms": arms, "traffic": traffic, "engine": engine}
    return {**whole, **tables}


def trial(folder: Path, content: dict[str, Any], check: Callable[[], None] = lambda: None) -> ExternalAnswers:
    context = trial_context(folder, content, check=check)
    return ExternalAnswers(context, TrialSchedules.of(context.experiment).draw(1))


def document(folder: Path, arm: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / f"answers-{arm}.json").read_text())
    return content


def test_every_arm_is_asked_the_same_twice_and_its_file_can_be_judged(tmp_path: Path) -> None:
    servers = [GreedyServer(Server()), GreedyServer(Server(name="other"))]
    with ExitStack() as stack:
        addresses = [stack.enter_context(serving(server)) for server in servers]
        asking = trial(tmp_path, table(*addresses, parity={"prompts": 9, "tokens": 5}))
        asking.ask("before")
        asking.ask("after")
    one, other = (document(tmp_path, name) for name in ("arm0", "arm1"))
    assert one["prompts"] == other["prompts"]
    for when in ("before", "after"):
        twice = answers_in(one, when)
        assert twice is not None
        assert twice[0] == twice[1]
        assert [len(answer.tokens) for answer in twice[0]] == [min(5, row["max_tokens"]) for row in one["prompts"]]
    assert json.loads((tmp_path / "trial.json").read_text())["asked"] == ["arm0", "arm1"]
    bodies = servers[0].bodies
    assert len(bodies) == 4 * 9
    # A seed of its own each time, and greedy: a server that samples does not repeat itself.
    assert len({body["seed"] for body in bodies[:18]}) == 18
    assert {body["temperature"] for body in bodies} == {0}


def test_second_time_asks_another_replica(tmp_path: Path) -> None:
    with ExitStack() as stack:
        addresses = [stack.enter_context(serving(GreedyServer(Server()))) for _ in range(3)]
        trial(tmp_path, table(addresses[:2], addresses[2], parity={"prompts": 4, "tokens": 3})).ask("before")
    first, second = document(tmp_path, "arm0")["answers"]["before"]
    assert [row["replica"] for row in first] == ["arm0-0", "arm0-1", "arm0-0", "arm0-1"]
    assert [row["replica"] for row in second] == ["arm0-1", "arm0-0", "arm0-1", "arm0-0"]


def test_server_that_refuses_log_probabilities_is_asked_without_and_its_token_is_in_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASKED_TOKEN", SECRET)
    refusing = GreedyServer(Server(), refuses=True, token=SECRET)
    with serving(refusing) as one, serving(GreedyServer(Server())) as other:
        content = table(one, other, parity={"prompts": 9, "tokens": 2})
        content["arms"][0]["token_env"] = "ASKED_TOKEN"
        asking = trial(tmp_path, content)
        asking.ask("before")
    told = document(tmp_path, "arm0")
    assert told["refused"] == "HTTP 400: logprobs are not supported, ***"
    assert all(row["text"] and "tokens" not in row for rows in told["answers"]["before"] for row in rows)
    refused = sum("logprobs" in body for body in refusing.bodies)
    assert refused <= external_answers.AT_ONCE  # those that were under way when the first was refused
    assert not any(SECRET in path.read_text() for path in tmp_path.rglob("*") if path.is_file())


def test_server_that_is_gone_costs_its_answers_and_not_the_run(tmp_path: Path) -> None:
    with serving(GreedyServer(Server())) as here:
        trial(tmp_path, table(here, "http://127.0.0.1:9/v1", parity={"prompts": 3, "tokens": 3})).ask("before")
    rows = document(tmp_path, "arm1")["answers"]["before"][0]
    assert all("ConnectionRefusedError" in row["error"] for row in rows)


def test_round_ends_in_time_whatever_a_server_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_answers.Round.__init__, "__kwdefaults__", {"round_s": 0.0})
    with serving(GreedyServer(Server())) as one, serving(GreedyServer(Server())) as other:
        trial(tmp_path, table(one, other, parity={"prompts": 3, "tokens": 3})).ask("before")
    rows = document(tmp_path, "arm0")["answers"]["before"][0]
    assert {row["error"] for row in rows} == {"it was not asked: all answers had 0 s"}


def test_user_can_end_it(tmp_path: Path) -> None:
    def check() -> None:
        raise StopRequestedError

    with serving(GreedyServer(Server())) as one, serving(GreedyServer(Server())) as other:
        asking = trial(tmp_path, table(one, other), check)
        with pytest.raises(StopRequestedError):
            asking.ask("before")


def test_short_trial_is_asked_for_more_words_of_its_lengths(tmp_path: Path) -> None:
    experiment = from_table(table("http://a/v1", "http://b/v1"))
    schedule = TrialSchedules.of(experiment).draw(1)
    found = questions(experiment, schedule, contexts=[])
    assert len(schedule) < len(found) == PROMPTS
    assert len({(item.plan.prefix_seed, item.plan.prompt_tokens) for item in found}) == PROMPTS
    assert {item.plan.prompt_tokens for item in found} <= set(schedule.ints("prompt_tokens").tolist())
    assert {item.max_tokens for item in found} == {16}  # engine.max_new_tokens
    # No room behind the longest prompts: these get as many as were planned.
    room = int(schedule.ints("prompt_tokens").max()) + 1
    tight = questions(experiment, schedule, contexts=[None, room])
    assert all(
        item.plan.prompt_tokens + item.max_tokens <= max(room, item.plan.prompt_tokens + item.plan.max_tokens)
        for item in tight
    )


@pytest.mark.parametrize("change", [{"parity": {"served": False}}, {"own": True}])
def test_nobody_is_asked_who_has_no_external_control_or_is_not_to_be(change: dict[str, Any]) -> None:
    content = table("http://a/v1", "http://b/v1", **{key: value for key, value in change.items() if key != "own"})
    if "own" in change:
        content["arms"][0] = {"name": "eager", "preset": "eager", "control": True}
    assert asked_arms(from_table(content)) == ()


def test_more_than_a_file_should_hold_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"parity.prompts 4096 × parity.tokens 64 .* 32768"):
        from_table(table("http://a/v1", "http://b/v1", parity={"prompts": 4096, "tokens": 64}))
