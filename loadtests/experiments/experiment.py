"""An experiment: arms, traffic, trials, SLOs and gates, from one TOML file.

`load` is strict: whatever it cannot use is a ConfigError that names the key, the value and the remedy. `to_toml`
writes the resolved experiment, which loads back to an equal one.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar

import tomli_w

from analysis.records.requests import RecordError
from analysis.records.shallow_toml import DEEPEST
from analysis.settings.gate_limits import GateLimits, check_goodput, filled
from analysis.settings.rollout import Rollout
from analysis.settings.slo_targets import merged, parse_cold, parse_slo
from loadtests.experiments.field_names import FieldFlags
from loadtests.experiments.toml_limits import check_path, check_values, expanded, parse_toml, read_toml
from loadtests.external.addresses import KINDS, SECURITY_KEYS, ExternalConfig, external_from_table, external_table
from loadtests.external.client_security import OPEN, SecurityConfig
from loadtests.traffic.schedule import EVERY_ARM
from loadtests.traffic.settings import TrafficConfig
from servers.config import ArmConfig, CompileConfig, ConfigError, EngineConfig, ModelConfig, build, check_name, override

T = TypeVar("T")

MAX_ARMS = 26


def _range(key: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{key} is {value:g}: give a value from {low:g} to {high:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentArm:
    """One arm and its part in the experiment: a server that tailgate starts (`own`), or one of somebody else."""

    name: str
    own: ArmConfig | None = None
    external: ExternalConfig | None = None
    control: bool = False
    weight: int = 1
    replicas: int = 1

    @property
    def kind(self) -> str:
        """tailgate, openai or oip."""
        return self.external.kind if self.external is not None else "tailgate"

    @property
    def config(self) -> ArmConfig:
        """What tailgate starts. Not for an external arm, of which nothing is known."""
        assert self.own is not None, f"{self.name} is external"
        return self.own

    @property
    def replica_names(self) -> tuple[str, ...]:
        """One name for each server process of the arm."""
        return tuple(f"{self.name}-{index}" for index in range(self.replicas))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialsConfig:
    """How often the experiment is repeated from a fresh start, and how its arms are started.

    `starting_at_once` arms load and warm up at the same time: 1 gives start-up times that nothing disturbed.
    With `swap_devices` arms on devices of one kind (cuda:0, cuda:1) change places from trial to trial.
    With `compile_cache = "fresh"` every replica of every trial compiles from nothing; "shared" keeps one disk cache in
    the output folder for all arms, trials and runs.
    """

    count: int = 1
    starting_at_once: int = 1
    ready_timeout_s: float = 900.0
    swap_devices: bool = True
    compile_cache: Literal["fresh", "shared"] = "fresh"

    def __post_init__(self) -> None:
        _range("trials.count", self.count, 1, 1000)
        _range("trials.starting_at_once", self.starting_at_once, 1, 1024)
        _range("trials.ready_timeout_s", self.ready_timeout_s, 1, 86_400)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitterSettings:
    """The splitter's own settings; its arms and weights come from the experiment. Port 0 takes a free port.

    With a certificate the load goes to it by TLS; the arms behind it are on loopback and stay plaintext.
    """

    port: int = 0
    admin_port: int = 0
    workers: int = 2
    stickiness: Literal["arm", "replica", "off"] = "arm"
    access_log: bool = False
    tls_certificate: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""

    def __post_init__(self) -> None:
        _range("splitter.port", self.port, 0, 65535)
        _range("splitter.admin_port", self.admin_port, 0, 65535)
        _range("splitter.workers", self.workers, 1, 1024)
        if self.port and self.port == self.admin_port:
            raise ConfigError(f"splitter.port and splitter.admin_port are both {self.port}: give two ports, or 0")
        if bool(self.tls_certificate) != bool(self.tls_key):
            given = "tls_certificate" if self.tls_certificate else "tls_key"
            raise ConfigError(f"splitter.{given} is set alone: give tls_certificate and tls_key, or neither")
        if self.tls_client_ca and not self.tls_certificate:
            raise ConfigError("splitter.tls_client_ca is set without tls_certificate: give it and tls_key too")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityConfig:
    """How it is made sure that arms compute the same.

    `served`: after the traffic of each trial every replica answers the same few prompts. `full`: before the first trial
    every arm is measured as `tailgate parity` does, against a float64 `reference`; a failure ends the run. `prompts` 0
    takes half as many again as the engine has slots, from 16 to 64; answers have `tokens` tokens at most.
    """

    served: bool = True
    full: bool = False
    reference: bool = True
    prompts: int = 0
    tokens: int = 24

    def __post_init__(self) -> None:
        _range("parity.prompts", self.prompts, 0, 4096)
        _range("parity.tokens", self.tokens, 1, 4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """Arms, traffic, trials and what is judged. Exactly one arm is the control."""

    name: str
    seed: int = 0
    compare_models: bool = False
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    arms: tuple[ExperimentArm, ...]
    traffic: TrafficConfig
    trials: TrialsConfig = field(default_factory=TrialsConfig)
    slo: Mapping[str, Any] = field(default_factory=dict)  # as written: see analysis.settings.slo_targets
    goodput: Mapping[str, float] = field(default_factory=dict)
    gates: GateLimits = field(default_factory=GateLimits)
    rollout: Rollout = field(default_factory=Rollout)
    splitter: SplitterSettings = field(default_factory=SplitterSettings)
    parity: ParityConfig = field(default_factory=ParityConfig)
    security: SecurityConfig = OPEN

    def __post_init__(self) -> None:
        check_name("name", self.name)  # it names the run's folder
        _range("seed", self.seed, 0, 2**63 - 1)
        _check_arms(self.arms)
        if not self.compare_models:
            _check_comparable(self, "make them equal, or set compare_models = true at the top if that is the question")
        elif self.parity.full:
            check_parity(self)
        _check_design(self)
        _check_external(self)
        _check_security(self)
        try:
            check_goodput(self.goodput)
            targets = parse_slo(self.slo)
            cold = parse_cold(self.slo)
        except RecordError as error:
            raise ConfigError(str(error)) from None
        if cold and self.gates.cold_s == 0:
            raise ConfigError("slo.cold has targets but gates.cold_s is 0: give the cold start some seconds")
        if self.gates.min_goodput_ratio is not None and not (targets or self.goodput):
            raise ConfigError(
                "gates.min_goodput_ratio is set but nothing says what a good request is: add a table [slo] or "
                "[goodput], such as p99_ttft_ms = 500 or ttft = 200"
            )
        if self.traffic.arrivals == "saturation" and not (targets or self.goodput):
            raise ConfigError(
                'traffic.arrivals is "saturation" but nothing says what load counts as held: add a table [slo] or '
                "[goodput], such as p99_ttft_ms = 500 or ttft = 200"
            )

    @property
    def control(self) -> ExperimentArm:
        """The arm that the others are compared with."""
        return next(arm for arm in self.arms if arm.control)

    @property
    def own_arms(self) -> tuple[ExperimentArm, ...]:
        """The arms that tailgate starts."""
        return tuple(arm for arm in self.arms if arm.external is None)

    @property
    def external_arms(self) -> tuple[ExperimentArm, ...]:
        """The arms that are there already: tailgate neither starts them nor sees into them."""
        return tuple(arm for arm in self.arms if arm.external is not None)

    def arm(self, name: str) -> ExperimentArm:
        """The arm called `name`."""
        return next(arm for arm in self.arms if arm.name == name)


# --- Reading ----------------------------------------------------------------------------------------------------------


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
    _resolve_files(table, path.parent)
    for setting in settings:
        _apply(table, setting)
    check_values(table)
    _resolve_files(table, Path())  # what the command line set is relative to where the user stands
    traffic = table.get("traffic")
    for key in ("trace", "conversations"):
        if isinstance(traffic, dict) and isinstance(traffic.get(key), str) and traffic[key]:
            check_path(traffic[key], f"traffic.{key}")
            traffic[key] = str((path.parent / traffic[key]).resolve())
    tokenizer = traffic.get("tokenizer") if isinstance(traffic, dict) else None
    if isinstance(tokenizer, str):
        check_path(tokenizer, "traffic.tokenizer")
    if isinstance(tokenizer, str) and tokenizer and (path.parent / tokenizer).exists():  # else a hub id
        table["traffic"]["tokenizer"] = str((path.parent / tokenizer).resolve())
    if trace:
        _replay(table, trace)
    if flags is not None:
        flags.change(table)
    traffic = table.get("traffic")
    if _lacks_trace(traffic) and not needs_traffic:
        table["traffic"] = {"rate": 1.0}
    elif _lacks_trace(traffic):
        raise ConfigError(f'experiment "{source}" replays a trace and names none: add --trace FILE')
    if seed is not None:
        table["seed"] = seed
    if slo:
        try:
            table["slo"] = merged(_subtable(copy.copy(table), "slo"), slo)
        except RecordError as error:
            raise ConfigError(str(error)) from None
    return from_table(table)


_SECURITY_FILES = ("tls_ca", "tls_certificate", "tls_key", "tls_client_ca", "token_file")


def _resolve_files(table: Mapping[str, Any], folder: Path) -> None:
    """Files that are named are absolute paths: the load generator runs in another folder."""
    for name in ("security", "splitter"):
        named = table.get(name)
        if isinstance(named, dict):
            for key in _SECURITY_FILES:
                if isinstance(named.get(key), str) and named[key]:
                    named[key] = str((folder / expanded(named[key], f"{name}.{key}")).resolve())
    arms = table.get("arms")
    for arm in arms if isinstance(arms, list) else []:
        if not isinstance(arm, dict):
            continue
        own = [(arm, key) for key in ("tls_ca", "tls_certificate", "tls_key", "token_file")]
        for part, key in (*own, (arm.get("openai"), "tokenizer"), (arm.get("oip"), "tokenizer")):
            if not isinstance(part, dict) or not isinstance(part.get(key), str) or not part[key]:
                continue
            path = folder / expanded(part[key], f"{key} of an arm")
            if key != "tokenizer" or path.exists() or part[key].startswith((".", "~")):  # else a hub id
                part[key] = str(path.resolve())


def builtin_names() -> list[str]:
    """Names of the experiments that come with the package."""
    folder = resources.files("loadtests") / "experiments"
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def from_table(table: Mapping[str, Any]) -> Experiment:
    """The experiment that a parsed TOML table describes."""
    rest = dict(table)
    model = build(ModelConfig, _subtable(rest, "model"), where="model")
    engine = build(EngineConfig, _subtable(rest, "engine"), where="engine")
    arms = rest.pop("arms", [])
    if not isinstance(arms, list) or not all(isinstance(item, dict) for item in arms):
        raise ConfigError("arms is not a list of tables: write one [[arms]] table for each arm")
    traffic = build(TrafficConfig, _subtable(rest, "traffic"), where="traffic")
    gates = _gates(_subtable(rest, "gates"), traffic)
    parts: dict[str, Any] = {
        "model": model,
        "engine": engine,
        "arms": tuple(_arm(item, index, model, engine) for index, item in enumerate(arms)),
        "traffic": traffic,
        "trials": build(TrialsConfig, _subtable(rest, "trials"), where="trials"),
        "slo": _subtable(rest, "slo"),
        "goodput": _numbers(_subtable(rest, "goodput"), "goodput"),
        "gates": gates,
        "rollout": _rollout(_subtable(rest, "rollout")),
        "splitter": build(SplitterSettings, _subtable(rest, "splitter"), where="splitter"),
        "parity": build(ParityConfig, _subtable(rest, "parity"), where="parity"),
        "security": build(SecurityConfig, _subtable(rest, "security"), where="security"),
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
        return Path(), (resources.files("loadtests") / "experiments" / f"{name}.toml").read_text(encoding="utf-8")
    what = "is a directory" if path.is_dir() else "does not exist"
    raise ConfigError(
        f'experiment "{source}" {what}: give a TOML file or a built-in name ({", ".join(builtin_names())})'
    )


def _subtable(table: dict[str, Any], key: str) -> dict[str, Any]:
    value = table.pop(key, {})
    if not isinstance(value, dict):
        raise ConfigError(f"{key} is {value!r}: give a table [{key}]")
    return value


def _numbers(table: Mapping[str, Any], where: str) -> dict[str, float]:
    for key, value in table.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"{where}.{key} is {value!r}: give a number")
    return {key: float(value) for key, value in table.items()}


def _gates(table: Mapping[str, Any], traffic: TrafficConfig) -> GateLimits:
    """What an arm must hold, over the blocks of the traffic where the table names no block_s, or 0."""
    given = table.get("block_s", 0)
    if given == 0 and given is not False:
        table = {**table, "block_s": traffic.block_s}
    try:
        return build(GateLimits, filled(table), where="gates")
    except RecordError as error:
        raise ConfigError(str(error)) from None


def _rollout(table: Mapping[str, Any]) -> Rollout:
    try:
        return build(Rollout, table, where="rollout")
    except RecordError as error:
        raise ConfigError(str(error)) from None


_ARM_KEYS = (
    *("name", "kind", "preset", "control", "weight", "replicas"),
    *("device", "shapes", "compile", "model", "engine"),
)
_COMMON_KEYS = ("name", "kind", "control")
_EXTERNAL_KEYS = ("address", "model_name", "vocab_size", "length_ladder", *SECURITY_KEYS)


def _arm(table: Mapping[str, Any], index: int, model: ModelConfig, engine: EngineConfig) -> ExperimentArm:
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
    _check_read(table.get("compile", {}), compiled, base.compile, where)
    try:
        config = replace(base, shapes=shapes, compile=compiled)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    weight = _typed(table, "weight", int, 1, where)
    replicas = _typed(table, "replicas", int, 1, where)
    _range(f"{where}.weight", weight, 0, 1_000_000)
    _range(f"{where}.replicas", replicas, 1, 256)
    return ExperimentArm(
        name=name,
        own=config,
        control=_typed(table, "control", bool, False, where),
        weight=weight,
        replicas=replicas,
    )


def _check_read(table: Mapping[str, Any], compiled: CompileConfig, preset: CompileConfig, where: str) -> None:
    """What the arm's own table asks of the compiler has an effect, or it says itself that compiling is off."""
    asked = [key for key in table if key != "enabled"]
    if asked and not compiled.enabled and "enabled" not in table:
        raise ConfigError(
            f"{where}.compile.{asked[0]} is set but the preset does not compile: add enabled = true, or choose a "
            "compiled preset"
        )
    for key in ("options", "join_projections"):
        is_own = getattr(compiled, key) != getattr(preset, key)  # a preset's goes with its backend
        if is_own and table.get(key) and compiled.enabled and compiled.backend != "inductor":
            raise ConfigError(
                f'{where}.compile.{key} is set but compile.backend is "{compiled.backend}", and only inductor reads '
                "it: remove one of them"
            )


