"""Reading an experiment from a TOML file, with the command line's changes.

Strict: whatever cannot be used is a ConfigError that names the key, the value and the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from analysis.records.tables import RecordError
from analysis.settings.gate_limits import GateLimits, filled
from analysis.settings.rollout import Rollout
from analysis.settings.slo_targets import merged
from loadtests.experiments import tables
from loadtests.experiments.arm_tables import read_arm
from loadtests.experiments.builtin import builtin_names, builtin_text
from loadtests.experiments.config_errors import as_config_error
from loadtests.experiments.field_names import FieldFlags
from loadtests.experiments.files import resolve_files, resolve_traffic
from loadtests.experiments.model import Experiment, ParityConfig, SplitterSettings, TrialsConfig
from loadtests.experiments.overrides import apply, lacks_trace, replay
from loadtests.experiments.toml_limits import check_values, parse_toml, read_toml
from loadtests.external.client_security import SecurityConfig
from loadtests.traffic.settings import TrafficConfig
from servers.config import EngineConfig, ModelConfig
from servers.fields import ConfigError, build


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
    path, text = _text_of(source)
    table = parse_toml(text, str(path))
    check_values(table)
    resolve_files(table, path.parent)
    for setting in settings:
        apply(table, setting)
    check_values(table)
    resolve_files(table, Path())  # what the command line set is relative to where the user stands
    resolve_traffic(table.get("traffic"), path.parent)
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
            table["slo"] = merged(tables.of(table, "slo"), slo)
    return from_table(table)


def from_table(table: Mapping[str, Any]) -> Experiment:
    """The experiment that a parsed TOML table describes."""
    rest = dict(table)
    model = build(ModelConfig, tables.take(rest, "model"), where="model")
    engine = build(EngineConfig, tables.take(rest, "engine"), where="engine")
    arms = rest.pop("arms", [])
    if not isinstance(arms, list) or not all(isinstance(item, dict) for item in arms):
        raise ConfigError("arms is not a list of tables: write one [[arms]] table for each arm")
    traffic = build(TrafficConfig, tables.take(rest, "traffic"), where="traffic")
    with as_config_error(RecordError):
        gates = _gates(tables.take(rest, "gates"), traffic)
        rollout = build(Rollout, tables.take(rest, "rollout"), where="rollout")
    parts: dict[str, Any] = {
        "model": model,
        "engine": engine,
        "arms": tuple(read_arm(item, index, model, engine) for index, item in enumerate(arms)),
        "traffic": traffic,
        "trials": build(TrialsConfig, tables.take(rest, "trials"), where="trials"),
        "slo": tables.take(rest, "slo"),
        "goodput": tables.numbers(rest, "goodput"),
        "gates": gates,
        "rollout": rollout,
        "splitter": build(SplitterSettings, tables.take(rest, "splitter"), where="splitter"),
        "parity": build(ParityConfig, tables.take(rest, "parity"), where="parity"),
        "security": build(SecurityConfig, tables.take(rest, "security"), where="security"),
    }
    kinds: dict[str, type] = {"name": str, "seed": int, "compare_models": bool}
    for key, value in rest.items():
        if key not in kinds:
            known = [item.name for item in fields(Experiment)]
            raise ConfigError(f"{key} is unknown: an experiment takes {', '.join(known)}")
        if type(value) is not kinds[key]:
            raise ConfigError(f"{key} is {value!r}: expected {kinds[key].__name__}")
    if "name" not in rest:
        raise ConfigError('name is missing: give the experiment one, such as name = "canary"')
    return Experiment(**rest, **parts)


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


def _gates(table: Mapping[str, Any], traffic: TrafficConfig) -> GateLimits:
    """What an arm must hold, over the blocks of the traffic where the table names no block_s, or 0."""
    given = table.get("block_s", 0)
    if given == 0 and given is not False:
        table = {**table, "block_s": traffic.block_s}
    return build(GateLimits, filled(table), where="gates")
