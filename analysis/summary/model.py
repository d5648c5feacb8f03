"""The document summary.json as models: what they declare is written, and its JSON Schema is generated from them.

Names end in their unit: _s, _ms, _pct, _rps, _bytes. Null stands for what is not known, never for zero.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import GenerateJsonSchema

from tailgate.analysis.checks.machines import MachineVerdict
from tailgate.analysis.judging.load_steps import Step
from tailgate.analysis.judging.verdict import Advice
from tailgate.analysis.records.plain_values import CONTROL
from tailgate.analysis.settings.metrics import EMBED, EMBED_METRICS, METRIC_NAMES, gate_label

SCHEMA: Final = 2
Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE"]
Number = float | None
Count = int | None
Facts = dict[str, str | bool | float | list[Any] | None]
"""What another program may have written, by dotted key."""


class Row(BaseModel):
    """A part of the summary. Keys that it does not declare are dropped."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


# --- What decides -----------------------------------------------------------------------------------------------------


class Gate(Row):
    """One requirement on one arm."""

    arm: str
    gate: str
    kind: Literal["noninferiority", "slo", "goodput", "recompile", "error", "parity", "memory", "ramp"]
    value: Number
    limit: Number
    unit: Annotated[str, Field(description="of value and limit: ratio, ms, s, pct, count; empty for a cosine")]
    low: Annotated[Number, Field(description="lower limit of the value; of an SLO, of the share that misses")] = None
    high: Annotated[Number, Field(description="upper limit of the same")] = None
    verdict: Verdict
    reason: str
    lacks: Annotated[str, Field(description="why a ratio has no limits")] = ""
    caveat: Annotated[str, Field(description="the end of the reason, where failed checks changed the verdict")] = ""
    blocked_by: Annotated[list[str], Field(description="failed checks that keep it open")] = []

    @property
    def title(self) -> str:
        """What a reader calls it."""
        return gate_label(self.gate)


class Check(Row):
    """One condition on the run, without which some gates mean nothing."""

    check: str
    ok: bool
    arm: Annotated[str | None, Field(description="null: it concerns all arms")] = None
    reason: Annotated[str, Field(description="empty where it holds and nothing is to be said")]
    allowed: Annotated[bool, Field(description="failed, and the verdict holds whatever it found")] = False
    opens: Annotated[list[str], Field(description="gates, or kinds of them, that it leaves open")] = []
    remedy: str = ""

    @property
    def title(self) -> str:
        """What a reader calls it."""
        return self.check if self.arm is None else f"{self.check} ({self.arm})"

    @property
    def verdict(self) -> str:
        return "PASS" if self.ok else "INCONCLUSIVE"


class Design(Row):
    """How the run was made."""

    design: str
    duration_s: float
    trials: int
    trial_names: Annotated[dict[int, str], Field(description="of joined trials that a reader knows by another")] = {}
    block_s: float
    blocks: int
    planned: Annotated[Count, Field(description="requests")] = None
    open_loop: bool
    concurrency: Annotated[Count, Field(description="requests under way to an arm, of a closed loop")] = None
    pressure: Annotated[str, Field(description="what weighed on the machines on purpose, in words")] = ""


# --- Arms -------------------------------------------------------------------------------------------------------------


class Latency(Row):
    """Quantiles of one latency."""

    n: int
    p50_ms: Number = None
    p90_ms: Number = None
    p95_ms: Number = None
    p99_ms: Number = None
    p99_9_ms: Number = None
    max_ms: Number = None
    mean_ms: Number = None


class External(Row):
    """Where an arm is that tailgate did not start, and what is not known of it."""

    kind: str
    address: str | None = None
    model_name: str | None = None
    notes: list[str] = []


class Compiles(Row):
    """What compiles did to an arm while it served."""

    serving_events: Count = None
    recompiles: Count = None
    graph_captures: Count = None
    limit_hits: Count = None
    jit_compiles: Count = None
    eager_fallback_pct: Number = None
    longest_stall_s: Number = None
    stall_s_per_min: Number = None
    requests_hit: Count = None
    requests_hit_pct: Number = None
    background_s: Number = None


