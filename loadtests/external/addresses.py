"""An arm that tailgate does not start: a model server known by its addresses and its protocol.

`kind = "openai"` is the OpenAI-compatible HTTP API with server-sent events (vLLM, SGLang, TGI, transformers, others);
`kind = "oip"` the Open Inference Protocol over gRPC (Triton, MLServer, KServe). Nothing here opens a connection.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from loadtests.external.client_security import OPEN, SecurityConfig, bearer_token
from loadtests.external.telemetry import SILENT, TelemetryConfig, telemetry_from_table, telemetry_table
from servers.address import host_port, joined
from servers.fields import ConfigError, build
from servers.security import check_variable

Kind = Literal["openai", "oip"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# Body fields that make servers answer with exactly as many tokens as the request says.
LengthField = Literal["ignore_eos", "min_tokens"]
_SCHEMES: dict[str, dict[str, bool]] = {
    "openai": {"http": False, "https": True, "unix": False},
    "oip": {"http": False, "grpc": False, "https": True, "grpcs": True},
}
# Keys of a query whose values are secrets, and headers that tailgate writes itself.
_SECRET_KEYS = ("key", "api-key", "api_key", "apikey", "token", "access_token", "sig", "secret", "password")
_OWN_HEADERS = ("host", "content-length", "content-type", "accept", "accept-encoding", "transfer-encoding")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a server listens. `path` has no slash at its end and is empty for gRPC; `query` comes after each path.
    `socket` is the file of a Unix socket; `host` is then localhost and `port` 0. `host` may have an IPv6 zone."""

    host: str
    port: int
    tls: bool = False
    path: str = ""
    query: str = ""
    socket: str = ""

    @property
    def target(self) -> str:
        """host:port, as a gRPC target writes it, or the socket's file."""
        return self.socket or joined(self.host, self.port)

    @property
    def host_header(self) -> str:
        """As a Host header says it: without a zone, and without the scheme's own port, which some gateways do not
        know."""
        if self.socket:
            return self.host
        return joined(self.host.partition("%")[0], self.port).removesuffix(":443" if self.tls else ":80")


def parse_address(text: str, kind: Kind) -> Address:
    """The parts of `http://host:port/v1?query`, `unix:///file.sock:/v1` or `grpc://host:port`. A Unix socket without a
    path has /v1. Raises ConfigError when the protocol has no such address."""
    schemes = _SCHEMES[kind]
    example = "http://host:8000/v1" if kind == "openai" else "grpc://host:8001"
    scheme, separator, rest = text.strip().partition("://")
    if not separator:
        if kind == "openai":
            raise ConfigError(f'address "{text}" has no scheme: write http://, https:// or unix://, such as {example}')
        scheme, rest = "grpc", text.strip()
    if scheme.lower() not in schemes:
        raise ConfigError(f'address "{text}" has the scheme "{scheme}": use {" or ".join(schemes)}, such as {example}')
    tls = schemes[scheme.lower()]
    rest, _, query = rest.partition("?")
    if set(rest + query) & set("# ") or not (rest + query).isprintable() or not (rest + query).isascii():
        raise ConfigError(f'address "{text}" has a fragment, a space or other odd characters: such as {example}')
    if secret := next((key for key in re.findall(r"(?:^|&)([^=&]+)", query) if key.lower() in _SECRET_KEYS), ""):
        raise ConfigError(
            f"an address carries {secret} in its query, and addresses are recorded: give it by openai.headers, or by "
            "token_env"
        )
    if kind == "oip" and query:
        raise ConfigError(f'address "{text}" has a query, and gRPC has none: such as {example}')
    if scheme.lower() == "unix":
        file, _, path = rest.partition(":")
        if not file.startswith("/"):
            raise ConfigError(f'address "{text}" names no file of a socket: such as unix:///run/server.sock')
        return Address(host="localhost", port=0, path=(path or "/v1").rstrip("/"), query=query, socket=file)
    authority, slash, path = rest.partition("/")
    _refuse_password(authority)
    if kind == "oip" and path:
        raise ConfigError(f'address "{text}" has the path "/{path}", and gRPC has none: such as {example}')
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+(?:%25[A-Za-z0-9._~-]+)?\]|[A-Za-z0-9._-]+)(?::(\d{1,5}))?", authority)
    if match is None:
        raise ConfigError(f'address "{text}" names no host: such as {example}')
    host, number = match[1].strip("[]").replace("%25", "%"), match[2]
    if number is None and kind == "oip":
        raise ConfigError(f'address "{text}" names no port: such as {example}')
    port = int(number) if number is not None else 443 if tls else 80
    if not 0 < port < 65_536:
        raise ConfigError(f'address "{text}" has the port {port}: give one from 1 to 65535')
    return Address(host=host, port=port, tls=tls, path=f"/{path}".rstrip("/") if slash else "", query=query)


