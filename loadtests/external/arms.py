"""An arm that tailgate does not start: a model server known by its addresses and its protocol.

`kind = "openai"` is the OpenAI-compatible HTTP API with server-sent events (vLLM, SGLang, TGI, transformers, others);
`kind = "oip"` the Open Inference Protocol over gRPC as Triton streams it. Nothing here opens a connection.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, JsonValue, WithJsonSchema, model_validator

from tailgate.loadtests.external.addresses import KINDS, Kind, parse_address
from tailgate.loadtests.external.client_security import SecurityConfig
from tailgate.servers.complaint import ConfigError
from tailgate.servers.config import Name
from tailgate.servers.fields import Listed, Settings

# Body fields that make servers answer with exactly as many tokens as the request says.
LengthField = Literal["ignore_eos", "min_tokens"]
EXTERNAL_KEYS = ("address", "model_name", "telemetry", *SecurityConfig.model_fields, *KINDS)


class _Options(Settings):
    """What either protocol lets a request say of its prompt and its answer."""

    tokenizer: str = ""
    """The model's folder or hub id. Prompts then have exactly the planned number of tokens, to which a chat adds its
    template; without it about as many."""
    length_fields: Annotated[tuple[LengthField, ...], Listed] = ()
    """Fields that stop the server from ending an answer early. Sent if `traffic.ignore_eos` is true."""
    extra: Annotated[Mapping[str, JsonValue], WithJsonSchema({"additionalProperties": True, "type": "object"})] = {}
    """Added unchanged to every request, tables and lists included."""


class OpenAiOptions(_Options):
    """How requests to an OpenAI-compatible server are written. They are greedy (`temperature` 0) and streamed."""

    endpoint: Literal["completions", "chat"] = "completions"
    """API that is called."""
    usage: Literal["end", "each", "off"] = "end"
    """When the server counts tokens: at the `end` of a stream (`stream_options.include_usage`), with `each` chunk
    (`continuous_usage_stats`, which vLLM knows), or never (`off`)."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for key in ("stream", "model", "prompt", "messages", "stream_options"):
            if key in self.extra:
                raise ValueError(f"extra.{key} is what tailgate itself must set: remove it")
        return self


class OipOptions(_Options):
    """Which tensors of an Open Inference Protocol model carry what. The defaults are those of Triton's vLLM backend. A
    tensor with an empty name is not sent."""

    prompt_tensor: str = Field(default="text_input", min_length=1)
    """The prompt (BYTES)."""
    max_tokens_tensor: str = ""
    """The length of the answer (INT32)."""
    stream_tensor: str = "stream"
    """Whether to stream (BOOL)."""
    parameters_tensor: str = "sampling_parameters"
    """JSON (BYTES) with `max_tokens`, `length_fields` and `extra`."""
    output_tensor: str = Field(default="text_output", min_length=1)
    """The answer (BYTES), one piece of text a response."""
    batched: bool = False
    """Put a batch dimension of 1 before every shape."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if not self.max_tokens_tensor and not self.parameters_tensor:
            raise ValueError(
                "max_tokens_tensor and oip.parameters_tensor are both empty, so the length of an answer cannot be "
                "asked for: name one of them"
            )
        if (self.length_fields or self.extra) and not self.parameters_tensor:
            raise ValueError(
                "length_fields and oip.extra travel in oip.parameters_tensor, which is empty: name it, or drop them"
            )
        return self


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _commands(value: Any) -> Any:
    """Return a single command as a list of it. A text is refused: nothing here is a shell."""
    is_one = isinstance(value, list | tuple) and value and all(isinstance(word, str) for word in value)
    return [value] if is_one else value


class TelemetryConfig(Settings):
    """The server's log, from which its compiles are read: none, one for the whole arm, or one for each address in their
    order."""

    log: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...],
        BeforeValidator(_as_list, json_schema_input_type=str | list[str]),
        Listed,
    ] = ()
    """Log file on this host."""
    log_command: Annotated[
        tuple[Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False, min_length=1)], ...],
        BeforeValidator(_commands, json_schema_input_type=list[str] | list[list[str]]),
        Listed,
    ] = ()
    """A program that prints the lines of the log while it runs: `["kubectl", "logs", "-f", "pod/vllm-0"]`. It runs with
    your permissions."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.log and self.log_command:
            raise ValueError("log and log_command are both set: keep the one that shows the server's lines")
        if len(set(self.log)) < len(self.log):
            raise ValueError("log names one file twice: each replica has its own")
        return self

    @property
    def logs(self) -> tuple[str | tuple[str, ...], ...]:
        return self.log or self.log_command


