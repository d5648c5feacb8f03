"""The kinds of compile events, and how each reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

EVENT_KINDS: Final[Mapping[str, str]] = {
    "compile": "compile",
    "recompile": "recompile",
    "graph_capture": "graph capture",
    "autotune": "autotune",
    "limit_hit": "limit hit",
    "jit": "JIT compile",
    "background_compile": "background compile",
    "eager_fallback": "eager fallback",
}
