"""Runs of one experiment as one run: whether they may be judged together, and what each trial and request is called
then.

Trials stay what they are, each from a fresh start; they are numbered anew in order of time, those that were planned and
are missing included. Ids are unique within a run only, so each gets the place of its run in front: "2.1-17-eager".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from analysis.records.arrow import integers
from analysis.records.plain_values import first_of, mapping, number, rows_of, table
from analysis.records.schemas import RUN_HOST
from analysis.records.tables import RecordError

_MOST_PLANNED = 1000  # trials of one run
_MOST_SHOWN = 120  # characters of a value that is repeated to the user
_MOST_NAMED = 12  # differences of one run

# Settings that change nothing of what is measured, as keys or as tables: where and how often, not what.
_MAY_DIFFER = (
    *("name", "seed", "bed", "rollout", "trials.count", "trials.ready_timeout_s"),
    *("splitter.port", "splitter.admin_port", "splitter.access_log"),
    *("traffic.workers", "traffic.remote_workers", "traffic.master_bind"),
)
# Runs that differ in these are no trials of one experiment, whatever is accepted.
_MUST_AGREE = ("arms", "control", "traffic.design", "loop")
_FILES = ("trace", "conversations")  # another host has them elsewhere: name and content count
_SECRETS = ("tls_certificate", "tls_key", "tls_client_ca", "tls_ca", "token_file", "token_env")  # only whether
_VERSIONS = ("tailgate", "torch", "transformers", "triton")
_KNOWN_BEFORE = ("arms", "stalling_kinds")  # of a trial's facts, where it has not begun
_PARITY_ORDER = ("FAIL", "INCONCLUSIVE", "PASS")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDocuments:
    """What a run says of itself, before its tables are read."""

    directory: Path
    name: str  # of the directory, with as much of its path as tells it from the others
    experiment: Mapping[str, Any]
    environment: Mapping[str, Any]
    parity: Mapping[str, Any] | None
    folders: tuple[Path, ...]  # of its trials
    numbers: tuple[int, ...]  # of each folder's trial
    infos: tuple[Mapping[str, Any] | None, ...]  # of each folder
    search: dict[str, Any] | None = None

    @property
    def starts_ns(self) -> dict[int, int]:
        """When each trial started, without those that do not say."""
        known = zip(self.numbers, (number(mapping(info).get("start_ns")) for info in self.infos), strict=True)
        return {trial: int(start) for trial, start in known if start is not None and 0 < start < 1 << 63}

    @property
    def seed(self) -> str:
        """The seed of its schedules."""
        return str(self.experiment.get("seed"))

    @property
    def machine(self) -> str:
        """The identity of the machine that it ran on; empty where it is not recorded."""
        beds = (
            mapping(mapping(mapping(mapping(info).get("bed")).get("machines")).get(RUN_HOST)) for info in self.infos
        )
        found = self.environment.get("machine") or first_of(beds, "machine")
        return found if isinstance(found, str) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedRun:
    """One of the runs that are judged together, or the only one."""

    documents: RunDocuments
    place: int  # among the runs in order of time, from 1; 0 for a run that is judged by itself
    trials: Mapping[int, int]  # the number that each of its trials has among all; those that are missing included
    unknown: int  # the number of every trial that it does not have

    def with_own_names(self, rows: pa.Table) -> pa.Table:
        """The rows of one of its tables, with the trials' numbers among all and with ids that no other run has."""
        if not self.place:
            return rows
        given = integers(rows.column("trial"), -1)
        for name in _IDS:
            if name in rows.column_names:
                column = rows.column(name)
                renamed = self._events(column, given) if name == "event_id" else self._renamed(column)
                rows = rows.set_column(rows.schema.get_field_index(name), rows.schema.field(name), renamed)
        numbers = np.full(len(given), self.unknown, dtype=np.int32)
        for own in np.unique(given).tolist():
            numbers[given == own] = self.trials.get(own, self.unknown)
        index = rows.schema.get_field_index("trial")
        return rows.set_column(index, rows.schema.field(index), pa.array(numbers, rows.schema.field(index).type))

    def _renamed(self, column: pa.ChunkedArray) -> Any:
        """Ids, or lists of them, with the place of the run in front; null stays null."""
        front = f"{self.place}."
        if pa.types.is_list(column.type):
            lists = column.to_pylist()
            return pa.array([ids and [name and front + name for name in ids] for ids in lists], column.type)
        return pc.binary_join_element_wise(front, column, "")

    def _events(self, column: pa.ChunkedArray, trials: Any) -> pa.Array:
        """The ids of events. One that begins with its trial's number, as those of a replica that counts them, begins
        with the number among all."""
        names = column.to_pylist()
        for row, (name, trial) in enumerate(zip(names, trials.tolist(), strict=True)):
            joined = self.trials.get(trial, self.unknown)
            own = f"{trial}-"
            if name is not None:
                names[row] = f"{joined}-{name.removeprefix(own)}" if name.startswith(own) else f"{self.place}.{name}"
        return pa.array(names, column.type)