class Stall(Row):
    """A stall that clients saw."""

    trial: int
    offset_s: Number
    seconds: float
    cause: Annotated[
        Literal["compile", "host", "work", "part", "unknown"], Field(description="compile: a compile event explains it")
    ]
    requests: Annotated[int, Field(description="in flight")]


class ClientStalls(Row):
    """Stalls that clients saw, by cause, and the longest of them."""

    compile: Annotated[Count, Field(description="null where compiles are not reported")] = None
    unknown: int
    host: int
    work: int
    part: int
    detectable_s: Number = None
    stalls: list[Stall] = []

    @property
    def unexplained(self) -> list[Stall]:
        """The stalls that are not the host's nor their prompts', and that no compile event explains."""
        return [stall for stall in self.stalls if stall.cause in ("part", "unknown")]


class Padding(Row):
    """Computed positions that held no token."""

    waste_pct: Number = None
    prefill_waste_pct: Number = None
    decode_waste_pct: Number = None


class Startup(Row):
    """One start of the slowest replica, the mean over trials."""

    serving_s: Number = None
    load_s: Number = None
    warmup_s: Number = None
    compiles: Number = None
    compile_s: Number = None
    cache: Annotated[dict[str, int] | None, Field(description="compiles by state of the disk cache")] = None
    artifact: str | None = None
    memory_bytes: dict[str, Any] = {}


class Arm(Row):
    """What one arm did."""

    name: str
    control: bool
    verdict: Verdict | None = None
    requests: int
    failed: int
    error_pct: Number = None
    request_rate: Number = None
    output_token_rate: Number = None
    goodput_rps: Number = None
    metrics: Annotated[dict[str, Latency], Field(description="all traffic, by metric")]
    steady: Annotated[dict[str, Latency], Field(description="without the cold start and what compiles delayed")]
    cold: Annotated[dict[str, Latency], Field(description="first traffic after ready")]
    external: External | None = None
    compile: Compiles
    client_stalls: ClientStalls
    padding: Padding
    startup: Startup
    memory_bytes: Annotated[dict[str, float], Field(description="the peak of one replica, by figure")] = {}


class Comparison(Row):
    """A quantile of an arm over the control's, of steady traffic of a typical block."""

    arm: str
    metric: str
    quantile: float
    ratio: Number
    low: Number = None
    high: Number = None
    gate: Annotated[bool, Field(description="whether a gate rests on it")]
    verdict: Verdict | None = None
    reason: str


# --- Compiles and latency over time -----------------------------------------------------------------------------------


class Spike(Row):
    """A stretch of high latency."""

    arm: str
    trial: int
    offset_s: Number
    seconds: float
    peak_ms: Number
    requests: int
    cause: str
    event_ids: list[str]
    explained_pct: Number


class Event(Row):
    """A compile while serving."""

    event_id: str
    arm: str
    replica: str | None = None
    trial: int
    kind: str
    offset_s: Number
    seconds: float
    shape: str | None = None
    reason: str | None = None
    frame: str | None = None
    dynamic: bool | None = None
    cache: str | None = None
    backend_s: Number = None
    breaks: list[str] | None = None
    requests_hit: int
    requests_behind: Annotated[int, Field(description="in its backlog, none of them among requests_hit")]
    request_ids: list[str]


class Bins(Row):
    """Columns of the bins that hold requests, by when these were due."""

    trial: list[int] = []
    t_s: list[float] = []
    n: list[int] = []
    failed: list[int] = []
    ttft_p50_ms: list[Number] = []
    ttft_p99_ms: list[Number] = []
    e2e_p50_ms: list[Number] = []
    e2e_p99_ms: list[Number] = []


class Series(Row):
    """Latency over time, by arm."""

    bin_s: float
    arms: dict[str, Bins]


class Histogram(Row):
    """A latency's distribution."""

    edges_ms: list[float] = []
    counts: list[int] = []


# --- How the run went -------------------------------------------------------------------------------------------------


class WeightChange(Row):
    """A change of weights."""

    offset_s: Number
    action: str
    weights: dict[str, float]
    shadows_pct: dict[str, float]
    reason: str


