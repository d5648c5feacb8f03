"""What is to be observed: observed.json in the folder of the records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

OBSERVED = "observed.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What is observed, from `since_ns` on: the splitter's log, its admin address ("" where there is none) and the
    replicas of its arms, {arm: {address: replica}}. A request of `timeout_s` is not waited for any more."""

    log: str
    admin: str
    arms: Mapping[str, Mapping[str, str]]
    timeout_s: float
    since_ns: int
