"""Whether parity asked at every size at which an arm changes what it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from analysis.judging.gates import INCONCLUSIVE, PASS
from analysis.parity.finding import Finding

_MOST_NAMED = 5
# A kind of step, and what its batch is of.
_BATCHES = {"decode": ("decode steps", "rows"), "prefill": ("prefill steps", "prompts"), "encode": ("batches", "texts")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Borders:
    """Where an arm changes its shape: lengths of prompts in tokens, and sizes of batches by the kind of step. Of both,
    those that no request has, and that no step had. `enough` is a number of prompts that asks all, of every arm."""

    prompts: tuple[int, ...]
    unasked_prompts: tuple[int, ...] = ()
    batches: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    unasked_batches: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    enough: int = 0


def judge_borders(name: str, borders: Borders) -> Finding:
    """Every border of the arm `name` was asked; one that was not leaves parity open."""
    of = len(borders.prompts) + sum(map(len, borders.batches.values()))
    missing = len(borders.unasked_prompts) + sum(map(len, borders.unasked_batches.values()))
    places = [f"prompts of {_sizes(borders.unasked_prompts)} tokens"] if borders.unasked_prompts else []
    for kind, sizes in borders.unasked_batches.items():
        steps, unit = _BATCHES[kind]
        places += [f"{steps} of {_sizes(sizes)} {unit}"] if sizes else []
    return Finding(
        name="borders",
        verdict=INCONCLUSIVE if missing else PASS,
        value=float(missing),
        limit=0.0,
        reason=f"No request asks {missing} of the {of} borders of {name} ({'; '.join(places)}): give parity.prompts = "
        f"{borders.enough}."
        if missing
        else f"Requests ask all {of} borders of {name}.",
    )


def _sizes(sizes: tuple[int, ...]) -> str:
    more = len(sizes) - _MOST_NAMED
    return ", ".join(map(str, sizes[:_MOST_NAMED])) + (f" and {more} more" if more > 0 else "")
