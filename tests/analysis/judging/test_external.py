"""Arms without telemetry: what the client and a log show of their compiles, and what stays unknown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.simulation.fleet import CONTROL, SLOTS, TREATMENT, Fleet
from benchmarks.simulation.greedy import BF16, EXACT, Server
from tailgate.analysis.judging.gates import Gate
from tailgate.analysis.judging.gates.compiles import client_gates
from tailgate.analysis.judging.gates.greedy import first_difference, judge_greedy
from tailgate.analysis.records.asked_answers import GreedyAnswer, Twice
from tailgate.analysis.records.run_records import read_run
from tailgate.analysis.records.schemas import REQUESTS
from tailgate.analysis.records.tables import read_table
from tailgate.analysis.run.client_stalls import UNKNOWN, ArmStalls, Stall, client_stalls
from tailgate.analysis.run.run import Run
from tailgate.analysis.settings.gate_limits import GateLimits
from tailgate.analysis.summary.summary import analyze
from tests.fakes.simulated import write_external, write_logged

SECOND = 10**9
ONCE = "vLLM warns once for each kernel"
QUIET = replace(SLOTS, duration_s=300.0)
STALLING = replace(QUIET, private_stalls=3)
THIN = replace(SLOTS, duration_s=60.0, rate=0.15)


def written(folder: Path, made: Fleet, seed: int = 1) -> Path:
    return write_external(folder, made, gates={"min_blocks": 2}, seed=seed)


def gates_of(summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {gate["gate"]: gate for gate in summary["gates"] if gate["kind"] == "recompile"}


def row_of(summary: dict[str, Any]) -> dict[str, Any]:
    return next(row for row in summary["arms"] if row["name"] == TREATMENT)


def judged(folder: Path, made: Fleet, seed: int = 1) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the recompile gates of the external arm by name, and its row."""
    summary = analyze(written(folder, made, seed))
    return gates_of(summary), row_of(summary)


def test_an_arm_that_compiles_while_serving_never_passes_without_reporting_it(tmp_path: Path) -> None:
    gates, row = judged(tmp_path, replace(SLOTS, duration_s=400.0, new_shapes=6, compile_s=3.0), seed=2)
    assert {gate["verdict"] for gate in gates.values()} == {"INCONCLUSIVE"}
    assert row["client_stalls"]["unknown"] >= 5
    longest = row["client_stalls"]["stalls"][0]
    assert longest["cause"] == "unknown"
    assert longest["seconds"] == pytest.approx(3.0, abs=0.2)


def test_an_arm_that_never_stalls_passes_with_the_shortest_stall_that_would_show(tmp_path: Path) -> None:
    gates, row = judged(tmp_path, replace(QUIET, host_stalls=2))
    assert {gate["verdict"] for gate in gates.values()} == {"PASS"}
    unknown = {gate["value"] for gate in gates.values()} | {row["client_stalls"]["compile"]}
    unknown |= {*row["compile"].values(), *row["padding"].values()}
    assert unknown == {None}, "what has no telemetry is unknown and not zero"
    shown = f"no stall of {row['client_stalls']['detectable_s']:.3g} s or more"
    assert shown in gates["recompiles"]["reason"]


@pytest.mark.parametrize("logged", [False, True])
def test_stalls_that_no_log_explains_leave_the_gates_open(tmp_path: Path, logged: bool) -> None:
    folder = written(tmp_path, STALLING)
    summary = analyze(write_logged(folder, []) if logged else folder)
    gates = gates_of(summary)
    assert row_of(summary)["client_stalls"]["unknown"] == 3
    assert gates["recompiles"]["verdict"] == gates["longest compile stall"]["verdict"] == "INCONCLUSIVE"
    assert gates["recompiles"]["value"] is None
    assert "3 times" in gates["recompiles"]["reason"]


def test_unexplained_stalls_within_the_limits_leave_no_gate_open() -> None:
    place: dict[str, Any] = {"arm": "a", "trial": 1, "replica": None, "cause": UNKNOWN, "requests": np.arange(4)}
    stalls = tuple(Stall(**place, start_ns=at_s * SECOND, end_ns=(at_s + 1) * SECOND) for at_s in (10, 20))
    seen = ArmStalls(arm="a", stalls=stalls, detectable_s=0.25)
    for allowed, verdict in ((2, "PASS"), (1, "INCONCLUSIVE")):
        recompiles, *_ = client_gates(seen, GateLimits(max_recompiles=allowed), requests=1000, minutes=10.0)
        assert (recompiles.verdict, recompiles.value) == (verdict, None)


def at(folder: Path, second: float, took: float = 0.0, **columns: Any) -> dict[str, Any]:
    start_ns = min(read_table(folder / "requests.arrow", REQUESTS)[0]["sent_ns"].to_pylist())
    end = start_ns + int(second * SECOND)
    return {"start_ns": end - int(took * SECOND), "end_ns": end, "phase": "serving", **columns}


