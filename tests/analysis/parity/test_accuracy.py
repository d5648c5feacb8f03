"""Losses that are planted in made-up logits are found, with intervals that rest on texts."""

import math

import numpy as np
import pytest

from analysis.parity.accuracy import LEAST_TEXTS, AccuracyLimits, Texts, estimated, judge_accuracy
from analysis.parity.flips import Answers
from analysis.parity.judge import Accuracy, judge
from analysis.parity.measures import measure

TEXTS, TOKENS, VOCABULARY = 48, 6, 50
LIMITS = AccuracyLimits(perplexity_ratio=1.05, kl=0.05)


def logits_of(seed=0, texts=TEXTS):
    return np.random.default_rng(seed).standard_normal((texts * TOKENS, VOCABULARY)) * 2.0


def blurred(logits, size, seed=1):
    return logits + size * np.random.default_rng(seed).standard_normal(logits.shape)


def greedy(logits):
    return logits.argmax(axis=1).reshape(-1, TOKENS).tolist()


def drawn(logits, seed=5):
    """Tokens as the logits themselves would speak."""
    rng = np.random.default_rng(seed)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares = np.cumsum(weights / weights.sum(axis=1, keepdims=True), axis=1)
    return (shares < rng.random((len(logits), 1))).sum(axis=1).reshape(-1, TOKENS).tolist()


def judged(logits, reference, tokens=None, limits=LIMITS):
    texts = Texts(tokens=tokens or drawn(reference), source="of made.jsonl", more="put more into made.jsonl")
    findings, figures = judge_accuracy(
        "int8",
        measure(logits, reference),
        logits,
        reference,
        texts,
        limits,
        against="float64",
        rng=np.random.default_rng(1),
    )
    return {finding.name: finding for finding in findings}, figures


def test_a_small_loss_passes_with_its_numbers():
    reference = logits_of()
    found, figures = judged(blurred(reference, 0.1), reference)
    assert {item.verdict for item in found.values()} == {"PASS"}
    assert found["perplexity"].low <= found["perplexity"].value <= found["perplexity"].high <= 1.05
    assert 0 < found["kl"].low <= found["kl"].value <= found["kl"].high
    assert (figures["texts"], figures["text_tokens"], figures["texts_needed"]) == (TEXTS, TEXTS * TOKENS, None)
    assert figures["perplexity"] / figures["perplexity_reference"] == pytest.approx(found["perplexity"].value)
    assert "on 48 texts (288 tokens, of made.jsonl)" in found["perplexity"].reason


def test_a_loss_near_the_limit_is_open_and_names_how_many_texts_decide():
    reference = logits_of()
    measured = judged(blurred(reference, 0.3), reference)[0]["kl"].value
    near, far = (
        judged(blurred(reference, 0.3), reference, limits=AccuracyLimits(perplexity_ratio=9.0, kl=measured * times))
        for times in (1.01, 1.04)
    )
    for found, figures in (near, far):
        assert found["kl"].verdict == "INCONCLUSIVE"
        assert found["kl"].reason.endswith(f": put more into made.jsonl, about {figures['texts_needed']} to decide.")
    assert near[1]["texts_needed"] > 10 * far[1]["texts_needed"] > 10 * TEXTS


def test_few_texts_set_no_interval_however_many_tokens_they_have():
    reference = logits_of(texts=LEAST_TEXTS - 1)
    found, _ = judged(blurred(reference, 1.5), reference)
    assert {(item.verdict, item.low, item.high) for item in found.values()} == {("INCONCLUSIVE", None, None)}
    assert "so few set no interval: put more into made.jsonl, at least 32." in found["kl"].reason


def test_the_unit_is_the_text():
    """Tokens that repeat what their text loses add nothing to what is known."""
    by_text = np.exp(0.5 * np.random.default_rng(0).standard_normal(40))
    once, often = (
        estimated(by_text * count, np.full(40, float(count)), 1.0, np.random.default_rng(1), of_divergence=True)
        for count in (1, 1000)
    )
    assert (once.low, once.high) == (pytest.approx(often.low), pytest.approx(often.high))
    assert once.low < often.value < once.high


def test_texts_that_all_lose_the_same_are_copies_and_set_no_interval():
    copies = estimated(np.full(64, 0.08), np.full(64, 8.0), 1.02, np.random.default_rng(1), of_divergence=False)
    assert copies.value == pytest.approx(math.exp(0.01))
    assert (copies.low, copies.high, copies.needed) == (None, None, None)
    reference, arm = (np.tile(logits, (TEXTS, 1)) for logits in (logits_of(texts=1), blurred(logits_of(texts=1), 0.1)))
    found, _ = judged(arm, reference, drawn(logits_of(texts=1)) * TEXTS)
    assert {item.verdict for item in found.values()} == {"INCONCLUSIVE"}
    assert "they all lose exactly the same, as copies of one text do" in found["kl"].reason


