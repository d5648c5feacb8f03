from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from loadtests.page.history import History


def items(numbers: range) -> list[dict[str, int]]:
    return [{"n": number} for number in numbers]


@given(st.integers(4, 30), st.integers(0, 400), st.integers(1, 7))
def test_a_history_is_bounded_even_and_ends_with_the_newest(most: int, came: int, at_once: int) -> None:
    history = History(most)
    for start in range(0, came, at_once):
        history.add(items(range(start, min(came, start + at_once))))
    kept = [item["n"] for item in history.items]
    assert len(kept) <= most
    assert kept[-1:] == ([came - 1] if came else [])
    assert kept[:1] == ([0] if came else [])
    steps = {after - before for before, after in pairwise(kept[:-1])}
    assert len(steps) <= 1  # all but the newest lie equally far apart


@given(st.lists(st.integers(0, 9), max_size=60), st.booleans(), st.integers(4, 12))
def test_changes_replayed_are_the_history(steps: list[int], newest: bool, most: int) -> None:
    history = History(most, newest=newest)
    replayed: list[dict[str, int]] = []
    at = 0
    for step in steps:
        history.add(items(range(at, at + step)))
        at += step
        change = history.take_changes()
        assert (change is None) == (step == 0)
        if change is not None:
            replayed[change[0] :] = change[1]
        assert replayed == history.items


def test_of_events_the_newest_are_kept() -> None:
    history = History(8, newest=True)
    history.add(items(range(21)))
    assert history.items[-1] == {"n": 20}
    assert [item["n"] for item in history.items] == list(range(21 - len(history.items), 21))
