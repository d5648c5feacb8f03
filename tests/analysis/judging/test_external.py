"""An arm without telemetry is judged by what shows outside, and the rest is said to be unknown."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from analysis.judging.checks.arms import check_comparable, check_equal_work
from analysis.judging.generators import check_generators
from analysis.judging.greedy_parity import NEAR_TIE, GreedyParity, greedy_gate, judge_asked, judge_greedy
from analysis.records.asked_answers import AskedAnswer, Twice
from analysis.records.run_records import read_run, shifted
from analysis.records.schemas import REQUESTS
from analysis.records.tables import RecordWriter, read_table
from analysis.report import write_reports
from analysis.report.terminal import verdict_table
from analysis.run.greedy_answers import greedy_answers
from analysis.run.work import Work
from analysis.summary.summary import analyze
from benchmarks.simulation.detection import NOISE, TREATMENT
from benchmarks.simulation.greedy import BF16, Server
from benchmarks.simulation.records import write_requests
from benchmarks.simulation.scenario import Scenario, run
from tests.fakes.external_runs import write_external
from tests.fakes.runs import EAGER, Compile, FakeArm, FakeRun, write_run

RECOMPILE_GATES = ("recompiles", "longest stall", "stall per minute", "requests hit")
PROBE = {"asked": 8, "chunks": 8, "tokens": 8, "prompt_tokens": 9, "streams": True, "seconds": 0.1}


def external_run(
    folder: Path, *arms: str, probe: dict[str, Any] | None = None, tokens_per_chunk: int = 1, **settings: Any
) -> dict[str, Any]:
    """The summary of a run whose `arms` are external: no configuration, no telemetry, no server columns."""
    run = FakeRun(
        arms=(EAGER, FakeArm(name="vllm", enabled=False), FakeArm(name="own", compiles=[Compile(at_s=400, seconds=3)])),
        **{"compare_models": True, **settings},
    )
    write_run(folder, run)
    for trial in folder.glob("trial-*"):
        facts = json.loads((trial / "trial.json").read_text())
        for row in facts["arms"]:
            row["kind"] = "tailgate"
            if row["name"] in arms:
                del row["config"]
                row |= {"kind": "openai", "probe": [probe or PROBE]}
                row["external"] = {"address": "http://10.0.0.7:8000/v1", "model_name": "llama"}
                facts["startup"].pop(row["name"], None)
        facts["deaths"] = []
        (trial / "trial.json").write_text(json.dumps(facts))
        rows = read_table(trial / "requests-0.arrow", REQUESTS)[0].to_pylist()
        (trial / "requests-0.arrow").unlink()
        with RecordWriter(trial / "requests-0.arrow", REQUESTS) as writer:
            for row in rows:
                row["max_tokens"] = row["output_tokens"]
                if row["arm"] in arms and row["token_ns"]:
                    row["token_ns"] = row["token_ns"][::tokens_per_chunk]
                writer.append(row)
    return analyze(folder)


def gates(summary: dict[str, Any], arm: str) -> dict[str, dict[str, Any]]:
    return {gate["gate"]: gate for gate in summary["gates"] if gate["arm"] == arm}


def checks(summary: dict[str, Any], arm: str | None = None) -> dict[str, dict[str, Any]]:
    return {check["check"]: check for check in summary["validity"] if check["arm"] in (None, arm)}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("external")
    return folder, external_run(folder, "vllm")


def test_compiles_of_an_arm_without_telemetry_are_judged_from_outside(mixed: tuple[Path, dict[str, Any]]) -> None:
    found = gates(mixed[1], "vllm")
    for name in RECOMPILE_GATES:
        assert (found[name]["verdict"], found[name]["value"]) == ("PASS", 0.0)
        assert "Seen from outside: no stall from" in found[name]["reason"]
        assert "shorter ones do not show" in found[name]["reason"]
    own = gates(mixed[1], "own")
    assert own["recompiles"]["verdict"] == "FAIL"


def test_what_shows_outside_is_judged_as_ever(mixed: tuple[Path, dict[str, Any]]) -> None:
    found = gates(mixed[1], "vllm")
    assert found["errors"]["verdict"] == "PASS"
    assert found["noninferiority p99_ttft"]["value"] is not None
    assert "deaths" not in found
    assert "deaths" in gates(mixed[1], "own")
    arm = next(row for row in mixed[1]["arms"] if row["name"] == "vllm")
    assert arm["verdict"] == "PASS"
    assert arm["metrics"]["ttft"]["p99_ms"] > 0


def test_sections_of_an_arm_without_telemetry_are_empty_and_not_zero(mixed: tuple[Path, dict[str, Any]]) -> None:
    arm = next(row for row in mixed[1]["arms"] if row["name"] == "vllm")
    own = next(row for row in mixed[1]["arms"] if row["name"] == "own")
    assert arm["compile"].keys() == own["compile"].keys()
    assert set(arm["compile"].values()) == {None}
    assert set(arm["padding"].values()) == {None}
    assert arm["startup"].pop("slowest") == []
    assert arm["startup"].pop("memory_bytes") == {}
    assert set(arm["startup"].values()) == {None}
    assert own["external"] is None


def test_comparison_says_what_was_not_compared(mixed: tuple[Path, dict[str, Any]]) -> None:
    comparable = checks(mixed[1], "vllm")["comparable"]
    assert comparable["ok"]
    assert "vllm (openai) is external: weights, precision" in comparable["reason"]
    assert "policy alone" in checks(mixed[1], "own")["comparable"]["reason"]
    assert checks(mixed[1], "own")["equal work"]["ok"]


def test_unsaid_comparison_with_an_external_arm_opens_the_gates(tmp_path: Path) -> None:
    summary = external_run(tmp_path, "vllm", compare_models=False, duration_s=90.0)
    assert not checks(summary, "vllm")["comparable"]["ok"]
    assert gates(summary, "vllm")["noninferiority p99_ttft"]["verdict"] == "INCONCLUSIVE"


def test_reports_name_the_external_arm_and_what_is_unknown(mixed: tuple[Path, dict[str, Any]]) -> None:
    folder, summary = mixed
    write_reports(summary, folder)
    markdown, html = (folder / "report.md").read_text(), (folder / "report.html").read_text()
    for report in (markdown, html, verdict_table(summary)):
        assert "Tailgate did not start it" in " ".join(report.split())
    for report in (markdown, html):
        assert "External arms: what was not checked" in report
    assert "openai at http://10.0.0.7:8000/v1, model llama" in html
    assert "external, openai" in html


def test_an_external_control_gives_reports_too(tmp_path: Path) -> None:
    summary = external_run(tmp_path, "eager", "vllm", "own", duration_s=90.0)
    write_reports(summary, tmp_path)
    assert "Tailgate started none of the arms" in (tmp_path / "report.html").read_text()
    assert "Start-up cost" not in (tmp_path / "report.md").read_text()
    named = checks(summary, "vllm")["comparable"]["reason"]
    assert "vllm (openai) and eager (openai) are external" in named
    assert all("Seen from outside" in gates(summary, "own")[name]["reason"] for name in RECOMPILE_GATES)


def test_chunks_of_several_tokens_are_said(tmp_path: Path) -> None:
    summary = external_run(tmp_path, "vllm", tokens_per_chunk=4, duration_s=90.0)
    arm = next(row for row in summary["arms"] if row["name"] == "vllm")
    assert any("ITL is per chunk" in note for note in arm["external"]["notes"])
    assert arm["external"]["chunks"] < arm["output_tokens"] / 2


def test_uncounted_tokens_and_missing_streams_are_said(tmp_path: Path) -> None:
    summary = external_run(tmp_path, "vllm", probe={**PROBE, "tokens": None, "streams": False}, duration_s=90.0)
    notes = " ".join(next(row for row in summary["arms"] if row["name"] == "vllm")["external"]["notes"])
    assert "does not count its tokens" in notes
    assert "does not stream" in notes
    # pieces of text are no tokens, and are not compared as such
    assert "answer tokens" not in checks(summary, "vllm")["equal work"]["reason"]


def work(*means: tuple[str, float, float]) -> Work:
    return Work(arm="vllm", control="eager", means=means)


def test_other_work_opens_the_comparison() -> None:
    same = check_equal_work(work(("prompt tokens", 100.0, 102.0), ("answer tokens", 20.0, 20.5)))
    assert same.ok
    template = check_equal_work(work(("prompt tokens", 120.0, 100.0), ("answer tokens", 20.0, 20.0)))
    assert not template.ok
    assert template.value == pytest.approx(20.0)
    assert "120 to 100 prompt tokens and 20 to 20 answer tokens, by their own count: that is other work" in (
        template.reason
    )
    assert {"noninferiority", "slo", "cold"} <= set(template.affects)
    short = check_equal_work(work(("answer tokens", 0.0, 20.0)))
    assert (short.ok, short.value) == (False, None)
    assert check_equal_work(work()).ok


def test_work_is_compared_request_by_request_where_arms_share_them(
    mixed: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    paired = checks(mixed[1], "vllm")["equal work"]
    assert (paired["ok"], paired["value"]) == (True, 0.0)
    # Arms that take turns meet other requests: only the share of what was planned can be compared.
    turns = checks(external_run(tmp_path, "vllm", design="switchback", duration_s=300.0), "vllm")["equal work"]
    assert "percent of the planned answer tokens" in turns["reason"]
    assert turns["ok"]


def test_nothing_is_said_to_be_equal_of_two_external_arms() -> None:
    check = check_comparable("b", [], intended=True, outside={"b": "oip", "a": "openai"})
    assert check.ok
    assert "b (oip) and a (openai) are external" in check.reason
    assert "policy alone" not in check.reason


GATES = ("recompiles", "longest stall", "stall per minute", "requests hit")
SHORT = {"draws": 99, "min_blocks": 2}


def judged(folder: Path, scenario: Scenario, seed: int = 1, **gates: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """The recompile gates of the external arm by name, and its row."""
    rng = np.random.default_rng(seed)
    summary = analyze(write_external(folder, run(scenario, rng), rng, gates={**SHORT, **gates}))
    found = {gate["gate"]: gate for gate in summary["gates"] if gate["arm"] == TREATMENT}
    row = next(row for row in summary["arms"] if row["name"] == TREATMENT)
    return {name: found[name] for name in GATES}, row


def test_an_arm_that_compiles_while_serving_fails_though_it_tells_nothing(tmp_path: Path) -> None:
    gates, row = judged(tmp_path, Scenario(step=64, duration_s=400.0, new_shapes=6, compile_s=3.0), seed=2)
    assert {gate["verdict"] for gate in gates.values()} == {"FAIL"}
    assert gates["recompiles"]["value"] == row["blackbox"]["compiles"] >= 5
    assert gates["longest stall"]["value"] == pytest.approx(3.0, abs=0.2)
    assert "Seen from outside: " in gates["recompiles"]["reason"]
    assert "had not met" in gates["recompiles"]["reason"]
    stall = row["blackbox"]["stalls"][0]
    assert stall["cause"] == "compile"
    assert stall["shape"] % 64 == 0
    assert stall["trigger"].endswith(TREATMENT)


def test_stalls_within_the_budget_pass_and_are_named(tmp_path: Path) -> None:
    budget = {"max_recompiles": 9, "max_stall_s": 5.0, "max_stall_s_per_min": 9.0, "max_requests_hit_pct": 50.0}
    gates, _ = judged(tmp_path, Scenario(step=64, duration_s=400.0, new_shapes=6, compile_s=3.0), seed=2, **budget)
    assert {gate["verdict"] for gate in gates.values()} == {"PASS"}
    assert "stalls began with a first-seen prompt length" in gates["recompiles"]["reason"]


def test_an_arm_that_never_stalls_passes_and_what_was_too_short_to_see_is_said(tmp_path: Path) -> None:
    gates, row = judged(tmp_path, Scenario(step=64, duration_s=300.0, host_stalls=2))
    assert {gate["verdict"] for gate in gates.values()} == {"PASS"}
    assert gates["recompiles"]["value"] == 0.0
    shown = f"no stall from {row['blackbox']['detectable_s']:.2g} s on"
    assert shown in gates["recompiles"]["reason"]
    assert "that the others stood still too" in gates["recompiles"]["reason"]


def test_stalls_that_nobody_can_explain_leave_the_gates_open(tmp_path: Path) -> None:
    gates, row = judged(tmp_path, Scenario(step=64, duration_s=300.0, private_stalls=3))
    assert (row["blackbox"]["compiles"], row["blackbox"]["unexplained"]) == (0, 3)
    assert gates["recompiles"]["verdict"] == gates["longest stall"]["verdict"] == "INCONCLUSIVE"
    assert gates["recompiles"]["value"] is None
    assert "stood still 3 times" in gates["recompiles"]["reason"]
    assert "logs" in gates["recompiles"]["reason"]


def test_too_few_requests_to_see_anything_leave_the_gates_open(tmp_path: Path) -> None:
    gates, _ = judged(tmp_path, Scenario(step=64, duration_s=60.0, rate=0.15))
    assert {gate["verdict"] for gate in gates.values()} == {"INCONCLUSIVE"}


def test_noise_of_every_kind_is_no_compile(tmp_path: Path) -> None:
    _, row = judged(tmp_path, replace(NOISE, duration_s=300.0))
    assert row["blackbox"]["compiles"] == 0
    assert row["blackbox"]["host"] >= 1


def test_the_same_records_give_the_same_finding(tmp_path: Path) -> None:
    rows = [judged(tmp_path / str(number), Scenario(step=64, duration_s=200.0, private_stalls=2)) for number in (1, 2)]
    assert rows[0] == rows[1]


def test_tokens_of_a_request_whose_first_is_unknown_are_no_signs_of_life(tmp_path: Path) -> None:
    """Only the gaps between them are known then, and not when they came."""
    rng = np.random.default_rng(1)
    folder = write_external(tmp_path, run(Scenario(step=64, duration_s=300.0), rng), rng, gates=SHORT)
    table, _ = read_table(folder / "requests.arrow", REQUESTS)
    known = pa.array(np.arange(table.num_rows) % 2 == 0)

    def view(*unknown: str) -> dict[str, Any]:
        columns = [
            pc.if_else(known, column, pa.scalar(None, column.type)) if name in unknown else column
            for name, column in zip(table.column_names, table.columns, strict=True)
        ]
        write_requests(folder / "requests.arrow", pa.table(columns, schema=REQUESTS))
        arm = next(arm for arm in analyze(folder)["arms"] if arm["name"] == TREATMENT)
        return {key: arm["blackbox"][key] for key in ("silences", "stalls", "unexplained", "compiles")}

    assert view("first_token_ns") == view("first_token_ns", "token_ns")


PROMPTS = 48
EXACT = Server()


def judged_of_greedy_parity(
    control: Twice | Server, arm: Twice | Server, *, seed: int = 1, prompts: int = PROMPTS
) -> GreedyParity:
    twice = [
        item if isinstance(item, tuple) else replace(item, name=name).twice(seed, prompts)
        for name, item in (("control", control), ("arm", arm))
    ]
    answers = greedy_answers([twice[0]], [twice[1]], near_tie=NEAR_TIE)
    return judge_greedy("arm", answers, when="before", near_tie=NEAR_TIE, alpha=0.025)


def changed(twice: Twice, places: Sequence[int], **changes: object) -> Twice:
    first, second = (
        tuple(replace(item, **changes) if place in places else item for place, item in enumerate(answers))  # type: ignore[arg-type]
        for answers in twice
    )
    return first, second


def test_equal_servers_pass_and_the_reason_says_what_would_not_show() -> None:
    found = judged_of_greedy_parity(EXACT, EXACT)
    assert (found.verdict, found.answers.same, found.answers.departs) == ("PASS", 48, ())
    assert found.reason == (
        "48 of 48 greedy answers of arm before the load are the control's (92.6 % to 100 %); the control's own second "
        "answers: 48. Log-probabilities of equal tokens differ by 0 nats on average. Up to 6.05 % of all prompts may "
        "get another answer unseen."
    )


def test_rounding_that_turns_near_ties_passes() -> None:
    found = judged_of_greedy_parity(BF16, BF16)
    assert found.verdict == "PASS"
    assert 0 < len(found.answers.departs) == found.answers.ties
    assert "Where others part, the two prefer their tokens by 0." in found.reason


def test_equal_words_pass_without_log_probabilities_and_the_reason_says_that_this_is_all() -> None:
    silent = Server(tells=False)
    found = judged_of_greedy_parity(silent, silent)
    assert (found.verdict, found.answers.told, found.answers.shift) == ("PASS", False, None)
    assert "equal words are all that is known" in found.reason


@pytest.mark.parametrize("tells", [True, False])
def test_other_weights_fail_with_and_without_log_probabilities(tells: bool) -> None:
    found = judged_of_greedy_parity(replace(BF16, tells=tells), Server(weights="two", tells=tells))
    assert found.verdict == "FAIL"
    assert "half of those that differ do so by token 1" in found.reason
    assert ("more than rounding explains" in found.reason) is not tells


def test_other_words_without_log_probabilities_stay_open_where_rounding_may_explain_them() -> None:
    found = judged_of_greedy_parity(replace(BF16, tells=False), replace(BF16, tells=False))
    assert found.verdict == "INCONCLUSIVE"
    assert "near ties cannot be told from another result" in found.reason


@pytest.mark.parametrize(
    ("control", "arm", "says"),
    [
        (replace(BF16, samples=True), BF16, "One of the two is not greedy"),
        (BF16, replace(BF16, samples=True), "One of the two is not greedy"),
        (replace(BF16, samples=True, tells=False), replace(BF16, tells=False), "control does not repeat itself"),
        (replace(BF16, tells=False), replace(BF16, samples=True, tells=False), "arm does not repeat itself"),
    ],
)
def test_server_that_samples_is_blamed_for_that_and_nothing_else(control: Server, arm: Server, says: str) -> None:
    found = judged_of_greedy_parity(control, arm)
    assert (found.verdict, says in found.reason) == ("INCONCLUSIVE", True), found.reason


def test_few_prompts_cannot_rule_out_a_rare_divergence() -> None:
    found = judged_of_greedy_parity(EXACT, EXACT, prompts=12)
    assert found.verdict == "INCONCLUSIVE"
    assert "So up to 22.1 % may be others, and 10 % is allowed: give more parity.prompts" in found.reason


def test_answer_that_is_always_the_same_counts_once() -> None:
    constant = changed(
        EXACT.twice(1, PROMPTS), range(PROMPTS), text="well", tokens=("w",), log_probs=(-1.0,), likeliest=({"w": -1.0},)
    )
    found = judged_of_greedy_parity(constant, constant)
    assert (found.verdict, found.answers.held) == ("INCONCLUSIVE", 1)
    assert "1 different answer" in found.reason


def test_empty_answers_and_errors_are_no_answers() -> None:
    twice = EXACT.twice(1, PROMPTS)
    lost = changed(twice, range(PROMPTS), error="UNAVAILABLE: gone")
    found = judged_of_greedy_parity(twice, lost)
    assert (found.verdict, found.reason) == (
        "INCONCLUSIVE",
        "No prompt was answered by both: UNAVAILABLE: gone.",
    )
    empty = changed(twice, range(40), text="", tokens=(), log_probs=(), likeliest=())
    found = judged_of_greedy_parity(twice, empty)
    assert (found.verdict, found.answers.answered, found.answers.failure) == ("INCONCLUSIVE", 8, "an answer is empty")


def test_arms_that_are_asked_in_other_words_are_not_compared() -> None:
    twice = EXACT.twice(1, PROMPTS)
    found = judged_of_greedy_parity(twice, changed(twice, [3], digest="else"))
    assert (found.verdict, "asked in other words" in found.reason) == ("INCONCLUSIVE", True)


def test_single_answer_far_from_the_controls_leaves_it_open() -> None:
    twice, other = EXACT.twice(1, PROMPTS), Server(weights="two").twice(1, PROMPTS)
    mixed = tuple(
        tuple(other[time][place] if place == 7 else item for place, item in enumerate(twice[time])) for time in (0, 1)
    )
    found = judged_of_greedy_parity(twice, mixed)  # type: ignore[arg-type]
    assert (found.verdict, found.answers.apart) == ("INCONCLUSIVE", 1)
    assert "which no rounding explains" in found.reason


def test_log_probabilities_that_differ_where_answers_do_not_leave_it_open() -> None:
    def off(answer: AskedAnswer) -> AskedAnswer:
        return replace(answer, log_probs=tuple(value - 0.3 for value in answer.log_probs))

    twice = EXACT.twice(1, PROMPTS)
    found = judged_of_greedy_parity(twice, (tuple(map(off, twice[0])), tuple(map(off, twice[1]))))
    assert found.verdict == "INCONCLUSIVE"
    assert "differ by 0.3 nats on average (limit 0.1)" in found.reason


def test_server_that_is_sure_of_every_token_tells_nothing() -> None:
    def sure(answer: AskedAnswer) -> AskedAnswer:
        return replace(answer, log_probs=(0.0,) * len(answer.tokens))

    twice = EXACT.twice(1, PROMPTS)
    found = judged_of_greedy_parity(twice, (tuple(map(sure, twice[0])), tuple(map(sure, twice[1]))))
    assert not found.answers.told


def test_fault_in_a_third_of_the_prompts_is_found() -> None:
    verdicts = [judged_of_greedy_parity(BF16, replace(BF16, faulty=0.33), seed=seed).verdict for seed in range(10)]
    assert verdicts.count("FAIL") >= 7
    assert "PASS" not in verdicts


class TestGate:
    def documents(
        self, arm: Server, *, after: Server | None = None
    ) -> list[tuple[dict[str, object], dict[str, object]]]:
        def document(server: Server, name: str, later: Server) -> dict[str, object]:
            def rows(item: Server) -> list[list[dict[str, object]]]:
                return [
                    [
                        {
                            "text": answer.text,
                            "pieces": answer.pieces,
                            "tokens": list(answer.tokens),
                            "log_probs": list(answer.log_probs),
                            "likeliest": [dict(others) for others in answer.likeliest],
                        }
                        for answer in answers
                    ]
                    for answers in replace(item, name=name).twice(1, PROMPTS)
                ]

            prompts = [{"digest": str(place), "max_tokens": 24} for place in range(PROMPTS)]
            return {"prompts": prompts, "answers": {"before": rows(server), "after": rows(later)}}

        return [(document(BF16, "control", BF16), document(arm, "arm", after or arm))]

    judge = staticmethod(partial(judge_asked, "arm", near_tie=NEAR_TIE, alpha=0.05))

    def test_fault_that_begins_under_the_load_is_a_fail(self) -> None:
        found = self.judge(self.documents(BF16, after=Server(weights="two")))
        assert [item.verdict for item in found] == ["PASS", "FAIL"]
        gate = greedy_gate("arm", found)
        assert (gate.gate, gate.kind, gate.verdict, gate.limit) == ("parity", "parity", "FAIL", 0.0)
        assert "after the load" in gate.reason
        assert "before the load" not in gate.reason

    def test_both_looks_are_said_where_both_pass(self) -> None:
        gate = greedy_gate("arm", self.judge(self.documents(BF16)))
        assert (gate.verdict, gate.unseen) == ("PASS", False)
        assert "before the load" in gate.reason
        assert "after the load" in gate.reason

    def test_lost_records_leave_a_pass_open_and_a_fail_as_it_is(self) -> None:
        lost = "The answers of trial 2 are not there."
        gate = greedy_gate("arm", self.judge(self.documents(BF16)), lost=lost)
        assert (gate.verdict, gate.reason, gate.unseen) == ("INCONCLUSIVE", lost, True)
        failed = greedy_gate("arm", self.judge(self.documents(Server(weights="two"))), lost=lost)
        assert failed.verdict == "FAIL"

    def test_nothing_recorded_is_open(self) -> None:
        [found] = self.judge([(None, None)])
        assert (found.verdict, found.reason) == (
            "INCONCLUSIVE",
            "No prompt was answered by both: nothing was recorded.",
        )
        assert greedy_gate("arm", []).verdict == "INCONCLUSIVE"


ACCOUNT: dict[str, Any] = {
    "worker": 0,
    "planned": 600,
    "finished": 600,
    "records": {"written": 600, "dropped": 0, "waiting_bytes": 0},
    "lag_ms": {"p50": 0.2, "p99": 1.0, "max": 3.0},
    "loop_lag_ms": {"p50": 0.2, "p99": 1.0, "max": 3.0},
    "cpu": {"mean": 0.3, "max": 0.5, "busy_s": 0.0, "of_s": 600.0},
    "clock": None,
    "error": None,
    "complete": True,
}


def check(name: str, **changes: Any) -> Any:
    accounts = [{**ACCOUNT, "trial": 1, "rows": 600, **changes}]
    return next(
        item
        for item in check_generators(accounts, [{"trial": 1, "load_processes": 1}], limit_ms=50)
        if item.check == name
    )


CLOCK = {"offset_ns": 5, "exchanges": 30, "worst_uncertainty_ns": 1_000_000, "host": "b", "applied": True}


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        (
            "load processes",
            {"lost": "it no longer answers", "complete": False, "rows": 40},
            "Load process 0 is lost (it no longer answers): 40 of 600 planned requests are recorded.",
        ),
        (
            "load processes",
            {"complete": False, "rows": 40, "error": "no disk"},
            "Load process 0 was cut off (no disk): 40 of 600 planned requests are recorded.",
        ),
        ("load processes", {"rows": 599}, "Load process 0 ended 600 requests and 599 are recorded."),
        (
            "dropped records",
            {"records": {"written": 597, "dropped": 3}},
            "3 records were dropped, 3 of them by load process 0, because the disk or the process could not keep up.",
        ),
        (
            "token times",
            {"loop_lag_ms": {"p99": 60.0}},
            "In 1 % of the time load process 0 looked 60.0 ms late or more at what had come, limit 50 ms.",
        ),
        (
            "generator CPU",
            {"cpu": {"busy_s": 31.0, "of_s": 600.0}},
            "load process 0 used up its core in 31 of 600 s, limit 30 s.",
        ),
        (
            "clocks",
            {"clock": {**CLOCK, "worst_uncertainty_ns": 51_000_000}},
            "The clock of load process 0 on b is known to ± 51.0 ms, limit 50 ms: "
            "which compile met which of its requests is uncertain.",
        ),
        (
            "clocks",
            {"clock": {**CLOCK, "exchanges": 0}},
            "The clock of load process 0 on b was not compared with the master's.",
        ),
    ],
)
def test_each_shortcoming_is_told(name: str, changes: dict[str, Any], reason: str) -> None:
    assert check(name).ok if name != "clocks" else check(name, clock=CLOCK).ok
    failed = check(name, **changes)
    assert (failed.ok, failed.reason) == (False, reason)
    assert failed.remedy
    assert "noninferiority" in failed.affects


def test_a_load_process_that_left_no_account_is_missed() -> None:
    (failed,) = check_generators([], [{"trial": 2, "load_processes": 3}], limit_ms=50)
    assert (failed.ok, failed.value) == (False, 3.0)
    assert failed.reason == "Trial 2 has accounts of 0 of 3 load processes."


def test_a_moment_of_full_load_and_a_shared_clock_are_no_shortcoming() -> None:
    assert check("generator CPU", cpu={"busy_s": 2.0, "of_s": 15.0}).ok
    assert check("clocks", clock={"same": True, "exchanges": 0}).ok


def test_accounts_of_older_runs_are_not_held_to_what_they_do_not_say() -> None:
    old = {"worker": 0, "planned": 5, "lag_ms": {"p99": 1.0}, "complete": True, "trial": 1}
    assert list(check_generators([old], [{"trial": 1}], limit_ms=50)) == []


def whole_run(directory: Path) -> tuple[Path, dict[str, Any]]:
    write_run(directory, FakeRun(rate=8.0, gates={"draws": 499}))
    folder = directory / "trial-01"
    rows = read_run(directory).requests.num_rows
    info = json.loads((folder / "trial.json").read_text())
    (folder / "trial.json").write_text(json.dumps({**info, "load_processes": 1}))
    files = list(folder.glob("requests*.arrow"))
    assert len(files) == 1
    files[0].rename(folder / "requests-0.arrow")
    account = {**ACCOUNT, "planned": rows, "finished": rows, "records": {"written": rows, "dropped": 0}}
    (folder / "generator-0.json").write_text(json.dumps(account))
    return folder, account


Spoil = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.mark.parametrize(
    ("spoil", "blocked"),
    [
        (lambda account: account, None),
        (lambda account: {**account, "lost": "gone", "complete": False}, "load processes"),
        (lambda account: {**account, "finished": account["finished"] + 1}, "load processes"),
        (lambda account: {**account, "records": {"dropped": 1}}, "dropped records"),
        (lambda account: {**account, "lag_ms": {"p99": 51.0}}, "generator lag"),
        (lambda account: {**account, "loop_lag_ms": {"p99": 51.0}}, "token times"),
        (lambda account: {**account, "cpu": {"busy_s": 60.0, "of_s": 600.0}}, "generator CPU"),
        (lambda account: {**account, "clock": {**CLOCK, "worst_uncertainty_ns": 10**9}}, "clocks"),
    ],
)
def test_a_run_that_would_pass_is_inconclusive_for_it(spoil: Spoil, blocked: str | None, tmp_path: Path) -> None:
    folder, account = whole_run(tmp_path / "run")
    (folder / "generator-0.json").write_text(json.dumps(spoil(account)))
    summary = analyze(tmp_path / "run")
    assert summary["overall"] == ("PASS" if blocked is None else "INCONCLUSIVE")
    failed = {row["check"] for row in summary["validity"] if not row["ok"]}
    assert failed == (set() if blocked is None else {blocked})


def test_records_brought_over_from_another_host_are_judged_on_the_runs_clock(tmp_path: Path) -> None:
    folder, account = whole_run(tmp_path / "run")
    before = read_run(tmp_path / "run").requests
    clock = {**CLOCK, "offset_ns": 3_200_000_000, "applied": False}
    (folder / "generator-0.json").write_text(json.dumps({**account, "clock": clock}))
    after = read_run(tmp_path / "run").requests
    assert after.equals(pa.Table.from_batches([shifted(batch, 3_200_000_000) for batch in before.to_batches()]))
    assert after.column("token_ns").equals(before.column("token_ns"))
    assert not after.column("end_ns").equals(before.column("end_ns"))
    (folder / "generator-0.json").write_text(json.dumps({**account, "clock": {**clock, "applied": True}}))
    assert read_run(tmp_path / "run").requests.equals(before)
