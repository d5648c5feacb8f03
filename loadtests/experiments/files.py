"""The files that an experiment names, as absolute paths: the load generator runs in another folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loadtests.experiments.toml_limits import check_path, expanded

FILE_KEYS = ("tls_ca", "tls_certificate", "tls_key", "tls_client_ca", "token_file")


def resolve_files(table: Mapping[str, Any], folder: Path) -> None:
    """What [security], [splitter] and [[arms]] name, relative to `folder`, is absolute."""
    for name in ("security", "splitter"):
        named = table.get(name)
        if isinstance(named, dict):
            for key in FILE_KEYS:
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


def resolve_traffic(traffic: Any, folder: Path) -> None:
    """What [traffic] names, relative to `folder`, is absolute. A tokenizer that is no file is a hub's."""
    for key in ("trace", "conversations", "tokenizer"):
        name = traffic.get(key) if isinstance(traffic, dict) else None
        if isinstance(name, str) and name:
            check_path(name, f"traffic.{key}")
            if key != "tokenizer" or (folder / name).exists():
                traffic[key] = str((folder / name).resolve())