def _external_arm(table: Mapping[str, Any], kind: str, where: str) -> ExperimentArm:
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
    return ExperimentArm(
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


# --- Checks over the whole --------------------------------------------------------------------------------------------


def _check_arms(arms: tuple[ExperimentArm, ...]) -> None:
    if not 2 <= len(arms) <= MAX_ARMS:
        raise ConfigError(f"arms has {len(arms)} entries: give 2 to {MAX_ARMS} [[arms]] tables")
    names = [arm.name for arm in arms]
    for index, name in enumerate(names):
        if name == EVERY_ARM:
            raise ConfigError(f'arms[{index}].name is "{name}", which means every arm: give another')
        # Statistics of the splitter cannot tell "." from "_".
        same = [other for other in range(index) if names[other].replace(".", "_") == name.replace(".", "_")]
        if same:
            raise ConfigError(
                f'arms[{index}].name is "{name}", the name of arms[{same[0]}]: '
                'give each arm a name of its own ("." and "_" count as equal)'
            )
    replicas = [replica for arm in arms for replica in arm.replica_names]
    for replica in replicas:
        if replicas.count(replica) > 1:
            raise ConfigError(f'two replicas would be called "{replica}": rename one of the arms {", ".join(names)}')
    controls = [arm.name for arm in arms if arm.control]
    if not controls:
        raise ConfigError("no arm is the control: set control = true on exactly one of " + ", ".join(names))
    if len(controls) > 1:
        raise ConfigError(f"{len(controls)} arms are the control ({', '.join(controls)}): keep control = true on one")


def check_parity(experiment: Experiment) -> None:
    """Arms differ in `shapes` and `compile` alone, whatever the experiment says: nothing else can have parity."""
    if experiment.external_arms:
        raise ConfigError(
            f'arm "{experiment.external_arms[0].name}" is external and parity looks into the arms that it starts: '
            "leave external arms out, or set parity.full = false"
        )
    _check_comparable(experiment, "make them equal, as parity compares policies alone")


def _check_comparable(experiment: Experiment, remedy: str) -> None:
    """Arms differ in `shapes` and `compile` alone. The error names arm, key, both values and the remedy."""
    control = experiment.control
    for index, arm in enumerate(experiment.arms):
        if arm.external is not None:
            raise ConfigError(
                f'arms[{index}] "{arm.name}" is external (kind = "{arm.kind}"): nothing can check that it differs from '
                "the other arms in its policy alone; write compare_models = true at the top of the experiment to "
                "compare them as whole servers"
            )
    for index, arm in enumerate(experiment.arms):
        for part in ("model", "engine"):
            mine, other = asdict(getattr(arm.config, part)), asdict(getattr(control.config, part))
            for key, value in mine.items():
                if value == other[key] or (key == "device" and same_kind_of_device(value, other[key])):
                    continue
                raise ConfigError(
                    f'arms[{index}].{part}.{key} is {value!r} but the control "{control.name}" has {other[key]!r}: '
                    f'"{arm.name}" would not be comparable; {remedy}'
                )


def same_kind_of_device(one: str, other: str) -> bool:
    """Whether two devices are alike: cuda:0 and cuda:1 are, cpu and cuda are not."""
    return one.partition(":")[0] == other.partition(":")[0]


def _check_design(experiment: Experiment) -> None:
    traffic, arms = experiment.traffic, experiment.arms
    if traffic.design == "split" and sum(arm.weight for arm in arms) == 0:
        raise ConfigError("every arm has weight 0: give at least one arm a weight of 1 or more")
    if traffic.design != "split":
        for index, arm in enumerate(arms):
            if arm.weight != 1:
                raise ConfigError(
                    f'arms[{index}].weight is {arm.weight} but traffic.design = "{traffic.design}" does not split by '
                    'weight: remove it or use design = "split"'
                )
    # Of an external arm nobody knows how many machines stand behind an address.
    sizes = {arm.replicas for arm in experiment.own_arms}
    if traffic.design == "mirrored" and len(sizes) > 1:
        raise ConfigError(
            f"arms have {', '.join(f'{arm.name}: {arm.replicas}' for arm in experiment.own_arms)} replicas, "
            "but a mirrored design gives each arm the same load: "
            'make them equal, or use design = "split"'
        )
    ports = {"splitter.port": experiment.splitter.port, "splitter.admin_port": experiment.splitter.admin_port}
    for key, port in ports.items():
        if traffic.remote_workers and port and port == traffic.master[1]:
            raise ConfigError(f"{key} and the port of traffic.master_bind are both {port}: give two ports")
    own = [arm.name for arm in experiment.own_arms]
    if traffic.remote_workers and own and (traffic.direct or experiment.external_arms):
        raise ConfigError(
            f"traffic.remote_workers is {traffic.remote_workers} but {', '.join(own)} would be reached without the "
            "splitter, at an address of this host alone: "
            + ("serve them elsewhere and name them as external arms" if experiment.external_arms else "remove direct")
        )
    if traffic.direct and max(sizes, default=1) > 1 and not experiment.external_arms:
        raise ConfigError(
            f"traffic.direct is true but arms have up to {max(sizes)} replicas, which only the splitter balances: "
            "remove direct, or give each arm one replica"
        )
    if traffic.design == "switchback":
        needed = len(arms) * traffic.block_s
        if traffic.duration_s < needed:
            raise ConfigError(
                f"traffic.duration_s is {traffic.duration_s:g} but {len(arms)} arms take turns of block_s = "
                f"{traffic.block_s:g}: give at least {needed:g}"
            )
        if experiment.gates.block_s != traffic.block_s:
            raise ConfigError(
                f"gates.block_s is {experiment.gates.block_s:g} but the switchback has blocks of traffic.block_s = "
                f"{traffic.block_s:g}: remove gates.block_s"
            )


def _check_security(experiment: Experiment) -> None:
    """TLS and the token of the run's own splitter and arms are said on both sides, and not where nobody needs them."""
    security, splitter = experiment.security, experiment.splitter
    if security.token and not experiment.own_arms:
        raise ConfigError(
            "[security] has a token but every arm is external: give token_env in the [[arms]] table that needs it"
        )
    if splitter.tls_certificate and experiment.traffic.direct:
        raise ConfigError(
            "splitter.tls_certificate is set but traffic.direct sends past the splitter: remove one of them"
        )
    if security.tls and not splitter.tls_certificate:
        raise ConfigError(
            "[security] says how TLS is done but the run's splitter has none: set splitter.tls_certificate and "
            "tls_key, or remove the tls_ keys (external arms have theirs in their own [[arms]] table)"
        )
    if splitter.tls_client_ca and not security.tls_certificate:
        raise ConfigError(
            "splitter.tls_client_ca asks clients for a certificate and the load has none: set security.tls_certificate "
            "and tls_key"
        )


def _check_external(experiment: Experiment) -> None:
    """What cannot be had with an arm that tailgate does not start is refused, and so is what would have no effect."""
    external = experiment.external_arms
    if not external:
        return
    name = external[0].name
    if experiment.traffic.design == "split":
        raise ConfigError(
            f'traffic.design is "split" but arm "{name}" is external, and the splitter has only tailgate\'s own arms '
            'behind it: use design = "mirrored" or "switchback", or judge your own gateway\'s split by its records '
            "(tailgate analyze)"
        )
    if experiment.splitter != SplitterSettings():
        raise ConfigError(
            f'[splitter] is set but arm "{name}" is external, so that all arms are dialled directly: remove the table'
        )
    if experiment.parity.full:
        check_parity(experiment)


# --- The command line's changes ---------------------------------------------------------------------------------------

_STEP = re.compile(r"([A-Za-z0-9_-]+)(?:\[([0-9]{1,6})\])?")


def parse_setting(setting: str) -> tuple[str, Any]:
    """(key path, value) of a "key.path=value" string; the value is read as TOML, and as a string when it is none."""
    key, equals, text = setting.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f'--set "{setting}" is not KEY=VALUE: write for example traffic.duration_s=30')
    if key.count(".") >= DEEPEST:
        raise ConfigError(f"--set: a key has {key.count('.') + 1} parts; the limit is {DEEPEST}: give one that exists")
    if key.rpartition(".")[2] in (*_SECURITY_FILES, "token_env") and text.strip() in ("", '""', "''"):
        # Most likely a variable of the shell that is not set: what was to be closed must not open for it.
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
        last = position == len(steps) - 1
        if isinstance(current, list):
            current = _entry(current, key, name)
            if last:
                raise ConfigError(f"--set {key} names a whole table: add the key in it, such as {key}.replicas")
            continue
        if index is None and last:
            current[name] = value
            return
        current = current.setdefault(name, {})
        if index is not None:
            if not isinstance(current, list) or int(index) >= len(current):
                size = len(current) if isinstance(current, list) else 0
                raise ConfigError(f"--set {key}: {name} has {size} entries, counted from 0")
            if last:
                raise ConfigError(f"--set {key} names a whole table: add the key in it, such as {key}.replicas")
            current = current[int(index)]
        if not isinstance(current, (dict, list)):
            raise ConfigError(f"--set {key}: {'.'.join(steps[: position + 1])} is {current!r}, not a table")


