"""The tables of a run: their columns, which of them a file must have, and the kinds of compile events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pyarrow as pa

# The host that runs tailgate and the arms that it starts; load workers elsewhere have their own names.
RUN_HOST = "run"

REQUESTS = pa.schema(
    [
        ("request_id", pa.string()),
        ("session_id", pa.string()),
        ("trial", pa.int32()),
        ("arm", pa.string()),
        ("replica", pa.string()),
        ("pair_id", pa.string()),  # equal for the copies of one request under a mirrored design
        ("scheduled_ns", pa.int64()),
        ("sent_ns", pa.int64()),
        ("first_token_ns", pa.int64()),  # null when no token came; so it always is for an embedding
        ("end_ns", pa.int64()),
        ("status", pa.string()),  # OK or a gRPC status name; CANCELLED for requests cut by the end of the run
        ("error", pa.string()),
        ("prompt_tokens", pa.int32()),
        ("max_tokens", pa.int32()),  # null, as the next two, for an embedding: it has no tokens
        ("output_tokens", pa.int32()),
        ("token_ns", pa.list_(pa.int64())),  # offsets from sent_ns, one per token
        ("compile_stall_ns", pa.int64()),
        ("server_recv_ns", pa.int64()),
        ("server_end_ns", pa.int64()),
        ("phase", pa.string()),  # rampup | measure
    ]
)
JUDGED_REQUESTS = pa.schema(field for field in REQUESTS if not field.name.startswith("server_"))

COMPILE_EVENTS = pa.schema(
    [
        ("event_id", pa.string()),
        ("trial", pa.int32()),
        ("arm", pa.string()),
        ("replica", pa.string()),
        ("kind", pa.string()),  # one of EVENT_KINDS
        ("start_ns", pa.int64()),
        ("end_ns", pa.int64()),
        ("compile_id", pa.string()),
        ("frame", pa.string()),
        ("reason", pa.string()),
        ("shape", pa.string()),
        ("dynamic", pa.bool_()),
        ("cache", pa.string()),
        ("batch_id", pa.int64()),
        ("request_ids", pa.list_(pa.string())),
        ("backend_ns", pa.int64()),
        ("phase", pa.string()),  # warmup | serving
        ("breaks", pa.list_(pa.string())),  # graph breaks that the tracing met: place and cause
    ]
)

STEPS = pa.schema(
    [
        ("trial", pa.int32()),
        ("arm", pa.string()),
        ("replica", pa.string()),
        ("step_id", pa.int64()),
        ("kind", pa.string()),  # prefill | decode | encode
        ("start_ns", pa.int64()),
        ("end_ns", pa.int64()),
        ("batch", pa.int32()),
        ("padded_batch", pa.int32()),
        ("tokens", pa.int64()),
        ("padded_tokens", pa.int64()),
        ("compiled", pa.bool_()),
    ]
)

# The machines of a run, once a second and thing: a host, a device of it, a process of the run with its descendants, or
# what an engine holds of its device by its own account. Columns are null where they do not concern the kind, and where
# they cannot be read. Columns that end in _s or _j count up from some start: only differences mean anything.
MACHINES = pa.schema(
    [
        ("trial", pa.int32()),
        ("host", pa.string()),  # RUN_HOST, or the load worker's name on another host
        ("kind", pa.string()),  # host | device | process | allocator
        ("name", pa.string()),  # of the host, the device (cuda:0), or the process: a replica's name, splitter, load
        ("arm", pa.string()),  # of a replica
        ("pid", pa.int64()),
        ("at_ns", pa.int64()),
        ("memory_bytes", pa.int64()),  # in use on the host or device; resident of the process
        ("memory_limit_bytes", pa.int64()),
        ("cpu_s", pa.float64()),  # of all processors of the host; of the process
        # host
        ("cpus", pa.int32()),
        ("steal_s", pa.float64()),
        ("pressure_memory_s", pa.float64()),  # in which some task waited for memory (Linux pressure stall information)
        # device
        ("sm_mhz", pa.int32()),
        ("power_w", pa.float64()),
        ("power_limit_w", pa.float64()),
        # NVML's reasons why the clock is not higher: gpu_idle, applications_clocks_setting, sw_power_cap, hw_slowdown,
        # sync_boost, sw_thermal_slowdown, hw_thermal_slowdown, hw_power_brake_slowdown, display_clock_setting
        ("throttle", pa.list_(pa.string())),
        ("temperature_c", pa.int32()),
        ("utilisation_pct", pa.int32()),
        ("foreign_processes", pa.int32()),  # on the device, and not of this run; null where that cannot be told
        ("foreign_memory_bytes", pa.int64()),
        # process
        ("device_memory_bytes", pa.int64()),  # held by the process on its devices
        # allocator
        ("reserved_bytes", pa.int64()),
        ("peak_bytes", pa.int64()),  # allocated at once since the row before; the first says nothing of the warm-up
    ]
)

TABLES: Final = {
    "requests": REQUESTS,
    "steps": STEPS,
    "compile_events": COMPILE_EVENTS,
    "machines": MACHINES,
}

# Columns that a file must have.
REQUIRED: Final = {
    "requests": ("arm", "end_ns", "status"),
    "compile_events": ("arm", "kind", "start_ns", "end_ns"),
    "steps": ("arm", "start_ns", "end_ns"),
    "machines": ("kind", "name", "at_ns"),
}

# Kinds of compile events, and how each reads.
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
