"""An experiment: arms, traffic, trials, SLOs and gates. An instance is valid: each setting is in its range, and all fit
together."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, Field, PrivateAttr, WithJsonSchema, model_validator
from pydantic.json_schema import GenerateJsonSchema

from tailgate.analysis.settings.gate_limits import GateLimits
from tailgate.analysis.settings.ramp_limits import RampLimits, Rollout
from tailgate.analysis.settings.slo_targets import SLO_SCHEMA
from tailgate.loadtests.experiments.checks import check_whole
from tailgate.loadtests.experiments.users import UsersConfig
from tailgate.loadtests.external.arms import EXTERNAL_KEYS, OipArm, OpenAiArm
from tailgate.loadtests.external.client_security import OPEN, SecurityConfig, TlsPair
from tailgate.loadtests.traffic.settings import TrafficConfig
from tailgate.servers.address import LOWEST_PORT
from tailgate.servers.config import ArmConfig, EngineConfig, ModelConfig, Name, Task
from tailgate.servers.fields import DEFAULT, Listed, Settings
from tailgate.servers.presets import Preset

SCHEMA_ID = "urn:tailgate:schema:experiment"


class ManagedArm(ArmConfig):
    """A managed arm: tailgate starts it. Its policy, control, weight and replicas."""

    elsewhere: ClassVar[Mapping[str, str]] = dict.fromkeys(
        EXTERNAL_KEYS, 'is for a server that already runs: add kind = "openai" or "oip"'
    )
    kind: Literal["tailgate"] = "tailgate"
    """An arm that tailgate starts. Default: `tailgate`."""
    preset: Preset
    """Shape and compile policy of the arm."""
    control: bool = False
    """The arm that the others are compared with. Exactly one arm has it."""
    weight: int = Field(default=1, ge=0, le=1_000_000)
    """Share of the traffic with `traffic.design = "split"`."""
    replicas: int = Field(default=1, ge=1, le=256)
    """Server processes of the arm. Equal for all managed arms when the traffic is mirrored."""

    @property
    def replica_names(self) -> tuple[str, ...]:
        """One name for each server process of the arm."""
        return tuple(f"{self.name}-{index}" for index in range(self.replicas))

    @property
    def config(self) -> ArmConfig:
        """What each of its servers is."""
        return ArmConfig(**{key: getattr(self, key) for key in ArmConfig.model_fields})


ExperimentArm = ManagedArm | OpenAiArm | OipArm


class TrialsConfig(Settings):
    """How often the experiment is repeated from a fresh start, and how its arms are started."""

    count: int = Field(default=1, ge=1, le=1000)
    """Trials, each after a fresh start of every arm."""
    starting_at_once: int = Field(default=1, ge=1, le=1024)
    """Arms that load and warm up at the same time. 1 gives undisturbed start-up times."""
    ready_timeout_s: float = Field(default=900.0, ge=1, le=86_400)
    """Time in s that a server has to load and warm up."""
    swap_devices: bool = True
    """Arms on devices of one kind (`cuda:0`, `cuda:1`) swap devices after each trial."""
    compile_cache: Literal["fresh", "shared"] = "fresh"
    """`fresh` compiles everything in every start, except what `compile.artifact` holds. `shared` keeps one disk cache
    in the output folder for all arms, trials and runs."""


class SplitterSettings(TlsPair):
    """The splitter's own settings. Its arms and weights come from the experiment. The arms behind it are on loopback,
    in plaintext."""

    port: int = Field(default=0, ge=0, le=65535)
    """Port that the load goes to. 0 takes a free one."""
    admin_port: int = Field(default=0, ge=0, le=65535)
    """Port of Envoy's admin interface on 127.0.0.1, open to every process of this machine. 0 is a Unix socket that only
    your user may open."""
    workers: int = Field(default=2, ge=1, le=1024)
    """Threads of Envoy."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for key in ("port", "admin_port"):
            if 0 < (port := getattr(self, key)) < LOWEST_PORT:
                raise ValueError(f"{key} is {port}: give 0, or a port from {LOWEST_PORT} to 65535")
        if self.port and self.port == self.admin_port:
            raise ValueError(f"port and splitter.admin_port are both {self.port}: give two ports, or 0")
        return self


class ParityConfig(Settings):
    """How a run checks that its arms compute the same."""

    served: bool = True
    """After the traffic of each trial every replica answers the same few prompts; external arms do if the control is
    external too."""
    full: bool = False
    """Measure every arm before the first trial, as `tailgate parity` does. A FAIL ends the run."""
    prompts: int = Field(default=0, ge=0, le=4096)
    """Prompts that arms answer. 0 is half as many again as `engine.slots`, from 16 to 64; more where shapes change at
    more lengths; 64 with a quantised arm; 48 for external arms."""
    tokens: int = Field(default=24, ge=1, le=4096)
    """Longest answer in tokens, at most `engine.max_new_tokens`."""
    texts: str = ""
    """File with a list of token ids on each line, by which quantised arms are judged. Needed for them, except with
    random weights."""
    max_kl: float = Field(default=0.02, ge=1e-9, le=100)
    """Highest mean KL divergence of a quantised arm from the reference, in nats a token."""
    min_cosine: float = Field(default=0.0, ge=0, le=1)
    """Lowest cosine of an encoder's vectors with the control's, before and after the traffic. 0 is 0.9999 in float32
    and 0.999 in lower precision."""
    max_different: float = Field(default=0.0, ge=0, le=0.9)
    """Share of greedy answers of an external arm that may differ from the control's."""


