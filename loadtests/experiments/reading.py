"""Reading an experiment from a TOML file, with the command line's changes, and writing it.

Strict: whatever cannot be used is a ConfigError that names the key, the value and the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from analysis.settings.gate_limits import usual_for
from loadtests.experiments.files import builtin_names, builtin_text, resolve_files, resolved
from loadtests.experiments.model import Experiment
from loadtests.experiments.overrides import lacks_trace, parse_setting, replay, set_path
from loadtests.experiments.toml_limits import check_values, parse_toml, read_toml
from loadtests.traffic.settings import TrafficConfig
from servers.complaint import ConfigError
from servers.config import over, with_preset
from servers.fields import read


def load(
    source: str | Path,
    *,
    settings: Sequence[str] = (),
    trace: str = "",
    seed: int | None = None,
    needs_traffic: bool = True,
) -> Experiment:
    """The experiment in the file `source`, or the built-in one of that name, with the command line's changes.

    `settings` are "key.path=value" strings; `trace` is a file whose times and lengths replace the traffic's. An
    experiment that will send none (`needs_traffic` False) may lack the trace that it would replay.
    """
    table = load_table(source, settings=settings, trace=trace, seed=seed, needs_traffic=needs_traffic)
    return from_table(table)


def load_table(
    source: str | Path,
    *,
    settings: Sequence[str] = (),
    trace: str = "",
    seed: int | None = None,
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
    traffic = table.get("traffic")
    if lacks_trace(traffic) and not needs_traffic:
        table["traffic"] = {"rate": 1.0}
    elif lacks_trace(traffic):
        raise ConfigError(f'experiment "{source}" replays a trace and names none: add --trace FILE')
    if seed is not None:
        table["seed"] = seed
    return table


def from_table(table: Mapping[str, Any]) -> Experiment:
    """Return the experiment that a parsed TOML table describes. Raises ConfigError."""
    return read(Experiment, with_defaults(table))


def to_table(experiment: Experiment) -> dict[str, Any]:
    """Return the resolved experiment as plain tables. A key whose value is None is left out: TOML has none."""
    return experiment.model_dump(mode="json", exclude_none=True)


def to_toml(experiment: Experiment) -> str:
    """Return the resolved experiment as TOML: every setting is there, defaults and presets included."""
    return tomli_w.dumps(to_table(experiment))


def with_defaults(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table with what one part takes from another: the arms' model and engine, the gates of the task, the
    traffic's blocks. What is no table is left for `from_table` to refuse."""
    arms, traffic, gates, model = (table.get(key, {}) for key in ("arms", "traffic", "gates", "model"))
    task = model.get("task", "generate") if isinstance(model, Mapping) else "generate"
    if task == "embed":
        traffic = over({"workload": "sentences"}, traffic)
    of_traffic = traffic if isinstance(traffic, Mapping) else {}
    block_s = of_traffic.get("block_s", TrafficConfig.model_fields["block_s"].default)
    result = {
        **table,
        "gates": over({**usual_for(str(task)), "block_s": block_s}, gates),
        "arms": [_arm_table(arm, table) for arm in arms] if isinstance(arms, list) else arms,
    }
    return {**result, "traffic": traffic} if "traffic" in table else result


def _arm_table(arm: Any, table: Mapping[str, Any]) -> Any:
    if not isinstance(arm, Mapping) or arm.get("kind", "tailgate") != "tailgate":
        return arm
    parts = {key: over(table.get(key, {}), arm.get(key, {})) for key in ("model", "engine")}
    name = {"name": arm["preset"]} if "preset" in arm else {}
    return with_preset({"kind": "tailgate", **name, **arm, **parts})


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
