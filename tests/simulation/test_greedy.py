"""The made-up servers behind the figures on greedy parity are what they are said to be."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.simulation.greedy import BF16, TOKENS, Server, judged


def test_server_repeats_itself_unless_its_batches_round_or_it_samples() -> None:
    for server, repeats in ((BF16, True), (Server(batch=0.5), False), (Server(samples=True), False)):
        first, second = server.twice(3, 12)
        assert (first == second) is repeats
        assert {len(answer.tokens) for answer in first} == {TOKENS}


def test_greedy_server_takes_the_likeliest_token_and_says_how_likely() -> None:
    answer = BF16.answer(1, 2, 0)
    for token, value, likeliest in zip(answer.tokens, answer.log_probs, answer.likeliest, strict=True):
        assert (max(likeliest, key=lambda item: likeliest[item]), likeliest[token]) == (token, value)
        assert len(likeliest) == 5


def test_servers_of_one_model_agree_but_for_rounding_and_a_fault_shows_from_its_token_on() -> None:
    one, other = Server(), Server(name="other")
    assert one.twice(1, 8)[0] == other.twice(1, 8)[0]
    assert one.twice(1, 8)[0] != Server(weights="two").twice(1, 8)[0]
    faulty = [replace(one, faulty=1.0).answer(1, prompt, 0).tokens for prompt in range(20)]
    right = [one.answer(1, prompt, 0).tokens for prompt in range(20)]
    parts = [
        next((at for at, pair in enumerate(zip(*both, strict=True)) if len(set(pair)) > 1), TOKENS)
        for both in zip(faulty, right, strict=True)
    ]
    assert len(set(parts)) > 5
    assert sum(part < TOKENS for part in parts) > 15


def test_same_seed_gives_the_same_outcome() -> None:
    assert judged(BF16, replace(BF16, name="arm"), 4, prompts=8) == judged(
        BF16, replace(BF16, name="arm"), 4, prompts=8
    )
