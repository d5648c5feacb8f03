"""The header block of a gRPC request, as literals that need no compression state (RFC 7541, 6.2.2)."""

from __future__ import annotations

from collections.abc import Sequence

from hpack.hpack import encode_integer

Metadata = Sequence[tuple[str, str]]


def literal(name: bytes, value: bytes, *, secret: bool = False) -> bytes:
    """One field. Equal fields are equal bytes; a secret one is marked as never indexed (6.2.3), for proxies too."""
    return (b"\x10" if secret else b"\x00") + _length(len(name)) + name + _length(len(value)) + value


def encode_metadata(metadata: Metadata) -> bytes:
    """The header block fragment for `metadata`; ValueError for a key or value that HTTP/2 cannot carry."""
    out = []
    for key, value in metadata:
        if not key or key != key.lower() or not key.isascii() or key[0] == ":":
            raise ValueError(f'metadata key "{key}" is not usable: lower-case ASCII letters, digits and "-" only')
        if not value.isascii() or not value.isprintable():
            raise ValueError(f'metadata "{key}" has the value {value!r}: printable ASCII only')
        out.append(literal(key.encode("ascii"), value.encode("ascii")))
    return b"".join(out)


def request_prefix(path: str, authority: str, *, tls: bool, token: str) -> bytes:
    """The fields that all requests of a connection begin with; `token` is a bearer token, "" for none."""
    return (
        # From the static table: ":method: POST", then ":scheme: http" or "https".
        (b"\x83\x87" if tls else b"\x83\x86")
        + literal(b":path", path.encode("ascii"))
        + literal(b":authority", authority.encode("ascii"))
        + literal(b"te", b"trailers")
        + literal(b"content-type", b"application/grpc")
        + literal(b"user-agent", b"tailgate")
        + (literal(b"authorization", b"Bearer " + token.encode("ascii"), secret=True) if token else b"")
    )


def grpc_timeout(left_ns: int) -> bytes:
    """The field with the time that the server has, in ms, or in seconds where eight digits hold no more."""
    left_ms = max(1, left_ns // 1_000_000)
    text = b"%dm" % left_ms if left_ms < 10**8 else b"%dS" % min(left_ms // 1000, 10**8 - 1)
    return b"%b%c%b" % (_GRPC_TIMEOUT, len(text), text)


def _length(value: int) -> bytes:
    return bytes((value,)) if value < 127 else bytes(encode_integer(value, 7))


_GRPC_TIMEOUT = b"\x00" + _length(len(b"grpc-timeout")) + b"grpc-timeout"