def parse_target(text: str) -> Address:
    """The parts of `host:port` or `[v6]:port`, also behind a scheme of gRPC, for arms of tailgate itself.

    ConfigError for anything else.
    """
    scheme, separator, rest = text.strip().partition("://")
    if not separator:
        scheme, rest = "grpc", text.strip()
    elif scheme.lower() not in _SCHEMES["oip"]:
        raise ConfigError(f'target "{text}" has the scheme "{scheme}": use host:port, http:// or https://')
    _refuse_password(rest)
    otherwise = f'target "{text}" is not host:port with a port from 1 to 65535: try localhost:50051'
    host, port = host_port(rest.rstrip("/"), otherwise)
    return Address(host=host, port=port, tls=_SCHEMES["oip"][scheme.lower()])


def _refuse_password(text: str) -> None:
    """The address holds none: it is written to records and errors, which this one does not repeat it in."""
    if "@" in text:
        raise ConfigError('an address carries a user or password before "@": leave it out and use token_env')


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAiOptions:
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
    length_fields: tuple[LengthField, ...] = ()
    usage: Literal["end", "each", "off"] = "end"
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    headers: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_extra("openai.extra", self.extra)
        for name, value in self.headers.items():
            if name.lower() == "authorization":
                raise ConfigError("openai.headers.authorization is a secret: give the token by token_env")
            if name.lower() in _OWN_HEADERS:
                raise ConfigError(f"openai.headers.{name} is what tailgate itself must set: remove it")
            if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", name) or not _is_header_value(value):
                raise ConfigError(f'openai.headers."{name}" is no header: give a name and a value of printable ASCII')
            if value.startswith("$"):
                check_variable(value[1:], key=f"openai.headers.{name}")
        if self.endpoint == "chat" and self.prompt == "token_ids":
            raise ConfigError(
                'openai.prompt is "token_ids" but chat messages are text: use openai.endpoint = "completions", '
                'or openai.prompt = "text"'
            )
        for key in ("stream", "model", "prompt", "messages", "stream_options"):
            if key in self.extra:
                raise ConfigError(f"openai.extra.{key} is what tailgate itself must set: remove it")


