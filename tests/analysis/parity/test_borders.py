"""A border that parity did not ask is named, with the number of prompts that asks all."""

from analysis.parity.borders import Borders, judge_borders


def test_borders_that_were_all_asked_pass():
    finding = judge_borders("padded", {"padded": Borders(prompts=(1, 2, 16))})
    assert (finding.verdict, finding.value, finding.reason) == ("PASS", 0.0, "Requests ask all 3 borders of padded.")


def test_borders_that_were_not_asked_are_named_and_leave_it_open():
    every = {
        "eager": Borders(prompts=(1, 2, 64)),
        "bucketed": Borders(prompts=tuple(range(1, 12)), unasked_prompts=tuple(range(3, 10))),
    }
    finding = judge_borders("bucketed", every)
    assert (finding.verdict, finding.value, finding.limit) == ("INCONCLUSIVE", 7.0, 0.0)
    assert finding.reason == (
        "No request asks 7 of the 11 borders of bucketed (prompts of 3, 4, 5, 6, 7 and 2 more tokens): "
        "give parity.prompts = 12."
    )
    assert judge_borders("eager", every).verdict == "PASS"
