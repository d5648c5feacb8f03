"""What all reports say of the load: what an arm holds of it, and what became of lengths, prompts and devices."""

from __future__ import annotations

from collections.abc import Mapping

from analysis.report.comparing import load_ratios
from analysis.report.reading import embeds
from analysis.report.tables import Table
from analysis.report.values import DASH, Row, at, count, figure, interval, is_number, percent, rate, rows, text
from analysis.wording import counted

HELD = {"held": "held", "missed": "missed", "undecided": "too few"}


def knees(summary: Row) -> Table:
    """The bracket of each arm, the control first; empty where no search was made."""
    against = load_ratios(summary)
    return Table(
        kinds={"Arm": "arm"},
        rows=[
            {
                "Arm": text(row.get("arm")),
                "Highest held": rate(row.get("passed_rps")),
                "Lowest missed": rate(row.get("failed_rps")),
                "95 % of the knee": interval(row.get("low_rps"), row.get("high_rps"), figure),
                "Goodput there": rate(row.get("goodput_rps")),
                "Most goodput": rate(row.get("highest_rps")),
                "Over the control's": against.get(text(row.get("arm")), DASH),
                "Trials": count(row.get("trials")),
            }
            for row in rows(summary, "saturation", "brackets")
        ],
    )


def steps(summary: Row) -> Table:
    """Every step of the search in order of trial, rate and arm."""
    shown = []
    for row in rows(summary, "saturation", "steps"):
        requests, good = row.get("requests"), row.get("good")
        share = 100.0 * good / requests if is_number(requests) and is_number(good) and requests else None
        shown.append(
            {
                "Arm": text(row.get("arm")),
                "Trial": count(row.get("trial")),
                "Rate": rate(row.get("rate")),
                "Requests": count(requests),
                "Goodput": rate(row.get("goodput_rps")),
                "Good": percent(share),
                "Step": HELD.get(str(row.get("held")), DASH),
                "Why": text(row.get("reason")),
            }
        )
    return Table(rows=shown, kinds={"Arm": "arm", "Step": "words", "Why": "reason"})


def objectives(summary: Row) -> str:
    """What a step must keep to count as held, in words."""
    search = at(summary, "saturation")
    parts = [text(key) for key in at(search, "objectives") or []]
    limits, share = at(search, "goodput_limits"), at(search, "attainment_pct")
    if is_number(share) and isinstance(limits, Mapping):
        named = ", ".join(f"{name} ≤ {figure(limit)} ms" for name, limit in limits.items())
        parts.append(f"{percent(share)} of the requests with {named}")
    return "; ".join(parts) or DASH


def traffic(summary: Row) -> list[tuple[str, str]]:
    """(name, sentence) of whatever is special about the traffic; empty where it is plain."""
    facts = at(summary, "traffic")
    lines: list[tuple[str, str]] = []
    if isinstance(facts, Mapping) and "closed_loop" in facts:
        slots = counted(facts["closed_loop"], "request", count)
        lines.append(("Closed loop", f"{slots} under way to each arm; its tails are not judged."))
    lines += _over_limit(at(facts, "over_limit"), texts=embeds(summary))
    lines += _template(at(facts, "template"))
    shared = at(facts, "shared_prefixes", "shared_pct")
    if is_number(shared):
        block = count(at(facts, "shared_prefixes", "block_tokens"))
        sentence = f"{percent(shared)} of the prompt tokens repeat blocks of {block} tokens sent before."
        lines.append(("Shared prefixes", sentence))
    if is_number(at(facts, "conversations", "read")):
        read, unusable, kept = (count(at(facts, "conversations", key)) for key in ("read", "unusable", "kept"))
        lines.append(
            ("Conversations", f"{read} read, {unusable} without a question and its answer, {kept} drawn from.")
        )
    if is_number(at(facts, "trace", "rows_read")):
        form, read, kept = (text(at(facts, "trace", key)) for key in ("format", "rows_read", "rows_kept"))
        failed = at(facts, "trace", "failed")
        left_out = f", {count(failed)} without an output token left out" if is_number(failed) and failed else ""
        lines.append(("Trace", f"{form}: {read} rows read, {kept} kept{left_out}."))
    for row in rows(facts, "devices"):
        lines.append((f"Devices, trial {count(row.get('trial'))}", _pairs(row.get("devices"))))
    for row in rows(facts, "start_order"):
        lines.append((f"Started, trial {count(row.get('trial'))}", text(row.get("order"))))
    return lines


def _over_limit(over: object, *, texts: bool) -> list[tuple[str, str]]:
    input_over, output_over = at(over, "input_over"), at(over, "output_over")
    if not is_number(input_over) or not is_number(output_over):
        return []
    lines = []
    if input_over or output_over:
        done = {"clip": "cut to them", "drop": "left out"}.get(str(at(over, "policy")), text(at(over, "policy")))
        dropped = at(over, "requests_dropped")
        more = f" ({counted(dropped, 'request', count)} left out)" if is_number(dropped) and dropped else ""
        what = (
            counted(input_over, "text", count)
            if texts
            else f"{counted(input_over, 'prompt', count)} and {counted(output_over, 'answer', count)}"
        )
        were = "was" if texts and input_over == 1 else "were"
        sentence = f"{what} {were} longer: {done}{more}."
        lines.append(("Over the model's limits", sentence))
    late = at(over, "turns_after_end")
    if is_number(late) and late:
        lines.append(("Turns after the end", f"{count(late)} {'was' if late == 1 else 'were'} not sent."))
    return lines


def _template(template: object) -> list[tuple[str, str]]:
    least, most = at(template, "least"), at(template, "most")
    if not is_number(least) or not is_number(most):
        return []
    size = counted(most, "token", count) if least == most else f"{count(least)} to {count(most)} tokens"
    sentence = f"adds {size} to each of {counted(at(template, 'prompts'), 'prompt', count)}"
    moved = at(template, "moved")
    for arm, number in moved.items() if isinstance(moved, Mapping) else ():
        sentence += f"; {count(number)} {'moves' if number == 1 else 'move'} to a larger bucket of {text(arm)}"
    over = at(template, "over_limit")
    if is_number(over) and over:
        sentence += f"; {count(over)} {'goes' if over == 1 else 'go'} over the model's limit by it alone"
    return [("Chat template", f"{sentence}.")]


def _pairs(table: object) -> str:
    pairs = table.items() if isinstance(table, Mapping) else ()
    return ", ".join(f"{text(arm)} on {text(device)}" for arm, device in pairs) or DASH
