"""An arm that tailgate does not start: a model server known by its addresses and its protocol.

`kind = "openai"` is the OpenAI-compatible HTTP API with server-sent events (vLLM, SGLang, TGI, transformers, others);
`kind = "oip"` the Open Inference Protocol over gRPC (Triton, MLServer, KServe). Nothing here opens a connection.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from loadtests.external.addresses import KINDS, Kind, parse_address
from loadtests.external.client_security import SecurityConfig, bearer_token
from loadtests.external.telemetry import TelemetryConfig, as_list
from servers.complaint import ConfigError
from servers.config import Name
from servers.fields import Listed, Settings
from servers.security import check_variable

# Body fields that make servers answer with exactly as many tokens as the request says.
LengthField = Literal["ignore_eos", "min_tokens"]
# Headers that tailgate writes itself.
_OWN_HEADERS = ("host", "content-length", "content-type", "accept", "accept-encoding", "transfer-encoding")
EXTERNAL_KEYS = ("address", "model_name", "vocab_size", "telemetry", *SecurityConfig.model_fields, *KINDS)


def _check_extra(extra: Mapping[str, Any]) -> None:
    try:
        json.dumps(extra, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"extra cannot be sent as JSON ({error}): give text, numbers, true, lists or tables") from None


def _is_header_value(value: str) -> bool:
    return value.isascii() and value.isprintable() and value == value.strip()


class OpenAiOptions(Settings):
    """How requests to an OpenAI-compatible server are written.

    `prompt` "token_ids" sends numbers, exactly as many as planned; vLLM's and SGLang's completions take them. "text"
    sends words; with `tokenizer` (the model's folder or hub id) exactly as many tokens as planned, the chat template
    included, without it about as many. `length_fields` are the body fields by which the server does not end an answer
    early: ignore_eos, min_tokens, or none. `usage` asks for a token count at the end of each stream, with
    each chunk (vLLM can), or not at all. `extra` is added to every request's body as it is, tables and lists included.
    `headers` go with every request; a value that begins with $ is the name of an environment variable.
    """

    endpoint: Literal["completions", "chat"] = "completions"
    prompt: Literal["text", "token_ids"] = "text"
    tokenizer: str = ""
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    length_fields: Annotated[tuple[LengthField, ...], Listed] = ()
    usage: Literal["end", "each", "off"] = "end"
    extra: Mapping[str, Any] = {}
    headers: Mapping[str, str] = {}

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _check_extra(self.extra)
        for name, value in self.headers.items():
            if name.lower() == "authorization":
                raise ValueError("headers.authorization is a secret: give the token by token_env")
            if name.lower() in _OWN_HEADERS:
                raise ValueError(f"headers.{name} is what tailgate itself must set: remove it")
            if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", name) or not _is_header_value(value):
                raise ValueError(f'headers."{name}" is no header: give a name and a value of printable ASCII')
            if value.startswith("$"):
                check_variable(value[1:], key=f"headers.{name}")
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

    `stream`: "triton" calls ModelStreamInfer as Triton defines it, "plain" as MLServer does (the stream holds bare
    inference responses), "off" calls ModelInfer, whose first token comes with the last. Names that are empty are not
    sent. `parameters_tensor` takes JSON with max_tokens, `length_fields` and `extra`. `batched` puts a batch dimension
    of 1 before every shape. `prompt` "token_ids" sends numbers of type `ids_datatype`, as TensorRT-LLM takes them.
    """

    stream: Literal["triton", "plain", "off"] = "triton"
    prompt: Literal["text", "token_ids"] = "text"
    tokenizer: str = ""
    prompt_tensor: str = "text_input"
    ids_datatype: Literal["INT32", "INT64", "UINT32"] = "INT32"
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
            secrets_of(self)
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


def header_values(options: OpenAiOptions) -> dict[str, str]:
    """The headers of `options` with the values of their environment variables. Raises ConfigError, which never holds a
    value."""
    values = {}
    for name, value in options.headers.items():
        key = f"openai.headers.{name}"
        found = os.environ.get(value[1:], "") if value.startswith("$") else value
        if not found:
            raise ConfigError(f"{key} names the environment variable {value[1:]}, which is not set: export it")
        if not _is_header_value(found):
            raise ConfigError(f"{key} names the environment variable {value[1:]}, whose value is not printable ASCII")
        values[name] = found
    return values


def secrets_of(arm: ExternalArm) -> tuple[str, ...]:
    """The token and the header values of environment variables, which no record and no message may hold."""
    options = arm.options
    headers = header_values(options) if isinstance(options, OpenAiOptions) else {}
    named = (headers[name] for name, value in getattr(options, "headers", {}).items() if value.startswith("$"))
    return tuple(secret for secret in (bearer_token(arm), *named) if secret)


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