_IDS = ("request_id", "session_id", "pair_id", "request_ids", "event_id")


def one_run(documents: RunDocuments) -> JoinedRun:
    """The run as it is judged by itself: everything keeps its name."""
    return JoinedRun(documents=documents, place=0, trials={item: item for item in documents.numbers}, unknown=0)


def joined_runs(runs: Sequence[RunDocuments]) -> tuple[JoinedRun, ...]:
    """The runs in order of time, with a number for each trial that they have or planned."""
    ordered = sorted(runs, key=lambda run: (min(run.starts_ns.values(), default=0), run.name))
    moments: list[tuple[int, int, int]] = []
    for place, run in enumerate(ordered):
        # One that does not say when it started stays behind the one before it.
        start = min(run.starts_ns.values(), default=0)
        for trial in sorted({*run.numbers, *range(1, _planned(run) + 1)}):
            start = run.starts_ns.get(trial, start)
            moments.append((start, place, trial))
    numbers: list[dict[int, int]] = [{} for _ in ordered]
    for joined, (_, place, trial) in enumerate(sorted(moments), start=1):
        numbers[place][trial] = joined
    return tuple(
        JoinedRun(documents=run, place=place, trials=own, unknown=len(moments) + place)
        for place, (run, own) in enumerate(zip(ordered, numbers, strict=True), start=1)
    )


def _planned(run: RunDocuments) -> int:
    count = table(run.experiment, "trials").get("count")
    return min(count, _MOST_PLANNED) if isinstance(count, int) else 0


def names_of(directories: Sequence[Path]) -> list[str]:
    """A name for each directory: its own, with as much of its path in front as tells it from the others."""
    paths = [directory.resolve().parts for directory in directories]
    depth = 1
    while depth < max(map(len, paths)) and len({parts[-depth:] for parts in paths}) < len(paths):
        depth += 1
    return ["/".join(parts[-depth:]) for parts in paths]


# --- Whether they may be joined ---------------------------------------------------------------------------------------


def check_joinable(runs: Sequence[RunDocuments], accepted: Sequence[str] = ()) -> tuple[str, ...]:
    """The runs are trials of one experiment but for what is `accepted`: keys, or tables of keys. Returns the
    differences that were accepted, in words. Otherwise RecordError, which names what differs."""
    for run in runs:
        if not run.experiment:
            raise RecordError(f"{run.name} has no experiment.toml, so what it ran is unknown: give another run")
        if not any(run.infos):
            raise RecordError(f"{run.name} holds no trial with a trial.json: give another run")
    _check_apart(runs)
    return _agreeing(runs, accepted)


