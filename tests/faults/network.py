"""Networks: the connections between the splitter, telemetry and an arm are slow, silent, reset or refused."""

from __future__ import annotations

import random
from pathlib import Path

from tests.faults.fault import ARMS, CANDIDATE, CONTROL, Fault, Live, Moment, Setup, Situation, some_instant
from tests.faults.processes import MANAGED
from tests.faults.relay import FAIR, VARIABLE, Weather, change

WEATHERS = {
    "200 ms more": Weather(delay_s=0.2),
    "a slow reader": Weather(bytes_per_s=3000.0),
    "silence": Weather(held=True),
    "no connection": Weather(refused=True),
    "a reset": Weather(reset=True),
}
_SILENT_S = 60.0  # until health checks, telemetry and final snapshots of a silent arm are given up
_RELAYED = str(Path(__file__).with_name("relay.py"))


class Network(Fault):
    """A weather in front of an arm, which also meets telemetry and health checks."""

    def __init__(self, weather: str, where: str, *, lifted: bool) -> None:
        gone = weather in ("silence", "no connection") and not lifted
        super().__init__(
            name=f"{weather} before {where}",
            hurts=(where,),
            silences=(where,) if gone else (),
            extra_s=0.0 if lifted else _SILENT_S,
        )
        self._weather, self._where = weather, where

    def arrange(self, setup: Setup) -> None:
        """Put a relay in front of every arm; each follows a file of `relays/*.weather`."""
        if _RELAYED not in setup.arm_command:
            setup.arm_command.insert(1, _RELAYED)
        (setup.folder / "relays").mkdir(exist_ok=True)
        setup.environment[VARIABLE] = str(setup.folder / "relays")

    def inject(self, live: Live) -> str:
        return self._change(live, WEATHERS[self._weather])

    def lift(self, live: Live) -> None:
        self._change(live, FAIR)

    def _change(self, live: Live, weather: Weather) -> str:
        relays = [
            path
            for path in (live.setup.folder / "relays").glob("*.weather")
            if (CONTROL if path.name.startswith("eager-") else CANDIDATE) == self._where
        ]
        for path in relays:
            change(path, weather)
        return f"{len(relays)} relays" if relays else ""


def draw(rng: random.Random, situation: Situation) -> Moment | None:
    """Draw a weather once arms exist."""
    if situation.kind not in MANAGED:
        return None
    weather, where = rng.choice(list(WEATHERS)), rng.choice(ARMS)
    phase, after_s = some_instant(rng, situation, "starting arms", "stopping")
    lasts_s: float | None = round(rng.uniform(0.3, 2.0), 1)
    if not (situation.liveness or situation.quick) and rng.random() < 0.5:
        lasts_s = None
    fault = Network(weather, where, lifted=lasts_s is not None)
    return Moment(phase=phase, after_s=after_s, fault=fault, lasts_s=lasts_s)
