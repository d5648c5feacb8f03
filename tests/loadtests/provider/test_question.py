import pytest

from loadtests.provider.question import Question
from servers.fields import ConfigError


def test_a_question_is_read_from_its_parameters() -> None:
    given = {"arm": "new", "gate": "errors", "for": "step", "window": "90s", "inconclusive": "fail", "token": "x"}
    assert Question.of(given) == Question(arm="new", gate="errors", goal="step", window_s=90.0, inconclusive="fail")
    assert Question.of({}, goal="step") == Question(goal="step")


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"window": "0s"}, 'window is "0s": give 1s to 60m'),
        ({"window": "2h"}, 'window is "2h"'),
        ({"window": "nan"}, 'window is "nan"'),
        ({"window": ""}, 'window is ""'),
        ({"for": "ever"}, 'for is "ever": give step or promotion'),
        ({"inconclusive": "pass"}, 'inconclusive is "pass": give wait or fail'),
        ({"arm": "x" * 201}, "arm has 201 characters; the limit is 200"),
        ({"gate": "x" * 201}, "gate has 201 characters"),
    ],
)
def test_what_is_no_question_is_one_line(given: dict[str, str], error: str) -> None:
    with pytest.raises(ConfigError, match=error.replace("(", r"\(")) as found:
        Question.of(given)
    assert "\n" not in str(found.value)
