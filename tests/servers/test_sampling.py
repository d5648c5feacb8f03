from __future__ import annotations

import torch

from servers.sampling import allowed_probabilities, sample
from servers.scheduler import Job


def job(name: str, **settings: float) -> Job:
    return Job(request_id=name, prompt=[1], max_tokens=1, recv_ns=0, **settings)  # type: ignore[arg-type]


def test_temperature_zero_takes_the_largest_logit_of_each_real_row() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    assert sample(logits, [job("a"), job("b")], {}) == logits[:2].argmax(-1).tolist()


def test_top_k_keeps_only_the_largest() -> None:
    probabilities = allowed_probabilities(torch.tensor([1.0, 3.0, 2.0, 0.0]), temperature=1.0, top_k=2, top_p=0.0)
    assert probabilities.nonzero().flatten().tolist() == [1, 2]
    assert torch.isclose(probabilities.sum(), torch.tensor(1.0))


def test_top_p_keeps_the_smallest_set_that_holds_the_mass() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    kept = allowed_probabilities(logits, temperature=1.0, top_k=0, top_p=0.7).nonzero().flatten().tolist()
    assert kept == [0, 1]
    assert allowed_probabilities(logits, temperature=1.0, top_k=0, top_p=0.01).nonzero().flatten().tolist() == [0]


def test_a_seeded_answer_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(2))

    def draw(neighbours: int) -> list[int]:
        generators: dict[str, torch.Generator] = {}
        jobs = [job("x", temperature=1.0, seed=11), *(job(str(i), temperature=2.0, seed=i) for i in range(neighbours))]
        return [sample(logits, jobs, generators)[0] for _ in range(5)]

    assert draw(0) == draw(2)
    assert len(set(draw(0))) > 1


def test_draws_follow_the_distribution() -> None:
    logits = torch.log(torch.tensor([[0.7, 0.2, 0.1]]))
    generators: dict[str, torch.Generator] = {}
    draws = [sample(logits, [job("x", temperature=1.0, seed=3)], generators)[0] for _ in range(2000)]
    assert abs(draws.count(0) / 2000 - 0.7) < 0.04
    assert abs(draws.count(2) / 2000 - 0.1) < 0.03