def test_compiles_in_a_log_fail_an_arm_whose_clients_saw_none(tmp_path: Path) -> None:
    folder = written(tmp_path, QUIET)
    logged = [at(folder, 100, 0.2, frame="Triton _k"), at(folder, 200, 0.2, frame="Triton _l")]
    summary = analyze(write_logged(folder, logged, blind_spots=[ONCE]))
    gate = gates_of(summary)["recompiles"]
    assert (gate["verdict"], gate["value"]) == ("FAIL", 2)
    assert "log, 2 recompiles while serving in one trial (limit 0), longest 0.2 s (Triton _k and " in gate["reason"]
    # The log may leave compiles out, so what clients see decides the other gates.
    assert "no stall of" in gates_of(summary)["longest compile stall"]["reason"]
    others = {gate["gate"] for gate in summary["gates"] if gate["arm"] == TREATMENT}
    assert others & {"errors", "deaths"} == {"errors"}
    compiled = row_of(summary)["compile"]
    assert (compiled["recompiles"], compiled["jit_compiles"]) == (2, 2)
    assert len(summary["events"]) == 2


@pytest.mark.parametrize(
    ("blind_spots", "verdict", "value"), [(None, "INCONCLUSIVE", None), ([ONCE], "INCONCLUSIVE", None), ([], "PASS", 0)]
)
def test_only_a_complete_log_passes_an_arm_with_too_few_requests_to_see_compiles(
    blind_spots: list[str] | None, verdict: str, value: int | None, tmp_path: Path
) -> None:
    folder = written(tmp_path, THIN)
    found = analyze(folder if blind_spots is None else write_logged(folder, [], blind_spots=blind_spots))
    gate = gates_of(found)["recompiles"]
    assert (gate["verdict"], gate["value"]) == (verdict, value)
    if blind_spots:
        assert ONCE in gate["reason"]
        assert any(ONCE in note for note in row_of(found)["external"]["notes"])


def test_a_trial_without_the_facts_of_its_log_leaves_the_gates_open(tmp_path: Path) -> None:
    folder = write_logged(written(tmp_path, THIN), [])
    arms = [{"name": name} for name in (CONTROL, TREATMENT)]
    (folder / "trial.json").write_text(json.dumps({"trial": 1, "complete": True, "arms": arms}))
    gate = gates_of(analyze(folder))["recompiles"]
    assert (gate["verdict"], "trial 1" in gate["reason"]) == ("INCONCLUSIVE", True)


def test_a_logged_compile_without_a_length_lasts_as_long_as_its_stall(tmp_path: Path) -> None:
    folder = written(tmp_path, STALLING)
    run = Run.of(read_run(folder))
    stall = min(client_stalls(run.requests, run.arms)[TREATMENT].stalls, key=lambda stall: stall.start_ns)
    inside = {"start_ns": stall.start_ns, "end_ns": stall.start_ns, "kind": "recompile"}
    summary = analyze(write_logged(folder, [inside, at(folder, 1.0, frame="of no stall")], blind_spots=[ONCE]))
    rows = {row["event_id"]: row for row in summary["events"]}
    logged, elsewhere = rows["1-log-0"], rows["1-log-1"]
    assert (logged["offset_s"], logged["seconds"]) == pytest.approx(
        (run.offset_s(stall.trial, stall.start_ns), stall.seconds), rel=1e-6
    )
    assert logged["requests_hit"] >= 1
    assert elsewhere["seconds"] == 0
    assert gates_of(summary)["longest compile stall"]["verdict"] == "FAIL"


PROMPTS = 48


def judged_answers(
    control: Twice | Server, arm: Twice | Server, *, seed: int = 1, prompts: int = PROMPTS, allowed: float = 0.0
) -> Gate:
    twice = [
        item if isinstance(item, tuple) else replace(item, name=name).twice(seed, prompts)
        for name, item in (("control", control), ("arm", arm))
    ]
    return judge_greedy("arm", {1: (twice[0], twice[1])}, allowed=allowed, alpha=0.025)


def changed(twice: Twice, places: Sequence[int], **changes: object) -> Twice:
    first, second = (
        tuple(replace(item, **changes) if place in places else item for place, item in enumerate(answers))  # type: ignore[arg-type]
        for answers in twice
    )
    return first, second


ASKED, FEW = EXACT.twice(1, PROMPTS), EXACT.twice(1, 12)


