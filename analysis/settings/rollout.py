"""What a rollout must carry: the [rollout] table of an experiment, which decides nothing."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from analysis.settings.model import Settings


class Rollout(Settings):
    """`load_rps` is the load over all replicas, None for any; `gpus_per_replica` is what one server process takes."""

    table: ClassVar[str] = "rollout"

    load_rps: float | None = Field(default=None, ge=1e-6, le=1e9)
    gpus_per_replica: int = Field(default=1, ge=1, le=4096)
