"""Where two answers part, by how much each server preferred its token there, and what differs before."""

from __future__ import annotations

import pytest

from analysis.records.asked_answers import AskedAnswer
from analysis.run.answer_difference import difference

NEAR_TIE = 1.0


def answer(*tokens: str, log_prob: float = -0.5, **likeliest: float) -> AskedAnswer:
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


def text(words: str, asked: int = 8) -> AskedAnswer:
    return AskedAnswer(text=words, asked=asked, pieces=1)


def test_equal_answers_differ_in_their_log_probabilities_alone() -> None:
    found = difference(answer("a", "b"), answer("a", "b", log_prob=-0.75), near_tie=NEAR_TIE)
    assert (found.kind, found.at, found.of, found.shifts) == ("equal", None, 2, (0.25, 0.25))
    assert found.agrees


def test_lead_adds_up_what_both_prefer_their_own_token_by() -> None:
    one, other = answer("a", "b", c=-0.75), answer("a", "c", b=-0.875)
    found = difference(one, other, near_tie=NEAR_TIE)
    assert (found.kind, found.at, found.of, found.lead, found.shifts) == ("tie", 1, 2, 0.25 + 0.375, (0.0,))
    assert difference(one, other, near_tie=0.5).kind == "apart"


def test_token_that_the_other_does_not_name_is_at_least_as_far_as_the_last_that_it_does() -> None:
    one, other = answer("a", "b", x=-3.0), answer("a", "c", b=-0.5)
    assert difference(one, other, near_tie=NEAR_TIE).lead == 2.5
    assert difference(one, other, near_tie=NEAR_TIE).kind == "apart"
    # All that it names are as likely, so that the token may be hardly less or far less likely.
    flat = answer("a", "b", x=-0.5, y=-0.625)
    assert difference(flat, other, near_tie=NEAR_TIE).kind == "unknown"


def test_answer_that_ends_earlier_has_no_token_to_look_up() -> None:
    found = difference(answer("a", "b"), answer("a"), near_tie=NEAR_TIE)
    assert (found.kind, found.at, found.lead) == ("unknown", 1, None)
    assert not found.agrees


def test_text_that_is_cut_into_other_tokens_is_the_same() -> None:
    assert difference(answer("ab", "c"), answer("a", "bc"), near_tie=NEAR_TIE).kind == "equal"
    # Tokens that the text leaves out, as special ones, may differ where it does not.
    one, other = answer("a", "<x>"), answer("a", "<y>")
    hidden = [
        AskedAnswer(text="a", tokens=item.tokens, log_probs=item.log_probs, likeliest=item.likeliest)
        for item in (one, other)
    ]
    assert difference(*hidden, near_tie=NEAR_TIE).at == 1


@pytest.mark.parametrize(("other", "at"), [("one two three four", None), ("one two three fore", 7), ("two", 0)])
def test_texts_part_at_about_the_token_that_their_letters_say(other: str, at: int | None) -> None:
    found = difference(text("one two three four"), text(other), near_tie=NEAR_TIE)
    assert found.at == at
    assert found.kind == ("equal" if at is None else "unknown")


def test_one_server_without_log_probabilities_leaves_the_texts() -> None:
    found = difference(answer("a", "b"), text("ab"), near_tie=NEAR_TIE)
    assert (found.kind, found.shifts) == ("equal", ())
