"""A border that parity did not ask is named, with the number of prompts that asks all."""

from analysis.parity.borders import Borders, judge_borders


def test_borders_that_were_all_asked_pass():
    finding = judge_borders("padded", Borders(prompts=(1, 2, 16), batches={"decode": (1, 2)}))
    assert (finding.verdict, finding.value, finding.reason) == ("PASS", 0.0, "Requests ask all 5 borders of padded.")


def test_borders_that_were_not_asked_are_named_and_leave_it_open():
    borders = Borders(prompts=tuple(range(1, 12)), unasked_prompts=tuple(range(3, 10)), enough=12)
    finding = judge_borders("bucketed", borders)
    assert (finding.verdict, finding.value, finding.limit) == ("INCONCLUSIVE", 7.0, 0.0)
    assert finding.reason == (
        "No request asks 7 of the 11 borders of bucketed (prompts of 3, 4, 5, 6, 7 and 2 more tokens): "
        "give parity.prompts = 12."
    )


def test_a_batch_border_that_no_step_ran_leaves_parity_open():
    borders = Borders(
        prompts=(1, 2, 40),
        unasked_prompts=(2,),
        batches={"prefill": (1, 2), "decode": (1, 2, 4, 5, 8)},
        unasked_batches={"prefill": (), "decode": (5, 8)},
        enough=9,
    )
    finding = judge_borders("bucketed", borders)
    assert (finding.verdict, finding.value) == ("INCONCLUSIVE", 3.0)
    assert finding.reason == (
        "No request asks 3 of the 10 borders of bucketed (prompts of 2 tokens; decode steps of 5, 8 rows): "
        "give parity.prompts = 9."
    )
