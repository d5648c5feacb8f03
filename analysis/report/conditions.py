"""Under which conditions a run was made: design, external arms, machine and environment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from analysis.report.arms import arms_of
from analysis.report.values import DASH, at, byte_size, count, is_number, milliseconds, seconds, span, text
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
