"""What others rely on, as plain data: settings, commands and flags, exit codes, records, summary.json, the protocol.

`tests/test_stability.py` holds it to what each release had. `python -m tests.golden.surface` writes that of the version
at hand to `stable-VERSION.json`, from then on part of the promise (docs/stability.md).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from analysis.records.export import TABLES
from analysis.summary.summary import EXIT_CODES
from loadtests.commands.exits import EXIT_BROKE, EXIT_USAGE
from loadtests.commands.main import build_parser
from loadtests.experiments.model import Experiment, ExternalArm, OwnArm
from servers.config import PRESETS
from servers.rpc import inference_pb2, telemetry_pb2

GOLDEN = Path(__file__).parent
ROOT = GOLDEN.parents[1]


def surface() -> dict[str, Any]:
    """The whole of it. Lists may grow; everything else stays as it is."""
    kinds = ((Experiment, ""), (OwnArm, "arms."), (ExternalArm, "arms."))
    return {
        "settings": {name: known for kind, before in kinds for name, known in _settings(kind, before)},
        "presets": list(PRESETS),
        "commands": _commands(),
        "exit_codes": {**EXIT_CODES, "broke": EXIT_BROKE, "usage": EXIT_USAGE},
        "records": {name: {field.name: str(field.type) for field in schema} for name, schema in TABLES.items()},
        "summary": dict(
            _keys(json.loads((ROOT / "docs/schema/summary-1.schema.json").read_text(encoding="utf-8")), "")
        ),
        "protocol": {**_messages(inference_pb2.DESCRIPTOR), **_messages(telemetry_pb2.DESCRIPTOR)},
    }


def _settings(kind: type, before: str) -> Iterator[tuple[str, Any]]:
    """Each setting with its type, without limits that may widen, its choices and its default."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for item in dataclasses.fields(kind):
        hint = hints[item.name]
        if typing.get_origin(hint) is Annotated:
            hint = typing.get_args(hint)[0]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            table = "" if item.name in ("config", "external") else f"{item.name}."
            yield from _settings(hint, f"{before}{table}")
            continue
        choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else None
        known: dict[str, Any] = {"type": "choice" if choices else _name(hint)}
        if choices:
            known["choices"] = list(choices)
        if item.default is not dataclasses.MISSING:
            known["default"] = json.loads(json.dumps(item.default, default=str))
        yield f"{before}{item.name}", known


def _name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not isinstance(hint, types.GenericAlias) else str(hint)


def _commands() -> dict[str, list[str]]:
    """The flags of each command, and its positional arguments in capitals."""
    (chosen,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    return {
        name: sorted(flag for action in parser._actions for flag in (action.option_strings or [f"<{action.dest}>"]))
        for name, parser in chosen.choices.items()
    }


def _keys(schema: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """Each key of the schema with what it may hold. What an enum lists is closed: readers may have met no other."""
    kinds = {key: schema[key] for key in ("type", "$ref", "const", "enum") if key in schema}
    if kinds and path:
        yield path, json.dumps(kinds, sort_keys=True)
    for name in ("properties", "$defs"):
        for key, inner in schema.get(name, {}).items():
            yield from _keys(inner, f"{path}/{key}")
    if isinstance(schema.get("items"), Mapping):
        yield from _keys(schema["items"], f"{path}/*")


def _messages(file: Any) -> dict[str, Any]:
    """Fields of each message by number and type, and the methods of each service."""
    found: dict[str, Any] = {}
    for message in file.message_types_by_name.values():
        found[message.full_name] = {field.name: f"{field.number}: {field.type}" for field in message.fields}
    for service in file.services_by_name.values():
        found[service.full_name] = {
            method.name: f"{method.input_type.full_name} -> {method.output_type.full_name}"
            for method in service.methods
        }
    return found


def version() -> str:
    """The version in pyproject.toml."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=GOLDEN, help="the folder (default: tests/golden)")
    out: Path = parser.parse_args().out
    text = json.dumps(surface(), indent=1, sort_keys=True, ensure_ascii=False)
    (out / f"stable-{version()}.json").write_text(f"{text}\n", encoding="utf-8")
