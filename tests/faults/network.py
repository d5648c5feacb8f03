"""Networks: what lies between clients, the splitter and an arm is slow, silent, cut or gone."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from servers.splitter.admin import Admin, SplitterError
from tests.faults import arms, splitter_faults
from tests.faults.fault import CANDIDATE, CONTROL, Fault, Kind, Live, Moment, Setup, Situation, some_instant
from tests.faults.relay import FAIR, Weather, order

ARMS = (CONTROL, CANDIDATE)
SPLITTER = "splitter"
# None: one reset of all connections.
WEATHERS: dict[str, Weather | None] = {
    "200 ms more": Weather(delay_s=0.2),
    "a slow reader": Weather(bytes_per_s=3000.0),
    "silence": Weather(held=True),
    "no connection": Weather(refused=True),
    "a reset": None,
}
# By Envoy's own filter.
FILTERED = {"delay": 100, "abort": 30}
# Whoever asks an arm that is silent gives up after a while: health checks, telemetry, the last words.
_SILENT_S = 60.0
_KINDS: tuple[Kind, ...] = ("run", "until-decided", "ramp", "workers", "remote worker")


@dataclass(frozen=True)
class Network(Fault):
    """A weather in front of an arm, or of the splitter. Its telemetry and its health checks pass there too."""

    weather: str
    where: str
    lifted: bool

    @property
    def name(self) -> str:
        """Such as "silence before candidate"."""
        return f"{self.weather} before {self.where}"

    @property
    def hurts(self) -> frozenset[str]:
        """The arm, or both behind the splitter."""
        return frozenset(ARMS if self.where == SPLITTER else (self.where,))

    @property
    def silences(self) -> frozenset[str]:
        """The arm that nobody reaches any more."""
        gone = self.weather in ("silence", "no connection") and not self.lifted and self.where != SPLITTER
        return frozenset({self.where} if gone else ())

    @property
    def extra_s(self) -> float:
        """Whoever waits for an answer gives up."""
        return 0.0 if self.lifted else _SILENT_S

    def arrange(self, setup: Setup) -> None:
        """Relays are there."""
        arms.reach_by_relay(setup)
        if self.where == SPLITTER:
            setup.prelude = "from tests.faults import splitter_faults; splitter_faults.install()"

    def inject(self, live: Live) -> str:
        """The weather is so."""
        return self._order(live, WEATHERS[self.weather])

    def lift(self, live: Live) -> None:
        """The weather is fair again."""
        self._order(live, FAIR)

    def _order(self, live: Live, weather: Weather | None) -> str:
        reached = 0
        for path in sorted(arms.relays(live.setup).glob("*.relay")):
            if _place(path) == self.where:
                with suppress(OSError, ValueError):  # it went with its arm, or is not up yet
                    order(int(path.read_text()), weather)
                    reached += 1
        return f"{reached} relays" if reached else ""


@dataclass(frozen=True)
class Filtered(Fault):
    """Envoy delays, or refuses, a share of an arm's requests itself."""

    what: str
    arm: str

    @property
    def name(self) -> str:
        """Such as "abort by the splitter before control"."""
        return f"{self.what} by the splitter before {self.arm}"

    @property
    def hurts(self) -> frozenset[str]:
        """The arm."""
        return frozenset({self.arm})

    def arrange(self, setup: Setup) -> None:
        """The splitter has the filter."""
        arms.reach_by_relay(setup)
        setup.prelude = "from tests.faults import splitter_faults; splitter_faults.install()"

    def inject(self, live: Live) -> str:
        """So many percent are hit from now on."""
        return self._modify(live, FILTERED[self.what])

    def lift(self, live: Live) -> None:
        """None is."""
        self._modify(live, 0)

    def _modify(self, live: Live, percent: int) -> str:
        folder = live.run_dir()
        for path in () if folder is None else folder.glob("trial-*/envoy-admin.txt"):
            with suppress(OSError, SplitterError, LookupError):
                admin = Admin(path.read_text().strip())
                names = [name for name in _clusters(admin) if (name == "eager") == (self.arm == CONTROL)]
                admin.post(f"/runtime_modify?{splitter_faults.key(names[0], self.what)}={percent}")
                return f"{percent} % of {names[0]}"
        return ""


def _clusters(admin: Admin) -> list[str]:
    names = {line.split("::")[0] for line in admin.get("/clusters").splitlines() if "::" in line}
    return sorted(name for name in names if "@" not in name)


def _place(path: Path) -> str:
    if path.name == splitter_faults.RELAY:
        return SPLITTER
    return CONTROL if path.name.startswith("eager-") else CANDIDATE


def draw(rng: random.Random, situation: Situation) -> Moment | None:
    """A weather, or the splitter's own doing, once arms are there."""
    if situation.kind not in _KINDS:
        return None
    filtered, what = rng.random() < 0.25, rng.choice(list(FILTERED))
    weather, where = rng.choice(list(WEATHERS)), rng.choice((*ARMS, SPLITTER))
    first = "starting arms" if where != SPLITTER and not filtered else "starting the load"
    phase, after_s = some_instant(rng, situation, first, "stopping")
    lasts_s: float | None = round(rng.uniform(0.3, 2.0), 1)
    if not (situation.liveness or situation.quick) and rng.random() < 0.5:
        lasts_s = None
    fault: Fault = Network(weather, where, lifted=lasts_s is not None)
    if filtered:
        fault = Filtered(what, CANDIDATE if where == SPLITTER else where)
    return Moment(phase=phase, after_s=after_s, fault=fault, lasts_s=lasts_s)
