"""Under which conditions a run was made: design, traffic, external arms, machine and environment, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from analysis.report.arms import arms_of
from analysis.report.values import DASH, at, byte_size, count, is_number, milliseconds, percent, seconds, span, text
from analysis.settings.metrics import EMBED
from analysis.summary.model import Summary
from analysis.wording import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A named value or sentence."""

    name: str
    value: str


def facts(summary: Summary) -> list[Condition]:
    """Design, duration, blocks, requests and machine; what is unknown is left out."""
    design, environment = summary.design, summary.environment
    requests = count(sum(arm.requests for arm in summary.arms))
    gpus, cpu = environment.get("gpus"), environment.get("cpu")
    cards = Counter(map(text, gpus if isinstance(gpus, list) else ()))
    shown = {
        "Design": f"{text(design.design)}, {'open' if design.open_loop else 'closed'} loop",
        "Duration": f"{counted(design.trials, 'trial', count)} of {span(design.duration_s)}",
        "Blocks": f"{count(design.blocks)} of {seconds(design.block_s)}",
        "Requests": requests if design.planned is None else f"{requests} of {count(design.planned)} planned",
        "Generator lag, p99": milliseconds(design.generator_lag_p99_ms),
        "Machine": text(at(cpu, "model") or environment.get("platform")),
        "GPUs": "; ".join(f"{number} × {card}" for card, number in cards.items()),
    }
    return [Condition(name=name, value=value) for name, value in shown.items() if value not in ("", DASH)]


def traffic(summary: Summary) -> list[Condition]:
    """Whatever is special about the traffic, by the records of the trials; empty where it is plain."""
    known = summary.traffic
    lines: list[tuple[str, str]] = []
    if "closed_loop" in known:
        slots = counted(known["closed_loop"], "request", count)
        lines.append(("Closed loop", f"{slots} in flight to each arm; its tails are not judged."))
    lines += _over_limit(known.get("over_limit"), texts=summary.task == EMBED)
    lines += _template(known.get("template"))
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
    for row in known.get("devices", ()):
        pairs = ", ".join(f"{text(arm)} on {text(place)}" for arm, place in row["devices"].items())
        lines.append((f"Devices, trial {count(row['trial'])}", pairs or DASH))
    return [Condition(name=name, value=line) for name, line in lines]


def externals(summary: Summary) -> list[Condition]:
    """What is not known of each arm that tailgate did not start, the control first."""
    return [
        Condition(
            name=f"{text(arm.name)}: {text(own.kind)} at {text(own.address)}, model {text(own.model_name)}",
            value=" ".join(map(text, own.notes)),
        )
        for arm in arms_of(summary)
        if (own := arm.external) is not None
    ]


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


def flattened(table: object, prefix: str = "") -> list[Condition]:
    """Every leaf of nested tables as ("host.cores", "2"). Numbers named *_bytes read as sizes."""
    if not isinstance(table, Mapping | list):
        return []
    leaves: list[Condition] = []
    for key, value in table.items() if isinstance(table, Mapping) else enumerate(table):
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(item, Mapping) for item in value)):
            leaves += flattened(value, f"{name}.")
        elif name.endswith("bytes"):
            leaves.append(Condition(name=text(name), value=byte_size(value)))
        else:
            leaves.append(Condition(name=text(name), value=str(value) if is_number(value) else text(value)))
    return leaves