def _entry(entries: list[Any], key: str, name: str) -> dict[str, Any]:
    for entry in entries:
        if isinstance(entry, dict) and entry.get("name", entry.get("preset")) == name:
            return entry
    raise ConfigError(f'--set {key}: no entry is called "{name}": use its name, or its number as in arms[1]')


def _lacks_trace(traffic: Any) -> bool:
    if not isinstance(traffic, dict) or traffic.get("trace"):
        return False
    return "trace" in (traffic.get("arrivals"), traffic.get("workload"))


def _apply(table: dict[str, Any], setting: str) -> None:
    key, value = parse_setting(setting)
    set_path(table, key, value)
    name = key.removeprefix("traffic.")
    if name == key or name not in ("trace", "conversations", "tokenizer") or not isinstance(value, str) or not value:
        return
    check_path(value, f"--set {key}")
    if name != "tokenizer" or Path(value).exists():
        # On the command line a path is relative to where the user stands, not to the experiment's file.
        table["traffic"][name] = str(Path(value).resolve())


# What describes made-up arrivals and lengths, and has no meaning once a trace brings both.
_REPLACED_BY_TRACE = (
    *("rate", "rates", "burstiness", "turns_mean", "think_time_s", "conversations"),
    *("step_s", "settle_s", "concurrency", "pause_s"),
)


