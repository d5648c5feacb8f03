"""Ladders of sizes: the steps to which a padded dimension is rounded up."""

from __future__ import annotations

from collections.abc import Sequence

from servers.fields import ConfigError

_SHORTEST = 32  # tokens


def default_lengths(longest: int) -> tuple[int, ...]:
    """The length ladder of an arm with buckets that names none of its own, for steps of up to `longest` tokens."""
    return doubling(_SHORTEST, longest)


def default_batches(rows: int) -> tuple[int, ...]:
    """The batch ladder of an arm with buckets that names none of its own, for steps of up to `rows` rows."""
    return doubling(1, rows)


def doubling(first: int, last: int) -> tuple[int, ...]:
    """`first`, twice that, and so on below `last`, then `last` itself."""
    steps = []
    while first < last:
        steps.append(first)
        first *= 2
    return (*steps, last)


def check_rising(key: str, ladder: Sequence[int]) -> None:
    """The steps are positive and rise. Raises ConfigError."""
    if any(step < 1 for step in ladder) or list(ladder) != sorted(set(ladder)):
        raise ConfigError(f"{key} is {list(ladder)}: give rising positive integers")
