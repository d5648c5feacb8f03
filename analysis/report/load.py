"""What all reports say of the load: what an arm holds of it, and what became of lengths, prompts and devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from analysis.report.comparing import load_ratios
from analysis.report.values import DASH, at, count, figure, is_number, percent, rate, rows, text

Row = Mapping[str, Any]

HELD = {"held": "held", "missed": "missed", "undecided": "too few"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Knee:
    """What one arm holds, ready to print."""

    arm: str
    held: str
    failed: str
    interval: str
    goodput: str
    highest: str
    trials: str
    ratio: str = DASH  # of the load held to the control's


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One step of one arm, ready to print."""

    arm: str
    trial: str
    rate: str
    requests: str
    goodput: str
    good: str
    held: str
    reason: str


def knees(summary: Row) -> list[Knee]:
    """The bracket of each arm, the control first; empty where no search was made."""
    against = load_ratios(summary)
    return [
        Knee(
            arm=text(row.get("arm")),
            held=rate(row.get("passed_rps")),
            failed=rate(row.get("failed_rps")),
            interval=_interval(row.get("low_rps"), row.get("high_rps")),
            goodput=rate(row.get("goodput_rps")),
            highest=rate(row.get("highest_rps")),
            trials=count(row.get("trials")),
            ratio=against.get(text(row.get("arm")), DASH),
        )
        for row in rows(summary, "saturation", "brackets")
    ]


def _interval(low: object, high: object) -> str:
    if not is_number(low) and not is_number(high):
        return DASH
    return f"[{figure(low)}, {figure(high)}]"


def steps(summary: Row) -> list[StepRow]:
    """Every step of the search in order of trial, rate and arm."""
    found = []
    for row in rows(summary, "saturation", "steps"):
        requests, good = row.get("requests"), row.get("good")
        share = 100.0 * good / requests if is_number(requests) and is_number(good) and requests else None
        found.append(
            StepRow(
                arm=text(row.get("arm")),
                trial=count(row.get("trial")),
                rate=rate(row.get("rate")),
                requests=count(requests),
                goodput=rate(row.get("goodput_rps")),
                good=percent(share),
                held=HELD.get(str(row.get("held")), DASH),
                reason=text(row.get("reason")),
            )
        )
    return found


def asked(summary: Row) -> str:
    """What a step must keep to count as held, in words."""
    found = at(summary, "saturation")
    parts = [text(key) for key in at(found, "objectives") or []]
    limits, share = at(found, "goodput_limits"), at(found, "attainment_pct")
    if is_number(share) and isinstance(limits, Mapping):
        named = ", ".join(f"{name} ≤ {figure(limit)} ms" for name, limit in limits.items())
        parts.append(f"{percent(share)} of the requests with {named}")
    return "; ".join(parts) or DASH


def traffic(summary: Row) -> list[tuple[str, str]]:
    """(name, sentence) of whatever the traffic has to tell; empty where it is plain."""
    told = at(summary, "traffic")
    found: list[tuple[str, str]] = []
    if isinstance(told, Mapping) and "closed_loop" in told:
        slots = count(told["closed_loop"])
        found.append(("Closed loop", f"{slots} requests under way to each arm; its tails are not judged."))
    found += _over_limit(at(told, "over_limit"))
    found += _template(at(told, "template"))
    shared = at(told, "shared_prefixes", "shared_pct")
    if is_number(shared):
        block = count(at(told, "shared_prefixes", "block_tokens"))
        found.append(
            ("Shared prefixes", f"{percent(shared)} of the prompt tokens repeat blocks of {block} tokens sent before.")
        )
    if is_number(at(told, "conversations", "read")):
        read, unusable, kept = (count(at(told, "conversations", key)) for key in ("read", "unusable", "kept"))
        found.append(
            ("Conversations", f"{read} read, {unusable} without a question and its answer, {kept} drawn from.")
        )
    if is_number(at(told, "trace", "rows_read")):
        form, read, kept = (text(at(told, "trace", key)) for key in ("format", "rows_read", "rows_kept"))
        found.append(("Trace", f"{form}: {read} rows read, {kept} kept."))
    for row in rows(told, "devices"):
        found.append((f"Devices, trial {count(row.get('trial'))}", _pairs(row.get("devices"))))
    for row in rows(told, "start_order"):
        found.append((f"Started, trial {count(row.get('trial'))}", text(row.get("order"))))
    return found


def _over_limit(over: object) -> list[tuple[str, str]]:
    input_over, output_over = at(over, "input_over"), at(over, "output_over")
    if not is_number(input_over) or not is_number(output_over):
        return []
    found = []
    if input_over or output_over:
        done = {"clip": "cut to them", "drop": "left out"}.get(str(at(over, "policy")), text(at(over, "policy")))
        dropped = at(over, "requests_dropped")
        more = f" ({count(dropped)} requests left out)" if is_number(dropped) and dropped else ""
        found.append(
            (
                "Over the model's limits",
                f"{count(input_over)} prompts and {count(output_over)} answers were longer: {done}{more}.",
            )
        )
    late = at(over, "turns_after_end")
    if is_number(late) and late:
        found.append(("Turns after the end", f"{count(late)} were not sent."))
    return found


def _template(told: object) -> list[tuple[str, str]]:
    least, most = at(told, "least"), at(told, "most")
    if not is_number(least) or not is_number(most):
        return []
    size = count(least) if least == most else f"{count(least)} to {count(most)}"
    sentence = f"adds {size} tokens to each of {count(at(told, 'prompts'))} prompts"
    moved = at(told, "moved")
    for arm, number in moved.items() if isinstance(moved, Mapping) else ():
        sentence += f"; {count(number)} move to a larger bucket of {text(arm)}"
    over = at(told, "over_limit")
    if is_number(over) and over:
        sentence += f"; {count(over)} go over the model's limit by it alone"
    return [("Chat template", f"{sentence}.")]


def _pairs(table: object) -> str:
    if not isinstance(table, Mapping):
        return DASH
    return ", ".join(f"{text(arm)} on {text(device)}" for arm, device in table.items()) or DASH
