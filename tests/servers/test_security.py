"""Certificates and tokens as servers need them."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from servers.fields import ConfigError
from servers.security import ServerTls, is_bearer, server_tls, token_from_file, token_from_variable
from tests.fakes.certificates import Certificates, make_certificates

SECRET = "s3cret-T0ken"


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("pem"))


def test_nothing_named_is_no_tls_and_a_pair_is(pem: Certificates) -> None:
    assert server_tls("", "") is None
    tls = server_tls(pem.certificate, pem.key, pem.ca)
    assert tls == ServerTls(certificate=pem.certificate, key=pem.key, client_ca=pem.ca)


def test_what_is_of_no_use_is_refused_by_name(pem: Certificates, tmp_path: Path) -> None:
    locked = tmp_path / "locked.pem"
    key = serialization.load_pem_private_key(Path(pem.key).read_bytes(), None)
    password = serialization.BestAvailableEncryption(b"a password")
    locked.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, password))
    for files, text in (
        ((pem.certificate, ""), "a TLS key is missing beside the certificate"),
        (("", pem.key), "a TLS certificate is missing beside the key"),
        (("", "", pem.ca), "missing"),
        ((str(tmp_path / "no.pem"), pem.key), 'TLS certificate ".*no.pem" cannot be read'),
        ((pem.certificate, str(tmp_path / "no.pem")), 'TLS key ".*no.pem" cannot be read'),
        ((pem.certificate, pem.client_key), "does not belong to certificate"),
        ((pem.key, pem.key), "cannot be used"),
        ((pem.certificate, str(locked)), "cannot be used"),
        ((pem.certificate, pem.key, pem.key), "holds no certificate"),
    ):
        with pytest.raises(ConfigError, match=text) as caught:
            server_tls(*files)
        assert "\n" not in str(caught.value)


def test_a_token_comes_from_a_variable_or_a_file_and_an_error_never_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", f"{SECRET}\n")
    assert token_from_variable("TOKEN", key="--token-env") == SECRET
    path = tmp_path / "token"
    path.write_bytes(b"\xff\xfe")
    for name, value, text in (
        ("TOKEN", "", "--token-env names the environment variable TOKEN, which is not set"),
        ("TOKEN", f"{SECRET} {SECRET}", "the environment variable TOKEN holds no bearer token"),
        (SECRET, "", "--token-env is not the name of an environment variable"),
    ):
        monkeypatch.setenv("TOKEN", value)
        with pytest.raises(ConfigError, match=text) as caught:
            token_from_variable(name, key="--token-env")
        assert SECRET not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        token_from_file(str(path), key="--token-file")


@pytest.mark.parametrize(
    ("header", "right"),
    [
        (f"Bearer {SECRET}", True),
        (f"bearer  {SECRET}", True),
        (f"Bearer {SECRET}".encode(), True),
        (f"Bearer {SECRET}x", False),
        (f"Basic {SECRET}", False),
        (SECRET, False),
        ("Bearer", False),
        ("", False),
        (None, False),
        ("Bearer \u00e9", False),
    ],
)
def test_only_the_right_token_is_right(header: str | bytes | None, right: bool) -> None:
    assert is_bearer(header, SECRET) is right
