"""Losses that are planted in made-up logits are found, with intervals that rest on texts."""

import math

import numpy as np
import pytest

from tailgate.analysis.parity.judge import Answers, Places, Task, judge, judge_kl
from tailgate.analysis.parity.measures import LEAST_TEXTS, mean_interval, measure

TEXTS, TOKENS, VOCABULARY = 48, 6, 50


def logits_of(seed=0, texts=TEXTS):
    return np.random.default_rng(seed).standard_normal((texts * TOKENS, VOCABULARY)) * 2.0


def blurred(logits, size, seed=1):
    return logits + size * np.random.default_rng(seed).standard_normal(logits.shape)


def greedy(logits):
    return logits.argmax(axis=1).reshape(-1, TOKENS).tolist()


def judged(logits, reference, limit=0.05):
    lengths = [TOKENS] * (len(reference) // TOKENS)
    divergence = measure(logits, reference).divergence
    rng = np.random.default_rng(1)
    return judge_kl("int8", divergence, lengths, limit, source="made.jsonl", rng=rng)


def test_a_small_loss_passes_with_its_numbers():
    reference = logits_of()
    kl = judged(blurred(reference, 0.1), reference)
    assert kl.verdict == "PASS"
    assert 0 < kl.low <= kl.value <= kl.high <= kl.limit
    assert "on 48 texts (made.jsonl)" in kl.reason


def test_a_loss_near_the_limit_is_open_and_a_great_one_fails():
    reference = logits_of()
    value = judged(blurred(reference, 0.3), reference).value
    open_ = judged(blurred(reference, 0.3), reference, limit=value * 1.01)
    assert open_.verdict == "INCONCLUSIVE"
    assert "more texts that differ decide" in open_.reason
    assert judged(blurred(reference, 1.5), reference).verdict == "FAIL"


def test_few_texts_set_no_interval_however_many_tokens_they_have():
    reference = logits_of(texts=LEAST_TEXTS - 1)
    kl = judged(blurred(reference, 1.5), reference)
    assert (kl.verdict, kl.low, kl.high, "(no interval)" in kl.reason) == ("INCONCLUSIVE", None, None, True)


def test_the_unit_is_the_text():
    """Tokens that repeat what their text loses add nothing to what is known."""
    by_text = np.exp(0.5 * np.random.default_rng(0).standard_normal(40))
    once, often = (
        mean_interval(by_text * count, np.full(40, float(count)), np.random.default_rng(1)) for count in (1, 1000)
    )
    assert once == pytest.approx(often)
    assert once[1] < once[0] < once[2]


@pytest.mark.parametrize("counts", [np.full(40, 8.0), np.arange(8.0, 48.0)])
def test_texts_that_all_lose_the_same_set_no_interval(counts):
    assert mean_interval(0.02 * counts, counts, np.random.default_rng(1)) == (pytest.approx(0.02), None, None)


def test_an_equal_arm_loses_nothing_and_one_that_computes_no_number_loses_everything():
    reference = logits_of()
    assert judged(reference, reference).verdict == "PASS"
    arm = blurred(reference, 0.1)
    arm[7, 3] = math.nan
    assert judged(arm, reference).verdict == "FAIL"


class TestQuantisedArm:
    """What `judge` makes of an arm whose weights are quantised."""

    def outcome(self, arms, truth, control=None, lengths=()):
        fed = truth[: TEXTS * TOKENS]
        control = control or self.answers(blurred(fed, 0.0003, seed=9).astype(np.float32), "eager")
        arms = arms if isinstance(arms, list) else [arms]
        place = Places(lengths=[TOKENS] * TEXTS, prompts=list(range(1, TEXTS + 1)))
        judged = {"dtype": "float32", "seed": 1, "max_kl": 0.05, "source": "own.jsonl", "texts": lengths}
        return judge(Task(control=control, reference=truth, place=place, **judged), arms)

    def answers(self, logits, name="int8"):
        return Answers(name=name, tokens=greedy(logits)[:TEXTS], logits=logits, quantised="int8-weight-only")

    @pytest.fixture
    def reference(self):
        reference = logits_of()
        reference[:, 7] = 9.0
        return reference

    def test_other_tokens_and_a_greater_error_than_the_control_s_are_no_fault(self):
        reference = logits_of()
        arm = self.answers(blurred(reference, 0.1))
        left = next(own for own, due in zip(arm.tokens, greedy(reference), strict=True) if own[:-1] != due[:-1])
        left[-1] = 11  # its logits are along the control's tokens, which it left before
        parity = self.outcome(arm, reference)
        assert parity.verdict == "PASS", parity.arms[0].reasons
        names = ["kl", "finite", "answers", "worst prompt", "worst position"]
        assert [item.name for item in parity.arms[0].findings] == names

    @pytest.mark.parametrize(("times", "verdict"), [(1.0, "PASS"), (2.0, "FAIL")])
    def test_a_policy_may_add_little_to_the_error_of_the_first_arm_with_such_weights(self, reference, times, verdict):
        first = self.answers(blurred(reference, 0.1))
        arm = self.answers(blurred(blurred(reference, times * 0.1), 0.001, seed=4), "compiled")
        parity = self.outcome([first, arm], reference)
        found = {item.name: item for item in parity.arms[1].findings}
        assert parity.arms[0].verdict == "PASS"
        assert (parity.arms[1].verdict, found["error"].verdict) == (verdict, verdict)
        assert found["error"].value == pytest.approx(times, rel=0.01)
        assert found["kl"].verdict == "PASS"

    def test_a_great_loss_fails_unless_the_control_computes_something_else(self, reference):
        lossy = self.answers(blurred(reference, 3.0))
        assert self.outcome(lossy, reference).verdict == "FAIL"
        wrong = Answers(name="eager", tokens=[[7] * TOKENS] * TEXTS, logits=blurred(reference, 1.0))
        assert self.outcome(lossy, reference, wrong).verdict == "INCONCLUSIVE"

    def test_an_answer_that_its_own_logits_do_not_prefer_fails(self, reference):
        arm = self.answers(blurred(reference, 0.1))
        arm.tokens[5][2] = 11
        parity = self.outcome(arm, reference)
        assert parity.verdict == "FAIL"
        (reason,) = parity.arms[0].reasons
        assert "request 5 (prompt of 6 tokens), token 3 of 6, where it takes 11" in reason

    def test_given_texts_alone_say_what_is_lost_and_nonsense_at_one_border_fails(self, reference):
        both = np.concatenate([reference, logits_of(seed=3, texts=40)])
        lengths, given = [TOKENS] * 40, slice(TEXTS * TOKENS, None)
        sound, lossy = blurred(both, 0.1), blurred(both, 0.1)
        lossy[given] = blurred(both, 1.5)[given]
        (kl, *_) = self.outcome(self.answers(lossy), both, lengths=lengths).arms[0].findings
        assert (kl.name, kl.verdict, "on 40 texts (own.jsonl)" in kl.reason) == ("kl", "FAIL", True)
        sound[:TOKENS] = logits_of(seed=8)[:TOKENS]
        parity = self.outcome(self.answers(sound), both, lengths=lengths)
        assert parity.verdict == "FAIL"
        found = {item.name: item.verdict for item in parity.arms[0].findings}
        assert (found["worst prompt"], found["kl"]) == ("FAIL", "PASS")
        assert "request 0 (prompt of 1 token)" in " ".join(parity.arms[0].reasons)
