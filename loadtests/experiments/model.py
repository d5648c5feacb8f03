"""An experiment: arms, traffic, trials, SLOs and gates. An instance is valid: each setting is in its range, and all fit
together."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal

from analysis.settings.gate_limits import GateLimits, Goodput
from analysis.settings.ramp_limits import RampLimits, Rollout
from loadtests.experiments.users import UsersConfig
from loadtests.experiments.whole_checks import check_whole
from loadtests.external.addresses import ExternalConfig
from loadtests.external.client_security import OPEN, SecurityConfig
from loadtests.traffic.settings import TrafficConfig
from servers.config import ArmConfig, EngineConfig, ModelConfig, Task
from servers.fields import ConfigError, Range, check_fields
from servers.splitter.envoy_config import Stickiness


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arm:
    """One arm and its part in the experiment."""

    name: str
    control: bool = False
    weight: Annotated[int, Range(0, 1_000_000)] = 1
    replicas: Annotated[int, Range(1, 256)] = 1

    @property
    def replica_names(self) -> tuple[str, ...]:
        """One name for each server process of the arm."""
        return tuple(f"{self.name}-{index}" for index in range(self.replicas))


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnArm(_Arm):
    """An arm that tailgate starts."""

    kind: ClassVar[str] = "tailgate"
    config: ArmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalArm(_Arm):
    """An arm that tailgate does not start. Only its address and its protocol are known."""

    external: ExternalConfig

    @property
    def kind(self) -> str:
        """openai or oip."""
        return self.external.kind


ExperimentArm = OwnArm | ExternalArm


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialsConfig:
    """How often the experiment is repeated from a fresh start, and how its arms are started.

    `starting_at_once` arms load and warm up at the same time: 1 gives start-up times that nothing disturbed.
    With `swap_devices` arms on devices of one kind (cuda:0, cuda:1) change places from trial to trial.
    With `compile_cache = "fresh"` every replica of every trial compiles from nothing; "shared" keeps one disk cache in
    the output folder for all arms, trials and runs.
    """

    count: Annotated[int, Range(1, 1000)] = 1
    starting_at_once: Annotated[int, Range(1, 1024)] = 1
    ready_timeout_s: Annotated[float, Range(1, 86_400)] = 900.0
    swap_devices: bool = True
    compile_cache: Literal["fresh", "shared"] = "fresh"

    def __post_init__(self) -> None:
        check_fields(self, "trials")


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitterSettings:
    """The splitter's own settings; its arms and weights come from the experiment. Port 0 takes a free port.

    With a certificate the load goes to it by TLS; the arms behind it are on loopback and stay plaintext.
    """

    port: Annotated[int, Range(0, 65535)] = 0
    admin_port: Annotated[int, Range(0, 65535)] = 0
    workers: Annotated[int, Range(1, 1024)] = 2
    stickiness: Stickiness = "arm"
    tls_certificate: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""

    def __post_init__(self) -> None:
        check_fields(self, "splitter")
        if self.port and self.port == self.admin_port:
            raise ConfigError(f"splitter.port and splitter.admin_port are both {self.port}: give two ports, or 0")
        if bool(self.tls_certificate) != bool(self.tls_key):
            given = "tls_certificate" if self.tls_certificate else "tls_key"
            raise ConfigError(f"splitter.{given} is set alone: give tls_certificate and tls_key, or neither")
        if self.tls_client_ca and not self.tls_certificate:
            raise ConfigError("splitter.tls_client_ca is set without tls_certificate: give it and tls_key too")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityConfig:
    """How it is made sure that arms compute the same.

    `served`: after the traffic of each trial every replica answers the same few prompts. `full`: before the first trial
    every arm is measured as `tailgate parity` does, against a float64 `reference`; a failure ends the run. `prompts` 0
    takes half as many again as the engine has slots, from 16 to 64, or as there are lengths at which shapes change,
    and 64 where an arm is quantised differently from the control; answers have `tokens` tokens at most.
    Such an arm is judged by its KL divergence, `max_kl` nats a token, on `texts`, a file of token ids; without it on
    the control's answers. Encoders are judged by the cosine of every vector, `min_cosine` at least; 0 takes what the
    dtype allows.

    External arms whose control is external too are `served` by `prompts` of the traffic (0: 48) with answers of
    `tokens`, before the load and after it; a share of `max_different` may be other than the control's.
    """

    served: bool = True
    full: bool = False
    reference: bool = True
    prompts: Annotated[int, Range(0, 4096)] = 0
    tokens: Annotated[int, Range(1, 4096)] = 24
    texts: str = ""
    max_kl: Annotated[float, Range(1e-9, 100)] = 0.02
    min_cosine: Annotated[float, Range(0, 1)] = 0.0
    max_different: Annotated[float, Range(0, 0.9)] = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "parity")


LEAST_SAMPLE_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinesConfig:
    """How the machines are watched. Each host is sampled every `sample_s`, and before and after each trial a reference
    of `reference_s` measures each device and the host. 0 leaves either out. While traffic flows replicas change
    processors every `processor_turn_s`, or never: 0.

    A sample takes the watcher some ms: with less than `LEAST_SAMPLE_S` between them it would do little else.
    """

    sample_s: Annotated[float, Range(0, 60)] = 1.0
    reference_s: Annotated[float, Range(0, 60)] = 2.0
    processor_turn_s: Annotated[float, Range(0, 600)] = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "machines")
        if 0 < self.sample_s < LEAST_SAMPLE_S:
            raise ConfigError(
                f"machines.sample_s is {self.sample_s:g}, about what a sample takes: give {LEAST_SAMPLE_S:g} or more, "
                "or 0 for none"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PressureConfig:
    """What one more process does to the machines of all arms alike from `start_s` to `end_s` of the traffic (0: to its
    end). `gpu_gib` are held on each GPU of an arm, and `processors` are kept busy; 0 leaves either out."""

    gpu_gib: Annotated[float, Range(0, 1024)] = 0.0
    processors: Annotated[int, Range(0, 1024)] = 0
    start_s: Annotated[float, Range(0, 1e7)] = 0.0
    end_s: Annotated[float, Range(0, 1e7)] = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "pressure")
        if 0 < self.end_s <= self.start_s:
            raise ConfigError(
                f"pressure.end_s is {self.end_s:g} but start_s is {self.start_s:g}: give a later end, or 0 for the end "
                "of the traffic"
            )
        if (self.start_s or self.end_s) and not self.weighs:
            raise ConfigError("[pressure] has times and nothing that weighs: give gpu_gib or processors, or remove it")

    @property
    def weighs(self) -> bool:
        """Whether anything is asked for."""
        return bool(self.gpu_gib or self.processors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """Arms, traffic, trials and what is judged. Exactly one arm is the control."""

    name: str
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    compare_models: bool = False
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    arms: tuple[ExperimentArm, ...]
    traffic: TrafficConfig
    trials: TrialsConfig = field(default_factory=TrialsConfig)
    slo: Mapping[str, Any] = field(default_factory=dict)  # as written: see analysis.settings.slo_targets
    goodput: Goodput = field(default_factory=Goodput)
    gates: GateLimits = field(default_factory=GateLimits)
    rollout: Rollout = field(default_factory=Rollout)
    ramp: RampLimits = field(default_factory=RampLimits)
    users: UsersConfig = field(default_factory=UsersConfig)
    splitter: SplitterSettings = field(default_factory=SplitterSettings)
    parity: ParityConfig = field(default_factory=ParityConfig)
    machines: MachinesConfig = field(default_factory=MachinesConfig)
    pressure: PressureConfig = field(default_factory=PressureConfig)
    security: SecurityConfig = OPEN

    def __post_init__(self) -> None:
        check_fields(self)
        check_whole(self)

    @property
    def task(self) -> Task:
        """What every arm is asked for."""
        return self.model.task

    @property
    def control(self) -> ExperimentArm:
        """The arm that the others are compared with."""
        return next(arm for arm in self.arms if arm.control)

    def only(self, names: Collection[str]) -> Experiment:
        """The experiment with some of its arms, for a trial that starts no others. The control stays who it is."""
        values = {item.name: getattr(self, item.name) for item in fields(Experiment)}
        arms = tuple(arm for arm in self.arms if arm.name in names)
        return _PartOfExperiment(**{**values, "arms": arms}, whole=self)

    @property
    def own_arms(self) -> tuple[OwnArm, ...]:
        """The arms that tailgate starts."""
        return tuple(arm for arm in self.arms if isinstance(arm, OwnArm))

    @property
    def quantised_arms(self) -> tuple[OwnArm, ...]:
        """The own arms whose weights are quantised differently from the control's."""
        control = self.control
        if not isinstance(control, OwnArm):
            return ()
        own = control.config.model.quantisation
        return tuple(arm for arm in self.own_arms if arm.config.model.quantisation != own)

    @property
    def external_arms(self) -> tuple[ExternalArm, ...]:
        """The arms that tailgate neither starts nor sees into."""
        return tuple(arm for arm in self.arms if isinstance(arm, ExternalArm))

    @property
    def counting_model(self) -> str:
        """The model whose tokenizer counts: the control's, or that of the experiment when the control is external."""
        control = self.control
        return control.config.model.id if isinstance(control, OwnArm) else self.model.id


@dataclass(frozen=True, slots=True, kw_only=True)
class _PartOfExperiment(Experiment):
    """Some arms of an experiment that was checked as a whole."""

    whole: Experiment

    def __post_init__(self) -> None:
        """Nothing is left to check."""

    @property
    def control(self) -> ExperimentArm:
        """The arm that the others are compared with, whether it is here or not."""
        return self.whole.control
