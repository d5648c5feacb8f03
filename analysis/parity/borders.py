"""Whether parity asked at every size at which an arm changes what it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from analysis.judging.gates import INCONCLUSIVE, PASS
from analysis.parity.finding import Finding

_MOST_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Borders:
    """Lengths of prompts, in tokens, at which an arm changes its shape, and those of them that no request has."""

    prompts: tuple[int, ...]
    unasked_prompts: tuple[int, ...] = ()


def judge_borders(name: str, every: Mapping[str, Borders]) -> Finding:
    """Every border of the arm `name` was asked; one that was not leaves parity open. `every` has all arms' borders."""
    own = every[name]
    of, missing = len(own.prompts), own.unasked_prompts
    needed = len(frozenset[int]().union(*(borders.prompts for borders in every.values())))
    return Finding(
        name="borders",
        verdict=INCONCLUSIVE if missing else PASS,
        value=float(len(missing)),
        limit=0.0,
        reason=f"No request asks {len(missing)} of the {of} borders of {name} (prompts of {_sizes(missing)} tokens): "
        f"give parity.prompts = {needed}."
        if missing
        else f"Requests ask all {of} borders of {name}.",
    )


def _sizes(sizes: tuple[int, ...]) -> str:
    more = len(sizes) - _MOST_NAMED
    return ", ".join(map(str, sizes[:_MOST_NAMED])) + (f" and {more} more" if more > 0 else "")