class MachinesConfig(Settings):
    """How the machines of a run are watched and measured."""

    sample_s: float = Field(default=1.0, ge=0.05, le=60)
    """Time in s between samples of hosts, devices and processes."""
    reference_s: float = Field(default=2.0, ge=0, le=60)
    """Time in s of the fixed work on each device before and after a trial, which tells a slow machine from a slow arm.
    0 leaves it out."""
    processor_turn_s: float = Field(default=0.0, ge=0, le=600)
    """Time in s after which replicas change processors while traffic flows. 0 is never."""


class PressureConfig(Settings):
    """A neighbour process that weighs on the machines of all arms alike while traffic flows."""

    gpu_gib: float = Field(default=0.0, ge=0, le=1024)
    """GiB that it holds on each GPU of an arm."""
    processors: int = Field(default=0, ge=0, le=1024)
    """Processors of this host that it keeps busy."""

    @property
    def weighs(self) -> bool:
        """Whether anything is asked for."""
        return bool(self.gpu_gib or self.processors)


class Experiment(Settings):
    """Arms, traffic, trials and what is judged. Exactly one arm is the control."""

    name: Name
    """Name of the experiment. It names the run's directory."""
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """Seed of all randomness: arrivals, lengths, prompts, the order of arms."""
    compare_models: bool = False
    """Allow arms that differ in `model` or `engine`, and external arms: the question is then about whole servers."""
    model: ModelConfig = ModelConfig()
    """Which transformer is served."""
    engine: EngineConfig = EngineConfig()
    """Limits of the batching engine."""
    arms: Annotated[tuple[Annotated[ExperimentArm, Field(discriminator="kind")], ...], Listed] = ()
    """What is compared: 2 to 26 arms, of which exactly one is the control."""
    traffic: TrafficConfig
    """Which traffic one trial sends."""
    trials: TrialsConfig = TrialsConfig()
    """How often the experiment is repeated."""
    slo: Annotated[Mapping[str, Any], WithJsonSchema(dict(SLO_SCHEMA))] = {}
    """Objectives of every arm, and what a search for load counts as held."""
    gates: GateLimits = GateLimits()
    """What an arm must hold to replace the control."""
    ramp: RampLimits = RampLimits()
    """How `tailgate ramp` moves traffic to the candidate."""
    rollout: Rollout = Rollout()
    """Load that the rollout must carry."""
    users: UsersConfig = UsersConfig()
    """Where production traffic flows, for a ramp that sends none."""
    splitter: SplitterSettings = SplitterSettings()
    """Ports, threads and TLS of the splitter."""
    parity: ParityConfig = ParityConfig()
    """Whether the arms compute the same, and how that is judged."""
    machines: MachinesConfig = MachinesConfig()
    """How the machines are watched."""
    pressure: PressureConfig = PressureConfig()
    """A neighbour process on the machines of all arms."""
    security: SecurityConfig = OPEN
    """TLS and token of the load."""
    _whole: Experiment | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        check_whole(self)
        return self

    @property
    def task(self) -> Task:
        """What every arm is asked for."""
        return self.model.task

    @property
    def control(self) -> ExperimentArm:
        """The arm that the others are compared with, whether it is here or not."""
        return next(arm for arm in (self._whole or self).arms if arm.control)

    def only(self, names: Collection[str]) -> Experiment:
        """Return a part of the experiment for a trial that starts no other arms. The control stays who it is."""
        part = self.model_copy(update={"arms": tuple(arm for arm in self.arms if arm.name in names)})
        part._whole = self
        return part

    @property
    def managed_arms(self) -> tuple[ManagedArm, ...]:
        """The arms that tailgate starts."""
        return tuple(arm for arm in self.arms if isinstance(arm, ManagedArm))

    @property
    def quantised_arms(self) -> tuple[ManagedArm, ...]:
        """The managed arms whose weights are quantised differently from the control's."""
        control = self.control
        if not isinstance(control, ManagedArm):
            return ()
        own = control.model.quantisation
        return tuple(arm for arm in self.managed_arms if arm.model.quantisation != own)

    @property
    def external_arms(self) -> tuple[OpenAiArm | OipArm, ...]:
        """The arms that tailgate neither starts nor sees into."""
        return tuple(arm for arm in self.arms if not isinstance(arm, ManagedArm))

    @property
    def tokenizer(self) -> str:
        """The model whose tokenizer counts prompts of text: the traffic's, the control's, or the experiment's when the
        control is external. Empty where prompts are ids."""
        if self.traffic.prompts == "ids":
            return ""
        control = self.control
        return self.traffic.tokenizer or (control.model.id if isinstance(control, ManagedArm) else self.model.id)


# --- JSON Schema ------------------------------------------------------------------------------------------------------


class _Plain(GenerateJsonSchema):
    """Without titles of fields, which repeat their names, and without whole tables as defaults."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: Any) -> Any:
        is_table = isinstance(schema.get("default"), BaseModel)
        return self.generate_inner(schema["schema"]) if is_table else super().default_schema(schema)


def json_schema() -> str:
    """Return the schema of what a file may hold. Whether all of it fits together, `tailgate run` says."""
    schema = Experiment.model_json_schema(mode="validation", schema_generator=_Plain)
    for table in (schema, *schema["$defs"].values()):
        for item in (table, *table.get("properties", {}).values()):
            if "description" in item:
                item["description"] = " ".join(item["description"].split())
                if DEFAULT in item["description"]:  # which is another than the model's
                    item.pop("default", None)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA_ID}
    return json.dumps(head | schema, indent=1, ensure_ascii=False) + "\n"
