"""The verdict in words: the headline, the advice, and the remedies of what failed."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from tailgate.analysis.judging.gates import Gate
from tailgate.analysis.judging.verdict import advise, combined, headline
from tailgate.analysis.wording import digits
from tests.fakes.runs import check, gate


@pytest.mark.parametrize(
    ("value", "most", "shown"),
    [(119.3, 2, "119"), (99.4, 2, "99"), (99.6, 2, "100"), (4203.4, 3, "4,203"), (0.01234, 3, "0.0123"), (0.0, 3, "0")],
)
def test_large_numbers_are_written_out(value: float, most: int, shown: str) -> None:
    assert digits(value, most) == shown


OPEN = gate(verdict="INCONCLUSIVE", needed_s=9000.0)


def longer(needed_s: float) -> str:
    return f"Run {needed_s:g} s." if needed_s else "Run longer."


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
    def test_headline_names_the_failing_arm_and_why_other_answers_first(self):
        failing = [gate(), gate("recompile", "FAIL")]
        wrong = replace(gate("parity", "FAIL"), reason="Other answers.")
        for gates, why in ((failing, "It is so."), ([*failing, wrong], "Other answers.")):
            assert (
                headline({"compiled": "FAIL"}, gates, [], "eager", longer) == f"compiled must not replace eager: {why}"
            )

    @pytest.mark.parametrize(
        ("lasting", "more"), [(None, ""), ((0.4, 0.95), "; 0.95 times if a disturbance lasts for several trials")]
    )
    def test_the_headline_of_a_pass_has_the_upper_limit_of_latency(self, lasting, more):
        gates = [gate(low=0.5, high=0.9, lasting=lasting), gate(low=0.1, high=0.3), gate("recompile")]
        text = headline({"compiled": "PASS"}, gates, [], "eager", longer)
        surely = f"latency at most 0.90 times eager's, error bars included{more}"
        assert text == f"compiled may replace eager: every gate passed ({surely})."

    @pytest.mark.parametrize(
        ("name", "leads"),
        [
            ("load generator", "The generator was late."),
            ("other work", "Too short. Run longer."),
            ("cut requests", "Too short. Run longer."),
            ("stalls of unknown cause", "Too short. Run longer."),
        ],
    )
    def test_headline_leads_with_a_fault_of_the_run_then_with_too_little_data(self, name, leads):
        gates = [gate(verdict="INCONCLUSIVE", blocked_by=("blocks", name))]
        short = check(name="blocks", reason="Too short.")
        for checks in ([short, check(name=name)], [check(name=name), short]):
            text = headline({"compiled": "INCONCLUSIVE"}, gates, checks, "eager", longer)
            assert text == f"This run cannot decide whether compiled may replace eager: {leads}"

    def test_headline_of_a_gate_that_machines_keep_open_says_what_was_seen_and_would_be(self):
        decided = gate(verdict="INCONCLUSIVE", blocked_by=("machine speed",), caveat="It would be PASS, but …")
        decided = replace(decided, reason="It is 0.55 times as long. It would be PASS, but …")
        gates = [gate("slo", "INCONCLUSIVE", blocked_by=("machine speed",)), decided]
        checks = [check(name="machine speed", reason="Speed fell.")]
        text = headline({"compiled": "INCONCLUSIVE"}, gates, checks, "eager", longer)
        assert text == f"This run cannot decide whether compiled may replace eager: {decided.reason}"

    def test_headline_leads_with_what_a_longer_run_does_not_decide(self):
        unseen = replace(gate("parity", "INCONCLUSIVE", unseen="raise parity.prompts"), reason="It stalled.")
        gates = [gate(verdict="INCONCLUSIVE", blocked_by=("blocks",)), unseen]
        gates.append(gate("slo", "INCONCLUSIVE", needed_s=750.0))
        text = headline({"compiled": "INCONCLUSIVE"}, gates, [check(name="blocks")], "eager", longer)
        assert text.startswith("This run cannot decide whether compiled may replace eager: It stalled. ")
        assert text.endswith("Run 750 s.")

    def test_arms_that_are_open_for_one_reason_share_it(self):
        arms = dict.fromkeys(("a", "b", "c"), "INCONCLUSIVE") | {"naive": "FAIL", "fine": "PASS"}
        gates = [replace(gate(arm=name, verdict="INCONCLUSIVE"), reason=f"Open {name == 'b'}.") for name in "abc"]
        text = headline(
            arms, [*gates, gate("recompile", "FAIL", arm="naive"), gate(arm="fine")], [], "eager", "Run longer."
        )
        assert text.startswith("naive must not replace eager")
        words = ("whether a or c may replace eager: Open False.", "whether b may replace eager: Open True.", "fine may")
        assert all(part in text for part in words)

    @pytest.mark.parametrize("verdict", ["FAIL", "INCONCLUSIVE"])
    def test_an_overload_comes_first(self, verdict):
        gates = [gate(verdict=verdict), gate("slo", "INCONCLUSIVE", blocked_by=("blocks", "overload"))]
        checks = [check(name="blocks"), check(name="overload", remedy="Lower the rate.")]
        text = headline({"compiled": verdict}, gates, checks, "eager", lambda _: "")
        assert text.startswith("The generator was late. Lower the rate. ")
        assert text.count("Lower the rate") == 1
        assert text.endswith("It is so." if verdict == "FAIL" else "may replace eager: The generator was late.")

    def test_an_overload_of_other_arms_does_not_concern_one_that_passed(self):
        other = check(name="overload", arm="compiled")
        assert "was late" not in headline({"bucketed": "PASS"}, [gate(arm="bucketed")], [other], "eager", longer)

    def test_other_work_comes_before_the_load_generator_that_it_makes_late(self):
        gates = [gate(verdict="INCONCLUSIVE", blocked_by=("load generator", "other work"))]
        checks = [check(remedy="Give it a core."), check(name="other work", reason="Busy.", remedy="End it.")]
        assert headline({"compiled": "INCONCLUSIVE"}, gates, checks, "eager", longer).endswith("Busy. Run longer.")
        assert advise(gates, checks).text == "End it. Give it a core."

    def test_advice_names_two_remedies_and_the_shortest_run_that_can_pass(self):
        names = ("load generator", "complete", "token stream", "blocks")
        checks = [check(name=name, remedy="" if name == "blocks" else f"Fix {name}.") for name in names]
        advice = advise([gate(verdict="INCONCLUSIVE", blocked_by=names)], checks, needs="Run longer.")
        assert advice.needed_s is None
        assert re.fullmatch(
            r"Fix load generator. Fix complete. .Checks of the run. in report.html .* Run longer.", advice.text
        )

    @pytest.mark.parametrize(
        ("name", "needed_s", "text"),
        [
            ("overload", None, "Lower it."),
            ("other work", 600.0, "Lower it. A run"),  # machines may be quiet next time
            ("cut requests", 600.0, "Lower it. A run"),
        ],
    )
    def test_no_length_is_advised_while_a_check_that_none_passes_keeps_a_gate_open(self, name, needed_s, text):
        gates = [gate("slo", "INCONCLUSIVE", needed_s=600.0), gate(verdict="INCONCLUSIVE", blocked_by=(name,))]
        advice = advise(gates, [check(name=name, remedy="Lower it.")])
        assert advice.needed_s == needed_s
        assert advice.text.startswith(text)

    def test_a_gate_that_would_take_days_does_not_hide_how_soon_the_others_are_decided(self):
        slo = replace(gate("slo", "INCONCLUSIVE", needed_s=283_500.0), gate="slo p99_ttft_ms")
        advice = advise([gate(verdict="INCONCLUSIVE", needed_s=1260.0), slo], [])
        assert advice.needed_s == 283_500.0
        assert all(words in advice.text for words in ("21 minutes", "78.8 hours", '"SLO p99 TTFT" of compiled'))

    @pytest.mark.parametrize(
        ("gates", "checks", "needed_s", "words"),
        [
            ([replace(OPEN, needed_s=600.0), gate("slo", "INCONCLUSIVE", needed_s=1260.0)], [], 1260.0, "21"),
            ([gate(verdict="INCONCLUSIVE", blocked_by=("load generator",))], [check(remedy="Do it.")], None, "Do it."),
            ([gate("recompile", "FAIL"), OPEN], [], None, "cannot change the FAIL of compiled"),
            ([gate("recompile", "FAIL"), OPEN, replace(OPEN, arm="padded", needed_s=630.0)], [], 630.0, ""),
            ([gate("parity", "INCONCLUSIVE")], [], None, "`tailgate parity experiment.toml`"),
            ([gate("parity", "INCONCLUSIVE", unseen="raise it")], [], None, 'decide "parity" of compiled: raise it.'),
            ([OPEN, gate("parity", "INCONCLUSIVE", unseen="raise it")], [], None, 'would decide "non-inf'),
        ],
    )
    def test_advice_is_a_length_or_a_remedy(self, gates, checks, needed_s, words):
        advice = advise(gates, checks)
        assert advice.needed_s == needed_s
        assert words in advice.text


def failed(name: str, kind: str, verdict: str = "FAIL") -> Gate:
    return replace(gate(kind, verdict), gate=name)


SLOWER = failed("noninferiority p99_e2e", "noninferiority")
MISSED = failed("slo p99_ttft_ms", "slo")
RECOMPILED = failed("recompiles", "recompile")


@pytest.mark.parametrize(
    ("gate", "more", "words"),
    [
        (RECOMPILED, {}, "`tailgate inspect experiment.toml --arm compiled`"),
        (RECOMPILED, {"external": {"compiled": " (4 to 9 tokens)"}}, "as long (4 to 9 tokens), as many at once"),
        (failed("eager steps", "recompile"), {}, "which steps are not ready"),
        (failed("refused", "error"), {}, "bounds or ladders"),
        (failed("deaths", "error"), {}, "under logs/"),
        (failed("errors", "error"), {}, "`error`"),
        (SLOWER, {}, "`tailgate frontier experiment.toml`"),
        (MISSED, {}, "`tailgate frontier experiment.toml`"),
        (MISSED, {"external": {"compiled": ""}}, 'traffic.arrivals = "saturation"'),
        (failed("parity", "parity"), {}, "`tailgate parity experiment.toml`"),
        (failed("memory ratio", "memory"), {}, "fewer slots"),
        (failed("ramp", "ramp"), {}, "ramp's line in the report"),
    ],
)
def test_a_remedy_follows_from_the_gate(gate: Gate, more: dict[str, Any], words: str) -> None:
    (remedy,) = advise([gate], [], **more).remedies
    assert remedy.arm == "compiled"
    assert words in remedy.text


def test_compiles_come_before_the_errors_and_latency_that_they_explain() -> None:
    gates = [SLOWER, failed("errors", "error"), failed("longest compile stall", "recompile"), RECOMPILED]
    remedies = advise(gates, []).remedies
    for remedy, words in zip(remedies, ("tailgate inspect", "column `error`", "tailgate frontier"), strict=True):
        assert words in remedy.text


@pytest.mark.parametrize("verdict", ["PASS", "INCONCLUSIVE"])
def test_a_gate_that_did_not_fail_has_no_remedy(verdict: str) -> None:
    assert advise([failed("recompiles", "recompile", verdict)], []).remedies == ()
