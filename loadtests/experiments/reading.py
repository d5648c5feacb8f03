"""Reading an experiment from a TOML file, with the command line's changes.

Strict: whatever cannot be used is a ConfigError that names the key, the value and the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from analysis.records.tables import RecordError
from analysis.settings.gate_limits import GateLimits, usual_for
from analysis.settings.model import Settings
from analysis.settings.slo_targets import merged
from loadtests.experiments.arm_tables import read_arm
from loadtests.experiments.config_errors import as_config_error
from loadtests.experiments.field_names import FieldFlags
from loadtests.experiments.files import builtin_names, builtin_text, resolve_files, resolved
from loadtests.experiments.model import Experiment
from loadtests.experiments.overrides import lacks_trace, parse_setting, replay, set_path
from loadtests.experiments.toml_limits import check_values, parse_toml, read_toml, table_of
from servers.fields import ConfigError, build

# The tables that an experiment has once, with what each is made of, in order: the gates follow the traffic.
_TABLES = {
    name: kind
    for name, kind in get_type_hints(Experiment).items()
    if isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, Settings))
}
_VALUES: Mapping[str, type] = {"name": str, "seed": int, "compare_models": bool}


def load(
    source: str | Path,
    *,
    settings: Sequence[str] = (),
    trace: str = "",
    seed: int | None = None,
    flags: FieldFlags | None = None,
    slo: Sequence[str] = (),
    needs_traffic: bool = True,
) -> Experiment:
    """The experiment in the file `source`, or the built-in one of that name, with the command line's changes.

    `settings` are "key.path=value" strings; `trace` is a file whose times and lengths replace the traffic's; `flags`
    are the names that serving benchmarks use; `slo` are targets that replace or add to the experiment's. An experiment
    that will send none (`needs_traffic` False) may lack the trace that it would replay.
    """
    table = load_table(
        source, settings=settings, trace=trace, seed=seed, flags=flags, slo=slo, needs_traffic=needs_traffic
    )
    return from_table(table)


def load_table(
    source: str | Path,
    *,
    settings: Sequence[str] = (),
    trace: str = "",
    seed: int | None = None,
    flags: FieldFlags | None = None,
    slo: Sequence[str] = (),
    needs_traffic: bool = True,
) -> dict[str, Any]:
    """What `load` makes an experiment of: its table with the command line's changes."""
    path, text = _text_of(source)
    table = parse_toml(text, str(path))
    check_values(table)
    resolve_files(table, path.parent)
    for key, value in map(parse_setting, settings):
        set_path(table, key, resolved(key, value, Path()))  # relative to where the user stands
    check_values(table)
    if trace:
        replay(table, trace)
    if flags is not None:
        flags.change(table)
    traffic = table.get("traffic")
    if lacks_trace(traffic) and not needs_traffic:
        table["traffic"] = {"rate": 1.0}
    elif lacks_trace(traffic):
        raise ConfigError(f'experiment "{source}" replays a trace and names none: add --trace FILE')
    if seed is not None:
        table["seed"] = seed
    if slo:
        with as_config_error(RecordError):
            table["slo"] = merged(table_of(table, "slo"), slo)
    return table


def from_table(table: Mapping[str, Any]) -> Experiment:
    """The experiment that a parsed TOML table describes."""
    for key, value in table.items():
        if key in _VALUES and type(value) is not _VALUES[key]:
            raise ConfigError(f"{key} is {value!r}: expected {_VALUES[key].__name__}")
    known = [item.name for item in fields(Experiment)]
    unknown = [key for key in table if key not in known]
    if unknown:
        raise ConfigError(f"{unknown[0]} is unknown: an experiment takes {', '.join(known)}")
    if "name" not in table:
        raise ConfigError('name is missing: give the experiment one, such as name = "canary"')
    parts = {key: dict(table_of(table, key)) for key in (*_TABLES, "slo")}
    built: dict[str, Any] = {}
    with as_config_error(RecordError):
        for key, kind in _TABLES.items():
            if key == "traffic" and built["model"].task == "embed":
                parts[key].setdefault("workload", "sentences")
            if kind is GateLimits:
                own = _with_block_s(parts[key], built["traffic"].block_s)
                built[key] = GateLimits.read(usual_for(built["model"].task) | own)
            elif issubclass(kind, Settings):
                built[key] = kind.read(parts[key])
            else:
                built[key] = build(kind, parts[key], where=key)
    arms = table.get("arms", [])
    if not isinstance(arms, list) or not all(isinstance(item, dict) for item in arms):
        raise ConfigError("arms is not a list of tables: write one [[arms]] table for each arm")
    return Experiment(
        **{key: table[key] for key in _VALUES if key in table},
        **built,
        arms=tuple(read_arm(item, index, built["model"], built["engine"]) for index, item in enumerate(arms)),
        slo=parts["slo"],
    )


def _text_of(source: str | Path) -> tuple[Path, str]:
    path = Path(source)
    if path.is_file():
        return path, read_toml(path)
    name = str(source)
    if name in builtin_names():
        return Path(), builtin_text(name)
    what = "is a directory" if path.is_dir() else "does not exist"
    raise ConfigError(
        f'experiment "{source}" {what}: give a TOML file or a built-in name ({", ".join(builtin_names())})'
    )


def _with_block_s(gates: Mapping[str, Any], block_s: float) -> dict[str, Any]:
    """The [gates] table, over the blocks of the traffic where it names no block_s, or 0."""
    given = gates.get("block_s", 0)
    return {**gates, "block_s": block_s} if given == 0 and given is not False else dict(gates)
