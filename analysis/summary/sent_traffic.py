"""The traffic by the records of the trials: what was too long, what it was made of, what a chat template added."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from analysis.records.plain_values import mapping
from analysis.run.run import Run


def traffic_facts(run: Run) -> Mapping[str, Any]:
    """What the first trial that describes its traffic says of it. Trials differ only in what they draw."""
    for info in run.infos:
        if facts := {key: info[key] for key in ("dropped", "prompts") if mapping(info.get(key))}:
            return {"trial": info.get("trial"), **facts}
    return {}
