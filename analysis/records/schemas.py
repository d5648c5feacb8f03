"""The tables of a run: their columns, which of them a file must have, and the kinds of compile events."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

# Name, type and meaning. The end of a name is its unit; times are ns since the epoch, on a clock that is monotonic
# within a run.
Columns = tuple[tuple[str, pa.DataType, str], ...]

_REQUESTS: Final[Columns] = (
    ("request_id", pa.string(), "Names the request."),
    ("session_id", pa.string(), "Session of a split: requests of one session meet one arm."),
    ("trial", pa.int32(), "Number of the trial, from 1."),
    ("arm", pa.string(), "The arm that answered."),
    ("replica", pa.string(), "The server process that answered."),
    ("pair_id", pa.string(), "Equal for the copies of one request under a mirrored design."),
    ("scheduled_ns", pa.int64(), "When the request was due. Latency counts from here."),
    ("sent_ns", pa.int64(), "When its bytes left the client."),
    ("first_token_ns", pa.int64(), "When its first token came; null without one, and for embeddings."),
    ("end_ns", pa.int64(), "When the answer ended."),
    ("status", pa.string(), "OK or the name of a gRPC status; CANCELLED for requests that the end of the run cut off."),
    ("error", pa.string(), "What went wrong, in words."),
    ("prompt_tokens", pa.int32(), "Tokens of the prompt."),
    ("max_tokens", pa.int32(), "Tokens that were asked for; null for embeddings."),
    ("output_tokens", pa.int32(), "Tokens of the answer; null for embeddings."),
    ("token_ns", pa.list_(pa.int64()), "Offset of each token from `sent_ns`; null for embeddings."),
    ("compile_stall_ns", pa.int64(), "How long compiles delayed the request, by its server's account."),
    ("server_recv_ns", pa.int64(), "When the server received it."),
    ("server_end_ns", pa.int64(), "When the server had answered."),
    ("phase", pa.string(), "`rampup` or `measure`."),
)
_COMPILE_EVENTS: Final[Columns] = (
    ("event_id", pa.string(), "Names the event: TRIAL-REPLICA-NUMBER."),
    ("trial", pa.int32(), "Number of the trial."),
    ("arm", pa.string(), "The arm that compiled."),
    ("replica", pa.string(), "The server process that compiled."),
    ("kind", pa.string(), "Kind of event, see below."),
    ("start_ns", pa.int64(), "When it began."),
    ("end_ns", pa.int64(), "When it ended."),
    ("compile_id", pa.string(), "The compiler's own id, as tlparse shows it."),
    ("frame", pa.string(), "The function that was compiled."),
    ("reason", pa.string(), "One line for each graph that was tried: the first guard of it that failed."),
    ("shape", pa.string(), "The step that met it, such as `prefill 128`."),
    ("dynamic", pa.bool_(), "Whether the graph has dynamic dimensions."),
    ("cache", pa.string(), "`hit`, `miss`, `bypass` or empty. A hit still costs the tracing."),
    ("batch_id", pa.int64(), "The batch that waited."),
    ("request_ids", pa.list_(pa.string()), "The requests that waited."),
    ("backend_ns", pa.int64(), "The backend's part of the time."),
    ("phase", pa.string(), "`warmup` or `serving`."),
    ("breaks", pa.list_(pa.string()), "Graph breaks that the tracing met: place and cause."),
)

_STEPS: Final[Columns] = (
    ("trial", pa.int32(), "Number of the trial."),
    ("arm", pa.string(), "The arm."),
    ("replica", pa.string(), "The server process."),
    ("step_id", pa.int64(), "Number of the step in its process."),
    ("kind", pa.string(), "`prefill`, `decode` or `encode`."),
    ("start_ns", pa.int64(), "When it began."),
    ("end_ns", pa.int64(), "When it ended."),
    ("batch", pa.int32(), "Requests in the step."),
    ("padded_batch", pa.int32(), "Rows that ran. A prefill step packs its requests into one."),
    ("tokens", pa.int64(), "Tokens of the requests."),
    ("padded_tokens", pa.int64(), "Tokens that ran."),
    ("compiled", pa.bool_(), "Whether compiled code ran."),
)

# Columns are null where they do not concern the kind, and where they cannot be read. Columns that end in _s count up
# from some start: only differences mean anything.
_MACHINES: Final[Columns] = (
    ("trial", pa.int32(), "Number of the trial."),
    (
        "kind",
        pa.string(),
        "`host`, `device`, `process` (with its descendants) or `allocator` (what an engine holds by its own account).",
    ),
    ("name", pa.string(), "Name of the host, the device (`cuda:0`) or the process: a replica, `splitter`, `load`."),
    ("arm", pa.string(), "Arm of a replica."),
    ("pid", pa.int64(), "Process id."),
    ("at_ns", pa.int64(), "When it was sampled."),
    ("memory_bytes", pa.int64(), "In use on the host or device; resident of the process."),
    ("memory_limit_bytes", pa.int64(), "Memory of the host or device."),
    ("cpu_s", pa.float64(), "Processor time: of all processors of the host that the run may use, or of the process."),
    ("cpus", pa.int32(), "Host: processors that the run may use."),
    ("steal_s", pa.float64(), "Host: processor time that the hypervisor took."),
    (
        "pressure_memory_s",
        pa.float64(),
        "Host: time in which some task waited for memory (Linux pressure stall information).",
    ),
    ("sm_mhz", pa.int32(), "Device: clock."),
    ("power_w", pa.float64(), "Device: power."),
    ("power_limit_w", pa.float64(), "Device: power limit."),
    (
        "throttle",
        pa.list_(pa.string()),
        "Device: NVML's reasons why the clock is not higher: `gpu_idle`, `applications_clocks_setting`, "
        "`sw_power_cap`, `hw_slowdown`, `sync_boost`, `sw_thermal_slowdown`, `hw_thermal_slowdown`, "
        "`hw_power_brake_slowdown`, `display_clock_setting`.",
    ),
    ("temperature_c", pa.int32(), "Device: temperature."),
    ("utilisation_pct", pa.int32(), "Device: utilisation."),
    ("foreign_processes", pa.int32(), "Device: processes that do not descend from the run."),
    ("foreign_memory_bytes", pa.int64(), "Device: memory of those processes."),
    ("device_memory_bytes", pa.int64(), "Process: memory that it holds on its devices."),
    ("reserved_bytes", pa.int64(), "Allocator: memory that it keeps, with the pools of CUDA graphs."),
    (
        "peak_bytes",
        pa.int64(),
        "Allocator: most memory allocated at once since the row before; the first row leaves the warm-up out.",
    ),
)

_COLUMNS: Final = {"requests": _REQUESTS, "steps": _STEPS, "compile_events": _COMPILE_EVENTS, "machines": _MACHINES}
TABLES: Final = {table: pa.schema([column[:2] for column in columns]) for table, columns in _COLUMNS.items()}
REQUESTS, STEPS, COMPILE_EVENTS, MACHINES = TABLES.values()
JUDGED_REQUESTS = pa.schema(field for field in REQUESTS if not field.name.startswith("server_"))

# What each column holds, by table.
MEANINGS: Final = {table: {name: text for name, _, text in columns} for table, columns in _COLUMNS.items()}

# Columns that a file must have.
REQUIRED: Final = {
    "requests": ("arm", "end_ns", "status"),
    "compile_events": ("arm", "kind", "start_ns", "end_ns"),
    "steps": ("arm", "start_ns", "end_ns"),
    "machines": ("kind", "name", "at_ns"),
}

# Kinds of compile events: how each reads, and when it is recorded.
_EVENTS: Final = {
    "compile": ("compile", "A frame got its first graph."),
    "recompile": ("recompile", "No graph of the frame fitted; `reason` says why."),
    "graph_capture": ("graph capture", "A CUDA graph was recorded."),
    "autotune": ("autotune", "Kernels were benchmarked when first run."),
    "limit_hit": ("limit hit", "The recompile limit was reached."),
    "jit": (
        "JIT compile",
        "A compiler other than torch's made or tuned a kernel: Triton, or another that reports it.",
    ),
    "background_compile": ("background compile", "A compile on another thread; no request waited."),
    "eager_fallback": ("eager fallback", "A step of a compiled arm began to run as plain Python."),
}
EVENT_KINDS: Final = {kind: words for kind, (words, _) in _EVENTS.items()}
EVENT_MEANINGS: Final = {kind: text for kind, (_, text) in _EVENTS.items()}
