import math
from dataclasses import replace

import pytest

from analysis.compare import Comparison
from analysis.planner import LONGEST_S, comparison_needed_s, duration_text, share_needed_s
from analysis.slo import ShareResult

SEEN = Comparison(
    quantile=0.99,
    margin=0.10,
    alpha=0.05,
    ratio=1.0,
    spread=0.08,
    method="paired block label swap",
    blocks=20,
    trials=1,
    requests=4000,
)


def needed(item, **more):
    return comparison_needed_s(item, block_s=30, min_blocks=20, **more)


def test_half_the_spread_asks_for_a_quarter_of_the_time():
    wide, narrow = needed(replace(SEEN, spread=0.2)), needed(replace(SEEN, spread=0.1))
    assert wide / narrow == pytest.approx(4, rel=0.02)


def test_the_length_gives_the_power_it_promises():
    seconds = needed(SEEN)
    error = SEEN.spread * math.sqrt(20 / (seconds / 30))
    assert math.log(1.1) / error == pytest.approx(1.729 + 0.861, rel=0.02)


def test_a_run_is_never_shorter_than_the_blocks_it_needs():
    assert needed(replace(SEEN, spread=0.001)) == 600
    assert needed(replace(SEEN, spread=0.0)) == 600
    assert needed(replace(SEEN, spread=0.001), overhead_s=30) == 630


def test_few_blocks_ask_for_more_since_the_spread_is_a_guess():
    assert needed(replace(SEEN, blocks=3)) / 3 > needed(SEEN) / 20


def test_one_block_asks_for_the_fewest_that_can_be_judged():
    assert needed(replace(SEEN, blocks=1, spread=None, obstacle="one time block")) == 600


@pytest.mark.parametrize(
    "change",
    [
        {"ratio": 1.1},
        {"ratio": 1.0999},
        {"obstacle": "no request", "blocks": 0},
    ],
)
def test_what_no_length_decides_has_none(change):
    assert needed(replace(SEEN, **change)) is None


def share(missed, requests, *, allowed=0.01, effect=1.0):
    return ShareResult(
        missed=missed,
        requests=requests,
        allowed=allowed,
        low=0.0,
        high=1.0,
        design_effect=effect,
        verdict="INCONCLUSIVE",
    )


def share_needed(result, rate=1.0):
    return share_needed_s(result, requests_per_s=rate, block_s=30, min_blocks=1, alpha=0.05)


def test_clean_requests_need_three_over_the_share():
    assert share_needed(share(0, 50)) == pytest.approx(300, abs=30)


def test_a_share_near_the_limit_needs_longer():
    assert share_needed(share(9, 1000)) > share_needed(share(5, 1000)) > 0
    assert share_needed(share(20, 1000, effect=4.0)) > share_needed(share(20, 1000))


@pytest.mark.parametrize("result", [share(0, 0), share(10, 1000), share(0, 10, allowed=0.0)])
def test_a_share_that_no_length_decides_has_none(result):
    assert share_needed(result) is None


def test_a_trickle_of_requests_takes_too_long():
    assert share_needed(share(0, 1), rate=1e-9) is None
    assert LONGEST_S == 604_800


@pytest.mark.parametrize(
    ("seconds", "text"), [(90, "90 seconds"), (601, "11 minutes"), (1260, "21 minutes"), (9000, "2.5 hours")]
)
def test_lengths_read_in_the_unit_of_their_size(seconds, text):
    assert duration_text(seconds) == text
