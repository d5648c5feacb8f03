"""An arm that tailgate does not start: a model server known by its addresses and its protocol.

`kind = "openai"` is the OpenAI-compatible HTTP API with server-sent events (vLLM, SGLang, TGI, transformers, others);
`kind = "oip"` the Open Inference Protocol over gRPC as Triton streams it. Nothing here opens a connection.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from loadtests.external.addresses import KINDS, Kind, parse_address
from loadtests.external.client_security import SecurityConfig
from loadtests.external.telemetry import TelemetryConfig, as_list
from servers.complaint import ConfigError
from servers.config import Name
from servers.fields import Listed, Settings

# Body fields that make servers answer with exactly as many tokens as the request says.
LengthField = Literal["ignore_eos", "min_tokens"]
EXTERNAL_KEYS = ("address", "model_name", "vocab_size", "telemetry", *SecurityConfig.model_fields, *KINDS)


def _check_extra(extra: Mapping[str, Any]) -> None:
    try:
        json.dumps(extra, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"extra cannot be sent as JSON ({error}): give text, numbers, true, lists or tables") from None


class OpenAiOptions(Settings):
    """How requests to an OpenAI-compatible server are written.

    `prompt` "token_ids" sends numbers, exactly as many as planned; vLLM's and SGLang's completions take them. "text"
    sends words; with `tokenizer` (the model's folder or hub id) exactly as many tokens as planned, the chat template
    included, without it about as many. `length_fields` are the body fields by which the server does not end an answer
    early: ignore_eos, min_tokens, or none. `usage` asks for a token count at the end of each stream, with
    each chunk (vLLM can), or not at all. `extra` is added to every request's body as it is, tables and lists included.
    """

    endpoint: Literal["completions", "chat"] = "completions"
    prompt: Literal["text", "token_ids"] = "text"
    tokenizer: str = ""
    length_fields: Annotated[tuple[LengthField, ...], Listed] = ()
    usage: Literal["end", "each", "off"] = "end"
    extra: Mapping[str, Any] = {}

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _check_extra(self.extra)
        if self.endpoint == "chat" and self.prompt == "token_ids":
            raise ValueError(
                'prompt is "token_ids" but chat messages are text: use openai.endpoint = "completions", '
                'or openai.prompt = "text"'
            )
        for key in ("stream", "model", "prompt", "messages", "stream_options"):
            if key in self.extra:
                raise ValueError(f"extra.{key} is what tailgate itself must set: remove it")
        return self


class OipOptions(Settings):
    """Which tensors of an Open Inference Protocol model carry what. The defaults are those of Triton's vLLM backend.

    Names that are empty are not sent. `parameters_tensor` takes JSON with max_tokens, `length_fields` and `extra`.
    `batched` puts a batch dimension of 1 before every shape. `prompt` "token_ids" sends INT32, as TensorRT-LLM takes.
    """

    prompt: Literal["text", "token_ids"] = "text"
    tokenizer: str = ""
    prompt_tensor: str = "text_input"
    prompt_length_tensor: str = ""
    max_tokens_tensor: str = ""
    stream_tensor: str = "stream"
    parameters_tensor: str = "sampling_parameters"
    output_tensor: str = "text_output"
    batched: bool = False
    length_fields: Annotated[tuple[LengthField, ...], Listed] = ()
    extra: Mapping[str, Any] = {}

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _check_extra(self.extra)
        for key in ("prompt_tensor", "output_tensor"):
            if not getattr(self, key):
                raise ValueError(f"{key} is empty: name the model's tensor")
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


class ExternalArm(SecurityConfig):
    """One external arm. Each `address` is a replica. `vocab_size` bounds the token ids of prompts."""

    elsewhere: ClassVar[Mapping[str, str]] = {
        "replicas": "has no meaning for an external arm: list the replicas in address",
        **dict.fromkeys(
            ("preset", "model", "engine", "shapes", "compile", "weight"),
            "describes a server that tailgate starts, and this one is external: remove it",
        ),
    }
    name: Name
    kind: Kind
    control: bool = False
    address: Annotated[tuple[str, ...], BeforeValidator(as_list, json_schema_input_type=str | list[str]), Listed]
    model_name: str
    vocab_size: int = Field(default=0, ge=0)
    telemetry: TelemetryConfig = TelemetryConfig()
    weight: ClassVar[int] = 1

    @model_validator(mode="after")
    def _arm_fits(self) -> Self:
        if not self.address:
            raise ValueError("address is empty: give one, or a list of replicas")
        for address in self.address:
            parse_address(address, self.kind)
            if self.address.count(address) > 1:
                raise ValueError(f'address "{address}" is there twice: each replica has an address of its own')
        if not self.model_name:
            raise ValueError("model_name is empty: give the name by which the server knows the model")
        if self.tls and not any(parse_address(address, self.kind).tls for address in self.address):
            raise ValueError(
                "tls_ca or a certificate is given but no address uses TLS: write https://, or leave it out"
            )
        if 0 < self.vocab_size < 4:
            raise ValueError(f"vocab_size is {self.vocab_size}: give the model's own, 4 or more")
        for key in ("log", "log_command"):
            count = len(getattr(self.telemetry, key))
            if count not in (0, 1, len(self.address)):
                raise ValueError(
                    f"telemetry.{key} has {count} and address {len(self.address)}: give one for each address, or one "
                    "for all"
                )
        if self.options.prompt == "token_ids" and self.options.tokenizer:
            raise ValueError(
                f'{self.kind}.tokenizer is set but {self.kind}.prompt is "token_ids", which needs none: drop one'
            )
        if self.options.prompt == "token_ids" and not self.vocab_size:
            raise ValueError(
                f'vocab_size is missing but {self.kind}.prompt is "token_ids": give the size of the model\'s vocabulary'
            )
        return self

    @property
    def options(self) -> OpenAiOptions | OipOptions:
        """The options of the arm's own protocol."""
        raise NotImplementedError

    @property
    def replicas(self) -> int:
        """How many addresses it has."""
        return len(self.address)

    @property
    def replica_names(self) -> tuple[str, ...]:
        """One name for each address."""
        return tuple(f"{self.name}-{index}" for index in range(self.replicas))

    def check(self, where: str) -> None:
        """The files, programs and the variable that the arm names are there and of use. Otherwise ConfigError."""
        super().check(where)
        try:
            self.telemetry.check()
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        path = self.options.tokenizer
        if path.startswith("/") and not Path(path).is_dir():
            raise ConfigError(f'{where}.{self.kind}.tokenizer is "{path}", no folder: give the model\'s, or its hub id')


class OpenAiArm(ExternalArm):
    """A server with the OpenAI-compatible HTTP API."""

    kind: Literal["openai"]
    openai: OpenAiOptions = OpenAiOptions()

    @property
    def options(self) -> OpenAiOptions:
        """How requests are written."""
        return self.openai


class OipArm(ExternalArm):
    """A server with the Open Inference Protocol."""

    kind: Literal["oip"]
    oip: OipOptions = OipOptions()

    @property
    def options(self) -> OipOptions:
        """Which tensors carry what."""
        return self.oip


AnyExternalArm = Annotated[OpenAiArm | OipArm, Field(discriminator="kind")]


def sampling_fields(
    options: OpenAiOptions | OipOptions, *, max_tokens: int, whole_length: bool, seed: int, greedy: bool = False
) -> dict[str, Any]:
    """What a request says of its answer. `whole_length` asks for exactly `max_tokens`, where the server can.

    It is greedy unless `extra` says otherwise, and with `greedy` whatever that says.
    """
    sampling: dict[str, Any] = {"temperature": 0, "seed": seed & 0x7FFFFFFF}
    length: dict[str, Any] = {}
    if whole_length:
        length = {name: True if name == "ignore_eos" else max_tokens for name in options.length_fields}
    return {**sampling, **length, **options.extra, **(sampling if greedy else {})}
