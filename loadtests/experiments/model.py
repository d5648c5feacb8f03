"""An experiment: arms, traffic, trials, SLOs and gates. An instance is valid: each setting is in its range, and all fit
together. `python -m tailgate.loadtests.experiments.model FILE` writes the JSON Schema of its TOML file, for editors."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, model_validator
from pydantic.json_schema import GenerateJsonSchema

from tailgate.analysis.settings.gate_limits import GateLimits
from tailgate.analysis.settings.ramp_limits import RampLimits, Rollout
from tailgate.loadtests.experiments.checks import check_whole
from tailgate.loadtests.experiments.users import UsersConfig
from tailgate.loadtests.external.arms import EXTERNAL_KEYS, OipArm, OpenAiArm
from tailgate.loadtests.external.client_security import OPEN, SecurityConfig, TlsPair
from tailgate.loadtests.traffic.settings import TrafficConfig
from tailgate.servers.config import ArmConfig, EngineConfig, ModelConfig, Name, Task
from tailgate.servers.fields import Listed, Settings
from tailgate.servers.presets import Preset


class OwnArm(ArmConfig):
    """An arm that tailgate starts, and its part in the experiment."""

    elsewhere: ClassVar[Mapping[str, str]] = dict.fromkeys(
        EXTERNAL_KEYS, 'is for a server that already runs: add kind = "openai" or "oip"'
    )
    kind: Literal["tailgate"] = "tailgate"
    preset: Preset
    control: bool = False
    weight: int = Field(default=1, ge=0, le=1_000_000)
    replicas: int = Field(default=1, ge=1, le=256)

    @property
    def replica_names(self) -> tuple[str, ...]:
        """One name for each server process of the arm."""
        return tuple(f"{self.name}-{index}" for index in range(self.replicas))

    @property
    def config(self) -> ArmConfig:
        """What each of its servers is."""
        return ArmConfig(**{key: getattr(self, key) for key in ArmConfig.model_fields})


ExperimentArm = OwnArm | OpenAiArm | OipArm


class TrialsConfig(Settings):
    """How often the experiment is repeated from a fresh start, and how its arms are started.

    `starting_at_once` arms load and warm up at the same time: 1 gives start-up times that nothing disturbed.
    With `swap_devices` arms on devices of one kind (cuda:0, cuda:1) change places from trial to trial.
    With `compile_cache = "fresh"` every replica of every trial compiles from nothing; "shared" keeps one disk cache in
    the output folder for all arms, trials and runs.
    """

    count: int = Field(default=1, ge=1, le=1000)
    starting_at_once: int = Field(default=1, ge=1, le=1024)
    ready_timeout_s: float = Field(default=900.0, ge=1, le=86_400)
    swap_devices: bool = True
    compile_cache: Literal["fresh", "shared"] = "fresh"


class SplitterSettings(TlsPair):
    """The splitter's own settings; its arms and weights come from the experiment. Port 0 takes a free port.

    With a certificate the load goes to it by TLS; the arms behind it are on loopback and stay plaintext.
    """

    port: int = Field(default=0, ge=0, le=65535)
    admin_port: int = Field(default=0, ge=0, le=65535)
    workers: int = Field(default=2, ge=1, le=1024)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.port and self.port == self.admin_port:
            raise ValueError(f"port and splitter.admin_port are both {self.port}: give two ports, or 0")
        return self


class ParityConfig(Settings):
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
    prompts: int = Field(default=0, ge=0, le=4096)
    tokens: int = Field(default=24, ge=1, le=4096)
    texts: str = ""
    max_kl: float = Field(default=0.02, ge=1e-9, le=100)
    min_cosine: float = Field(default=0.0, ge=0, le=1)
    max_different: float = Field(default=0.0, ge=0, le=0.9)


LEAST_SAMPLE_S = 0.05


class MachinesConfig(Settings):
    """How the machines are watched. Each host is sampled every `sample_s`, and before and after each trial a reference
    of `reference_s` measures each device and the host. 0 leaves either out. While traffic flows replicas change
    processors every `processor_turn_s`, or never: 0.

    A sample takes the watcher some ms: with less than `LEAST_SAMPLE_S` between them it would do little else.
    """

    sample_s: float = Field(default=1.0, ge=0, le=60)
    reference_s: float = Field(default=2.0, ge=0, le=60)
    processor_turn_s: float = Field(default=0.0, ge=0, le=600)

    @model_validator(mode="after")
    def _samples_are_apart(self) -> Self:
        if 0 < self.sample_s < LEAST_SAMPLE_S:
            raise ValueError(
                f"sample_s is {self.sample_s:g}, about what a sample takes: give {LEAST_SAMPLE_S:g} or more, "
                "or 0 for none"
            )
        return self


class PressureConfig(Settings):
    """What one more process does to the machines of all arms alike from `start_s` to `end_s` of the traffic (0: to its
    end). `gpu_gib` are held on each GPU of an arm, and `processors` are kept busy; 0 leaves either out."""

    gpu_gib: float = Field(default=0.0, ge=0, le=1024)
    processors: int = Field(default=0, ge=0, le=1024)
    start_s: float = Field(default=0.0, ge=0, le=1e7)
    end_s: float = Field(default=0.0, ge=0, le=1e7)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if 0 < self.end_s <= self.start_s:
            raise ValueError(
                f"end_s is {self.end_s:g} but start_s is {self.start_s:g}: give a later end, or 0 for the end of the "
                "traffic"
            )
        if (self.start_s or self.end_s) and not self.weighs:
            key = "start_s" if self.start_s else "end_s"
            raise ValueError(f"{key} is set and nothing weighs: give gpu_gib or processors, or remove the table")
        return self

    @property
    def weighs(self) -> bool:
        """Whether anything is asked for."""
        return bool(self.gpu_gib or self.processors)


class Experiment(Settings):
    """Arms, traffic, trials and what is judged. Exactly one arm is the control."""

    name: Name  # it names the run's folder
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    compare_models: bool = False
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    arms: Annotated[tuple[Annotated[ExperimentArm, Field(discriminator="kind")], ...], Listed] = ()
    traffic: TrafficConfig
    trials: TrialsConfig = TrialsConfig()
    slo: Mapping[str, Any] = {}  # as written: see analysis.settings.slo_targets
    gates: GateLimits = GateLimits()
    ramp: RampLimits = RampLimits()
    rollout: Rollout = Rollout()
    users: UsersConfig = UsersConfig()
    splitter: SplitterSettings = SplitterSettings()
    parity: ParityConfig = ParityConfig()
    machines: MachinesConfig = MachinesConfig()
    pressure: PressureConfig = PressureConfig()
    security: SecurityConfig = OPEN
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
        """Return the experiment with some of its arms, for a trial that starts no others. The control stays who it is.

        It is part of an experiment that was checked as a whole.
        """
        part = self.model_copy(update={"arms": tuple(arm for arm in self.arms if arm.name in names)})
        part._whole = self
        return part

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
        own = control.model.quantisation
        return tuple(arm for arm in self.own_arms if arm.model.quantisation != own)

    @property
    def external_arms(self) -> tuple[OpenAiArm | OipArm, ...]:
        """The arms that tailgate neither starts nor sees into."""
        return tuple(arm for arm in self.arms if not isinstance(arm, OwnArm))

    @property
    def counting_model(self) -> str:
        """The model whose tokenizer counts: the control's, or that of the experiment when the control is external."""
        control = self.control
        return control.model.id if isinstance(control, OwnArm) else self.model.id


# --- JSON Schema ------------------------------------------------------------------------------------------------------


class _Untitled(GenerateJsonSchema):
    """Without titles of fields, which repeat their names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def json_schema() -> str:
    """Return the schema of what a file may hold. Whether all of it fits together, `tailgate run` says."""
    schema = Experiment.model_json_schema(mode="validation", schema_generator=_Untitled)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "urn:tailgate:schema:experiment"}
    return json.dumps(head | schema, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json_schema(), encoding="utf-8")
