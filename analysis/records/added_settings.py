"""Settings that versions of tailgate added, with the value that does what versions before them did.

A run of an older version lacks them in its experiment.toml. Beside a run that has them it counts as having had this
value. Not every default is one: a setting is listed once somebody has seen that no version before it did otherwise.
One that is not listed, or whose default was changed since, stays a difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

ADDED: Final[Mapping[str, Any]] = {
    # Before there were encoders every model generated; nothing else reads how texts are pooled and batched.
    "model.task": "generate",
    "model.pooling": "mean",
    "engine.max_wait_ms": 0.0,
    "parity.min_cosine": 0.0,
    # No weights were quantised, and nothing else is held to these limits.
    "model.quantisation": "none",
    "parity.texts": "",
    "parity.max_perplexity_ratio": 1.02,
    "parity.max_kl": 0.05,
    # Nothing pressed.
    "pressure.start_s": 0.0,
    "pressure.end_s": 0.0,
    "pressure.memory_share": 0.0,
    "pressure.compute_share": 0.0,
    "pressure.tenant_rps": 0.0,
    "pressure.cpus": 0.0,
    "pressure.schedule": [],
    # The compiler had the whole model, as it came, and kept nothing over a start.
    "compile.backend_module": "",
    "compile.regions": [],
    "compile.eager_regions": [],
    "compile.unbacked": [],
    "compile.strict": False,
    "compile.artifact": "",
    "compile.profile": False,
    "compile.background": False,
    "bed.processor_turn_s": 0.0,
    "traffic.shadow_pct": 100.0,
    "traffic.length_scales": [],
    # What judges, and is no part of a run: one without the limit is judged by its default.
    "gates.max_eager_steps_pct": 1.0,
    "gates.max_refused_pct": 0.0,
    "gates.max_bed_drift": 0.05,
    "gates.max_steal_pct": 1.0,
    "gates.max_other_cpu_pct": 10.0,
    "gates.quantiles": [0.99],
    "gates.method": "label swap",
    "gates.question": "block",
    "gates.restart_spread": 0.01,
    "gates.tuning_spread": 0.03,
    "parity.near_tie": 1.0,
    # No run ended by its verdict.
    "gates.sequential": False,
    # A route was one of gRPC.
    "users.route_kind": "GRPCRoute",
    # A run that was no ramp read nothing of these.
    "ramp.load": "experiment",
    "ramp.candidate": "",
    "ramp.steps": [1.0, 5.0, 25.0, 50.0, 100.0],
    "ramp.initial_delay_s": 0.0,
    "ramp.step_s": 300.0,
    "ramp.most_step_s": 1800.0,
    "ramp.step_margin": 0.25,
    "ramp.least_requests": 30,
    "ramp.failure_limit": 0,
    "ramp.stall_limit_s": 1.0,
    "ramp.on_inconclusive": "hold",
    "users.admin": "",
    "users.access_log": "",
    "users.route": "",
    "users.api": "",
    "users.replicas": [],
    "users.moved_by": "tailgate",
}
# Tables that came as a whole: a run that has one and lacks a key of it may have done otherwise.
_WHOLE = ("ramp", "users")
_LATER = ("users.route_kind",)


def value_before(key: str, settings: Mapping[str, Any]) -> Any:
    """What `key` was in a run with these `settings`, which lack it; None where that is not known."""
    name = key.split(".", 2)[-1] if key.startswith("arms.") else key
    table = name.partition(".")[0]
    if table in _WHOLE and name not in _LATER and any(other.startswith(f"{table}.") for other in settings):
        return None
    return ADDED.get(name)
