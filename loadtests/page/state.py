"""The state of a run, as its directory tells it: what is now, and what happened until now."""

from __future__ import annotations

import re
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.records.documents import content_of
from analysis.records.plain_values import CONTROL, mapping, number
from analysis.records.schemas import EVENT_KINDS
from analysis.settings.metrics import METRIC_NAMES, gate_label
from analysis.wording import counted
from loadtests.page.history import History
from loadtests.page.tails import DocumentsTail, TableTail

STATUS, LOAD, LOOKS, WEIGHTS, SEARCH = "status.json", "load.jsonl", "interim.jsonl", "weights.jsonl", "search.jsonl"
PREVIEW = "preview.jsonl"
REPORT, LOCUST_PAGE = "report.html", "locust-page.json"
LOAD_PHASES = ("traffic", "traffic of users", "waiting for the last answers")
CLOSING_PHASES = ("stopping", "comparing answers", "recorded", "stopped")
VERDICTS = ("PASS", "FAIL", "INCONCLUSIVE")
_MOST_LOOKS, _MOST_SAMPLES, _MOST_EVENTS, _MOST_NOTES = 400, 900, 400, 60
_MOST_CHARACTERS = 2000
_PAGE_ADDRESS = re.compile(r"https?://[!-~]{1,500}")
_LONGEST_GAP_S = 60.0
_LONGEST_SILENCE_S = 30.0
_IDLE_NS = 5_000_000_000  # after which an arm's last step says nothing of now

_EVENT_COLUMNS = {
    *("event_id", "trial", "arm", "replica", "kind", "start_ns", "end_ns"),
    *("shape", "reason", "request_ids", "phase", "cache"),
}
_STEP_COLUMNS = {"arm", "replica", "batch", "end_ns"}
_HOST_FIELDS = ("memory_bytes", "memory_limit_bytes", "cpus")
_DEVICE_FIELDS = (
    *("sm_mhz", "power_w", "power_limit_w", "temperature_c", "utilisation_pct", "memory_bytes", "memory_limit_bytes"),
)
_MACHINE_COLUMNS = {
    *("kind", "name", "at_ns", "cpu_s", "steal_s", "throttle", "foreign_processes"),
    *_HOST_FIELDS,
    *_DEVICE_FIELDS,
}
_CALM = {"gpu_idle", "applications_clocks_setting", "display_clock_setting"}


@dataclass(slots=True)
class _Trial:
    """The files of one trial that grow."""

    number: int
    events: TableTail
    steps: TableTail
    machines: TableTail

    @classmethod
    def of(cls, folder: Path) -> _Trial:
        return cls(
            number=int(folder.name.removeprefix("trial-")),
            events=TableTail(folder / "compile_events.arrow", _EVENT_COLUMNS),
            steps=TableTail(folder / "steps.arrow", _STEP_COLUMNS, newest_only=True),
            machines=TableTail(folder / "machines.arrow", _MACHINE_COLUMNS),
        )


@dataclass(slots=True)
class _Compiles:
    """Compiles of one arm until now."""

    warmup: int = 0
    warmup_s: float = 0.0
    serving: int = 0
    serving_s: float = 0.0
    longest_s: float = 0.0
    hit: int = 0


@dataclass(slots=True)
class _Running:
    """How many rows the last step of a replica had."""

    batch: int = 0
    end_ns: int = 0


@dataclass(slots=True)
class _HostCounter:
    """What the host's processors had done at the last sample."""

    at_ns: int
    cpu_s: float | None
    steal_s: float | None


