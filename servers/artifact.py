"""Compiled code in a file: what it was written for, and where it is refused. No torch.

A file is a line that names the format, the SHA-256 of all that follows, one line of JSON that says what the code was
compiled for, and torch's portable cache. The checksum tells damage and not malice: torch unpickles its cache, so an
artifact is to be trusted like a program.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from servers.config import ArmConfig
from servers.fields import ConfigError

_FORMAT = b"tailgate compiled code 2\n"
_REMEDY = "write it anew with `tailgate precompile`"
# What no graph depends on. The threads of a processor are part of the device.
_FREE = frozenset(
    {"name", "preset", "model.id", "model.seed", "model.device", "engine.max_queue", "engine.max_wait_ms"}
    | {"engine.decode_per_prefill", "engine.drain_grace_s", "engine.threads", "compile.artifact"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A file of compiled code whose checksum was right when it was read. Records call it by its `identity`."""

    path: str
    identity: str
    facts: Mapping[str, Any]
    code: bytes


def facts_of(arm: ArmConfig, *, device: str) -> dict[str, Any]:
    """What must be equal where the arm's compiled code is used, by key: device, versions, settings, and the name of the
    model or of its folder, wherever that is."""
    traced = (path for folder in ("engine", "compiler") for path in (Path(__file__).parent / folder).glob("*.py"))
    facts = {
        "device": device,
        "python": ".".join(platform.python_version_tuple()[:2]),
        **{name: metadata.version(name) for name in ("torch", "transformers")},
        "tailgate": hashlib.sha256(b"".join(path.read_bytes() for path in sorted(traced))).hexdigest()[:8],
        "model name": Path(arm.model.id).name,
    }
    settings = _flat("", json.loads(json.dumps(asdict(arm), default=dict)))
    return facts | {key: value for key, value in settings if key not in _FREE}


def _flat(prefix: str, table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value


def check(artifact: Artifact, arm: ArmConfig, devices: Collection[str] = ()) -> None:
    """Raise ConfigError where the artifact was written for another arm or other packages, or for none of `devices`
    where they are known."""
    facts, device = artifact.facts, str(artifact.facts.get("device"))
    here = facts_of(arm, device=" or ".join(devices) if devices and device not in devices else device)
    for key in {**here, **facts}:
        if here.get(key) != facts.get(key):
            made, mine = ("not set" if side.get(key) is None else side[key] for side in (facts, here))
            raise ConfigError(
                f'arm "{arm.name}": compile.artifact "{artifact.path}" was written for {key} {made} and here it is '
                f"{mine}: make them equal, or {_REMEDY} here"
            )


def write(path: str, facts: Mapping[str, Any], code: bytes) -> Artifact:
    """Write the file. What a kill leaves of it is refused as damaged."""
    body = json.dumps(facts).encode() + b"\n" + code
    checksum = hashlib.sha256(body).hexdigest()
    Path(path).write_bytes(_FORMAT + checksum.encode() + b"\n" + body)
    return Artifact(path=path, identity=checksum[:16], facts=facts, code=code)


def read(path: str) -> Artifact:
    """Read the file. Raises ConfigError where there is none, or it is damaged."""
    what = f'compile.artifact "{path}"'
    try:
        content = Path(path).read_bytes() if Path(path).is_file() else b""  # to open a pipe would wait for a writer
    except OSError as error:
        raise ConfigError(f"{what} cannot be read ({error.strerror}): {_REMEDY}") from None
    if not content.startswith(_FORMAT):
        raise ConfigError(f"{what} is no file of compiled code in this version's format: {_REMEDY}")
    checksum, _, body = content.removeprefix(_FORMAT).partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != checksum:
        raise ConfigError(f"{what} is damaged, its checksum does not match: copy it again, or {_REMEDY}")
    facts, _, code = body.partition(b"\n")
    return Artifact(path=path, identity=checksum[:16].decode(), facts=json.loads(facts), code=code)
