"""Addresses as text, read and written."""

from __future__ import annotations

import pytest

from servers.address import host_port, joined
from servers.fields import ConfigError


@pytest.mark.parametrize("address", [("localhost", 1), ("10.0.0.5", 65535), ("::1", 50051), ("arm.example", 443)])
def test_what_is_joined_is_read_back(address: tuple[str, int]) -> None:
    assert host_port(joined(*address)) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        "host:",
        ":1",
        "host:0",
        "host:65536",
        "host:port",
        "host:٣",
        "a b:1",
        "a/b:1",
        "hö:1",
        "host:" + "1" * 5000,
    ],
)
def test_anything_else_is_refused_in_the_words_of_the_caller(text: str) -> None:
    with pytest.raises(ConfigError, match="is not host:port"):
        host_port(text)
    with pytest.raises(ConfigError, match=r"^--admin is odd$"):
        host_port(text, "--admin is odd")


def test_port_0_is_read_where_it_means_a_free_one() -> None:
    assert host_port("localhost:0", lowest=0) == ("localhost", 0)
