"""What a run says of one arm: its experiment, its trials, and what was measured before and after the traffic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tailgate.analysis.records.plain_values import mapping, number, rows_of
from tailgate.analysis.run.trials import Trial, takes_part


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmAccount:
    """What is said of `arm`. Unknown is None or empty, and nothing is decided."""

    arm: str
    experiment: Mapping[str, Any]
    infos: Sequence[Mapping[str, Any]]  # trial.json of each trial, empty where there is none
    measured_parity: Any  # parity.json
    asked: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)  # answers of an external arm, by trial
    named: Callable[[int], str] = "trial {}".format  # what to call a trial

    @property
    def rows(self) -> list[Mapping[str, Any]]:
        """The arm's own row of each trial."""
        return _rows(self.infos, self.arm)

    @property
    def resolved(self) -> Mapping[str, Any]:
        """The arm's whole configuration as the first trial that has it resolved it; empty where none does."""
        rows = (mapping(row.get("config")) for row in self.rows)
        return next((config for config in rows if config), {})

    @property
    def config(self) -> Mapping[str, Any]:
        """The arm's resolved configuration, else its table in the experiment."""
        rows = (row for row in rows_of(self.experiment.get("arms")) if row.get("name") == self.arm)
        return self.resolved or next(rows, {})

    @property
    def external(self) -> Mapping[str, Any]:
        """What is known of an arm that tailgate did not start: kind, address, model_name; empty for its own arms."""
        rows = [*self.rows, *rows_of(self.experiment.get("arms"))]
        row = next((row for row in rows if row.get("name") == self.arm and row.get("kind")), {})
        kind = row.get("kind")
        return {} if kind in (None, "tailgate") else {**row, **mapping(row.get("external")), "kind": kind}

    @property
    def reports_compiles(self) -> bool:
        """Whether the arm is managed, or external with a log that is searched for compiles."""
        telemetry = mapping(self.external.get("telemetry"))
        return bool(not self.external or telemetry.get("log") or telemetry.get("log_command"))

    @property
    def log_spots(self) -> list[str]:
        """What compiles the arm's logs may leave out, in sentences, each once."""
        spots = []
        for info in self.infos if self.external and self.reports_compiles else ():
            rows = (mapping(row.get("reported")) for row in _rows([info], self.arm))
            logs = [log for row in rows for log in rows_of(row.get("logs"))]
            spots += [str(spot) for log in logs for spot in _listed(log.get("blind_spots"))]
            if takes_part(info, self.arm) and not logs:
                spots.append(f"{self.named(info['trial'])} does not say what its log reported")
        return list(dict.fromkeys(spots))

    @property
    def counts_tokens(self) -> bool:
        """Whether the arm's server reports how many tokens it answered; else `output_tokens` counts pieces."""
        probes = (probe for row in self.rows for probe in rows_of(row.get("probe")))
        return all(probe.get("tokens") is not None for probe in probes)

    @property
    def compiles(self) -> bool:
        """Whether the arm's configuration enables compiling."""
        return bool(mapping(self.config.get("compile")).get("enabled"))

    def replica_names(self, trial: Trial) -> tuple[str, ...]:
        """Return the names of the arm's server processes in trial.json; empty if it names none."""
        return replica_names([trial.info], self.arm)

    @property
    def deaths(self) -> list[Mapping[str, Any]]:
        """The replicas of the arm that died under load."""
        return [row for info in self.infos for row in rows_of(info.get("deaths")) if row.get("arm") == self.arm]

    @property
    def silent(self) -> list[str]:
        """The replicas of the arm that did not die and gave no last word after the traffic of a trial that ended, of
        trials that record last words."""
        if self.external:
            return []
        dead = {row.get("replica") for row in self.deaths}
        ended = [info for info in self.infos if info.get("complete") and isinstance(info.get("final"), Mapping)]
        named = [(info, name) for info in ended for name in replica_names([info], self.arm)]
        return [name for info, name in named if name not in info["final"] and name not in dead]

    @property
    def startups(self) -> list[Mapping[str, Any]]:
        """The arm's start-up in each trial, empty where none is recorded."""
        return [
            mapping(mapping(info.get("startup")).get(self.arm)) for info in self.infos if takes_part(info, self.arm)
        ]

    @property
    def parity(self) -> Mapping[str, Any]:
        """What was measured of the arm's parity with the control before the first trial; empty if nothing was."""
        rows = rows_of(mapping(self.measured_parity).get("arms"))
        return next((row for row in rows if row.get("name") == self.arm), {})

    @property
    def answers(self) -> list[Mapping[str, Any]]:
        """What each replica of the arm answered to the prompts that every arm got after the traffic, trial by trial,
        with the `dtype` of the request; empty without such a request. A trial that ended without the
        answers that the experiment demands has a row with an error."""
        experiment = self.experiment
        served = mapping(experiment.get("parity")).get("served") is True and not experiment.get("compare_models")
        answers: list[Mapping[str, Any]] = []
        for info in self.infos:
            record = mapping(info.get("answers"))
            rows = [row for row in rows_of(record.get("replicas")) if row.get("arm") == self.arm]
            if served and info.get("complete") and takes_part(info, self.arm) and not rows:
                error = f"{self.named(info['trial'])} holds no answers of it"
                rows = [{"arm": self.arm, "replica": self.arm, "error": error, "later": info.get("under_way")}]
            for row in rows:
                replica = row.get("replica") if isinstance(row.get("replica"), str) else None
                counts = {key: int(number(row.get(key)) or 0) for key in ("same", "of")}
                answers.append({**row, "replica": replica, **counts, "dtype": record.get("dtype")})
        return answers

    @property
    def greedy_trials(self) -> list[int]:
        """The trials that say that the external arm was asked what all external arms were."""
        return [int(info["trial"]) for info in self.infos if self.arm in _listed(info.get("asked"))]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def replica_names(infos: Iterable[Mapping[str, Any]], arm: str) -> tuple[str, ...]:
    """Return the distinct names of the arm's server processes in these trials."""
    names = (name for row in _rows(infos, arm) for name in _listed(row.get("replicas")))
    return tuple(dict.fromkeys(map(str, names)))


def _rows(infos: Iterable[Mapping[str, Any]], arm: str) -> list[Mapping[str, Any]]:
    return [row for info in infos for row in rows_of(info.get("arms")) if row.get("name") == arm]