class RunState:
    """What `run_dir` tells. `refresh` reads what is new in it; `whole` and `changes` are what a browser is told.

    Blocks ("run", "now", "look", "search", "compiles", "notes") are told anew when they changed; series ("looks",
    "load", "events", "machines", "weights") as (index, items): from that index on the series is those items. In a
    search for a frontier the looks are at what each arm holds.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._experiment: Mapping[str, Any] = {}
        self._trials: dict[str, _Trial] = {}
        self._looks = DocumentsTail(run_dir / LOOKS)
        self._previews = DocumentsTail(run_dir / PREVIEW)
        self._load = DocumentsTail(run_dir / LOAD)
        self._weights = DocumentsTail(run_dir / WEIGHTS)
        self._searches = DocumentsTail(run_dir / SEARCH)
        self._series = {
            "looks": History(_MOST_LOOKS),
            "load": History(_MOST_SAMPLES),
            "events": History(_MOST_EVENTS, newest=True),
            "machines": History(_MOST_SAMPLES),
            "weights": History(_MOST_LOOKS),
        }
        self._compiles: dict[str, _Compiles] = defaultdict(_Compiles)
        self._running: dict[tuple[str, str], _Running] = defaultdict(_Running)
        self._counters: dict[str, _HostCounter] = {}
        self._look: dict[str, Any] = {}
        self._search: dict[str, Any] | None = None
        self._tried: set[str] = set()  # arms of all trials of a search
        self._blocks: dict[str, Any] = {}
        self._sent: dict[str, Any] = {}  # what was told last of each block

    @property
    def wants_preview(self) -> bool:
        """Whether traffic flows in a run that nobody looks at before its end."""
        return self._is_judged_once and self._blocks.get("now", {}).get("state") == "load"

    @property
    def _is_judged_once(self) -> bool:
        """Whether the run is judged at its end alone. A search judges nothing."""
        traffic, gates = mapping(self._experiment.get("traffic")), mapping(self._experiment.get("gates"))
        return gates.get("sequential") is not True and traffic.get("arrivals") != "saturation"

    def refresh(self) -> None:
        """What the files say now is known."""
        if not self._experiment:
            with suppress(OSError, ValueError):
                self._experiment = tomllib.loads((self._run_dir / "experiment.toml").read_text(encoding="utf-8"))
        status = content_of(self._run_dir / STATUS)
        for folder in sorted(self._run_dir.glob("trial-[0-9]*")):
            if folder.name not in self._trials and folder.name.removeprefix("trial-").isdecimal():
                self._trials[folder.name] = _Trial.of(folder)
        current = _whole(status.get("trial")) or 1
        for trial in self._trials.values():
            if trial.number >= current - 1 or "now" not in self._blocks:
                self._read_trial(trial)
        self._series["load"].add(self._load.new())
        self._series["weights"].add(map(_weights, self._weights.new()))
        self._take_looks()
        self._take_searches()
        self._blocks = {
            "run": self._run(),
            "now": self._now(status, current),
            "look": self._look,
            "search": self._search,
            "compiles": {
                arm: {name: round(getattr(seen, name), 3) for name in _Compiles.__slots__}
                for arm, seen in self._compiles.items()
            },
            "notes": [_text(note) for note in _list(status.get("notes"))[-_MOST_NOTES:]],
        }

    def whole(self) -> dict[str, Any]:
        """All that is known, for a browser that was told nothing yet."""
        series = {name: [0, history.items] for name, history in self._series.items()}
        return {**self._blocks, "series": series}

    def changes(self) -> dict[str, Any]:
        """What changed since the last call."""
        blocks = {name: block for name, block in self._blocks.items() if self._sent.get(name) != block}
        self._sent = dict(self._blocks)
        changed = {name: history.take_changes() for name, history in self._series.items()}
        return {**blocks, "series": {name: change for name, change in changed.items() if change is not None}}

    def _read_trial(self, trial: _Trial) -> None:
        self._series["events"].add(filter(None, map(self._event, trial.events.new())))
        for row in trial.steps.new():
            self._running[_text(row.get("arm")), _text(row.get("replica"))] = _Running(
                batch=_whole(row.get("batch")) or 0, end_ns=_whole(row.get("end_ns")) or 0
            )
        self._series["machines"].add(self._samples(trial.machines.new()))

    def _event(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """A compile while serving; those of the warm-up are counted alone."""
        start, end = _whole(row.get("start_ns")) or 0, _whole(row.get("end_ns")) or 0
        seconds, seen = max(0.0, (end - start) / 1e9), self._compiles[_text(row.get("arm"))]
        if row.get("phase") != "serving":
            seen.warmup += 1
            seen.warmup_s += seconds
            return None
        hit = len(_list(row.get("request_ids")))
        seen.serving += 1
        seen.serving_s += seconds
        seen.longest_s = max(seen.longest_s, seconds)
        seen.hit += hit
        kind = _text(row.get("kind"))
        words = {name: _text(row.get(name)) for name in ("event_id", "arm", "replica", "shape", "reason", "cache")}
        return {
            **words,
            "kind": EVENT_KINDS.get(kind, kind),
            "trial": row.get("trial"),
            "at_ns": start,
            "seconds": round(seconds, 4),
            "hit": hit,
        }

    def _samples(self, rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """What the machines did at each time they were looked at."""
        samples: dict[int, dict[str, Any]] = {}
        for row in rows:
            at_ns, name = _whole(row.get("at_ns")), _text(row.get("name"))
            kind = row.get("kind")
            if at_ns is None or kind not in ("host", "device"):
                continue
            seen = self._host(row, at_ns) if kind == "host" else _device(row)
            samples.setdefault(at_ns, {})[name] = {"kind": kind, **seen}
        return [{"at_ns": at_ns, "things": things} for at_ns, things in sorted(samples.items())]

    def _host(self, row: Mapping[str, Any], at_ns: int) -> dict[str, Any]:
        name, cpus = _text(row.get("name")), number(row.get("cpus")) or 1.0
        before = self._counters.get(name)
        now = _HostCounter(at_ns=at_ns, cpu_s=number(row.get("cpu_s")), steal_s=number(row.get("steal_s")))
        self._counters[name] = now
        spent_s = (at_ns - before.at_ns) / 1e9 if before is not None else 0.0
        shares: dict[str, float | None] = {"busy_pct": None, "steal_pct": None}
        if before is not None and 0.05 < spent_s < _LONGEST_GAP_S:
            shares["busy_pct"] = _share(before.cpu_s, now.cpu_s, spent_s * cpus)
            shares["steal_pct"] = _share(before.steal_s, now.steal_s, spent_s * cpus)
        return {**shares, **{key: number(row.get(key)) for key in _HOST_FIELDS}}

    def _take_looks(self) -> None:
        """Every look is in the series, and the newest one whole."""
        slim = []
        looks = [(look, True) for look in self._looks.new()] + [(look, False) for look in self._previews.new()]
        for look, decides in looks:
            gates = [_gate(gate) for gate in _tables(look.get("gates"))]
            arms = {_text(name): _decision(arm) for name, arm in mapping(look.get("arms")).items()}
            if not decides:
                for row in (*gates, *arms.values()):
                    row |= dict.fromkeys(row.keys() & {"decision", "decided_s", "outlook_s"})
            self._look = {
                "look": _whole(look.get("number")),
                "seconds": number(look.get("seconds")),
                "groups": _whole(look.get("groups")),
                "sequential": look.get("sequential") is True,
                "decides": decides,
                "arms": arms,
                "gates": gates,
                "checks": [_check(check) for check in _tables(look.get("checks"))],
            }
            slim.append(
                {
                    "at_ns": _whole(look.get("at_ns")),
                    "seconds": self._look["seconds"],
                    "gates": [[gate[key] for key in ("arm", "gate", "value", "low", "high")] for gate in gates],
                }
            )
        self._series["looks"].add(slim)

    def _take_searches(self) -> None:
        """What each arm holds is in the series whenever it was told, and the newest told whole."""
        slim = []
        for line in self._searches.new():
            tried = [_text(arm) for arm in _list(line.get("arms"))]
            self._tried.update(tried)
            stop = _text(line.get("stop"))
            held = [_held(row, tried, self._tried, stop) for row in _tables(line.get("held"))]
            self._search = {
                "at_ns": _whole(line.get("at_ns")),
                "trial": _whole(line.get("trial")),
                "arms": tried,
                "rates": [rate for rate in map(number, _list(line.get("rates"))) if rate is not None],
                "stop": stop,
                "held": held,
                **{key: number(line.get(key)) for key in ("spent_s", "budget_s")},
            }
            gates = [[row[key] for key in ("arm", "gate", "value", "low", "high")] for row in held]
            slim.append({"at_ns": self._search["at_ns"], "seconds": self._search["spent_s"], "gates": gates})
        self._series["looks"].add(slim)

    def _run(self) -> dict[str, Any]:
        """What stands from the start."""
        traffic, gates = mapping(self._experiment.get("traffic")), mapping(self._experiment.get("gates"))
        arms = [
            {
                "name": _text(arm.get("name")),
                "preset": _text(arm.get("preset")),
                "control": arm.get("control") is True,
                "weight": _whole(arm.get("weight")),
            }
            for arm in _tables(self._experiment.get("arms"))
        ]
        return {
            "name": _text(self._experiment.get("name")) or self._run_dir.name,
            "id": self._run_dir.name,
            "arms": sorted(arms, key=lambda arm: not arm["control"]),
            "design": _text(traffic.get("design")),
            "max_lag_ms": number(gates.get("max_generator_lag_ms")),
            "judged_once": self._is_judged_once,
            "metrics": {name: METRIC_NAMES[name] for name in ("ttft", "e2e")},
        }

    def _now(self, status: Mapping[str, Any], current: int) -> dict[str, Any]:
        load = mapping(status.get("load"))
        at_ns = _whole(status.get("at_ns"))
        running: dict[str, int] = {}
        for (arm, _), step in self._running.items():
            is_new = at_ns is not None and at_ns - step.end_ns < _IDLE_NS
            running[arm] = running.get(arm, 0) + (step.batch if is_new else 0)
        ended = self._ended(status)
        return {
            "at_ns": at_ns,
            "began_ns": _whole(status.get("began_ns")),
            "state": "ended" if ended else _state(_text(status.get("phase")), number(load.get("t_s")) or 0.0),
            "phase": _text(status.get("phase")),
            "detail": _text(status.get("detail")),
            "trial": current,
            "trials": _whole(status.get("trials")) or 1,
            "duration_s": number(status.get("duration_s")),
            "planned": _whole(status.get("planned")),
            "t_s": number(load.get("t_s")),
            "finished": _whole(load.get("finished")),
            "failed": _whole(load.get("failed")),
            "replicas": [
                {
                    "name": _text(name),
                    "stage": _text(replica.get("stage")),
                    "text": _text(replica.get("text")),
                    "compiles": _whole(replica.get("compiles")),
                    "compiling": _compiling(replica.get("compiling")),
                }
                for name, replica in mapping(status.get("replicas")).items()
                if isinstance(replica, Mapping)
            ],
            "running": running,
            "lag_ms": self._lag_ms(current),
            "decided": self._decided(),
            "locust_page": self._locust_page(),
            "silent_s": None if ended else self._silent_s(),
            "ended": ended,
        }

    def _silent_s(self) -> int | None:
        """For how many seconds the run has said nothing, where that is long: it says something each second."""
        try:
            silent_s = time.time() - (self._run_dir / STATUS).stat().st_mtime
        except OSError:
            return None
        return int(silent_s) if silent_s > _LONGEST_SILENCE_S else None

    def _locust_page(self) -> str:
        """Where Locust's own page of this run's load is; empty where there is none."""
        url = content_of(self._run_dir / LOCUST_PAGE).get("url")
        return url if isinstance(url, str) and _PAGE_ADDRESS.fullmatch(url) else ""

    def _lag_ms(self, current: int) -> float | None:
        """The 99th percentile of how late the load itself was, of the worst load process."""
        late = []
        for path in (self._run_dir / f"trial-{current:02d}").glob("generator-[0-9]*.json"):
            late.append(number(mapping(content_of(path).get("lag_ms")).get("p99")))
        return max((ms for ms in late if ms is not None), default=None)

    def _decided(self) -> str | None:
        """What the looks have decided for good of all arms that are judged: FAIL of one is FAIL of all."""
        controls = {_text(arm.get("name")) for arm in _tables(self._experiment.get("arms")) if arm.get("control")}
        decisions = [arm["decision"] for name, arm in self._look.get("arms", {}).items() if name not in controls]
        if "FAIL" in decisions:
            return "FAIL"
        return "PASS" if decisions and set(decisions) == {"PASS"} else None

    def _ended(self, status: Mapping[str, Any]) -> dict[str, Any] | None:
        """How the run ended, with its verdict where it has one; None while it goes on."""
        ended = status.get("ended")
        if not isinstance(ended, Mapping):
            return None
        judged = judged_folder(self._run_dir)
        has_report = (judged / REPORT).exists()
        summary = content_of(judged / "summary.json") if has_report else {}
        verdict = summary.get("overall")
        return {
            "report": has_report,
            "verdict": verdict if verdict in VERDICTS else None,
            "headline": _text(summary.get("headline")),
            "error": _text(ended.get("error")),
            "interrupted": ended.get("interrupted") is True,
        }


def judged_folder(run_dir: Path) -> Path:
    """Where the report of the run is: in its own directory, or beside it where it was judged together with others."""
    name = mapping(content_of(run_dir / STATUS).get("ended")).get("judged")
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        return run_dir
    return run_dir.parent / name


def _held(row: Mapping[str, Any], now: list[str], tried: set[str], stop: str) -> dict[str, Any]:
    """What one arm holds, as a tile shows it. Arms in `now` are in a trial; those in `tried` are, or were."""
    arm, left = _text(row.get("arm")), _text(row.get("left"))
    starts, steps = (_whole(row.get(key)) or 0 for key in ("starts", "steps"))
    low, high = number(row.get("low_rps")), number(row.get("high_rps"))
    said = [f"it surely holds {low:.3g} requests/s"] if low is not None else []
    said += [f"surely nothing above {high:.3g}"] if high is not None else []
    known = " and ".join(said).capitalize() or "Nothing is sure yet"
    started = starts > 0 or arm in tried
    standing = ("tried" if stop else "waits") if started else ("not tried" if stop else "not tried yet")
    return {
        "arm": arm,
        "gate": "holds",
        "label": arm,
        "unit": "rps",
        "verdict": None,
        "standing": "left" if left else "tried now" if arm in now else standing,
        "reason": f"{known}, after {counted(starts, 'judged start')} with {counted(steps, 'judged step')}."
        + (f" It left the search: it {left}." if left else ""),
        **{"limit": None, "value": number(row.get("seen_rps")), "low": low, "high": high},
    }


def _share(before_s: float | None, now_s: float | None, of_s: float) -> float | None:
    """How much of the time a counter of seconds rose by, in percent."""
    if before_s is None or now_s is None or now_s < before_s:
        return None
    return round(min(100.0, 100.0 * (now_s - before_s) / of_s), 1)


def _state(phase: str, t_s: float) -> str:
    """Which part of a run the phase belongs to, `t_s` seconds after the first traffic of the trial."""
    if phase in LOAD_PHASES:
        return "load"
    if phase == "judging":
        return "judging"
    # Machines are measured before the traffic and after it, under one name.
    return "closing" if phase in CLOSING_PHASES or t_s > 0 else "starting"


def _gate(gate: Mapping[str, Any]) -> dict[str, Any]:
    name = _text(gate.get("gate"))
    numbers = ("limit", "value", "low", "high", "decided_s", "outlook_s", "harm", "safety", "needed", "needed_safety")
    return {
        "arm": _text(gate.get("arm")),
        "gate": name,
        "label": gate_label(name),
        "unit": _text(gate.get("unit")),
        "verdict": verdict if (verdict := gate.get("verdict")) in VERDICTS else None,
        "reason": _text(gate.get("reason")),
        **{key: number(gate.get(key)) for key in numbers},
    }


def _compiling(value: object) -> dict[str, Any] | None:
    """What a replica compiles since when; None where it does not."""
    table = mapping(value)
    start_ns = _whole(table.get("start_ns"))
    words = {key: _text(table.get(key)) for key in ("arm", "shape")}
    return None if start_ns is None else {**words, "start_ns": start_ns}


def _decision(arm: object) -> dict[str, Any]:
    table = mapping(arm)
    decision = table.get("decision")
    return {
        "decision": decision if decision in VERDICTS else None,
        "reason": _text(table.get("reason")),
        **{key: number(table.get(key)) for key in ("decided_s", "outlook_s")},
    }


def _check(check: Mapping[str, Any]) -> dict[str, Any]:
    words = {key: _text(check.get(key)) for key in ("check", "arm", "reason", "remedy")}
    shown = {key: number(check.get(key)) for key in ("value", "limit")}
    return {**words, **shown, "ok": check.get("ok") is True}


def _weights(line: Mapping[str, Any]) -> dict[str, Any]:
    weights = {_text(arm): number(weight) for arm, weight in mapping(line.get("weights")).items()}
    return {"at_ns": _whole(line.get("at_ns")), "weights": weights, "why": _text(line.get("why"))}


def _device(row: Mapping[str, Any]) -> dict[str, Any]:
    throttle = [_text(reason) for reason in _list(row.get("throttle")) if reason not in _CALM]
    numbers = {key: number(row.get(key)) for key in _DEVICE_FIELDS}
    return {**numbers, "throttle": throttle, "foreign": number(row.get("foreign_processes"))}


def _text(value: object) -> str:
    """The text as it can be shown, not longer than a page has room for; empty for anything else."""
    return CONTROL.sub("", value)[:_MOST_CHARACTERS] if isinstance(value, str) else ""


def _whole(value: object) -> int | None:
    known = number(value)
    return None if known is None else int(value)  # type: ignore[call-overload, no-any-return]


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _tables(value: object) -> list[Mapping[str, Any]]:
    return [row for row in _list(value) if isinstance(row, Mapping)]
