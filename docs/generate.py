"""Write the reference from what the code itself reads: pages and schemas, which hooks.py adds to the site."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, get_args

import prometheus_client.metrics_core
import pyarrow as pa
import tomli_w
import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tailgate.analysis.checks.table import RULES
from tailgate.analysis.glossary import GLOSSARY
from tailgate.analysis.records import schemas
from tailgate.analysis.settings.metrics import METRIC_NAMES, gate_label
from tailgate.analysis.settings.slo_targets import SLO_SCHEMA
from tailgate.analysis.summary import model as summary
from tailgate.analysis.summary.summary import EXIT_CODES
from tailgate.loadtests.commands.exits import EXIT_BROKE, EXIT_USAGE
from tailgate.loadtests.commands.main import COMMANDS, app
from tailgate.loadtests.experiments.model import Experiment, ManagedArm, json_schema
from tailgate.loadtests.external.arms import ExternalArm, OipOptions, OpenAiOptions, TelemetryConfig
from tailgate.loadtests.external.client_security import SecurityConfig
from tailgate.loadtests.generator.histogram import ArmTally
from tailgate.loadtests.traffic import schedule
from tailgate.loadtests.traffic.settings import UsedWith
from tailgate.loadtests.trials.run_metrics import RunCollector
from tailgate.loadtests.trials.status import ArmLoad, Load, ReplicaState, Status
from tailgate.servers.config import PRESET_POLICIES, CompileConfig, ShapeConfig, with_preset
from tailgate.servers.fields import DEFAULT, as_toml
from tailgate.servers.front.metrics import FrontMetrics
from tailgate.servers.presets import PRESETS, RANDOM_ENCODERS, RANDOM_PRESETS
from tailgate.servers.rpc.telemetry_pb2 import CompileEvent, MemoryReading

# The page that explains a table, from docs/.
_EXPLAINED = {
    "model": "explanation/arms.md#quantised-weights",
    "engine": "explanation/arms.md#what-a-step-is",
    "arms": "explanation/arms.md",
    "arms.shapes": "explanation/arms.md#what-a-step-is",
    "arms.compile": "explanation/arms.md#what-is-compiled",
    "external": "how-to/external-servers.md",
    "traffic": "explanation/traffic.md",
    "trials": "explanation/traffic.md#designs",
    "slo": "explanation/method.md#objectives-and-errors",
    "gates": "explanation/method.md#gates",
    "ramp": "how-to/ramp.md",
    "rollout": "how-to/frontier.md",
    "users": "how-to/ramp.md#production-traffic",
    "splitter": "how-to/security.md#the-splitter",
    "parity": "explanation/parity.md",
    "machines": "how-to/gpus.md",
    "pressure": "how-to/gpus.md#pressure",
    "security": "how-to/security.md",
}


def pages() -> dict[str, str]:
    """Return the text of every generated file, by its path from docs/."""
    return {
        "reference/cli.md": cli(),
        "reference/exit-codes.md": exit_codes(),
        "reference/settings.md": settings(),
        "reference/presets.md": presets(),
        "reference/gates.md": gates(),
        "reference/metrics.md": metrics(),
        "reference/files.md": files(),
        "reference/glossary.md": glossary_page(),
        "schema/experiment.schema.json": json_schema(),
        f"schema/summary-{summary.SCHEMA}.schema.json": summary.json_schema(),
    }


def glossary_page() -> str:
    """Return the page of all terms that tooltips define."""
    terms = sorted(GLOSSARY.items(), key=lambda item: item[0].lower())
    return f"""
# Glossary

The terms of reports and of the live page, as their tooltips define them. [The method](../explanation/method.md) has the
formulas.

{_table(("term", "meaning"), terms)}"""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.10g}"


Row = tuple[str, str, str, str]  # key, what it takes, its default, what it does


def settings() -> str:
    """Return the page of all keys of an experiment."""
    parts = [
        """
