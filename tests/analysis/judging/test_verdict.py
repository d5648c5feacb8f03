"""The verdict in words: the headline, the advice, and the remedies of what failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis.judging.gates import Gate
from analysis.judging.remedies import Evidence, Remedy, remedies
from analysis.judging.verdict import advise, combined, headline
from analysis.records.run_records import read_run
from analysis.run.run import Run
from analysis.wording import digits
from tests.fakes.machines import tell
from tests.fakes.runs import EAGER, Compile, FakeArm, FakeRun, Startup, check, gate, write_run


@pytest.mark.parametrize(
    ("value", "most", "shown"),
    [(119.3, 2, "119"), (99.4, 2, "99"), (99.6, 2, "100"), (4203.4, 3, "4,203"), (0.01234, 3, "0.0123"), (0.0, 3, "0")],
)
def test_large_numbers_are_written_out(value: float, most: int, shown: str) -> None:
    assert digits(value, most) == shown


OPEN = gate(verdict="INCONCLUSIVE", needed_s=9000.0)


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
    def test_the_headline_of_a_pass_has_the_upper_limit_of_latency(self, lasting, bound):
        gates = [gate(low=0.5, high=0.9, lasting=lasting), gate(low=0.1, high=0.3), gate("recompile")]
        text = headline({"compiled": "PASS"}, gates, [], "eager")
        surely = f"latency at most {bound} times eager's, error bars included"
        assert text == f"compiled may replace eager: every gate passed ({surely})."

    @pytest.mark.parametrize(
        ("name", "leads"),
        [("load generator", "The generator was late."), ("other work", "Too short."), ("tail", "Too short.")],
    )
    def test_headline_leads_with_a_fault_of_the_run_then_with_too_little_data(self, name, leads):
        gates = [gate(verdict="INCONCLUSIVE", blocked_by=("blocks", name))]
        short = check(name="blocks", reason="Too short.")
        for checks in ([short, check(name=name)], [check(name=name), short]):
            text = headline({"compiled": "INCONCLUSIVE"}, gates, checks, "eager")
            assert text == f"This run cannot decide whether compiled may replace eager. {leads}"

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

    def test_a_gate_that_would_take_days_does_not_hide_how_soon_the_others_are_decided(self):
        slo = replace(gate("slo", "INCONCLUSIVE", needed_s=283_500.0), gate="slo p99_ttft_ms")
        advice = advise([gate(verdict="INCONCLUSIVE", needed_s=1260.0), slo], [])
        assert advice.needed_s == 283_500.0
        assert all(words in advice.text for words in ("21 minutes", "78.8 hours", '"SLO p99 TTFT" of compiled'))

    def test_of_many_gates_that_take_long_the_soonest_is_named(self):
        gates = [
            gate(arm=f"arm-{hours}", verdict="INCONCLUSIVE", needed_s=hours * 3600.0) for hours in (9, 5, 30, 6, 70)
        ]
        text = advise(gates, []).text
        assert [text.count(f"{hours} hours") for hours in ("5.0", "6.0", "9.0", "30.0", "70.0")] == [1, 0, 0, 0, 1]
        assert "4 more gates" in text

    @pytest.mark.parametrize(("blocks", "guess"), [(2.0, True), (12.0, False)])
    def test_advice_from_few_blocks_is_called_a_guess(self, blocks, guess):
        gates = [gate(verdict="INCONCLUSIVE", needed_s=hours * 3600.0, blocked_by=("blocks",)) for hours in (1, 9, 30)]
        short = replace(check(name="blocks", arm="compiled"), value=blocks, limit=20.0)
        assert ("rests on 2 blocks; 20" in advise(gates, [short]).text) is guess
        assert ("30.0 hours" in advise(gates, [short]).text) is not guess

    @pytest.mark.parametrize(
        ("gates", "checks", "needed_s", "words"),
        [
            ([replace(OPEN, needed_s=600.0), gate("slo", "INCONCLUSIVE", needed_s=1260.0)], [], 1260.0, "21"),
            (
                [gate(verdict="INCONCLUSIVE", blocked_by=("load generator",))],
                [check(remedy="Fix it.")],
                None,
                "Fix it.",
            ),
            ([gate("recompile", "FAIL"), OPEN], [], None, "will not clear compiled"),
            ([gate("recompile", "FAIL"), OPEN, replace(OPEN, arm="padded", needed_s=630.0)], [], 630.0, ""),
            ([gate("parity", "INCONCLUSIVE")], [], None, "`tailgate parity`"),
        ],
    )
    def test_advice_is_a_length_or_a_remedy(self, gates, checks, needed_s, words):
        advice = advise(gates, checks)
        assert advice.needed_s == needed_s
        assert words in advice.text

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


SLOWER = failed("noninferiority p99_e2e", "noninferiority")
ERRORS = failed("errors", "error")
MISSED = failed("slo p99_ttft_ms", "slo")


def compiling(*shapes: str, **more: Any) -> FakeArm:
    events = [Compile(at_s=10.0 + at, seconds=0.5, shape=shape, reason=GUARD) for at, shape in enumerate(shapes)]
    return replace(ARM, compiles=events, **more)


def found(folder: Path, gates: list[Gate], arm: FakeArm = ARM, deaths: Sequence[Any] = (), **more: Any) -> list[Remedy]:
    directory = tell(write_run(folder / "run", replace(SHORT, arms=(EAGER, arm))), deaths=list(deaths))
    run = Run.of(read_run(directory))
    return list(remedies(Evidence(**{"run": run, "slo": (), **more}), gates))


WARM_UP = ("All 2 compiles", "size mismatch at index 0", 'compile.warmup = "shapes"', '--shapes "extend 2x128@256"')
TUNED = replace(ARM, compiles=(Compile(at_s=10.0, seconds=2.0, kind="autotune"),))
SHED = replace(ARM, error_share=0.2, error_status="RESOURCE_EXHAUSTED")
DEATH = {"arm": "compiled", "replica": "compiled-0", "exit_code": -9, "compiling": {"seconds": 12.0}}
PLAIN = replace(ARM, config={"compile": {"enabled": False}})


@pytest.mark.parametrize(
    ("gate", "facts", "words", "absent"),
    [
        (RECOMPILES, {"arm": compiling(NEW, NEW)}, WARM_UP, None),
        (RECOMPILES, {"arm": compiling(WARMED)}, ("had run each step",), "compile.warmup"),
        (RECOMPILES, {"arm": compiling(WARMED, NEW)}, ("1 of 2 compiles",), None),
        (RECOMPILES, {"arm": compiling(NEW, startup=None)}, ('--shapes "extend 2x128@256"',), "warm"),
        (failed("longest stall", "recompile"), {"arm": TUNED}, ("autotune (1)",), None),
        (ERRORS, {"arm": replace(ARM, error_share=0.2)}, ("`error`",), "compile"),
        (ERRORS, {"arm": SHED}, ("lower the rate",), None),
        (failed("deaths", "error"), {"deaths": [DEATH]}, ("compiled-0 died first (exit code -9, 12.0 s",), None),
        (SLOWER, {}, ("`tailgate inspect", "`tailgate frontier`"), None),
        (SLOWER, {"arm": PLAIN}, ("`tailgate frontier`",), "tailgate inspect"),
        (MISSED, {"slo": (replace(MISSED, arm="eager"),)}, ("eager misses SLO p99 TTFT too",), None),
        (failed("parity", "parity"), {}, ("`tailgate parity experiment.toml`",), None),
        (failed("refused", "error"), {}, ("bounds or ladders",), None),
        (failed("eager steps", "recompile"), {}, ("to run eagerly",), None),
        (failed("memory ratio", "memory"), {}, ("fewer slots",), None),
        (failed("ramp", "ramp"), {}, ("section on the ramp",), None),
    ],
)
def test_a_remedy_follows_from_the_gate_and_the_records(
    tmp_path: Path, gate: Gate, facts: dict[str, Any], words: tuple[str, ...], absent: str | None
) -> None:
    (remedy,) = found(tmp_path, [gate], **facts)
    assert [word for word in words if word not in remedy.text] == []
    assert absent is None or absent not in remedy.text.lower()


def test_compiles_come_before_the_errors_and_latency_that_they_explain(tmp_path: Path) -> None:
    gates = [SLOWER, ERRORS, failed("longest stall", "recompile"), RECOMPILES]
    order = [item.gates for item in found(tmp_path, gates, compiling(NEW))]
    assert order == [("longest stall", "recompiles"), ("errors",), ("noninferiority p99_e2e",)]


@pytest.mark.parametrize("verdict", ["PASS", "INCONCLUSIVE"])
def test_a_gate_that_did_not_fail_has_no_remedy(tmp_path: Path, verdict: str) -> None:
    assert found(tmp_path, [failed("recompiles", "recompile", verdict)]) == []
