"""Compiled code that outlives its process: saved to a file, loaded from one, and refused where it does not belong.

A file is a line that names the format, the SHA-256 of all that follows, one line of JSON that says what the code was
compiled for, and the folder of the compile cache as a zip archive. Torch unpickles its files and runs its libraries:
trust an artifact like a program.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor
from torch._inductor.runtime.cache_dir_utils import cache_dir

from tailgate.servers.complaint import ConfigError
from tailgate.servers.config import ArmConfig

_FORMAT = b"tailgate compiled code 3\n"
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


def save(path: str, arm: ArmConfig, device: str, graphs: int) -> None:
    """Write the compile cache of this process, which has compiled the `graphs` of `arm` and nothing else.

    What a kill leaves of the file is refused as damaged.
    """
    if not graphs:
        raise ConfigError(f'arm "{arm.name}" left no graph in the compile cache: switch it on, or compile something')
    packed, folder = io.BytesIO(), Path(cache_dir())
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1, strict_timestamps=False) as archive:
        for file in _files(folder):
            if file.suffix != ".lock":
                archive.write(file, file.relative_to(folder))
    body = json.dumps(facts_of(arm, device)).encode() + b"\n" + packed.getvalue()
    Path(path).write_bytes(_FORMAT + hashlib.sha256(body).hexdigest().encode() + b"\n" + body)


def load(arm: ArmConfig, device: str) -> Artifact:
    """Fill the compile cache with the arm's artifact. Raises ConfigError where it does not belong here."""
    artifact, folder = read(arm, device), Path(cache_dir())
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as fresh:
        with zipfile.ZipFile(io.BytesIO(artifact.code)) as archive:
            archive.extractall(fresh)
        for file in _files(Path(fresh)):
            place = folder / file.relative_to(fresh)
            place.parent.mkdir(parents=True, exist_ok=True)
            file.replace(place)  # never written in place: a process ends when a library that it has loaded changes
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
    has_libraries = on_cpu or "cpp_wrapper" in arm.compile.options
    facts = {
        **({"instruction set": _instruction_set()} if has_libraries else {}),
        "device": processor if on_cpu else torch.cuda.get_device_name(device),
        "python": ".".join(platform.python_version_tuple()[:2]),
        **{name: metadata.version(name) for name in ("torch", "transformers")},
        "tailgate": hashlib.sha256(b"".join(path.read_bytes() for path in traced)).hexdigest()[:8],
        "model name": Path(arm.model.id).name,
    }
    settings = _flat("", arm.to_dict())
    return facts | {key: value for key, value in settings if key not in _FREE}


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _instruction_set() -> str:
    """Return a digest of what this processor can execute: inductor compiles C++ with -march=native."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(flags.encode()).hexdigest()[:8]


def _flat(prefix: str, table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value
