"""What the command line changes in an experiment's table: --set KEY=VALUE and --trace FILE."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from analysis.records.documents import DEEPEST
from analysis.wording import counted
from loadtests.experiments.files import FILE_KEYS
from loadtests.experiments.toml_limits import parse_toml, table_of
from loadtests.traffic.traces import KNOWN
from servers.complaint import ConfigError

_STEP = re.compile(r"([A-Za-z0-9_-]+)(?:\[([0-9]{1,6})\])?")


def parse_setting(setting: str) -> tuple[str, Any]:
    """(key path, value) of a "key.path=value" string; the value is read as TOML, and as a string when it is none."""
    key, equals, text = setting.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f'--set "{setting}" is not KEY=VALUE: write for example traffic.duration_s=30')
    if key.count(".") >= DEEPEST:
        raise ConfigError(f"--set: a key has {key.count('.') + 1} parts; the limit is {DEEPEST}: give one that exists")
    if key.rpartition(".")[2] in (*FILE_KEYS, "token_env") and text.strip() in ("", '""', "''"):
        # Most likely a shell variable that is not set: it must not open what was meant to be closed.
        raise ConfigError(f"--set {key} is empty: name what it is to use, or change the experiment to go without")
    try:
        table = parse_toml(f"value = {text.strip()}", f"--set {key}")
    except ConfigError:
        return key, text.strip()
    return key, table["value"] if len(table) == 1 else text.strip()


def set_path(table: dict[str, Any], key: str, value: Any) -> None:
    """`table` holds `value` at the dotted path `key`; a list of tables is entered by [index] or by an entry's name."""
    current: Any = table
    steps = key.split(".")
    for position, step in enumerate(steps):
        match = _STEP.fullmatch(step)
        if match is None:
            raise ConfigError(f'--set {key}: "{step}" is no key: write for example traffic.rate or arms[1].replicas')
        name, index = match.groups()
        if isinstance(current, list):
            current = _entry(current, key, name)
            continue
        if index is None and position == len(steps) - 1:
            current[name] = value
            return
        current = current.setdefault(name, {})
        if index is not None:
            size = len(current) if isinstance(current, list) else 0
            if int(index) >= size:
                raise ConfigError(f"--set {key}: {name} has {counted(size, 'entry')}, counted from 0")
            current = current[int(index)]
        if not isinstance(current, (dict, list)):
            raise ConfigError(f"--set {key}: {'.'.join(steps[: position + 1])} is {current!r}, not a table")
    raise ConfigError(f"--set {key} names a whole table: add the key in it, such as {key}.replicas")


def _entry(entries: list[Any], key: str, name: str) -> dict[str, Any]:
    for entry in entries:
        if isinstance(entry, dict) and entry.get("name", entry.get("preset")) == name:
            return entry
    raise ConfigError(f'--set {key}: no entry is called "{name}": use its name, or its number as in arms[1]')


# What describes made-up arrivals and lengths, and has no meaning once a trace brings both.
_REPLACED_BY_TRACE = (*("rate", "rates", "burstiness", "step_s", "settle_s", "length_scales"),)


def replay(table: dict[str, Any], trace: str) -> None:
    """The traffic of `table` has the times and lengths of the file `trace`."""
    if not Path(trace).is_file():
        raise ConfigError(f'--trace "{trace}" does not exist: give {KNOWN}')
    kept = {key: value for key, value in table_of(table, "traffic").items() if key not in _REPLACED_BY_TRACE}
    table["traffic"] = {**kept, "arrivals": "trace", "workload": "trace", "trace": str(Path(trace).resolve())}


def lacks_trace(traffic: Any) -> bool:
    """Whether the [traffic] table replays a trace that it does not name."""
    if not isinstance(traffic, dict) or traffic.get("trace"):
        return False
    return "trace" in (traffic.get("arrivals"), traffic.get("workload"))