@dataclass(frozen=True, slots=True, kw_only=True)
class OipOptions:
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
    length_fields: tuple[LengthField, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_extra("oip.extra", self.extra)
        for key in ("prompt_tensor", "output_tensor"):
            if not getattr(self, key):
                raise ConfigError(f"oip.{key} is empty: name the model's tensor")
        if not self.max_tokens_tensor and not self.parameters_tensor:
            raise ConfigError(
                "oip.max_tokens_tensor and oip.parameters_tensor are both empty, so the length of an answer cannot be "
                "asked for: name one of them"
            )
        if (self.length_fields or self.extra) and not self.parameters_tensor:
            raise ConfigError(
                "oip.length_fields and oip.extra travel in oip.parameters_tensor, which is empty: name it, or drop them"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalConfig:
    """One external arm. Each of `addresses` is a replica. `vocab_size` bounds the token ids of prompts."""

    kind: Kind
    addresses: tuple[str, ...]
    model_name: str
    vocab_size: int = 0
    security: SecurityConfig = OPEN
    telemetry: TelemetryConfig = SILENT
    openai: OpenAiOptions | None = None
    oip: OipOptions | None = None

    def __post_init__(self) -> None:
        if not self.addresses:
            raise ConfigError("address is empty: give one, or a list of replicas")
        for address in self.addresses:
            parse_address(address, self.kind)
            if self.addresses.count(address) > 1:
                raise ConfigError(f'address "{address}" is there twice: each replica has an address of its own')
        if not self.model_name:
            raise ConfigError("model_name is missing: give the name by which the server knows the model")
        if self.security.tls and not any(parse_address(address, self.kind).tls for address in self.addresses):
            raise ConfigError("tls_ and certificates are given but no address uses TLS: write https://, or remove them")
        if self.vocab_size and self.vocab_size < 4:
            raise ConfigError(f"vocab_size is {self.vocab_size}: give the model's own, 4 or more")
        self.telemetry.check_replicas(len(self.addresses))
        other = "oip" if self.kind == "openai" else "openai"
        if getattr(self, other) is not None:
            raise ConfigError(f'the table {other} is set but kind is "{self.kind}": use the table {self.kind}')
        if self.options.prompt == "token_ids" and self.options.tokenizer:
            raise ConfigError(
                f'{self.kind}.tokenizer is set but {self.kind}.prompt is "token_ids", which needs none: drop one'
            )
        if self.options.prompt == "token_ids" and not self.vocab_size:
            raise ConfigError(
                f'{self.kind}.prompt is "token_ids" but vocab_size is missing: give the size of the model\'s vocabulary'
            )

    @property
    def options(self) -> OpenAiOptions | OipOptions:
        """The options of the arm's own protocol, defaults where none are given."""
        if self.kind == "openai":
            return self.openai or OpenAiOptions()
        return self.oip or OipOptions()

    def check(self, arm: str) -> None:
        """The files, programs and the variable that the arm names are there and of use. Otherwise ConfigError."""
        try:
            self.security.check()
            secrets_of(self)
            self.telemetry.check()
        except ConfigError as error:
            raise ConfigError(f'arm "{arm}": {str(error).removeprefix("security.")}') from None
        path = self.options.tokenizer
        if path.startswith("/") and not Path(path).is_dir():
            raise ConfigError(
                f'arm "{arm}": {self.kind}.tokenizer "{path}" is no folder: give the model\'s folder or hub id'
            )


def check_extra(key: str, extra: Mapping[str, Any]) -> None:
    """The table can be sent as JSON. Raises ConfigError."""
    try:
        json.dumps(extra, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{key} cannot be sent as JSON ({error}): give text, numbers, true, lists or tables"
        ) from None


def _is_header_value(value: str) -> bool:
    return value.isascii() and value.isprintable() and value == value.strip()


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


def secrets_of(config: ExternalConfig) -> tuple[str, ...]:
    """The token and the header values of environment variables, which no record and no message may hold."""
    token = bearer_token(config.security)
    options = config.options
    headers = header_values(options) if isinstance(options, OpenAiOptions) else {}
    named = (headers[name] for name, value in getattr(options, "headers", {}).items() if value.startswith("$"))
    return tuple(secret for secret in (token, *named) if secret)


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


SECURITY_KEYS = tuple(item.name for item in fields(SecurityConfig))


def external_from_table(table: Mapping[str, Any], *, where: str) -> ExternalConfig:
    """The external arm that an arm's TOML table describes, apart from its name and whether it is the control."""
    rest = {"model_name": "", **{key: value for key, value in table.items() if key not in SECURITY_KEYS}}
    address = rest.pop("address", ())
    rest["addresses"] = [address] if isinstance(address, str) else address
    if not isinstance(rest["addresses"], (list, tuple)) or not all(isinstance(a, str) for a in rest["addresses"]):
        raise ConfigError(f"{where}.address is {address!r}: give a string, or a list of them")
    try:
        for kind in KINDS:
            if kind in rest:
                rest[kind] = _options(kind, rest[kind], f"{where}.{kind}")
        if "telemetry" in rest:
            rest["telemetry"] = telemetry_from_table(rest["telemetry"], where=f"{where}.telemetry")
        rest["security"] = build(SecurityConfig, {k: table[k] for k in SECURITY_KEYS if k in table}, where=where)
        return build(ExternalConfig, rest, where=where)
    except ConfigError as error:
        text = str(error).removeprefix("security.")
        raise ConfigError(text if text.startswith(where) else f"{where}.{text}") from None


def _options(kind: str, table: Any, where: str) -> OpenAiOptions | OipOptions:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} is {table!r}: give a table")
    return build(OpenAiOptions, table, where=where) if kind == "openai" else build(OipOptions, table, where=where)


def external_table(external: ExternalConfig) -> dict[str, Any]:
    """The table that `external_from_table` reads back to an equal arm."""
    table = {key: value for key, value in asdict(external).items() if value is not None}
    addresses = table.pop("addresses")
    security = {key: value for key, value in table.pop("security").items() if value}
    del table["telemetry"]
    telemetry = {"telemetry": told} if (told := telemetry_table(external.telemetry)) else {}
    return {"address": addresses[0] if len(addresses) == 1 else list(addresses), **table, **security, **telemetry}
