"""The traffic by the records of the trials: what was too long, what a chat template added, who ran where.

Trials differ only in what they draw, so counts are summed over them and shares are averaged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from analysis.records.plain_values import mapping, number
from analysis.run.run import Run

_OVER_LIMIT = ("input_over", "output_over", "requests_dropped", "turns_after_end")


def traffic_facts(run: Run) -> dict[str, Any]:
    """The facts that the trials record of their traffic, by name; what none records is left out."""
    infos = [info for info in run.infos if info]
    facts: dict[str, Any] = {}
    if any(info.get("loop") == "closed" for info in infos):
        facts["closed_loop"] = run.concurrency
    over = [mapping(info.get("dropped")) for info in infos]
    if any(over):
        policy = next((str(row["policy"]) for row in over if row.get("policy")), None)
        facts["over_limit"] = {"policy": policy, **{key: _total(over, key) for key in _OVER_LIMIT}}
    prompts = [mapping(info.get("prompts")) for info in infos]
    for name in ("trace", "conversations"):
        if source := next((mapping(row[name]) for row in prompts if mapping(row.get(name))), None):
            facts[name] = dict(source)
    if templates := [mapping(row.get("template")) for row in prompts if mapping(row.get("template"))]:
        facts["template"] = _template(templates)
    if shared := [mapping(row.get("shared")) for row in prompts if mapping(row.get("shared"))]:
        known = [number(row.get("shared_pct")) or 0.0 for row in shared]
        facts["shared_prefixes"] = {
            "block_tokens": number(shared[0].get("block_tokens")),
            "shared_pct": sum(known) / len(known),
        }
    devices = [(trial.number, mapping(trial.info.get("devices"))) for trial in run.trials]
    # One device for all explains nothing; several may explain a difference.
    if len({str(device) for _, given in devices for device in given.values()}) > 1:
        facts["devices"] = [{"trial": trial, "devices": dict(given)} for trial, given in devices]
    return facts


def _total(rows: list[Mapping[str, Any]], key: str) -> int:
    return sum(int(number(row.get(key)) or 0) for row in rows)


def _template(rows: list[Mapping[str, Any]]) -> dict[str, Any]:
    moved: dict[str, int] = {}
    for row in rows:
        for arm, count in mapping(row.get("moved")).items():
            moved[str(arm)] = moved.get(str(arm), 0) + int(number(count) or 0)
    return {
        "least": min(int(number(row.get("least")) or 0) for row in rows),
        "most": max(int(number(row.get("most")) or 0) for row in rows),
        "prompts": _total(rows, "prompts"),
        "over_limit": _total(rows, "over_limit"),
        "moved": moved,
    }
