"""Where two answers part, by how much each server preferred its token there, and how many answers do so."""

import pytest

from analysis.records.asked_answers import AskedAnswer
from analysis.run.answer_difference import difference
from analysis.run.greedy_answers import greedy_answers


def answer(*tokens, log_prob=-0.5, **likeliest):
    """Its last token has these likeliest ones beside it, itself with `log_prob`; those before are as likely."""
    tops = [{token: log_prob} for token in tokens[:-1]] + [{tokens[-1]: log_prob, **likeliest}]
    return AskedAnswer(
        text="".join(tokens),
        pieces=len(tokens),
        asked=len(tokens),
        tokens=tokens,
        log_probs=(log_prob,) * len(tokens),
        likeliest=tuple(tops),
    )


def text(words):
    return AskedAnswer(text=words, asked=8, pieces=1)


def compared(one, other, near_tie=1.0):
    return difference(one, other, near_tie=near_tie)


def test_equal_answers_differ_only_in_their_log_probabilities():
    found = compared(answer("a", "b"), answer("a", "b", log_prob=-0.75))
    assert (found.kind, found.at, found.of, found.shifts, found.agrees) == ("equal", None, 2, (0.25, 0.25), True)


def test_the_lead_adds_up_by_how_much_both_prefer_their_own_token():
    one, other = answer("a", "b", c=-0.75), answer("a", "c", b=-0.875)
    found = compared(one, other)
    assert (found.kind, found.at, found.of, found.lead, found.shifts) == ("tie", 1, 2, 0.25 + 0.375, (0.0,))
    assert compared(one, other, near_tie=0.5).kind == "apart"


def test_a_token_that_the_other_does_not_name_is_at_least_as_far_as_the_last_that_it_names():
    one, other = answer("a", "b", x=-3.0), answer("a", "c", b=-0.5)
    assert (compared(one, other).lead, compared(one, other).kind) == (2.5, "apart")
    # All that it names are as likely, so that the token may be hardly less or far less likely.
    assert compared(answer("a", "b", x=-0.5, y=-0.625), other).kind == "unknown"


def test_an_answer_that_ends_earlier_has_no_token_to_compare():
    found = compared(answer("a", "b"), answer("a"))
    assert (found.kind, found.at, found.lead, found.agrees) == ("unknown", 1, None, False)


def test_text_that_is_cut_into_other_tokens_is_the_same():
    assert compared(answer("ab", "c"), answer("a", "bc")).kind == "equal"
    # Tokens that the text leaves out, as special ones, may differ where it does not.
    hidden = [
        AskedAnswer(text="a", tokens=item.tokens, log_probs=item.log_probs, likeliest=item.likeliest)
        for item in (answer("a", "<x>"), answer("a", "<y>"))
    ]
    assert compared(*hidden).at == 1


@pytest.mark.parametrize(("other", "at"), [("one two three four", None), ("one two three fore", 7), ("two", 0)])
def test_texts_part_at_about_the_token_that_their_letters_say(other, at):
    found = compared(text("one two three four"), text(other))
    assert (found.kind, found.at) == ("equal" if at is None else "unknown", at)
    assert compared(answer("a", "b"), text("ab")).kind == "equal", "one server has no log-probabilities"


def twice(letters, its=-5.0):
    """What a server answers the first and the second time, a letter each behind a token that all share."""
    first, second = (answer("p", letter, **{"b" if letter == "a" else "a": its}) for letter in letters)
    return (first,), (second,)


def counted(control, arm, its=-5.0):
    return greedy_answers([twice(control, its)], [twice(arm, its)], near_tie=1.0)


@pytest.mark.parametrize(
    ("control", "arm", "same", "repeated", "swapped"),
    [
        ("aa", "aa", 1, 0, 0),
        ("aa", "bb", 0, 1, 0),  # each repeats itself and differs from the other
        ("ab", "ab", 1, 0, 1),  # they pair off by time
        ("ab", "ba", 0, 0, 1),  # crosswise
        ("aa", "ab", 1, 0, 0),
        ("ab", "aa", 1, 0, 0),
    ],
)
def test_four_answers_make_pairs_by_arm_or_otherwise(control, arm, same, repeated, swapped):
    found = counted(control, arm)
    assert (found.same, found.repeated, found.swapped) == (same, repeated, swapped)
    assert found.held == (control == "aa")
    assert found.parted == (control == "aa" and "b" in arm)


def test_near_ties_are_no_departures_of_either_kind():
    found = counted("aa", "bb", its=-0.8)
    assert (found.same, found.ties, found.apart, found.repeated, found.parted) == (0, 1, 0, 0, 0)
    assert (found.departs, found.tokens, found.lead) == ((1,), 2, pytest.approx(0.6))


def test_log_probabilities_count_where_every_answer_has_them():
    silent = (text("pa"),), (text("pa"),)
    assert counted("aa", "aa").told
    found = greedy_answers([twice("aa")], [silent], near_tie=1.0)
    assert (found.told, found.same, found.shift) == (False, 1, None)


def test_trials_add_up_and_equal_answers_are_held_once():
    both = (answer("p", "a"), answer("q", "a"))
    one = both, both
    found = greedy_answers([one, one], [one, one], near_tie=1.0)
    assert (found.prompts, found.answered, found.same, found.distinct, found.held) == (4, 4, 4, 2, 2)
    assert (found.shift.mean, found.shift.high, found.shift.most) == (0.0, 0.0, 0.0)


def test_one_prompt_sets_no_limits_of_the_shift_and_none_finds_nothing():
    one, other = answer("p", "a"), answer("p", "a", log_prob=-0.7)
    found = greedy_answers([((one,), (one,))], [((other,), (other,))], near_tie=1.0).shift
    assert (found.mean, found.low, found.high, found.most) == (pytest.approx(0.2), None, None, pytest.approx(0.2))
    none = greedy_answers([], [], near_tie=1.0)
    assert (none.prompts, none.answered, none.low, none.lead, none.shift) == (0, 0, None, None, None)
