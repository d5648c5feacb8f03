"""Under which conditions a run was made: design, traffic, machine and environment, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from analysis.report.arms import embeds
from analysis.report.values import (
    DASH,
    Row,
    at,
    byte_size,
    count,
    is_number,
    milliseconds,
    percent,
    rows,
    seconds,
    span,
    text,
)
from analysis.wording import counted


def facts(summary: Row) -> list[tuple[str, str]]:
    """(name, value) of design, duration, blocks, requests and machine; what is unknown is left out."""
    design = at(summary, "design")
    loop, trials, each = at(design, "open_loop"), at(design, "trials"), at(design, "block_s")
    planned, requests = at(design, "planned"), sum(arm.get("requests") or 0 for arm in rows(summary, "arms"))
    shown = [
        ("Design", f"{text(at(design, 'design'))}, {'open' if loop else 'closed'} loop"),
        ("Duration", f"{counted(trials, 'trial', count)} of {span(at(design, 'duration_s'))}"),
        ("Blocks", f"{count(at(design, 'blocks'))} of {seconds(each)}"),
        ("Requests", count(requests) + (f" of {count(planned)} planned" if is_number(planned) else "")),
        ("Generator lag, p99", milliseconds(at(design, "generator_lag_p99_ms"))),
        ("Machine", machine(summary)),
        ("Devices", device(summary)),
    ]
    return [(name, value) for name, value in shown if value not in ("", DASH)]


def machine(summary: Row) -> str:
    """The processor that ran it, or the platform where that is unknown."""
    environment = at(summary, "environment")
    processor = text(at(environment, "cpu", "model"))
    return processor if processor != DASH else text(at(environment, "platform"))


def device(summary: Row) -> str:
    """The GPUs of the machine, or how many CPUs where there is none."""
    gpus, cpus = at(summary, "environment", "gpus"), at(summary, "environment", "cpu", "usable")
    listed = Counter(map(text, gpus)) if isinstance(gpus, list) else Counter[str]()
    if listed:
        return "; ".join(f"{number} × {gpu}" if number > 1 else gpu for gpu, number in listed.items())
    return counted(cpus, "CPU", count) if is_number(cpus) else ""


def traffic(summary: Row) -> list[tuple[str, str]]:
    """(name, sentence) of whatever is special about the traffic; empty where it is plain."""
    known = at(summary, "traffic")
    lines: list[tuple[str, str]] = []
    if isinstance(known, Mapping) and "closed_loop" in known:
        slots = counted(known["closed_loop"], "request", count)
        lines.append(("Closed loop", f"{slots} in flight to each arm; its tails are not judged."))
    lines += _over_limit(at(known, "over_limit"), texts=embeds(summary))
    lines += _template(at(known, "template"))
    if is_number(shared := at(known, "shared_prefixes", "shared_pct")):
        block = count(at(known, "shared_prefixes", "block_tokens"))
        lines.append(("Shared prefixes", f"{percent(shared)} of the prompt tokens repeat earlier blocks of {block}."))
    if is_number(at(known, "conversations", "read")):
        read, unusable, kept = (count(at(known, "conversations", key)) for key in ("read", "unusable", "kept"))
        lines.append(("Conversations", f"{read} read, {unusable} without a question and its answer, {kept} used."))
    if is_number(at(known, "trace", "rows_read")):
        form, read, kept = (text(at(known, "trace", key)) for key in ("format", "rows_read", "rows_kept"))
        failed = at(known, "trace", "failed")
        left_out = f", {count(failed)} without an output token left out" if failed else ""
        lines.append(("Trace", f"{form}: {read} rows read, {kept} kept{left_out}."))
    for row in rows(known, "devices"):
        pairs = ", ".join(f"{text(arm)} on {text(place)}" for arm, place in (row.get("devices") or {}).items())
        lines.append((f"Devices, trial {count(row.get('trial'))}", pairs or DASH))
    return lines


def _over_limit(over: object, *, texts: bool) -> list[tuple[str, str]]:
    inputs, outputs = at(over, "input_over") or 0, at(over, "output_over") or 0
    lines = []
    if inputs or outputs:
        done = {"clip": "cut to them", "drop": "left out"}.get(str(at(over, "policy")), text(at(over, "policy")))
        dropped = at(over, "requests_dropped")
        more = f" ({counted(dropped, 'request', count)} left out)" if dropped else ""
        answers = "" if texts else f" and {counted(outputs, 'answer', count)}"
        what = counted(inputs, "text" if texts else "prompt", count) + answers
        lines.append(("Over the model's limits", f"{what} over the limits: {done}{more}."))
    if late := at(over, "turns_after_end"):
        lines.append(("Turns after the end", f"{count(late)} not sent."))
    return lines


def _template(template: object) -> list[tuple[str, str]]:
    least, most = at(template, "least"), at(template, "most")
    if not is_number(least) or not is_number(most):
        return []
    size = counted(most, "token", count) if least == most else f"{count(least)} to {count(most)} tokens"
    sentence = f"adds {size} to each of {counted(at(template, 'prompts'), 'prompt', count)}"
    for arm, number in (at(template, "moved") or {}).items():
        sentence += f"; prompts that it moves to a larger bucket of {text(arm)}: {count(number)}"
    if over := at(template, "over_limit"):
        sentence += f"; prompts over the model's limit by it alone: {count(over)}"
    return [("Chat template", f"{sentence}.")]


def flattened(table: object, prefix: str = "") -> list[tuple[str, str]]:
    """Every leaf of nested tables as ("host.cores", "2"). Numbers named *_bytes read as sizes."""
    if not isinstance(table, Mapping | list):
        return []
    leaves: list[tuple[str, str]] = []
    for key, value in table.items() if isinstance(table, Mapping) else enumerate(table):
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(item, Mapping) for item in value)):
            leaves += flattened(value, f"{name}.")
        elif name.endswith("bytes"):
            leaves.append((name, byte_size(value)))
        else:
            leaves.append((name, str(value) if is_number(value) else text(value)))
    return leaves
