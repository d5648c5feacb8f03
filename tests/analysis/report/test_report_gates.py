"""The gates of all arms as lists: what several share is said once."""

from __future__ import annotations

from typing import Any

from analysis.report.reading import SHARED, gate_lists

CAVEAT = "That would be a PASS, but for the check that failed: bed drift."


def gate(arm: str, name: str, reason: str, *, caveat: str = "", verdict: str = "INCONCLUSIVE") -> dict[str, Any]:
    row = {"arm": arm, "gate": name, "verdict": verdict, "reason": f"{reason} {caveat}".strip()}
    return row | ({"caveat": caveat} if caveat else {})


def listed(*gates: dict[str, Any]) -> tuple[tuple[tuple[str, str], ...], list[str]]:
    """What several gates share, and the reason that is left to each."""
    lists = gate_lists({"gates": list(gates)})
    return lists.shared, [reason for rows in lists.arms.values() for _, reason in rows]


def test_a_caveat_of_several_gates_leaves_each_its_own_reason() -> None:
    gates = (gate("a", "errors", "None failed.", caveat=CAVEAT), gate("b", "deaths", "It stayed up.", caveat=CAVEAT))
    assert listed(*gates) == ((("a: errors; b: deaths", CAVEAT),), ["None failed.", "It stayed up."])


def test_arms_with_the_same_gates_are_named_together() -> None:
    shared, _ = listed(*(gate(arm, name, "Unknown.") for arm in "ab" for name in ("errors", "deaths")))
    assert shared == (("a, b: errors, deaths", "Unknown."),)


def test_a_caveat_of_one_gate_stays_with_it() -> None:
    gates = (gate("a", "errors", "None failed.", caveat=CAVEAT), gate("a", "deaths", "It may have died."))
    assert listed(*gates) == ((), [f"None failed. {CAVEAT}", "It may have died."])


def test_a_reason_that_is_shared_whole_does_not_have_its_caveat_said_twice() -> None:
    gates = (gate("a", "errors", "Too few.", caveat=CAVEAT), gate("a", "deaths", "Too few.", caveat=CAVEAT))
    assert listed(*gates) == ((("a: errors, deaths", f"Too few. {CAVEAT}"),), [SHARED, SHARED])


def test_gates_that_passed_keep_their_reasons() -> None:
    gates = (gate("a", "errors", "Fine.", verdict="PASS"), gate("a", "deaths", "Fine.", verdict="PASS"))
    assert listed(*gates) == ((), ["Fine.", "Fine."])


def test_a_caveat_that_the_reason_does_not_end_with_is_left_alone() -> None:
    gates = [gate("a", name, f"{name}.") | {"caveat": CAVEAT} for name in ("errors", "deaths")]
    assert listed(*gates) == ((), ["errors.", "deaths."])
