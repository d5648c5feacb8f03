"""Client-side stalls: first-seen shapes, the evidence that a stall was a compile, and agreement with telemetry."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from scipy import stats

from analysis.blackbox import view as module
from analysis.blackbox.agreement import agreement_of, is_explained
from analysis.blackbox.calls import WRONG, Evidence, calls, wrong_shares
from analysis.blackbox.firstseen import SlowFirst, chance_of_new, more_than_chance, shapes_of, slow_first
from analysis.blackbox.partial import partial_stalls
from analysis.blackbox.prefills import Prefills, Work
from analysis.blackbox.stalls import COMPILE, HOST, UNKNOWN, WORK, Stall
from analysis.blackbox.view import Outside, outside_of
from analysis.records.requests import Requests, requests_of
from analysis.records.schemas import REQUESTS
from analysis.run.spikes import CompileEvent, windows_of

S = 1_000_000_000
T0 = 1_700_000_000 * S
NEVER = windows_of([])


def stall(start_s: float = 10.0, seconds: float = 2.0, **changes: object) -> Stall:
    known = {"arm": "a", "trial": 1, "replica": "a-0", "start_ns": int(start_s * S), "chance": 1e-6, "begun": True}
    known |= {"end_ns": int((start_s + seconds) * S), "cause": UNKNOWN, "trigger": 7, "shape": 64, "work_s": 0.3}
    known |= {"chance_new": 0.05, "chance_as_long": 1.0, "longest": 0.5, "requests": np.zeros(0, dtype=np.int64)}
    return Stall(**{**known, **changes})  # type: ignore[arg-type]


def event(start_s: float, seconds: float, *, serving: bool = True, kind: str = "recompile") -> CompileEvent:
    return CompileEvent(
        event_id=f"{start_s}",
        trial=1,
        arm="a",
        replica="a-0",
        kind=kind,
        start_ns=int(start_s * S),
        end_ns=int((start_s + seconds) * S),
        serving=serving,
        stalls=kind != "eager_fallback",
        request_ids=(),
        row={},
    )


def requests(lengths: list[int | None], waits_s: list[float] | None = None, **columns: list[object]) -> Requests:
    """One request a second with these prompt lengths and times to the first token."""
    rows = []
    for index, (length, wait) in enumerate(zip(lengths, waits_s or [0.1] * len(lengths), strict=True)):
        sent = T0 + index * S
        row = {"request_id": str(index), "arm": "a", "trial": 1, "scheduled_ns": sent, "status": "OK"}
        row |= {"first_token_ns": sent + int(wait * S), "end_ns": sent + int(wait * S) + S // 2}
        rows.append(row | {"prompt_tokens": length} | {name: values[index] for name, values in columns.items()})
    return requests_of(pa.Table.from_pylist(rows, schema=REQUESTS))


def test_a_shape_is_new_once_for_each_replica_and_each_start() -> None:
    assert shapes_of(requests([5, 7, 5, None, 9]), "a").new.tolist() == [True, True, False, False, True]
    padded = shapes_of(requests([5, 7, 12, 40]), "a", ladder=(8, 16))
    assert padded.shape.tolist() == [8, 8, 16, 40], "a prompt beyond the last bucket keeps its length"
    assert padded.new.tolist() == [True, False, True, True]
    two = requests([5, 5, 5, 5], replica=["x", "y", "x", "y"])
    assert shapes_of(two, "a").new.tolist() == [True, True, False, False]
    trials = requests([5, 5], trial=[1, 2])
    assert shapes_of(trials, "a").new.tolist() == [True, True]
    assert shapes_of(trials, "a", lives=np.zeros(2, dtype=np.int64)).new.tolist() == [True, False]


def test_long_prompts_are_compared_with_long_ones() -> None:
    lengths = np.random.default_rng(1).integers(100, 110, 400)
    lengths[20::40] = np.arange(5000, 5000 + 50 * lengths[20::40].size, 50)
    shapes = shapes_of(requests(lengths.tolist()), "a")
    share, long = shapes.share(np.arange(400)), shapes.shape >= 5000
    assert (share[long] == 1.0).all()
    assert share[~long][100:].max() == 0.0
    assert chance_of_new(shapes.share(np.array([399, 380]))) == 1.0


def test_equal_chances_give_the_binomial_test() -> None:
    new = np.array([True] * 4 + [False] * 2)
    expected = stats.binomtest(4, 6, 0.1, alternative="greater").pvalue
    assert more_than_chance(new, np.full(6, 0.1)) == pytest.approx(expected)
    assert more_than_chance(np.ones(5, dtype=bool), np.ones(5)) == 1.0


@pytest.mark.parametrize(("factor", "found"), [(3.0, True), (1.0, False)])
def test_slower_first_requests_of_a_shape_are_found(factor: float, found: bool) -> None:
    rng = np.random.default_rng(2)
    lengths = (100 * rng.integers(1, 31, 300)).tolist()
    waits = (0.1 * np.exp(0.3 * rng.standard_normal(300))).tolist()
    for length in set(lengths):
        waits[lengths.index(length)] *= factor
    made = requests(lengths, waits)
    slow = slow_first(made, shapes_of(made, "a"), NEVER, rng=np.random.default_rng(0))
    assert (slow.p_value < 1e-6) is found
    if found:
        assert slow.excess_ms == pytest.approx(200.0, rel=0.3)


def evidence(new: int, *, others: int = 0, empty: int = 0, chance: float = 0.1) -> Evidence:
    """Stalls of 3 s that began with first-seen shapes, others that began with known ones, and with no request."""
    count = new + others + empty
    return Evidence(
        new=np.arange(count) < new,
        begun=np.arange(count) < new + others,
        beyond=np.ones(count, dtype=np.bool_),
        seconds=np.full(count, 3.0),
        chance=np.where(np.arange(count) < new + others, chance, 0.0),
        chance_as_long=np.full(count, 0.6),
        longest=np.full(count, 0.5),
    )


@pytest.mark.parametrize(("new", "others", "called"), [(4, 0, 4), (3, 3, 0), (40, 2, 40), (0, 0, 0)])
def test_stalls_are_called_compiles_where_little_else_stalls(new: int, others: int, called: int) -> None:
    found, _ = calls(evidence(new, others=others, chance=0.2 if others else 0.1))
    assert found.tolist() == [True] * called + [False] * (new + others - called)


def test_stalls_without_a_request_show_other_reasons_and_work_is_never_called() -> None:
    alone, other = (wrong_shares(evidence(5, empty=empty), long=False)[0] for empty in (0, 3))
    assert alone < WRONG < other
    found, _ = calls(replace(evidence(6), beyond=np.arange(6) < 5))
    assert found.tolist() == [True] * 5 + [False]


@pytest.mark.parametrize(
    ("stalls", "causes"),
    [
        ([stall()] * 4 + [stall(trigger=-1, shape=-1)], [COMPILE] * 4 + [UNKNOWN]),
        ([stall(chance_new=0.8)] * 6, [UNKNOWN] * 6),
        ([stall()], [UNKNOWN]),
        ([stall(chance_new=0.002)], [COMPILE]),
        ([stall(chance_new=0.01, cause=cause) for cause in (HOST, WORK)], [HOST, WORK]),
        ([], []),
    ],
    ids=["unlikely shapes", "every shape is new", "one", "one rare", "host and work", "none"],
)
def test_stalls_with_unlikely_first_seen_shapes_are_compiles(
    monkeypatch: pytest.MonkeyPatch, stalls: list[Stall], causes: list[str]
) -> None:
    monkeypatch.setattr(module, "look", lambda *_: ({"a": stalls}, {"a": []}))
    made = requests([64, 64, 64])
    found = outside_of(made, {"a": shapes_of(made, "a")}, rng=np.random.default_rng(0))["a"]
    assert [one.cause for one in found.stalls] == causes
    assert found.recompiles == (COMPILE in causes)


def test_work_explains_a_stall_as_long_as_prompts_of_its_length_take() -> None:
    tokens = np.arange(100.0, 3100.0, 50.0)
    work = Work.of(Prefills(tokens=tokens, seconds=tokens * 1e-3, new=np.zeros(len(tokens), np.bool_)), [])
    assert [work.explains(*asked) for asked in ((2000, 2.0), (2000, 4.0), (200, 2.0))] == [True, False, False]
    few = Prefills(tokens=tokens[:4], seconds=tokens[:4], new=np.zeros(4, np.bool_))
    assert Work.of(few, []).at_most_s(500) == math.inf


@pytest.mark.parametrize(("third_held", "found"), [(False, 1), (True, 0)], ids=["a part", "all"])
def test_requests_that_stop_while_others_continue_are_a_partial_stall(third_held: bool, found: int) -> None:
    times = np.arange(0.1, 6.0, 0.02)
    rows = []
    for index in range(3):
        came = times if index == 2 and not third_held else times[(times <= 2.0) | (times >= 4.0)]
        row = {"request_id": str(index), "arm": "a", "trial": 1, "status": "OK", "output_tokens": len(came)}
        row |= {"scheduled_ns": T0, "sent_ns": T0, "first_token_ns": T0 + int(came[0] * S), "prompt_tokens": 100}
        row |= {"end_ns": T0 + int(came[-1] * S), "token_ns": (came * S).astype(int).tolist()}
        rows.append(row)
    made = requests_of(pa.Table.from_pylist(rows, schema=REQUESTS))
    gaps = partial_stalls(made, np.arange(3), made.start_ns, NEVER)
    assert [gap.requests.size for gap in gaps] == [2] * found


def test_stalls_that_overlap_compiles_agree_with_telemetry() -> None:
    slow = SlowFirst(first=0, others=0, p_value=1.0, excess_ms=math.nan)
    stalls = (stall(10.02, 2.0, cause=COMPILE), stall(50.0, 1.0, cause=COMPILE), stall(70.0, 2.0))
    outside = Outside(arm="a", stalls=stalls, p_value=0.001, watches=(), slow=slow, shapes_known=True)
    events = [event(10, 2), event(30, 3), event(70, 2), event(90, 2, serving=False)]
    found = agreement_of(outside, events, [4] * 4)
    assert (found.telemetry, found.seen, found.called, found.missed, found.extra) == (3, 2, 1, 2, 1)


@pytest.mark.parametrize(
    ("events", "explained"),
    [
        ([], False),
        ([event(10.0, 3.0)], True),
        ([event(11.2, 1.8)], True),
        ([event(12.0, 1.0)], False),
        ([event(10.0, 1.0), event(11.0, 0.8, serving=False)], True),
        ([event(10.0, 3.0, kind="background_compile")], False),
        ([event(5.0, 3.0)], False),
    ],
    ids=["none", "all of it", "more than half", "less", "two, one of a warm-up", "in the background", "before it"],
)
def test_a_stall_is_explained_by_compiles_that_last_for_most_of_it(events: list[CompileEvent], explained: bool) -> None:
    assert is_explained(stall(10.0, 3.0), events) is explained
    assert not is_explained(stall(10.0, 3.0, replica="a-1"), events)
