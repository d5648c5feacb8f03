"""The verdict in words: the headline, the advice, and the remedies of what failed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from analysis.judging.gates import Gate
from analysis.judging.remedies import Evidence, Remedy, remedies
from analysis.judging.validity import ESTIMATES, Check
from analysis.judging.verdict import Advice, advise, combined, headline
from analysis.judging.wording import digits, duration_text
from analysis.records.run_records import read_run
from analysis.run.run import Run
from analysis.run.shape_map import shape_map
from analysis.run.time_parts import TimeParts
from tests.fakes.runs import EAGER, Compile, FakeArm, FakeRun, Startup, write_run


@pytest.mark.parametrize(
    ("value", "most", "shown"),
    [(119.3, 2, "119"), (99.4, 2, "99"), (99.6, 2, "100"), (4203.4, 3, "4,203"), (0.01234, 3, "0.0123"), (0.0, 3, "0")],
)
def test_large_numbers_are_written_out(value: float, most: int, shown: str) -> None:
    assert digits(value, most) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(1, "1 second"), (90, "90 seconds"), (181, "4 minutes"), (12600, "3.5 hours")]
)
def test_a_length_of_time_is_in_the_unit_of_its_size(seconds: float, shown: str) -> None:
    assert duration_text(seconds) == shown


def gate(kind="noninferiority", verdict="PASS", arm="compiled", **more):
    return Gate(
        arm=arm, gate=kind, kind=kind, value=1.0, limit=1.1, unit="ratio", verdict=verdict, reason="It is so.", **more
    )


def check(ok=False, affects=ESTIMATES, name="generator lag", **more):
    return Check(check=name, ok=ok, reason="The generator was late.", affects=affects, **more)


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (["PASS", "PASS"], "PASS"),
        (["PASS", "INCONCLUSIVE"], "INCONCLUSIVE"),
        (["INCONCLUSIVE", "FAIL", "PASS"], "FAIL"),
        ([], "INCONCLUSIVE"),
    ],
)
def test_one_failure_fails_and_only_passes_pass(verdicts, expected):
    assert combined(verdicts) == expected


class TestWords:
    def test_headline_names_the_failing_arm_and_why(self):
        gates = [gate(), gate("recompile", "FAIL")]
        text = headline({"compiled": "FAIL"}, gates, [], "eager")
        assert text == "compiled must not replace eager: It is so."

    @pytest.mark.parametrize(("lasting", "bound"), [(None, "0.90"), ((0.4, 0.95), "0.95")])
    def test_headline_of_a_pass_gives_what_latency_surely_does_not_exceed(self, lasting, bound):
        gates = [gate(low=0.5, high=0.9, lasting=lasting), gate(low=0.1, high=0.3), gate("recompile")]
        text = headline({"compiled": "PASS"}, gates, [], "eager")
        surely = f"latency at most {bound} times eager's, error bars included"
        assert text == f"compiled may replace eager: every gate passed ({surely})."

    def test_headline_prefers_a_fault_to_a_short_run(self):
        gates = [gate(verdict="INCONCLUSIVE", blocked_by=("blocks", "generator lag"))]
        short = Check(check="blocks", ok=False, reason="Too short.", affects=ESTIMATES)
        text = headline({"compiled": "INCONCLUSIVE"}, gates, [short, check()], "eager")
        assert text == "This run cannot decide whether compiled may replace eager. The generator was late."

    def test_arms_that_are_open_for_one_reason_share_it(self):
        arms = dict.fromkeys(("a", "b", "c"), "INCONCLUSIVE") | {"naive": "FAIL", "fine": "PASS"}
        gates = [replace(gate(arm=name, verdict="INCONCLUSIVE"), reason=f"Open {name == 'b'}.") for name in "abc"]
        text = headline(arms, [*gates, gate("recompile", "FAIL", arm="naive"), gate(arm="fine")], [], "eager")
        assert text.startswith("naive must not replace eager")
        assert all(words in text for words in ("a, b or c may", "a, c: Open False. b: Open True.", "fine may replace"))

    @pytest.mark.parametrize("verdict", ["FAIL", "INCONCLUSIVE"])
    def test_an_overload_comes_first(self, verdict):
        gates = [gate(verdict=verdict), gate("slo", "INCONCLUSIVE", blocked_by=("blocks", "overload"))]
        checks = [check(name="blocks"), check(name="overload", remedy="Lower the rate.")]
        text = headline({"compiled": verdict}, gates, checks, "eager")
        assert text.startswith("The generator was late. Lower the rate. ")
        assert text.count("Lower the rate") == 1
        assert text.endswith("It is so." if verdict == "FAIL" else "may replace eager. The generator was late.")

    def test_an_overload_of_other_arms_does_not_concern_one_that_passed(self):
        other = check(name="overload", arm="compiled")
        assert "was late" not in headline({"bucketed": "PASS"}, [gate(arm="bucketed")], [other], "eager")

    def test_no_length_is_advised_for_a_gate_that_an_overload_keeps_open(self):
        gates = [gate(verdict="INCONCLUSIVE", needed_s=600.0, blocked_by=("overload",))]
        advice = advise(gates, [check(name="overload", remedy="Lower the rate.")])
        assert (advice.needed_s, advice.text) == (None, "Lower the rate.")

    def test_no_arm_is_no_pass(self):
        assert headline({}, [], [], "eager") == "There is no arm to judge against eager."

    def test_advice_gives_the_longest_run_that_is_needed(self):
        gates = [gate(verdict="INCONCLUSIVE", needed_s=600.0), gate("slo", "INCONCLUSIVE", needed_s=1260.0)]
        advice = advise(gates, [])
        assert advice.needed_s == 1260.0
        assert "about 21 minutes" in advice.text

    def test_a_gate_that_would_take_days_does_not_hide_how_soon_the_others_are_decided(self):
        slo = replace(gate("slo", "INCONCLUSIVE", needed_s=283_500.0), gate="slo p99_ttft_ms")
        advice = advise([gate(verdict="INCONCLUSIVE", needed_s=1260.0), slo], [])
        assert advice.needed_s == 283_500.0
        assert advice.soon_s == 1260.0
        assert all(words in advice.text for words in ("21 minutes", "78.8 hours", '"SLO p99 TTFT" of compiled'))

    def test_of_many_gates_that_take_long_the_soonest_are_named(self):
        gates = [
            gate(arm=f"arm-{hours}", verdict="INCONCLUSIVE", needed_s=hours * 3600.0) for hours in (9, 5, 30, 6, 70)
        ]
        text = advise(gates, []).text
        assert [text.count(f"{hours} hours") for hours in ("5.0", "6.0", "9.0", "30.0", "70.0")] == [1, 1, 1, 0, 1]

    @pytest.mark.parametrize(("blocks", "guess"), [(2.0, True), (12.0, False)])
    def test_advice_from_few_blocks_is_called_a_guess(self, blocks, guess):
        gates = [gate(verdict="INCONCLUSIVE", needed_s=hours * 3600.0, blocked_by=("blocks",)) for hours in (1, 9, 30)]
        short = replace(check(name="blocks", arm="compiled"), value=blocks, limit=20.0)
        assert ("guess: 20" in advise(gates, [short]).text) is guess
        assert ("30.0 hours" in advise(gates, [short]).text) is not guess

    def test_advice_names_remedies_where_no_length_helps(self):
        gates = [gate(verdict="INCONCLUSIVE", blocked_by=("generator lag",))]
        advice = advise(gates, [check(remedy="Use more workers.")])
        assert advice.needed_s is None
        assert advice.text == "Use more workers."

    def test_advice_does_not_promise_to_clear_a_failure(self):
        gates = [gate("recompile", "FAIL"), gate(verdict="INCONCLUSIVE", needed_s=9000.0)]
        assert advise(gates, []) == Advice(needed_s=None, text="A longer run will not clear compiled.")

    def test_advice_is_for_the_arms_that_have_not_failed(self):
        gates = [gate("recompile", "FAIL"), gate(verdict="INCONCLUSIVE", needed_s=9000.0)]
        other = gate(verdict="INCONCLUSIVE", needed_s=630.0, arm="padded")
        assert advise([*gates, other], []).needed_s == 630.0

    def test_advice_for_a_cold_start_is_more_trials_and_for_parity_no_traffic(self):
        cold = gate("cold", "INCONCLUSIVE")
        assert advise([cold], []).text == 'More trials would decide "cold" of compiled: each starts cold once.'
        assert advise([gate("parity", "INCONCLUSIVE")], []).text.startswith("Run `tailgate parity`")

    def test_other_answers_come_first(self):
        wrong = replace(gate("parity", "FAIL"), reason="Other answers.")
        text = headline({"compiled": "FAIL"}, [gate("recompile", "FAIL"), wrong], [], "eager")
        assert text == "compiled must not replace eager: Other answers."


WARMED = "prefill batch 1 × length 64, context 64"

NEW = "extend batch 2 × length 128, context 256"

POLICY = {"shapes": {"kind": "exact"}, "compile": {"enabled": True, "warmup": "minimal"}}

ARM = FakeArm(name="compiled", config=POLICY, startup=Startup(warmed={WARMED: 2.0}))

GUARD = "1/2: tensor 'last' size mismatch at index 0. expected 1, actual 2\n1/1: another"

SHORT = FakeRun(duration_s=60.0, rate=5.0)


def failed(name: str, kind: str, verdict: str = "FAIL") -> Gate:
    return replace(gate(kind, verdict), gate=name)


RECOMPILES = failed("recompiles", "recompile")


def evidence(folder: Path, arm: FakeArm = ARM, **more: object) -> Evidence:
    run = Run.of(read_run(write_run(folder / "run", replace(SHORT, arms=(EAGER, arm)))))
    return Evidence(**{"run": run, "shapes": shape_map(run), "parts": {}, "slo": (), **more})  # type: ignore[arg-type]


def compiling(*shapes: str, **more: object) -> FakeArm:
    events = tuple(
        Compile(at_s=10.0 + place, seconds=0.5, shape=shape, reason=GUARD) for place, shape in enumerate(shapes)
    )
    return replace(ARM, compiles=events, **more)  # type: ignore[arg-type]


def text_of(found: tuple[Remedy, ...]) -> str:
    (remedy,) = found
    return remedy.text


class TestCompiles:
    def test_a_step_that_was_not_warmed_up_is_named_with_its_guard_and_command(self, tmp_path: Path) -> None:
        text = text_of(remedies(evidence(tmp_path, compiling(NEW, NEW)), [RECOMPILES]))
        words = (
            "All 2 compiles",
            "size mismatch at index 0",
            'compile.warmup = "shapes"',
            '--shapes "extend 2x128@256"',
        )
        assert [word for word in words if word not in text] == []

    def test_of_steps_that_were_warmed_up_no_warm_up_is_advised(self, tmp_path: Path) -> None:
        text = text_of(remedies(evidence(tmp_path, compiling(WARMED)), [RECOMPILES]))
        assert "had run each step" in text
        assert "compile.warmup" not in text

    def test_only_those_that_were_not_warmed_up_are_counted(self, tmp_path: Path) -> None:
        text = text_of(remedies(evidence(tmp_path, compiling(WARMED, NEW)), [RECOMPILES]))
        assert "1 of 2 compiles" in text

    def test_autotuning_alone_is_no_recompile(self, tmp_path: Path) -> None:
        tuned = replace(ARM, compiles=(Compile(at_s=10.0, seconds=2.0, kind="autotune"),))
        text = text_of(remedies(evidence(tmp_path, tuned), [failed("longest stall", "recompile")]))
        assert "autotune (1)" in text


class TestOrder:
    def test_compiles_come_before_the_errors_and_latency_that_they_explain(self, tmp_path: Path) -> None:
        gates = [
            failed("noninferiority p99_ttft", "noninferiority"),
            failed("errors", "error"),
            failed("longest stall", "recompile"),
            RECOMPILES,
        ]
        found = remedies(evidence(tmp_path, compiling(NEW)), gates)
        assert [item.gates for item in found] == [
            ("longest stall", "recompiles"),
            ("errors",),
            ("noninferiority p99_ttft",),
        ]

    @pytest.mark.parametrize("verdict", ["PASS", "INCONCLUSIVE"])
    def test_a_gate_that_did_not_fail_has_no_remedy(self, tmp_path: Path, verdict: str) -> None:
        assert remedies(evidence(tmp_path), [failed("recompiles", "recompile", verdict)]) == ()


class TestErrors:
    def test_errors_outside_compiles_are_not_blamed_on_them(self, tmp_path: Path) -> None:
        text = text_of(remedies(evidence(tmp_path, replace(ARM, error_share=0.2)), [failed("errors", "error")]))
        assert "compile" not in text
        assert "`error`" in text

    def test_requests_that_the_server_shed_are_counted(self, tmp_path: Path) -> None:
        shed = replace(ARM, error_share=0.2, error_status="RESOURCE_EXHAUSTED")
        text = text_of(remedies(evidence(tmp_path, shed), [failed("errors", "error")]))
        assert "lower the rate" in text

    def test_a_death_has_its_exit_code_and_compile(self, tmp_path: Path) -> None:
        death = {"arm": "compiled", "replica": "compiled-0", "exit_code": -9, "compiling": {"seconds": 12.0}}
        directory = write_run(tmp_path / "run", replace(SHORT, arms=(EAGER, ARM)))
        path = directory / "trial-01" / "trial.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "deaths": [death]}))
        held = Evidence(run=Run.of(read_run(directory)), shapes=None, parts={}, slo=())
        text = text_of(remedies(held, [failed("deaths", "error")]))
        assert "compiled-0 died first (exit code -9, 12.0 s" in text


class TestLatency:
    SLOWER = failed("noninferiority p99_e2e", "noninferiority")

    @staticmethod
    def parts(**more: float) -> tuple[TimeParts, ...]:
        ms = {f"{part}_ms": 10.0 for part in ("queue", "prefill", "decode", "stall", "rest")} | more
        return (TimeParts(quantile=0.99, requests=5, e2e_ms=sum(ms.values()), **ms),)

    def test_the_part_that_grew_most_is_named(self, tmp_path: Path) -> None:
        parts = {"eager": self.parts(), "compiled": self.parts(queue_ms=40.0, decode_ms=20.0)}
        text = text_of(remedies(evidence(tmp_path, parts=parts), [self.SLOWER]))
        assert all(words in text for words in ("p99 E2E", "40 ms longer", "30 ms of it in the queue"))

    @pytest.mark.parametrize(("compiled", "says"), [(True, "`tailgate inspect"), (False, "Nothing of it is compiled:")])
    def test_an_arm_that_compiles_nothing_is_not_searched_for_graph_breaks(
        self, tmp_path: Path, compiled: bool, says: str
    ) -> None:
        parts = {"eager": self.parts(), "compiled": self.parts(decode_ms=40.0)}
        arm = replace(ARM, config={"compile": {"enabled": compiled}})
        text = text_of(remedies(evidence(tmp_path, arm, parts=parts), [self.SLOWER]))
        assert f"30 ms of it in decode. {says}" in text

    @pytest.mark.parametrize("known", [("eager",), ("compiled",), ()])
    def test_without_times_of_the_server_no_part_is_blamed(self, tmp_path: Path, known: tuple[str, ...]) -> None:
        parts = {arm: self.parts() for arm in known}
        assert "do not show where" in text_of(remedies(evidence(tmp_path, parts=parts), [self.SLOWER]))

    def test_an_objective_that_the_control_misses_too_is_questioned(self, tmp_path: Path) -> None:
        missed = failed("slo p99_ttft_ms", "slo")
        text = text_of(remedies(evidence(tmp_path, slo=(replace(missed, arm="eager"),)), [missed]))
        assert "eager misses SLO p99 TTFT too" in text


@pytest.mark.parametrize(
    ("gate", "says"),
    [
        (failed("parity", "parity"), "`tailgate parity experiment.toml`"),
        (failed("refused", "error"), "bounds or ladders"),
        (failed("eager steps", "recompile"), "run eagerly"),
        (failed("memory ratio", "memory"), "fewer slots"),
        (failed("memory growth", "memory"), "a leak"),
        (failed("cold slo p99_ttft_ms", "cold"), "`tailgate precompile`"),
        (failed("ramp", "ramp"), "The section on the ramp"),
    ],
)
def test_every_kind_of_gate_has_a_remedy(tmp_path: Path, gate: Gate, says: str) -> None:
    assert says in text_of(remedies(evidence(tmp_path), [gate]))
