"""Made-up steps of arms whose knees are known exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from analysis.judging.load_steps import Held, Step


def step(arm: str, rate: float, held: Held, trial: int = 1) -> Step:
    return Step(
        arm=arm,
        trial=trial,
        rate=rate,
        requests=100,
        good=90,
        failed=0,
        offered_rps=rate,
        goodput_rps=rate,
        held=held,
        reason="",
    )


def steady(
    knees: Mapping[str, float], *, starts: int = 4, around: Sequence[float] = (0.8, 0.9, 1.1, 1.25)
) -> list[Step]:
    """Every arm in so many starts, at the same rates around its own knee: all below it held, all above it missed."""
    return [
        step(arm, knee * place, "held" if place <= 1.0 else "missed", trial)
        for trial in range(1, starts + 1)
        for arm, knee in knees.items()
        for place in around
    ]