@pytest.mark.parametrize(
    ("control", "arm", "allowed", "verdict", "words"),
    [
        (EXACT, EXACT, 0.0, "PASS", "; by 48 distinct answers, up to 6.05 % of other prompts could differ (a P"),
        (BF16, BF16, 0.0, "INCONCLUSIVE", "raise parity.max_different"),
        (BF16, BF16, 0.5, "PASS", "at most 60 %"),
        (EXACT, Server(weights="two"), 0.0, "FAIL", "more than rounding explains"),
        (EXACT, Server(weights="two"), 0.9, "FAIL", "more than rounding explains"),
        (EXACT, replace(EXACT, faulty=0.33), 0.0, "INCONCLUSIVE", "parity.max_different allows 0"),
        (replace(BF16, samples=True), BF16, 0.9, "INCONCLUSIVE", "control repeats only"),
        (BF16, replace(BF16, samples=True), 0.9, "INCONCLUSIVE", "arm repeats only"),
        (ASKED, changed(ASKED, [7], text="something else"), 0.1, "PASS", "up to 9.51 % of other prompts"),
        (ASKED, changed(ASKED, [7], text="something else"), 0.0, "INCONCLUSIVE", f"1 of {PROMPTS} different answers"),
        (
            FEW,
            FEW,
            0.0,
            "INCONCLUSIVE",
            "by 12 distinct answers, up to 22.1 % of other prompts could differ (a PASS needs at most 10 %)",
        ),
        (FEW, FEW, 0.0, "INCONCLUSIVE", "Raise parity.prompts."),
        (
            *(changed(ASKED, range(PROMPTS), text="well"),) * 2,
            0.0,
            "INCONCLUSIVE",
            "; by 1 distinct answer, up to",
        ),
        (ASKED, changed(ASKED, range(PROMPTS), error="UNAVAILABLE: gone"), 0.0, "INCONCLUSIVE", "UNAVAILABLE: gone"),
        (ASKED, changed(ASKED, range(40), text=""), 0.0, "INCONCLUSIVE", "8 of 8 greedy answers"),
        (ASKED, changed(ASKED, [3], digest="else"), 0.0, "INCONCLUSIVE", "got different prompts"),
    ],
)
def test_greedy_answers_decide_as_far_as_words_can(
    control: Twice | Server, arm: Twice | Server, allowed: float, verdict: str, words: str
) -> None:
    found = judged_answers(control, arm, allowed=allowed)
    assert (found.verdict, words in found.reason) == (verdict, True), found.reason


def test_trials_add_up_and_lost_answers_leave_a_pass_open_and_a_fail_as_it_is() -> None:
    answers = EXACT.twice(1, PROMPTS)
    passed = judge_greedy("arm", {1: (answers, answers), 2: (answers, answers)}, allowed=0.0, alpha=0.05)
    assert "96 of 96 greedy answers" in passed.reason
    assert (passed.gate, passed.kind, passed.verdict, passed.unseen) == ("parity", "parity", "PASS", "")
    short = tuple(item[:-1] for item in answers)
    for lost in (None, short):
        gate = judge_greedy("arm", {1: (answers, answers), 2: (answers, lost)}, allowed=0.0, alpha=0.05)  # type: ignore[dict-item]
        assert (gate.verdict, gate.unseen) == ("INCONCLUSIVE", "its reason says what it needs")
        assert gate.reason == "The answers of trial 2 are not there."
    other = Server(weights="two").twice(1, PROMPTS)
    assert judge_greedy("arm", {1: (answers, other), 2: (None, other)}, allowed=0.0, alpha=0.05).verdict == "FAIL"
    assert judge_greedy("arm", {1: (None, None)}, allowed=0.0, alpha=0.05).verdict == "INCONCLUSIVE"


def text(words: str) -> GreedyAnswer:
    return GreedyAnswer(digest="", text=words, asked=8, pieces=1)


def repeated(letters: str) -> Twice:
    """Return answers to 8 prompts: 6 are `same`, and to two the server says these letters, one each time."""
    first, second = ([text(f"same {n}") for n in range(6)] + [text(letter), text(f"{letter}!")] for letter in letters)
    return tuple(first), tuple(second)


@pytest.mark.parametrize("letters", ["ab", "ba", "bc"])
def test_answers_that_the_control_does_not_repeat_accuse_no_arm(letters: str) -> None:
    found = judged_answers(repeated("ac"), repeated(letters))
    assert (found.verdict, found.value) == ("INCONCLUSIVE", 0.0)
    assert "Raise parity.prompts." in found.reason


def test_other_first_words_that_both_repeat_fail_and_those_that_the_arm_does_not_repeat_do_not() -> None:
    twice = EXACT.twice(1, PROMPTS)
    assert judged_answers(twice, changed(twice, range(PROMPTS), text="no")).verdict == "FAIL"
    (first, second), places = twice, range(PROMPTS // 4)
    wavering = changed((first, first), places, text="no")[0], second
    assert judged_answers(twice, wavering).verdict == "INCONCLUSIVE"
    # One token of four parts, which rounding explains; with those that waver it would be three of ten.
    same, parts = [(text(words),) * 160 for words in ("12345678", "123-5678")]
    once, again = (text("-2345678"),) * 40, (text("12345678"),) * 40
    assert judged_answers((same + again,) * 2, (parts + once, parts + again)).verdict == "INCONCLUSIVE"


@pytest.mark.parametrize(("other", "at"), [("one two three four", None), ("one two three fore", 7), ("two", 0)])
def test_texts_part_at_about_the_token_that_their_letters_say(other: str, at: int | None) -> None:
    assert first_difference(text("one two three four"), text(other)) == at
