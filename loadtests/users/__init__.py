"""Production traffic from the splitter's access log: follow it, record it, account for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

OBSERVED = "observed.json"  # in the folder of the records


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What is observed from `since_ns` on: a log from byte `log_at`, the admin address of its splitter ("": none) and
    the replicas of its arms, {arm: {address: replica}}. A request of `timeout_s` is not waited for any more."""

    log: str
    log_at: int = 0
    admin: str
    arms: Mapping[str, Mapping[str, str]]
    timeout_s: float
    since_ns: int
