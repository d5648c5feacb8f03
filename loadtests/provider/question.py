"""What a controller asks about a candidate, from the address or the body of its request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

from servers.fields import ConfigError, span_s

Goal = Literal["step", "promotion"]
GOALS: tuple[Goal, ...] = ("step", "promotion")
ON_INCONCLUSIVE = ("wait", "fail")
KEYS = ("arm", "gate", "for", "window", "inconclusive")
LONGEST_WINDOW_S = 3600.0
_LONGEST_NAME = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Whether `arm` (the only candidate where it is empty) may have more of the traffic (`goal` step), or all of it
    (promotion); with `gate`, what that gate says alone. `inconclusive` fail: what is open counts as FAIL.

    The arm must have had requests in the last `window_s`. Raises ConfigError for anything else than a Question.
    """

    arm: str = ""
    gate: str = ""
    goal: Goal = "promotion"
    window_s: float = 300.0
    inconclusive: str = "wait"

    @classmethod
    def of(cls, given: Mapping[str, str], *, goal: Goal = "promotion") -> Self:
        """The question with these parameters; `goal` where they name none. Keys that are not in KEYS are ignored."""
        for key in ("arm", "gate"):
            if len(given.get(key, "")) > _LONGEST_NAME:
                raise ConfigError(
                    f"{key} has {len(given[key])} characters; the limit is {_LONGEST_NAME}: name one of the run"
                )
        wanted = given.get("for", goal)
        chosen = next((name for name in GOALS if name == wanted), None)
        if chosen is None:
            raise ConfigError(f'for is "{wanted}": give {" or ".join(GOALS)}')
        window_s = span_s(given.get("window", "5m"))
        if window_s is None or not 1.0 <= window_s <= LONGEST_WINDOW_S:
            raise ConfigError(f'window is "{given["window"]}": give 1s to 60m, such as 5m')
        inconclusive = given.get("inconclusive", "wait")
        if inconclusive not in ON_INCONCLUSIVE:
            raise ConfigError(f'inconclusive is "{inconclusive}": give {" or ".join(ON_INCONCLUSIVE)}')
        return cls(
            arm=given.get("arm", ""),
            gate=given.get("gate", ""),
            goal=chosen,
            window_s=window_s,
            inconclusive=inconclusive,
        )
