"""Reading an experiment from a TOML file, with the command line's changes, and writing it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from tailgate.analysis.records.documents import DEEPEST
from tailgate.analysis.settings.gate_limits import usual_for
from tailgate.loadtests.experiments.files import FILE_KEYS, parse_toml, resolve_files, resolved, table_of, text_of
from tailgate.loadtests.experiments.model import Experiment, json_schema
from tailgate.loadtests.traffic.settings import TrafficConfig
from tailgate.servers.complaint import ConfigError, did_you_mean
from tailgate.servers.config import over, with_preset
from tailgate.servers.fields import read
from tailgate.servers.presets import PRESETS

SCHEMA = "experiment.schema.json"
SCHEMA_LINE = f"#:schema ./{SCHEMA}"


def load(source: str | Path, **changes: Any) -> Experiment:
    """Return the experiment whose table `load_table` returns."""
    return from_table(load_table(source, **changes))


def load_table(source: str | Path, *, settings: Sequence[str] = (), trace: str = "") -> dict[str, Any]:
    """Return the table of the experiment in the file `source`, or of the built-in one of that name, with changes.

    `settings` are "key.path=value" strings; `trace` is a file whose times and lengths replace the traffic's.
    """
    path, text = text_of(source)
    table = parse_toml(text, str(path))
    resolve_files(table, path.parent)
    for key, value in map(parse_setting, settings):
        set_path(table, key, resolved(key, value, Path()))  # relative to where the user stands
    if trace:
        replay(table, trace)
    return table


def from_table(table: Mapping[str, Any]) -> Experiment:
    """Return the experiment that a parsed TOML table describes. Raises ConfigError."""
    return read(Experiment, with_defaults(table))


def to_table(experiment: Experiment) -> dict[str, Any]:
    """Return the resolved experiment as plain tables. A key whose value is None is left out: TOML has none."""
    return experiment.model_dump(mode="json", exclude_none=True)


def to_toml(experiment: Experiment) -> str:
    """Return the resolved experiment as TOML: every setting is there, defaults and presets included."""
    return f"{SCHEMA_LINE}\n{tomli_w.dumps(to_table(experiment))}"


def write_schema(folder: Path) -> None:
    """Write the JSON Schema that SCHEMA_LINE names to editors (taplo, Even Better TOML), which need no network so."""
    (folder / SCHEMA).write_text(json_schema(), encoding="utf-8")


def with_defaults(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table with what one part takes from another: the arms' model and engine, the gates of the task, the
    traffic's blocks. What is no table is left for `from_table` to refuse."""
    arms, traffic, gates, model = (table.get(key, {}) for key in ("arms", "traffic", "gates", "model"))
    task = model.get("task", "generate") if isinstance(model, Mapping) else "generate"
    if task == "embed":
        traffic = over({"workload": "sentences"}, traffic)
    of_traffic = traffic if isinstance(traffic, Mapping) else {}
    block_s = of_traffic.get("block_s", TrafficConfig.model_fields["block_s"].default)
    result = {**table, "gates": over({**usual_for(str(task)), "block_s": block_s}, gates)}
    if isinstance(arms, list):
        result["arms"] = [_arm_table(arm, table) for arm in arms]
    return {**result, "traffic": traffic} if "traffic" in table else result


def _arm_table(arm: Any, table: Mapping[str, Any]) -> Any:
    if not isinstance(arm, Mapping) or arm.get("kind", "tailgate") != "tailgate":
        return arm
    parts = {key: over(table.get(key, {}), arm.get(key, {})) for key in ("model", "engine")}
    name = {"name": arm["preset"]} if "preset" in arm else {}
    return with_preset({"kind": "tailgate", **name, **arm, **parts})


# --- Changes on the command line --------------------------------------------------------------------------------------

# What describes generated arrivals and lengths, and has no meaning once a trace brings both.
_REPLACED_BY_TRACE = ("rate", "rates", "burstiness", "step_s", "settle_s", "length_scales")


def parse_setting(setting: str) -> tuple[str, Any]:
    """Return the key path and the value, read as TOML or else as it is, of a "key.path=value" string."""
    key, equals, text = (part.strip() for part in setting.partition("="))
    if not equals or not key:
        raise ConfigError(f'--set "{setting}" is not KEY=VALUE: write for example traffic.duration_s=30')
    if key.count(".") >= DEEPEST:  # a run would be recorded with an experiment.toml that nothing reads
        raise ConfigError(f"--set: a key has {key.count('.') + 1} parts; the limit is {DEEPEST}: give one that exists")
    if key.rpartition(".")[2] in (*FILE_KEYS, "token_env") and text in ("", '""', "''"):
        # Most likely a shell variable that is not set: it must not open what was meant to be closed.
        raise ConfigError(f"--set {key} is empty: name what it is to use, or change the experiment to go without")
    try:
        table = parse_toml(f"value = {text}", f"--set {key}")
    except ConfigError:
        return key, text
    return key, table["value"] if len(table) == 1 else text


def set_path(table: dict[str, Any], key: str, value: Any) -> None:
    """Put `value` into `table` at the dotted path `key`; its name picks an entry of a list of tables."""
    current: Any = table
    *steps, last = key.split(".")
    for step in steps:
        current = _entry(current, key, step) if isinstance(current, list) else current.setdefault(step, {})
        if not isinstance(current, (dict, list)):
            raise ConfigError(f"--set {key}: {step} is {current!r}, not a table")
    if isinstance(current, list):
        raise ConfigError(f"--set {key} names a whole table: add the key in it, such as {key}.replicas")
    if last == "preset" and value not in PRESETS:
        current.setdefault("name", steps[-1])  # so that the complaint has the key as given
    current[last] = value


def _entry(entries: list[Any], key: str, name: str) -> dict[str, Any]:
    for entry in entries:
        if isinstance(entry, dict) and entry.get("name", entry.get("preset")) == name:
            return entry
    names = [str(entry.get("name", entry.get("preset"))) for entry in entries if isinstance(entry, dict)]
    raise ConfigError(
        f'--set {key}: no entry is called "{name}": {did_you_mean(name, names)}use one of {", ".join(names)}'
    )


def replay(table: dict[str, Any], trace: str) -> None:
    """Give the traffic of `table` the times and lengths of the file `trace`."""
    kept = {key: value for key, value in table_of(table, "traffic").items() if key not in _REPLACED_BY_TRACE}
    table["traffic"] = {**kept, "arrivals": "trace", "workload": "trace", "trace": str(Path(trace).resolve())}