def _replay(table: dict[str, Any], trace: str) -> None:
    if not Path(trace).is_file():
        raise ConfigError(
            f'--trace "{trace}" does not exist: give an Azure CSV, a Mooncake JSON Lines file or your own CSV'
        )
    traffic = _subtable(copy.copy(table), "traffic")
    kept = {key: value for key, value in traffic.items() if key not in _REPLACED_BY_TRACE}
    table["traffic"] = {**kept, "arrivals": "trace", "workload": "trace", "trace": str(Path(trace).resolve())}


# --- Writing ----------------------------------------------------------------------------------------------------------


def to_toml(experiment: Experiment) -> str:
    """The resolved experiment as TOML: every setting is there, defaults and presets included."""
    return tomli_w.dumps(to_table(experiment))


def to_table(experiment: Experiment) -> dict[str, Any]:
    """The resolved experiment as plain tables. A key whose value is None is left out: TOML has none."""
    return {
        "name": experiment.name,
        "seed": experiment.seed,
        "compare_models": experiment.compare_models,
        "model": _plain(asdict(experiment.model)),
        "engine": _plain(asdict(experiment.engine)),
        "arms": [_arm_table(arm, experiment) for arm in experiment.arms],
        "traffic": _plain(asdict(experiment.traffic)),
        "trials": _plain(asdict(experiment.trials)),
        "slo": _plain(experiment.slo),
        "goodput": dict(experiment.goodput),
        "gates": _plain(asdict(experiment.gates)),
        "rollout": _plain(asdict(experiment.rollout)),
        "splitter": _plain(asdict(experiment.splitter)),
        "parity": _plain(asdict(experiment.parity)),
        "security": _plain(asdict(experiment.security)),
    }


def _arm_table(arm: ExperimentArm, experiment: Experiment) -> dict[str, Any]:
    if arm.external is not None:
        return {"name": arm.name, "control": arm.control, **_plain(external_table(arm.external))}
    table: dict[str, Any] = {
        "name": arm.name,
        "preset": arm.config.preset,
        "control": arm.control,
        "weight": arm.weight,
        "replicas": arm.replicas,
        "shapes": _plain(asdict(arm.config.shapes)),
        "compile": _plain(asdict(arm.config.compile)),
    }
    for part, common in (("model", experiment.model), ("engine", experiment.engine)):
        shared = asdict(common)
        own = {key: value for key, value in asdict(getattr(arm.config, part)).items() if value != shared[key]}
        if own:
            table[part] = _plain(own)
    return table


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
