"""The programs that stand in for an arm of a run where a fault wants another than the paced fake."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.faults.fault import Setup
from tests.faults.relayed_arm import VARIABLE

_TESTS = Path(__file__).resolve().parents[1]
_RELAYED = str(_TESTS / "faults" / "relayed_arm.py")


def relays(setup: Setup) -> Path:
    """The folder in which each relay of the run says where it takes orders."""
    return setup.folder / "relays"


def let_lie(setup: Setup, replica: str, lie: str) -> None:
    """The replica lies."""
    _default(setup)
    setup.arm_command[-1] = str(_TESTS / "fakes" / "lying_arm.py")
    setup.arm_flags += ["--lie", f"{replica}={lie}"]


def reach_by_relay(setup: Setup) -> None:
    """Every arm is reached through a relay of its own."""
    _default(setup)
    if _RELAYED not in setup.arm_command:
        setup.arm_command.insert(1, _RELAYED)
    relays(setup).mkdir(exist_ok=True)
    setup.environment[VARIABLE] = str(relays(setup))


def _default(setup: Setup) -> None:
    setup.arm_command = setup.arm_command or [sys.executable, str(_TESTS / "fakes" / "arm.py")]