def test_texts_of_which_no_token_is_known_are_no_texts():
    sums, counts = np.zeros(40), np.zeros(40)
    sums[0], counts[0] = 0.08, 8.0
    few = estimated(sums, counts, 1.02, np.random.default_rng(1), of_divergence=False)
    assert (few.low, few.high, few.needed) == (None, None, LEAST_TEXTS)
    reference = logits_of()
    reference[:, 40:] = -np.inf
    arm = blurred(np.where(np.isfinite(reference), reference, -30.0), 0.1)
    tokens = drawn(reference)
    unknown = [[45] * TOKENS if text >= LEAST_TEXTS - 1 else tokens[text] for text in range(TEXTS)]
    found, figures = judged(arm, reference, unknown)
    assert figures["texts"] == LEAST_TEXTS - 1
    assert {(item.verdict, item.low) for item in found.values()} == {("INCONCLUSIVE", None)}


def test_one_token_that_the_arm_rules_out_costs_everything():
    reference = logits_of()
    arm = blurred(reference, 0.1)
    tokens = drawn(reference)
    arm[7, tokens[1][1]] = -1e9
    found, _ = judged(arm, reference, tokens)
    assert found["kl"].verdict == "FAIL"
    assert found["perplexity"].verdict == "INCONCLUSIVE"  # one text of 48 may be all of them that lose so much


def test_what_the_reference_rules_out_is_left_out():
    reference = logits_of()
    reference[:, 40:] = -np.inf
    arm = blurred(np.where(np.isfinite(reference), reference, 0.0), 0.1)
    arm[:, 40:] = -30.0
    tokens = drawn(reference)
    tokens[0][0] = 45
    found, figures = judged(arm, reference, tokens)
    assert found["perplexity"].verdict == "PASS"
    assert figures["text_tokens"] == TEXTS * TOKENS - 1
    impossible, _ = judged(arm, reference, [[45] * TOKENS for _ in range(TEXTS)])
    assert impossible["perplexity"].verdict == "INCONCLUSIVE"
    assert "they are no texts of this model" in impossible["perplexity"].reason


class TestQuantisedArm:
    """What `judge` makes of an arm whose weights are quantised."""

    def outcome(self, arms, reference, control=None, *, float64=True, texts=None, given=None):
        control = control or self.answers(blurred(reference, 0.0003, seed=9).astype(np.float32), "eager")
        arms = arms if isinstance(arms, list) else [arms]
        quantised = {arm.name: "int8-weight-only" for arm in arms}
        accuracy = Accuracy(quantised=quantised, limits=LIMITS, texts=texts, reference=given)
        prompts, against = list(range(1, TEXTS + 1)), reference if float64 else None
        return judge(control, arms, against, dtype="float32", prompts=prompts, seed=1, accuracy=accuracy)

    def answers(self, logits, name="int8", **more):
        return Answers(name=name, tokens=greedy(logits), logits=logits, **more)

    @pytest.fixture
    def reference(self):
        reference = logits_of()
        reference[:, 7] = 9.0
        return reference

    def test_other_tokens_and_a_greater_error_than_the_control_s_are_no_fault(self):
        reference = logits_of()
        parity = self.outcome(self.answers(blurred(reference, 0.1)), reference)
        assert parity.verdict == "PASS", parity.arms[0].reasons
        assert parity.arms[0].figures["answers_same"] < TEXTS
        names = ["finite", "answers", "worst prompt", "worst position", "perplexity", "kl"]
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
        assert {found["perplexity"].verdict, found["kl"].verdict} == {"PASS"}

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
        assert "request 5 (prompt of 6 tokens), token 3 of 6: it takes 11" in reason

    @pytest.mark.parametrize("float64", [True, False])
    def test_given_texts_are_judged_instead_of_the_answers_and_nonsense_at_one_border_fails(self, reference, float64):
        given = logits_of(seed=3, texts=40)
        texts = Texts(tokens=drawn(given), source="of own.jsonl", more="put more into own.jsonl")
        control = self.answers(blurred(reference, 0.0003).astype(np.float32), "eager", texts=given)
        how = {"float64": float64, "texts": texts, "given": given}
        lossy = self.outcome(
            self.answers(blurred(reference, 0.1), texts=blurred(given, 1.5)), reference, control, **how
        )
        assert (lossy.verdict, lossy.arms[0].figures["texts"]) == ("FAIL", 40)
        logits = blurred(reference, 0.1)
        logits[:TOKENS] = logits_of(seed=8)[:TOKENS]
        parity = self.outcome(self.answers(logits, texts=blurred(given, 0.1)), reference, control, **how)
        assert parity.verdict == "FAIL"
        found = {item.name: item.verdict for item in parity.arms[0].findings}
        assert (found["worst prompt"], found["perplexity"], found["kl"]) == ("FAIL", "PASS", "PASS")
        assert "request 0 (prompt of 1 token)" in " ".join(parity.arms[0].reasons)
        with pytest.raises(ValueError, match="int8"):
            self.outcome(self.answers(reference), reference, control, **how)

    def test_no_number_fails_and_leaves_a_document(self, reference):
        arm = self.answers(blurred(reference, 0.1))
        arm.logits[9, 3] = math.nan
        parity = self.outcome(arm, reference)
        assert parity.verdict == "FAIL"
        assert parity.to_dict()["arms"][0]["findings"][0]["verdict"] == "FAIL"