def check_next(runs: Sequence[RunDocuments], coming: RunDocuments, accepted: Sequence[str] = ()) -> None:
    """A run that has not begun yet will be one of the same experiment as `runs`, as far as experiments, machines and
    what each says of its arms before it begins tell. Otherwise RecordError."""
    begun = tuple({key: info[key] for key in _KNOWN_BEFORE if key in info} for info in runs[0].infos if info)
    _agreeing((replace(runs[0], infos=begun), coming), accepted)


def _agreeing(runs: Sequence[RunDocuments], accepted: Sequence[str]) -> tuple[str, ...]:
    """The differences between the runs, all of them accepted, in words. Otherwise RecordError."""
    first = runs[0]
    refused: list[str] = []
    allowed: list[str] = []
    keys: dict[str, None] = {}
    for place, run in enumerate(runs[1:], start=1):
        differing = _differences(first, run)
        for earlier in runs[1:place]:
            # An arm that no trial of the first run had is held to the first run that had it.
            late = tuple(f"arms.{name}" for name in started_arms(earlier) - started_arms(first))
            differing |= {key: pair for key, pair in _differences(earlier, run).items() if _is_among(key, late)}
        if never := [key for key in differing if key in _MUST_AGREE]:
            words = _in_words(differing, never, first.name)
            raise RecordError(
                f"{run.name} and {first.name} are no trials of one experiment: {words}: leave {first.name} out, or run "
                "the experiment that it ran"
            )
        if wrong := [key for key in differing if not _is_among(key, accepted)]:
            keys |= dict.fromkeys(wrong)
            refused.append(f"{run.name} differs from {first.name} in {_in_words(differing, wrong, first.name)}")
        allowed += [f"{run.name}: {_in_words(differing, [key], first.name)}" for key in differing if key not in wrong]
    if refused:
        raise RecordError(
            f"{'; '.join(refused)}: join runs of one experiment on one kind of machine, or accept what differs with "
            f"--allow-different {','.join(keys)}"
        )
    return tuple(allowed)


def _in_words(differing: Mapping[str, tuple[Any, Any]], keys: Sequence[str], there: str) -> str:
    """The differences in `keys`, with the value in the run called `there` in brackets."""
    pairs = [(key, *differing[key]) for key in keys[:_MOST_NAMED]]
    named = ", ".join(f"{key} {shown(own)} (in {there} {shown(base)})" for key, base, own in pairs)
    return named + (f" and {len(keys) - _MOST_NAMED} more" if len(keys) > _MOST_NAMED else "")


def check_known(runs: Sequence[RunDocuments], names: Sequence[str]) -> None:
    """Each of `names` is a setting of one of the runs, or a table of settings. Otherwise RecordError."""
    settings = {key for run in runs for key in settings_of(run, started_arms(run))}
    for name in names:
        if not any(_is_among(key, (name,)) for key in settings):
            raise RecordError(f'no run has a setting "{name}" in which it could differ: leave it out, or see its name')


def _check_apart(runs: Sequence[RunDocuments]) -> None:
    """No two of the runs are one: the seed and the start of a trial are its identity."""
    seen: dict[tuple[str, int], str] = {}
    for run in runs:
        for start in run.starts_ns.values():
            owner = seen.setdefault((run.seed, start), run.name)
            if owner != run.name:
                raise RecordError(f"{run.name} and {owner} hold the same trial, of one start and seed: leave one out")


