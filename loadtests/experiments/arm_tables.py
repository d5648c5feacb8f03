"""One [[arms]] table, read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from loadtests.experiments.model import ExperimentArm, ExternalArm, OwnArm
from loadtests.external.addresses import KINDS, SECURITY_KEYS, external_from_table
from servers.config import ArmConfig, CompileConfig, EngineConfig, ModelConfig, check_name
from servers.fields import ConfigError, build, check_fields, override

T = TypeVar("T")


_ARM_KEYS = (
    *("name", "kind", "preset", "control", "weight", "replicas"),
    *("device", "shapes", "compile", "model", "engine"),
)
_COMMON_KEYS = ("name", "kind", "control")
_EXTERNAL_KEYS = ("address", "model_name", "vocab_size", "telemetry", *SECURITY_KEYS)


def read_arm(table: Mapping[str, Any], index: int, model: ModelConfig, engine: EngineConfig) -> ExperimentArm:
    """The arm number `index`; what its table does not say is as in `model` and `engine`."""
    where = f"arms[{index}]"
    kind = _typed(table, "kind", str, "tailgate", where)
    if kind != "tailgate":
        return _external_arm(table, kind, where)
    for key in table:
        if key in _EXTERNAL_KEYS or key in KINDS:
            raise ConfigError(f'{where}.{key} is for a server that is there already: add kind = "openai" or "oip"')
        if key not in _ARM_KEYS:
            raise ConfigError(f"{where}.{key} is unknown: an arm takes {', '.join(_ARM_KEYS)}")
    preset = _typed(table, "preset", str, "", where)
    if not preset:
        raise ConfigError(f'{where}.preset is missing: name one, such as preset = "eager"')
    name = _typed(table, "name", str, preset, where)
    model = _override(model, table, "model", where)
    device = _typed(table, "device", str, "", where)
    if device:
        if "device" in table.get("model", {}):
            raise ConfigError(f"{where}.device and {where}.model.device are both set: keep one")
        model = replace(model, device=device)
    engine = _override(engine, table, "engine", where)
    try:
        base = ArmConfig.from_preset(preset, name=name, model=model, engine=engine)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    shapes = _override(base.shapes, table, "shapes", where)
    compiled = _override(base.compile, table, "compile", where)
    check_read(table.get("compile", {}), compiled, base.compile, where=f"{where}.compile")
    try:
        config = replace(base, shapes=shapes, compile=compiled)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    settings = {key: table[key] for key in ("control", "weight", "replicas") if key in table}
    arm = build(OwnArm, {"name": name, "config": config, **settings}, where=where)
    check_fields(arm, where)
    return arm


# Of [compile]: whether anything is compiled, and how an arm is warmed that compiles nothing.
_READ_WHEN_EAGER = ("enabled", "warmup")


def check_read(table: Mapping[str, Any], compiled: CompileConfig, preset: CompileConfig, *, where: str) -> None:
    """What the arm's own [compile] `table` sets has an effect in `compiled`, which it makes of the preset's. Raises
    ConfigError, which names `where`.key.

    Where the table switches compiling off, what it repeats of the preset or of the defaults may stay: a resolved
    experiment says all of it.
    """
    given, defaults = [key for key in table if key not in _READ_WHEN_EAGER], CompileConfig()
    if given and not compiled.enabled and "enabled" not in table:
        raise ConfigError(
            f"{where}.{given[0]} is set but the preset does not compile: add enabled = true, or choose a compiled "
            "preset"
        )
    own = [key for key in given if getattr(compiled, key) not in (getattr(preset, key), getattr(defaults, key))]
    if own and not compiled.enabled:
        raise ConfigError(
            f"{where}.{own[0]} is set but {where}.enabled is false, so that nothing is compiled: remove one of them"
        )
    for key in ("options", "join_projections"):  # a preset's goes with its backend
        if key in own and compiled.backend != "inductor":
            raise ConfigError(
                f'{where}.{key} is set but compile.backend is "{compiled.backend}", and only inductor reads it: remove '
                "one of them"
            )


def _external_arm(table: Mapping[str, Any], kind: str, where: str) -> ExternalArm:
    if kind not in KINDS:
        raise ConfigError(f'{where}.kind is "{kind}": use tailgate, {" or ".join(KINDS)}')
    taken = (*_COMMON_KEYS, *_EXTERNAL_KEYS, kind)
    for key in table:
        if key == "replicas":
            raise ConfigError(f"{where}.replicas has no meaning for an external arm: list the replicas in address")
        if key in _ARM_KEYS and key not in taken:
            raise ConfigError(
                f"{where}.{key} describes a server that tailgate starts, and this one is external "
                f'(kind = "{kind}"): remove it'
            )
        if key not in taken:
            raise ConfigError(f"{where}.{key} is unknown: an external arm takes {', '.join(taken)}")
    name = _typed(table, "name", str, "", where)
    check_name(f"{where}.name", name)
    rest = {key: value for key, value in table.items() if key not in ("name", "control")}
    external = external_from_table(rest, where=where)
    return ExternalArm(
        name=name,
        external=external,
        control=_typed(table, "control", bool, False, where),
        replicas=len(external.addresses),
    )


def _typed(table: Mapping[str, Any], key: str, kind: type[T], default: T, where: str) -> T:
    value = table.get(key, default)
    if type(value) is not kind:
        raise ConfigError(f"{where}.{key} is {value!r}: expected {kind.__name__}")
    return value


def _override(base: T, table: Mapping[str, Any], key: str, where: str) -> T:
    changes = table.get(key, {})
    if not isinstance(changes, dict):
        raise ConfigError(f"{where}.{key} is {changes!r}: give a table [arms.{key}]")
    try:
        return override(base, changes, where=f"{where}.{key}")
    except ConfigError as error:
        # A range check knows its own table only: name the arm's.
        text = str(error)
        raise ConfigError(f"{where}.{text}" if text.startswith(f"{key}.") else text) from None
