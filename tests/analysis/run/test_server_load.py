"""What a server said of its load in a stretch of a trial."""

from __future__ import annotations

import numpy as np
import pytest

from analysis.run.server_load import LoadSamples, Meanwhile, meanwhile

SECOND = 10**9
NAN = np.nan


def samples(arm: str = "vllm", replica: str | None = "vllm-0", trial: int = 1, **columns: list[float]) -> LoadSamples:
    """One a second from 1 s on."""
    count = len(next(iter(columns.values())))
    every = {name: np.full(count, NAN) for name in ("running", "waiting", "cache_pct", "preemptions")}
    every |= {name: np.array(values, dtype=np.float64) for name, values in columns.items()}
    return LoadSamples(
        trial=trial, arm=arm, replica=replica, at_ns=SECOND * np.arange(1, count + 1, dtype=np.int64), **every
    )


def between(start_s: float, end_s: float, *given: LoadSamples) -> Meanwhile | None:
    return meanwhile(given, arm="vllm", trial=1, start_ns=int(start_s * SECOND), end_ns=int(end_s * SECOND))


def said(running: float | None, waiting: float | None, cache: float | None, preemptions: float | None) -> Meanwhile:
    return Meanwhile(running=running, waiting=waiting, cache_pct=cache, preemptions=preemptions)


def test_the_most_of_a_stretch_counts_with_the_samples_just_around_it() -> None:
    own = samples(
        running=[1, 2, 9, 4, 5], waiting=[0, 0, 3, 7, 0], cache_pct=[9, 20, 30, 20, 99], preemptions=[9, 1, 0, 2, 4]
    )
    assert between(2.4, 3.6, own) == said(9, 7, 30, 2)  # from 2 s to 4 s: what rose until 2 s was before
    assert between(3.1, 3.2, own) == said(9, 7, 30, 2)
    assert between(0.0, 9.0, own) == said(9, 7, 99, 7)


@pytest.mark.parametrize(("start_s", "end_s"), [(-9, -2), (8.1, 9)])
def test_nothing_is_said_of_what_is_far_from_every_sample(start_s: float, end_s: float) -> None:
    assert between(start_s, end_s, samples(running=[1, 2, 3, 4, 5])) is None


def test_what_no_page_says_is_unknown_and_not_nothing() -> None:
    assert between(1, 3, samples(waiting=[0, NAN, 0])) == said(None, 0, None, None)
    assert between(1, 3, samples(preemptions=[NAN, NAN, NAN], running=[1, 1, 1])) == said(1, None, None, None)


def test_replicas_add_up_and_the_fullest_cache_counts() -> None:
    first = samples(running=[1, 2], cache_pct=[10, 90], preemptions=[NAN, 1])
    second = samples(replica="vllm-1", running=[5, 1], cache_pct=[20, 20], preemptions=[NAN, 2])
    others = samples(arm="sglang", running=[99, 99]), samples(trial=2, running=[99, 99])
    assert between(1, 2, first, second, *others) == said(7, None, 90, 3)