# Settings

Every key of an experiment's TOML file. `--set traffic.rate=4` replaces one on the command line; of an arm
`--set arms.NAME.compile.mode=default`. Unknown keys, values out of range, and keys that contradict each other or have
no effect are refused before anything starts. Paths are relative to the experiment's file, with `--set` to the current
folder, as is a `model.id` without `./` or `../`. A file has at most 1 MiB, 32 levels of keys and integers of 64 bits.
[A JSON Schema](../schema/README.md) completes and checks keys in editors.
"""
    ]
    for heading, intro, explained, rows in sections():
        link = f" [Explanation](../{explained})." if explained else ""
        parts.append(f"\n## {heading}\n\n{intro}{link}\n\n{_table(('key', 'value', 'default', 'meaning'), rows)}")
    return "".join(parts)


def sections() -> Iterator[tuple[str, str, str, list[Row]]]:
    """Yield heading, introduction, page and rows of each table, in the order of the experiment's keys."""
    scalars = [
        name for name, field in Experiment.model_fields.items() if not _is_table(field) and name not in ("arms", "slo")
    ]
    yield "Top level", "Keys above all tables.", "", _rows(Experiment, "", scalars)
    for name, field in Experiment.model_fields.items():
        if name == "arms":
            yield from _arm_sections()
        elif name == "slo":
            yield "`[slo]`", _line(field.description), _EXPLAINED[name], _objectives()
        elif _is_table(field):
            model: type[BaseModel] = field.annotation  # type: ignore[assignment]
            yield f"`[{name}]`", _line(model.__doc__), _EXPLAINED[name], _rows(model, f"{name}.")


