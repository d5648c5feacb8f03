"""The settings that say whom to trust and which token to show."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path

import pytest

from loadtests.external.client_security import SecurityConfig, bearer_token, server_name
from servers.fields import ConfigError
from tests.fakes.certificates import Certificates, make_certificates

SECRET = "s3cret-T0ken"


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("pem"))


def test_the_name_to_check_is_the_configured_one_or_the_host() -> None:
    assert server_name(SecurityConfig(), "arm.example") == "arm.example"
    assert server_name(SecurityConfig(tls_server_name="other.example"), "10.0.0.1") == "other.example"
    assert server_name(SecurityConfig(), "fe80::1%eth0") == "fe80::1"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"tls_key": "k.pem"}, "security.tls_key is set alone"),
        ({"tls_certificate": "c.pem"}, "security.tls_certificate is set alone"),
        ({"token_env": "A", "token_file": "b"}, "are both set: keep one"),
        ({"token_env": SECRET}, "security.token_env is not the name of an environment variable"),
    ],
)
def test_settings_that_contradict_are_refused(settings: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        SecurityConfig(**settings)
    assert SECRET not in str(caught.value)


def test_files_that_are_missing_or_hold_something_else_are_named(pem: Certificates, tmp_path: Path) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_text("no certificate")
    for security, text in (
        (SecurityConfig(tls_ca=str(tmp_path / "none.pem")), "none.pem.* cannot be read"),
        (SecurityConfig(tls_ca=str(junk)), "junk.pem.* holds no certificate"),
        (SecurityConfig(tls_certificate=str(junk), tls_key=str(junk)), "junk.pem"),
        (SecurityConfig(tls_certificate=pem.certificate, tls_key=pem.client_key), "does not belong to"),
        (SecurityConfig(token_file=str(tmp_path / "none.txt")), "none.txt.* cannot be read"),
    ):
        with pytest.raises(ConfigError, match=text) as caught:
            security.check()
        assert "\n" not in str(caught.value)


def test_a_token_is_read_and_never_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f" {SECRET}\n")
    monkeypatch.setenv("TAILGATE_TEST_TOKEN", SECRET)
    by_variable, by_file = SecurityConfig(token_env="TAILGATE_TEST_TOKEN"), SecurityConfig(token_file=str(file))
    assert bearer_token(by_variable) == bearer_token(by_file) == SECRET
    assert bearer_token(SecurityConfig()) == ""
    for security in (by_variable, by_file):
        assert SECRET not in repr(security) + repr(asdict(security))
    assert not any("secret" in item.name or item.name == "token" for item in fields(SecurityConfig))


@pytest.mark.parametrize("value", ["", "two words", f"{SECRET}\nX-Injected: 1", "pass\u00e9"])
def test_a_token_that_no_header_can_carry_is_refused_without_being_shown(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("TAILGATE_TEST_TOKEN", value)
    with pytest.raises(ConfigError, match="TAILGATE_TEST_TOKEN") as caught:
        bearer_token(SecurityConfig(token_env="TAILGATE_TEST_TOKEN"))
    assert not value or value not in str(caught.value)
