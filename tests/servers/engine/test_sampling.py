from __future__ import annotations

import torch

from servers.engine import sampling
from servers.engine.scheduler import Job


def job(seed: int = 0, *, launched: int = 1, **settings: float) -> Job:
    return Job(request_id="x", prompt=[1], max_tokens=1, recv_ns=0, launched=launched, seed=seed, **settings)  # type: ignore[arg-type]


def draw(logits: torch.Tensor, jobs: list[Job], rows: list[int] | None = None) -> list[int]:
    rows = rows if rows is not None else list(range(len(jobs)))
    draws = torch.tensor(sampling.draw_table(jobs, rows, logits.shape[0]))
    ranked = any(item.top_k or item.top_p for item in jobs)
    tokens = sampling.choose(logits, logits.argmax(-1), draws, ranked=ranked).tolist()
    return [tokens[row] for row in rows]


def test_temperature_zero_takes_the_largest_logit() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    jobs = [job(), job(5, temperature=1.0), job()]
    assert draw(logits, jobs)[0] == int(logits[0].argmax())
    assert draw(logits, jobs)[2] == int(logits[2].argmax())
    assert sampling.is_greedy([job()])
    assert not sampling.is_greedy(jobs)


def allowed(logits: torch.Tensor, *, top_k: float, top_p: float) -> list[int]:
    ordered, order = logits[None].sort(descending=True)
    kept = sampling.allowed_probabilities(ordered, top_k=torch.tensor([top_k]), top_p=torch.tensor([top_p]))
    return sorted(order[kept > 0].tolist())


def test_top_k_keeps_only_the_largest() -> None:
    assert allowed(torch.tensor([1.0, 3.0, 2.0, 0.0]), top_k=2, top_p=0) == [1, 2]
    assert allowed(torch.tensor([1.0, 3.0, 2.0, 0.0]), top_k=0, top_p=0) == [0, 1, 2, 3]


def test_top_p_keeps_the_smallest_set_that_holds_the_mass() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    assert allowed(logits, top_k=0, top_p=0.7) == [0, 1]
    assert allowed(logits, top_k=0, top_p=0.01) == [0]
    assert allowed(logits, top_k=0, top_p=1.0) == [0, 1, 2, 3]


def test_a_seeded_answer_does_not_depend_on_its_neighbours_or_its_row() -> None:
    logits = torch.randn(1, 200, generator=torch.Generator().manual_seed(2)).expand(4, -1)
    alone = [draw(logits, [job(11, launched=n, temperature=1.0, top_k=50)], [0]) for n in range(1, 6)]
    crowd = [job(launched=3, seed=i, temperature=2.0) for i in range(3)]
    together = [draw(logits, [*crowd, job(11, launched=n, temperature=1.0, top_k=50)])[3:] for n in range(1, 6)]
    assert alone == together
    assert len({token for tokens in alone for token in tokens}) > 1


def test_draws_follow_the_distribution_with_and_without_ranking() -> None:
    logits = torch.log(torch.tensor([[0.7, 0.2, 0.1]])).expand(2000, -1)
    for settings in ({}, {"top_k": 3}):
        jobs = [job(3, launched=n, temperature=1.0, **settings) for n in range(2000)]
        tokens = draw(logits, jobs)
        assert abs(tokens.count(0) / 2000 - 0.7) < 0.04
        assert abs(tokens.count(2) / 2000 - 0.1) < 0.03


def test_a_token_that_is_not_allowed_is_never_drawn() -> None:
    logits = torch.log(torch.tensor([[0.6, 0.3, 0.1]])).expand(500, -1)
    assert set(draw(logits, [job(n, temperature=1.0, top_k=2) for n in range(500)])) == {0, 1}
    assert set(draw(logits, [job(n, temperature=1.0, top_p=0.5) for n in range(500)])) == {0}


def test_uniform_numbers_are_spread_over_the_unit_interval_and_repeat_for_seed_and_index() -> None:
    numbers = [sampling.uniform(7, index) for index in range(4000)]
    assert all(0 <= number < 1 for number in numbers)
    assert abs(sum(numbers) / 4000 - 0.5) < 0.02
    assert sampling.uniform(7, 1) == numbers[1] != sampling.uniform(8, 1)
    assert 0 <= sampling.uniform(2**64 - 1, 0) < 1