class Ramp(Row):
    """How a ramp went."""

    candidate: str
    outcome: str
    reason: str
    exposed: Annotated[int, Field(description="requests of the candidate")]
    hurt: Annotated[int, Field(description="of these, failed or too slow")]
    rollback_s: Number


class JoinedRun(Row):
    """One of several runs that were judged as one."""

    name: str
    started: str | None = None
    machine: str | None = None
    trials: list[int]
    missing: list[int] = []
    seed: Any = None
    git_commit: str | None = None
    tailgate: str | None = None


class Joined(Row):
    """Runs that were judged as one."""

    runs: list[JoinedRun]
    machines: int
    differences: list[str]


class Load(Row):
    """The load that one arm holds, in requests/s of a replica."""

    arm: str
    low_rps: Annotated[Number, Field(description="surely holds")]
    seen_rps: Number
    high_rps: Annotated[Number, Field(description="surely not above")]
    start_s: Number
    starts: int
    steps: int


class Frontier(Row):
    """Which policy to ship at which load, after a search."""

    answer: list[str]
    gated: Annotated[bool, Field(description="whether the search asked for verdicts")]
    objective: str
    latency: Annotated[str, Field(description="what a step's latency is; empty without an objective on one")]
    limit_ms: Number
    arms: list[Load]
    steps: list[Step]


class Summary(Row):
    """A judged run."""

    schema_: Annotated[Literal[2], Field(alias="schema", description="version of this schema")] = SCHEMA
    name: str
    task: Literal["generate", "embed"] = "generate"
    run_id: str
    created: Annotated[str | None, Field(description="first request, ISO 8601, UTC")] = None
    overall: Verdict
    exit_code: Annotated[Literal[0, 3, 99], Field(description="0 PASS, or loads of a search without gates; 3; 99 FAIL")]
    headline: str
    control: str
    arms: list[Arm]
    comparisons: list[Comparison]
    gates: list[Gate]
    validity: list[Check]
    advice: Advice
    design: Design
    spikes: list[Spike]
    events: Annotated[list[Event], Field(description="the longest first")]
    series: Series
    distribution: Annotated[dict[str, dict[str, Histogram]], Field(description="by metric and arm")]
    interim: Annotated[str | None, Field(description="how interim analyses ended the run; null: it had none")] = None
    ramp: Ramp | None = None
    weights: Annotated[list[WeightChange], Field(description="changes in order")] = []
    joined: Joined | None = None
    traffic: Annotated[Facts, Field(description="of the first trial that describes its traffic")] = {}
    machines: MachineVerdict
    frontier: Frontier | None = None
    environment: Annotated[Facts, Field(description="of the machine; of joined runs, what all have in common")] = {}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """Read the summary in a document. Raises pydantic's ValidationError if it holds none."""
        return cls.model_validate(plain(document))

    @property
    def is_ungated(self) -> bool:
        """Whether it is of a search that asked for no verdicts."""
        return self.frontier is not None and not self.frontier.gated

    @property
    def metric_names(self) -> dict[str, str]:
        """What a reader calls each latency that the run's requests have, in order."""
        return {key: name for key, name in METRIC_NAMES.items() if key in EMBED_METRICS or self.task != EMBED}

    def document(self) -> dict[str, Any]:
        """Return the summary in JSON's own types."""
        return self.model_dump(mode="json", by_alias=True)


def plain(value: Any) -> Any:
    """Convert `value` to JSON types, without control characters; unknown numbers are null, floats keep seven digits."""
    if isinstance(value, Mapping):
        return {plain(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        # Sums differ in their last digits between machines; nothing is known to more than seven.
        return float(f"{value:.7g}") if math.isfinite(value) else None
    if isinstance(value, (int, bool)) or value is None:
        return value
    return CONTROL.sub("", str(value))


def json_schema() -> str:
    """Return the JSON Schema of the document."""
    schema = Summary.model_json_schema(by_alias=True, mode="serialization", schema_generator=_Untitled)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"urn:tailgate:schema:summary:{SCHEMA}"}
    return json.dumps(head | schema, indent=1, ensure_ascii=False) + "\n"


class _Untitled(GenerateJsonSchema):
    """Without titles of fields, which repeat their names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False
