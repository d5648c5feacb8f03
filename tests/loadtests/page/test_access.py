import pytest

from loadtests.page.access import TOKEN_VARIABLE, Access, is_loopback, page_token
from servers.fields import ConfigError

TOKEN = "0123456789abcdef-Z"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost", "LOCALHOST"])
def test_this_machine_alone_needs_no_token(host: str) -> None:
    assert is_loopback(host)
    assert page_token(host, environment={TOKEN_VARIABLE: "x"}) == ("", False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.3", "bench-host"])
def test_elsewhere_a_token_is_taken_or_made(host: str) -> None:
    assert page_token(host, environment={TOKEN_VARIABLE: f" {TOKEN} "}) == (TOKEN, False)
    made, is_new = page_token(host, environment={})
    assert is_new
    assert len(made) == 32
    assert made != page_token(host, environment={})[0]


@pytest.mark.parametrize(("token", "why"), [("short", "holds 5 characters"), ("a" * 16 + ";x", "other characters")])
def test_a_token_that_protects_nothing_or_that_no_cookie_holds_is_refused(token: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        page_token("0.0.0.0", environment={TOKEN_VARIABLE: token})
    assert token not in str(refused.value)


def test_only_names_of_this_machine_are_answered_without_a_token() -> None:
    access = Access("", port=80)
    for host in ("127.0.0.1:8080", "localhost", "LOCALHOST:1", "[::1]:9", "[::1]"):
        assert access.knows_host(host), host
    for host in (None, "", "evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::2]:80", "localhost.evil"):
        assert not access.knows_host(host), host
    assert Access(TOKEN, port=80).knows_host("bench-host:80")


def test_the_token_comes_as_a_cookie_or_as_a_bearer() -> None:
    access = Access(TOKEN, port=8080)
    cookie = access.set_cookie()
    assert {"HttpOnly", "SameSite=Strict"} <= set(cookie.split("; "))
    assert access.allows(cookie=f"other=1; {cookie.partition(';')[0]}", authorization=None)
    assert access.allows(cookie=None, authorization=f"Bearer {TOKEN}")
    assert not access.allows(cookie=None, authorization=None)
    assert not access.allows(cookie=f"tailgate_page_8080={TOKEN}x", authorization=f"Basic {TOKEN}")
    assert not access.allows(cookie=Access(TOKEN, port=8081).set_cookie(), authorization=None)
    assert not access.allows(cookie="tailgate_page_8080=é", authorization="Bearer ü")
    assert not Access("", port=1).is_token("")