class ExternalArm(SecurityConfig):
    """A server that already runs. It has no `preset`, `shapes`, `compile`, `model`, `engine`, `replicas` or
    `weight`."""

    elsewhere: ClassVar[Mapping[str, str]] = {
        "replicas": "has no meaning for an external arm: list the replicas in address",
        **dict.fromkeys(
            ("preset", "model", "engine", "shapes", "compile", "weight"),
            "describes a server that tailgate starts, and this one is external: remove it",
        ),
    }
    name: Name
    """Name of the arm in records and reports."""
    kind: Kind
    """`openai`: OpenAI-compatible HTTP with streaming. `oip`: Open Inference Protocol over gRPC."""
    control: bool = False
    """The arm that the others are compared with. Exactly one arm has it."""
    address: Annotated[
        tuple[str, ...],
        BeforeValidator(_as_list, json_schema_input_type=str | list[str]),
        Field(strict=False, min_length=1),
    ]
    """`http://host:port/v1`, `https://…`, or `grpc://host:port`, `grpcs://…` for `oip`. A list of addresses is a list
    of replicas."""
    model_name: str = Field(min_length=1)
    """The model's name at the server."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """The server's log."""
    weight: ClassVar[int] = 1

    @model_validator(mode="after")
    def _arm_fits(self) -> Self:
        for address in self.address:
            parse_address(address, self.kind)
            if self.address.count(address) > 1:
                raise ValueError(f'address "{address}" is there twice: each replica has an address of its own')
        if self.tls and not any(parse_address(address, self.kind).tls for address in self.address):
            raise ValueError(
                "tls_ca or a certificate is given but no address uses TLS: write https://, or leave it out"
            )
        if (count := len(self.telemetry.logs)) not in (0, 1, len(self.address)):
            key = "log" if self.telemetry.log else "log_command"
            raise ValueError(
                f"telemetry.{key} has {count} and address {len(self.address)}: give one for each address, or one "
                "for all"
            )
        return self

    @property
    def options(self) -> OpenAiOptions | OipOptions:
        options: OpenAiOptions | OipOptions = getattr(self, self.kind)
        return options

    @property
    def replicas(self) -> int:
        return len(self.address)

    @property
    def replica_names(self) -> tuple[str, ...]:
        return tuple(f"{self.name}-{index}" for index in range(self.replicas))

    def check(self, where: str) -> None:
        """Raise ConfigError unless the files, programs and the variable that the arm names are there and of use."""
        super().check(where)
        for path in self.telemetry.log:
            if not Path(path).is_file():
                raise ConfigError(f'{where}: telemetry.log "{path}" is no file: give the one that the server writes')
        for program, *_ in self.telemetry.log_command:
            if shutil.which(program) is None:
                raise ConfigError(
                    f'{where}: telemetry.log_command "{program}" is no program here: install it, or give its path'
                )
        path = self.options.tokenizer
        if path.startswith("/") and not Path(path).is_dir():
            raise ConfigError(f'{where}.{self.kind}.tokenizer is "{path}", no folder: give the model\'s, or its hub id')


class OpenAiArm(ExternalArm):
    """A server with the OpenAI-compatible HTTP API."""

    kind: Literal["openai"]
    """OpenAI-compatible HTTP with streaming: vLLM, SGLang, TGI, transformers and others."""
    openai: OpenAiOptions = OpenAiOptions()
    """How requests are written."""


class OipArm(ExternalArm):
    """A server with the Open Inference Protocol."""

    kind: Literal["oip"]
    """Open Inference Protocol over gRPC, as Triton streams it."""
    oip: OipOptions = OipOptions()
    """Which tensors carry what."""


AnyExternalArm = Annotated[OpenAiArm | OipArm, Field(discriminator="kind")]
