"""The one card that a process sees.

Inductor keeps compiled code under the number of its card: an arm that changes places from trial to trial would compile
and tune everything anew, though the cards are alike. In a process that sees its card alone, the number is always 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_VARIABLES = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


def only_card(device: str, environment: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """What `device` is called in a process that sees no other card, and the variables that make it so.

    Each of them that is set is narrowed: which one counts depends on whose card it is. An arm on the processor sees no
    card: torch's compiler asks for the state of every card that it sees, which takes half a gigabyte on the first one,
    beside whatever is measured there. Anything else stays as it is, and so does a card that `environment` does not
    show: whoever resolves the name says that it is not there.
    """
    if device == "cpu":
        return device, dict.fromkeys(_VARIABLES, "")
    match = re.fullmatch(r"cuda:(\d+)", device)
    if match is None:
        return device, {}
    number = int(match[1])
    shown = {name: environment[name].split(",") for name in _VARIABLES if name in environment}
    if not shown:
        return "cuda:0", {_VARIABLES[-1]: str(number)}
    narrowed = {name: cards[number].strip() for name, cards in shown.items() if number < len(cards)}
    return ("cuda:0", narrowed) if all(narrowed.values()) and narrowed else (device, {})