def _is_among(key: str, names: Sequence[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _differences(first: RunDocuments, other: RunDocuments) -> dict[str, tuple[Any, Any]]:
    """The keys in which two runs differ, with the value of each. Of an arm that only one of them started the tables of
    the experiments count."""
    both = started_arms(first) & started_arms(other)
    one, two = settings_of(first, both), settings_of(other, both)
    if first.search is not None or other.search is not None:
        # The trials of a search last as long as it decides.
        one, two = (settings | {"traffic.duration_s": None} for settings in (one, two))
    keys = [key for key in sorted({*one, *two}) if one.get(key) != two.get(key) and not _is_among(key, _MAY_DIFFER)]
    # What all arms share is said once.
    shared = {key for key in keys if key.startswith(("model.", "engine."))}
    kept = [key for key in keys if not (key.startswith("arms.") and _in_arm(key) in shared)]
    return {key: (one.get(key), two.get(key)) for key in kept}


def _in_arm(key: str) -> str:
    """The key without its arm: "model.dtype" of "arms.eager.model.dtype"."""
    return key.split(".", 2)[-1]


def started_arms(run: RunDocuments) -> set[str]:
    """The arms that some trial of the run resolved."""
    return {str(row["name"]) for row in _resolved([info for info in run.infos if info]) if len(row) > 1}


def settings_of(run: RunDocuments, started: Collection[str]) -> dict[str, Any]:
    """Everything that decides what the run measured, by its key; of the arms in `started` as its trials resolved it."""
    experiment = {key: value for key, value in run.experiment.items() if key != "arms"}
    rows = rows_of(run.experiment.get("arms"))
    infos = [info for info in run.infos if info]
    found = dict(flat(experiment))
    for row in (*rows, *(row for row in _resolved(infos) if row["name"] in started)):
        own = {key: value for key, value in row.items() if key not in ("name", "control")}
        found |= dict(flat(own, f"arms.{row.get('name')}"))
    is_quantised = any(key.endswith(".quantisation") and value != "none" for key, value in found.items())
    found["arms"] = sorted(str(row.get("name")) for row in rows)
    found["control"] = [str(row.get("name")) for row in rows if row.get("control") is True]
    found["loop"] = [str(first_of(infos, key)) for key in ("loop", "open_loop")]
    found |= {key: first_of(infos, key) for key in ("block_s", "stalling_kinds")}
    found["traffic.design"] = first_of(infos, "design") or found.get("traffic.design")
    found["traffic.duration_s"] = first_of(infos, "duration_s") or found.get("traffic.duration_s")
    prompts = mapping(first_of(infos, "prompts"))
    for name in _FILES:
        found |= dict(flat(mapping(prompts.get(name)), f"traffic.{name}"))
    versions = mapping(run.environment.get("versions"))
    found |= {f"versions.{name}": versions.get(name) for name in (*_VERSIONS, *(("torchao",) if is_quantised else ()))}
    gpus = run.environment.get("gpus")
    found["gpus"] = sorted({str(gpu).partition(",")[0] for gpu in gpus}) if isinstance(gpus, list) else None
    return {key: _comparable(key, value) for key, value in found.items() if value is not None}


def _resolved(infos: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Each arm's configuration as the first trial that has it resolved it."""
    rows = [row for info in infos for row in rows_of(info.get("arms"))]
    for name in dict.fromkeys(str(row.get("name")) for row in rows):
        config = next((row["config"] for row in rows if str(row.get("name")) == name and row.get("config")), None)
        yield {**mapping(config), "name": name}


def flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(item, Mapping):
            yield from flat(item, name)
        else:
            yield name, item


def _comparable(key: str, value: Any) -> Any:
    """The value as far as it decides what was measured: not which of equal cards, nor where a file lies."""
    last = key.rpartition(".")[2]
    if not isinstance(value, str):
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if last == "device":
        return value.partition(":")[0]
    if last in _SECRETS:
        return bool(value)
    return Path(value).name if last in (*_FILES, "texts") else value


def shown(value: Any) -> str:
    if value is None:
        return "not given"
    if isinstance(value, float) and not isinstance(value, bool):
        return f"{value:g}"
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    text = " ".join(text.split()) or "none"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


# --- What they say together -------------------------------------------------------------------------------------------


def joined_experiment(runs: Sequence[JoinedRun]) -> dict[str, Any]:
    """The experiment of the first run, with as many trials as all have or planned."""
    experiments = [run.documents.experiment for run in runs]
    names = dict.fromkeys(str(experiment["name"]) for experiment in experiments if "name" in experiment)
    trials = {**table(experiments[0], "trials"), "count": sum(len(run.trials) for run in runs)}
    return {**experiments[0], **({"name": " + ".join(names)} if names else {}), "trials": trials}


def joined_environment(runs: Sequence[JoinedRun]) -> dict[str, Any]:
    """What the runs' environments have in common; where they differ, every value, with semicolons between: of numbers
    none, as no one number is that of all."""
    return _together([run.documents.environment for run in runs])


def _together(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for key in dict.fromkeys(key for one in tables for key in one):
        values = [one[key] for one in tables if one.get(key) is not None]
        if values and all(isinstance(value, Mapping) for value in values):
            joined[key] = _together([one.get(key) or {} for one in tables])
        elif values and all(isinstance(value, list) for value in values):
            # One that a run has twice is there twice, such as two cards of a kind; another run has the same ones.
            joined[key] = list(reduce(or_, (Counter(map(str, value)) for value in values)).elements())
        else:
            known = list(dict.fromkeys("unknown" if one.get(key) is None else str(one[key]) for one in tables))
            numbers = all(isinstance(value, int | float) for value in values)
            differing = None if numbers else "; ".join(known)
            joined[key] = (values[0] if values else None) if len(known) == 1 else differing
    return joined


def joined_parity(runs: Sequence[JoinedRun]) -> dict[str, Any] | None:
    """What was measured of the arms before the first trial of each run: of each arm the worst. None where one of the
    runs measured nothing."""
    documents = [run.documents.parity for run in runs]
    if len(runs) == 1:
        return None if documents[0] is None else dict(documents[0])
    if any(document is None for document in documents):
        return None
    measured = [mapping(document) for document in documents]
    worst: dict[str, Mapping[str, Any]] = {}
    for row in (row for document in measured for row in rows_of(document.get("arms"))):
        name = str(row.get("name"))
        if name not in worst or _parity_rank(row) < _parity_rank(worst[name]):
            worst[name] = row
    whole = min(measured, key=_parity_rank)
    return {**whole, "arms": list(worst.values())}


def joined_search(runs: Sequence[JoinedRun]) -> dict[str, Any] | None:
    """How the searches of all runs went on, as one. None where a run made none.

    Verdicts were asked for where one asked; an arm was let go where every search did, for the first one's reason.
    """
    documents = [run.documents.search for run in runs]
    searches = [mapping(document) for document in documents if document is not None]
    if len(searches) < len(runs):
        return None
    if len(searches) == 1:
        return dict(searches[0])
    spent = {key: [value for search in searches if (value := number(search.get(key))) is not None] for key in _SPENT}
    stops = [str(search.get("stop") or "") for search in searches]
    each = stops[:1] if len(set(stops)) == 1 else [f"run {place}: {stop}" for place, stop in enumerate(stops, start=1)]
    return {
        "gated": any(search.get("gated", True) is not False for search in searches),
        **{key: sum(values) for key, values in spent.items() if len(values) == len(searches)},
        "stop": "; ".join(each) if all(stops) else "",
        **{key: _let_go([rows_of(search.get(key)) for search in searches]) for key in ("left", "dropped")},
    }


_SPENT = ("budget_s", "spent_s", "parity_s")


def _let_go(searches: Sequence[Sequence[Mapping[str, Any]]]) -> list[Mapping[str, Any]]:
    """The arms that are named in each, as the first names them."""
    named = [{str(row.get("arm")) for row in rows} for rows in searches]
    return [row for row in searches[0] if all(str(row.get("arm")) in names for names in named)]


def _parity_rank(row: Mapping[str, Any]) -> int:
    verdict = row.get("verdict")
    return _PARITY_ORDER.index(verdict) if verdict in _PARITY_ORDER else 1
