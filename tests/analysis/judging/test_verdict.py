from dataclasses import replace

import pytest

from analysis.judging.gates import Gate
from analysis.judging.validity import ESTIMATES, Check
from analysis.judging.verdict import Advice, advise, combined, headline


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

    def test_headline_leaves_what_a_failure_allows_for_to_its_gate(self):
        wrong = replace(gate("recompile", "FAIL"), reason="It is so. It may move.", allowance="It may move.")
        assert headline({"compiled": "FAIL"}, [wrong], [], "eager") == "compiled must not replace eager: It is so."

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

    def test_what_leaves_several_arms_open_is_said_once(self):
        arms = dict.fromkeys(("a", "b", "c", "d"), "INCONCLUSIVE") | {"naive": "FAIL", "fine": "PASS"}
        gates = [replace(gate(arm=name, verdict="INCONCLUSIVE"), reason=f"Open {name == 'b'}.") for name in "abcd"]
        gates += [gate("recompile", "FAIL", arm="naive"), gate("recompile", arm="fine")]
        assert headline(arms, gates, [], "eager") == (
            "naive must not replace eager: It is so. This run cannot decide whether a, b, c or d may replace eager. "
            "a, c, d: Open False. b: Open True. fine may replace eager: every gate passed."
        )

    def test_a_reason_that_begins_with_its_arm_stands_alone(self):
        arms = dict.fromkeys(("a", "b"), "INCONCLUSIVE")
        gates = [
            replace(gate(arm=name, verdict="INCONCLUSIVE"), reason=reason)
            for name, reason in zip("ab", ("a is open.", "Open."), strict=True)
        ]
        assert headline(arms, gates, [], "eager").endswith("may replace eager. a is open. b: Open.")

    @pytest.mark.parametrize("verdict", ["FAIL", "INCONCLUSIVE"])
    def test_an_overload_is_said_before_everything_else(self, verdict):
        gates = [gate(verdict=verdict), gate("slo", "INCONCLUSIVE", blocked_by=("blocks", "overload"))]
        checks = [check(name="blocks"), check(name="overload", remedy="Lower the rate.")]
        text = headline({"compiled": verdict}, gates, checks, "eager")
        assert text.startswith("The generator was late. Lower the rate. ")
        assert text.count("Lower the rate") == 1
        assert text.endswith("It is so." if verdict == "FAIL" else "may replace eager. The generator was late.")

    def test_an_overload_of_other_arms_is_not_said_of_one_that_passed(self):
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
        assert "about 21 minutes would decide all other open gates" in advice.text
        assert 'About 78.8 hours would decide "SLO p99 TTFT" of compiled' in advice.text

    def test_of_many_gates_that_take_long_the_soonest_are_named(self):
        gates = [
            gate(arm=f"arm-{hours}", verdict="INCONCLUSIVE", needed_s=hours * 3600.0) for hours in (9, 5, 30, 6, 70)
        ]
        text = advise(gates, []).text
        assert [text.count(f"About {hours} hours") for hours in ("5.0", "6.0", "9.0", "30.0")] == [1, 1, 1, 0]
        assert "2 more gates of that sort would take up to 70.0 hours." in text

    def test_advice_knows_what_is_decided_soon_from_what_takes_long(self):
        gates = [gate(verdict="INCONCLUSIVE", needed_s=hours * 3600.0) for hours in (1, 2, 30)]
        advice = advise(gates, [])
        assert (advice.soon_s, advice.needed_s) == (7_200.0, 108_000.0)
        assert advise(gates[2:], []).soon_s == 108_000.0

    def test_advice_calls_a_gate_what_the_report_calls_it(self):
        stuck = replace(gate(verdict="INCONCLUSIVE"), gate="noninferiority p99_9_e2e")
        assert (
            advise([stuck], []).text == 'No run of up to a week would decide "non-inferiority p99.9 E2E" of compiled.'
        )

    @pytest.mark.parametrize(("blocks", "guess"), [(2.0, True), (12.0, False)])
    def test_advice_from_few_blocks_says_that_it_guesses(self, blocks, guess):
        gates = [gate(verdict="INCONCLUSIVE", needed_s=hours * 3600.0, blocked_by=("blocks",)) for hours in (1, 9, 30)]
        short = Check(
            check="blocks", ok=False, reason="Short.", affects=ESTIMATES, arm="compiled", value=blocks, limit=20.0
        )
        text = advise(gates, [short]).text
        assert ("would decide all open gates but 2, if" in text) is guess
        assert ("From 2 blocks that is a guess: 20 of them will tell it better." in text) is guess
        assert (
            "would decide all other open gates, if" in text and "About 30.0 hours would decide" in text
        ) is not guess
        assert advise(gates[1:], [short]).text.startswith("The open gates would take hours, if") is guess

    def test_advice_mends_what_no_length_mends(self):
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

    def test_other_answers_are_the_first_thing_to_say(self):
        wrong = replace(gate("parity", "FAIL"), reason="Other answers.")
        text = headline({"compiled": "FAIL"}, [gate("recompile", "FAIL"), wrong], [], "eager")
        assert text == "compiled must not replace eager: Other answers."
