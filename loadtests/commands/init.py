"""`tailgate init`: an experiment of one's own, as a commented TOML file."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tailgate.loadtests.commands.options import Json, number
from tailgate.servers import stdout
from tailgate.servers.complaint import ConfigError

EXAMPLES = """\
  tailgate init
  tailgate init canary.toml --model ./llama --rate 4 --p99-ms 500
  tailgate init canary.toml --model meta-llama/Llama-3.2-1B --rate 4
  tailgate init servers.toml --url http://10.0.0.7:8000/v1 --url http://10.0.0.8:8000/v1 --model NAME --rate 2"""

_PROMPT_TOKENS, _NEW_TOKENS = 1024, 256
_TURN_S = 10.0
_GENERATES = ("CausalLM", "LMHead", "ForConditionalGeneration")  # in the names of architectures
_positive = number(float, 1e-3, 1e6)


def command(
    path: Annotated[str, typer.Argument(metavar="[PATH]", help="The file to write.")] = "my.toml",
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="A model's folder or hub id; with --url the name by which the servers know it."
        ),
    ] = None,
    url: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="A server that already runs: the one in service, then its successor."),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(metavar="N", parser=_positive, help="Requests/s that one replica gets.")
    ] = None,
    p99_ms: Annotated[
        float | None,
        typer.Option(
            metavar="MS",
            parser=_positive,
            help="The p99 TTFT that users accept (of an encoder: E2E). Default: no objective.",
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Write an experiment for your model or your two servers.

    The file is short and commented, and passes `tailgate check`. Its run is long enough for the gates on p99 at that
    rate. At a terminal it asks for what no option gives; elsewhere --model and --rate are required. Next to the file
    it writes the JSON Schema with which editors complete and check settings.
    """
    from tailgate.analysis.wording import counted
    from tailgate.loadtests.experiments.files import check_makeable, parse_toml
    from tailgate.loadtests.experiments.model import SCHEMA_ID
    from tailgate.loadtests.experiments.reading import SCHEMA, from_table, write_schema
    from tailgate.loadtests.trials.preflight import check_model
    from tailgate.servers.presets import check_name

    target, urls = Path(path), url or []
    if target.suffix != ".toml":
        raise ConfigError(f'"{path}" is no TOML file: give one such as {target.stem or "my"}.toml')
    if target.exists() or target.is_symlink():
        raise ConfigError(f'"{path}" exists: give another file, or remove it')
    check_makeable(target.parent, f'"{path}": folder')
    try:
        check_name(target.stem)
    except ValueError as error:
        raise ConfigError(f'"{path}": the name of the experiment {error}') from None
    if not urls:
        model = _asked(model, "--model", "model folder, Hugging Face id, random:tiny, or the URLs of two servers")
        if "://" in model:
            urls, model = re.split(r"[,\s]+", model.strip()), None
    if len(urls) not in (0, 2):
        servers = counted(len(urls), "server")
        raise ConfigError(f"{servers} given: write --url twice, for the one in service and then for its successor")
    model = _asked(model, "--model", "name by which both servers know the model")
    if not urls:
        check_model(model, key="--model")
    rate = _asked(rate, "--rate", "requests/s that one replica gets", "4", _positive)
    if p99_ms is None and not urls and _is_asked():
        question = "p99 TTFT in ms that users accept, or none"
        p99_ms = _asked(None, "--p99-ms", question, "none", lambda text: None if text == "none" else _positive(text))
    text = written(path, model, urls, rate, p99_ms)
    try:
        from_table(parse_toml(text, path))
    except ConfigError as error:  # the user knows flags, and no settings yet
        message = re.sub(r"^arms\.\w+\.address", "--url", str(error))
        raise ConfigError(re.sub(r"^model\.id", "--model", message)) from None
    schema = target.parent / SCHEMA
    if schema.exists() and (not schema.is_file() or SCHEMA_ID not in schema.read_text(errors="replace")):
        raise ConfigError(f'"{schema}" is not the schema of tailgate: write {target.name} to another folder')
    target.parent.mkdir(parents=True, exist_ok=True)
    write_schema(target.parent)
    target.write_text(text, encoding="utf-8")
    words = f"wrote {path}, and {SCHEMA} for editors\nnext: tailgate check {path}"
    stdout.write(words, {"experiment": path, "schema": str(target.parent / SCHEMA)}, as_json=as_json)
    return 0


def _is_asked() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _asked(value: Any, flag: str, question: str, default: str | None = None, read: Callable[[str], Any] = str) -> Any:
    """Return the value, or what the user answers; one that `read` refuses is asked for again.

    Raises ConfigError where there is no terminal to ask at.
    """
    if value is not None:
        return value
    if not _is_asked():
        raise ConfigError(f"{flag} is missing and stdin is no terminal to ask at: add {flag} ({question})")
    return typer.prompt(question[:1].upper() + question[1:], default=default, value_proc=read, err=True)


def written(path: str, model: str, urls: Sequence[str], rate: float, p99_ms: float | None) -> str:
    """Return the TOML of an experiment of the model, or of the two servers at `urls`.

    Arms have a GPU each where there are two; on one they take turns. The run is as long as a PASS takes.
    """
    from tailgate.analysis.settings.gate_limits import GateLimits
    from tailgate.analysis.settings.slo_targets import parse_slo
    from tailgate.analysis.statistics.planning import shortest_trial_s
    from tailgate.loadtests.experiments.files import template
    from tailgate.loadtests.experiments.reading import SCHEMA_LINE
    from tailgate.loadtests.trials.environment import count_gpus
    from tailgate.servers.fields import as_toml

    gpus = 0 if urls else count_gpus()
    encoder, positions = (False, 0) if urls else _facts_of(model)
    metric, block_s, of_an_arm = "e2e" if encoder else "ttft", 30.0, rate
    design = 'design = "mirrored"  # each request goes to every arm\n'
    if gpus == 1:
        block_s, of_an_arm = 2 * _TURN_S, rate / 2
        design = f'design = "switchback"  # the arms take turns on the GPU\nblock_s = {_TURN_S:g}\n'
    prompt = _PROMPT_TOKENS if urls else min(_PROMPT_TOKENS, positions if encoder else positions * 3 // 4)
    new = _NEW_TOKENS if urls else min(_NEW_TOKENS, positions - prompt)
    if not urls and model.startswith(("./", "../")):  # relative to the file that it stands in
        model = os.path.relpath(model, Path(path).parent)
        model = model if model.startswith("../") else f"./{model}"
    slo = {f"p99_{metric}_ms": p99_ms} if p99_ms else {}
    values = {
        "schema": SCHEMA_LINE,
        "path": path,
        "name": Path(path).stem,
        "model": as_toml(model),
        "current": as_toml(urls[0] if urls else ""),
        "candidate": as_toml(urls[1] if urls else ""),
        "task": 'task = "embed"\n' if encoder else "",
        "prompt_tokens": prompt,
        "new_tokens": new,
        "answers": "" if encoder else f"max_new_tokens = {new}\n",
        "threads": "" if gpus else "threads = 1  # of each replica, so that arms do not compete for processors\n",
        "first_device": 'model.device = "cuda:0"\n' if gpus > 1 else "",
        "second_device": 'model.device = "cuda:1"\n' if gpus > 1 else "",
        "workload": as_toml("sentences" if encoder else "conversation"),
        "design": design,
        "rate": rate,
        "duration_s": round(shortest_trial_s(GateLimits(), parse_slo(slo), rate=of_an_arm, block_s=block_s)),
        "off": "" if p99_ms else "# ",
        "metric": metric,
        "p99_ms": p99_ms or 500.0,
    }
    return "".join(template(part).format(**values) for part in ("head", "servers" if urls else "model", "end"))


def _facts_of(model: str) -> tuple[bool, int]:
    """Return whether the model embeds, and how many positions it has, as far as can be read here."""
    from tailgate.loadtests.trials.preflight import positions_of
    from tailgate.servers.presets import RANDOM_ENCODERS, RANDOM_PRESETS

    name, path = model.removeprefix("random:"), Path(model).expanduser() / "config.json"
    config = RANDOM_PRESETS.get(name, {}) if name != model else {}
    try:
        if path.is_file():
            config = json.loads(path.read_text(encoding="utf-8"))
        known = config.get("architectures") or ["CausalLM"]
        encoder = name in RANDOM_ENCODERS or not any(kind in one for one in known for kind in _GENERATES)
        positions = int(positions_of(config) or _PROMPT_TOKENS + _NEW_TOKENS)
        # RoBERTa counts two positions that hold no token: 514 for 512.
        return encoder, positions - positions % 8 if encoder else positions
    except (OSError, OverflowError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f'--model "{model}": {path} cannot be read ({error}): give a model\'s folder') from None
