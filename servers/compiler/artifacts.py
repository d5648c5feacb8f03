"""Compiled code that outlives its process: saved to a file, loaded from one, and refused where it does not belong.

A file is a line that names the format, the SHA-256 of all that follows, one line of JSON that says what the code was
compiled for, and torch's portable cache, which torch unpickles: an artifact is to be trusted like a program.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor

from tailgate.servers.complaint import ConfigError
from tailgate.servers.config import ArmConfig

_FORMAT = b"tailgate compiled code 2\n"
_REMEDY = "write it anew with `tailgate precompile`"
# What no graph depends on. The threads of a processor are part of the device.
_FREE = frozenset(
    {"name", "preset", "model.id", "model.seed", "model.device", "engine.max_queue", "engine.max_wait_ms"}
    | {"engine.drain_grace_s", "engine.frontends", "engine.threads", "compile.artifact"}
)
# A statically launched kernel looks for its tuned configuration in the folder of the process that compiled it, and a
# reduction that takes many registers is given another variant whenever it is loaded: either is tuned again at a start.
# The launcher has its second name since torch 2.13.
_PORTABLE = {"use_static_cuda_launcher": False, "use_static_triton_launcher": False, "dynamic_scale_rblock": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A file of compiled code that belongs here. Records call it by its `identity`."""

    path: str
    identity: str
    code: bytes


def compile_portably() -> None:
    """Have the compiler make what another process can use without tuning. `compile.options` overrule it."""
    for name, value in _PORTABLE.items():
        if hasattr(inductor, name):
            setattr(inductor, name, value)


def save(path: str, arm: ArmConfig, device: str) -> int:
    """Write the graphs of this process, which has compiled `arm` and nothing else. Returns their number.

    What a kill leaves of the file is refused as damaged.
    """
    saved = torch.compiler.save_cache_artifacts()
    if saved is None or not saved[1].inductor_artifacts:
        raise ConfigError(f'arm "{arm.name}" left no graph in the compile cache: switch it on, or compile something')
    body = json.dumps(facts_of(arm, device)).encode() + b"\n" + saved[0]
    Path(path).write_bytes(_FORMAT + hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
    return len(saved[1].inductor_artifacts)


def load(arm: ArmConfig, device: str) -> Artifact:
    """Fill this process's compile cache with the arm's artifact. Raises ConfigError where it does not belong here."""
    artifact = read(arm, device)
    if torch.compiler.load_cache_artifacts(artifact.code) is None:
        raise ConfigError(f'compile.artifact "{artifact.path}" holds no cache that torch can read: {_REMEDY}')
    compile_portably()
    return artifact


def read(arm: ArmConfig, device: str) -> Artifact:
    """Read the arm's artifact. Raises ConfigError where there is none, it is damaged, or it was written for another
    arm, device or torch."""
    path = arm.compile.artifact
    what = f'arm "{arm.name}": compile.artifact "{path}"'
    try:
        content = Path(path).read_bytes() if Path(path).is_file() else b""  # to open a pipe would wait for a writer
    except OSError as error:
        raise ConfigError(f"{what} cannot be read ({error.strerror}): {_REMEDY}") from None
    if not content.startswith(_FORMAT):
        raise ConfigError(f"{what} is no file of compiled code in this version's format: {_REMEDY}")
    checksum, _, body = content.removeprefix(_FORMAT).partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != checksum:
        raise ConfigError(f"{what} is damaged, its checksum does not match: copy it again, or {_REMEDY}")
    line, _, code = body.partition(b"\n")
    facts, current = json.loads(line), facts_of(arm, device)
    for key in {**current, **facts}:
        if current.get(key) != facts.get(key):
            made, mine = ("not set" if side.get(key) is None else side[key] for side in (facts, current))
            raise ConfigError(f"{what} is for {key} {made} and here it is {mine}: make them equal, or {_REMEDY}")
    return Artifact(path=path, identity=checksum[:16].decode(), code=code)


def facts_of(arm: ArmConfig, device: str) -> dict[str, Any]:
    """Return what must be equal where the arm's compiled code is used, by key: a GPU by its product name, a CPU by its
    instruction set and the number of threads, a model by its name or that of its folder."""
    threads = arm.engine.threads or torch.get_num_threads()
    on_cpu = torch.device(device).type == "cpu"
    processor = f"a processor with {torch.backends.cpu.get_cpu_capability()} and {threads} threads"
    folders = (Path(__file__).parent, Path(__file__).parents[1] / "engine")
    traced = sorted(path for folder in folders for path in folder.glob("*.py"))
    facts = {
        "device": processor if on_cpu else torch.cuda.get_device_name(device),
        "python": ".".join(platform.python_version_tuple()[:2]),
        **{name: metadata.version(name) for name in ("torch", "transformers")},
        "tailgate": hashlib.sha256(b"".join(path.read_bytes() for path in traced)).hexdigest()[:8],
        "model name": Path(arm.model.id).name,
    }
    settings = _flat("", arm.to_dict())
    return facts | {key: value for key, value in settings if key not in _FREE}


def _flat(prefix: str, table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value
