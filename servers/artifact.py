"""Compiled code in a file: written once, shipped, and refused where it does not belong.

A file begins with a line that names the format and a line with the SHA-256 of all that follows: one line of JSON, which
says what the code was compiled for, and the compiler's cache folder as a compressed tar. The checksum tells damage and
not malice: torch unpickles what lies in its cache, so an artifact is to be trusted like a program.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import platform
import stat
import tarfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from servers.config import ArmConfig
from servers.fields import ConfigError
from servers.presets import RANDOM_PRESETS

_NAME = b"tailgate compiled code "
_FORMAT = _NAME + b"1\n"
_LONGEST_FACTS = 1 << 20
_REMEDY = "write it anew with `tailgate precompile`"

# What the generated code depends on. transformers' model code is what is traced.
_PACKAGES = ("tailgate", "torch", "triton", "transformers")
# Settings of the engine that no shape depends on. The threads of a processor are told apart from them, as resolved.
_NO_SHAPE = ("max_queue", "max_wait_ms", "decode_per_prefill", "drain_grace_s", "threads")
# Keys of a config.json that say where a model came from.
_ORIGIN = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")

# Triton's cache names its own files in full.
_FOLDER = b"[tailgate: the cache folder]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A file of compiled code whose checksum was right when it was read."""

    path: str
    checksum: str
    facts: Mapping[str, Any]

    @property
    def identity(self) -> str:
        """What records call it."""
        return self.checksum[:16]


# --- What compiled code was made for ----------------------------------------------------------------------------------


def made_for(arm: ArmConfig, *, on_cpu: bool) -> dict[str, Any]:
    """Everything of the arm that its graphs depend on, as plain tables.

    Weights are inputs of a graph, so the model's id and seed do not count; its `architecture` does, and is None where
    it is not on this machine yet.
    """
    model = {key: value for key, value in asdict(arm.model).items() if key not in ("id", "seed", "device")}
    if model["dtype"] == "auto":
        model["dtype"] = "float32" if on_cpu else "bfloat16"
    tables = {
        "architecture": _architecture(arm.model.id),
        "model": model,
        "engine": {key: value for key, value in asdict(arm.engine).items() if key not in _NO_SHAPE},
        "shapes": asdict(arm.shapes),
        "compile": {key: value for key, value in asdict(arm.compile).items() if key != "artifact"},
    }
    plain: dict[str, Any] = json.loads(json.dumps(tables, default=dict))
    return plain


def facts_of(arm: ArmConfig, *, device: str, threads: int, on_cpu: bool) -> dict[str, Any]:
    """What is to be equal where the arm's compiled code is used: versions, `device` by its product name, on a
    processor the `threads` for which code is generated, and the arm's settings. Generated code names the number of its
    card, which is 0 in every process of an arm (`servers.visible_card`)."""
    return {
        "versions": _versions(),
        "device": device,
        "threads": threads if on_cpu else 0,
        **made_for(arm, on_cpu=on_cpu),
    }


def check(artifact: Artifact, arm: ArmConfig, *, on_cpu: bool, devices: Collection[str], threads: int = 0) -> None:
    """The artifact was written for this arm, these packages and one of `devices`. Otherwise ConfigError.

    What is not known yet is not compared: no `devices`, `threads` 0, or an architecture that is not on this machine.
    """
    what = f'arm "{arm.name}": compile.artifact "{artifact.path}"'
    facts = artifact.facts
    written = str(facts.get("device"))
    if devices and written not in devices:
        raise ConfigError(f"{what} was written on {written} and this is {', '.join(devices)}: {_REMEDY} here")
    here = facts_of(arm, device=written, threads=threads or facts.get("threads", 0), on_cpu=on_cpu)
    for key, mine, other in _differences(here, facts):
        raise ConfigError(
            f"{what} was written for {key} {_shown(other)} and here it is {_shown(mine)}: make them equal, or {_REMEDY}"
        )


def _differences(here: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(key, value here, value in the artifact) of everything that is known on both sides and differs."""
    for name in ("versions", "threads", "architecture", "model", "engine", "shapes", "compile"):
        mine, other = here[name], facts.get(name)
        if name == "architecture" and (mine is None or other is None):
            continue
        one, two = dict(_flat(name, mine)), dict(_flat(name, other))
        for key in {**one, **two}:
            if one.get(key) != two.get(key):
                yield key.removeprefix("versions.").replace("architecture.", "the model's "), one.get(key), two.get(key)


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield name, value
        return
    for key, item in value.items():
        yield from _flat(f"{name}.{key}", item)


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)


@cache
def _versions() -> dict[str, str]:
    versions = {"python": ".".join(platform.python_version_tuple()[:2]), "machine": platform.machine()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    traced = hashlib.sha256(b"".join(path.read_bytes() for path in _traced()))
    versions["tailgate"] = f"{versions.get('tailgate', 'unknown')} ({traced.hexdigest()[:8]})"
    return versions


def _traced() -> list[Path]:
    """The source of what the compiler traces, and of what it is asked for: another one has other graphs."""
    servers = Path(__file__).parent
    return [*sorted((servers / "engine").glob("*.py")), *sorted((servers / "compiler").glob("*.py"))]


@cache
def processor() -> str:
    """This host's processor by name, and by the instructions that it has: C++ is compiled for exactly these."""
    telling = ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU implementer", "CPU part")
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    except OSError:
        return platform.processor() or platform.machine()
    lines = [line.partition(":") for line in first.splitlines()]
    known = {key.strip(): value.strip() for key, _, value in lines if key.strip() in telling}
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:8]
    return f"{known.get('model name', platform.machine())} ({digest})"


