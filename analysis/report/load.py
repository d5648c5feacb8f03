"""What all reports say of the load: what an arm holds of it, and what became of lengths, prompts and devices."""

from __future__ import annotations

from collections.abc import Mapping

from analysis.report.reading import embeds
from analysis.report.values import DASH, Row, at, count, is_number, percent, rows, text
from analysis.wording import counted


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
