"""The one card that a process sees.

Inductor keeps compiled code under the number of its card: an arm that changes places from trial to trial would compile
and tune everything anew, though the cards are alike. In a process that sees its card alone, the number is always 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_VARIABLES = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


def only_card(device: str, environment: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """What `device` is called in a process that sees no other card, and the variable that makes it so.

    Anything but cuda:N stays as it is, and so does a card that `environment` does not show: whoever resolves the name
    says that it is not there.
    """
    match = re.fullmatch(r"cuda:(\d+)", device)
    if match is None:
        return device, {}
    name = next((name for name in _VARIABLES if name in environment), _VARIABLES[-1])
    visible = [card.strip() for card in environment[name].split(",")] if name in environment else None
    card = match[1] if visible is None else dict(enumerate(visible)).get(int(match[1]), "")
    return ("cuda:0", {name: card}) if card else (device, {})