def _is_table(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def _arm_sections() -> Iterator[tuple[str, str, str, list[Row]]]:
    own = [name for name in ExternalArm.model_fields if name != "telemetry"]
    parts: list[tuple[str, type[BaseModel], str, Sequence[str]]] = [
        ("", ManagedArm, "arms", ()),
        ("shapes", ShapeConfig, "arms.shapes", ()),
        ("compile", CompileConfig, "arms.compile", ()),
        ("", ExternalArm, "external", own),
        ("openai", OpenAiOptions, "external", ()),
        ("oip", OipOptions, "external", ()),
        ("telemetry", TelemetryConfig, "external", ()),
    ]
    for name, model, explained, only in parts:
        heading = f"`[arms.{name}]`" if name else "`[[arms]]`"
        heading += " of an external arm" if model is ExternalArm else ""
        yield heading, _line(model.__doc__), _EXPLAINED[explained], _rows(model, f"{name or 'arms'}.", only)


def _objectives() -> list[Row]:
    (limit,) = SLO_SCHEMA["patternProperties"].values()
    keys = {"pQ_METRIC_ms": limit, **SLO_SCHEMA["properties"]}
    return [(f"`slo.{key}`", _value(schema, {}), "–", schema["description"]) for key, schema in keys.items()]


def _rows(model: type[BaseModel], prefix: str, only: Sequence[str] = ()) -> list[Row]:
    schema = model.model_json_schema()
    rows = []
    # Keys of TLS and tokens come last, which tables inherit.
    for name in sorted(only or model.model_fields, key=SecurityConfig.model_fields.__contains__):
        field = model.model_fields[name]
        text, _, default = _line(field.description).partition(DEFAULT)
        for used in field.metadata:
            if isinstance(used, UsedWith):
                *others, last = (f"`{value}`" for value in used.values)
                text += f" With `{used.key}` {', '.join(others)}{' or ' if others else ''}{last}."
        value = _value(schema["properties"][name], schema.get("$defs", {}))
        rows.append((f"`{prefix}{name}`", value, default.rstrip(".") or _default(field), text.strip()))
    return rows


def _line(text: str | None) -> str:
    return " ".join((text or "").split())


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if value is None or isinstance(value, BaseModel) or value in ("", (), {}):
        return "–"
    return f"`{as_toml(_short(value))}`"


def _short(value: Any) -> Any:
    """Return the default without the fraction .0, which a user need not type."""
    if isinstance(value, tuple):
        return [_short(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _value(schema: Mapping[str, Any], defs: Mapping[str, Any]) -> str:
    """Return the type of a value in words, with its choices or limits."""
    if "$ref" in schema:
        return _value(defs[schema["$ref"].rpartition("/")[2]], defs)
    if "anyOf" in schema:
        return "; or ".join(_value(item, defs) for item in schema["anyOf"] if item.get("type") != "null")
    if choices := schema.get("enum", [schema["const"]] if "const" in schema else []):
        return ", ".join(f"`{choice}`" for choice in choices)
    if schema.get("type") == "array":
        if "prefixItems" in schema:
            return f"[{', '.join(_value(item, defs) for item in schema['prefixItems'])}]"
        least = f", {schema['minItems']} or more" if "minItems" in schema else ""
        return f"list: {_value(schema['items'], defs)}{least}"
    if isinstance(values := schema.get("additionalProperties"), Mapping):
        return f"table: {_value(values, defs)}"
    name = {"integer": "whole number", "boolean": "true or false", "string": "text", "object": "table"}
    return name.get(schema.get("type", "number"), "number") + _limits(schema)


def _limits(schema: Mapping[str, Any]) -> str:
    low, above, high = (schema.get(key) for key in ("minimum", "exclusiveMinimum", "maximum"))
    if above is not None:
        return f" above {_number(above)}"
    if low is not None and high is not None:
        return f", {_number(low)} to {_number(high)}"
    return "" if low is None else f", {_number(low)} or more"


_SHAPE_KEYS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings")


def presets() -> str:
    """Return the page of presets, and of models with random weights."""
    parts = ["\n# Presets\n\nWhat each preset of an arm sets. [How arms differ](../explanation/arms.md).\n"]
    for preset in PRESETS:
        table = with_preset({"preset": preset})
        policy = {key: table[key] for key in ("shapes", "compile") if table[key]}
        toml = tomli_w.dumps({"arms": policy}).strip()
        sets = f"```toml\n{toml}\n```\n" if policy else "Sets nothing: every key has its default.\n"
        parts.append(f"\n## `{preset}`\n\n{PRESET_POLICIES[preset][0]}\n\n{sets}")
    shapes = [
        (
            f"`random:{name}`",
            "embed" if name in RANDOM_ENCODERS else "generate",
            *(_number(shape[key]) for key in _SHAPE_KEYS),
        )
        for name, shape in RANDOM_PRESETS.items()
    ]
    head = ("id", "task", "layers", "hidden size", "heads", "vocabulary", "positions")
    text = "Shapes of known models, for `model.id`. They need no download and show only how fast a model runs."
    return "".join(parts) + f"\n## Random weights\n\n{text}\n\n{_table(head, shapes)}"


class Question(NamedTuple):
    """What a gate asks."""

    gate: str  # its name, or how its name begins
    kind: str
    asks: str
    settings: tuple[str, ...] = ()  # its limits, and when it is asked
    passes: str = "at most the limit"
    fails: str = "above the limit"


# "Surely" means one-sided at `gates.alpha`. What is neither PASS nor FAIL is INCONCLUSIVE.
QUESTIONS = (
    Question(
        "noninferiority",
        "noninferiority",
        "Is a latency quantile of the arm at most a margin above the control's?",
        ("gates.margin", "gates.margins", "gates.metrics", "gates.quantiles"),
        "the upper limit of the ratio is below 1 + margin, and so is the ratio over the whole run",
        "the lower limit is above 1 + margin",
    ),
    Question(
        "slo",
        "slo",
        "Does the arm keep an objective?",
        ("slo.pQ_METRIC_ms", "slo.error_pct"),
        "the share of requests beyond the limit is surely at most what the quantile allows",
        "it is surely more, and at least three requests are beyond",
    ),
    Question(
        "goodput",
        "goodput",
        "In a search for load: does the arm hold as much as the control, less the margin?",
        ("gates.margin", "traffic.arrivals"),
        "by the outer ends of both intervals it holds at least 1 − margin of the control's load",
        "by the outer ends it holds less",
    ),
    Question(
        "errors",
        "error",
        "Are failed requests rare?",
        ("gates.max_error_pct",),
        "the share of failed requests is surely at most the limit",
        "it is surely more, and at least three failed",
    ),
    Question("deaths", "error", "Did every managed replica live? The limit is 0.", (), "none died", "any died"),
    Question(
        "refused",
        "error",
        "Of an arm that refuses what no graph fits: how many requests were refused?",
        ("gates.max_refused_pct", "compile.strict"),
    ),
    Question(
        "recompiles",
        "recompile",
        "How often did the arm compile while serving, in its worst trial? `compile`, `recompile`, `limit_hit` and "
        "`jit` events count.",
        ("gates.max_recompiles",),
    ),
    Question(
        "longest compile stall",
        "recompile",
        "How long did compiles delay one request at most?",
        ("gates.max_stall_s",),
    ),
    Question(
        "compile stall per minute",
        "recompile",
        "How many seconds of each minute did a replica compile?",
        ("gates.max_stall_s_per_min",),
    ),
    Question("requests hit", "recompile", "How many requests did compiles delay?", ("gates.max_requests_hit_pct",)),
    Question(
        "eager steps",
        "recompile",
        "Of a compiled arm of which any step ran eagerly: how many did, of the kind of step with the largest share?",
        ("gates.max_eager_steps_pct",),
    ),
    Question(
        "parity",
        "parity",
        "Does the arm compute what the control does, where it was measured, is required or can be judged?",
        ("parity.full", "parity.served", "parity.max_kl", "parity.min_cosine", "parity.max_different"),
        "it was measured and passed; in float32 all answers are the control's; answers of an external arm are the "
        "control's but for `parity.max_different`",
        "it failed, or an answer in float32 differs; answers of an external arm part at surely more than one in four "
        "tokens",
    ),
    Question(
        "memory ratio",
        "memory",
        "If a limit is set: how much more memory does a replica hold at its peak than one of the control?",
        ("gates.max_memory_ratio",),
        "the upper limit of the ratio is at most the limit",
        "the lower limit is above it",
    ),
    Question(
        "ramp",
        "ramp",
        "In a ramp: did the candidate reach all of the traffic?",
        ("ramp.steps",),
        "it was promoted",
        "it was rolled back",
    ),
)

_KINDS = {"noninferiority": "non-inferiority", "slo": "SLO", "recompile": "compiles", "error": "errors"}


def gates() -> str:
    """Return the page of gates and checks."""
    defaults = {key: default for _, _, _, rows in sections() for key, _, default, _ in rows}
    questions = [
        (
            f"*{gate_label(item.gate)}*",
            item.asks,
            "; ".join(f"`{key}` ({defaults[f'`{key}`']})" for key in item.settings) or "–",
            item.passes,
            item.fails,
        )
        for item in QUESTIONS
    ]
    checks = [
        (
            f"*{name}*" if not number else "",
            rule.sees,
            ", ".join(_KINDS.get(kind, kind) for kind in rule.opens),
            rule.remedy or "A longer run.",
        )
        for name, rules in groupby(RULES, lambda rule: rule.name)
        for number, rule in enumerate(rules)
    ]
    return f"""
# Gates and checks

[The method](../explanation/method.md) explains how gates are judged and why.

## Gates

An arm passes if all its gates pass. *Surely* means one-sided at `gates.alpha`. What is neither PASS nor FAIL is
INCONCLUSIVE.

{_table(("gate", "asks", "settings (default)", "PASS", "FAIL"), questions)}
## Checks

A failed check turns the gates that it opens INCONCLUSIVE; [the
method](../explanation/method.md#when-a-run-is-not-believed) says which verdicts survive. What opens SLOs opens goodput.

{_table(("check", "sees", "opens", "remedy"), checks)}"""


def metrics() -> str:
    """Return the page of latencies and of Prometheus metrics."""
    latencies = [(f"`{key}`", name, GLOSSARY[name]) for key, name in METRIC_NAMES.items()]
    front = FrontMetrics("arm", "arm-0")
    front.requests(status="OK").inc()
    front.steps(kind="decode", fell_back="false").inc()
    front.count_compile(CompileEvent(kind="compile", phase="serving"))
    front.show_memory(MemoryReading(reserved_bytes=1))
    load = Load(arms={"A": ArmLoad()}, accounts={"0": {"histograms": {"A": ArmTally().histograms()}}})
    of_run = _metric_rows(RunCollector(Status(load=load, replicas={"A-0": ReplicaState()})).collect())
    return f"""
# Metrics

## Latencies

Latency counts from the scheduled time of a request. The first column is the name in `[gates]` and `[slo]`.

{_table(("key", "name", "meaning"), latencies)}
## Prometheus: a run

On the page of `--metrics`. [Watching a run](../how-to/monitoring.md).

{_table(("metric", "type", "labels", "meaning"), of_run)}
## Prometheus: a replica

On the page of `tailgate serve --metrics-port`, and on that of a run.

{_table(("metric", "type", "labels", "meaning"), _metric_rows(front.registry.collect()))}"""


def _metric_rows(families: Iterable[prometheus_client.metrics_core.Metric]) -> list[tuple[str, str, str, str]]:
    rows = []
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = dict.fromkeys(label for sample in family.samples for label in sample.labels)
        rows.append((f"`{name}`", family.type, ", ".join(f"`{label}`" for label in labels), family.documentation))
    return rows


_FILES = {
    "experiment.toml": "the resolved experiment: every setting, with defaults and presets; you can run it again. "
    "End it with the line `# edited` after a change, or the run is not judged",
    "environment.json": "versions, commit, processor, GPUs, clock, and a machine id of twelve characters; no host name "
    "and no environment variables",
    "trial-NN/trial.json": "start, arms, start-up cost, deaths, blind spots, and whether the trial was completed",
    "trial-NN/schedule.arrow": "the planned traffic",
    "trial-NN/requests-WORKER.arrow": "one row for each request",
    "trial-NN/compile_events.arrow": "one row for each compile event",
    "trial-NN/steps.arrow": "one row for each engine step",
    "trial-NN/machines*.arrow": "hosts, devices and processes, sampled every `machines.sample_s`",
    "trial-NN/generator-WORKER.json": "the account that a load process keeps of itself: lag, load, dropped records",
    "trial-NN/answers-ARM.json": "the answers of an external arm to the same prompts",
    "trial-NN/logs/": "one log for each replica, Envoy, Locust and the machine monitor",
    "parity.json": "how much each arm differs from the control and from float64 (`parity.full`, `tailgate parity`)",
    "frontier.json": "how a search ended (`tailgate frontier`): its time, and why arms left it",
    "weights.jsonl": "every change of the splitter's weights",
    "interim.jsonl": "every interim analysis",
    "status.json, load.jsonl": "what the live page reads",
    "runs.json": "in a folder that joins several runs: their names",
    "summary.json": "the verdict, for programs",
    "report.html, report.md, junit.xml": "the verdict, for people and CI",
}


def files() -> str:
    """Return the page of a run directory and of the columns of its records."""
    parts = [
        "\n# Files\n\n## A run directory\n\n",
        _table(("file", "holds"), ((f"`{name}`", text) for name, text in _FILES.items())),
        """
`summary.json` has [a published schema](../schema/README.md). Record files are Arrow IPC streams; Parquet and JSON Lines
with the same columns are accepted. Each ends with its number of rows and a checksum. The end of a name is its unit, and
times are ns since the epoch on a clock that is monotonic within a run. A column is null where its value is not known or
does not apply.
""",
    ]
    tables: list[tuple[str, pa.Schema, Mapping[str, str], Sequence[str]]] = [
        (name, schema, schemas.MEANINGS[name], schemas.REQUIRED[name]) for name, schema in schemas.TABLES.items()
    ]
    planned = pa.schema([*schedule.SCHEDULE, *schedule.BLOCKS])
    tables.append(("schedule", planned, schedule.MEANINGS, schedule.SCHEDULE.names))
    for name, schema, meanings, required in tables:
        rows = (
            (f"`{field.name}`", str(field.type), "yes" if field.name in required else "", meanings[field.name])
            for field in schema
        )
        parts.append(f"\n## `{name}`\n\n{_table(('column', 'type', 'required', 'meaning'), rows)}")
    kinds = ((f"`{kind}`", text) for kind, text in schemas.EVENT_MEANINGS.items())
    parts.append(f"\n## Kinds of compile events\n\n{_table(('kind', 'when'), kinds)}")
    return "".join(parts)


_EXIT_CODES = re.compile(r"\n*Exit codes: (.*?)\s*\Z", re.S)


def cli() -> str:
    """Return the page of all commands."""
    parts = ["\n# Command line\n\n[Exit codes](exit-codes.md) of all commands are on a page of their own.\n"]
    group: Any = typer.main.get_command(app)
    for name, module in COMMANDS.items():
        command = group.commands[name]
        help_text = _EXIT_CODES.sub("", command.help)
        arguments = [param for param in command.params if param.param_type_name == "argument"]
        options = [param for param in command.params if param.param_type_name == "option" and not param.hidden]
        usage = " ".join(["tailgate", name, *(param.metavar for param in arguments), "[OPTIONS]"])
        rows = [(f"`{param.metavar}`", "", param.help or "") for param in arguments]
        rows += [(_option(param), _option_default(param), param.help or "") for param in options]
        examples = "\n".join(line.removeprefix("  ") for line in module.EXAMPLES.split("\n"))
        table = _table(("argument or option", "default", "meaning"), rows)
        parts.append(
            f"\n## `tailgate {name}`\n\n```text\n{usage}\n```\n\n{help_text}\n\n{table}\n```text\n{examples}\n```\n"
        )
    return "".join(parts)


def _option(param: Any) -> str:
    value = ""
    if not getattr(param, "is_flag", False):
        value = f" {param.metavar or '|'.join(get_args(param.type_descriptor.annotation))}"
    return ", ".join(f"`{name}{value}`" for name in param.opts)


def _option_default(param: Any) -> str:
    value = param.default
    return "" if value in (None, "", False) else "required" if param.required else f"`{value}`"


def exit_codes() -> str:
    """Return the page of exit codes."""
    general = {EXIT_CODES[verdict]: verdict for verdict in ("PASS", "INCONCLUSIVE", "FAIL")}
    general[EXIT_USAGE] = "bad usage or configuration; nothing was started"
    general[EXIT_BROKE] = "the run broke or was interrupted; its records are kept, and judged if they hold any request"
    group: Any = typer.main.get_command(app)
    own = []
    for name in COMMANDS:
        found = _EXIT_CODES.search(group.commands[name].help)
        text = found[1].rstrip(".") if found else "0 ended or stopped in order, 2 bad usage, 1 it broke"
        own.append((f"`tailgate {name}`", text))
    return f"""
# Exit codes

{_table(("code", "meaning"), ((str(code), text) for code, text in general.items()))}
An error is one line on stderr with the value, the limit and the remedy. An unexpected error is also one line, and names
the file that holds its traceback.

{_table(("command", "exit codes"), own)}"""
