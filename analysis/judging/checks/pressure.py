"""Whether what was to weigh on the machines did, on every device alike."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.judging.validity import ESTIMATES, Check


def check_pressure(faults: Sequence[str]) -> Check:
    """Arms were pressed as the experiment says. Pressed unequally, a difference between them is the pressure's."""
    shown = "; ".join(faults[:3]) + (f"; and {len(faults) - 3} more" if len(faults) > 3 else "")
    return Check(
        check="pressure",
        ok=not faults,
        value=float(len(faults)),
        limit=0.0,
        reason=f"The arms were not pressed as asked, or not alike: {shown}."
        if faults
        else "What was to weigh on the machines did, on every device.",
        affects=(*ESTIMATES, "goodput"),
        remedy="See the logs of neighbours and tenants in the trial's folder, lower what [pressure] asks for, and run "
        "again.",
    )