def _architecture(model: str) -> dict[str, Any] | None:
    """The shape of the model: a preset's, or its config.json. None where that is not on this machine."""
    if model.startswith("random:"):
        return RANDOM_PRESETS[model.removeprefix("random:")]
    path: Any = Path(model).expanduser() / "config.json"
    if not path.is_file():
        from huggingface_hub import try_to_load_from_cache

        try:
            path = try_to_load_from_cache(model, "config.json")
        except ValueError:  # not an id of the hub either
            return None
    try:
        table = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return None
    return {key: value for key, value in table.items() if key not in _ORIGIN} if isinstance(table, dict) else None


# --- The file ---------------------------------------------------------------------------------------------------------


def write(path: str, folder: Path, facts: Mapping[str, Any]) -> Artifact:
    """`path` holds the compile cache in `folder`, and `facts`; what stood there before is replaced at once or not at
    all."""
    partial = Path(f"{path}.part")
    try:
        with partial.open("w+b") as file:
            file.write(_FORMAT + b"0" * 64 + b"\n")
            begin = file.tell()
            file.write(json.dumps(facts, sort_keys=True).encode() + b"\n")
            # level 1: a start waits for it to be unpacked
            with gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=1, mtime=0) as packed:
                _pack(folder, packed)
            file.seek(begin)
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
            file.seek(len(_FORMAT))
            file.write(checksum.encode())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return Artifact(path=path, checksum=checksum, facts=facts)


def kept_files(folder: Path) -> list[Path]:
    """The files of a compile cache that another process can use, in the order of their names: no locks."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".lock", ".tmp"))
    return sorted(path for path in files if "locks" not in path.relative_to(folder).parts)


def _pack(folder: Path, packed: gzip.GzipFile) -> None:
    here = _in_json(folder)
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for path in kept_files(folder):
            content = path.read_bytes()
            if path.suffix == ".json":
                content = content.replace(here, _FOLDER)
            entry = tarfile.TarInfo(path.relative_to(folder).as_posix())
            entry.size, entry.mode = len(content), 0o644
            tar.addfile(entry, io.BytesIO(content))


def read(path: str) -> Artifact:
    """The artifact in the file `path`. ConfigError where there is none, or it is damaged."""
    what = f'compile.artifact "{path}"'
    try:
        if stat.S_ISFIFO(Path(path).stat().st_mode):  # to open one waits for a writer
            raise ConfigError(f"{what} is a pipe: give a file that `tailgate precompile` wrote")
        with Path(path).open("rb") as file:
            head = file.readline(64)
            if head != _FORMAT:
                known = head.startswith(_NAME)
                raise ConfigError(
                    f"{what} is {'of another format' if known else 'no file of compiled code'}: "
                    + (_REMEDY if known else "give one that `tailgate precompile` wrote")
                )
            checksum = file.readline(80).decode("ascii", "replace").strip()
            begin = file.tell()
            content = hashlib.file_digest(file, "sha256").hexdigest()
            file.seek(begin)
            line = file.readline(_LONGEST_FACTS)
    except OSError as error:
        raise ConfigError(
            f"{what} cannot be read ({error.strerror}): give a file that `tailgate precompile` wrote"
        ) from None
    if content != checksum:
        raise ConfigError(
            f"{what} is damaged (its checksum is {checksum[:16]}, its content has {content[:16]}): copy it again, or "
            f"{_REMEDY}"
        )
    try:
        facts = json.loads(line)
    except (ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict):
        raise ConfigError(f"{what} is damaged, what it was written for is not readable: {_REMEDY}")
    return Artifact(path=path, checksum=checksum, facts=facts)


def unpack(artifact: Artifact, folder: Path) -> None:
    """Fill the compile cache in `folder` with what the artifact holds, as if it had been compiled there.

    A file that is there already is replaced and not written over: this process, or another replica, may have loaded it.
    """
    here = _in_json(folder)
    with Path(artifact.path).open("rb") as file:
        for _ in range(3):
            file.readline()
        with tarfile.open(fileobj=file, mode="r|gz") as tar:
            for entry in tar:
                name = PurePosixPath(entry.name)
                source = tar.extractfile(entry)
                if source is None or name.is_absolute() or ".." in name.parts:
                    raise ConfigError(
                        f'compile.artifact "{artifact.path}" holds "{name}", no file of a cache: {_REMEDY}'
                    )
                content = source.read()
                if name.suffix == ".json":
                    content = content.replace(_FOLDER, here)
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
                partial.write_bytes(content)
                partial.replace(target)


def _in_json(folder: Path) -> bytes:
    """The folder's path as JSON writes it inside a string."""
    return json.dumps(os.path.abspath(folder))[1:-1].encode()  # noqa: PTH100 (links stay as they are, as torch has them)
